"""What the Pipeline Scheduler needs of training and of telemetry."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pearl_executor.ports import WeightSnapshot
from pearl_state.samples import TurnSample
from pearl_state.trajectory import Trajectory


class UpdateResult(Protocol):
    """What an update made."""

    @property
    def version(self) -> int:
        """The new weight version, higher than all before it."""
        ...

    @property
    def snapshot(self) -> WeightSnapshot:
        """The new weights, by reference."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """Measures of the update; `loss`, `kl`, `gradient_norm`, `clipped_fraction` where there are any."""
        ...

    @property
    def duration_s(self) -> float:
        """How long it took, seconds."""
        ...


class Trainer(Protocol):
    """Makes weight versions out of trajectories."""

    @property
    def version(self) -> int:
        """The version of the weights it holds; after a resume, that of the checkpoint."""
        ...

    async def update(self, trajectories: Sequence[Trajectory]) -> UpdateResult:
        """Train on whole groups of trajectories. The training GPUs are training's while this runs."""
        ...


@dataclass(frozen=True, slots=True)
class Flow:
    """What went on during a step under continuous injection, whichever step it was for."""

    in_flight: float
    """Trajectories that were under way on average, whether they had room on a worker or waited for it."""
    turns: int
    """Turns that ended."""


class RolloutTracker(Protocol):
    """Learns the workload from what the rollout does (PEARL section 5, Runtime statistics)."""

    def observe_turns(self, samples: Sequence[TurnSample]) -> None:
        """Turns of one finished trajectory."""
        ...

    def finish_step(
        self,
        *,
        step: int,
        batch: int,
        makespan_s: float,
        decoding_fraction: float | None,
        borrowed: bool,
        moved_fraction: float | None,
        flow: Flow | None = None,
    ) -> None:
        """The last trajectory of a batch completed; `decoding_fraction` is f, None where nothing was measured.

        `moved_fraction` is the part of prefixes that trajectories left on other workers, None likewise. `flow` is given
        where batches overlap: then `makespan_s` is the time between two full batches.
        """
        ...
