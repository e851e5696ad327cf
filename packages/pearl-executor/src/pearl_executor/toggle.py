"""Intra-Scale Toggle Manager: rollout on training GPUs in idle windows (PEARL section 4.6).

Processes stay; only device memory changes hands, and each handover is verified by measure before the other side may
take the GPU. Returning is mandatory: it is over by its deadline, if need be without the process.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from pearl_executor.calls import BoundedCalls, CallError
from pearl_executor.group import Preparation, prepare_group
from pearl_executor.ports import MemoryReport, TrainingPort, WorkerError, WorkerLostError
from pearl_executor.processes import Residency
from pearl_executor.weight_sync import WeightSync
from pearl_executor.workers import BoundedWorkers, kill_time
from pearl_state.effects import PrepareGroup, ReleaseTraining, ResumeTraining
from pearl_state.events import GroupFailed, GroupPrepared, TrainingReleased, TrainingResumed
from pearl_state.lifecycle import Lifecycle
from pearl_state.worker import Worker


class ToggleManager:
    """Lends training GPUs to retained rollout processes and takes them back."""

    def __init__(
        self, workers: BoundedWorkers, weights: WeightSync, training: TrainingPort | None, calls: BoundedCalls
    ) -> None:
        self._workers = workers
        self._weights = weights
        self._training = training
        self._calls = calls
        self._residency = Residency.RESIDENT
        self._resident_bytes = 0
        """What training held before its last release; until then it never resumes."""
        self._failed_resumes = 0

    # ---- rollout workers --------------------------------------------------------------------------------------------

    async def borrow(self, effect: PrepareGroup) -> GroupPrepared | GroupFailed:
        """Resume retained processes (start those that never were) and bring each to the newest weights.

        All or nothing: on a failure or when this is cancelled, who was resumed is released again, in reverse order of
        its steps and verified; a process whose state is in doubt, or that is at fault, is killed.
        """
        return await prepare_group(
            effect,
            Preparation(
                bring_up=self._bring_up,
                roll_back=self._roll_back,
                workers=self._workers,
                weights=self._weights,
            ),
        )

    async def leave(self, worker: Worker, deadline_s: float | None) -> None:
        """Save partial work, drain, and give the device memory back, verified; the process stays.

        Raises `CallError` where that fails; where the deadline (absolute) would pass meanwhile, the process is killed
        first.
        """
        loop = asyncio.get_running_loop()
        limits = self._workers.limits
        kill_at_s = float("inf") if deadline_s is None else kill_time(deadline_s, limits)
        try:
            await self._weights.abandon(worker)
            await self._workers.drain(worker, kill_at_s - loop.time())
            await self._workers.release(worker, kill_at_s - loop.time())
        except CallError as error:
            if loop.time() < kill_at_s:
                raise
            await self._workers.kill(worker)
            raise CallError(f"{error}; killed, since its GPUs are due", error.kind) from error

    async def _bring_up(self, worker: Worker) -> int:
        """Memory first, then weights, then what others know of the KV buffers."""
        if worker.lifecycle is Lifecycle.STARTING:
            await self._workers.start(worker)
        else:
            await self._workers.resume(worker)
            # The last borrow may have left it with another role.
            if (await self._workers.probe(worker)).role is not worker.role:
                await self._workers.switch(worker)
        version = await self._weights.bring(worker, 0, self._workers.limits.load_s)
        await self._workers.refresh_peers(worker)
        return version

    async def _roll_back(self, worker: Worker, at_fault: bool) -> str | None:
        """Undo a borrow of one worker. Its weights need no undoing: they are void without their memory."""
        workers = self._workers
        if at_fault or worker.lifecycle is Lifecycle.STARTING:
            await workers.kill_until_confirmed(worker)
            return None
        try:
            await workers.release(worker)
        except CallError as error:
            await workers.kill_until_confirmed(worker)
            return f"{error}; killed, since the borrow was rolled back"
        return None

    # ---- training ---------------------------------------------------------------------------------------------------

    async def release_training(self, effect: ReleaseTraining) -> TrainingReleased:
        """Have training give its device memory back, verified. Where it does not, it takes everything again."""
        cause = await self._release_training()
        return TrainingReleased(now_s=_now_s(), plan_id=effect.plan_id, failed=cause)

    async def resume_training(self, effect: ResumeTraining) -> TrainingResumed:
        """Have training take the device memory that it gave back, verified.

        The caller repeats a failed resume; each repetition waits a little longer before it tries.
        """
        if self._failed_resumes:
            await asyncio.sleep(self._pause_s())
        cause = await self._resume_training()
        return TrainingResumed(now_s=_now_s(), plan_id=effect.plan_id, failed=cause)

    async def _release_training(self) -> str | None:
        training = self._training
        if training is None:
            return "this run has no training whose GPUs could be lent"
        if self._residency is Residency.RELEASED:
            return None
        if self._residency is Residency.IN_DOUBT:
            return "training: release refused, the outcome of an earlier release or resume is not known"

        async def release() -> None:
            self._residency = Residency.IN_DOUBT
            report = await self._training_call(training.release(), Residency.RESIDENT)
            released, required = _given(report), self._workers.required_bytes(report.before_bytes)
            if released < required:
                raise WorkerError(f"training released {released} bytes of device memory, expected {required}")
            # What it gave is what it must hold again, whatever else lived beside it when it was asked.
            self._resident_bytes = released
            self._residency = Residency.RELEASED

        try:
            await self._calls.call(None, "release", release(), self._workers.limits.training_release_s)
        except CallError as error:
            if self._residency is Residency.RESIDENT:
                return str(error)
            return await self._take_back(str(error))
        return None

    async def _take_back(self, cause: str) -> str:
        """Undo a release that failed half-way. Returns the cause, with the last of what went wrong since.

        Nobody may be told that training holds its GPUs before it does: it is tried until it is so, ever more rarely.
        """
        while (undone := await self._resume_training()) is not None:
            if self._workers.closing:
                return f"{cause}; and then {undone}"
            await asyncio.sleep(self._pause_s())
        return cause

    def _pause_s(self) -> float:
        """How long to wait after so many failed resumes, seconds."""
        limits = self._workers.limits
        return min(limits.retry_s * 2.0 ** min(self._failed_resumes - 1, 30), limits.retry_max_s)

    async def _resume_training(self) -> str | None:
        training = self._training
        if training is None or self._residency is Residency.RESIDENT:
            return None

        async def resume() -> None:
            before, self._residency = self._residency, Residency.IN_DOUBT
            report = await self._training_call(training.resume(), before)
            # What it holds counts, not what it took: a try before this one may have been done without an answer.
            held, required = report.after_bytes, self._workers.required_bytes(self._resident_bytes)
            if held < required:
                raise WorkerError(f"training holds {held} bytes of device memory, expected {required}")
            self._residency = Residency.RESIDENT

        try:
            await self._calls.call(None, "resume", resume(), self._workers.limits.training_resume_s)
        except CallError as error:
            self._failed_resumes += 1
            return str(error)
        self._failed_resumes = 0
        return None

    async def _training_call(self, call: Coroutine[Any, Any, MemoryReport], before: Residency) -> MemoryReport:
        """Await a change of training's memory; a plain `WorkerError` means that nothing changed."""
        try:
            return await call
        except WorkerLostError:
            raise
        except WorkerError:
            self._residency = before
            raise


def _given(report: MemoryReport) -> int:
    """Bytes that a release gave back; negative where memory was taken."""
    return report.before_bytes - report.after_bytes


def _now_s() -> float:
    return asyncio.get_running_loop().time()
