"""What the engine measured: counters over its life, and samples since the host last asked."""

from collections import deque

from pearl_state.roles import Role
from pearl_state.samples import DecodeSample, EngineSamples, PrefillSample

_KEPT = 4096
"""Samples kept for a host that never asks."""


class Meter:
    """Counts iterations as the emulated device ran them (durations are paced)."""

    def __init__(self) -> None:
        self._decode: deque[DecodeSample] = deque(maxlen=_KEPT)
        self._prefill: deque[PrefillSample] = deque(maxlen=_KEPT)
        self._consecutive = False
        self.prefill_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.decode_iterations = 0

    def count_prefill(self, tokens: int, requests: int, duration_s: float) -> None:
        """A prefill iteration that computed `tokens` tokens of `requests` requests."""
        self.prefill_tokens += tokens
        self._prefill.append(PrefillSample(tokens, duration_s, requests))
        self._consecutive = False

    def count_decode(self, sequences: int, duration_s: float) -> None:
        """A decode iteration over `sequences` requests; equal ones that follow each other make one sample."""
        self.decode_iterations += 1
        iterations = 1
        if self._consecutive and self._decode and self._decode[-1].sequences == sequences:
            last = self._decode.pop()
            iterations, duration_s = last.iterations + 1, last.duration_s + duration_s
        self._decode.append(DecodeSample(sequences, iterations, duration_s))
        self._consecutive = True

    def take(self, role: Role, *, running: int, waiting: int, used: int, capacity: int) -> EngineSamples:
        """The samples since the last call, and all counters. Hand-overs are not the engine's to measure."""
        samples = EngineSamples(
            role=role,
            decode=tuple(self._decode),
            prefill=tuple(self._prefill),
            prefill_tokens=self.prefill_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            decode_iterations=self.decode_iterations,
            running=running,
            waiting=waiting,
            kv_used_tokens=used,
            kv_capacity_tokens=capacity,
        )
        self._decode.clear()
        self._prefill.clear()
        return samples
