"""The buffer between rollout and training: GRPO groups, refills, and the staleness bound.

A sample is stamped with the trainer's weight version at its dispatch; its staleness is the trainer's version at use
minus that stamp. The time in flight and the time in the queue both count, and are reported apart. A sample that the
infrastructure failed is dispatched again alone: its group is kept, and it never becomes a reward.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pearl_planner.staleness import AgeingGroup, awaited
from pearl_rl.rollout.counts import BufferCounts
from pearl_rl.rollout.ledger import OpenGroup
from pearl_state.trajectory import GroupId, Trajectory, TrajectoryId


class VersionRegressionError(ValueError):
    """The trainer's version is older than one that is known already: its count went back, e.g. after a resume."""


class RefillsExhaustedError(RuntimeError):
    """A group's samples failed more often than they may be dispatched again; the message names the last cause."""

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause
        """What failed the last sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessBound:
    """How far rollout may run ahead of training: η batches of B samples."""

    max_staleness: int
    """η: most weight versions between a sample's dispatch and its use."""
    batch: int
    """B: samples of one update."""
    start_version: int = 0
    """The trainer's version when this run began or resumed; samples are counted from there."""

    def capacity(self, version: int, accepted: int, in_flight: int) -> int:
        """How many samples may be dispatched now: (η + v + 1)·B − (accepted + in flight), v counted from the start.

        `accepted` samples came back since the start, used ones included, rejected ones not. Counting v from 0 after a
        resume would admit B samples for every version that earlier runs made.
        """
        updates = version - self.start_version
        if updates < 0:
            raise VersionRegressionError(
                f"trainer version {version} is older than the run's first, {self.start_version}"
            )
        return max(0, (self.max_staleness + updates + 1) * self.batch - accepted - in_flight)


@dataclass(frozen=True, slots=True)
class UsedSample:
    """A sample on its way to training, with its age."""

    trajectory: Trajectory
    in_flight: int
    """Versions that the trainer made between its dispatch and its completion."""
    in_queue: int
    """Versions that the trainer made between its completion and its use."""

    @property
    def staleness(self) -> int:
        """Trainer's version at use − version at dispatch."""
        return self.in_flight + self.in_queue


_LEAST_SAMPLES: Final = 2


@dataclass(slots=True, eq=False)
class _Group:
    size: int
    """Samples that make it complete."""
    outstanding: dict[TrajectoryId, int] = field(default_factory=dict[TrajectoryId, int])
    """Sample → trainer's version at its dispatch."""
    complete: list[tuple[Trajectory, int]] = field(default_factory=list[tuple[Trajectory, int]])
    """With the trainer's version when it came back."""
    failures: int = 0

    def oldest(self, version: int) -> int:
        """The trainer's version at the dispatch of its oldest sample; `version` where it has none."""
        return min((*self.outstanding.values(), *(sample.dispatch_version for sample, _ in self.complete), version))


