"""The sources of prefill demand, Prorsa eqs. (2) to (12), as functions of what is known at one instant.

Everything is counted in full prompt tokens: cached prefixes are neither taken off here nor in the speed that the demand
is divided by (section 4.2). A forecast arrival keeps its probability as a weight.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pearl_planner.forecast.injection import InjectionPolicy


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that is expected to join the ready queue within the horizon."""

    at_s: float
    """u: when."""
    tokens: float
    """x or x̂: its whole prompt."""
    weight: float = 1.0
    """Its probability, or how many of its kind are expected."""
    new_tokens: float | None = None
    """The part of it that must be computed, where known; None: all."""

    @property
    def computed_tokens(self) -> float:
        """What prefill has to compute of it."""
        return self.tokens if self.new_tokens is None else self.new_tokens


def eligible(chances: Iterable[float], acceptance: float) -> float:
    """N^pass = p̂ · Σ q^rew over the trajectories in reward (eq. 3). Raises `ValueError` for p̂ outside [0, 1]."""
    if not 0.0 <= acceptance <= 1.0:
        raise ValueError(f"a training-admission rate of {acceptance}: must be in [0, 1]")
    return acceptance * sum(chances)


def launch_horizon_s(horizon_s: float, launch_delay_s: float) -> float:
    """S^pw = max(0, S - d̂^pw): launches after it bring no request within the window (B.2)."""
    return max(0.0, horizon_s - launch_delay_s)


def sampler_launches(
    chances_within_launch_horizon: Iterable[float], acceptance: float, policy: InjectionPolicy, launch_horizon_s: float
) -> float:
    """N̂^samp over the launch horizon (eq. 4); 0 where that is empty (B.2)."""
    if launch_horizon_s <= 0.0:
        return 0.0
    return policy.launches(eligible(chances_within_launch_horizon, acceptance), launch_horizon_s)


def weighted_tokens(arrivals: Iterable[Arrival]) -> float:
    """Σ q·x (eqs. 5, 7 and, with q = 1, 11)."""
    return sum(arrival.weight * arrival.tokens for arrival in arrivals)


def backlog_tokens(prompts: Iterable[int]) -> float:
    """Σ x over the ready queue, or over prefills under way, whole and regardless of progress (eqs. 8 and 12)."""
    return float(sum(prompts))


def tool_residual_s(mean_s: float, elapsed_s: float) -> float:
    """r = max(0, τ - e) (eq. 10)."""
    return max(0.0, mean_s - elapsed_s)


def tool_arrivals(now_s: float, horizon_s: float, running: Sequence[tuple[float, float, float]]) -> tuple[Arrival, ...]:
    """Arrivals of tools that are predicted to end within the horizon, r < S (eq. 11).

    `running` holds (τ, elapsed seconds, x̂) of each trajectory in Tool.
    """
    arrivals = []
    for mean_s, elapsed_s, tokens in running:
        residual_s = tool_residual_s(mean_s, elapsed_s)
        if residual_s < horizon_s:
            arrivals.append(Arrival(now_s + residual_s, tokens))
    return tuple(arrivals)
