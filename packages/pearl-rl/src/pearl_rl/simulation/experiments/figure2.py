"""PEARL Figure 2: diminishing returns of data parallelism (a), interference (b), and modes by batch size (c)."""

from collections.abc import Iterable
from statistics import fmean

from pearl_rl.simulation.experiments.bench import AnyJob, BatchJob, Bench, ClusterJob, variant
from pearl_rl.simulation.experiments.effort import FULL, Effort
from pearl_rl.simulation.experiments.targets import TargetRow, Unit, gain, signs
from pearl_rl.simulation.scenario import Scenario

_FIXED = {"availability": {"trace": "none"}}
_POOLS = (16, 24, 32)
_BATCHES_C = (32, 48, 64, 80, 96)
_WORKERS_C = 8
_MOE = "qwen3-30b-a3b"


class Figure2a:
    """Qwen3-8B, 8 training GPUs, RLBoost+ on fixed pools. For calibration."""

    id = "F2a"

    _SEEDS = (0, 1)

    def __init__(self, effort: Effort = FULL) -> None:
        self._batches = effort.many_batches
        self._steps = min(2, effort.steps)

    def _scenario(self, seed: int) -> Scenario:
        cluster = {"training_gpus": 8, "reserved_rollout_gpus": _POOLS[0], "max_preemptible_gpus": 0}
        policy = {"name": "rlboost"}
        run = {"steps": self._steps, "seed": seed}
        return variant(_FIXED, name="pools", cluster=cluster, policy=policy, run=run)

    def _pool(self, gpus: int, seed: int) -> BatchJob:
        scenario = self._scenario(seed)
        return BatchJob(scenario, f"{gpus // scenario.tp}C", self._batches)

    def _alone(self, seed: int) -> BatchJob:
        return BatchJob(self._scenario(seed), "1C", self._batches, alone=True)

    def jobs(self) -> list[AnyJob]:
        """What must be run."""
        pools = [self._pool(gpus, seed) for gpus in _POOLS for seed in self._SEEDS]
        alone = [self._alone(seed) for seed in self._SEEDS]
        return [*pools, *alone, *(ClusterJob(self._scenario(seed)) for seed in self._SEEDS)]

    def rows(self, bench: Bench) -> Iterable[TargetRow]:
        """Paper and ours."""
        first, second, third = (
            fmean([bench.batches(self._pool(gpus, seed)).makespan_s for seed in self._SEEDS]) for gpus in _POOLS
        )
        training_s = fmean([bench.cluster(self._scenario(seed)).training_s for seed in self._SEEDS])
        alone_s = fmean([bench.batches(self._alone(seed)).trajectory_s for seed in self._SEEDS])

        def row(name: str, paper: float, ours: float, unit: Unit = "value") -> TargetRow:
            return TargetRow(id=self.id, name=name, use="calibrate", paper=paper, ours=ours, unit=unit)

        yield row("rollout time saved from 16 to 24 GPUs, % of 16", 10.3, 100 * (1 - second / first), "points")
        yield row("rollout time saved from 24 to 32 GPUs, % of 16", 8.9, 100 * (second - third) / first, "points")
        yield row("rollout over training time, 16 GPUs", 5.7, first / training_s)
        yield row("rollout over training time, 32 GPUs", 4.5, third / training_s)
        yield row("training time of a batch on 8 GPUs, s", 163.8, training_s)
        yield row("mean trajectory alone on a worker, s", 216.3, alone_s)


class Figure2b:
    """Qwen3-30B-A3B colocated on 8 workers: prefill against decode. For calibration."""

    id = "F2b"

    def __init__(self, effort: Effort = FULL) -> None:
        scenario = variant(_FIXED, name="interference", model=_MOE)
        self._job = BatchJob(scenario, f"{_WORKERS_C}C", effort.batches)

    def jobs(self) -> list[AnyJob]:
        """What must be run."""
        return [self._job]

    def rows(self, bench: Bench) -> Iterable[TargetRow]:
        """Paper and ours."""
        found = bench.batches(self._job)
        tp = self._job.scenario.tp

        def row(name: str, paper: float, ours: float) -> TargetRow:
            return TargetRow(id=self.id, name=name, use="calibrate", paper=paper, ours=ours)

        yield row("decode between insertions, tokens/s a GPU", 400.0, found.decode_tokens_per_s / tp)
        yield row("prefill's part of computed tokens", 0.9668, found.prefill_share_tokens)
        yield row("prefill's part of the time", 0.2648, found.prefill_share_time)


class Figure2c:
    """Qwen3-30B-A3B, 8 workers: the best ratio against colocation, by batch size.

    The paper extends ROLL by ratios: its colocation is ROLL's, which binds trajectories to workers.
    """

    id = "F2c"

    def __init__(self, effort: Effort = FULL) -> None:
        self._batches = effort.batches

    def _job(self, batch: int, configuration: str) -> BatchJob:
        scenario = variant(_FIXED, name=f"batch-{batch}", model=_MOE, rollout={"batch": batch})
        return BatchJob(scenario, configuration, self._batches, bound=configuration.endswith("C"))

    def _configurations(self) -> list[str]:
        return [f"{p}P{_WORKERS_C - p}D" for p in range(1, _WORKERS_C)]

    def jobs(self) -> list[AnyJob]:
        """What must be run."""
        choices = [f"{_WORKERS_C}C", *self._configurations()]
        return [self._job(batch, choice) for batch in _BATCHES_C for choice in choices]

    def rows(self, bench: Bench) -> Iterable[TargetRow]:
        """Paper and ours."""

        def best(batch: int) -> tuple[float, str]:
            return min((bench.batches(self._job(batch, c)).makespan_s, c) for c in self._configurations())

        gains = {}
        for batch, paper in ((32, 9.7), (80, 1.4), (96, -6.1)):
            colocated = bench.batches(self._job(batch, f"{_WORKERS_C}C")).makespan_s
            gains[batch] = gain(colocated, best(batch)[0])
            yield TargetRow(
                id=self.id,
                name=f"best disaggregated over colocated throughput, batch {batch}, %",
                use="predict",
                paper=paper,
                ours=gains[batch],
                unit="points",
            )
        yield TargetRow(
            id=self.id,
            name="signs of that at batch 32, 80, 96",
            use="predict",
            paper="+ + -",
            ours=signs(gains.values()),
            unit="text",
        )
        for batch, ratio in ((48, "4P4D"), (64, "5P3D")):
            name = f"best ratio of 8 workers, batch {batch}"
            yield TargetRow(id=self.id, name=name, use="predict", paper=ratio, ours=best(batch)[1], unit="text")
