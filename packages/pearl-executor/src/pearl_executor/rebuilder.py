"""Inter-Scale Cluster Rebuilder: workers on dedicated GPUs, which come and go (PEARL section 4.5).

Shrinking is cheap and urgent: partial work is saved first, then the GPUs are empty by the deadline whatever the
process does. Expansion is expensive and deferrable: it runs in the background, all or nothing.
"""

import asyncio
import contextlib

from pearl_executor.calls import CallError
from pearl_executor.group import Preparation, prepare_group
from pearl_executor.weight_sync import WeightSync
from pearl_executor.workers import BoundedWorkers, kill_time
from pearl_state.effects import PrepareGroup
from pearl_state.events import GroupFailed, GroupPrepared
from pearl_state.worker import Worker


class ClusterRebuilder:
    """Starts and ends worker processes."""

    def __init__(self, workers: BoundedWorkers, weights: WeightSync) -> None:
        self._workers = workers
        self._weights = weights

    async def expand(self, effect: PrepareGroup) -> GroupPrepared | GroupFailed:
        """Start all workers and bring each to the newest weights, or end every one that was begun.

        Cancel this to give the expansion up; it still returns the answer, with nothing of the group left.
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
        """Save partial work, then end the process; kill it in time for `deadline_s` (absolute) where it must be.

        While the deadline allows, requests run to their end (`Limits.drain_s`); what is left is interrupted and keeps
        its prefix. Returns once the GPUs are empty. Raises `CallError` where not even the kill was confirmed.
        """
        loop = asyncio.get_running_loop()
        limits = self._workers.limits
        kill_at_s = (
            loop.time() + limits.interrupt_s + limits.stop_s if deadline_s is None else kill_time(deadline_s, limits)
        )
        self._weights.give_up(worker)
        if deadline_s is not None:
            await self._drain(worker, kill_at_s - limits.stop_s - limits.interrupt_s - loop.time())
        if (left_s := kill_at_s - loop.time()) > 0.0:
            # Callers keep the tokens that they saw; where the interruption fails, the rest is not worth waiting for.
            with contextlib.suppress(CallError):
                await self._workers.interrupt(worker, left_s)
        await self._workers.end(worker, kill_at_s)

    async def _drain(self, worker: Worker, left_s: float) -> None:
        """Let requests finish where more time is left than the rest of leaving takes."""
        drain_s = min(left_s, self._workers.limits.drain_s)
        if drain_s > 0.0:
            # Those that do not finish are interrupted; a process that is broken is killed by what follows.
            with contextlib.suppress(CallError):
                await self._workers.finish(worker, drain_s)

    async def _bring_up(self, worker: Worker) -> int:
        """Start, then load what is newest *then*: no weights are sent to a process that is not there yet."""
        await self._workers.start(worker)
        version = await self._weights.bring(worker, 0, self._workers.limits.load_s)
        await self._workers.refresh_peers(worker)
        return version

    async def _roll_back(self, worker: Worker, at_fault: bool) -> str | None:
        """End what was begun: a process that may be half up or broken is killed, the others stop in order."""
        if at_fault or not self._workers.processes.knows(worker):
            await self._workers.kill_until_confirmed(worker)
            return None
        try:
            await self._workers.end(worker)
        except CallError:
            await self._workers.kill_until_confirmed(worker)
        return None
