"""How much is run for a figure or table: enough to be trusted, or as little as shows that everything works."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Effort:
    """Lengths of the runs of all experiments."""

    seeds: int = 1
    """Whole simulations of each kind; their throughputs are averaged."""
    duration_s: float = 7200.0
    """Virtual time of a replayed segment (PEARL section 6.1: two hours)."""
    steps: int = 5
    """Training steps of a run on a fixed pool."""
    batches: int = 6
    """Batches for each configuration where nothing but the configuration matters."""
    many_batches: int = 10
    """The same for each of two seeds, for calibrated rows, whose tolerance is narrow."""


FULL = Effort()
QUICK = Effort(duration_s=1800.0, steps=2, batches=1, many_batches=1)
