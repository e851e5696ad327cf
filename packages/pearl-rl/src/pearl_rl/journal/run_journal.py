"""The journal of one run: control events and what the rollout did; and the state that follows from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pearl_planner.elastic import ElasticSettings, ElasticState
from pearl_planner.step import step
from pearl_rl.encoding import decode, decode_event, encode, encode_event
from pearl_rl.journal.frames import JournalError, Record
from pearl_rl.journal.journal import Journal, read
from pearl_rl.journal.state_codec import decode_state, encode_state
from pearl_rl.journal.storage import Storage
from pearl_rl.rollout.ledger import RolloutLedger, RolloutRecord, decode_record, encode_record
from pearl_state.errors import StateError
from pearl_state.events import Event, RunResumed
from pearl_state.worker import WorkerId

SNAPSHOT_EVERY: Final = 10_000
"""Records between two snapshots: recovery reads at most so many, whatever the run's length."""


@dataclass(slots=True)
class RunClock:
    """For how long a run was under way, over all its control planes: what passes between two of them does not count."""

    now_s: float | None = None
    """Time of the last event, on its control plane's clock; None before the first."""
    elapsed_s: float = 0.0

    def follow(self, event: Event) -> None:
        """Take an event in."""
        if self.now_s is not None and not isinstance(event, RunResumed):
            self.elapsed_s += max(0.0, event.now_s - self.now_s)
        self.now_s = event.now_s


@dataclass(slots=True)
class Recovered:
    """What a journal says of its run."""

    state: ElasticState
    rollout: RolloutLedger
    clock: RunClock = field(default_factory=RunClock)
    records: int = 0
    """How many were read behind the snapshot."""


class RunJournal:
    """Writes the journal while the run goes on, and keeps the rollout's ledger for snapshots."""

    def __init__(
        self,
        storage: Storage,
        state: ElasticState,
        rollout: RolloutLedger,
        clock: RunClock | None = None,
        *,
        snapshot_every: int = SNAPSHOT_EVERY,
    ) -> None:
        """Begin the journal, or go on with it from what `recover` gave. Raises `JournalError`."""
        self._journal = Journal(storage)
        self._rollout = rollout
        self._clock = RunClock() if clock is None else clock
        self._every = snapshot_every
        self._snapshot_at = 0
        self._snapshot(state)

    @property
    def torn_bytes(self) -> int:
        """What a kill left behind the last whole record and was cut off."""
        return self._journal.torn_bytes

    # ---- the rollout ------------------------------------------------------------------------------------------------

    def note(self, record: RolloutRecord) -> None:
        """Take in what the rollout did; durable with the next commit."""
        self._rollout.apply(record)
        self._journal.append("rollout", encode_record(record))

    # ---- control events ---------------------------------------------------------------------------------------------

    def append(self, event: Event, loads: Mapping[WorkerId, float]) -> None:
        """Take an event in that is to be applied with `loads` once `commit` returns."""
        self._clock.follow(event)
        self._journal.append("event", {**encode_event(event), "loads": {str(id_): load for id_, load in loads.items()}})

    async def commit(self) -> None:
        """Return once everything so far is durable. Raises `JournalError` where the disk refuses."""
        await self._journal.commit()

    def applied(self, state: ElasticState) -> None:
        """All events appended so far were applied and gave `state`."""
        if self._journal.next_number - self._snapshot_at >= self._every and not self._journal.flushing:
            self._snapshot(state)

    def _snapshot(self, state: ElasticState) -> None:
        value = {"state": encode_state(state), "rollout": self._rollout.to_json(), "clock": encode(self._clock)}
        self._journal.snapshot(value)
        self._snapshot_at = self._journal.next_number


def recover(
    storage: Storage, settings: ElasticSettings, *, up_to: int | None = None, since: int | None = None
) -> Recovered:
    """The state after the last durable record, or before record `up_to`. Raises `JournalError`."""
    begin, records = read(storage, up_to=up_to, since=since)
    recovered = begun(begin, settings)
    for record in records:
        apply(recovered, record)
    return recovered


def begun(begin: Record, settings: ElasticSettings) -> Recovered:
    """What a snapshot says. Raises `JournalError`."""
    value = begin.get("v")
    if not isinstance(value, dict) or not isinstance(value.get("state"), dict):
        raise JournalError("the snapshot holds no state")
    try:
        rollout, clock = RolloutLedger.from_json(value["rollout"]), decode(RunClock, value["clock"])
    except (ValueError, KeyError) as error:
        raise JournalError(f"the snapshot's rollout or clock cannot be read: {error}") from None
    return Recovered(decode_state(dict(value["state"]), settings), rollout, clock)


def apply(recovered: Recovered, record: Record) -> tuple[Event, tuple[Any, ...]] | None:
    """Take one record in; for a control event, it and the effects that follow. Raises `JournalError`."""
    recovered.records += 1
    try:
        match record["k"]:
            case "event":
                value = dict(record["v"])
                loads = {WorkerId(int(id_)): float(load) for id_, load in value.pop("loads").items()}
                event = decode_event(value)
                recovered.state, effects = step(recovered.state, event, loads)
                recovered.clock.follow(event)
                return event, effects
            case "rollout":
                recovered.rollout.apply(decode_record(record["v"]))
            case kind:
                raise JournalError(f"record {record.get('n')}: unknown kind {kind!r}")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, StateError) as error:
        raise JournalError(f"record {record.get('n')}: does not follow ({type(error).__name__}: {error})") from None
    return None
