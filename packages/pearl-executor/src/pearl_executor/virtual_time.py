"""Virtual time for asyncio: the loop jumps to the next timer instead of waiting, so an hour passes in milliseconds.

Unmodified asyncio code runs under it (`sleep`, `timeout`, `TaskGroup`, queues) as long as it asks the loop for the
time. A hang is an error at once. Nothing outside the loop may be waited for: files, sockets and subprocesses are
refused, and what would run in a thread runs in the loop, taking no virtual time.
"""

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from contextvars import Context, copy_context
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

LIVELOCK_ITERATIONS = 1_000_000
"""Loop iterations without progress of time after which the run counts as stuck."""
_MANY_CANCELLED = 100
_new_handle = object.__new__


class SimulationDeadlockError(RuntimeError):
    """Every task waits and no timer is armed, or tasks spin without time passing: in production a hang."""


class VirtualTimeError(RuntimeError):
    """Something outside the loop was to be waited for: it would make the run slow and not repeatable."""


class _NoFiles(selectors.BaseSelector):
    """Knows no files but the loop's own wake-up pipe, and never looks at it."""

    def __init__(self) -> None:
        self._files: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Accept the loop's wake-up pipe (the first file), refuse any other."""
        if self._files:
            raise VirtualTimeError("files, sockets and subprocesses cannot be waited for in virtual time")
        descriptor = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = selectors.SelectorKey(fileobj, descriptor, events, data)
        self._files[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Forget a file."""
        return self._files.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """What is registered."""
        return self._files

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Nothing is ever ready."""
        del timeout
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` is virtual; `sleep`, `timeout` and `call_later` follow it.

    Timers lie in a heap of tuples of its own, and an iteration looks at nothing but them and what is ready: a
    simulation passes through millions. Timers of one moment fire in the order in which they were set.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._spins = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle | Callable[[], None]]] = []
        self._order = 0
        self._cancelled = 0
        super().__init__(_NoFiles())

    def time(self) -> float:
        """Virtual seconds since the loop began."""
        return self._now_s

    def jump(self, by_s: float) -> None:
        """Let the clock jump, as when a machine was suspended: all that was due meanwhile is due at once."""
        self._now_s += by_s

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """See `asyncio`. Made without a look at whether the loop debugs: where the handle was made is not kept."""
        handle: Any = _new_handle(asyncio.Handle)
        handle._callback, handle._args, handle._loop = callback, args, self
        handle._context = copy_context() if context is None else context
        handle._cancelled = False
        handle._repr = handle._source_traceback = None
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle  # type: ignore[no-any-return]

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See `asyncio`."""
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See `asyncio`."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        handle._scheduled = True  # type: ignore[attr-defined]
        self._order += 1
        heappush(self._timers, (when, self._order, handle))
        return handle

    def alarm(self, when: float, action: Callable[[], None]) -> None:
        """Call `action` at `when`: a timer without handle or context, for those who set very many.

        It cannot be cancelled; `action` must see for itself whether it still counts. What it raises ends the run.
        """
        self._order += 1
        heappush(self._timers, (when, self._order, action))

    def rest(self, seconds: float) -> asyncio.Future[None]:
        """What `asyncio.sleep` does, for those who sleep very often; await it at once."""
        future: asyncio.Future[None] = self.create_future()
        self.alarm(self._now_s + seconds, partial(_wake, future))
        return future

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """What `TimerHandle.cancel` calls."""
        if not handle._scheduled:  # type: ignore[attr-defined]
            return  # it has fired and is in the heap no more
        self._cancelled += 1
        if self._cancelled > _MANY_CANCELLED and 2 * self._cancelled > len(self._timers):
            # In place: an iteration may be going through the heap.
            self._timers[:] = [timer for timer in self._timers if not _is_void(timer[2])]
            heapify(self._timers)
            self._cancelled = 0

    def _run_once(self) -> None:
        """Iterations until the loop is to stop, in the place of one of asyncio's: a call for each costs as much again.

        Time jumps to the next timer where nothing is ready.
        """
        ready: deque[asyncio.Handle | Callable[[], None]] = self._ready  # type: ignore[attr-defined]
        timers = self._timers
        while True:
            if ready or self._stopping:  # type: ignore[attr-defined]
                self._spins += 1
                if self._spins > LIVELOCK_ITERATIONS:
                    raise SimulationDeadlockError(f"time stands still at {self._now_s} s: {_describe_waiting()}")
            else:
                ready.append(self._next_timer())
            now_s = self._now_s
            while timers and timers[0][0] <= now_s:
                ready.append(_fired(heappop(timers)[2]))
            for _ in range(len(ready)):
                due = ready.popleft()
                if not isinstance(due, asyncio.Handle):
                    due()
                elif not due.cancelled():
                    due._run()
            if self._stopping:  # type: ignore[attr-defined]
                return

    def _next_timer(self) -> asyncio.Handle | Callable[[], None]:
        """The next timer that is not cancelled, out of the heap; time jumps there."""
        timers = self._timers
        while timers:
            when, _, timer = heappop(timers)
            if _is_void(timer):
                continue
            if when > self._now_s:
                self._now_s = when
                self._spins = 0
            return _fired(timer)
        raise SimulationDeadlockError(f"no task can run and no timer is armed: {_describe_waiting()}")

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Call `func` here and now, taking no virtual time: a thread would make the run depend on the machine."""
        del executor
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run_virtual(main: Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """Run `main` to its end in virtual time and return its result; tasks that are left over are cancelled.

    Raises `SimulationDeadlockError`, with the waiting tasks named, as soon as nothing can happen any more.
    """
    with asyncio.Runner(debug=debug, loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def _fired(timer: asyncio.Handle | Callable[[], None]) -> asyncio.Handle | Callable[[], None]:
    """`timer`, marked as out of the heap."""
    if isinstance(timer, asyncio.TimerHandle):
        timer._scheduled = False  # type: ignore[attr-defined]
    return timer


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _is_void(timer: asyncio.Handle | Callable[[], None]) -> bool:
    return isinstance(timer, asyncio.Handle) and timer.cancelled()


def _describe_waiting() -> str:
    """Name each task that is not done and the line where it waits."""
    # The loop is "running" while it selects, so the tasks of this loop are those that can be seen here.
    waiting = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    return "; ".join(f"{task.get_name()} waits in {_innermost(task)}" for task in waiting) or "no task is left"


def _innermost(task: "asyncio.Task[Any]") -> str:
    """Where the chain of awaits of `task` ends: function, file and line."""
    awaited: Any = task.get_coro()
    place = getattr(awaited, "__qualname__", repr(awaited))
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
        if frame is not None:
            file = frame.f_code.co_filename.rsplit("/", 1)[-1]
            place = f"{frame.f_code.co_qualname} ({file}:{frame.f_lineno})"
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
    return place
