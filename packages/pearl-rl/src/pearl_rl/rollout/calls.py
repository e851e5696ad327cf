"""One model call as an agent asks for it, and what it gets back. The router stands in between."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from pearl_executor.ports import Finish, Sampling
from pearl_state.trajectory import TrajectoryId, WeightSpan
from pearl_state.worker import WorkerId

_USUAL: Final = Sampling()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One turn's generation. The router may need several attempts on several workers for it."""

    trajectory: TrajectoryId
    turn: int
    """0 for the first turn of the trajectory."""
    prompt: Sequence[int]
    """The whole context, tokens. A simulation gives a `range`."""
    max_new_tokens: int
    """Most tokens to generate, over all attempts together."""
    sampling: Sampling = _USUAL


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """A finished generation. Tokens of all attempts are joined; times are summed over attempts."""

    finish: Finish
    """`STOP` or `LENGTH`, never `INTERRUPTED`."""
    tokens: Sequence[int]
    logprobs: Sequence[float]
    """Behaviour log-probability of each token, by the worker that drew it."""
    spans: tuple[WeightSpan, ...]
    """Weight versions over `tokens`, never going back."""
    cached_tokens: int
    """Prompt tokens that prefix caches held, over all attempts."""
    queue_s: float
    prefill_s: float
    decode_s: float
    transfer_s: float
    started_s: float
    """When the call reached the router, on the run's clock."""
    finished_s: float
    interruptions: int
    """How often it was cut off and resumed from its prefix."""
    worker: WorkerId
    """The worker that generated the last token."""


Generate = Callable[[ModelCall], Awaitable[TurnResult]]
"""What an agent is given to call the model. Raises `GenerationFailedError`."""


class FailureCause(StrEnum):
    """Why a generation was given up. All of them are the infrastructure's fault, never the agent's."""

    NO_WORKER = "no_worker"
    """Nobody could serve it for as long as it may wait."""
    ATTEMPTS_FAILED = "attempts_failed"
    """Attempt after attempt failed without a single new token."""
    CLOSED = "closed"
    """The router is shut down."""


class GenerationFailedError(Exception):
    """The infrastructure failed a generation: run the sample again, never give it a reward (`cause` says why)."""

    def __init__(self, cause: FailureCause, message: str) -> None:
        super().__init__(f"{cause}: {message}")
        self.cause = cause