class GroupBuffer:
    """Groups of `group_size` samples, in the order in which they were opened."""

    def __init__(self, bound: StalenessBound, group_size: int, max_refills_per_group: int) -> None:
        if group_size < 1 or bound.batch % group_size:
            raise ValueError(f"a batch of {bound.batch} samples does not divide into groups of {group_size}")
        self._bound = bound
        self._size = group_size
        self._max_refills = max_refills_per_group
        self._groups: dict[GroupId, _Group] = {}
        self._ready: int | None = None
        """How many groups are complete; None: to be counted again. It is asked for with every sample."""
        self.counts = BufferCounts()
        """What became of all samples so far."""

    def capacity(self, version: int) -> int:
        """How many samples may be dispatched at this trainer version without breaking the staleness bound."""
        counts = self.counts
        return self._bound.capacity(version, counts.buffered + counts.used, counts.in_flight)

    def restore(self, groups: Mapping[GroupId, OpenGroup], counts: BufferCounts) -> None:
        """Go on with what an earlier control plane left; only before anything was opened."""
        if self._groups:
            raise ValueError(f"{len(self._groups)} groups are open already; restore before the first")
        self.counts = replace(counts)
        self._ready = None
        for id_, group in groups.items():
            self._groups[id_] = _Group(
                self._size,
                outstanding={trajectory: sample.version for trajectory, sample in group.outstanding.items()},
                complete=[(sample.trajectory, sample.version) for sample in group.complete],
                failures=group.failures,
            )

    def open(self, group: GroupId) -> None:
        """Begin a group."""
        if group in self._groups:
            raise ValueError(f"group {group} is open already")
        self._groups[group] = _Group(self._size)

    def needs(self, group: GroupId) -> bool:
        """Whether the group lacks a sample that is not under way either; False for one that is gone."""
        state = self._groups.get(group)
        return state is not None and len(state.outstanding) + len(state.complete) < state.size

    def dispatch(self, group: GroupId, trajectory: TrajectoryId, version: int) -> None:
        """Stamp a sample with the trainer's `version`. Raises `ValueError` where the group needs no further one."""
        state = self._groups[group]
        if not self.needs(group):
            raise ValueError(f"group {group} has all its {state.size} samples; {trajectory} would be one too many")
        state.outstanding[trajectory] = version
        self.counts.dispatched += 1
        self.counts.in_flight += 1

    def complete(self, trajectory: Trajectory, version: int) -> bool:
        """Take a finished sample; `version` is the trainer's now. Returns whether its group is complete."""
        state = self._groups[trajectory.group]
        stamp = state.outstanding[trajectory.id]
        if trajectory.dispatch_version != stamp:
            raise ValueError(f"{trajectory.id} says version {trajectory.dispatch_version}, dispatched at {stamp}")
        self._check(trajectory.id, stamp, version)
        del state.outstanding[trajectory.id]
        state.complete.append((trajectory, version))
        self.counts.in_flight -= 1
        self.counts.buffered += 1
        complete = len(state.complete) == state.size
        if complete and self._ready is not None:
            self._ready += 1
        return complete

    def failed(self, group: GroupId, trajectory: TrajectoryId, cause: str) -> int:
        """Drop a sample that the infrastructure failed; dispatch another one in its place.

        Returns how often samples of this group failed. Raises `RefillsExhaustedError` where that is too often.
        """
        state = self._groups[group]
        del state.outstanding[trajectory]
        self.counts.in_flight -= 1
        self.counts.failed += 1
        state.failures += 1
        if state.failures > self._max_refills:
            raise RefillsExhaustedError(
                f"samples of group {group} failed {state.failures} times, {self._max_refills} may be dispatched again; "
                f"the last: {cause}",
                cause,
            )
        return state.failures

    def cancelled(self, group: GroupId, trajectory: TrajectoryId) -> None:
        """Drop a sample that was cancelled with its run or its group."""
        state = self._groups.get(group)
        if state is not None and state.outstanding.pop(trajectory, None) is not None:
            self.counts.in_flight -= 1
            self.counts.cancelled += 1

    def drop(self, group: GroupId) -> int:
        """Give a whole group up: its task cannot be played. Returns how many of its samples were complete."""
        state = self._groups.pop(group)
        self._ready = None
        self.counts.in_flight -= len(state.outstanding)
        self.counts.buffered -= len(state.complete)
        self.counts.dropped += len(state.outstanding) + len(state.complete)
        return len(state.complete)

    def stale_ids(self, version: int) -> tuple[TrajectoryId, ...]:
        """The complete samples that would be too old at this trainer version."""
        bound = self._bound.max_staleness
        complete = (sample for state in self._groups.values() for sample, _ in state.complete)
        return tuple(sample.id for sample in complete if version - sample.dispatch_version > bound)

    def reject_stale(self, version: int) -> list[GroupId]:
        """Drop samples that are too old at this trainer version. Returns a group for each one to dispatch again."""
        refills: list[GroupId] = []
        for id_, state in self._groups.items():
            fresh = [s for s in state.complete if version - s[0].dispatch_version <= self._bound.max_staleness]
            refills.extend([id_] * (len(state.complete) - len(fresh)))
            state.complete = fresh
        self._ready = None
        self.counts.buffered -= len(refills)
        self.counts.rejected += len(refills)
        return refills

    def ready(self) -> int:
        """How many groups are complete."""
        if self._ready is None:
            self._ready = sum(len(state.complete) == state.size for state in self._groups.values())
        return self._ready

    def due(self, version: int) -> int:
        """How many incomplete groups an update at this version must wait for, lest samples become too old."""
        return len(self._awaited(version))

    def _awaited(self, version: int) -> tuple[GroupId, ...]:
        bound = self._bound
        return awaited(
            [
                AgeingGroup(
                    id=id_,
                    later=state.oldest(version) + bound.max_staleness - version,
                    missing=state.size - len(state.complete),
                )
                for id_, state in self._groups.items()
            ],
            bound.batch // self._size,
        )

    def give_up_due(self, version: int) -> list[tuple[GroupId, TrajectoryId]]:
        """Drop the samples that the groups of `due` still wait for; those groups are complete without them.

        A group that has fewer than two samples then says nothing about which is better: it stays as it is. Returns
        what was dropped.
        """
        dropped: list[tuple[GroupId, TrajectoryId]] = []
        for id_ in self._awaited(version):
            state = self._groups[id_]
            if len(state.complete) >= _LEAST_SAMPLES:
                dropped += [(id_, trajectory) for trajectory in state.outstanding]
                state.size = len(state.complete)
                state.outstanding.clear()
        self._ready = None
        self.counts.in_flight -= len(dropped)
        self.counts.dropped += len(dropped)
        return dropped

    def take(self, groups: int, version: int) -> list[UsedSample]:
        """The samples of the first `groups` complete groups, for an update of the trainer that now has `version`.

        Raises `LookupError` where there are fewer, `ValueError` for a sample that is too old (see `reject_stale`).
        """
        chosen = [id_ for id_, state in self._groups.items() if len(state.complete) == state.size][:groups]
        if len(chosen) < groups:
            raise LookupError(f"{len(chosen)} groups are complete, {groups} are wanted")
        samples: list[UsedSample] = []
        for id_ in chosen:
            for trajectory, returned in self._groups[id_].complete:
                self._check(trajectory.id, returned, version)
                sample = UsedSample(trajectory, returned - trajectory.dispatch_version, version - returned)
                if sample.staleness > self._bound.max_staleness:
                    raise ValueError(f"{trajectory.id} is {sample.staleness} versions old, bound {self._bound}")
                samples.append(sample)
        for id_ in chosen:
            del self._groups[id_]
        self._ready = None
        self.counts.buffered -= len(samples)
        self.counts.used += len(samples)
        return samples

    def _check(self, trajectory: TrajectoryId, known: int, version: int) -> None:
        if version < known:
            raise VersionRegressionError(
                f"{trajectory} knows trainer version {known}, which says now that it is {version}: its version count "
                "went back; a resumed trainer must go on from the newest version"
            )


@dataclass(frozen=True, slots=True)
class StalenessSummary:
    """Ages of the samples of one update, in weight versions."""

    mean: float
    maximum: int
    in_flight_mean: float
    in_queue_mean: float
    histogram: dict[int, int]
    """Staleness → how many samples."""


def summarize_staleness(samples: Sequence[UsedSample]) -> StalenessSummary:
    """Ages over the samples of one update (at least one)."""
    count = len(samples)
    ages = Counter(sample.staleness for sample in samples)
    return StalenessSummary(
        mean=sum(age * n for age, n in ages.items()) / count,
        maximum=max(ages),
        in_flight_mean=sum(sample.in_flight for sample in samples) / count,
        in_queue_mean=sum(sample.in_queue for sample in samples) / count,
        histogram=dict(sorted(ages.items())),
    )
