"""What an iteration of an inference engine costs: the sum of its kernels, each from a measured table.

Where a table lacks a shape, a GPU or a model, the nearest measured kernel is scaled by the ratio of the two kernels'
roofline bounds (the slower of arithmetic at peak and device memory at peak). So every model of the catalog has costs,
those with tables their own. Nothing here is shared with the planner's closed form, which is judged against it.
"""

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pearl_planner.catalog import GpuSpec, ModelSpec, find_gpu, find_model
from pearl_rl.simulation.tables import AttentionSeries, Curve, KernelTables, kernel_tables

_EXACT_TOKENS = 1024
_COARSE = (1.0, 1.25, 1.5, 1.75)
_MOST_TOKENS = 65_536
_RECURRING_TOKENS = 16_384
"""Beyond the chunks and batches that are usual."""
_GRID = 128
_WIDE_CHUNK = 2048
"""Chunks of so many tokens are bound by arithmetic at any context."""
_LARGEST_SIDE = 131_072
_MEASURED_MOE = "Qwen3-30B-A3B"


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationOverheads:
    """Parts of an iteration that no kernel table covers."""

    layer_s: float = 12e-6
    """Per layer: norms, rotary embedding, activation, as short kernels of a replayed graph, seconds."""
    decode_s: float = 0.3e-3
    """Per decode iteration: sampling and what scheduling does not hide, seconds."""
    decode_sequence_s: float = 0.0
    """Per sequence of a decode iteration: sampling, stop checks and streaming that are not hidden, seconds."""
    prefill_s: float = 1.0e-3
    """Per iteration with prefill, seconds."""
    eager_layer_s: float = 70e-6
    """Per layer: launching the kernels of an iteration that is no replayed graph; hidden behind longer kernels."""
    eager_decode_layer_s: float = 0.0
    """The same for decode; 0 where decode replays a graph."""
    kernel_factor: float = 1.0
    """By how much slower the kernels of another software stack are than the measured ones."""


class Hardware:
    """Kernels on one GPU type: measured ones, or the nearest measured ones scaled by roofline ratios."""

    def __init__(self, gpu: GpuSpec, tensor_parallel: int, tables: KernelTables | None = None) -> None:
        self.gpu = gpu
        self.tp = tensor_parallel
        self.tables = tables or kernel_tables("h200" if gpu.name.startswith("H200") else "h100")
        self._base = find_gpu(self.tables.gpu)

    def _scale(self, flops: float, moved: float, base_flops: float, base_moved: float) -> float:
        """Roofline bound of a kernel here over that of the measured kernel on its GPU."""
        here = max(flops / (self.gpu.bf16_tflops * 1e12), moved / (self.gpu.hbm_gbps * 1e9))
        there = max(base_flops / (self._base.bf16_tflops * 1e12), base_moved / (self._base.hbm_gbps * 1e9))
        return here / there

    def gemm(self, n: int, k: int) -> Callable[[float], float]:
        """Seconds of a product of m rows with an n x k matrix, against m."""
        nearest = min(self.tables.gemms, key=lambda s: abs(math.log(n / s.n)) + abs(math.log(k / s.k)))
        if (nearest.n, nearest.k) == (n, k) and self.gpu.name == self._base.name:
            return nearest.curve

        def seconds(m: float) -> float:
            own, other = m * n + m * k + n * k, m * nearest.n + m * nearest.k + nearest.n * nearest.k
            return nearest.curve(m) * self._scale(2 * m * n * k, 2 * own, 2 * m * nearest.n * nearest.k, 2 * other)

        return seconds

    def all_reduce(self) -> Callable[[float], float]:
        """Seconds of an all-reduce over the worker's GPUs, against elements; what exceeds latency scales with links."""
        if self.tp == 1:
            return lambda _elements: 0.0
        measured = self.tables.all_reduce
        gpus = min(measured, key=lambda count: (count < self.tp, abs(count - self.tp)))
        curve = measured[gpus]
        links = self._base.nvlink_gbps / self.gpu.nvlink_gbps
        latency_s = curve.ys[0]
        return lambda elements: latency_s + (curve(elements) - latency_s) * links

    def attention(
        self, series: Sequence[AttentionSeries], heads: int, kv_heads: int, head_dim: int, *, decode: bool
    ) -> tuple[AttentionSeries, float]:
        """The measured layout nearest to this one, and by how much its latencies are scaled."""

        def distance(s: AttentionSeries) -> float:
            return abs(math.log(kv_heads * head_dim / (s.kv_heads * s.head_dim))) + abs(math.log(heads / s.heads))

        nearest = min(series, key=distance)
        if decode:
            scale = kv_heads * head_dim / (nearest.kv_heads * nearest.head_dim)
            scale *= self._base.hbm_gbps / self.gpu.hbm_gbps
        else:
            scale = heads * head_dim / (nearest.heads * nearest.head_dim)
            scale *= self._base.bf16_tflops / self.gpu.bf16_tflops
        return nearest, scale

    def experts(self, model: ModelSpec) -> Callable[[float], float]:
        """Seconds of the experts of one layer, against tokens."""
        measured = find_model(_MEASURED_MOE)
        tp = min(self.tables.moe, key=lambda count: (count > self.tp, abs(count - self.tp)))
        curve = self.tables.moe[tp]
        if model.name == measured.name and tp == self.tp and self.gpu.name == self._base.name:
            return curve

        def seconds(tokens: float) -> float:
            own, other = _expert_work(model, self.tp, tokens), _expert_work(measured, tp, tokens)
            return curve(tokens) * self._scale(*own, *other)

        return seconds


