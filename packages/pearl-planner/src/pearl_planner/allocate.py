"""How many instances prefill and how many decode: Prorsa section 4.2, eq. (1).

    n_P = ⌈W^P (1 + δ) / (S θ^P)⌉      n_D = ⌈(K^D + K̂^D)(1 + δ) / C_KV⌉      m_P n_P + m_D n_D ≤ G

With a = W^P / (S θ^P) and b = (K^D + K̂^D) / C_KV, or `Demand.decode_busy` where that is more, an allocation
(n_P, n_D) bears exactly the margins up to min(n_P / a, n_D / b) - 1, so the largest common margin is the maximum of
that over all allocations in the budget, and where it is negative the same maximum minimizes the larger
demand-to-capacity ratio: the paper's fallback. One search serves both.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from pearl_planner.switching import SwitchCosts, switch_between
from pearl_state.configuration import Configuration

_EXACT: Final = 1e-9
"""Relative difference below which two margins are the same number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What eq. (1) divides and by what. Tokens are full prompts, KV is bytes."""

    prefill_tokens: float
    """W^P."""
    decode_kv_bytes: float
    """K^D + K̂^D."""
    horizon_s: float
    """S."""
    prefill_tokens_per_s: float
    """θ^P of one instance."""
    kv_capacity_bytes: float
    """C_KV of one decode instance."""
    decode_busy: float = 0.0
    """Decode instances that the admitted requests keep busy at full batches, however little KV they have."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for numbers out of range."""
        for name in ("prefill_tokens", "decode_kv_bytes", "decode_busy"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"demand: {name} = {value} must be a finite number of at least 0")
        for name in ("horizon_s", "prefill_tokens_per_s", "kv_capacity_bytes"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"demand: {name} = {value} must be a finite number above 0")

    @property
    def prefill(self) -> float:
        """a: prefill instances without margin, not rounded."""
        return _need(self.prefill_tokens / (self.horizon_s * self.prefill_tokens_per_s))

    @property
    def decode(self) -> float:
        """b: decode instances without margin, not rounded: for KV, or for the rate of tokens if that asks for more."""
        return _need(max(self.decode_kv_bytes / self.kv_capacity_bytes, self.decode_busy))

    def margin(self, prefill: int, decode: int) -> float:
        """The largest δ that (n_P, n_D) bears: min(n_P / a, n_D / b) - 1; infinite without demand."""
        ratios = [n / need for n, need in ((prefill, self.prefill), (decode, self.decode)) if need > 0]
        return min(ratios, default=math.inf) - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Instances of each role."""

    prefill: int
    decode: int
    margin: float
    """δ; negative where the demand exceeds the budget, infinite without demand."""

    @property
    def feasible(self) -> bool:
        """Whether the budget meets the demand at δ = 0."""
        return self.margin >= 0.0


def _need(instances: float) -> float:
    """Less than a billionth of an instance is no demand."""
    return instances if instances > _EXACT else 0.0


def instances_for(need: float, margin: float) -> int:
    """⌈need · (1 + δ)⌉, at least 1: a pair needs both roles. Rounds away what floating point adds to a whole number."""
    wanted = need * (1.0 + margin)
    return max(1, math.ceil(wanted - _EXACT * max(1.0, wanted)))


def allocate(demand: Demand, *, gpus: int, prefill_gpus: int = 1, decode_gpus: int = 1) -> Allocation:
    """The instance counts of eq. (1) at the largest δ within `gpus`; the min-max fallback where none is ≥ 0.

    `prefill_gpus` and `decode_gpus` are m_P and m_D: the roles may have different parallelism. Without demand of one
    role it gets one instance, and the other all that is left. Raises `ValueError` where the budget holds no pair.
    """
    if prefill_gpus < 1 or decode_gpus < 1:
        raise ValueError(f"{prefill_gpus} and {decode_gpus} GPUs an instance: must be at least 1")
    if gpus < prefill_gpus + decode_gpus:
        raise ValueError(f"{gpus} GPUs hold no pair of {prefill_gpus} + {decode_gpus} GPUs")
    prefill, decode, margin = _best(demand, gpus, prefill_gpus, decode_gpus)
    if margin < 0.0 or math.isinf(margin):
        return Allocation(prefill=prefill, decode=decode, margin=margin)
    return Allocation(
        prefill=min(prefill, instances_for(demand.prefill, margin)) if demand.prefill else prefill,
        decode=min(decode, instances_for(demand.decode, margin)) if demand.decode else decode,
        margin=margin,
    )


def _best(demand: Demand, gpus: int, prefill_gpus: int, decode_gpus: int) -> tuple[int, int, float]:
    """The allocation with the largest margin, of equals the one with the fewest prefill instances."""
    prefill = np.arange(1, (gpus - decode_gpus) // prefill_gpus + 1)
    decode = (gpus - prefill_gpus * prefill) // decode_gpus
    a, b = demand.prefill, demand.decode
    bears = np.minimum(prefill / a if a else np.inf, decode / b if b else np.inf)
    at = int(np.argmax(bears >= bears.max() * (1.0 - _EXACT)))
    n_prefill, n_decode = int(prefill[at]), int(decode[at])
    return n_prefill, n_decode, demand.margin(n_prefill, n_decode)


def target_configuration(demand: Demand, workers: int) -> Configuration:
    """The ratio for `workers` equal workers, all of which serve: what eq. (1) leaves over joins the role with the
    larger demand-to-capacity ratio. Raises `ValueError` below two workers.
    """
    if workers < 2:
        raise ValueError(f"{workers} workers hold no pair")
    found = allocate(demand, gpus=workers)
    prefill, decode = found.prefill, found.decode
    for _ in range(workers - prefill - decode):
        if demand.prefill * decode > demand.decode * prefill:
            prefill += 1
        else:
            decode += 1
    return Configuration(prefill=prefill, decode=decode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a switch pays, and the account of it."""

    target: Configuration
    switch: bool
    gain_s: float
    """Seconds of service that the larger margin saves for as long as it is counted."""
    cost_s: float
    margin: float
    """δ of the target."""
    margin_before: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """What is known of the time for which a switch is weighed, seconds."""

    persistence_s: float
    """For how long demand is taken to last."""
    later: Demand | None = None
    """What is left of it once the prompts that wait now are computed; None: as much."""
    later_from_s: float = math.inf
    """When that is."""
    bound_s: float = 0.0
    """Time before which a switch cannot be taken back: what it loses after `persistence_s` counts until then."""


