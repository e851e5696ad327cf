"""One batch from the beginning of its rollout to the update that it goes into."""

from dataclasses import dataclass
from typing import Protocol

from pearl_rl.rollout.statistics import Concurrency, PrefixUse
from pearl_state.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Mark:
    """What the router had counted when a rollout began."""

    concurrency: Concurrency
    prefixes: PrefixUse
    calls: int = 0


class Completions(Protocol):
    """Who is told of the trajectories of a batch."""

    def on_completed(self, batch: "Batch", trajectory: Trajectory) -> None:
        """A trajectory of `batch` came back."""
        ...


@dataclass(slots=True)
class Batch:
    """One batch on its way; it listens to its own rollout."""

    pipeline: Completions
    step: int
    began_s: float
    remaining: int
    wait_bound_s: float
    mark: Mark
    makespan_s: float = 0.0
    predicted_s: float | None = None
    configuration: str = ""
    borrowed: bool = False
    requested_s: float | None = None

    def completed(self, trajectory: Trajectory) -> None:
        """See `BatchListener`."""
        self.pipeline.on_completed(self, trajectory)

    def dropped(self, complete: int) -> None:
        """See `BatchListener`."""
        self.remaining += complete
