"""What telemetry and hardware data tell the planner: the workload, and the platform one worker runs on."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from pearl_state.errors import ProfileError


def _check(instance: object, positive: frozenset[str]) -> None:
    """Raise `ProfileError` for a number that is not finite, is negative, or is 0 though it is one of `positive`."""
    for item in fields(instance):  # type: ignore[arg-type]
        value = getattr(instance, item.name)
        if value is None or isinstance(value, str | Mapping | tuple) or item.type is bool:
            continue
        name = f"{type(instance).__name__}.{item.name}"
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ProfileError(f"{name} = {value!r}: must be a finite number")
        if value < 0 or (value == 0 and item.name in positive):
            raise ProfileError(f"{name} = {value}: must be {'positive' if item.name in positive else 'at least 0'}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadProfile:
    """Statistics of a rollout step, as the Runtime Tracker measures them. Symbols are PEARL's (section 4.3.1)."""

    batch: int
    """B: trajectories of a rollout step."""
    turns: float
    """S: interaction turns of the slowest trajectory. Telemetry counts turns of mean length, by what it generates."""
    new_prompt_tokens: float
    """ΔL: prompt tokens that a turn adds, tokens."""
    response_tokens: float
    """r: tokens that a turn generates, tokens."""
    bubble_ratio: float = 0.0
    """θ = (1 − f)/f, with f the mean fraction of trajectories that are decoding."""
    environment_s: float = 0.0
    """T_env: environment time of the slowest trajectory over the step, seconds."""
    context_tokens: float = 0.0
    """Mean context of a trajectory at a turn, tokens (for K_seq and the prefix cache); 0 where unknown."""
    decoded_context_tokens: float = 0.0
    """Mean context at which a token is generated, tokens: long responses come late. 0 where unknown."""
    max_context_tokens: float = 0.0
    """Largest context a trajectory reaches, tokens; 0 where unknown."""
    slowest_turns: float = 0.0
    """Turns that the slowest trajectory really takes, each of which asks for prefill once; 0 where unknown."""
    mean_turns: float = 0.0
    """Mean turns over all trajectories of a step; 0 where unknown (then S stands for all)."""
    turn_environment_s: float = 0.0
    """Mean environment time of one turn, seconds."""
    retained_tokens: float = 0.0
    """Mean response tokens of a turn that the next turn's context keeps, tokens. A prefill worker, which never saw
    them, computes them again under disaggregation; 0 where unknown."""
    moved_fraction: float = 0.0
    """Part of the prefixes in caches that trajectories leave behind under colocation, since a less loaded worker takes
    them, were there very many workers: (1 − 1/n) of it on n. 0 where unknown."""
    pair_moved_fraction: float = 0.0
    """The same between prefill workers under disaggregation, where the choice weighs queues and not only requests."""
    renewed_fraction: float = 0.0
    """Part of the prefixes in caches that is void for another reason: newer weights, prompts that rewrite what came
    before, eviction. 0 where unknown."""
    shared_tokens: float = 0.0
    """Mean tokens of a turn's prompt that a cache holds although the trajectory never asked for them: the first prompt
    of its group, tokens. 0 where unknown."""
    steady: bool = False
    """Whether `batch` is what is under way at any time, because others enter as these end (continuous injection): then
    a batch has no tail, `turns` is the mean, and who finds no room for its KV waits outside."""
    active_by_turn: tuple[float, ...] = ()
    """Fraction of the batch's trajectories that reach turn 1, 2, …; empty where unknown. First is 1, never rises."""
    context_by_turn: tuple[float, ...] = ()
    """Mean context at turn 1, 2, … of those who reach it, tokens; as long as `active_by_turn`, or empty where unknown:
    then `context_tokens` stands for all. Most trajectories are under way while contexts are short."""
    origin: Mapping[str, str] = field(default_factory=dict)
    """Field name → where its value came from ("telemetry, 3 steps", "bundled swe-32k", …)."""

    def __post_init__(self) -> None:
        """Raise `ProfileError` for NaN, infinities, negatives, or an empty batch."""
        _check(self, frozenset({"batch", "turns", "response_tokens"}))
        if any(not 0 <= a <= 1 for a in self.active_by_turn) or list(self.active_by_turn) != sorted(
            self.active_by_turn, reverse=True
        ):
            raise ProfileError("WorkloadProfile.active_by_turn: fractions in [0, 1] that never rise")
        contexts = self.context_by_turn
        if contexts and len(contexts) != len(self.active_by_turn):
            raise ProfileError("WorkloadProfile.context_by_turn: as many as active_by_turn, or none")
        if not all(math.isfinite(tokens) and tokens >= 0 for tokens in contexts):
            raise ProfileError("WorkloadProfile.context_by_turn: finite numbers of at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformProfile:
    """Costs of one worker (TP group) for one model, from hardware data or refitted from telemetry."""

    decode_fixed_s: float
    """A: fixed cost of a decode iteration, seconds."""
    decode_per_sequence_s: float
    """b: marginal cost of one more concurrent sequence in a decode iteration, seconds."""
    prefill_per_token_s: float
    """t_prefill: computation of one prompt token, seconds."""
    kv_bytes_per_token: float
    """K: KV-cache bytes per token (all layers, all ranks of the worker)."""
    transfer_bytes_per_s: float
    """BW: bandwidth between the prefill and the decode pool, bytes per second."""
    overhead_per_turn_s: float = 0.0
    """T_over: overhead per turn under colocation (switching between prefill and decode), seconds."""
    decode_per_context_token_s: float = 0.0
    """Part of b that reading one more token of a sequence's context takes, seconds; 0 where unknown."""
    decode_context_tokens: float = 0.0
    """Context at which b is `decode_per_sequence_s`, tokens; of use with `decode_per_context_token_s`."""
    kv_capacity_bytes: float = 0.0
    """H_max: bytes for KV cache on one worker; 0 means unbounded."""
    prefix_capacity_tokens: float = 0.0
    """Context tokens whose KV one prefill worker can keep for reuse; 0 means unbounded."""
    prefill_fixed_s: float = 0.0
    """What a prefill iteration takes however few tokens it computes (reading weights, launching, changing phase),
    seconds; 0 where unknown, then `prefill_per_token_s` says all."""
    prefill_marginal_s: float = 0.0
    """Beyond `prefill_fixed_s`: one more prompt token in an iteration, seconds."""
    step_error: float = 0.0
    """Standard error of how long a step takes, as a part of it, from the steps that the costs of modes were fitted to;
    0 where too few say so."""
    handover_s: float = 0.0
    """Fixed cost of handing one request's KV from prefill to decode, seconds."""
    origin: Mapping[str, str] = field(default_factory=dict)
    """Field name → where its value came from."""

    def __post_init__(self) -> None:
        """Raise `ProfileError` for NaN, infinities or negatives."""
        positive = {"decode_fixed_s", "prefill_per_token_s", "kv_bytes_per_token", "transfer_bytes_per_s"}
        _check(self, frozenset(positive))