def stretch(margin: float) -> float:
    """By how much the scarcer role stretches the time of its requests at margin δ; 1 where nobody waits.

    Beyond full load the time grows as the load ρ does. Below it requests wait for each other, with a probability that
    grows as ρ: 1 + ρ², which meets 2ρ at ρ = 1. An idle pool has nothing to gain from a larger margin.
    """
    if math.isinf(margin):
        return 1.0
    load = 1.0 / max(_EXACT, 1.0 + margin)
    return 1.0 + load * load if load < 1.0 else 2.0 * load


def weigh_switch(
    demand: Demand,
    *,
    current: Configuration,
    target: Configuration,
    costs: SwitchCosts,
    ahead: Ahead,
    cached_prefill_s: float = 0.0,
) -> Verdict:
    """The gain of going from `current` to `target` against its cost, on the account that every policy shares.

    A role with load ρ = 1 / (1 + δ) stretches the time of its requests (`stretch`), so a switch from δ₀ to δ₁ saves
    1 - stretch₁ / stretch₀ of the time for as long as the demand stays as it is. Where it will be another one (`ahead`)
    the saving is that of its margins from then on, and may be a loss. The cost is `switch_between`'s: the share of
    workers that do not serve meanwhile, and the cached prefixes that go with them.
    """
    before = demand.margin(current.prefill, current.decode)
    after = demand.margin(target.prefill, target.decode)
    cost_s = switch_between(current, target, costs, cached_prefill_s).cost_s
    gain_s = max(0.0, _saved_s(demand, current, target, ahead))
    return Verdict(
        target=target,
        switch=target != current and gain_s > cost_s,
        gain_s=gain_s,
        cost_s=cost_s,
        margin=after,
        margin_before=before,
    )


def _saved_s(demand: Demand, current: Configuration, target: Configuration, ahead: Ahead) -> float:
    """Seconds that a switch saves: by the demand now, by what comes later, and what it loses beyond that."""

    def saved(load: Demand) -> float:
        before, after = (load.margin(each.prefill, each.decode) for each in (current, target))
        return 1.0 - stretch(after) / stretch(before)

    now_s = min(ahead.persistence_s, ahead.later_from_s)
    later = saved(demand if ahead.later is None else ahead.later)
    bound_s = max(0.0, ahead.bound_s - ahead.persistence_s)
    return saved(demand) * now_s + later * (ahead.persistence_s - now_s) + min(0.0, later) * bound_s
