"""PEARL Figures 5, 7 and 8: end to end on traces, ablation on fixed pools, and sensitivity to the workload."""

from collections.abc import Iterable
from typing import Final

from pearl_rl.simulation.experiments.bench import AnyJob, Bench, ClusterJob, variant
from pearl_rl.simulation.experiments.targets import TargetRow, gain
from pearl_rl.simulation.scenario import Scenario

_FIXED = {"availability": {"trace": "none"}}
_MODELS = ("qwen3-8b", "qwen3-30b-a3b")
_SEGMENTS = ("segment1", "segment2", "segment3")


class Figure5:
    """Two hours of each segment under four policies."""

    id = "F5"
    _POLICIES = ("roll", "roll-large", "rlboost", "pearl")
    _OVER_ROLL: Final = {"qwen3-8b": (2.17, 2.37), "qwen3-30b-a3b": (2.43, 2.79)}
    _OVER_RLBOOST: Final = {"qwen3-8b": (5.9, 26.9, 10.6), "qwen3-30b-a3b": (7.4, 36.3, 19.0)}

    def __init__(self, duration_s: float = 7200.0, seeds: int = 2) -> None:
        self._duration_s = duration_s
        self._seeds = seeds

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
        return sum(run.throughput for run in runs) / len(runs)

    def rows(self, bench: Bench) -> Iterable[TargetRow]:
        """Paper and ours."""
        for model in _MODELS:
            rates = {(s, p): self._throughput(bench, model, s, p) for s in _SEGMENTS for p in self._POLICIES}
            over = [rates[s, "pearl"] / rates[s, "roll"] for s in _SEGMENTS]
            for name, paper, ours in zip(
                ("least", "greatest"), self._OVER_ROLL[model], (min(over), max(over)), strict=True
            ):
                yield TargetRow(
                    id=self.id,
                    name=f"PEARL over ROLL, {model}, {name} of the segments",
                    use="predict",
                    paper=paper,
                    ours=ours,
                    unit="ratio",
                )
            gains = [gain(rates[s, "pearl"], rates[s, "rlboost"]) for s in _SEGMENTS]
            for segment, paper_gain, ours in zip(_SEGMENTS, self._OVER_RLBOOST[model], gains, strict=True):
                yield TargetRow(
                    id=self.id,
                    name=f"PEARL over RLBoost+, {model}, {segment}, %",
                    use="predict",
                    paper=paper_gain,
                    ours=ours,
                    unit="points",
                )
            order = sorted(range(3), key=lambda i: -gains[i])
            yield TargetRow(
                id=self.id,
                name=f"segments by gain over RLBoost+, {model}",
                use="predict",
                paper="2 > 3 > 1",
                ours=" > ".join(str(i + 1) for i in order),
                unit="text",
            )
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


class Figure7:
    """Fixed pools of 4 to 16 GPUs: disaggregation, ungated borrowing, and the gate, one after the other."""

    id = "F7"
    _POOLS = (4, 8, 12, 16)
    _PARTS: Final = {"A": "pearl-disaggregated", "A+B": "pearl-ungated", "A+B+C": "pearl-gated"}
    _FEW: Final = {"qwen3-8b": (-20.6, 93.6, 92.3), "qwen3-30b-a3b": (-30.9, 118.3, 129.5)}
    _MANY: Final = {
        "qwen3-8b": ((12.8, 15.3), (16.2, 26.5), (17.9, 26.5)),
        "qwen3-30b-a3b": ((7.8, 8.9), (9.4, 26.2), (9.2, 27.5)),
    }

    def __init__(self, steps: int = 10) -> None:
        self._steps = steps

    def _scenario(self, model: str, gpus: int, policy: str) -> Scenario:
        cluster = {"reserved_rollout_gpus": gpus, "max_preemptible_gpus": 0}
        return variant(
            _FIXED,
            name=f"fixed-{gpus}",
            model=model,
            cluster=cluster,
            policy={"name": policy},
            run={"steps": self._steps},
        )

    def jobs(self) -> list[AnyJob]:
        """What must be run."""
        policies = ("roll", *self._PARTS.values())
        return [ClusterJob(self._scenario(m, gpus, p)) for m in _MODELS for gpus in self._POOLS for p in policies]

    def rows(self, bench: Bench) -> Iterable[TargetRow]:
        """Paper and ours."""
        for model in _MODELS:
            gains = {
                (gpus, part): gain(
                    bench.cluster(self._scenario(model, gpus, policy)).throughput,
                    bench.cluster(self._scenario(model, gpus, "roll")).throughput,
                )
                for gpus in self._POOLS
                for part, policy in self._PARTS.items()
            }
            for part, paper in zip(self._PARTS, self._FEW[model], strict=True):
                yield self._row(f"{part} over ROLL, {model}, 4 GPUs, %", paper, gains[4, part])
            for part, (low, high) in zip(self._PARTS, self._MANY[model], strict=True):
                many = [gains[gpus, part] for gpus in self._POOLS[1:]]
                yield self._row(f"{part} over ROLL, {model}, least of 8 to 16 GPUs, %", low, min(many))
                yield self._row(f"{part} over ROLL, {model}, greatest of 8 to 16 GPUs, %", high, max(many))

    def _row(self, name: str, paper: float, ours: float) -> TargetRow:
        return TargetRow(id=self.id, name=name, use="predict", paper=paper, ours=ours, unit="points")


