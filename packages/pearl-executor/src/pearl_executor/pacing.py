"""Pace: what an emulated device costs, so that several workers on one machine behave like as many devices.

Tokens, weights and KV stay real; an operation only lasts at least as long as the pace says.
"""

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Least durations of one emulated worker. Symbols are PEARL's (section 4.3.1). 0 leaves an operation unpaced."""

    decode_fixed_s: float = 0.0
    """A: fixed cost of a decode iteration, seconds."""
    decode_per_sequence_s: float = 0.0
    """b: cost of each concurrent sequence in a decode iteration, seconds."""
    prefill_per_token_s: float = 0.0
    """t_prefill: cost of each computed prompt token, seconds."""
    phase_switch_s: float = 0.0
    """Extra at each change between prefill and decode on a colocated worker (adds up to T_over), seconds."""
    kv_bytes_per_s: float = 0.0
    """BW: bandwidth of a KV hand-over, bytes per second; 0 means unlimited."""
    handover_s: float = 0.0
    """Fixed cost of a KV hand-over, seconds."""
    start_s: float = 0.0
    """From starting a process until its engine could serve, seconds."""
    resume_s: float = 0.0
    """Taking device memory again after a release, seconds."""
    release_s: float = 0.0
    """Giving device memory back, seconds."""
    switch_s: float = 0.0
    """Changing the role of an idle engine in place, seconds."""
    load_s: float = 0.0
    """Loading a weight snapshot, seconds."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a value that is negative or not finite."""
        for item in fields(self):
            value = getattr(self, item.name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"Pace.{item.name} = {value}: must be a finite number, at least 0")

    def decode_s(self, sequences: int) -> float:
        """Least duration of a decode iteration over `sequences` running sequences: A + b·n, seconds."""
        return self.decode_fixed_s + self.decode_per_sequence_s * sequences

    def prefill_s(self, tokens: int) -> float:
        """Least duration of a prefill iteration that computes `tokens` prompt tokens, seconds."""
        return self.prefill_per_token_s * tokens

    def transfer_s(self, bytes_: int) -> float:
        """Least duration of a hand-over of `bytes_` bytes of KV, seconds."""
        return self.handover_s + (bytes_ / self.kv_bytes_per_s if self.kv_bytes_per_s else 0.0)
