"""Instruments on the OpenTelemetry API: what a run tells its observers becomes metrics.

Only the API is used. Where no SDK is configured nothing is kept and a point costs well under a microsecond; where one
is, its exporters decide where points go.
"""

import math
from collections import Counter as Tally
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from opentelemetry import metrics, trace
from opentelemetry.metrics import Counter, Histogram
from opentelemetry.metrics import _Gauge as Gauge

from pearl_state.decision import Decision
from pearl_state.events import (
    Event,
    GpusOffered,
    GpusReclaimed,
    GroupFailed,
    GroupPrepared,
    StageApplied,
    TrainingReleased,
    TrainingResumed,
    WorkerFailed,
)
from pearl_state.table import WorkerTable
from pearl_telemetry.metrics import METRICS, Kind, Metric, Span, all_metrics

SCOPE = "pearl"
"""Instrumentation scope of all metrics and spans."""

Value = str | bool | int | float


class StepFigures(Protocol):
    """What is measured of a completed training step; seconds, tokens and counts as their names say."""

    @property
    def reward_mean(self) -> float: ...  # noqa: D102
    @property
    def trajectories(self) -> int: ...  # noqa: D102
    @property
    def generated_tokens(self) -> int: ...  # noqa: D102
    @property
    def trained_tokens(self) -> int: ...  # noqa: D102
    @property
    def duration_s(self) -> float: ...  # noqa: D102
    @property
    def rollout_s(self) -> float: ...  # noqa: D102
    @property
    def training_s(self) -> float: ...  # noqa: D102
    @property
    def predicted_rollout_s(self) -> float | None: ...  # noqa: D102
    @property
    def borrowed(self) -> bool: ...  # noqa: D102
    @property
    def staleness_mean(self) -> float: ...  # noqa: D102
    @property
    def wait_grant_s(self) -> float: ...  # noqa: D102
    @property
    def lost_trajectories(self) -> int: ...  # noqa: D102


class Instruments:
    """Turns what a run says into points of `METRICS`. It observes: it never answers, and never raises for a value.

    Providers default to the ones configured for the process.
    """

    def __init__(
        self,
        meter_provider: metrics.MeterProvider | None = None,
        tracer_provider: trace.TracerProvider | None = None,
    ) -> None:
        meter = metrics.get_meter(SCOPE, meter_provider=meter_provider)
        self._tracer = trace.get_tracer(SCOPE, tracer_provider=tracer_provider)
        self._instruments = {metric.name: _create(meter, metric) for metric in all_metrics()}
        self._seen_workers: set[tuple[str, str]] = set()

    def point(self, metric: Metric, value: float, attributes: Mapping[str, Value] | None = None) -> None:
        """One point: added to a counter, recorded in a histogram, or set as a gauge's value."""
        instrument = self._instruments[metric.name]
        if isinstance(instrument, Counter):
            instrument.add(value, attributes)
        elif isinstance(instrument, Histogram):
            instrument.record(value, attributes)
        else:
            instrument.set(value, attributes)

    def span(self, span: Span, attributes: Mapping[str, Value] | None = None) -> AbstractContextManager[trace.Span]:
        """A context that is one span; spans opened inside are its children."""
        return self._tracer.start_as_current_span(span.name, attributes=attributes)

    # ---- what a run says --------------------------------------------------------------------------------------------

    def on_table(self, table: WorkerTable) -> None:
        """Count workers by role and activity, and how far weights lag."""
        rows = [table.rows[id_] for id_ in table.rollout()]
        counts = Tally((str(row.role), str(row.activity)) for row in rows)
        self._seen_workers |= counts.keys()
        for role, activity in self._seen_workers:
            attributes = {"pearl.role": role, "pearl.activity": activity}
            self.point(METRICS.workers, counts[role, activity], attributes)
        self.point(METRICS.weight_version, table.target_version)
        versions = [table.rows[id_].weight_version or 0 for id_ in table.active()]
        if versions:
            self.point(METRICS.weight_lag, table.target_version - min(versions))

    def on_decision(self, decision: Decision, trigger: str) -> None:
        """Count a decision by its reason, what it takes, and the event that asked for it."""
        attributes = {
            "pearl.reason": str(decision.reason),
            "pearl.switch": str(decision.switch),
            "pearl.trigger": trigger,
        }
        self.point(METRICS.decisions, 1, attributes)
        if math.isfinite(decision.predicted_s):
            # Nobody serves where it is infinite, and JSON has no word for that.
            self.point(METRICS.predicted_makespan, decision.predicted_s)

    def on_event(self, event: Event) -> None:
        """Record what executors and providers report."""
        match event:
            case GpusOffered():
                self.point(METRICS.gpus_offered, len(event.gpus))
            case GpusReclaimed():
                self.point(METRICS.gpus_reclaimed, len(event.gpus))
            case GroupPrepared():
                self.point(METRICS.preparation, event.duration_s)
            case GroupFailed():
                outcome = "failed" if event.failed else "cancelled"
                self.point(METRICS.preparations_failed, 1, {"pearl.outcome": outcome})
                self._failures(len(event.failed), "preparation")
            case StageApplied():
                self.point(METRICS.stage, event.duration_s)
                self._failures(len(event.failed), "stage")
            case WorkerFailed():
                self._failures(1, "serving")
            case TrainingReleased() | TrainingResumed():
                self._handover(event)
            case _:
                return

    def on_step(self, record: StepFigures) -> None:
        """Record a completed training step."""
        self.point(METRICS.steps, 1)
        self.point(METRICS.step_duration, record.duration_s)
        self.point(METRICS.rollout_makespan, record.rollout_s, {"pearl.borrowed": record.borrowed})
        self.point(METRICS.rollout_tokens, record.generated_tokens)
        self.point(METRICS.trained_tokens, record.trained_tokens)
        self.point(METRICS.training_duration, record.training_s)
        self.point(METRICS.training_wait, record.wait_grant_s)
        self.point(METRICS.reward, record.reward_mean)
        self.point(METRICS.staleness, record.staleness_mean)
        self.point(METRICS.trajectories, record.trajectories)
        self.point(METRICS.lost_trajectories, record.lost_trajectories)
        if record.predicted_rollout_s is not None and record.rollout_s > 0:
            self.point(METRICS.prediction_error, record.predicted_rollout_s / record.rollout_s - 1.0)

    def on_message(self, text: str) -> None:
        """Nothing: lines for people are no measurements."""

    def on_action(self, name: str, duration_s: float, failed: str | None) -> None:
        """Record one finished call on a worker; `failed` is its cause."""
        outcome = "done" if failed is None else "failed"
        self.point(METRICS.worker_action, duration_s, {"pearl.action": name, "pearl.outcome": outcome})

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _failures(self, count: int, during: str) -> None:
        if count:
            self.point(METRICS.worker_failures, count, {"pearl.during": during})

    def _handover(self, event: TrainingReleased | TrainingResumed) -> None:
        action = "release" if isinstance(event, TrainingReleased) else "resume"
        outcome = "done" if event.failed is None else "failed"
        self.point(METRICS.training_handover, 1, {"pearl.action": action, "pearl.outcome": outcome})


def _create(meter: metrics.Meter, metric: Metric) -> Counter | Histogram | Gauge:
    match metric.kind:
        case Kind.COUNTER:
            return meter.create_counter(metric.name, metric.unit, metric.meaning)
        case Kind.HISTOGRAM:
            return meter.create_histogram(metric.name, metric.unit, metric.meaning)
        case Kind.GAUGE:
            return meter.create_gauge(metric.name, metric.unit, metric.meaning)