def _expert_work(model: ModelSpec, tp: int, tokens: float) -> tuple[float, float]:
    """FLOP and bytes of one layer's experts on one GPU."""
    matrix = 3.0 * model.hidden * model.moe_intermediate / tp
    touched = model.experts * (1.0 - (1.0 - model.experts_per_token / model.experts) ** tokens)
    flops = 2.0 * tokens * model.experts_per_token * matrix
    moved = touched * matrix * model.bytes_per_weight + 4.0 * tokens * model.experts_per_token * model.hidden
    return flops, moved


class WorkerCosts:
    """Iteration costs of one worker: `tensor_parallel` GPUs of type `gpu` with `model`. All times in seconds."""

    def __init__(
        self,
        model: ModelSpec,
        gpu: GpuSpec,
        tensor_parallel: int,
        overheads: IterationOverheads = IterationOverheads(),
        tables: KernelTables | None = None,
    ) -> None:
        """`tables` are those of the GPU type nearest to `gpu` unless others are given."""
        self.model = model
        self.gpu = gpu
        self.tensor_parallel = tensor_parallel
        self.overheads = overheads
        hardware = Hardware(gpu, tensor_parallel, tables)
        self._heads = max(1, model.heads // tensor_parallel)
        self._kv_heads = 1 if model.shared_latent_kv else max(1, model.kv_heads // tensor_parallel)
        self._linear = _dense(self._layer_kernels(hardware), model.layers * overheads.layer_s)
        head = hardware.gemm(max(1, model.vocab // tensor_parallel), model.hidden)
        self._head = _dense([(overheads.kernel_factor, head)], 0.0)
        dim = model.head_dim
        decode, scale = hardware.attention(hardware.tables.decode, self._heads, self._kv_heads, dim, decode=True)
        self._decode_series, self._decode_scale = decode, scale * model.layers * overheads.kernel_factor
        prefill, scale = hardware.attention(hardware.tables.prefill, self._heads, self._kv_heads, dim, decode=False)
        self._prefill_scale = scale * model.layers * overheads.kernel_factor
        self._square_s = _gridded(prefill.curves[1], self._prefill_scale)
        self._context_limit = model.attention_context_limit
        self._eager_s = model.layers * overheads.eager_layer_s
        self._decode_curves: dict[int, DecodeCurve] = {}

    def _layer_kernels(self, hardware: Hardware) -> list[tuple[float, Callable[[float], float]]]:
        """(how often in an iteration, seconds against tokens) of everything but attention and output head."""
        model, tp = self.model, self.tensor_parallel
        hidden, inner = model.hidden, self._heads * model.head_dim
        layers = model.layers
        if model.shared_latent_kv:
            kernels = [(layers, hardware.gemm(self._projections(), hidden))]
        else:
            kernels = [
                (layers, hardware.gemm(inner + 2 * self._kv_heads * model.head_dim, hidden)),
                (layers, hardware.gemm(hidden, inner)),
            ]
        dense_layers = layers - model.moe_layers
        if dense_layers:
            wide = max(1, model.intermediate // tp)
            kernels += [
                (dense_layers, hardware.gemm(2 * wide, hidden)),
                (dense_layers, hardware.gemm(hidden, wide)),
            ]
        if model.moe_layers:
            kernels += [
                (model.moe_layers, hardware.gemm(model.experts, hidden)),
                (model.moe_layers, hardware.experts(model)),
            ]
        reduce = hardware.all_reduce()
        kernels.append((2 * layers, lambda tokens: reduce(tokens * hidden)))
        moved = 2.0 * (8 * hidden + 3 * (model.moe_intermediate * model.experts_per_token or model.intermediate) / tp)
        per_token_s = moved / (self.gpu.hbm_gbps * 1e9)
        kernels.append((layers, lambda tokens: tokens * per_token_s))
        return [(count * self.overheads.kernel_factor, kernel) for count, kernel in kernels]

    def _projections(self) -> int:
        """Columns of one matrix as large as all attention projections together, for layouts that have many."""
        model = self.model
        ffn = (model.layers - model.moe_layers) * 6 * model.hidden * model.intermediate
        ffn += model.moe_layers * 6 * model.hidden * model.moe_intermediate * model.experts_per_token
        rest = (model.flops_per_token - model.head_flops - ffn) / (2 * model.hidden * model.layers)
        return max(1, round(rest / self.tensor_parallel))

    # ---- attention --------------------------------------------------------------------------------------------------

    def decode_attention_s(self, sequences: int, context_tokens: float) -> float:
        """All layers of one decode iteration with `sequences` at a mean context."""
        return self.decode_curve(sequences).attention_s(context_tokens)

    def prefill_attention_s(self, new_tokens: int, past_tokens: int) -> float:
        """All layers of a chunk of `new_tokens` after `past_tokens` that are in the cache.

        The chunk is a part of the square whose sides are twice its mean attended length; a narrow one never beats
        reading its context once, as a decode step does.
        """
        limit = self._context_limit
        past = min(past_tokens, limit) if limit else past_tokens
        side = 2 * past + new_tokens
        square = self._square_s
        at, rest = divmod(side, _GRID)
        if at + 1 < len(square):
            whole_s = square[at] + (square[at + 1] - square[at]) * (rest / _GRID)
        else:
            # Work grows with the square of the side.
            whole_s = square[-1] * (side / ((len(square) - 1) * _GRID)) ** 2
        seconds = square[0] + (whole_s - square[0]) * new_tokens / side
        if new_tokens >= _WIDE_CHUNK:
            return seconds
        return max(seconds, self.decode_attention_s(1, past_tokens + new_tokens))

    # ---- iterations -------------------------------------------------------------------------------------------------

    def prefill_s(
        self, chunks: Sequence[tuple[int, int]], finished: int, sequences: int = 0, context_tokens: float = 0.0
    ) -> float:
        """An iteration of `chunks` (new, past tokens) of which `finished` give a token.

        With `sequences` at a mean context it decodes one token of each of them in the same iteration.
        """
        tokens = sequences
        seconds = 0.0
        for new, past in chunks:
            tokens += new
            seconds += self.prefill_attention_s(new, past)
        if sequences:
            seconds += self.decode_attention_s(sequences, context_tokens)
        seconds += self._linear(tokens) + self._head(finished + sequences)
        return max(seconds, self._eager_s) + self.overheads.prefill_s

    def decode_curve(self, sequences: int) -> "DecodeCurve":
        """Decode iterations with `sequences` running, against their mean context."""
        curve = self._decode_curves.get(sequences)
        if curve is None:
            host_s = self.overheads.decode_s + sequences * self.overheads.decode_sequence_s
            fixed = self._linear(sequences) + self._head(sequences) + host_s
            xs, ys = _at_batch(self._decode_series, sequences)
            attention = [y * self._decode_scale for y in ys]
            eager = self.model.layers * self.overheads.eager_decode_layer_s
            # Launching is hidden behind kernels, or the kernels behind launching.
            attention = [max(y, eager - fixed) for y in attention]
            curve = DecodeCurve(xs, attention, fixed, self._context_limit)
            self._decode_curves[sequences] = curve
        return curve


class DecodeCurve:
    """Duration of a decode iteration of a fixed number of sequences, piecewise linear in their mean context.

    Each iteration adds one token to every context, so a run of iterations is a sum of arithmetic series.
    """

    __slots__ = ("_fixed_s", "_limit", "_slopes", "_xs", "_ys")

    def __init__(self, xs: Sequence[float], attention_s: Sequence[float], fixed_s: float, limit: int = 0) -> None:
        self._xs = list(xs)
        self._fixed_s = fixed_s
        self._ys = [y + fixed_s for y in attention_s]
        slopes = [(y1 - y0) / (x1 - x0) for x0, x1, y0, y1 in zip(xs, xs[1:], self._ys, self._ys[1:], strict=False)]
        self._slopes = [*slopes, slopes[-1]]
        self._limit = limit

    def iteration_s(self, context_tokens: float) -> float:
        """One iteration at this mean context."""
        if self._limit and context_tokens > self._limit:
            context_tokens = self._limit
        at = max(0, bisect_right(self._xs, context_tokens) - 1)
        return self._ys[at] + self._slopes[at] * max(0.0, context_tokens - self._xs[at])

    def attention_s(self, context_tokens: float) -> float:
        """Its attention kernels alone."""
        return self.iteration_s(context_tokens) - self._fixed_s

    def run_s(self, context_tokens: float, iterations: int) -> float:
        """Sum over `iterations`, the first at this mean context, each following one token further."""
        total, left, at_tokens = 0.0, iterations, context_tokens
        while left > 0:
            first, slope, steps = self._piece(at_tokens, left)
            total += steps * first + slope * (0.5 * steps * (steps - 1))
            left -= steps
            at_tokens += steps
        return total

    def iterations_within(self, context_tokens: float, seconds: float, most: int) -> int:
        """How many whole iterations end within `seconds`, at most `most`."""
        done, left_s, at_tokens = 0, seconds, context_tokens
        while done < most:
            first, slope, steps = self._piece(at_tokens, most - done)
            whole = steps * first + slope * (0.5 * steps * (steps - 1))
            if whole > left_s:
                return done + _steps_within(first, slope, left_s, steps)
            left_s -= whole
            done += steps
            at_tokens += steps
        return done

    def _piece(self, context_tokens: float, most: int) -> tuple[float, float, int]:
        """The first iteration here, by how much each following one is longer, and for how many that holds."""
        xs = self._xs
        if self._limit and context_tokens >= self._limit:
            return self.iteration_s(self._limit), 0.0, most
        at = bisect_right(xs, context_tokens) - 1
        if at < 0:
            return self._ys[0], 0.0, min(most, max(1, math.ceil(xs[0] - context_tokens)))
        slope = self._slopes[at]
        first = self._ys[at] + slope * (context_tokens - xs[at])
        if at + 1 == len(xs) or xs[at + 1] - context_tokens >= most:
            return first, slope, most
        return first, slope, max(1, math.ceil(xs[at + 1] - context_tokens))


def _steps_within(first: float, slope: float, seconds: float, most: int) -> int:
    """Largest k ≤ `most` with k·first + slope·k(k−1)/2 ≤ `seconds`."""
    if slope <= 1e-15:
        k = int(seconds / first)
    else:
        half = first - 0.5 * slope
        k = int((math.sqrt(half * half + 2.0 * slope * seconds) - half) / slope)
    k = max(0, min(k, most))
    # The root may be off by one by rounding.
    while k < most and (k + 1) * first + slope * 0.5 * (k + 1) * k <= seconds:
        k += 1
    while k > 0 and k * first + slope * 0.5 * k * (k - 1) > seconds:
        k -= 1
    return k


def _gridded(curve: Curve, scale: float) -> list[float]:
    """A curve's values at every `_GRID` tokens, scaled; between them a line is close enough."""
    return [curve(max(1, at)) * scale for at in range(0, _LARGEST_SIDE + 1, _GRID)]


def _at_batch(series: AttentionSeries, sequences: int) -> tuple[list[float], list[float]]:
    """Lengths and seconds of a layer's decode attention for a batch between the measured ones."""
    batches = sorted(series.curves)
    above = next((b for b in batches if b >= sequences), batches[-1])
    below = max((b for b in batches if b <= sequences), default=batches[0])
    low, high = series.curves[below], series.curves[above]
    xs = sorted({*low.xs, *high.xs})
    if above == below:
        # Beyond the largest measured batch, attention reads in proportion.
        scale = max(1.0, sequences / above)
        return xs, [high(x) * scale for x in xs]
    part = (sequences - below) / (above - below)
    return xs, [low(x) + (high(x) - low(x)) * part for x in xs]


def _dense(kernels: Sequence[tuple[float, Callable[[float], float]]], fixed_s: float) -> Callable[[int], float]:
    """Σ count·kernel(tokens) + fixed, tabulated once: each count up to 1024 tokens, then on a relative grid."""
    knots = [float(m) for m in range(1, _EXACT_TOKENS)]
    size = _EXACT_TOKENS
    while size <= _MOST_TOKENS:
        knots += [size * part for part in _COARSE]
        size *= 2
    total = np.full(len(knots), fixed_s)
    for count, kernel in kernels:
        total += count * np.array([kernel(m) for m in knots])
    curve = Curve(zip(knots, total.tolist(), strict=True))
    known = array("d", bytes(8 * _RECURRING_TOKENS))
    """What was asked before, 0 where nothing was: numbers of tokens recur, and a table that fills up does not grow."""

    def seconds(tokens: int) -> float:
        if tokens >= _RECURRING_TOKENS:
            return curve(tokens)
        found = known[tokens]
        if not found and tokens:
            found = known[tokens] = curve(tokens)
        return found

    return seconds
