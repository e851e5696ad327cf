"""Continuous injection: groups enter whenever the staleness bound lets them, not when a whole batch has ended.

Most of a batch's makespan is its tail: a few long trajectories while the workers are nearly idle. Here the next groups
are dispatched beside the tail (TideRL sections 2.1 and 4.1), so up to η + 1 batches are under way. The trainer takes
the groups that were dispatched first. Before an update would make a sample too old, or leave more old groups behind
than the updates after it can take in time (`pearl_planner.staleness`), it waits for such groups rather than throw them
away: a step may wait for a straggler, but hardly for one of its own batch. With `straggler_patience` it waits only so
long, then gives up the samples that are missing and trains on their groups without them; they count as dropped.
"""

import asyncio
import math
from collections import deque
from functools import cached_property
from statistics import fmean
from typing import Final

from pearl_rl.rollout.batch_under_way import Batch
from pearl_rl.rollout.buffer import UsedSample
from pearl_rl.rollout.pipeline import PipelineScheduler
from pearl_rl.rollout.pipeline_settings import Injection, PipelineSettings, RolloutTimeoutError
from pearl_rl.rollout.ports import Flow
from pearl_state.events import RolloutBegan, RolloutProgressed
from pearl_state.trajectory import Trajectory

_REMEMBERED_STEPS: Final = 8


class ContinuousPipeline(PipelineScheduler):
    """The hot path with continuous injection. A step's rollout is the time between two full sets of ready groups."""

    _current: Batch
    _injected = False
    """Whether no further group enters."""
    _under_way = 0
    """Groups that are not complete."""
    _claimed = 0
    """Complete groups that a step is about to take."""

    @cached_property
    def _steps_s(self) -> deque[float]:
        """How long the last steps' rollouts took."""
        return deque(maxlen=_REMEMBERED_STEPS)

    @cached_property
    def _news(self) -> asyncio.Event:
        return asyncio.Event()

    async def _roll_out(self) -> None:
        settings = self._settings
        first = self._version
        groups = (settings.steps - settings.completed_steps) * settings.groups_per_step
        try:
            async with asyncio.TaskGroup() as plays:
                before = self._rollout.begun(0)
                if before:
                    self._under_way += before
                    plays.create_task(self._play_groups(before))
                for number in range(before, groups):
                    # (η + v + 1) batches may have been dispatched by version v, counted from the start.
                    while number >= (settings.max_staleness + self._version - first + 1) * settings.groups_per_step:
                        if self._over():
                            break
                        await self._next_version()
                    if self._over():
                        break
                    self._under_way += 1
                    plays.create_task(self._play_groups(1))
                self._injected = True
                self._wake()
        finally:
            self._injected = True

    async def _play_groups(self, count: int) -> None:
        await self._rollout.play(count, self)
        self._under_way -= count
        self._wake()

    # ---- as a BatchListener -----------------------------------------------------------------------------------------

    def completed(self, trajectory: Trajectory) -> None:
        """A trajectory came back, of whichever step."""
        self.on_completed(self._current, trajectory)

    def dropped(self, complete: int) -> None:
        """A group was given up and another one takes its place."""

    def _progress(self, batch: Batch) -> None:
        # What is in flight feeds further batches too; the planner reckons with one. However few samples a step lacks,
        # they may be long ones; only where it lacks none, training begins at once and has nothing to lend.
        enough = self._buffer.ready() - self._claimed >= self._settings.groups_per_step
        ready = enough and not self._buffer.due(self._version)
        remaining = 0 if ready else min(self._settings.batch, self._buffer.counts.in_flight)
        if remaining != batch.remaining:
            batch.remaining = remaining
            self._post(RolloutProgressed(now_s=self._now_s(), step=batch.step, remaining=remaining))

    def _request_training(self, batch: Batch) -> None:
        self._claimed = self._settings.groups_per_step
        super()._request_training(batch)

    def _take(self) -> list[UsedSample]:
        self._claimed = 0
        return super()._take()

    # ---- training ---------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        settings = self._settings
        batch = self._begin(settings.completed_steps + 1)
        while await self._ready(batch):
            self._finish(batch)
            self._steps_s.append(batch.makespan_s)
            if not self._buffer.stale_ids(self._version):
                # Else their successors come first: while training holds its GPUs they would be long in coming.
                self._request_training(batch)
            following = self._begin(batch.step + 1) if batch.step < settings.steps else None
            await self._step(batch)
            if following is None:
                return
            batch = following

    def _begin(self, step: int) -> Batch:
        self._current = batch = Batch(self, step, self._now_s(), self._settings.batch, 0.0, self._mark())
        self._post(RolloutBegan(now_s=batch.began_s, step=step, batch=self._settings.batch, continuous=True))
        self._progress(batch)
        return batch

    def _flow(self, batch: Batch) -> Flow | None:
        passed = self._router.concurrency() - batch.mark.concurrency
        if not passed.elapsed_s:
            return None
        return Flow(passed.in_flight_s / passed.elapsed_s, self._router.statistics.calls - batch.mark.calls)

    async def _ready(self, batch: Batch) -> bool:
        """Return once a batch is ready and no sample under way would be made too old by it; False where none comes."""
        settings = self._settings
        patience: asyncio.TimerHandle | None = None
        try:
            async with asyncio.timeout(settings.batch_s) as limit:
                while True:
                    enough = self._buffer.ready() >= settings.groups_per_step
                    if enough and not self._buffer.due(self._version):
                        return True
                    if self._injected and not self._under_way and not enough:
                        return False
                    if enough and patience is None and self._steps_s and settings.straggler_patience < math.inf:
                        wait_s = settings.straggler_patience * fmean(self._steps_s)
                        patience = asyncio.get_running_loop().call_later(wait_s, self._give_up)
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise RolloutTimeoutError(
                f"step {batch.step}: {self._buffer.ready()} of {settings.groups_per_step} groups are ready after "
                f"{settings.batch_s:g} s, {self._buffer.due(self._version)} of those missing must be in it, or "
                f"samples become too old; requests on workers: {sum(self._router.loads().values()):g}"
            ) from error
        finally:
            if patience is not None:
                patience.cancel()

    def _give_up(self) -> None:
        """Nobody waits any longer for what is as old as it may be."""
        self._rollout.give_up(self._buffer.give_up_due(self._version))
        self._wake()

    def _wake(self) -> None:
        super()._wake()
        self._news.set()


def pipeline_class(settings: PipelineSettings) -> type[PipelineScheduler]:
    """The hot path that the settings ask for."""
    return ContinuousPipeline if settings.injection is Injection.CONTINUOUS else PipelineScheduler
