"""Plays the trajectories of a batch: groups of samples, each refilled alone where the infrastructure failed it."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pearl_rl.rollout.agent import Agent, Episode, PromptTooLongError
from pearl_rl.rollout.buffer import GroupBuffer
from pearl_rl.rollout.calls import FailureCause, GenerationFailedError
from pearl_rl.rollout.environments.protocol import EnvironmentFailure, Task, TaskSource
from pearl_rl.rollout.lifecycle import LifecycleTrace, task_kind
from pearl_rl.rollout.router import Router
from pearl_state.trajectory import GroupId, Trajectory, TrajectoryId


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


@dataclass(slots=True, kw_only=True)
class Position:
    """What the next group and trajectory are numbered: a resumed run goes on from here."""

    next_group: int = 0
    next_trajectory: int = 0


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
    ) -> None:
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
        self._open: dict[GroupId, Task] = {}
        self.failures: Counter[str] = Counter()
        """Why samples were dispatched again → how often."""

    async def play(self, groups: int, listener: BatchListener) -> None:
        """Open `groups` groups and return once all are complete.

        Raises `RefillsExhaustedError`, `UnplayableTasksError`, and whatever a bug in an agent raises.
        """
        await _together([self._group(listener) for _ in range(groups)])

    async def refill(self, groups: Sequence[GroupId], listener: BatchListener) -> None:
        """Dispatch one more sample for each entry and return once all are complete."""
        await _together([self._sample(group, listener) for group in groups])

    def forget(self, group: GroupId) -> None:
        """A group was used: nothing more is dispatched for it."""
        self._open.pop(group, None)

    async def _group(self, listener: BatchListener) -> None:
        cause: Exception | None = None
        for _ in range(self._limits.max_dropped_groups + 1):
            group = GroupId(f"g{self.position.next_group:06d}")
            self._open[group] = self._tasks.task(self.position.next_group)
            self.position.next_group += 1
            self._buffer.open(group)
            try:
                await _together([self._sample(group, listener) for _ in range(self._size)])
            except _UnplayableTask as error:
                cause = error
                self.forget(group)
                listener.dropped(self._buffer.drop(group))
            else:
                return
        raise UnplayableTasksError(
            f"{self._limits.max_dropped_groups + 1} tasks in a row cannot be played; the last: {cause}"
        )

    async def _sample(self, group: GroupId, listener: BatchListener) -> None:
        """Play one sample of a group until one comes back."""
        while True:
            episode = self._dispatch(group)
            self._router.begin(episode.trajectory)
            if self._lifecycle is not None:
                self._lifecycle.sampled(episode.trajectory, group, task_kind(episode.task.id))
            accepted: bool | None = None
            try:
                trajectory = await self._agent.run(episode, self._router.generate)
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
                accepted = True
                listener.completed(trajectory)
                return
            finally:
                self._router.end(episode.trajectory)
                if self._lifecycle is not None:
                    self._lifecycle.ended(episode.trajectory, accepted=accepted)
            await asyncio.sleep(pause_s)

    def _dispatch(self, group: GroupId) -> Episode:
        number = self.position.next_trajectory
        self.position.next_trajectory += 1
        version = self._version()
        trajectory = TrajectoryId(f"t{number:08d}")
        self._buffer.dispatch(group, trajectory, version)
        return Episode(
            trajectory=trajectory,
            group=group,
            task=self._open[group],
            dispatch_version=version,
            seed=trajectory_seed(self._seed, number),
        )

    def _failed(self, episode: Episode, error: GenerationFailedError | EnvironmentFailure) -> float:
        """Account for a sample that the infrastructure failed. Returns the pause before the next one, seconds."""
        cause = str(error.cause) if isinstance(error, GenerationFailedError) else "environment"
        self.failures[cause] += 1
        failures = self._buffer.failed(episode.group, episode.trajectory, f"{type(error).__name__}: {error}")
        return min(self._limits.pause_s * 2.0 ** (failures - 1), self._limits.max_pause_s)


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
