"""PEARL Figures 5, 7 and 8: end to end on traces, ablation on fixed pools, and sensitivity to the workload."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from statistics import fmean
from typing import Final

from pearl_rl.simulation.experiments.bench import AnyJob, Bench, BestRatioJob, ClusterJob, variant
from pearl_rl.simulation.experiments.effort import FULL, Effort
from pearl_rl.simulation.experiments.targets import TargetRow, Unit, gain, signs
from pearl_rl.simulation.scenario import Scenario

_FIXED = {"availability": {"trace": "none"}}
_TP = 2
_MODELS = ("qwen3-8b", "qwen3-30b-a3b")
_SEGMENTS = ("segment1", "segment2", "segment3")


class Figure5:
    """Two hours of each segment under four policies."""

    id = "F5"
    _POLICIES = ("roll", "roll-large", "rlboost", "pearl")
    _OVER_ROLL: Final = {"qwen3-8b": (2.17, 2.37), "qwen3-30b-a3b": (2.43, 2.79)}
    _OVER_RLBOOST: Final = {"qwen3-8b": (5.9, 26.9, 10.6), "qwen3-30b-a3b": (7.4, 36.3, 19.0)}

    def __init__(self, effort: Effort = FULL) -> None:
        self._duration_s = effort.duration_s
        self._seeds = effort.seeds

    def _scenario(self, model: str, segment: str, policy: str, seed: int) -> Scenario:
        return variant(
            {},
            name=segment,
            model=model,
            availability={"segment": segment},
            policy={"name": policy},
            run={"duration_s": self._duration_s, "seed": seed},
        )

    def jobs(self) -> list[AnyJob]:
        """What must be run."""
        return [
            ClusterJob(self._scenario(model, segment, policy, seed))
            for model in _MODELS
            for segment in _SEGMENTS
            for policy in self._POLICIES
            for seed in range(self._seeds)
        ]

    def _throughput(self, bench: Bench, model: str, segment: str, policy: str) -> float:
        runs = [bench.cluster(self._scenario(model, segment, policy, seed)) for seed in range(self._seeds)]
        return fmean([run.throughput for run in runs])

    def rows(self, bench: Bench) -> Iterable[TargetRow]:
        """Paper and ours."""
        for model in _MODELS:
            rates = {(s, p): self._throughput(bench, model, s, p) for s in _SEGMENTS for p in self._POLICIES}
            yield from self._over_roll(model, rates)
            gains = [gain(rates[s, "pearl"], rates[s, "rlboost"]) for s in _SEGMENTS]
            for segment, paper, ours in zip(_SEGMENTS, self._OVER_RLBOOST[model], gains, strict=True):
                yield _row(self.id, f"PEARL over RLBoost+, {model}, {segment}, %", paper, ours, "points")
            order = " > ".join(str(i + 1) for i in sorted(range(3), key=lambda i: -gains[i]))
            yield _row(self.id, f"segments by gain over RLBoost+, {model}", "2 > 3 > 1", order, "text")
            for segment in _SEGMENTS:
                yield TargetRow(
                    id=self.id,
                    name=f"PEARL over ROLL-Large, {model}, {segment}",
                    use="predict",
                    paper=1.0,
                    ours=rates[segment, "pearl"] / rates[segment, "roll-large"],
                    unit="ratio",
                    at_least=True,
                )

    def _over_roll(self, model: str, rates: Mapping[tuple[str, str], float]) -> Iterable[TargetRow]:
        over = [rates[s, "pearl"] / rates[s, "roll"] for s in _SEGMENTS]
        low, high = self._OVER_ROLL[model]
        yield _row(self.id, f"PEARL over ROLL, {model}, least of the segments", low, min(over), "ratio")
        yield _row(self.id, f"PEARL over ROLL, {model}, greatest of the segments", high, max(over), "ratio")
        orders = {" < ".join(sorted(("roll", "rlboost", "pearl"), key=lambda p: rates[s, p])) for s in _SEGMENTS}
        name = f"policies by throughput, {model}, in every segment"
        yield _row(self.id, name, "roll < rlboost < pearl", ", ".join(sorted(orders)), "text")


def _row(id_: str, name: str, paper: float | str, ours: float | str, unit: Unit) -> TargetRow:
    return TargetRow(id=id_, name=name, use="predict", paper=paper, ours=ours, unit=unit)


class Figure7:
    """Fixed pools of 4 to 16 GPUs: disaggregation, ungated borrowing, and the gate, one after the other.

    As in the paper the first part is the *optimal* ratio, here the best of all in replayed batches; with borrowing the
    PD Decision Engine chooses.
    """

    id = "F7"
    _POOLS = (4, 8, 12, 16)
    _PARTS: Final = {"A": "static-pd", "A+B": "pearl-ungated", "A+B+C": "pearl-gated"}
    _FEW: Final = {"qwen3-8b": (-20.6, 93.6, 92.3), "qwen3-30b-a3b": (-30.9, 118.3, 129.5)}
    _MANY: Final = {
        "qwen3-8b": ((12.8, 15.3), (16.2, 26.5), (17.9, 26.5)),
        "qwen3-30b-a3b": ((7.8, 8.9), (9.4, 26.2), (9.2, 27.5)),
    }

    def __init__(self, effort: Effort = FULL) -> None:
        self._steps = effort.steps
        self._seeds = effort.seeds
        self._batches = max(1, effort.batches // 2)

    def _run(self, model: str, gpus: int, policy: str, seed: int) -> ClusterJob | BestRatioJob:
        workers = gpus // _TP
        scenario = variant(
            _FIXED,
            name=f"fixed-{gpus}",
            model=model,
            cluster={"reserved_rollout_gpus": gpus, "max_preemptible_gpus": 0},
            policy={"name": policy, "configuration": f"1P{workers - 1}D" if policy == "static-pd" else ""},
            run={"steps": self._steps, "seed": seed},
        )
        return BestRatioJob(scenario, workers, self._batches) if policy == "static-pd" else ClusterJob(scenario)

    def jobs(self) -> list[AnyJob]:
        """What must be run."""
        policies = ("roll", *self._PARTS.values())
        points = [(model, gpus, policy) for model in _MODELS for gpus in self._POOLS for policy in policies]
        return [self._run(*point, seed) for point in points for seed in range(self._seeds)]

    def _throughput(self, bench: Bench, model: str, gpus: int, policy: str) -> float:
        return fmean([bench.result(self._run(model, gpus, policy, s)).throughput for s in range(self._seeds)])

    def rows(self, bench: Bench) -> Iterable[TargetRow]:
        """Paper and ours."""
        for model in _MODELS:
            base = {gpus: self._throughput(bench, model, gpus, "roll") for gpus in self._POOLS}
            gains = {
                part: [gain(self._throughput(bench, model, gpus, policy), base[gpus]) for gpus in self._POOLS]
                for part, policy in self._PARTS.items()
            }
            for part, paper in zip(self._PARTS, self._FEW[model], strict=True):
                yield _row(self.id, f"{part} over ROLL, {model}, 4 GPUs, %", paper, gains[part][0], "points")
            for part, (low, high) in zip(self._PARTS, self._MANY[model], strict=True):
                many = gains[part][1:]
                yield _row(self.id, f"{part} over ROLL, {model}, least of 8 to 16 GPUs, %", low, min(many), "points")
                name = f"{part} over ROLL, {model}, greatest of 8 to 16 GPUs, %"
                yield _row(self.id, name, high, max(many), "points")
            for part, paper_signs in zip(self._PARTS, ("- + + +", "+ + + +", "+ + + +"), strict=True):
                name = f"signs of {part} over ROLL, {model}, 4 to 16 GPUs"
                yield _row(self.id, name, paper_signs, signs(gains[part]), "text")


class Figure8:
    """Qwen3-8B on 8 dedicated GPUs: batch sizes and length limits."""

    id = "F8"
    _BATCHES = (32, 64, 96, 128)
    _LENGTHS = (8192, 16384, 32768)

    def __init__(self, effort: Effort = FULL) -> None:
        self._steps = effort.steps
        self._seeds = effort.seeds

    def _scenario(self, policy: str, seed: int, *, batch: int = 64, length: int = 32768) -> Scenario:
        return variant(
            _FIXED,
            name=f"batch-{batch}-length-{length}",
            cluster={"reserved_rollout_gpus": 8, "max_preemptible_gpus": 0},
            rollout={"batch": batch},
            workload={"max_context_tokens": length},
            policy={"name": policy},
            run={"steps": self._steps, "seed": seed},
        )

    def _runs(self, policy: str, name: str, value: int) -> list[Scenario]:
        return [self._scenario(policy, seed, **{name: value}) for seed in range(self._seeds)]

    def _points(self) -> list[tuple[str, str, int]]:
        values = [("batch", b) for b in self._BATCHES] + [("length", n) for n in self._LENGTHS]
        return [(policy, name, value) for policy in ("rlboost", "pearl") for name, value in values]

    def jobs(self) -> list[AnyJob]:
        """What must be run."""
        return [ClusterJob(scenario) for point in self._points() for scenario in self._runs(*point)]

    def rows(self, bench: Bench) -> Iterable[TargetRow]:
        """Paper and ours."""
        rates: dict[tuple[str, str], dict[int, float]] = {}
        for policy, name, value in self._points():
            found = [bench.cluster(scenario).throughput for scenario in self._runs(policy, name, value)]
            rates.setdefault((policy, name), {})[value] = fmean(found)
        for name, values, where, low, high in (
            ("batch", self._BATCHES, "batches 32 to 128", 5.3, 63.7),
            ("length", self._LENGTHS, "lengths 8K to 32K", 9.8, 26.5),
        ):
            gains = [gain(rates["pearl", name][v], rates["rlboost", name][v]) for v in values]
            yield _row(self.id, f"PEARL over RLBoost+, least of {where}, %", low, min(gains), "points")
            yield _row(self.id, f"PEARL over RLBoost+, greatest of {where}, %", high, max(gains), "points")
        for policy, name, peak in (("rlboost", "RLBoost+", "64"), ("pearl", "PEARL", "96")):
            batches, lengths = rates[policy, "batch"], rates[policy, "length"]
            yield _row(
                self.id, f"batch at which {name} peaks", peak, str(max(batches, key=lambda b: batches[b])), "text"
            )
            falls = all(lengths[b] < lengths[a] for a, b in pairwise(self._LENGTHS))
            trend = "falls" if falls else "does not fall"
            yield _row(self.id, f"{name}'s throughput as the length limit grows", "falls", trend, "text")
