"""The unified GPU-worker-role table M = {w ↦ (G_w, R_w, a_w)} of PEARL eq. (4), with its named invariants.

The table is an immutable value. Every change goes through `WorkerTable.update`, which checks the legal transitions of
`lifecycle` and the invariants below on what changed, and returns the next version; all rows change or none does.

Invariants (the names that `InvariantError.invariant` carries):

- `fixed_binding`: a slot's GPUs never change while it is bound; slots are never renumbered; a training worker never
  becomes a rollout worker, nor the reverse.
- `one_owner_per_gpu`: at most one worker holds a GPU's memory. Hence training never runs on a GPU that is lent out.
- `paired_roles`: active prefill workers exist if and only if active decode workers do, at every instant.
- `admitted_up_to_date`: a rollout worker becomes active only with the target weight version or, while nobody serves
  with that yet, with one no older than any that serves: admission never makes what serves older, and who loads as long
  as training takes for an update is not kept out for ever.
- `no_stale_serving`: an active rollout worker's version is at least `floor_version`.
- `monotonic_versions`: target, floor and each process's reported version never go back.
- `incarnation_grows`: each start of a process in a slot has a higher incarnation than all before it.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from pearl_state.configuration import Configuration
from pearl_state.errors import IllegalTransitionError, InvariantError
from pearl_state.lifecycle import HOLDS_GPU, TRANSITIONS, Lifecycle
from pearl_state.roles import Role, Tenure, Zone
from pearl_state.worker import GpuId, Worker, WorkerId

_ACTIVE: Final = Lifecycle.ACTIVE
_ACTIVE_INDEX: Final = {Role.PREFILL: 0, Role.DECODE: 1, Role.COLOCATED: 2}
_LOSES_MEMORY: Final = frozenset({Lifecycle.VACANT, Lifecycle.RELEASED, Lifecycle.RETIRED})


@dataclass(frozen=True, kw_only=True)
class WorkerTable:
    """One immutable snapshot of all workers. Build it with `bind`; change it with `update`.

    Most events leave the table as it is, and each is answered by looking at all of it: what was read once is kept.
    """

    rows: Mapping[WorkerId, Worker] = field(default_factory=dict[WorkerId, Worker])
    version: int = 0
    """Grows by one at each change."""
    target_version: int = 0
    """Newest published weight version."""
    floor_version: int = 0
    """Oldest weight version that may serve (the staleness bound)."""
    holders: Mapping[GpuId, WorkerId] = field(default_factory=dict[GpuId, WorkerId])
    """Who holds each GPU's memory now; a GPU that nobody holds is absent."""
    incarnations: Mapping[WorkerId, int] = field(default_factory=dict[WorkerId, int])
    """Highest incarnation each slot ever had; outlives its unbinding."""
    active_roles: tuple[int, int, int] = (0, 0, 0)
    """Active prefill, decode and colocated workers."""

    # ---- reading ----------------------------------------------------------------------------------------------------

    @cached_property
    def _read(self) -> dict[Any, tuple[WorkerId, ...]]:
        """Answers that were given before, by what was asked."""
        return {}

    def active(self, *roles: Role) -> tuple[WorkerId, ...]:
        """Ids of active rollout workers (the set W), in slot order; only those of `roles` where any are given."""
        if (known := self._read.get(roles)) is not None:
            return known
        found = self._read[roles] = tuple(
            w.id
            for w in self.rows.values()
            if w.lifecycle is _ACTIVE and w.role is not Role.TRAINING and (not roles or w.role in roles)
        )
        return found

    def where(
        self,
        *lifecycles: Lifecycle,
        zone: Zone | None = None,
        role: Role | None = None,
        tenure: Tenure | None = None,
        cordoned: bool | None = None,
    ) -> tuple[WorkerId, ...]:
        """Ids of the workers in one of `lifecycles` (any where none is given) that match all filters, in slot order."""
        asked = (lifecycles, zone, role, tenure, cordoned)
        if (known := self._read.get(asked)) is not None:
            return known
        found = self._read[asked] = tuple(
            w.id
            for w in self.rows.values()
            if (not lifecycles or w.lifecycle in lifecycles)
            and (zone is None or w.zone is zone)
            and (role is None or w.role is role)
            and (tenure is None or w.tenure is tenure)
            and (cordoned is None or w.cordoned is cordoned)
        )
        return found

    def rollout(self) -> tuple[WorkerId, ...]:
        """Ids of all rollout workers, in slot order."""
        return tuple(w.id for w in self.rows.values() if w.role is not Role.TRAINING)

    def training(self) -> tuple[WorkerId, ...]:
        """Ids of all training workers, in slot order."""
        return self.where(role=Role.TRAINING)

    @cached_property
    def newest_serving(self) -> int | None:
        """The newest weight version that an active rollout worker reported; None where nobody serves."""
        return max((self.rows[id_].weight_version or 0 for id_ in self.active()), default=None)

    def up_to_date(self, version: int | None) -> bool:
        """Whether a worker with weights of `version` may be admitted (`admitted_up_to_date`)."""
        if version is None or version >= self.target_version:
            return version == self.target_version
        return self.newest_serving is not None and version >= self.newest_serving

    @property
    def configuration(self) -> Configuration:
        """π of the active workers. Raises `ConfigurationError` while a transition mixes both modes."""
        return Configuration(*self.active_roles)

    def free_slots(self, count: int) -> list[WorkerId]:
        """The `count` lowest slots that are not bound."""
        free = (WorkerId(slot) for slot in itertools.count() if slot not in self.rows)
        return list(itertools.islice(free, count))

    def check(self) -> None:
        """Raise `InvariantError` where this is no table that changes lead to: for one that was read from a file."""
        empty = WorkerTable(target_version=self.target_version, floor_version=self.floor_version)
        started = [(replace(row, lifecycle=Lifecycle.VACANT), row) for row in self.rows.values()]
        counted = _recount(empty.active_roles, started)
        if not 0 <= self.floor_version <= self.target_version:
            raise InvariantError("monotonic_versions", f"floor {self.floor_version}, target {self.target_version}")
        for id_, row in self.rows.items():
            if row.id != id_:
                raise InvariantError("fixed_binding", f"slot {id_} holds the row of worker {row.id}")
            if row.incarnation > self.incarnations.get(id_, -1):
                raise InvariantError("incarnation_grows", f"worker {id_} is at incarnation {row.incarnation}")
            if row.lifecycle is _ACTIVE and row.role is not Role.TRAINING:
                reported = row.weight_version
                # It may be newer than the target: whoever loads it may be faster than who tells of it.
                if reported is None or reported < self.floor_version:
                    raise InvariantError("no_stale_serving", f"worker {id_} serves version {reported}")
        if counted != self.active_roles:
            raise InvariantError("paired_roles", f"{self.active_roles} are said to be active, and {counted} are")
        if dict(empty._hand_over(started)) != dict(self.holders):
            raise InvariantError("one_owner_per_gpu", "who holds each GPU does not follow from the rows")

    # ---- changing ---------------------------------------------------------------------------------------------------

    def bind(self, *workers: Worker) -> "WorkerTable":
        """Add rows for slots that are not bound. They must hold nothing yet (VACANT)."""
        rows = dict(self.rows)
        incarnations = dict(self.incarnations)
        for worker in workers:
            if worker.id in rows:
                raise InvariantError("fixed_binding", f"slot {worker.id} is bound already")
            if not worker.gpus:
                raise InvariantError("fixed_binding", f"slot {worker.id} is bound to no GPU")
            if worker.lifecycle is not Lifecycle.VACANT:
                raise InvariantError("fixed_binding", f"slot {worker.id} is bound while {worker.lifecycle}")
            before = incarnations.get(worker.id, 0)
            rows[worker.id] = replace(worker, incarnation=before, weight_version=None)
            incarnations[worker.id] = before
        return replace(self, rows=dict(sorted(rows.items())), incarnations=incarnations, version=self.version + 1)

    def unbind(self, ids: Iterable[WorkerId]) -> "WorkerTable":
        """Free slots whose workers are gone (VACANT or RETIRED). Their incarnation numbers are kept."""
        rows = dict(self.rows)
        for id_ in ids:
            row = rows.pop(id_)
            if row.lifecycle not in (Lifecycle.VACANT, Lifecycle.RETIRED):
                raise InvariantError("fixed_binding", f"slot {id_} is unbound while {row.lifecycle}")
        return replace(self, rows=rows, version=self.version + 1)

    def publish(self, version: int) -> "WorkerTable":
        """Make `version` the target; must not be older than the current one."""
        if version < self.target_version:
            raise InvariantError("monotonic_versions", f"target would go back {self.target_version} -> {version}")
        return replace(self, target_version=version, version=self.version + 1)

    def raise_floor(self, version: int) -> "WorkerTable":
        """Forbid serving with versions older than `version`. Active workers below it are an error."""
        if not self.floor_version <= version <= self.target_version:
            raise InvariantError(
                "monotonic_versions",
                f"floor {version} is outside {self.floor_version}..{self.target_version}",
            )
        for id_ in self.active():
            reported = self.rows[id_].weight_version
            if reported is None or reported < version:
                raise InvariantError(
                    "no_stale_serving", f"worker {id_} serves version {reported} below floor {version}"
                )
        return replace(self, floor_version=version, version=self.version + 1)

    def move(self, ids: Iterable[WorkerId], lifecycle: Lifecycle) -> "WorkerTable":
        """Move workers to `lifecycle`, all or none. A start takes the next incarnation by itself."""
        changed = []
        for id_ in ids:
            row = self.rows[id_]
            if lifecycle is Lifecycle.STARTING:
                changed.append(replace(row, lifecycle=lifecycle, incarnation=self.incarnations[id_] + 1))
            elif lifecycle is Lifecycle.FAILED:
                changed.append(replace(row, lifecycle=lifecycle, failures=row.failures + 1))
            elif lifecycle in _LOSES_MEMORY:
                changed.append(replace(row, lifecycle=lifecycle, weight_version=None))
            else:
                changed.append(replace(row, lifecycle=lifecycle))
        return self.update(changed)

    def set_roles(self, roles: Mapping[WorkerId, Role]) -> "WorkerTable":
        """Give workers that do not serve a new role."""
        return self.update([replace(self.rows[id_], role=role) for id_, role in roles.items()])

    def report(self, id_: WorkerId, version: int) -> "WorkerTable":
        """Record the weight version that a worker's process says it holds."""
        return self.update([replace(self.rows[id_], weight_version=version)])

    def update(self, changed: Iterable[Worker]) -> "WorkerTable":
        """Replace rows by `changed`, all or none.

        Raises `IllegalTransitionError` or `InvariantError`; the table stays as it was. `paired_roles` is checked on
        the result, so that a pair may be admitted or withdrawn in one update.
        """
        rows = dict(self.rows)
        before: dict[WorkerId, Worker] = {}
        for new in changed:
            old = rows[new.id]
            self._check_row(old, new)
            before.setdefault(new.id, old)
            rows[new.id] = new
        changes = [(old, rows[id_]) for id_, old in before.items()]
        return WorkerTable(
            rows=rows,
            version=self.version + 1,
            target_version=self.target_version,
            floor_version=self.floor_version,
            holders=self._hand_over(changes),
            incarnations=self._count_starts(changes),
            active_roles=_recount(self.active_roles, changes),
        )

    def _hand_over(self, changes: Sequence[tuple[Worker, Worker]]) -> Mapping[GpuId, WorkerId]:
        """Who holds each GPU after `changes`. All who let go do so before anybody takes."""
        gives: list[Worker] = []
        takes: list[Worker] = []
        for old, new in changes:
            holds = new.lifecycle in HOLDS_GPU
            if holds is not (old.lifecycle in HOLDS_GPU):
                (takes if holds else gives).append(new)
        if not gives and not takes:
            return self.holders
        holders = dict(self.holders)
        for worker in gives:
            for gpu in worker.gpus:
                del holders[gpu]
        for worker in takes:
            for gpu in worker.gpus:
                if holders.setdefault(gpu, worker.id) != worker.id:
                    raise InvariantError(
                        "one_owner_per_gpu", f"worker {worker.id} takes GPU {gpu}, which {holders[gpu]} holds"
                    )
        return holders

    def _count_starts(self, changes: Sequence[tuple[Worker, Worker]]) -> Mapping[WorkerId, int]:
        """The highest incarnation of each slot after `changes`."""
        started = {new.id: new.incarnation for old, new in changes if new.incarnation != old.incarnation}
        return {**self.incarnations, **started} if started else self.incarnations

    def _check_row(self, old: Worker, new: Worker) -> None:
        """Check one row's change."""
        before, after = old.lifecycle, new.lifecycle
        if before is not after and (before, after) not in TRANSITIONS:
            raise IllegalTransitionError(f"worker {new.id}: {before} -> {after}")
        if new.gpus != old.gpus or new.zone is not old.zone:
            raise InvariantError("fixed_binding", f"worker {new.id}: GPUs or zone of a bound slot change")
        if new.role is not old.role and Role.TRAINING in (new.role, old.role):
            raise InvariantError("fixed_binding", f"worker {new.id}: {old.role} cannot become {new.role}")
        if new.incarnation != old.incarnation and (
            new.incarnation <= self.incarnations[new.id] or after is not Lifecycle.STARTING
        ):
            raise InvariantError("incarnation_grows", f"worker {new.id}: {old.incarnation} -> {new.incarnation}")
        if before is not Lifecycle.STARTING and after is Lifecycle.STARTING and new.incarnation == old.incarnation:
            raise InvariantError(
                "incarnation_grows", f"worker {new.id} starts with incarnation {new.incarnation} again"
            )
        reported = new.weight_version
        if (
            reported is not None
            and old.weight_version is not None
            and new.incarnation == old.incarnation
            and reported < old.weight_version
        ):
            raise InvariantError("monotonic_versions", f"worker {new.id}: {old.weight_version} -> {reported}")
        if after is _ACTIVE:
            self._check_active(old, new)

    def _check_active(self, old: Worker, new: Worker) -> None:
        """Check a row that serves after its change."""
        if new.role is Role.TRAINING:
            return
        if old.lifecycle is _ACTIVE:
            if new.role is not old.role:
                raise IllegalTransitionError(f"worker {new.id}: role {old.role} -> {new.role} while it serves")
            if new.weight_version is None or new.weight_version < self.floor_version:
                raise InvariantError(
                    "no_stale_serving",
                    f"worker {new.id} serves version {new.weight_version} below floor {self.floor_version}",
                )
        elif not self.up_to_date(new.weight_version):
            serving = "nobody serves" if self.newest_serving is None else f"{self.newest_serving} serves"
            raise InvariantError(
                "admitted_up_to_date",
                f"worker {new.id} is admitted with version {new.weight_version}, target {self.target_version},"
                f" {serving}",
            )


def _recount(active: tuple[int, int, int], changes: Sequence[tuple[Worker, Worker]]) -> tuple[int, int, int]:
    """Active prefill, decode and colocated workers after `changes`, which must be paired."""
    counts = [0, 0, 0]
    for old, new in changes:
        if old.lifecycle is _ACTIVE and old.role is not Role.TRAINING:
            counts[_ACTIVE_INDEX[old.role]] -= 1
        if new.lifecycle is _ACTIVE and new.role is not Role.TRAINING:
            counts[_ACTIVE_INDEX[new.role]] += 1
    if not any(counts):
        return active
    prefill, decode, colocated = (now + change for now, change in zip(active, counts, strict=True))
    if (prefill == 0) is not (decode == 0):
        raise InvariantError("paired_roles", f"{prefill} active prefill with {decode} active decode workers")
    return prefill, decode, colocated
