"""What a simulated engine is asked to do, and what becomes of it."""

import math
from dataclasses import dataclass
from enum import IntEnum

from pearl_rl.simulation.kv import Hold

ANY_PREFIX = 1 << 60
"""Nothing of a prompt is rewritten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEngineLimits:
    """Sizes and scheduling of one engine."""

    kv_tokens: int
    chunk_tokens: int = 8192
    """Most prompt tokens of one iteration (SGLang's default on GPUs of 80 GB)."""
    prompt_chunk_tokens: int = 0
    """Most tokens of one prompt in an iteration: its attention rank's share of them; 0: as many as all prompts."""
    max_running: int = 256
    reserve_tokens: int = 400
    """Room kept for the growth of each running sequence when another one is admitted."""
    mixed: bool = False
    """Whether running sequences decode along in iterations with prefill."""
    phase_switch_s: float = 0.0
    """Extra at each change between prefill and decode on a colocated worker, seconds."""
    keeps_left_paths: bool = False
    """Whether the cache holds what an edited history left, as a radix cache does."""
    decode_prefix_cache: bool = True
    """Whether a decode worker keeps prefixes, so that only what is new is handed over to it."""

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "chunk_tokens", "max_running"):
            if getattr(self, name) < 1:
                raise ValueError(f"simulated engine: {name} = {getattr(self, name)} must be at least 1")


class Outcome(IntEnum):
    """What became of a request."""

    RESERVED = 0
    """Decode role: its context has room now."""
    PREFILLED = 1
    """Its prompt is computed and the first token drawn; on a colocated engine it is decoded from now on."""
    FINISHED = 2
    """All its tokens are generated."""


class Stage(IntEnum):
    """Where a request is in an engine."""

    WAITING = 0
    PREFILL = 1
    RESERVED = 2
    """Decode role: has room, its KV is on the way."""
    RUNNING = 3
    ENDED = 4


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One request on one engine."""

    rid: str
    prompt_tokens: int
    """Whole context at its start."""
    new_tokens: int
    """Tokens to generate."""
    conversation: str = ""
    root: str = ""
    root_tokens: int = 0
    reusable: int = ANY_PREFIX
    """Prompt tokens that may be found in the cache: a template may rewrite what follows."""
    payload: object = None
    """Whoever drives the engine may attach what it needs."""
    stage: Stage = Stage.WAITING
    hold: Hold | None = None
    cached_tokens: int = 0
    """Prompt tokens found in the cache when it was admitted last."""
    computed: int = 0
    """Prompt tokens whose KV is there."""
    generated: int = 0
    """Tokens generated when it joined the batch; see `Engine.generated`."""
    joined_at: int = 0
    """Engine's iteration count when it joined the batch."""
    entry: int = 0
    """Number of its entry among the ends of the batch that it is in; 0 where it is in none."""
    submitted_s: float = 0.0
    prefill_s: float = math.nan
    """When its prefill began."""
    token_s: float = math.nan
    """When its first token came, or when it joined the batch of a decode engine."""
    retractions: int = 0

    @property
    def context_tokens(self) -> int:
        """Tokens that must be in the cache before it goes on."""
        return self.prompt_tokens + self.generated
