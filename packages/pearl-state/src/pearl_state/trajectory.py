"""A trajectory's record: tokens with their origin, weight-version spans, and lifecycle."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from pearl_state.errors import StateError

TrajectoryId = NewType("TrajectoryId", str)
"""Unique in a run, fixed width so that no id is a prefix of another: `t00000042`."""

GroupId = NewType("GroupId", str)
"""A GRPO group: the trajectories that share one task."""


class TrajectoryPhase(StrEnum):
    """Where a trajectory is in its life (Prorsa section 3 names the stages)."""

    SAMPLED = "sampled"
    ENVIRONMENT_STARTING = "environment_starting"
    READY = "ready"
    PREFILL = "prefill"
    DECODE = "decode"
    TOOL = "tool"
    REWARD = "reward"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """`tokens` consecutive generated tokens that came from weight version `version`."""

    version: int
    tokens: int


def merge_spans(spans: Sequence[WeightSpan]) -> tuple[WeightSpan, ...]:
    """Join neighbours of the same version and drop empty ones. Raises `StateError` where a version goes back."""
    merged: list[WeightSpan] = []
    for span in spans:
        if span.tokens == 0:
            continue
        if merged and span.version < merged[-1].version:
            raise StateError(f"weight version goes back within a trajectory: {merged[-1].version} -> {span.version}")
        if merged and merged[-1].version == span.version:
            merged[-1] = WeightSpan(span.version, merged[-1].tokens + span.tokens)
        else:
            merged.append(span)
    return tuple(merged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call: the prompt tokens it added and the response it generated."""

    prompt: Sequence[int]
    """Token ids that this turn adds before the response (ΔL of them). A simulation gives a `range`."""
    response: Sequence[int]
    """Generated token ids (r of them)."""
    logprobs: Sequence[float]
    """Behaviour log-probability of each response token; same length as `response`."""
    spans: tuple[WeightSpan, ...]
    """Weight versions of the response tokens, in order; their tokens add up to len(response)."""
    environment_s: float = 0.0
    """Time that the environment took after this response, seconds."""
    prefill_s: float = 0.0
    decode_s: float = 0.0
    queue_s: float = 0.0
    started_s: float = 0.0
    finished_s: float = 0.0
    interruptions: int = 0
    """How often the generation was interrupted and resumed from its prefix."""
    retained_tokens: int | None = None
    """Response tokens that stay in the next turn's context, where reasoning is dropped from it; None: all of them."""
    cached_tokens: int | None = None
    """Context tokens that prefix caches held; None where nobody told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A finished interaction, as training takes it."""

    id: TrajectoryId
    group: GroupId
    task: str
    turns: tuple[Turn, ...]
    reward: float
    dispatch_version: int
    """Trainer's weight version when the trajectory was dispatched; staleness at use is counted from here."""
    started_s: float
    finished_s: float
    info: dict[str, float | str] = field(default_factory=dict)

    @property
    def response_tokens(self) -> int:
        """Generated tokens over all turns."""
        return sum(len(turn.response) for turn in self.turns)

    @property
    def total_tokens(self) -> int:
        """Prompt, observation and response tokens."""
        return sum(len(turn.prompt) + len(turn.response) for turn in self.turns)

    @property
    def spans(self) -> tuple[WeightSpan, ...]:
        """Weight versions over all generated tokens."""
        return merge_spans([span for turn in self.turns for span in turn.spans])
