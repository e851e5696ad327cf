"""Metrics reach whatever meter provider is configured, under the names of the one list."""

import contextlib
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.metrics import Meter, MeterProvider, NoOpCounter, NoOpHistogram, NoOpMeter, _NoOpGauge
from opentelemetry.trace import NoOpTracer, TracerProvider

from pearl_state.configuration import Configuration
from pearl_state.decision import Decision, Reason, SwitchKind
from pearl_state.events import (
    Event,
    GpusOffered,
    GpusReclaimed,
    GroupFailed,
    GroupPrepared,
    RolloutBegan,
    StageApplied,
    TrainingReleased,
    TrainingResumed,
    WorkerFailed,
)
from pearl_state.lifecycle import Lifecycle
from pearl_state.plan import PlanId
from pearl_state.roles import Role, Zone
from pearl_state.table import WorkerTable
from pearl_state.worker import GpuId, Worker, WorkerId
from pearl_telemetry.dictionary import dictionary
from pearl_telemetry.instruments import Instruments
from pearl_telemetry.metrics import METRICS, SPANS, Kind, Metric, all_metrics, all_spans

Points = list[tuple[str, float, dict[str, Any]]]
README = Path(__file__).parents[1] / "README.md"


class _Recording:
    """An instrument that keeps its points."""

    def __init__(self, name: str, points: Points) -> None:
        self._name = name
        self._points = points

    def take(self, value: float, attributes: Mapping[str, Any] | None) -> None:
        self._points.append((self._name, value, dict(attributes or {})))


class RecordingCounter(_Recording, NoOpCounter):
    def add(self, amount: float, attributes: Mapping[str, Any] | None = None, context: Any = None) -> None:
        assert amount >= 0, "a counter never goes back"
        self.take(amount, attributes)


class RecordingHistogram(_Recording, NoOpHistogram):
    def record(self, amount: float, attributes: Mapping[str, Any] | None = None, context: Any = None) -> None:
        self.take(amount, attributes)


class RecordingGauge(_Recording, _NoOpGauge):
    def set(self, amount: float, attributes: Mapping[str, Any] | None = None, context: Any = None) -> None:
        self.take(amount, attributes)


class RecordingProvider(MeterProvider):
    """A meter provider that implements the API in memory, as an SDK does."""

    def __init__(self) -> None:
        self.points: Points = []
        self.created: dict[str, tuple[str, str, str]] = {}

    def get_meter(self, name: str, *args: Any, **kwargs: Any) -> Meter:
        assert name == "pearl"
        return RecordingMeter(name, self)

    def of(self, metric: Metric) -> list[tuple[float, dict[str, Any]]]:
        return [(value, attributes) for name, value, attributes in self.points if name == metric.name]


class RecordingMeter(NoOpMeter):
    def __init__(self, name: str, provider: RecordingProvider) -> None:
        super().__init__(name)
        self._provider = provider

    def _create(self, kind: str, cls: Any, name: str, unit: str, description: str) -> Any:
        assert name not in self._provider.created, "two instruments of one name"
        self._provider.created[name] = (kind, unit, description)
        return cls(name, self._provider.points)

    def create_counter(self, name: str, unit: str = "", description: str = "") -> Any:
        return self._create("counter", RecordingCounter, name, unit, description)

    def create_histogram(self, name: str, unit: str = "", description: str = "", **kwargs: Any) -> Any:
        return self._create("histogram", RecordingHistogram, name, unit, description)

    def create_gauge(self, name: str, unit: str = "", description: str = "") -> Any:
        return self._create("gauge", RecordingGauge, name, unit, description)


@pytest.fixture
def provider() -> RecordingProvider:
    return RecordingProvider()


@pytest.fixture
def instruments(provider: RecordingProvider) -> Instruments:
    return Instruments(provider)


# ---- the list -------------------------------------------------------------------------------------------------------


def test_names_are_unique_and_follow_the_conventions() -> None:
    names = [metric.name for metric in all_metrics()]
    assert len(set(names)) == len(names)
    for metric in all_metrics():
        assert re.fullmatch(r"pearl(\.[a-z]+)+", metric.name)
        assert re.fullmatch(r"s|1|\{[a-z]+\}", metric.unit)
        assert metric.meaning.endswith(".")
        assert all(re.fullmatch(r"pearl\.[a-z]+", attribute) for attribute in metric.attributes)
        assert metric.low is None or metric.high is None or metric.low <= metric.high
    spans = [span.name for span in all_spans()]
    assert len(set(spans)) == len(spans)


