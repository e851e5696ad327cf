"""Virtual time for asyncio: the loop jumps to the next timer instead of waiting, so an hour passes in milliseconds.

Unmodified asyncio code runs under it (`sleep`, `timeout`, `TaskGroup`, queues) as long as it asks the loop for the
time. A hang is an error at once. Nothing outside the loop may be waited for: files, sockets and subprocesses are
refused, and what would run in a thread runs in the loop, taking no virtual time.
"""

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

LIVELOCK_ITERATIONS = 1_000_000
"""Loop iterations without progress of time after which the run counts as stuck."""


_RESOLUTION_S = 1e-9


class SimulationDeadlockError(RuntimeError):
    """Every task waits and no timer is armed, or tasks spin without time passing: in production a hang."""


class VirtualTimeError(RuntimeError):
    """Something outside the loop was to be waited for: it would make the run slow and not repeatable."""


class _JumpSelector(selectors.BaseSelector):
    """Never blocks: adds what the loop would have slept to `now_s`. Knows no files but the loop's own wake-up pipe."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.resolution_s = _RESOLUTION_S
        self._files: dict[Any, selectors.SelectorKey] = {}
        self._spins = 0

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
        """Report nothing ready, and let `timeout` pass. Raises `SimulationDeadlockError` where nothing will happen."""
        if timeout is None:
            raise SimulationDeadlockError(f"no task can run and no timer is armed: {_describe_waiting()}")
        if timeout <= 0:
            self._spins += 1
            if self._spins > LIVELOCK_ITERATIONS:
                raise SimulationDeadlockError(f"time stands still at {self.now_s} s: {_describe_waiting()}")
            return []
        self._spins = 0
        self.now_s += timeout
        self.resolution_s = max(_RESOLUTION_S, 2.0 * math.ulp(self.now_s))
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` is virtual; `sleep`, `timeout` and `call_later` follow it."""

    def __init__(self) -> None:
        self._jump = _JumpSelector()
        super().__init__(self._jump)

    def time(self) -> float:
        """Virtual seconds since the loop began."""
        return self._jump.now_s

    @property
    def _clock_resolution(self) -> float:
        """How early a timer may fire. It must exceed the rounding of `time()`, or a timer that is due never fires."""
        return self._jump.resolution_s

    @_clock_resolution.setter
    def _clock_resolution(self, value: float) -> None:
        """Ignore the resolution of the machine's clock, which asyncio sets."""

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
