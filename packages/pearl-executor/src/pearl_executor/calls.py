"""Port calls with a time limit, a cause for each failure, and a record of each call."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from pearl_executor.ports import WorkerError, WorkerLostError
from pearl_state.worker import Worker, WorkerId

T = TypeVar("T")


class FailureKind(StrEnum):
    """What a failed call says about the state that it should have changed."""

    REFUSED = "refused"
    """The worker did not do it and is as it was."""
    LOST = "lost"
    """The process is gone."""
    EXPIRED = "expired"
    """No answer within the limit: the worker may be in either state, or in between."""
    BROKEN = "broken"
    """The port raised what it must not raise, or its answer contradicts itself: nothing is known."""


class CallError(WorkerError):
    """A call on a worker (or on training) failed; the message names it, the call, and the limit or the cause."""

    def __init__(self, cause: str, kind: FailureKind) -> None:
        super().__init__(cause)
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One finished call on a worker, for records and telemetry."""

    name: str
    """The port's method: `start`, `load_weights`, …"""
    worker: WorkerId | None
    """None for training."""
    incarnation: int
    started_s: float
    duration_s: float
    failed: str | None = None
    """The cause, None where the call did what it should."""


OnAction = Callable[[Action], None]


class BoundedCalls:
    """Makes calls that always end: by result, failure, or expiry. Failures are `CallError`s."""

    def __init__(self, on_action: OnAction, cancel_s: float) -> None:
        self._on_action = on_action
        self._cancel_s = cancel_s
        self._left_alone: dict[asyncio.Task[Any], tuple[Worker | None, str]] = {}

    def lingering(self, worker: Worker) -> str | None:
        """The name of a call on this process that was given up and still runs; None where there is none."""
        for task, (other, name) in self._left_alone.items():
            if (
                other is not None
                and not task.done()
                and (other.id, other.incarnation) == (worker.id, worker.incarnation)
            ):
                return name
        return None

    async def call(
        self,
        worker: Worker | None,
        name: str,
        call: Coroutine[Any, Any, T],
        limit_s: float,
        settle_s: float = 0.0,
    ) -> T:
        """Await `call`, which does `name` on `worker` (None: training), for at most `limit_s`.

        Where the caller is cancelled, the call may still go on for `settle_s` before it is cancelled too. Raises
        `CallError` where it fails, is not done in time, or raises anything that is not a `WorkerError`.
        """
        began_s = asyncio.get_running_loop().time()
        subject = "training" if worker is None else f"worker {worker.id}"
        task = asyncio.ensure_future(call)
        of = (worker, name)
        cause: str | None = None
        try:
            await self._wait(task, limit_s, settle_s, of)
            if not task.done() or task.cancelled():
                raise CallError(f"{subject}: {name} exceeded {max(0.0, limit_s):g} s", FailureKind.EXPIRED)
            return _result(task, subject, name)
        except CallError as error:
            cause = str(error)
            raise
        except asyncio.CancelledError:
            cause = f"{subject}: {name} was cancelled"
            raise
        finally:
            ended_s = asyncio.get_running_loop().time()
            self._on_action(
                Action(
                    name=name,
                    worker=None if worker is None else worker.id,
                    incarnation=0 if worker is None else worker.incarnation,
                    started_s=began_s,
                    duration_s=ended_s - began_s,
                    failed=cause,
                )
            )

    async def _wait(
        self, task: "asyncio.Task[T]", limit_s: float, settle_s: float, of: tuple[Worker | None, str]
    ) -> None:
        """Wait for `task` and end it when its time is up. Returns with it done, unless it ignores its cancellation."""
        began_s = asyncio.get_running_loop().time()
        try:
            await asyncio.wait({task}, timeout=max(0.0, limit_s))
        except asyncio.CancelledError:
            left_s = limit_s - (asyncio.get_running_loop().time() - began_s)
            await self._end(task, min(settle_s, left_s), limit_s, of)
            raise
        if not task.done():
            await self._end(task, 0.0, limit_s, of)

    async def _end(
        self, task: "asyncio.Task[T]", grace_s: float, limit_s: float, of: tuple[Worker | None, str]
    ) -> None:
        # Its late result is void, and a call that ignores its cancellation must not hold anybody up.
        self._left_alone[task] = of
        task.add_done_callback(self._forget)
        try:
            if grace_s > 0.0:
                await asyncio.wait({task}, timeout=grace_s)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=min(self._cancel_s, 0.25 * max(0.0, limit_s)))

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._left_alone.pop(task, None)
        if not task.cancelled():
            task.exception()


def _result(task: "asyncio.Task[T]", subject: str, name: str) -> T:
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, CallError):
        raise error
    if isinstance(error, WorkerLostError):
        raise CallError(f"{subject}: lost during {name}: {error}", FailureKind.LOST) from error
    if isinstance(error, WorkerError):
        raise CallError(f"{subject}: {name} failed: {error}", FailureKind.REFUSED) from error
    if isinstance(error, Exception):
        raise CallError(f"{subject}: {name} broke its contract: {error!r}", FailureKind.BROKEN) from error
    raise error


async def uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end even where the caller is cancelled meanwhile. `work` must be bounded."""
    task = asyncio.ensure_future(work)
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            continue
    return task.result()
