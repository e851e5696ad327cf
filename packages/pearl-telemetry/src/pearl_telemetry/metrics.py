"""All metric and span names, in one place: what each means, its unit, and what is normal.

Names and units follow OpenTelemetry's conventions: dotted lower case, UCUM units, `1` for ratios, `{thing}` for counts.
"""

from dataclasses import dataclass, fields
from enum import StrEnum


class Kind(StrEnum):
    """The OpenTelemetry instrument."""

    COUNTER = "counter"
    """A sum that only grows."""
    HISTOGRAM = "histogram"
    """A distribution."""
    GAUGE = "gauge"
    """The last value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric."""

    name: str
    unit: str
    kind: Kind
    meaning: str
    attributes: tuple[str, ...] = ()
    """Attribute names that its points carry; each has few values."""
    low: float | None = None
    """Below is a sign of trouble; None where no bound holds for all runs."""
    high: float | None = None
    """Above is a sign of trouble; None where no bound holds for all runs."""

    is_share: bool = False
    """Whether it is a part of something, which people read in percent."""

    def is_healthy(self, value: float) -> bool:
        """Whether a value is in the normal range."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One kind of interval with a beginning, an end and a parent."""

    name: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Metrics:
    """Every metric. `METRICS` is the one instance."""

    # ---- steps
    steps: Metric = Metric(name="pearl.steps", unit="{step}", kind=Kind.COUNTER, meaning="Completed training steps.")
    step_duration: Metric = Metric(
        name="pearl.step.duration",
        unit="s",
        kind=Kind.HISTOGRAM,
        meaning="From the end of one step to the end of the next.",
        low=0.0,
    )
    rollout_makespan: Metric = Metric(
        name="pearl.rollout.makespan",
        unit="s",
        kind=Kind.HISTOGRAM,
        meaning="From the first to the last trajectory of a batch.",
        attributes=("pearl.borrowed",),
        low=0.0,
    )
    rollout_tokens: Metric = Metric(
        name="pearl.rollout.tokens", unit="{token}", kind=Kind.COUNTER, meaning="Tokens that rollout generated."
    )
    trained_tokens: Metric = Metric(
        name="pearl.training.tokens", unit="{token}", kind=Kind.COUNTER, meaning="Tokens that updates saw."
    )
    training_duration: Metric = Metric(
        name="pearl.training.duration", unit="s", kind=Kind.HISTOGRAM, meaning="One update.", low=0.0
    )
    training_wait: Metric = Metric(
        name="pearl.training.wait",
        unit="s",
        kind=Kind.HISTOGRAM,
        meaning="How long training waited for its GPUs after it asked for them. Above: borrowed GPUs come back late.",
        low=0.0,
        high=30.0,
    )
    reward: Metric = Metric(
        name="pearl.reward", unit="1", kind=Kind.GAUGE, meaning="Mean reward of the trajectories of a step."
    )
    staleness: Metric = Metric(
        name="pearl.staleness",
        unit="{version}",
        kind=Kind.GAUGE,
        meaning="Mean age of the trajectories at use, in weight versions. Below 0: versions went back.",
        low=0.0,
    )
    trajectories: Metric = Metric(
        name="pearl.trajectories", unit="{trajectory}", kind=Kind.COUNTER, meaning="Trajectories trained on."
    )
    lost_trajectories: Metric = Metric(
        name="pearl.trajectories.lost",
        unit="{trajectory}",
        kind=Kind.GAUGE,
        meaning="Dispatched and not accounted for.",
        low=0.0,
        high=0.0,
    )

    # ---- decisions
    decisions: Metric = Metric(
        name="pearl.decisions",
        unit="{decision}",
        kind=Kind.COUNTER,
        meaning="Answers of the PD Decision Engine.",
        attributes=("pearl.reason", "pearl.switch", "pearl.trigger"),
    )
    predicted_makespan: Metric = Metric(
        name="pearl.decision.predicted",
        unit="s",
        kind=Kind.GAUGE,
        meaning="Predicted makespan of the selected configuration.",
        low=0.0,
    )
    prediction_error: Metric = Metric(
        name="pearl.decision.error",
        unit="1",
        # Signed, and a histogram of the SDK drops what is below 0.
        kind=Kind.GAUGE,
        meaning="(predicted − measured) / measured makespan. Outside: the models do not fit this workload.",
        low=-0.25,
        high=0.25,
        is_share=True,
    )

    # ---- workers
    workers: Metric = Metric(
        name="pearl.workers",
        unit="{worker}",
        kind=Kind.GAUGE,
        meaning="Rollout workers by role and activity.",
        attributes=("pearl.role", "pearl.activity"),
        low=0.0,
    )
    worker_failures: Metric = Metric(
        name="pearl.worker.failures",
        unit="{failure}",
        kind=Kind.COUNTER,
        meaning="Workers that crashed, did not answer in time, or did not do what they should.",
        attributes=("pearl.during",),
    )
    worker_action: Metric = Metric(
        name="pearl.worker.action",
        unit="s",
        kind=Kind.HISTOGRAM,
        meaning="One call on a worker, such as start, load_weights or release.",
        attributes=("pearl.action", "pearl.outcome"),
        low=0.0,
    )
    weight_version: Metric = Metric(
        name="pearl.weights.version", unit="{version}", kind=Kind.GAUGE, meaning="Newest published weights.", low=0.0
    )
    weight_lag: Metric = Metric(
        name="pearl.weights.lag",
        unit="{version}",
        kind=Kind.GAUGE,
        meaning="How far the oldest serving worker is behind the newest weights. Above: weight sync does not keep up.",
        low=0.0,
        high=1.0,
    )

    # ---- elasticity
    gpus_offered: Metric = Metric(
        name="pearl.gpus.offered", unit="{gpu}", kind=Kind.COUNTER, meaning="GPUs that providers gave."
    )
    gpus_reclaimed: Metric = Metric(
        name="pearl.gpus.reclaimed", unit="{gpu}", kind=Kind.COUNTER, meaning="GPUs that providers asked back."
    )
    preparation: Metric = Metric(
        name="pearl.preparation",
        unit="s",
        kind=Kind.HISTOGRAM,
        meaning="A group of workers from its first start or resume to ready; it happens in the background.",
        low=0.0,
    )
    preparations_failed: Metric = Metric(
        name="pearl.preparations.failed",
        unit="{group}",
        kind=Kind.COUNTER,
        meaning="Groups that were given up.",
        attributes=("pearl.outcome",),
    )
    stage: Metric = Metric(
        name="pearl.stage",
        unit="s",
        kind=Kind.HISTOGRAM,
        meaning="One stage of a transition: the time in which its workers do not serve.",
        low=0.0,
    )
    training_handover: Metric = Metric(
        name="pearl.training.handovers",
        unit="{handover}",
        kind=Kind.COUNTER,
        meaning="Releases and resumes of training's device memory.",
        attributes=("pearl.action", "pearl.outcome"),
    )


