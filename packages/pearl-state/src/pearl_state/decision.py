"""A decision that explains itself: what was chosen, over what, for which reason, at which cost."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from pearl_state.configuration import Configuration


class Reason(StrEnum):
    """Why the selected configuration was selected."""

    INITIAL = "initial"
    """There was no configuration before."""
    BEST = "best"
    """The best candidate beats the current one by more than the threshold and the switching cost."""
    ALREADY_BEST = "already_best"
    """The current configuration is the best candidate."""
    WITHIN_HYSTERESIS = "within_hysteresis"
    """Another is faster, by less than the threshold: switching is suppressed."""
    COST_EXCEEDS_GAIN = "cost_exceeds_gain"
    """Another is faster, but the time left does not repay the switch."""
    FORCED = "forced"
    """The current configuration cannot run under this budget."""
    FALLBACK = "fallback"
    """No candidate meets every constraint: the least bad one runs, and `violated` says what it breaks."""
    FORECAST = "forecast"
    """The load that is forecast for the next seconds of the step wants this ratio, and the switch pays."""
    FIXED = "fixed"
    """A policy that does not choose."""
    UNCALIBRATED = "uncalibrated"
    """The profile is a prior: no measurement backs it yet."""


class ScalingReason(StrEnum):
    """What the readiness of the data says at the boundary after an update: who should have more GPUs (TideRL 5.2)."""

    COLD_START = "cold_start"
    """No step was made yet: everything rolls out."""
    EVALUATION = "evaluation"
    """Evaluation runs beside the next step, and holds its weights back."""
    GENERATION_DEFICIT = "generation_deficit"
    """Training waits for data."""
    CONSUMPTION_DEFICIT = "consumption_deficit"
    """Data waits for training."""
    BALANCED = "balanced"


class Constraint(StrEnum):
    """The capacity constraints of PEARL section 4.2, and the ones of the extended model."""

    PREFILL_LOAD = "prefill_load"
    """The prefill pool must keep up with B·S·ΔL tokens without delaying decode."""
    DECODE_KV = "decode_kv"
    """B·K_seq ≤ N_D·H_max."""


class SwitchKind(StrEnum):
    """What it takes to get from one configuration to another."""

    NONE = "none"
    FLIP = "flip"
    """Prefill ↔ decode in place."""
    RELAUNCH = "relaunch"
    """Between colocation and disaggregation."""
    NEW_WORKERS = "new_workers"
    """Only membership changes."""


class MakespanTerms(NamedTuple):
    """A predicted batch makespan and what it is made of. All in seconds.

    A tuple, since a decision makes two for each candidate and a frozen dataclass takes three times as long to make.
    """

    total_s: float
    """T_coloc or T_dis."""
    prefill_s: float
    """S·T_prefill^turn under colocation; T_prefill (without transfer) under disaggregation."""
    decode_s: float
    """S·T_decode^turn under colocation; T_decode under disaggregation."""
    transfer_s: float = 0.0
    """KV transfer between the pools."""
    overhead_s: float = 0.0
    """S·T_over under colocation; hand-over cost in the extended model."""
    environment_s: float = 0.0
    """T_env."""
    reprefill_s: float = 0.0
    """Part of `prefill_s` that evicted prefixes cause (extended model only)."""
    bottleneck: str = ""
    """`prefill` or `decode`: the longer path under disaggregation; `shared` under colocation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One configuration that was considered."""

    configuration: Configuration
    predicted: MakespanTerms
    """By the model that decides."""
    printed: MakespanTerms
    """By eqs (1)-(3) exactly as printed."""
    feasible: bool
    violated: tuple[Constraint, ...] = ()

    @property
    def makespan_s(self) -> float:
        """The predicted batch makespan, seconds."""
        return self.predicted.total_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The answer of the PD Decision Engine for one budget."""

    selected: Configuration
    previous: Configuration | None
    reason: Reason
    budget_workers: int
    candidates: tuple[Candidate, ...]
    """Ranked: fewest broken constraints, then makespan; of equals colocation, then fewest prefill workers.
    For large budgets only the best few."""
    considered: int
    """How many candidates there were, also where `candidates` holds fewer."""
    predicted_s: float
    """Makespan of `selected`, seconds; infinite without a worker (null in JSON)."""
    gain_s: float = 0.0
    """Makespan of `previous` minus that of the best candidate (0 without a previous one that can run)."""
    threshold: float = 0.0
    """Relative gain that a switch needed (hysteresis)."""
    switch: SwitchKind = SwitchKind.NONE
    switching_cost_s: float = 0.0
    limits: tuple[str, ...] = ()
    """In words: which constraint removed what, and what the model had to assume."""

    def to_json(self) -> dict[str, Any]:
        """A JSON-able form, with configurations as text and each candidate's makespan and terms."""
        return {
            "selected": str(self.selected),
            "previous": None if self.previous is None else str(self.previous),
            "reason": str(self.reason),
            "budget_workers": self.budget_workers,
            "considered": self.considered,
            "predicted_s": self.predicted_s if math.isfinite(self.predicted_s) else None,
            "gain_s": self.gain_s,
            "threshold": self.threshold,
            "switch": str(self.switch),
            "switching_cost_s": self.switching_cost_s,
            "limits": list(self.limits),
            "candidates": [
                {
                    "configuration": str(c.configuration),
                    "makespan_s": c.makespan_s,
                    "feasible": c.feasible,
                    "violated": [str(v) for v in c.violated],
                    "terms": c.predicted._asdict(),
                    "printed_terms": c.printed._asdict(),
                }
                for c in self.candidates
            ],
        }
