"""What the rollout did, as records, and what a resumed run goes on with: the fold over them.

A finished turn is kept with its tokens; a resumed trajectory plays its environment again from the task's seed with the
recorded responses and goes on where it was (PEARL section 4.5). At most the model call under way is made again.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pearl_rl.encoding import decode, encode
from pearl_rl.rollout.calls import Generate, ModelCall, TurnResult
from pearl_rl.rollout.counts import BufferCounts
from pearl_rl.rollout.environments.protocol import EnvironmentFailure
from pearl_state.trajectory import GroupId, Trajectory, TrajectoryId


@dataclass(slots=True, kw_only=True)
class Position:
    """What the next group and trajectory are numbered: a resumed run goes on from here."""

    next_group: int = 0
    next_trajectory: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOpened:
    """A group of samples of task `number` was begun for a step."""

    group: GroupId
    step: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDispatched:
    """A sample was begun at the trainer's weight `version`."""

    group: GroupId
    trajectory: TrajectoryId
    number: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlayed:
    """A model call of a sample ended; `prompt` is the digest of its whole context."""

    trajectory: TrajectoryId
    turn: int
    prompt: str
    result: TurnResult


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCompleted:
    """A sample came back, at the trainer's weight `version`."""

    trajectory: Trajectory
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFailed:
    """The infrastructure failed a sample; another one takes its place."""

    group: GroupId
    trajectory: TrajectoryId
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDropped:
    """A group was given up: its task cannot be played."""

    group: GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesRejected:
    """Complete samples were too old at use."""

    trajectories: tuple[TrajectoryId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTaken:
    """The groups went into the update of a step. Undone where a control plane ends before its weights are published."""

    step: int
    groups: tuple[GroupId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrained:
    """The weights of a step are published for good: its samples are never used again."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResumed:
    """A control plane went on after step `completed`, the newest whose weights were published."""

    completed: int


RolloutRecord = (
    GroupOpened
    | SampleDispatched
    | TurnPlayed
    | SampleCompleted
    | SampleFailed
    | GroupDropped
    | SamplesRejected
    | BatchTaken
    | StepTrained
    | RolloutResumed
)
Note = Callable[[RolloutRecord], None]


def unnoted(record: RolloutRecord) -> None:
    """The `Note` of a run without a journal: nothing is kept."""
    del record


RECORDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        GroupOpened,
        SampleDispatched,
        TurnPlayed,
        SampleCompleted,
        SampleFailed,
        GroupDropped,
        SamplesRejected,
        BatchTaken,
        StepTrained,
        RolloutResumed,
    )
}


def encode_record(record: RolloutRecord) -> dict[str, Any]:
    """A record as an object, with its name under `record`."""
    return {"record": type(record).__name__, **encode(record)}


def decode_record(data: dict[str, Any]) -> RolloutRecord:
    """The record that `encode_record` made `data` from. Raises `ValueError` for anything else."""
    kind = RECORDS.get(str(data.get("record")))
    if kind is None:
        raise ValueError(f"no rollout record is called {data.get('record')!r}")
    record: RolloutRecord = decode(kind, {key: value for key, value in data.items() if key != "record"})
    return record


def prompt_digest(prompt: Sequence[int]) -> str:
    """A short digest of a context: equal contexts, equal digests. A simulated context is a range and names itself."""
    if isinstance(prompt, range):
        return f"{prompt.start}-{prompt.stop}"
    text = ",".join(map(str, prompt)).encode()
    return hashlib.blake2b(text, digest_size=12).hexdigest()


class Replay:
    """Model calls of one sample: those that an earlier control plane made are answered from its journal.

    An environment that says something else the second time cannot be played again: its sample is failed, and another
    one takes its place.
    """

    def __init__(self, generate: Generate, turns: Sequence[TurnPlayed], note: Note) -> None:
        self._generate = generate
        self._turns = turns
        self._note = note

    async def __call__(self, call: ModelCall) -> TurnResult:
        """See `Generate`."""
        digest = prompt_digest(call.prompt)
        if call.turn < len(self._turns):
            played = self._turns[call.turn]
            if played.prompt != digest:
                raise EnvironmentFailure(f"{call.trajectory} turn {call.turn}: not what it was before the restart")
            return played.result
        result = await self._generate(call)
        self._note(TurnPlayed(trajectory=call.trajectory, turn=call.turn, prompt=digest, result=result))
        return result


@dataclass(slots=True, kw_only=True)
class OpenSample:
    """A sample under way."""

    number: int
    version: int
    turns: list[TurnPlayed] = field(default_factory=list[TurnPlayed])


@dataclass(slots=True, kw_only=True)
class OpenGroup:
    """A group that was not trained on yet, or in an update whose weights are not published yet."""

    step: int
    number: int
    outstanding: dict[TrajectoryId, OpenSample] = field(default_factory=dict[TrajectoryId, OpenSample])
    complete: list[SampleCompleted] = field(default_factory=list[SampleCompleted])
    failures: int = 0


@dataclass(slots=True, kw_only=True)
class RolloutLedger:
    """The state of the rollout. `apply` takes records in the order in which they were made."""

    position: Position = field(default_factory=Position)
    groups: dict[GroupId, OpenGroup] = field(default_factory=dict[GroupId, OpenGroup])
    """In the order in which they were opened."""
    taken: dict[int, dict[GroupId, OpenGroup]] = field(default_factory=dict[int, dict[GroupId, OpenGroup]])
    """Step → what its update was given, until its weights are published."""
    counts: BufferCounts = field(default_factory=BufferCounts)

    def apply(self, record: RolloutRecord) -> None:
        """Take one record in. Raises `KeyError` or `ValueError` where it does not follow from those before it."""
        counts = self.counts
        match record:
            case GroupOpened():
                self.groups[record.group] = OpenGroup(step=record.step, number=record.number)
                self.position.next_group = max(self.position.next_group, record.number + 1)
            case SampleDispatched():
                sample = OpenSample(number=record.number, version=record.version)
                self.groups[record.group].outstanding[record.trajectory] = sample
                self.position.next_trajectory = max(self.position.next_trajectory, record.number + 1)
                counts.dispatched += 1
                counts.in_flight += 1
            case TurnPlayed():
                self._sample(record.trajectory).turns.append(record)
            case SampleCompleted():
                group = self.groups[record.trajectory.group]
                del group.outstanding[record.trajectory.id]
                group.complete.append(record)
                counts.in_flight -= 1
                counts.buffered += 1
            case SampleFailed():
                group = self.groups[record.group]
                del group.outstanding[record.trajectory]
                group.failures += 1
                counts.in_flight -= 1
                counts.failed += 1
            case _:
                self._apply_to_groups(record)

    def _apply_to_groups(
        self, record: GroupDropped | SamplesRejected | BatchTaken | StepTrained | RolloutResumed
    ) -> None:
        counts = self.counts
        match record:
            case GroupDropped():
                group = self.groups.pop(record.group)
                counts.in_flight -= len(group.outstanding)
                counts.buffered -= len(group.complete)
                counts.dropped += len(group.outstanding) + len(group.complete)
            case SamplesRejected():
                gone = set(record.trajectories)
                for group in self.groups.values():
                    group.complete = [c for c in group.complete if c.trajectory.id not in gone]
                counts.buffered -= len(gone)
                counts.rejected += len(gone)
            case BatchTaken():
                taken = {id_: self.groups.pop(id_) for id_ in record.groups}
                self.taken[record.step] = taken
                samples = sum(len(group.complete) for group in taken.values())
                counts.buffered -= samples
                counts.used += samples
            case StepTrained():
                self._forget(record.step)
            case RolloutResumed():
                self._resume(record)

    def _sample(self, trajectory: TrajectoryId) -> OpenSample:
        for group in self.groups.values():
            if (sample := group.outstanding.get(trajectory)) is not None:
                return sample
        raise KeyError(trajectory)

    def _forget(self, trained: int) -> None:
        """What the updates up to step `trained` were given is done with."""
        for step in [step for step in self.taken if step <= trained]:
            del self.taken[step]

    def _resume(self, record: RolloutResumed) -> None:
        """Put back what an update was given whose weights were never published."""
        self._forget(record.completed)
        again = {id_: group for step in sorted(self.taken) for id_, group in self.taken[step].items()}
        samples = sum(len(group.complete) for group in again.values())
        self.counts.used -= samples
        self.counts.buffered += samples
        self.taken.clear()
        self.groups = {**again, **self.groups}

    def to_json(self) -> dict[str, Any]:
        """A JSON-able form, for a snapshot."""
        encoded: dict[str, Any] = encode(self)
        return encoded

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "RolloutLedger":
        """What `to_json` gave. Raises `ValueError` for anything else."""
        ledger: RolloutLedger = decode(cls, data)
        ordered = sorted(ledger.groups.items(), key=lambda item: (item[1].number, item[0]))
        ledger.groups = dict(ordered)
        return ledger