def test_a_value_is_healthy_within_its_bounds() -> None:
    metric = Metric(name="pearl.x", unit="1", kind=Kind.GAUGE, meaning="X.", low=0.0, high=1.0)
    assert [metric.is_healthy(value) for value in (-0.1, 0.0, 1.0, 1.1)] == [False, True, True, False]
    assert METRICS.reward.is_healthy(-1e9)
    assert not METRICS.lost_trajectories.is_healthy(1)
    assert not METRICS.staleness.is_healthy(-2), "negative staleness means that versions went back"


def test_every_metric_is_created_as_the_list_says(provider: RecordingProvider, instruments: Instruments) -> None:
    assert provider.created == {m.name: (str(m.kind), m.unit, m.meaning) for m in all_metrics()}


# ---- what a run says ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    reward_mean: float = 0.5
    trajectories: int = 64
    generated_tokens: int = 1000
    trained_tokens: int = 3000
    duration_s: float = 5.0
    rollout_s: float = 4.0
    training_s: float = 0.5
    predicted_rollout_s: float | None = 5.0
    borrowed: bool = True
    staleness_mean: float = 0.75
    wait_grant_s: float = 0.1
    lost_trajectories: int = 0


def test_a_step_gives_its_figures_and_how_wrong_its_prediction_was(
    provider: RecordingProvider, instruments: Instruments
) -> None:
    instruments.on_step(Record())
    assert provider.of(METRICS.prediction_error) == [(pytest.approx(0.25), {})]
    assert provider.of(METRICS.rollout_makespan) == [(4.0, {"pearl.borrowed": True})]
    assert provider.of(METRICS.rollout_tokens) == [(1000, {})]
    assert provider.of(METRICS.steps) == [(1, {})]
    provider.points.clear()
    instruments.on_step(Record(predicted_rollout_s=None))
    instruments.on_step(Record(rollout_s=0.0))
    assert provider.of(METRICS.prediction_error) == []
    assert len(provider.of(METRICS.step_duration)) == 2


def test_workers_are_counted_by_role_and_activity_and_a_count_goes_back_to_zero(
    provider: RecordingProvider, instruments: Instruments
) -> None:
    workers = [
        Worker(id=WorkerId(i), gpus=frozenset({GpuId(i)}), role=Role.COLOCATED, zone=Zone.DEDICATED) for i in range(3)
    ]
    ids = [worker.id for worker in workers[:2]]
    table = WorkerTable().bind(*workers).publish(4).move(ids, Lifecycle.STARTING)
    table = table.move(ids, Lifecycle.PENDING_WEIGHTS).report(ids[0], 4).report(ids[1], 4).move(ids, Lifecycle.ACTIVE)
    instruments.on_table(table)

    def counts() -> dict[str, float]:
        latest = {a["pearl.activity"]: value for value, a in provider.of(METRICS.workers)}
        assert {a["pearl.role"] for _, a in provider.of(METRICS.workers)} == {"colocated"}
        return latest

    assert counts() == {"active": 2, "inactive": 1}
    assert provider.of(METRICS.weight_lag) == [(0, {})]
    instruments.on_table(table.publish(6).move(ids[:1], Lifecycle.DRAINING))
    assert counts() == {"active": 1, "inactive": 1, "transitioning": 1}
    assert provider.of(METRICS.weight_lag)[-1] == (2, {})
    assert not METRICS.weight_lag.is_healthy(2)
    instruments.on_table(table.move(ids, Lifecycle.DRAINING))
    assert counts()["active"] == 0


PLAN = PlanId(1)
EVENTS: list[tuple[Event, Metric, float, dict[str, Any]]] = [
    (GpusOffered(now_s=0.0, gpus=frozenset({GpuId(1), GpuId(2)})), METRICS.gpus_offered, 2, {}),
    (GpusReclaimed(now_s=0.0, gpus=frozenset({GpuId(1)}), deadline_s=1.0), METRICS.gpus_reclaimed, 1, {}),
    (GroupPrepared(now_s=0.0, plan_id=PLAN, reported={}, duration_s=7.0), METRICS.preparation, 7.0, {}),
    (GroupFailed(now_s=0.0, plan_id=PLAN), METRICS.preparations_failed, 1, {"pearl.outcome": "cancelled"}),
    (
        GroupFailed(now_s=0.0, plan_id=PLAN, failed={WorkerId(1): "x"}),
        METRICS.worker_failures,
        1,
        {"pearl.during": "preparation"},
    ),
    (StageApplied(now_s=0.0, plan_id=PLAN, stage=0, reported={}, duration_s=2.0), METRICS.stage, 2.0, {}),
    (
        WorkerFailed(now_s=0.0, worker=WorkerId(1), incarnation=1, cause="crash"),
        METRICS.worker_failures,
        1,
        {"pearl.during": "serving"},
    ),
    (
        TrainingReleased(now_s=0.0, plan_id=PLAN, failed="x"),
        METRICS.training_handover,
        1,
        {"pearl.action": "release", "pearl.outcome": "failed"},
    ),
    (
        TrainingResumed(now_s=0.0),
        METRICS.training_handover,
        1,
        {"pearl.action": "resume", "pearl.outcome": "done"},
    ),
]