@dataclass(frozen=True, slots=True)
class Spans:
    """Every kind of span. `SPANS` is the one instance."""

    step: Span = Span(name="pearl.step", meaning="One training step with its rollout.")
    rollout: Span = Span(name="pearl.rollout", meaning="One batch from its first to its last trajectory.")
    trajectory: Span = Span(name="pearl.trajectory", meaning="One trajectory from its dispatch to its reward.")
    turn: Span = Span(name="pearl.turn", meaning="One model call and the environment's answer.")
    training: Span = Span(name="pearl.training", meaning="One update.")
    queue: Span = Span(name="pearl.queue", meaning="A request that waits for prefill, KV space or its turn.")
    prefill: Span = Span(name="pearl.prefill", meaning="A worker computes the prompt tokens that are not cached.")
    transfer: Span = Span(name="pearl.kv_transfer", meaning="A prompt's KV goes from the prefill to the decode worker.")
    decode: Span = Span(name="chat", meaning="A worker generates the response (GenAI conventions: the model call).")
    environment: Span = Span(name="execute_tool", meaning="The environment answers (GenAI conventions: the tool call).")
    reconfiguration: Span = Span(
        name="pearl.reconfiguration", meaning="One change of the cluster, from its effect to its last answer."
    )
    action: Span = Span(name="pearl.worker.action", meaning="One call on a worker within a reconfiguration.")
    worker_request: Span = Span(
        name="pearl.worker.request",
        meaning="A worker process serves its part of a model call: the whole, the prefill or the decode.",
    )
    worker_command: Span = Span(
        name="pearl.worker.command", meaning="A worker process starts, loads weights, changes its role, releases …"
    )
    environment_request: Span = Span(
        name="pearl.environment.request", meaning="An environment server answers one request."
    )
    planner_request: Span = Span(name="pearl.planner.request", meaning="The planner's service answers one question.")


METRICS = Metrics()
SPANS = Spans()


def all_metrics() -> tuple[Metric, ...]:
    """Every metric, in the order of `Metrics`."""
    return tuple(getattr(METRICS, item.name) for item in fields(METRICS))


def all_spans() -> tuple[Span, ...]:
    """Every kind of span, in the order of `Spans`."""
    return tuple(getattr(SPANS, item.name) for item in fields(SPANS))
