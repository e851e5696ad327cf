"""Plays the trajectories of a batch: groups of samples, each refilled alone where the infrastructure failed it."""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pearl_rl.rollout.agent import Agent, Episode, PromptTooLongError
from pearl_rl.rollout.buffer import GroupBuffer
from pearl_rl.rollout.calls import FailureCause, Generate, GenerationFailedError
from pearl_rl.rollout.environments.protocol import EnvironmentFailure, Task, TaskSource
from pearl_rl.rollout.ledger import (
    GroupDropped,
    GroupOpened,
    Note,
    OpenGroup,
    OpenSample,
    Position,
    Replay,
    SampleCompleted,
    SampleDispatched,
    SampleFailed,
    TurnPlayed,
    unnoted,
)
from pearl_rl.rollout.lifecycle import LifecycleTrace, task_kind
from pearl_rl.rollout.router import Router
from pearl_rl.rollout.task_gate import TaskGate
from pearl_state.trajectory import GroupId, Trajectory, TrajectoryId

_log = logging.getLogger(__name__)
_MOST_DOUBLINGS: Final = 32
"""Of a pause; a float holds about a thousand, and every limit on a pause is reached long before."""


class UnplayableTasksError(RuntimeError):
    """Task after task could not be played; the message names the last cause."""


class _UnplayableTask(Exception):
    """This task cannot be played, by anybody, however often it is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefillLimits:
    """How hard failing samples are tried again."""

    pause_s: float = 0.1
    """Pause before a group's first refill; doubles with each further one up to `max_pause_s`."""
    max_pause_s: float = 10.0
    max_dropped_groups: int = 8
    """Unplayable tasks in a row after which a group gives up."""


class BatchListener(Protocol):
    """Follows one batch."""

    def completed(self, trajectory: Trajectory) -> None:
        """One more trajectory of the batch is complete."""
        ...

    def dropped(self, complete: int) -> None:
        """A group was given up and another takes its place; `complete` trajectories of it do not count any more."""
        ...


