"""Who serves, and who should serve a call: prefix affinity first, then the least loaded worker.

The worker table alone says who serves (PEARL section 4.4.1). This module keeps, for each process in the table, how
much it has to do, which trajectories' prefixes it holds, and whether it can be trusted at the moment.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pearl_state.lifecycle import Lifecycle
from pearl_state.roles import Role, Zone
from pearl_state.table import WorkerTable
from pearl_state.trajectory import TrajectoryId
from pearl_state.worker import Worker, WorkerId

_MANY: Final = 64
_LOOKED_AT: Final = 24
"""Beyond `_MANY` workers of a role only so many of them are compared for a call, in turn: the least loaded of 24 is
hardly worse than that of all, and a choice costs the same however large the cluster is."""
_FEW_CALLS: Final = 16
_AVERAGED_CALLS: Final = 256
_KEEPS_CACHE: Final = frozenset({Lifecycle.ACTIVE, Lifecycle.DRAINING, Lifecycle.PENDING_WEIGHTS})
"""A process that passes through these only was parked at most: what its prefix cache holds is still there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLimits:
    """When a worker is passed over."""

    affinity_slack: float = 1.0
    """A trajectory stays where its prefix is while that worker has at most this many more requests than the least
    loaded one, were all of the prefix of use there …"""
    affinity_slack_ratio: float = 0.1
    """… or this fraction more. Both are scaled by the part of a prefix that caches are found to hold (`Reuse`)."""
    capacity_sequences: int = 0
    """Requests that one worker holds at a time; 0 means unbounded. A full worker comes last, it is not refused."""
    capacity_tokens: int = 0
    """Context tokens whose KV one worker holds; 0 means unbounded."""
    prefix_reuse: float | None = None
    """Part of a conversation's last context that is of use where it was computed; None: as calls show."""
    failures_to_block: int = 3
    """Failures in a row after which a worker gets nothing for `probe_s`, then one request that decides."""
    probe_s: float = 5.0


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What one worker has to do now."""

    running: int
    """Requests in decode."""
    waiting: int
    """Requests that have no token yet."""
    tokens: int
    """Context tokens of its requests."""
    cached_tokens: int
    """Context tokens of the trajectories whose prefix it served last: what would be prefilled again elsewhere."""


@dataclass(slots=True, eq=False)
class Reuse:
    """What a prefix is worth: of the tokens that workers should hold of a trajectory, the part that they did.

    A prompt that rewrites what came before repeats little of it, and a cache may have dropped it. Then there is less to
    stay for. A moving average over calls, by tokens; all is of use until a few calls showed something else.
    """

    fixed: float | None = None
    """Not measured but given."""
    _held: float = 0.0
    _found: float = 0.0
    _calls: int = 0

    @property
    def fraction(self) -> float:
        """In [0, 1]."""
        if self.fixed is not None:
            return self.fixed
        return min(1.0, self._found / self._held) if self._calls >= _FEW_CALLS else 1.0

    def observe(self, held_tokens: int, cached_tokens: int) -> None:
        """A worker that should hold `held_tokens` of a prompt had `cached_tokens` of it. Nothing held says nothing."""
        if held_tokens > 0:
            self._calls += 1
            self._held += held_tokens - self._held / _AVERAGED_CALLS
            self._found += cached_tokens - self._found / _AVERAGED_CALLS


@dataclass(slots=True, eq=False)
class Slot:
    """One process of the table in one role, for as long as its prefix cache lives."""

    worker: Worker
    share: float
    """1 / GPUs: by which its load is scaled."""
    version: int
    """Newest weight version that its row reports or its tokens showed."""
    running: int = 0
    waiting: int = 0
    tokens: int = 0
    queued_tokens: int = 0
    """Prompt tokens that it must still compute."""
    homes: dict[TrajectoryId, int] = field(default_factory=dict[TrajectoryId, int])
    """Trajectories whose prefix it holds → how many tokens of it."""
    home_tokens: int = 0
    fenced: bool = False
    """It broke its contract or is gone: nothing more for this process, whatever the table says."""
    closed: bool = False
    """Its cache or process is gone; requests that were on it cannot come back."""
    failures: int = 0
    blocked_until_s: float = 0.0
    probing: bool = False

    @property
    def load(self) -> float:
        """Requests per GPU."""
        return (self.running + self.waiting) * self.share

    def adopt(self, trajectory: TrajectoryId, context_tokens: int) -> None:
        """Note that this process will hold the first `context_tokens` tokens of the trajectory."""
        self.home_tokens += context_tokens - self.homes.get(trajectory, 0)
        self.homes[trajectory] = context_tokens

    def disown(self, trajectory: TrajectoryId) -> None:
        """Forget a trajectory's prefix."""
        self.home_tokens -= self.homes.pop(trajectory, 0)

    def renew(self, version: int) -> None:
        """It holds weights of `version` now; what its prefix cache held was of older ones and is void."""
        if version > self.version:
            self.version = version
            self.homes = dict.fromkeys(self.homes, 0)
            self.home_tokens = 0

    def succeeded(self) -> None:
        """A request ended well: trust this worker again."""
        self.failures = 0
        self.blocked_until_s = 0.0

    def failed(self, now_s: float, limits: ServingLimits) -> None:
        """A request failed on this worker."""
        self.failures += 1
        if self.failures >= limits.failures_to_block:
            self.blocked_until_s = now_s + limits.probe_s


