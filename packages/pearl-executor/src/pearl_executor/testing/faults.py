"""Faults that happen where a test wants them, and the log of all calls."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from pearl_executor.ports import WorkerError, WorkerLostError
from pearl_state.worker import WorkerId

T = TypeVar("T")

DEAF_S = 3600.0
"""How long a deaf call ignores its cancellation."""

DEFAULT_DELAYS_S: Mapping[str, float] = {
    "start": 10.0,
    "stop": 1.0,
    "kill": 0.1,
    "interrupt": 0.1,
    "release": 2.0,
    "resume": 3.0,
    "switch_role": 5.0,
    "load_weights": 4.0,
    "refresh_peers": 0.5,
    "samples": 0.01,
    "training.release": 2.0,
    "training.resume": 3.0,
}


class Fault(StrEnum):
    """What a call does instead of what it should."""

    FAIL = "fail"
    """Raises `WorkerError`; nothing changed."""
    LOSE = "lose"
    """The process dies; raises `WorkerLostError`."""
    CRASH = "crash"
    """Raises what the port's contract does not allow; nothing changed."""
    HANG = "hang"
    """Never returns; nothing changed."""
    HANG_AFTER = "hang_after"
    """Does what it should, but its answer never comes."""
    DEAF = "deaf"
    """Does nothing, never answers, and ends only `DEAF_S` later, whenever it is cancelled."""


@dataclass(slots=True)
class Call:
    """One call of a fake port."""

    number: int
    """From 1, over all fakes that share the script."""
    method: str
    worker: WorkerId | None
    began_s: float
    ended_s: float | None = None
    outcome: str = "under way"
    """`done`, `cancelled`, or what was raised."""


@dataclass(frozen=True, slots=True)
class _Rule:
    fault: Fault
    number: int | None
    method: str | None
    worker: WorkerId | None


class FaultScript:
    """How long calls take, which of them fail how, and what was called. Fakes may share one."""

    def __init__(self, delays_s: Mapping[str, float] | None = None) -> None:
        """`delays_s` overrides `DEFAULT_DELAYS_S` by method; a key `method@worker` is for one worker."""
        self._delays_s = {**DEFAULT_DELAYS_S, **(delays_s or {})}
        self._rules: list[_Rule] = []
        self.calls: list[Call] = []

    def inject(
        self, fault: Fault, *, call: int | None = None, method: str | None = None, worker: int | None = None
    ) -> None:
        """Have the next call that matches all given criteria fail, once: its number, its method, its worker."""
        self._rules.append(_Rule(fault, call, method, None if worker is None else WorkerId(worker)))

    def slow(self, method: str, factor: float) -> None:
        """Have calls of a method take `factor` times as long as they do by default, from now on."""
        self._delays_s[method] = factor * DEFAULT_DELAYS_S[method]

    def clear(self) -> None:
        """Forget all faults that did not happen yet, and have calls take as long as they do by default."""
        self._rules.clear()
        self._delays_s = dict(DEFAULT_DELAYS_S)

    def methods(self, worker: int | None = None) -> list[str]:
        """The methods called so far, in order; those on `worker` where given."""
        return [call.method for call in self.calls if worker is None or call.worker == worker]

    async def perform(self, method: str, worker: WorkerId | None, act: Callable[[], T], lose: Callable[[], None]) -> T:
        """Record a call, let its delay pass, and do `act` or the fault that is due. `lose` ends the process."""
        loop = asyncio.get_running_loop()
        call = Call(len(self.calls) + 1, method, worker, loop.time())
        self.calls.append(call)
        fault = self._take(call)
        try:
            if fault is Fault.DEAF:
                await _ignore_cancellation()
            await asyncio.sleep(self._delays_s.get(f"{method}@{worker}", self._delays_s.get(method, 0.0)))
            if fault is not None and fault is not Fault.HANG_AFTER:
                await _fail(fault, f"{method} of {worker} (call {call.number})", lose)
            result = act()
            if fault is Fault.HANG_AFTER:
                await loop.create_future()
            call.outcome = "done"
        except asyncio.CancelledError:
            call.outcome = "cancelled"
            raise
        except Exception as error:
            call.outcome = repr(error)
            raise
        finally:
            call.ended_s = loop.time()
        return result

    def _take(self, call: Call) -> Fault | None:
        for rule in self._rules:
            if (
                rule.number in (None, call.number)
                and rule.method in (None, call.method)
                and rule.worker in (None, call.worker)
            ):
                self._rules.remove(rule)
                return rule.fault
        return None


async def _fail(fault: Fault, what: str, lose: Callable[[], None]) -> None:
    match fault:
        case Fault.FAIL:
            raise WorkerError(f"injected failure in {what}")
        case Fault.LOSE:
            lose()
            raise WorkerLostError(f"injected loss in {what}")
        case Fault.CRASH:
            raise RuntimeError(f"injected crash in {what}")
        case _:
            await asyncio.get_running_loop().create_future()


async def _ignore_cancellation() -> None:
    loop = asyncio.get_running_loop()
    until_s = loop.time() + DEAF_S
    while loop.time() < until_s:
        try:
            await asyncio.sleep(until_s - loop.time())
        except asyncio.CancelledError:
            continue
    raise asyncio.CancelledError
