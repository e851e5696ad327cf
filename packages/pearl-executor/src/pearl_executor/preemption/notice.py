"""What a preemption notice is, where one comes from, and what it means for the GPUs of its machine."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from pearl_executor.availability import AvailabilityEvent, DevicePool
from pearl_state.events import GpusOffered, GpusReclaimed
from pearl_state.worker import GpuId

_log = logging.getLogger(__name__)

WallClock = Callable[[], float]


def wall_clock() -> float:
    """Seconds since the epoch: providers give deadlines by it."""
    return time.time()  # noqa: TID251


@dataclass(frozen=True, slots=True)
class Notice:
    """The machine will be taken away, or not any more."""

    leaves_in_s: float | None
    """Seconds until it is gone, 0 where it may go any moment; None takes an earlier notice back."""
    reason: str
    """The provider's words."""


class NoticeSource(Protocol):
    """Watches over one machine, from that machine."""

    def notices(self) -> AsyncGenerator[Notice, None]:
        """Notices as they come. Waits for ever where none does; a provider that does not answer is asked again."""
        ...


class NoticedGpus:
    """An `AvailabilitySource`: all GPUs of this machine are offered at once and reclaimed when a notice comes.

    A notice that is taken back offers again those that were returned meanwhile, and the rest once they are.
    """

    def __init__(self, source: NoticeSource, *, gpus: Iterable[int], node: str = "") -> None:
        self._source = source
        self._pool = DevicePool(gpus)
        self._node = node

    async def events(self) -> AsyncIterator[AvailabilityEvent]:
        """One offer, and what notices ask for. Runs until closed."""
        loop = asyncio.get_running_loop()
        yield GpusOffered(now_s=loop.time(), gpus=self._pool.give(self._pool.free), node=self._node)
        async with aclosing(self._source.notices()) as notices:
            async for notice in notices:
                now_s = loop.time()
                _log.warning("preemption notice: %s", notice.reason)
                if notice.leaves_in_s is not None:
                    gpus = self._pool.recall(self._pool.given)
                    if gpus:
                        yield GpusReclaimed(now_s=now_s, gpus=gpus, deadline_s=now_s + max(0.0, notice.leaves_in_s))
                    continue
                while self._pool.recalled:
                    self._pool.changed.clear()
                    await self._pool.changed.wait()
                if self._pool.free:
                    yield GpusOffered(now_s=loop.time(), gpus=self._pool.give(self._pool.free), node=self._node)

    def returned(self, gpus: frozenset[GpuId]) -> None:
        """Nothing of ours is left on `gpus`."""
        self._pool.returned(gpus)