class BatchRollout:
    """Dispatches samples and brings them back, whatever happens to those that generate them."""

    def __init__(
        self,
        *,
        router: Router,
        agent: Agent,
        tasks: TaskSource,
        buffer: GroupBuffer,
        group_size: int,
        seed: int,
        version: Callable[[], int],
        limits: RefillLimits | None = None,
        position: Position | None = None,
        lifecycle: LifecycleTrace | None = None,
        note: Note = unnoted,
        gate: TaskGate | None = None,
    ) -> None:
        """`note` is told of everything that a resumed run must know. `gate` stands before the router."""
        self._gate = gate
        self._router = router
        self._lifecycle = lifecycle
        self._agent = agent
        self._tasks = tasks
        self._buffer = buffer
        self._size = group_size
        self._seed = seed
        self._version = version
        self._limits = RefillLimits() if limits is None else limits
        self.position = Position() if position is None else position
        self._note = note
        self._open: dict[GroupId, Task] = {}
        self._resumed: dict[GroupId, OpenGroup] = {}
        self._playing: dict[TrajectoryId, asyncio.Task[object]] = {}
        self._given_up: set[asyncio.Task[object]] = set()
        self.failures: Counter[str] = Counter()
        """Why samples were dispatched again → how often."""

    def restore(self, groups: Mapping[GroupId, OpenGroup]) -> None:
        """Go on with what an earlier control plane left; `play` takes each group up in its step."""
        for id_, group in groups.items():
            self._open[id_] = self._tasks.task(group.number)
        self._resumed = dict(groups)

    def begun(self, step: int) -> int:
        """Groups that `step` has from before."""
        return sum(group.step == step for group in self._resumed.values())

    def completed(self, step: int) -> int:
        """Samples of those groups that are complete."""
        return sum(len(group.complete) for group in self._resumed.values() if group.step == step)

    async def play(self, groups: int, listener: BatchListener, step: int = 0) -> None:
        """Open `groups` groups for `step`, less those that it has from before, and return once all are complete.

        Raises `RefillsExhaustedError`, `UnplayableTasksError`, and whatever a bug in an agent raises.
        """
        before = {id_: group for id_, group in self._resumed.items() if group.step == step}
        for id_ in before:
            del self._resumed[id_]
        again = [self._group(listener, step, id_, group) for id_, group in before.items()]
        await _together([*again, *(self._group(listener, step) for _ in range(groups - len(before)))])

    async def refill(self, groups: Sequence[GroupId], listener: BatchListener) -> None:
        """Dispatch one more sample for each entry and return once all are complete. Raises as `play`."""
        try:
            await _together([self._sample(group, listener) for group in groups])
        except _UnplayableTask as error:
            raise UnplayableTasksError(f"a task that was played before cannot be any more: {error}") from error

    def give_up(self, samples: Iterable[tuple[GroupId, TrajectoryId]]) -> None:
        """End samples that the buffer dropped; their groups wait for them no more."""
        for group, trajectory in samples:
            self._note(SampleFailed(group=group, trajectory=trajectory, cause="it would make its group too old"))
            player = self._playing.pop(trajectory, None)
            if player is not None:
                self._given_up.add(player)
                player.cancel()

    def forget(self, group: GroupId) -> None:
        """A group was used: nothing more is dispatched for it."""
        self._open.pop(group, None)

    async def _group(
        self, listener: BatchListener, step: int, group: GroupId | None = None, resumed: OpenGroup | None = None
    ) -> None:
        """Play a group to its end, one from before where `group` names it; another task where it cannot be played."""
        cause: Exception | None = None
        for _ in range(self._limits.max_dropped_groups + 1):
            if group is None:
                group = self._begin(step)
            before, resumed = resumed or OpenGroup(step=step, number=0), None
            missing = self._size - len(before.complete) - len(before.outstanding)
            samples = [self._sample(group, listener, sample) for sample in before.outstanding.items()]
            try:
                await _together([*samples, *(self._sample(group, listener) for _ in range(missing))])
            except _UnplayableTask as error:
                cause = error
                self.forget(group)
                self._note(GroupDropped(group=group))
                listener.dropped(self._buffer.drop(group))
                group = None
            else:
                return
        raise UnplayableTasksError(
            f"{self._limits.max_dropped_groups + 1} tasks in a row cannot be played; the last: {cause}"
        )

    def _begin(self, step: int) -> GroupId:
        number = self.position.next_group
        group = GroupId(f"g{number:06d}")
        self._open[group] = self._tasks.task(number)
        self.position.next_group += 1
        self._buffer.open(group)
        self._note(GroupOpened(group=group, step=step, number=number))
        return group

    async def _sample(
        self, group: GroupId, listener: BatchListener, resumed: tuple[TrajectoryId, OpenSample] | None = None
    ) -> None:
        """As `_play_sample`; returns without one where it is given up."""
        task = _this_task()
        try:
            await self._play_sample(group, listener, resumed)
        except asyncio.CancelledError:
            if task not in self._given_up or task.uncancel():
                raise
        finally:
            self._given_up.discard(task)

    async def _play_sample(
        self, group: GroupId, listener: BatchListener, resumed: tuple[TrajectoryId, OpenSample] | None = None
    ) -> None:
        """Play one sample of a group until one comes back, beginning with the one `resumed` where there is one."""
        while True:
            episode, turns = self._dispatch(group) if resumed is None else self._again(group, *resumed)
            resumed = None
            generate = self._enter(episode)
            if turns or self._note is not unnoted:
                generate = Replay(generate, turns, self._note)
            accepted: bool | None = None
            self._playing[episode.trajectory] = _this_task()
            try:
                trajectory = await self._agent.run(episode, generate)
            except (GenerationFailedError, EnvironmentFailure) as error:
                if isinstance(error, GenerationFailedError) and error.cause is FailureCause.CLOSED:
                    self._buffer.cancelled(group, episode.trajectory)
                    raise
                pause_s = self._failed(episode, error)
            except BaseException as error:
                self._buffer.cancelled(group, episode.trajectory)
                if isinstance(error, PromptTooLongError):
                    raise _UnplayableTask(str(error)) from error
                raise
            else:
                self._buffer.complete(trajectory, self._version())
                self._note(SampleCompleted(trajectory=trajectory, version=self._version()))
                accepted = True
                listener.completed(trajectory)
                return
            finally:
                self._playing.pop(episode.trajectory, None)
                self._leave(episode, accepted=accepted)
            await asyncio.sleep(pause_s)
            if not self._buffer.needs(group):
                # Meanwhile the group was given up, and is complete without this sample.
                return

    def _enter(self, episode: Episode) -> Generate:
        """Tell everybody that a sample begins. Returns whom its agent calls."""
        # Its staleness is counted from there: where workers still load newer weights, no token may be older.
        self._router.begin(episode.trajectory, episode.dispatch_version)
        if self._lifecycle is not None:
            self._lifecycle.sampled(episode.trajectory, episode.group, task_kind(episode.task.id))
        if self._gate is None:
            return self._router.generate
        self._gate.begin(episode.trajectory, episode.group)
        return self._gate.generate

    def _leave(self, episode: Episode, *, accepted: bool | None) -> None:
        self._router.end(episode.trajectory)
        if self._gate is not None:
            self._gate.end(episode.trajectory, finished=accepted is True)
        if self._lifecycle is not None:
            self._lifecycle.ended(episode.trajectory, accepted=accepted)

    def _dispatch(self, group: GroupId) -> tuple[Episode, Sequence[TurnPlayed]]:
        number = self.position.next_trajectory
        self.position.next_trajectory += 1
        version = self._version()
        trajectory = TrajectoryId(f"t{number:08d}")
        self._buffer.dispatch(group, trajectory, version)
        self._note(SampleDispatched(group=group, trajectory=trajectory, number=number, version=version))
        return self._again(group, trajectory, OpenSample(number=number, version=version))

    def _again(
        self, group: GroupId, trajectory: TrajectoryId, sample: OpenSample
    ) -> tuple[Episode, Sequence[TurnPlayed]]:
        """A sample's episode, and the turns that an earlier control plane played of it."""
        episode = Episode(
            trajectory=trajectory,
            group=group,
            task=self._open[group],
            dispatch_version=sample.version,
            seed=trajectory_seed(self._seed, sample.number),
        )
        return episode, sample.turns

    def _failed(self, episode: Episode, error: GenerationFailedError | EnvironmentFailure) -> float:
        """Account for a sample that the infrastructure failed. Returns the pause before the next one, seconds."""
        cause = str(error.cause) if isinstance(error, GenerationFailedError) else "environment"
        self.failures[cause] += 1
        words = f"{type(error).__name__}: {error}"
        self._note(SampleFailed(group=episode.group, trajectory=episode.trajectory, cause=words))
        _log.warning("%s of %s is played again: %s", episode.trajectory, episode.group, words)
        failures = self._buffer.failed(episode.group, episode.trajectory, words)
        return min(self._limits.pause_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS), self._limits.max_pause_s)


def _this_task() -> "asyncio.Task[object]":
    task = asyncio.current_task()
    assert task is not None
    return task


async def _together(plays: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all at once; the first that fails cancels the others and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for play in plays:
                tasks.create_task(play)
    except BaseExceptionGroup as failed:
        raise first_error(failed) from None


def first_error(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error inside nested groups."""
    error: BaseException = failed
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def trajectory_seed(seed: int, number: int) -> int:
    """Sampling seed of a run's trajectory, 31 bits; the same in every process."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
