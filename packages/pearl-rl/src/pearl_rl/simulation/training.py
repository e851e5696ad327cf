"""Simulated training: an update takes time for its tokens, device memory changes hands, versions are published."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pearl_executor.ports import MemoryReport, WeightSnapshot, WorkerError
from pearl_rl.simulation.times import ReconfigurationTimes
from pearl_state.trajectory import Trajectory

_GPU_BYTES = 70_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTimes:
    """Duration of an update: fixed + tokens · per token / GPUs."""

    gpu_s_per_token: float
    """GPU-seconds of forward, backward, log-probabilities and optimizer per trained token."""
    fixed_s: float = 0.0
    publish_s: float = 0.0
    """Gathering the new weights into a snapshot, seconds."""

    def update_s(self, tokens: int, gpus: int) -> float:
        """One update on `tokens` tokens, seconds."""
        return self.fixed_s + tokens * self.gpu_s_per_token / gpus


@dataclass(frozen=True, slots=True)
class SimulatedUpdate:
    """What an update made."""

    version: int
    snapshot: WeightSnapshot
    duration_s: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class SimulatedWeights:
    """The newest version, by number."""

    def __init__(self) -> None:
        self._newest = WeightSnapshot(0, "simulated:0")

    def newest(self) -> WeightSnapshot:
        """See `WeightSource`."""
        return self._newest

    def publish(self, snapshot: WeightSnapshot) -> None:
        """Make a snapshot the newest."""
        self._newest = snapshot


class SimulatedTrainer:
    """The pipeline's `Trainer` and the executor's `TrainingPort`, which must hold its memory while it updates."""

    def __init__(self, times: TrainingTimes, reconfiguration: ReconfigurationTimes, gpus: int) -> None:
        self.version = 0
        self.busy_s = 0.0
        """Time spent in updates, seconds."""
        self._times = times
        self._reconfiguration = reconfiguration
        self._gpus = gpus
        self._resident = True

    async def update(self, trajectories: Sequence[Trajectory]) -> SimulatedUpdate:
        """See `Trainer`."""
        if not self._resident:
            raise WorkerError("training updates without its device memory")
        duration_s = self._times.update_s(sum(t.total_tokens for t in trajectories), self._gpus)
        await asyncio.sleep(duration_s)
        if not self._resident:
            raise WorkerError("training lost its device memory in the middle of an update")
        self.busy_s += duration_s
        self.version += 1
        return SimulatedUpdate(self.version, WeightSnapshot(self.version, f"simulated:{self.version}"), duration_s)

    async def release(self) -> MemoryReport:
        """See `TrainingPort`."""
        self._resident = False
        await asyncio.sleep(self._reconfiguration.training_release_s)
        return MemoryReport(_GPU_BYTES * self._gpus, 0)

    async def resume(self) -> MemoryReport:
        """See `TrainingPort`."""
        await asyncio.sleep(self._reconfiguration.training_resume_s)
        self._resident = True
        return MemoryReport(0, _GPU_BYTES * self._gpus)
