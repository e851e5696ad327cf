"""Fakes of training's device state and of the weight source."""

import asyncio

from pearl_executor.ports import MemoryReport, WeightSnapshot
from pearl_executor.testing.faults import FaultScript
from pearl_executor.testing.memory import GpuLedger
from pearl_state.worker import GpuId


class FakeTraining:
    """A `TrainingPort` that holds all of its GPUs from the start."""

    def __init__(
        self, gpus: frozenset[GpuId], *, script: FaultScript, ledger: GpuLedger, bytes_per_gpu: int = 60_000_000_000
    ) -> None:
        self.script = script
        self.ledger = ledger
        self.gpus = gpus
        self.leak_bytes = 0
        """How much of each GPU a release keeps, against its contract."""
        self._bytes = bytes_per_gpu
        self.ledger.take(gpus, "training", bytes_per_gpu)

    @property
    def resident(self) -> bool:
        """Whether training holds all that it needs."""
        return self._held() == self._bytes * len(self.gpus)

    async def release(self) -> MemoryReport:
        """See `TrainingPort`."""

        def act() -> MemoryReport:
            before = self._held()
            self.ledger.give(self.gpus, "training", self._bytes - self.leak_bytes)
            return MemoryReport(before, self._held())

        return await self.script.perform("training.release", None, act, lambda: None)

    async def resume(self) -> MemoryReport:
        """See `TrainingPort`. Takes what is missing, so it may be repeated."""

        def act() -> MemoryReport:
            before = self._held()
            for gpu in sorted(self.gpus):
                missing = self._bytes - self.ledger.held(frozenset({gpu}), "training")
                if missing:
                    self.ledger.take(frozenset({gpu}), "training", missing)
            return MemoryReport(before, self._held())

        return await self.script.perform("training.resume", None, act, lambda: None)

    def _held(self) -> int:
        return self.ledger.held(self.gpus, "training")


class FakeWeights:
    """A `WeightSource` whose versions a test publishes."""

    def __init__(self, version: int = 0) -> None:
        self.version = version

    def publish(self, version: int) -> None:
        """Make `version` the newest."""
        self.version = version

    def publish_at(self, version: int, at_s: float) -> None:
        """Make `version` the newest at a time of the running loop."""
        asyncio.get_running_loop().call_at(at_s, self.publish, version)

    def newest(self) -> WeightSnapshot:
        """See `WeightSource`."""
        return WeightSnapshot(version=self.version, uri=f"fake:{self.version}", bytes=1)
