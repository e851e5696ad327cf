"""What a simulation came to: steps, throughput, decisions, use of GPUs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from pearl_planner.forecast import ForecastError
from pearl_rl.observer import StepRecord
from pearl_rl.prediction_error import prediction_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """From `at_s` on, until the next one, these workers served."""

    at_s: float
    configuration: str
    """Text form of the active configuration; empty while a transition mixes both modes."""
    prefill: int
    decode: int
    colocated: int
    borrowed: int
    """Of them on training GPUs."""
    rollout_gpus: int
    """Dedicated GPUs that rollout holds, serving or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """One decision, briefly."""

    at_s: float
    trigger: str
    selected: str
    previous: str | None
    reason: str
    predicted_s: float
    borrowed: bool
    gate: Mapping[str, float] | None = None
    limits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationCounts:
    """How often what happened."""

    expansions: int = 0
    reclaims: int = 0
    borrows: int = 0
    returns: int = 0
    mode_switches: int = 0
    ratio_switches: int = 0
    turns: int = 0
    interruptions: int = 0
    failed_calls: int = 0
    lost_trajectories: int = 0
    stale_served: int = 0
    rejected_stale: int = 0
    dropped_trajectories: int = 0
    """Given up: their task could not be played, or their group would have had to wait for them too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTotals:
    """Counters over all engines."""

    prefill_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    decode_iterations: int = 0
    prefill_iterations: int = 0
    retractions: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    switch_s: float = 0.0
    transferred_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """The outcome of one scenario under one policy."""

    scenario: str
    policy: str
    seed: int
    model: str
    steps: Sequence[StepRecord]
    elapsed_s: float
    """Virtual time of the whole run, seconds."""
    counts: SimulationCounts
    engines: EngineTotals
    timeline: Sequence[Interval] = ()
    decisions: Sequence[DecisionRecord] = ()
    rollout_gpu_s: float = 0.0
    """GPU-seconds that rollout workers served or could have."""
    training_busy_s: float = 0.0
    trajectory_s: float = 0.0
    """Mean time of a trajectory from its begin to its reward, seconds."""
    reconfiguration_s: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """`preparation`, `finalization`, `activation`, `deactivation` → how long each took, seconds."""
    origin: Mapping[str, str] = field(default_factory=dict)
    overlap: int = 1
    """Batches that were under way at a time."""
    prefill_forecasts: ForecastError = field(default_factory=ForecastError)
    """Under a policy that answers forecasts: how far those of prefill were off, over all windows."""
    admission_forecasts: ForecastError = field(default_factory=ForecastError)
    """The same for decode admissions."""

    @property
    def throughput(self) -> float:
        """Tokens per second: (generated + trained tokens) of all steps over their time (PEARL section 6.1)."""
        duration_s = sum(step.duration_s for step in self.steps)
        return sum(_tokens(step) for step in self.steps) / duration_s if duration_s > 0 else 0.0

    @property
    def training_goodput(self) -> float:
        """Tokens that the trainer consumed per second of the whole run (TideRL section 6.1)."""
        return sum(step.trained_tokens for step in self.steps) / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def dropped_fraction(self) -> float:
        """Part of dispatched trajectories that never reached the trainer: too old, or given up."""
        trained = sum(step.trajectories for step in self.steps)
        gone = self.counts.rejected_stale + self.counts.dropped_trajectories
        return gone / (trained + gone) if trained + gone else 0.0

    @property
    def mean_step_throughput(self) -> float:
        """The mean of the steps' own throughput, tokens per second."""
        return fmean([_tokens(s) / s.duration_s for s in self.steps]) if self.steps else 0.0

    @property
    def rollout_s(self) -> float:
        """Mean makespan of a batch, seconds."""
        return fmean([step.rollout_s for step in self.steps]) if self.steps else 0.0

    @property
    def training_s(self) -> float:
        """Mean duration of an update, seconds."""
        return fmean([step.training_s for step in self.steps]) if self.steps else 0.0

    @property
    def prediction_error(self) -> float | None:
        """WAPE of predicted against simulated makespan; None where nothing was predicted."""
        return prediction_error([(s.rollout_s, s.predicted_rollout_s) for s in self.steps], self.overlap)

    def to_json(self, *, full: bool = True) -> dict[str, Any]:
        """A JSON-able form; without `full` only what fits a line."""
        brief: dict[str, Any] = {
            "scenario": self.scenario,
            "policy": self.policy,
            "seed": self.seed,
            "model": self.model,
            "steps": len(self.steps),
            "elapsed_s": self.elapsed_s,
            "throughput_tokens_per_s": self.throughput,
            "mean_step_throughput_tokens_per_s": self.mean_step_throughput,
            "training_goodput_tokens_per_s": self.training_goodput,
            "dropped_fraction": self.dropped_fraction,
            "staleness_mean": fmean([step.staleness_mean for step in self.steps]) if self.steps else 0.0,
            "rollout_s": self.rollout_s,
            "training_s": self.training_s,
            "trajectory_s": self.trajectory_s,
            "prediction_wape": self.prediction_error,
            "rollout_gpu_s": self.rollout_gpu_s,
            "training_busy_s": self.training_busy_s,
            "prefill_forecast_wape": self.prefill_forecasts.wape,
            "admission_forecast_wape": self.admission_forecasts.wape,
            "counts": asdict(self.counts),
            "engines": asdict(self.engines),
            "reconfiguration_mean_s": {name: fmean(values) for name, values in self.reconfiguration_s.items()},
        }
        if full:
            brief["step_records"] = [asdict(step) for step in self.steps]
            brief["timeline"] = [asdict(interval) for interval in self.timeline]
            brief["decisions"] = [asdict(decision) for decision in self.decisions]
            brief["origin"] = dict(self.origin)
        return brief


def _tokens(step: StepRecord) -> int:
    return step.generated_tokens + step.trained_tokens
