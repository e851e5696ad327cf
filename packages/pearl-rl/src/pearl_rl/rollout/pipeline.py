"""The Pipeline Scheduler: the asynchronous RL hot path (PEARL section 4.1).

Rollout of a batch begins when the batch before it is complete, while training runs on that one. It waits for training
only where the staleness bound says so. Training asks for its GPUs when a batch is complete, runs once they are granted,
publishes the new weights, and says that it is done; the Elastic Scheduler hears of all this as events.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence

from pearl_executor.ports import WeightSnapshot
from pearl_rl.observer import Observer, SilentObserver, StepRecord
from pearl_rl.rollout.agent import Agent, turn_samples
from pearl_rl.rollout.batch_rollout import BatchRollout, first_error
from pearl_rl.rollout.batch_under_way import Batch, Mark
from pearl_rl.rollout.buffer import (
    GroupBuffer,
    StalenessBound,
    UsedSample,
    VersionRegressionError,
    summarize_staleness,
)
from pearl_rl.rollout.counts import BufferCounts
from pearl_rl.rollout.diagnosis import Observation, diagnose, told
from pearl_rl.rollout.environments.protocol import TaskSource
from pearl_rl.rollout.ledger import BatchTaken, Note, Position, RolloutLedger, SamplesRejected, StepTrained, unnoted
from pearl_rl.rollout.lifecycle import LifecycleTrace
from pearl_rl.rollout.pipeline_settings import (
    EndReason,
    PipelineOutcome,
    PipelineSettings,
    RolloutTimeoutError,
    UpdateTimeoutError,
)
from pearl_rl.rollout.ports import Flow, RolloutTracker, Trainer, UpdateResult
from pearl_rl.rollout.readiness import ReadinessMonitor
from pearl_rl.rollout.router import Router
from pearl_rl.rollout.task_gate import TaskGate
from pearl_rl.rollout.training_gate import GrantTimeoutError, TrainingGate
from pearl_state.errors import ConfigurationError
from pearl_state.events import (
    Event,
    RolloutBegan,
    RolloutFinished,
    RolloutProgressed,
    TrainingFinished,
    TrainingRequested,
    WeightsPublished,
)
from pearl_state.roles import Zone
from pearl_state.trajectory import Trajectory

_MOST_REPORTS = 256
"""Of the progress of a batch to the planner."""


class PipelineScheduler:
    """Runs rollout and training side by side until the steps are made. One per run."""

    def __init__(
        self,
        settings: PipelineSettings,
        *,
        router: Router,
        agent: Agent,
        tasks: TaskSource,
        trainer: Trainer,
        publish: Callable[[WeightSnapshot], Awaitable[None] | None],
        gate: TrainingGate,
        post: Callable[[Event], None],
        tracker: RolloutTracker,
        observer: Observer | None = None,
        checkpoint: Callable[[int], Awaitable[None]] | None = None,
        on_trajectory: Callable[[Trajectory, int], None] = lambda _trajectory, _step: None,
        predicted_s: Callable[[], float | None] = lambda: None,
        position: Position | None = None,
        lifecycle: LifecycleTrace | None = None,
        batching: TaskGate | None = None,
        readiness: ReadinessMonitor | None = None,
        note: Note = unnoted,
        commit: Callable[[], Awaitable[None]] | None = None,
        restored: RolloutLedger | None = None,
    ) -> None:
        """`publish` makes a snapshot what workers fetch. `checkpoint` is given each completed step while training still
        holds its GPUs, and bounds itself. `on_trajectory` gets each trajectory with the step it was rolled out in.
        `predicted_s` is asked, when a batch is complete, which makespan was predicted for it. `batching` stands before
        the router and is told of every trajectory, `readiness` of every complete group and every update.
        `note` gets what a resumed run must know, `commit` returns once that is durable, and `restored` is what an
        earlier control plane of this run left behind `completed_steps`.
        """
        self._settings = settings
        self._router = router
        self._trainer = trainer
        self._publish = publish
        self._gate = gate
        self._post = post
        self._tracker = tracker
        self._observer: Observer = SilentObserver() if observer is None else observer
        self._checkpoint = checkpoint
        self._on_trajectory = on_trajectory
        self._predicted_s = predicted_s
        self._version = trainer.version
        bound = StalenessBound(
            max_staleness=settings.max_staleness,
            batch=settings.batch,
            # Restored counts are those of the whole run, and so are the updates that they are held against.
            start_version=trainer.version - (settings.completed_steps if restored else 0),
        )
        self._buffer = GroupBuffer(bound, settings.group_size, settings.max_refills_per_group)
        self._rollout = BatchRollout(
            router=router,
            agent=agent,
            tasks=tasks,
            buffer=self._buffer,
            group_size=settings.group_size,
            seed=settings.seed,
            version=lambda: self._version,
            limits=settings.refill,
            position=position,
            lifecycle=lifecycle,
            note=note,
            gate=batching,
        )
        self._readiness = readiness
        self._batching = batching
        self._note = note
        self._commit = commit
        if restored is not None:
            self._buffer.restore(restored.groups, restored.counts)
            self._rollout.restore(restored.groups)
        self._batches: asyncio.Queue[Batch | None] = asyncio.Queue()
        self._training = False
        self._seeded = False
        self._version_changed: asyncio.Future[None] | None = None
        self._stopping = False
        self._began_s = self._step_ended_s = 0.0
        self._rewards: list[float] = []
        self._generated_tokens = self._trained_tokens = 0
        self._wait_bound_s = self._wait_grant_s = 0.0
        self._reason = EndReason.STEPS

    @property
    def version(self) -> int:
        """The trainer's weight version."""
        return self._version

    @property
    def counts(self) -> BufferCounts:
        """What became of every dispatched trajectory so far."""
        return self._buffer.counts

    @property
    def made(self) -> int:
        """Steps that were made so far, those before a resume not among them."""
        return len(self._rewards)

    @property
    def position(self) -> Position:
        """Where a run that resumes from here goes on."""
        return self._rollout.position

    def stop(self) -> None:
        """End in order: begin no further batch, finish and train on the one under way."""
        self._stopping = True
        self._wake()

    async def run(self) -> PipelineOutcome:
        """Make the steps. Leaves nothing running, however it ends.

        Raises what ends a run early: `GrantTimeoutError`, `UpdateTimeoutError`, `RolloutTimeoutError`,
        `RefillsExhaustedError`, `UnplayableTasksError`, `VersionRegressionError`, and errors of trainer and agent.
        """
        self._began_s = self._step_ended_s = self._now_s()
        if self._readiness is not None:
            self._readiness.began(self._settings.completed_steps, self._began_s)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._roll_out(), name="rollout")
                tasks.create_task(self._train(), name="training")
        except BaseExceptionGroup as failed:
            raise first_error(failed) from None
        finally:
            await self._router.settle()
        return PipelineOutcome(
            reason=self._reason,
            steps=len(self._rewards),
            version=self._version,
            counts=self._buffer.counts,
            rewards=tuple(self._rewards),
            generated_tokens=self._generated_tokens,
            trained_tokens=self._trained_tokens,
            wait_bound_s=self._wait_bound_s,
            wait_grant_s=self._wait_grant_s,
            wall_s=self._now_s() - self._began_s,
            failures=dict(self._rollout.failures),
        )

    # ---- rollout ----------------------------------------------------------------------------------------------------

    async def _roll_out(self) -> None:
        settings = self._settings
        for step in range(settings.completed_steps + 1, settings.steps + 1):
            waited_s = await self._wait_for_bound(settings.batch - self._rollout.begun(step) * settings.group_size)
            if self._over():
                break
            batch = await self._play(step, waited_s)
            self._batches.put_nowait(batch)
        self._batches.put_nowait(None)

    def _over(self) -> bool:
        if self._stopping:
            self._reason = EndReason.STOPPED
        elif self._now_s() - self._began_s >= self._settings.wall_limit_s:
            self._reason = EndReason.WALL_LIMIT
        else:
            return False
        return True

    async def _wait_for_bound(self, samples: int) -> float:
        """Return once so many samples may be dispatched, or the run stops. Returns how long it took, seconds.

        Bounded by training's own limits: training fails, and the run with it, where no update comes.
        """
        began_s = self._now_s()
        while self._buffer.capacity(self._version) < samples and not self._stopping:
            await self._next_version()
        waited_s = self._now_s() - began_s
        self._wait_bound_s += waited_s
        return waited_s

    async def _next_version(self) -> None:
        self._version_changed = asyncio.get_running_loop().create_future()
        await self._version_changed

    def _mark(self) -> Mark:
        """Begin to measure a rollout."""
        self._router.take_borrowed()
        statistics = self._router.statistics
        return Mark(self._router.concurrency(), statistics.prefixes.copy(), statistics.calls)

    async def _play(self, step: int, waited_s: float) -> Batch:
        """Roll one batch out and tell that it is complete."""
        settings = self._settings
        remaining = settings.batch - self._rollout.completed(step)
        batch = Batch(self, step, self._now_s(), remaining, waited_s, self._mark())
        self._post(RolloutBegan(now_s=batch.began_s, step=step, batch=settings.batch))
        if remaining < settings.batch:
            self._post(RolloutProgressed(now_s=batch.began_s, step=step, remaining=remaining))
        # Looked at before the limit cancels everything: afterwards nothing is under way any more.
        seen: list[Observation] = []
        look = asyncio.get_running_loop().call_later(settings.batch_s, lambda: seen.append(self._router.observe()))
        try:
            async with asyncio.timeout(settings.batch_s) as limit:
                await self._rollout.play(settings.groups_per_step, batch, step)
        except TimeoutError as error:
            if not limit.expired():
                raise
            found = diagnose(seen[0] if seen else self._router.observe())
            raise RolloutTimeoutError(
                f"step {step}: {batch.remaining} of {settings.batch} trajectories are not complete after "
                f"{settings.batch_s:,.0f} s: {told(found)}"
            ) from error
        finally:
            look.cancel()
        self._finish(batch)
        if not self._training and self._batches.empty() and not self._buffer.stale_ids(self._version):
            # Training is idle: it wants its GPUs before the next batch is dispatched to workers on them.
            self._request_training(batch)
        return batch

    def _finish(self, batch: Batch) -> None:
        """Account for a batch that is complete, and tell of it."""
        now_s = self._now_s()
        batch.makespan_s = now_s - batch.began_s
        batch.borrowed = self._router.take_borrowed()
        batch.configuration = self._configuration()
        batch.predicted_s = self._predicted_s()
        self._tracker.finish_step(
            step=batch.step,
            batch=self._settings.batch,
            makespan_s=batch.makespan_s,
            decoding_fraction=(self._router.concurrency() - batch.mark.concurrency).decoding_fraction,
            borrowed=batch.borrowed,
            moved_fraction=self._router.statistics.prefixes.since(batch.mark.prefixes),
            flow=self._flow(batch),
        )
        self._post(RolloutFinished(now_s=now_s, step=batch.step, makespan_s=batch.makespan_s, borrowed=batch.borrowed))

    def _flow(self, batch: Batch) -> Flow | None:
        """What went on beside `batch`; None where batches do not overlap."""
        del batch
        return None

    def on_completed(self, batch: Batch, trajectory: Trajectory) -> None:
        """A trajectory of `batch` came back; a refill of a batch that was complete before is no progress of it."""
        self._on_trajectory(trajectory, batch.step)
        self._tracker.observe_turns(turn_samples(trajectory, batch.step))
        if self._readiness is not None:
            self._readiness.ready(self._buffer.ready(), self._now_s())
        self._progress(batch)

    def _progress(self, batch: Batch) -> None:
        if batch.remaining > 0:
            batch.remaining -= 1
            # The planner reckons in fractions of a batch: of a large one it need not hear each trajectory.
            if batch.remaining % max(1, self._settings.batch // _MOST_REPORTS) == 0:
                self._post(RolloutProgressed(now_s=self._now_s(), step=batch.step, remaining=batch.remaining))

    def _configuration(self) -> str:
        try:
            return str(self._router.table.configuration)
        except ConfigurationError:
            return ""

    # ---- training ---------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        while (batch := await self._next_batch()) is not None:
            self._training = True
            await self._step(batch)
            self._training = False

    async def _next_batch(self) -> Batch | None:
        """The next complete batch, None at the end. Where the seeding window is over first, training holds its GPUs
        from then on, idle as it is.
        """
        if self._settings.seeding_s < math.inf:
            window = asyncio.get_running_loop().call_later(self._settings.seeding_s, self._end_seeding)
            try:
                return await self._batches.get()
            finally:
                window.cancel()
        return await self._batches.get()

    def _end_seeding(self) -> None:
        if self._batches.empty():
            self._ask_for_gpus()
            self._seeded = True

    def _request_training(self, batch: Batch) -> None:
        batch.requested_s = self._now_s()
        if not self._seeded:
            self._ask_for_gpus()
        self._seeded = False

    def _ask_for_gpus(self) -> None:
        self._gate.request()
        self._post(TrainingRequested(now_s=self._now_s()))

    async def _step(self, batch: Batch) -> None:
        """Train on one batch and publish what comes out."""
        gone = self._buffer.stale_ids(self._version)
        stale = self._buffer.reject_stale(self._version)
        if stale:
            self._note(SamplesRejected(trajectories=gone))
            await self._rollout.refill(stale, batch)
        if batch.requested_s is None:
            self._request_training(batch)
        waited_s = await self._granted(batch)
        samples = self._take()
        groups = tuple(dict.fromkeys(sample.trajectory.group for sample in samples))
        for group in groups:
            self._rollout.forget(group)
        self._note(BatchTaken(step=batch.step, groups=groups))
        if self._commit is not None:
            await self._commit()
        update, duration_s = await self._update(batch, samples)
        if self._readiness is not None:
            self._readiness.boundary(batch.step, update.version, len(samples), duration_s, self._now_s())
        # Before the publication: a step whose weights are published is never made again, and so never told later.
        self._record(batch, samples, update, duration_s, waited_s)
        if (publication := self._publish(update.snapshot)) is not None:
            await publication
        self._note(StepTrained(step=batch.step))
        self._post(WeightsPublished(now_s=self._now_s(), version=update.version))
        self._version = update.version
        self._wake()
        if self._checkpoint is not None:
            await self._checkpoint(batch.step)
        self._post(TrainingFinished(now_s=self._now_s(), weight_version=update.version, duration_s=duration_s))

    async def _update(self, batch: Batch, samples: Sequence[UsedSample]) -> tuple[UpdateResult, float]:
        """The trainer's answer and what it took, seconds. Raises where it takes too long, or makes no newer version."""
        began_s = self._now_s()
        try:
            async with asyncio.timeout(self._settings.update_s) as limit:
                update = await self._trainer.update([sample.trajectory for sample in samples])
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise UpdateTimeoutError(
                f"step {batch.step}: the update took longer than {self._settings.update_s:g} s"
            ) from error
        if update.version <= self._version:
            raise VersionRegressionError(
                f"step {batch.step}: the update made version {update.version}, not newer than {self._version}"
            )
        return update, update.duration_s or self._now_s() - began_s

    def _take(self) -> list[UsedSample]:
        groups = self._settings.groups_per_step
        samples = self._buffer.take(groups, self._version)
        if self._readiness is not None:
            self._readiness.taken(groups)
        return samples

    async def _granted(self, batch: Batch) -> float:
        """Wait for the training GPUs. Returns how long it took since they were asked for, seconds."""
        assert batch.requested_s is not None
        try:
            await self._gate.wait_grant(self._settings.grant_s)
        except TimeoutError as error:
            holders = ", ".join(
                f"worker {row.id} ({row.role}, {row.lifecycle})"
                for row in self._router.table.rows.values()
                if row.zone is Zone.OVERLAP and row.holds_gpu
            )
            raise GrantTimeoutError(
                f"step {batch.step}: training was not given its GPUs within {self._settings.grant_s:g} s; "
                f"held by: {holders or 'nobody'}"
            ) from error
        waited_s = self._now_s() - batch.requested_s
        self._wait_grant_s += waited_s
        return waited_s

    def _record(
        self, batch: Batch, samples: list[UsedSample], update: UpdateResult, training_s: float, wait_grant_s: float
    ) -> None:
        """Tell the observer of a step whose update is made."""
        now_s = self._now_s()
        trajectories = [sample.trajectory for sample in samples]
        mean = sum(t.reward for t in trajectories) / len(trajectories)
        variance = sum((t.reward - mean) ** 2 for t in trajectories) / len(trajectories)
        generated = sum(t.response_tokens for t in trajectories)
        trained = sum(t.total_tokens for t in trajectories)
        ages = summarize_staleness(samples)
        metrics = update.metrics
        self._rewards.append(mean)
        self._generated_tokens += generated
        self._trained_tokens += trained
        self._observer.on_step(
            StepRecord(
                step=batch.step,
                steps=self._settings.steps,
                now_s=now_s,
                reward_mean=mean,
                reward_std=math.sqrt(variance),
                trajectories=len(trajectories),
                generated_tokens=generated,
                trained_tokens=trained,
                duration_s=now_s - self._step_ended_s,
                rollout_s=batch.makespan_s,
                training_s=training_s,
                predicted_rollout_s=batch.predicted_s,
                configuration=batch.configuration,
                borrowed=batch.borrowed,
                staleness_mean=ages.mean,
                staleness_max=ages.maximum,
                staleness_in_flight_mean=ages.in_flight_mean,
                staleness_in_queue_mean=ages.in_queue_mean,
                staleness_histogram=ages.histogram,
                wait_grant_s=wait_grant_s,
                wait_bound_s=batch.wait_bound_s,
                lost_trajectories=self._buffer.counts.lost,
                weight_version=update.version,
                loss=metrics.get("loss", 0.0),
                kl=metrics.get("kl", 0.0),
                gradient_norm=metrics.get("gradient_norm", 0.0),
                clipped_fraction=metrics.get("clipped_fraction", 0.0),
            )
        )
        self._step_ended_s = now_s

    # ---- small parts ------------------------------------------------------------------------------------------------

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _wake(self) -> None:
        if self._version_changed is not None and not self._version_changed.done():
            self._version_changed.set_result(None)
