"""Telemetry samples: what engines and the rollout report, and the planner's models are fitted to."""

from dataclasses import dataclass

from pearl_state.roles import Role


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """`iterations` consecutive pure decode iterations with the same number of running sequences."""

    sequences: int
    iterations: int
    duration_s: float
    """All iterations together, seconds."""
    context_tokens: float = 0.0
    """Mean context of a sequence during them, tokens; 0 where nobody told."""


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """One prefill iteration (chunk): computed prompt tokens, not those found in the prefix cache."""

    tokens: int
    duration_s: float
    requests: int = 1


@dataclass(frozen=True, slots=True)
class TransferSample:
    """One KV hand-over from a prefill to a decode worker."""

    tokens: int
    bytes: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSamples:
    """What one worker measured since it was last asked, with cumulative counters."""

    role: Role
    decode: tuple[DecodeSample, ...] = ()
    prefill: tuple[PrefillSample, ...] = ()
    transfer: tuple[TransferSample, ...] = ()
    prefill_tokens: int = 0
    """Prompt tokens computed, cumulative over the process."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache, cumulative."""
    generated_tokens: int = 0
    decode_iterations: int = 0
    running: int = 0
    """Sequences in decode now."""
    waiting: int = 0
    """Requests that wait for prefill or KV now."""
    kv_used_tokens: int = 0
    kv_capacity_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSample:
    """One finished turn of a trajectory (PEARL section 5, Runtime statistics)."""

    step: int
    turn: int
    """0 for the first turn of its trajectory."""
    new_prompt_tokens: int
    """ΔL."""
    response_tokens: int
    """r."""
    retained_tokens: int
    """Response tokens that stay in the next turn's context."""
    context_tokens: int
    """Whole context before the response."""
    prefill_s: float
    decode_s: float
    queue_s: float
    environment_s: float
    last: bool
    """Whether the trajectory ended with this turn."""
    cached_tokens: int | None = None
    """Part of the context that the prefix cache of who computed it held; None where nobody told."""
