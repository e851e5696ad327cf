"""Measured kernel latencies: the bundled tables, and curves through them.

A measurement jitters, a kernel that has more to do takes longer: each series is made monotone (pooling neighbours that
are out of order) before it is interpolated.
"""

import csv
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_MS = 1e-3


def isotonic(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` by least squares."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while blocks and blocks[-1][0] > mean:
            before, number = blocks.pop()
            mean = (mean * count + before * number) / (count + number)
            count += number
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]


class Curve:
    """Seconds against a size > 0: through measured points, monotone; beyond them along the last slope.

    `logarithmic` interpolates both axes by their logarithms, for kernels that grow with a power of the size.
    """

    __slots__ = ("_logarithmic", "xs", "ys")

    def __init__(self, points: Iterable[tuple[float, float]], *, logarithmic: bool = False) -> None:
        ordered = sorted(points)
        if len(ordered) < 2:
            raise ValueError("a curve needs at least two points")
        self.xs = [x for x, _ in ordered]
        self.ys = isotonic([y for _, y in ordered])
        self._logarithmic = logarithmic

    def __call__(self, x: float) -> float:
        """Seconds at `x`; below the first point its value."""
        xs, ys = self.xs, self.ys
        if x <= xs[0]:
            return ys[0]
        at = min(bisect_right(xs, x), len(xs) - 1)
        x0, x1, y0, y1 = xs[at - 1], xs[at], ys[at - 1], ys[at]
        if self._logarithmic:
            return y0 * math.exp(math.log(y1 / y0) * math.log(x / x0) / math.log(x1 / x0))
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)

    def at(self, xs: Floats) -> Floats:
        """Seconds at each of `xs`."""
        return np.array([self(float(x)) for x in xs], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class GemmSeries:
    """One weight matrix: latency against rows."""

    n: int
    k: int
    curve: Curve


@dataclass(frozen=True, slots=True)
class AttentionSeries:
    """Attention of one head layout: batch → latency against length."""

    heads: int
    kv_heads: int
    head_dim: int
    curves: Mapping[int, Curve]


@dataclass(frozen=True, slots=True)
class KernelTables:
    """All tables of one GPU type."""

    gpu: str
    gemms: tuple[GemmSeries, ...]
    prefill: tuple[AttentionSeries, ...]
    decode: tuple[AttentionSeries, ...]
    moe: Mapping[int, Curve]
    """Tensor parallelism → latency of the experts of one Qwen3-30B-A3B layer against tokens."""
    all_reduce: Mapping[int, Curve]
    """GPUs → latency against 2-byte elements per rank."""


EXPERT_LOAD = "power_law_1.01"
"""Which of the measured loads of experts is taken; routers of trained models are neither even nor extreme."""


@cache
def kernel_tables(gpu: str) -> KernelTables:
    """The tables of `h100` or `h200`."""
    gemms: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for row in _rows("gemm_bf16_sglang.csv", gpu):
        gemms.setdefault((int(row["n"]), int(row["k"])), []).append((int(row["m"]), _seconds(row)))
    moe: dict[int, list[tuple[float, float]]] = {}
    for row in _rows("moe_qwen3_30b_a3b_bf16_sglang.csv", gpu):
        if row["moe_ep"] == "1" and row["distribution"] == EXPERT_LOAD:
            moe.setdefault(int(row["moe_tp"]), []).append((int(row["tokens"]), _seconds(row)))
    reduce: dict[int, list[tuple[float, float]]] = {}
    for row in _rows("allreduce_sglang.csv", gpu):
        if row["backend"] == "sglang_graph":
            reduce.setdefault(int(row["gpus"]), []).append((int(row["elements"]), _seconds(row)))
    return KernelTables(
        gpu=gpu,
        gemms=tuple(GemmSeries(n, k, Curve(_merged(points))) for (n, k), points in gemms.items()),
        prefill=_attention("attention_prefill_bf16_sglang.csv", gpu, "isl", logarithmic=True),
        decode=_attention("attention_decode_bf16_sglang.csv", gpu, "kv_len", logarithmic=False),
        moe={tp: Curve(points, logarithmic=True) for tp, points in moe.items()},
        all_reduce={gpus: Curve(points) for gpus, points in reduce.items()},
    )


def _attention(file: str, gpu: str, length: str, *, logarithmic: bool) -> tuple[AttentionSeries, ...]:
    points: dict[tuple[int, int, int], dict[int, list[tuple[float, float]]]] = {}
    for row in _rows(file, gpu):
        layout = (int(row["heads"]), int(row["kv_heads"]), int(row["head_dim"]))
        batches = points.setdefault(layout, {})
        batches.setdefault(int(row["batch"]), []).append((int(row[length]), _seconds(row)))
    return tuple(
        AttentionSeries(
            *layout,
            curves={b: Curve(p, logarithmic=logarithmic) for b, p in sorted(batches.items()) if len(p) > 1},
        )
        for layout, batches in points.items()
    )


def _merged(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """One point for each size: the mean of what was measured there."""
    found: dict[float, list[float]] = {}
    for x, y in points:
        found.setdefault(x, []).append(y)
    return [(x, math.fsum(ys) / len(ys)) for x, ys in found.items()]


def _rows(file: str, gpu: str) -> list[dict[str, str]]:
    path = files("pearl_rl.simulation") / "data" / "perf" / file
    with path.open(encoding="utf-8") as lines:
        return [row for row in csv.DictReader(lines) if row["gpu"] == gpu]


def _seconds(row: Mapping[str, str]) -> float:
    return float(row["latency_ms"]) * _MS