@pytest.mark.parametrize(("event", "metric", "value", "attributes"), EVENTS)
def test_events_become_points(
    provider: RecordingProvider,
    instruments: Instruments,
    event: Event,
    metric: Metric,
    value: float,
    attributes: dict[str, Any],
) -> None:
    instruments.on_event(event)
    assert (value, attributes) in provider.of(metric)


def test_what_is_not_measured_makes_no_point(provider: RecordingProvider, instruments: Instruments) -> None:
    instruments.on_event(RolloutBegan(now_s=0.0, step=1, batch=64))
    instruments.on_message("hello")
    assert provider.points == []


def test_a_decision_under_which_nobody_serves_predicts_nothing(
    provider: RecordingProvider, instruments: Instruments
) -> None:
    nobody = Decision(
        selected=Configuration(), previous=None, reason=Reason.INITIAL, budget_workers=0, candidates=(), considered=1,
        predicted_s=float("inf"), switch=SwitchKind.NEW_WORKERS,
    )  # fmt: skip
    instruments.on_decision(nobody, "GpusReclaimed")
    assert len(provider.of(METRICS.decisions)) == 1
    assert provider.of(METRICS.predicted_makespan) == []


def test_decisions_and_actions_carry_why_and_how(provider: RecordingProvider, instruments: Instruments) -> None:
    decision = Decision(
        selected=Configuration(colocated=2),
        previous=None,
        reason=Reason.INITIAL,
        budget_workers=2,
        candidates=(),
        considered=1,
        predicted_s=9.0,
        switch=SwitchKind.NEW_WORKERS,
    )
    instruments.on_decision(decision, "GpusOffered")
    assert provider.of(METRICS.predicted_makespan) == [(9.0, {})]
    instruments.on_action("start", 3.0, None)
    instruments.on_action("kill", 1.0, "worker 1: kill exceeded 1 s")
    ((_, why),) = provider.of(METRICS.decisions)
    assert why == {"pearl.reason": "initial", "pearl.switch": "new_workers", "pearl.trigger": "GpusOffered"}
    assert [attributes["pearl.outcome"] for _, attributes in provider.of(METRICS.worker_action)] == ["done", "failed"]


def test_points_carry_exactly_the_attributes_that_the_list_names(
    provider: RecordingProvider, instruments: Instruments
) -> None:
    instruments.on_step(Record())
    for event, *_ in EVENTS:
        instruments.on_event(event)
    named = {metric.name: set(metric.attributes) for metric in all_metrics()}
    assert provider.points
    assert all(set(attributes) == named[name] for name, _, attributes in provider.points)


def test_spans_have_the_names_of_the_list_and_nest() -> None:
    opened: list[str] = []

    class Tracer(NoOpTracer):
        def start_as_current_span(self, name: str, *args: Any, **kwargs: Any) -> Any:
            opened.append(name)
            return super().start_as_current_span(name, *args, **kwargs)

    class Provider(TracerProvider):
        def get_tracer(self, *args: Any, **kwargs: Any) -> Tracer:
            return Tracer()

    instruments = Instruments(tracer_provider=Provider())
    with instruments.span(SPANS.step, {"pearl.step": 1}), instruments.span(SPANS.rollout):
        pass
    assert opened == ["pearl.step", "pearl.rollout"]


def test_without_an_sdk_everything_may_be_called_and_nothing_is_kept() -> None:
    instruments = Instruments()
    instruments.on_step(Record())
    with instruments.span(SPANS.turn) as span:
        assert not span.is_recording()


# ---- README ---------------------------------------------------------------------------------------------------------


def test_the_readme_example_prints_what_the_readme_says() -> None:
    text = README.read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (expected,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, str(README), "exec"), {"__name__": "__main__"})
    assert printed.getvalue() == expected


def test_the_readme_holds_the_dictionary_that_the_code_gives() -> None:
    assert dictionary() in README.read_text()
