"""The trainer as control loop and pipeline use it: one whose ranks may be lost, and are started anew then.

Weights are published by reference, whole or not at all, and each worker fetches them itself. So a rank that dies, also
in the middle of a publication, keeps no worker waiting: all serve the newest complete version meanwhile.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pearl_executor.ports import MemoryReport, WeightSnapshot
from pearl_rl.training.batch import TrainBatch
from pearl_rl.training.process import LocalTrainer
from pearl_rl.training.rank_group import TrainerLostError
from pearl_rl.training.results import UpdateResult
from pearl_state.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Update:
    """An update as the pipeline takes it."""

    version: int
    snapshot: WeightSnapshot
    metrics: dict[str, float]
    duration_s: float


class RecoveringTrainer:
    """The pipeline's `Trainer` and the executors' `TrainingPort`.

    Lost ranks are started anew up to `restarts` times, on the newest weights, with the optimizer's state of the newest
    checkpoint (`checkpoint`; without one it begins afresh). `on_message` is told what was lost and what goes on.
    `update` makes an update where the trainer's own is not to, on the same ranks.
    """

    def __init__(
        self,
        trainer: LocalTrainer,
        *,
        max_staleness: int,
        restarts: int,
        checkpoint: Callable[[], Path | None],
        on_message: Callable[[str], None],
        update: Callable[[TrainBatch], Awaitable[UpdateResult]] | None = None,
    ) -> None:
        self._trainer = trainer
        self._update = update or trainer.update
        self._max_staleness = max_staleness
        self._restarts_left = restarts
        self._checkpoint = checkpoint
        self._on_message = on_message

    @property
    def version(self) -> int:
        """Weight version of what the ranks hold."""
        return self._trainer.version

    async def update(self, trajectories: Sequence[Trajectory]) -> Update:
        """Train on `trajectories`; where a rank is lost on the way, once more on the same weights and trajectories."""
        trainer = self._trainer
        batch = TrainBatch.build(trajectories, trainer.version, trainer.options.loss.baseline, self._max_staleness)
        while True:
            try:
                result = await self._update(batch)
                break
            except TrainerLostError as error:
                await self._recover(error)
        metrics = asdict(result.metrics)
        metrics["clipped_fraction"] = metrics.pop("limited_fraction")
        return Update(result.version, result.snapshot, metrics, result.duration_s)

    async def release(self) -> MemoryReport:
        """See `LocalTrainer.release`."""
        return await self._trainer.release()

    async def resume(self) -> MemoryReport:
        """See `LocalTrainer.resume`. Ranks that were lost meanwhile hold nothing; new ones take the memory."""
        try:
            return await self._trainer.resume()
        except TrainerLostError as error:
            await self._recover(error)
            return MemoryReport(0, 0)

    async def _recover(self, error: TrainerLostError) -> None:
        if not self._restarts_left:
            raise error
        self._restarts_left -= 1
        checkpoint = self._checkpoint()
        moments = f"the optimizer's state of {checkpoint.parent.name}" if checkpoint else "a fresh optimizer"
        self._on_message(f"{error}; training goes on from weights version {self._trainer.version} with {moments}")
        await self._trainer.recover(checkpoint)
