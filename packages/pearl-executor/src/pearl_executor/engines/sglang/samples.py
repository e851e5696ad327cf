"""From a server's counters to the tracker's samples. Pure.

SGLang counts over its whole life; two looks give what happened between them. Its decode moments (steps, Σb, Σt, Σb²,
Σb·t) carry the least-squares line t = A + b·B of the interval, which two samples on that line convey.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pearl_state.roles import Role
from pearl_state.samples import DecodeSample, EngineSamples, PrefillSample, TransferSample

_KEPT = 4096


@dataclass(slots=True)
class Meter:
    """What one server measured since it was last asked."""

    kv_bytes_per_token: int
    _moments: tuple[float, ...] = (0.0,) * 6
    _prefill: tuple[int, int] = (0, 0)
    _transfers: dict[str, float] = field(default_factory=dict[str, float])
    decode: list[DecodeSample] = field(default_factory=list[DecodeSample])
    prefill: list[PrefillSample] = field(default_factory=list[PrefillSample])
    transfer: list[TransferSample] = field(default_factory=list[TransferSample])
    cached_tokens: int = 0
    generated_tokens: int = 0
    decode_iterations: int = 0
    running: int = 0
    waiting: int = 0
    used_tokens: int = 0
    capacity_tokens: int = 0

    def look(self, load: Mapping[str, Any]) -> None:
        """Take in one entry of `/v1/loads`."""
        self.running = int(load["num_running_reqs"])
        self.waiting = int(load["num_waiting_reqs"]) + queued(load)
        self.used_tokens = int(load["num_used_tokens"])
        self.capacity_tokens = int(load["max_total_num_tokens"])
        tokens, busy_us = int(load["total_prefill_uncached_tokens"]), int(load["total_prefill_busy_us"])
        new_tokens, new_us = tokens - self._prefill[0], busy_us - self._prefill[1]
        if new_tokens > 0 and new_us > 0:
            self.prefill.append(PrefillSample(new_tokens, new_us / 1e6))
        self._prefill = (tokens, busy_us)
        moments = tuple(float(value) for value in (load.get("decode_moments") or (0.0,) * 6))
        delta = [new - old for new, old in zip(moments, self._moments, strict=True)]
        if delta[0] > 0:
            self.decode_iterations = int(moments[0])
            self.decode += decode_samples(delta)
        self._moments = moments
        del self.decode[:-_KEPT], self.prefill[:-_KEPT], self.transfer[:-_KEPT]

    def look_at_transfers(self, metrics: str) -> None:
        """Take in `/metrics` of a prefill server: what KV hand-overs took since the last look."""
        now = dict(totals(metrics))
        before, self._transfers = self._transfers, now
        count = now.get("kv_transfer_latency_ms_count", 0.0) - before.get("kv_transfer_latency_ms_count", 0.0)
        latency_ms = now.get("kv_transfer_latency_ms_sum", 0.0) - before.get("kv_transfer_latency_ms_sum", 0.0)
        moved_mb = now.get("kv_transfer_total_mb_sum", 0.0) - before.get("kv_transfer_total_mb_sum", 0.0)
        if count > 0 and latency_ms > 0 and moved_mb > 0:
            size = int(moved_mb * 2**20 / count)
            tokens = max(1, size // max(1, self.kv_bytes_per_token))
            self.transfer.append(TransferSample(tokens, size, latency_ms / 1e3 / count))

    def take(self, role: Role) -> EngineSamples:
        """Everything since the last call."""
        samples = EngineSamples(
            role=role,
            decode=tuple(self.decode),
            prefill=tuple(self.prefill),
            transfer=tuple(self.transfer),
            prefill_tokens=self._prefill[0],
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            decode_iterations=self.decode_iterations,
            running=self.running,
            waiting=self.waiting,
            kv_used_tokens=self.used_tokens,
            kv_capacity_tokens=self.capacity_tokens,
        )
        self.decode, self.prefill, self.transfer = [], [], []
        return samples


def queued(load: Mapping[str, Any]) -> int:
    """Requests in the queues that only disaggregation has."""
    queues = load.get("disaggregation") or {}
    return sum(int(value) for name, value in queues.items() if name.endswith("_queue_reqs"))


def decode_samples(delta: Sequence[float]) -> list[DecodeSample]:
    """The decode iterations of an interval: two samples on its least-squares line, or one where all were alike."""
    steps, batch, time_us, batch2, batch_time = delta[:5]
    mean = batch / steps
    variance = batch2 / steps - mean * mean
    if steps < 2 or variance < 0.25:
        return [DecodeSample(max(1, round(mean)), int(steps), time_us / 1e6)]
    slope = (batch_time / steps - mean * time_us / steps) / variance
    fixed = time_us / steps - slope * mean
    spread = math.sqrt(variance)
    low, high = max(1, math.floor(mean - spread)), math.ceil(mean + spread)
    half = max(1, int(steps) // 2)
    found = [DecodeSample(size, half, half * (fixed + slope * size) / 1e6) for size in (low, high)]
    return (
        found
        if all(sample.duration_s > 0 for sample in found)
        else [DecodeSample(max(1, round(mean)), int(steps), time_us / 1e6)]
    )


def totals(metrics: str) -> Iterator[tuple[str, float]]:
    """Name (without prefix) and sum over labels of each KV-transfer figure in a Prometheus text."""
    sums: dict[str, float] = {}
    for line in metrics.splitlines():
        name, _, rest = line.partition("{")
        if name.startswith("sglang:kv_transfer_") and not name.endswith("_bucket"):
            value = rest.rpartition("}")[2].split()
            if value:
                short = name.removeprefix("sglang:")
                sums[short] = sums.get(short, 0.0) + float(value[0])
    yield from sums.items()