class Figure8:
    """Qwen3-8B on 8 dedicated GPUs: batch sizes and length limits."""

    id = "F8"
    _BATCHES = (32, 48, 64, 80, 96, 112, 128)
    _LENGTHS = (8192, 16384, 24576, 32768)

    def __init__(self, steps: int = 10) -> None:
        self._steps = steps

    def _scenario(self, policy: str, *, batch: int = 64, length: int = 32768) -> Scenario:
        return variant(
            _FIXED,
            name=f"batch-{batch}-length-{length}",
            cluster={"reserved_rollout_gpus": 8, "max_preemptible_gpus": 0},
            rollout={"batch": batch},
            workload={"max_context_tokens": length},
            policy={"name": policy},
            run={"steps": self._steps},
        )

    def jobs(self) -> list[AnyJob]:
        """What must be run."""
        scenarios = [self._scenario(p, batch=b) for p in ("rlboost", "pearl") for b in self._BATCHES]
        scenarios += [self._scenario(p, length=n) for p in ("rlboost", "pearl") for n in self._LENGTHS]
        return [ClusterJob(scenario) for scenario in scenarios]

    def rows(self, bench: Bench) -> Iterable[TargetRow]:
        """Paper and ours."""

        def rates(policy: str, name: str, values: tuple[int, ...]) -> dict[int, float]:
            return {v: bench.cluster(self._scenario(policy, **{name: v})).throughput for v in values}

        def points(name: str, paper: float, ours: float) -> TargetRow:
            return TargetRow(id=self.id, name=name, use="predict", paper=paper, ours=ours, unit="points")

        def text(name: str, paper: str, ours: str) -> TargetRow:
            return TargetRow(id=self.id, name=name, use="predict", paper=paper, ours=ours, unit="text")

        base, pearl = rates("rlboost", "batch", self._BATCHES), rates("pearl", "batch", self._BATCHES)
        gains = [gain(pearl[b], base[b]) for b in self._BATCHES]
        yield points("PEARL over RLBoost+, least of batches 32 to 128, %", 5.3, min(gains))
        yield points("PEARL over RLBoost+, greatest of batches 32 to 128, %", 63.7, max(gains))
        yield text("batch at which RLBoost+ peaks", "64", str(max(base, key=lambda b: base[b])))
        yield text("batch at which PEARL peaks", "96", str(max(pearl, key=lambda b: pearl[b])))
        base, pearl = rates("rlboost", "length", self._LENGTHS), rates("pearl", "length", self._LENGTHS)
        gains = [gain(pearl[n], base[n]) for n in self._LENGTHS]
        yield points("PEARL over RLBoost+, least of lengths 8K to 32K, %", 9.8, min(gains))
        yield points("PEARL over RLBoost+, greatest of lengths 8K to 32K, %", 26.5, max(gains))
        for name, found in (("RLBoost+", base), ("PEARL", pearl)):
            falls = all(found[b] < found[a] for a, b in zip(self._LENGTHS, self._LENGTHS[1:], strict=False))
            yield text(f"{name}'s throughput as the length limit grows", "falls", "falls" if falls else "does not fall")
