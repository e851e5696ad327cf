"""Workers behind time limits: every call of the port ends, and nothing lethal is asked twice."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from pearl_executor.calls import BoundedCalls, CallError, FailureKind
from pearl_executor.limits import Limits
from pearl_executor.ports import (
    ReleaseVerificationError,
    WeightSnapshot,
    WorkerError,
    WorkerLostError,
    WorkerPort,
)
from pearl_executor.processes import Processes, Residency
from pearl_state.roles import Role
from pearl_state.samples import EngineSamples
from pearl_state.worker import Worker

T = TypeVar("T")

DISAGGREGATED = (Role.PREFILL, Role.DECODE)
"""Roles whose KV buffers other workers know."""


class BoundedWorkers:
    """The worker port for executors. All methods raise `CallError` for an expected failure, and nothing else.

    Device state is idempotent here: releasing what is released or resuming what is resident does nothing, since an
    engine may die of the repetition. Where an outcome is not known, neither is tried.
    """

    def __init__(
        self, port: WorkerPort, calls: BoundedCalls, limits: Limits, *, retained_fraction: float = 0.05
    ) -> None:
        self.limits = limits
        self.processes = Processes()
        self._port = port
        self._calls = calls
        self._retained_fraction = retained_fraction
        self.closing = False
        """The run ends: no kill is tried more than once more, since the runtime ends all processes itself."""

    # ---- life -------------------------------------------------------------------------------------------------------

    async def start(self, worker: Worker) -> None:
        """Start the process in the role of its row."""
        await self._calls.call(worker, "start", self._port.start(worker), self.limits.start_s)
        self.processes.of(worker).residency = Residency.RESIDENT

    async def probe(self, worker: Worker) -> EngineSamples:
        """Ask the process anything: it lives, and its answer names the role that its engine has."""
        return await self._calls.call(worker, "samples", self._port.samples(worker), self.limits.probe_s)

    async def end(self, worker: Worker, kill_at_s: float | None = None) -> None:
        """Stop the process in order, or kill it where that fails or takes until `kill_at_s`."""
        left_s = self.limits.stop_s if kill_at_s is None else min(self.limits.stop_s, kill_at_s - _now_s())
        if left_s > 0.0:
            try:
                await self._calls.call(worker, "stop", self._port.stop(worker), left_s)
            except CallError:
                await self.kill(worker)
        else:
            await self.kill(worker)
        self.processes.forget(worker)

    async def kill(self, worker: Worker) -> None:
        """End the process for certain."""
        await self._calls.call(worker, "kill", self._port.kill(worker), self.limits.kill_s)
        self.processes.forget(worker)

    async def kill_until_confirmed(self, worker: Worker) -> None:
        """Kill again and again, ever more rarely, until the port confirms it. Never raises `CallError`.

        GPUs of a process that may still live must not be given to anybody, so there is nothing else to go on with.
        Each try is an `Action` that says why the one before failed. Only the end of the run ends it unconfirmed.
        """
        pause_s = self.limits.retry_s
        while True:
            try:
                await self.kill(worker)
            except CallError:
                if self.closing:
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(2.0 * pause_s, self.limits.retry_max_s)
            else:
                return

    # ---- requests ---------------------------------------------------------------------------------------------------

    async def finish(self, worker: Worker, limit_s: float) -> None:
        """Let all requests come to their end, for at most `limit_s`; raises `CallError` where some did not."""
        await self._calls.call(worker, "wait_idle", self._port.wait_idle(worker), limit_s)

    async def interrupt(self, worker: Worker, limit_s: float) -> int:
        """End all requests, which return with their partial tokens; returns how many there were."""
        limit_s = min(limit_s, self.limits.interrupt_s)
        return await self._calls.call(worker, "interrupt", self._port.interrupt(worker), limit_s)

    async def drain(self, worker: Worker, limit_s: float) -> None:
        """Interrupt all requests until the engine is idle, for at most `limit_s` and `Limits.idle_s`.

        Routing has withdrawn the worker before, but requests may still have been under way to it: therefore the
        interruption is repeated until it finds nobody.
        """
        limit_s = min(limit_s, self.limits.idle_s)
        until_s = _now_s() + limit_s
        while True:
            found = await self.interrupt(worker, until_s - _now_s())
            wait_s = min(self.limits.interrupt_again_s, until_s - _now_s())
            try:
                await self._calls.call(worker, "wait_idle", self._port.wait_idle(worker), wait_s)
            except CallError as error:
                if error.kind is not FailureKind.EXPIRED:
                    raise
                if _now_s() >= until_s:
                    raise CallError(f"worker {worker.id}: wait_idle exceeded {limit_s:g} s", error.kind) from error
            else:
                if not found:
                    return

    # ---- device state -----------------------------------------------------------------------------------------------

    async def release(self, worker: Worker, limit_s: float | None = None) -> None:
        """Have an idle process give its device memory back, and verify by measure that it did."""
        process = self.processes.of(worker)
        if process.residency is Residency.RELEASED:
            return
        self._refuse_doubt(worker, "release")

        async def release() -> None:
            process.residency = Residency.IN_DOUBT
            report = await self._unchanged_on_error(worker, Residency.RESIDENT, self._port.release(worker))
            # Held is what the last resume took; before the first, it is all that the process has.
            required = self.required_bytes(process.held_bytes or report.before_bytes)
            released = report.before_bytes - report.after_bytes
            if released < required:
                raise ReleaseVerificationError(worker.id, required, released)
            process.residency = Residency.RELEASED

        limit_s = self.limits.release_s if limit_s is None else min(limit_s, self.limits.release_s)
        await self._calls.call(worker, "release", release(), limit_s)

    async def resume(self, worker: Worker) -> None:
        """Have a released process take device memory again. Its weights are unusable until the next load.

        Where the caller is cancelled, a call under way may come to its end first: what is known can be undone.
        """
        process = self.processes.of(worker)
        if process.residency is Residency.RESIDENT:
            return
        self._refuse_doubt(worker, "resume")

        async def resume() -> None:
            process.residency = Residency.IN_DOUBT
            report = await self._unchanged_on_error(worker, Residency.RELEASED, self._port.resume(worker))
            process.held_bytes = max(0, report.after_bytes - report.before_bytes)
            process.residency = Residency.RESIDENT

        await self._calls.call(worker, "resume", resume(), self.limits.resume_s, settle_s=self.limits.settle_s)

    def required_bytes(self, held_bytes: int) -> int:
        """How much of `held_bytes` a release must give back: all but what a process keeps for its device context."""
        return int(held_bytes * (1.0 - self._retained_fraction))

    def _refuse_doubt(self, worker: Worker, name: str) -> None:
        """Raise where the process may be in the middle of something: what follows may kill or corrupt it."""
        if (under_way := self._calls.lingering(worker)) is not None:
            raise CallError(
                f"worker {worker.id}: {name} refused, {under_way} was given up and still runs", FailureKind.BROKEN
            )
        if self.processes.of(worker).residency is Residency.IN_DOUBT:
            raise CallError(
                f"worker {worker.id}: {name} refused, the outcome of an earlier release or resume is not known",
                FailureKind.BROKEN,
            )

    async def _unchanged_on_error(self, worker: Worker, before: Residency, call: Coroutine[Any, Any, T]) -> T:
        """Await a change of device memory; a plain `WorkerError` means that nothing changed."""
        try:
            return await call
        except WorkerLostError:
            raise
        except WorkerError:
            self.processes.of(worker).residency = before
            raise

    # ---- role and weights -------------------------------------------------------------------------------------------

    async def switch(self, worker: Worker) -> None:
        """Give an idle engine the role of its row."""
        self._refuse_doubt(worker, "switch_role")
        await self._calls.call(worker, "switch_role", self._port.switch_role(worker, worker.role), self.limits.switch_s)

    async def refresh_peers(self, worker: Worker) -> None:
        """Have others renew what they know of its KV buffers, where its role lets them know any."""
        if worker.role in DISAGGREGATED:
            await self._calls.call(worker, "refresh_peers", self._port.refresh_peers(worker), self.limits.refresh_s)

    async def load(self, worker: Worker, snapshot: WeightSnapshot, limit_s: float) -> int:
        """Load a snapshot; returns the version that the engine reports, which is the snapshot's."""
        self._refuse_doubt(worker, "load_weights")
        reported = await self._calls.call(worker, "load_weights", self._port.load_weights(worker, snapshot), limit_s)
        if reported != snapshot.version:
            raise CallError(
                f"worker {worker.id}: reports weight version {reported} after loading {snapshot.version}",
                FailureKind.BROKEN,
            )
        return reported


def kill_time(deadline_s: float, limits: Limits) -> float:
    """When to kill at the latest so that it is over by `deadline_s`: at half of a notice that is too short."""
    left_s = deadline_s - _now_s()
    return deadline_s - min(limits.kill_s + limits.cancel_s, 0.5 * max(0.0, left_s))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
