"""What a simulated engine measures of itself, as a real one would."""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from pearl_state.roles import Role
from pearl_state.samples import DecodeSample, EngineSamples, PrefillSample, TransferSample

_KEPT = 256
"""Hand-overs kept."""
_OF_A_SIZE = 8
"""Iterations kept of each batch size, and of each power of two of prompt tokens: who is asked at the end of a step
should not only know the few sequences that were left there."""
COUNTERS = (
    "prefill_tokens",
    "cached_tokens",
    "generated_tokens",
    "decode_iterations",
    "prefill_iterations",
    "retractions",
    "prefill_s",
    "decode_s",
    "switch_s",
    "transferred_bytes",
)
"""Names of the counters of an `EngineMeter`."""


def _by_size() -> defaultdict[int, deque[Any]]:
    return defaultdict(lambda: deque(maxlen=_OF_A_SIZE))


@dataclass(slots=True, eq=False)
class EngineMeter:
    """Cumulative counters, and the newest samples since they were last taken."""

    prefill_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    decode_iterations: int = 0
    prefill_iterations: int = 0
    retractions: int = 0
    prefill_s: float = 0.0
    """Time in iterations with prefill, seconds."""
    decode_s: float = 0.0
    """Time in pure decode iterations, seconds."""
    switch_s: float = 0.0
    """Time between the two, seconds."""
    transferred_bytes: int = 0
    by_batch: dict[int, tuple[int, float]] = field(default_factory=dict[int, tuple[int, float]])
    """Running sequences → pure decode iterations with so many, and their time in seconds."""
    _decode: defaultdict[int, deque[tuple[int, int, float, float]]] = field(default_factory=_by_size)
    _prefill: defaultdict[int, deque[tuple[int, float, int]]] = field(default_factory=_by_size)
    _transfer: deque[tuple[int, int, float]] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def prefilled(self, tokens: int, seconds: float, requests: int, decoding: int) -> None:
        """One iteration with prefill; `decoding` sequences got a token in it."""
        self.prefill_tokens += tokens
        self.prefill_iterations += 1
        self.generated_tokens += decoding
        self.prefill_s += seconds
        if not decoding:
            self._prefill[tokens.bit_length()].append((tokens, seconds, requests))

    def decoded(self, sequences: int, iterations: int, seconds: float, tokens: int, context_tokens: float) -> None:
        """Pure decode iterations of an unchanged batch with this mean context."""
        self.decode_iterations += iterations
        self.generated_tokens += tokens
        self.decode_s += seconds
        before = self.by_batch.get(sequences, (0, 0.0))
        self.by_batch[sequences] = (before[0] + iterations, before[1] + seconds)
        self._decode[sequences].append((sequences, iterations, seconds, context_tokens))

    def transferred(self, tokens: int, amount_bytes: int, seconds: float) -> None:
        """One hand-over that this engine received."""
        self.transferred_bytes += amount_bytes
        self._transfer.append((tokens, amount_bytes, seconds))

    def add(self, other: "EngineMeter") -> None:
        """Add the counters of a meter that is not used any more."""
        for name in COUNTERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def take(self, role: Role, *, running: int, waiting: int, kv_used: int, kv_capacity: int) -> EngineSamples:
        """The samples since the last call, with the counters."""
        samples = EngineSamples(
            role=role,
            decode=tuple(DecodeSample(*values) for values in chain.from_iterable(self._decode.values())),
            prefill=tuple(PrefillSample(*values) for values in chain.from_iterable(self._prefill.values())),
            transfer=tuple(TransferSample(*values) for values in self._transfer),
            prefill_tokens=self.prefill_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            decode_iterations=self.decode_iterations,
            running=running,
            waiting=waiting,
            kv_used_tokens=kv_used,
            kv_capacity_tokens=kv_capacity,
        )
        self._decode.clear()
        self._prefill.clear()
        self._transfer.clear()
        return samples
