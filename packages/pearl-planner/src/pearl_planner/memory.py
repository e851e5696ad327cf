"""Whether a worker's way back onto the device fits at every step, checked before the first one.

Waking up holds incoming weights beside resident ones for a while. Taking KV memory only after that copy is gone keeps
the peak at what serving needs anyway.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pearl_state.errors import StateError


class MemoryOrderError(StateError, ValueError):
    """A sequence of steps that needs more device memory than there is."""


@dataclass(frozen=True, slots=True)
class MemoryStep:
    """One step: what it takes (or gives back, negative) for good, bytes."""

    name: str
    delta_bytes: float


def wake_up(
    *, weight_bytes: float, kv_bytes: float, staging_bytes: float, graph_bytes: float = 0.0
) -> tuple[MemoryStep, ...]:
    """The order with the lowest peak: weights, synchronize, free the staged copy, KV, graphs."""
    return (
        MemoryStep("resume weights", weight_bytes),
        MemoryStep("synchronize weights", staging_bytes),
        MemoryStep("free staging", -staging_bytes),
        MemoryStep("resume KV", kv_bytes),
        MemoryStep("capture graphs", graph_bytes),
    )


def peak_bytes(steps: Sequence[MemoryStep]) -> float:
    """The most that the steps hold together at any time, bytes; at least 0."""
    held = peak = 0.0
    for step in steps:
        held += step.delta_bytes
        peak = max(peak, held)
    return peak


def check_memory(steps: Sequence[MemoryStep], *, free_bytes: float) -> None:
    """Raise `MemoryOrderError` for the first step that does not fit into `free_bytes`."""
    held = 0.0
    for step in steps:
        held += step.delta_bytes
        if held > free_bytes:
            raise MemoryOrderError(
                f"step '{step.name}' needs {held / 1e9:.1f} GB of {free_bytes / 1e9:.1f} GB free device memory"
            )