class Route(NamedTuple):
    """Where one attempt runs: on `decode` alone (a colocated worker), or prefilled on `prefill` before."""

    prefill: Slot | None
    decode: Slot

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The one or two workers."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


@dataclass(slots=True, eq=False)
class Home:
    """Where a trajectory was served last, and what must hold for its next tokens."""

    trajectory: TrajectoryId
    prefill: Slot | None = None
    decode: Slot | None = None
    version: int = -1
    """Weight version of its newest token: versions never go back within a trajectory."""
    tokens: int = 0
    """Context at its newest request: what a cache holds of it at best."""

    def move(self, route: Route, context_tokens: int) -> None:
        """Note that the prefix will be where `route` says, and nowhere else."""
        prefill, decode = route
        self.tokens = context_tokens
        if self.prefill is not prefill:
            if self.prefill is not None:
                self.prefill.disown(self.trajectory)
            self.prefill = prefill
        if self.decode is not decode:
            if self.decode is not None:
                self.decode.disown(self.trajectory)
            self.decode = decode
        if prefill is not None:
            prefill.adopt(self.trajectory, context_tokens)
        decode.adopt(self.trajectory, context_tokens)


class ServingSet:
    """The workers that may be given requests, by role, and the choice among them."""

    def __init__(self, limits: ServingLimits) -> None:
        self._limits = limits
        self.reuse = Reuse(limits.prefix_reuse)
        self._slots: dict[WorkerId, Slot] = {}
        self.table = WorkerTable()
        self.colocated: list[Slot] = []
        self.prefill: list[Slot] = []
        self.decode: list[Slot] = []
        self._borrowed = False
        self._members: frozenset[Slot] = frozenset()
        """Who is in one of the three lists."""
        self._large = False
        """Whether one of them is too long to compare all for each call."""
        self._next = 0

    # ---- following the table ----------------------------------------------------------------------------------------

    def apply(self, table: WorkerTable) -> list[Slot]:
        """Follow the table. Returns the slots whose process or cache went away with requests still on them."""
        self.table = table
        closed: list[Slot] = []
        for id_ in self._slots.keys() - table.rows.keys():
            self._close(id_, closed)
        serving: dict[Role, list[Slot]] = {Role.COLOCATED: [], Role.PREFILL: [], Role.DECODE: []}
        for id_, row in table.rows.items():
            if row.role is Role.TRAINING:
                continue
            slot = self._slots.get(id_)
            if slot is None or slot.worker is not row:
                slot = self._follow(id_, row, closed)
            if slot is not None and row.lifecycle is Lifecycle.ACTIVE and slot.version >= table.floor_version:
                serving[row.role].append(slot)
                self._borrowed = self._borrowed or row.zone is Zone.OVERLAP
        self.colocated = serving[Role.COLOCATED]
        self.prefill, self.decode = serving[Role.PREFILL], serving[Role.DECODE]
        self._members = frozenset((*self.colocated, *self.prefill, *self.decode))
        self._large = max(len(self.colocated), len(self.prefill), len(self.decode)) > _MANY
        return closed

    def _follow(self, id_: WorkerId, row: Worker, closed: list[Slot]) -> Slot | None:
        """The slot of a row, renewed where the process, its role or its cache is another one."""
        slot = self._slots.get(id_)
        if slot is not None:
            old = slot.worker
            if (
                row.lifecycle in _KEEPS_CACHE
                and row.incarnation == old.incarnation
                and row.role is old.role
                and row.gpus == old.gpus
            ):
                slot.worker = row
                if row.weight_version is not None:
                    slot.renew(row.weight_version)
                return slot
            self._close(id_, closed)
        if row.lifecycle is not Lifecycle.ACTIVE:
            return None
        version = -1 if row.weight_version is None else row.weight_version
        slot = self._slots[id_] = Slot(worker=row, share=1.0 / len(row.gpus), version=version)
        return slot

    def _close(self, id_: WorkerId, closed: list[Slot]) -> None:
        slot = self._slots.pop(id_)
        slot.closed = True
        slot.homes.clear()
        slot.home_tokens = 0
        if slot.running or slot.waiting:
            closed.append(slot)

    def requests(self) -> dict[WorkerId, float]:
        """How many requests every known worker holds now."""
        return {id_: float(slot.running + slot.waiting) for id_, slot in self._slots.items()}

    def loads(self) -> dict[WorkerId, WorkerLoad]:
        """What every known worker has to do now."""
        return {
            id_: WorkerLoad(slot.running, slot.waiting, slot.tokens, slot.home_tokens)
            for id_, slot in self._slots.items()
        }

    def kv_used(self) -> float | None:
        """Part of the KV memory of those who decode that requests under way fill; None where its size is not known."""
        holders = (*self.colocated, *self.decode)
        room = self._limits.capacity_tokens * len(holders)
        return sum(slot.tokens for slot in holders) / room if room else None

    def serves(self, slot: Slot) -> bool:
        """Whether this process is given requests now."""
        return slot in self._members

    def take_borrowed(self) -> bool:
        """Whether a worker on training GPUs served since the last call of this method."""
        borrowed = self._borrowed
        serving = (*self.colocated, *self.prefill, *self.decode)
        self._borrowed = any(slot.worker.zone is Zone.OVERLAP for slot in serving)
        return borrowed

    def next_probe_s(self, now_s: float) -> float:
        """When the next blocked worker may be tried again; infinity where none is blocked."""
        serving = (*self.colocated, *self.prefill, *self.decode)
        return min((slot.blocked_until_s for slot in serving if slot.blocked_until_s > now_s), default=math.inf)

    def describe(self, version: int) -> str:
        """In words: who is there and why it may not serve a call that needs weights of `version` or newer."""
        states = Counter(
            f"{row.role} {row.lifecycle}" for row in self.table.rows.values() if row.role is not Role.TRAINING
        )
        serving = (*self.colocated, *self.prefill, *self.decode)
        fenced = sum(slot.fenced for slot in serving)
        old = sum(slot.version < version for slot in serving)
        blocked = sum(slot.blocked_until_s > 0 for slot in serving)
        rows = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "the table is empty"
        return f"{rows}; of those serving {fenced} fenced, {blocked} blocked, {old} older than version {version}"

    # ---- choosing ---------------------------------------------------------------------------------------------------

    def choose(self, home: Home, context_tokens: int, now_s: float, avoid: tuple[Slot, ...] = ()) -> Route | None:
        """The best worker or pair for a call with this home, None where nobody may serve it now."""
        if self._large:
            some = [self._some(slots, home) for slots in (self.colocated, self.prefill, self.decode)]
            route = self._choose(some, home, context_tokens, now_s, avoid)
            if route is not None:
                return route
        return self._choose((self.colocated, self.prefill, self.decode), home, context_tokens, now_s, avoid)

    def _some(self, slots: Sequence[Slot], home: Home) -> Sequence[Slot]:
        """The next few in turn, and the home."""
        if len(slots) <= _MANY:
            return slots
        start = self._next % len(slots)
        self._next += _LOOKED_AT
        chosen = [*slots[start : start + _LOOKED_AT], *slots[: max(0, start + _LOOKED_AT - len(slots))]]
        role = slots[0].worker.role
        for slot in (home.prefill, home.decode):
            if slot is not None and slot.worker.role is role and slot in self._members and slot not in chosen:
                chosen.append(slot)
        return chosen

    def _choose(
        self,
        slots: Sequence[Sequence[Slot]],
        home: Home,
        context_tokens: int,
        now_s: float,
        avoid: tuple[Slot, ...],
    ) -> Route | None:
        """The choice among `slots`: colocated, prefill and decode workers."""
        version = home.version
        colocated = self._best(slots[0], home.decode, context_tokens, version, now_s, avoid)
        pair = self._best_pair(slots[1], slots[2], home, context_tokens, now_s, avoid) if slots[2] else None
        if colocated is None or pair is None:
            return pair if colocated is None else Route(None, colocated)
        # Both modes serve at once only in the middle of a transition.
        if (home.decode is colocated) != (home.decode is pair.decode):
            return pair if home.decode is pair.decode else Route(None, colocated)
        return Route(None, colocated) if colocated.load <= pair.decode.load else pair

    def _usable(self, slot: Slot, version: int, now_s: float, avoid: tuple[Slot, ...]) -> bool:
        if slot.fenced or slot.version < version or slot in avoid:
            return False
        return slot.blocked_until_s == 0.0 or (now_s >= slot.blocked_until_s and not slot.probing)

    def _full(self, slot: Slot, context_tokens: int) -> bool:
        sequences, tokens = self._limits.capacity_sequences, self._limits.capacity_tokens
        return bool(
            (sequences and slot.running + slot.waiting >= sequences)
            or (tokens and slot.tokens + context_tokens > tokens)
        )

    def _best(
        self,
        slots: Iterable[Slot],
        home: Slot | None,
        context_tokens: int,
        version: int,
        now_s: float,
        avoid: tuple[Slot, ...],
    ) -> Slot | None:
        """The home where it is not much busier than the least loaded, else the least loaded."""
        bounded = self._limits.capacity_sequences or self._limits.capacity_tokens
        best: Slot | None = None
        best_key = (True, math.inf, 0)
        home_usable = home_full = False
        for slot in slots:
            # `_usable`, written out: this is asked of every worker for every call.
            if slot.fenced or slot.version < version or (avoid and slot in avoid):
                continue
            if slot.blocked_until_s and (now_s < slot.blocked_until_s or slot.probing):
                continue
            full = bounded != 0 and self._full(slot, context_tokens)
            if slot is home:
                home_usable, home_full = True, full
            key = (full, (slot.running + slot.waiting) * slot.share, len(slot.homes))
            if best is None or key < best_key:
                best, best_key = slot, key
        if best is None or home is None or not home_usable or (home_full and not best_key[0]):
            return best
        limits = self._limits
        slack = max(limits.affinity_slack * home.share, limits.affinity_slack_ratio * best_key[1])
        slack *= self.reuse.fraction
        return home if home.load <= best_key[1] + slack else best

    def _best_pair(
        self,
        prefill: Sequence[Slot],
        decode: Sequence[Slot],
        home: Home,
        context_tokens: int,
        now_s: float,
        avoid: tuple[Slot, ...],
    ) -> Route | None:
        """A pair of which both serve; the decode worker's weights are at least as new as the prefill worker's,
        because the prefill worker draws the first token.
        """
        decodable = [slot.version for slot in decode if self._usable(slot, home.version, now_s, avoid)]
        if not decodable:
            return None
        newest, reuse = max(decodable), self.reuse.fraction
        chosen: Slot | None = None
        chosen_key = (math.inf, math.inf, 0)
        for slot in prefill:
            if slot.version > newest or not self._usable(slot, home.version, now_s, avoid):
                continue
            # Waiting behind others' tokens and computing a cached prefix again cost the same: tokens.
            cached = reuse * min(slot.homes.get(home.trajectory, 0), context_tokens)
            key = ((slot.queued_tokens + context_tokens - cached) * slot.share, slot.load, slot.home_tokens)
            if key < chosen_key:
                chosen, chosen_key = slot, key
        if chosen is None:
            return None
        version = max(home.version, chosen.version)
        decoding = self._best(decode, home.decode, context_tokens, version, now_s, avoid)
        return None if decoding is None else Route(chosen, decoding)
