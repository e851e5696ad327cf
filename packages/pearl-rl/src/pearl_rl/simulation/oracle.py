"""The oracle: simulates every configuration of a budget on the very batches to come, and takes the best. The bound.

It knows what no planner can: the trajectories themselves. What it costs is a simulation for each candidate, so it is
for small scenarios and for judging.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from pearl_rl.simulation.batch_run import BatchOutcome, WorkerModel, run_batch
from pearl_rl.simulation.workload import Script
from pearl_state.configuration import Configuration


def configurations(workers: int) -> list[Configuration]:
    """All of a budget: colocated first, then by N_P. Raises `ValueError` without a worker."""
    if workers < 1:
        raise ValueError(f"workers = {workers}: a configuration needs at least 1")
    return [Configuration(colocated=workers), *(Configuration(p, workers - p) for p in range(1, workers))]


def simulated_makespans(
    batches: Sequence[Sequence[Script]],
    candidates: Sequence[Configuration],
    model: WorkerModel,
    *,
    stable_fraction: float = 1.0,
) -> Mapping[Configuration, float]:
    """Mean makespan of `batches` under each candidate, seconds."""

    def play(scripts: Sequence[Script], candidate: Configuration) -> BatchOutcome:
        return run_batch(scripts, candidate, model, stable_fraction=stable_fraction)

    return {candidate: fmean([play(scripts, candidate).makespan_s for scripts in batches]) for candidate in candidates}


def best(makespans: Mapping[Configuration, float]) -> Configuration:
    """The fastest; of equals the first."""
    return min(makespans, key=makespans.__getitem__)
