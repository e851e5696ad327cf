"""The benefit-aware gate of PEARL section 4.6, eq. (7), and the running account of what a toggle costs."""

import math
from dataclasses import dataclass, replace
from typing import Final

NOBODY_S: Final = 1e9
"""Makespan of a batch that nobody serves, seconds: finite, so that it can be recorded and compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateVerdict:
    """The answer of eq. (7), with its terms (seconds)."""

    borrow: bool
    """Whether the predicted saving exceeds the cost of activation and return."""
    benefit_s: float
    """R/B·(T_ded − T_full)."""
    cost_s: float
    """T_toggle."""
    reason: str
    """In words."""


def borrow_gate(*, remaining: int, batch: int, ded_s: float, full_s: float, toggle_cost_s: float) -> GateVerdict:
    """Eq. (7): borrow when R/B·(T_ded − T_full) > T_toggle.

    `remaining` = R trajectories of `batch` = B are not complete; `ded_s` and `full_s` are the predicted makespans of a
    whole batch without and with the training GPUs (`ded_s` may be infinite: no dedicated worker). Raises `ValueError`
    for counts out of range or a cost that is negative or NaN.
    """
    if batch < 1 or not 0 <= remaining <= batch:
        raise ValueError(f"remaining = {remaining} of batch = {batch}: needs 0 <= remaining <= batch and batch >= 1")
    if math.isnan(ded_s) or math.isnan(full_s) or not toggle_cost_s >= 0:
        raise ValueError(
            f"ded_s = {ded_s}, full_s = {full_s}, toggle_cost_s = {toggle_cost_s}: numbers, and a cost of at least 0"
        )
    if remaining == 0:
        return GateVerdict(borrow=False, benefit_s=0.0, cost_s=toggle_cost_s, reason="the batch is complete")
    if math.isinf(full_s):
        return GateVerdict(borrow=False, benefit_s=0.0, cost_s=toggle_cost_s, reason="nothing runs even with them")
    benefit = remaining / batch * (ded_s - full_s)
    borrow = benefit > toggle_cost_s
    return GateVerdict(
        borrow=borrow,
        benefit_s=benefit,
        cost_s=toggle_cost_s,
        reason=f"{remaining}/{batch} x ({ded_s:.2f} - {full_s:.2f}) s = {benefit:.2f} s "
        f"{'>' if borrow else '<='} {toggle_cost_s:.2f} s",
    )


def _ema(old: float | None, new: float, weight: float) -> float:
    return new if old is None else old + weight * (new - old)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToggleCosts:
    """EMA account of toggle costs and of step times with and without borrowing (PEARL section 5). Immutable."""

    prior_activation_s: float = 6.26
    """Used until an activation was seen (PEARL Table 3, Qwen3-8B)."""
    prior_deactivation_s: float = 3.18
    """Used until a return was seen (PEARL Table 3, Qwen3-8B)."""
    weight: float = 0.3
    """Weight of the newest observation."""
    activation_s: float | None = None
    deactivation_s: float | None = None
    borrowed_step_s: float | None = None
    """EMA of the duration of steps that borrowed; None before the first."""
    plain_step_s: float | None = None
    """EMA of the duration of steps that did not; None before the first."""
    activations: int = 0
    deactivations: int = 0
    borrowed_steps: int = 0
    plain_steps: int = 0

    @property
    def toggle_s(self) -> float:
        """T_toggle: activation plus return, seconds."""
        activation = self.prior_activation_s if self.activation_s is None else self.activation_s
        deactivation = self.prior_deactivation_s if self.deactivation_s is None else self.deactivation_s
        return activation + deactivation

    def observe_activation(self, seconds: float) -> "ToggleCosts":
        """Account one activation of `seconds`."""
        _duration("activation", seconds)
        return replace(
            self, activation_s=_ema(self.activation_s, seconds, self.weight), activations=self.activations + 1
        )

    def observe_deactivation(self, seconds: float) -> "ToggleCosts":
        """Account one return of `seconds`."""
        _duration("deactivation", seconds)
        return replace(
            self, deactivation_s=_ema(self.deactivation_s, seconds, self.weight), deactivations=self.deactivations + 1
        )

    def observe_step(self, borrowed: bool, seconds: float) -> "ToggleCosts":
        """Account one rollout step that did or did not borrow."""
        _duration("step", seconds)
        if borrowed:
            return replace(
                self,
                borrowed_step_s=_ema(self.borrowed_step_s, seconds, self.weight),
                borrowed_steps=self.borrowed_steps + 1,
            )
        return replace(
            self, plain_step_s=_ema(self.plain_step_s, seconds, self.weight), plain_steps=self.plain_steps + 1
        )


def _duration(what: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"{what} took {seconds} s: a duration is a finite number of at least 0")
