"""Traces and metrics reach real exporters: a receiver of OTLP/HTTP, JSON lines, and a Prometheus page."""

import json
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.proto")

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pearl_state import effects, events
from pearl_state.configuration import Configuration
from pearl_state.decision import Decision, Reason, SwitchKind
from pearl_state.lifecycle import Lifecycle
from pearl_state.plan import PlanId
from pearl_state.roles import Role, Zone
from pearl_state.table import WorkerTable
from pearl_state.trajectory import GroupId, Trajectory, TrajectoryId, Turn, WeightSpan
from pearl_state.worker import GpuId, Worker, WorkerId
from pearl_telemetry.dashboard import grafana, prometheus_name
from pearl_telemetry.genai import TrackerSpanProcessor
from pearl_telemetry.instruments import Instruments
from pearl_telemetry.metrics import METRICS, Kind, all_metrics, all_spans
from pearl_telemetry.sdk import Telemetry, TelemetryError, TelemetryOptions, open_telemetry
from pearl_telemetry.traces import RunTraces
from pearl_telemetry.tracker import RuntimeTracker

EPOCH_S = 1_700_000_000.0


@dataclass
class Record:
    reward_mean: float = 0.5
    trajectories: int = 64
    generated_tokens: int = 1000
    trained_tokens: int = 3000
    duration_s: float = 8.0
    rollout_s: float = 5.0
    training_s: float = 2.0
    predicted_rollout_s: float | None = 4.5
    borrowed: bool = True
    staleness_mean: float = 1.0
    wait_grant_s: float = 0.5
    lost_trajectories: int = 0


def worker(number: int) -> Worker:
    return Worker(id=WorkerId(number), gpus=frozenset({GpuId(number)}), role=Role.COLOCATED, zone=Zone.DEDICATED)


def trajectory(turns: int = 3, started_s: float = 10.0) -> Trajectory:
    played, at_s = [], started_s
    for index in range(turns):
        end_s = at_s + 0.2 + 0.3 + 0.1 + 1.0
        played.append(
            Turn(
                prompt=range(100 if index == 0 else 40),
                response=range(20),
                logprobs=[0.0] * 20,
                spans=(WeightSpan(3, 20),),
                queue_s=0.2,
                prefill_s=0.3,
                decode_s=1.0,
                environment_s=0.5,
                started_s=at_s,
                finished_s=end_s,
            )
        )
        at_s = end_s + 0.5
    return Trajectory(
        id=TrajectoryId("t00000001"),
        group=GroupId("g1"),
        task="bisect",
        turns=tuple(played),
        reward=1.0,
        dispatch_version=3,
        started_s=started_s,
        finished_s=at_s,
    )


def play_everything(telemetry: Telemetry) -> None:
    """Touch every metric and every kind of span once."""
    traces = RunTraces(epoch_s=EPOCH_S, model="tiny", tracer_provider=telemetry.tracer_provider)
    instruments = Instruments(telemetry.meter_provider, telemetry.tracer_provider)
    traces.on_trajectory(trajectory(), 1)
    traces.on_step(Record(), 20.0, 1)
    instruments.on_step(Record())
    table = WorkerTable().bind(worker(1)).publish(3)
    for lifecycle in (Lifecycle.STARTING, Lifecycle.PENDING_WEIGHTS):
        table = table.move([WorkerId(1)], lifecycle)
    table = table.report(WorkerId(1), 3).move([WorkerId(1)], Lifecycle.ACTIVE)
    instruments.on_table(table)
    instruments.on_decision(
        Decision(
            selected=Configuration(colocated=2),
            previous=None,
            reason=Reason.BEST,
            budget_workers=2,
            considered=1,
            candidates=(),
            predicted_s=5.0,
            switch=SwitchKind.NONE,
        ),
        "GpusOffered",
    )
    instruments.on_action("start", 1.0, None)
    plan = PlanId(7)
    prepare = effects.PrepareGroup(plan_id=plan, kind=effects.GroupKind.EXPANSION, workers=(worker(4),))
    happened: list[tuple[events.Event, tuple[effects.Effect, ...]]] = [
        (events.GpusOffered(now_s=1.0, gpus=frozenset({GpuId(4)})), (prepare,)),
        (events.GpusReclaimed(now_s=2.0, gpus=frozenset({GpuId(5)}), deadline_s=9.0), ()),
        (events.GroupPrepared(now_s=4.0, plan_id=plan, reported={WorkerId(4): 3}, duration_s=3.0), ()),
        (events.GroupFailed(now_s=4.0, plan_id=PlanId(8), failed={WorkerId(5): "no answer"}), ()),
        (events.StageApplied(now_s=5.0, plan_id=plan, stage=0, reported={}, duration_s=1.0), ()),
        (events.TrainingReleased(now_s=6.0, plan_id=PlanId(9)), ()),
    ]
    for event, emitted in happened:
        instruments.on_event(event)
        traces.on_control(event, emitted)
        if isinstance(event, events.GpusOffered):
            traces.on_action("start", WorkerId(4), 1.5, 2.0, None)
            traces.on_action("load_weights", WorkerId(4), 3.5, 0.4, "timed out")


# ---- OTLP -----------------------------------------------------------------------------------------------------------


@dataclass
class Received:
    spans: list[Any] = field(default_factory=list)
    metrics: set[str] = field(default_factory=set)


@pytest.fixture
def collector() -> Iterator[tuple[str, Received]]:
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            if self.path == "/v1/traces":
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        received.spans += scope.spans
            else:
                for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                    for scope in resource.scope_metrics:
                        received.metrics |= {metric.name for metric in scope.metrics}
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", received
        server.shutdown()
        thread.join(timeout=10)


def test_a_collector_receives_every_kind_of_span_and_every_metric(collector: tuple[str, Received]) -> None:
    endpoint, received = collector
    telemetry = open_telemetry(TelemetryOptions(otlp_endpoint=endpoint, run="r1"))
    play_everything(telemetry)
    telemetry.close()
    assert {span.name for span in received.spans} == {span.name for span in all_spans()}
    assert received.metrics == {metric.name for metric in all_metrics()}


def test_a_trajectory_is_one_trace_whose_spans_add_up(collector: tuple[str, Received]) -> None:
    endpoint, received = collector
    telemetry = open_telemetry(TelemetryOptions(otlp_endpoint=endpoint))
    RunTraces(epoch_s=EPOCH_S, tracer_provider=telemetry.tracer_provider).on_trajectory(trajectory(), 1)
    telemetry.close()
    by_id = {span.span_id: span for span in received.spans}
    roots = [span for span in received.spans if span.parent_span_id not in by_id]
    assert [span.name for span in roots] == ["pearl.trajectory"]
    assert len({span.trace_id for span in received.spans}) == 1
    turns = [span for span in received.spans if span.name == "pearl.turn"]
    assert len(turns) == 3
    for turn in turns:
        inside = sorted(
            (span for span in received.spans if span.parent_span_id == turn.span_id),
            key=lambda span: span.start_time_unix_nano,
        )
        assert [span.name for span in inside] == [
            "pearl.queue", "pearl.prefill", "pearl.kv_transfer", "chat", "execute_tool"
        ]  # fmt: skip
        assert sum(span.end_time_unix_nano - span.start_time_unix_nano for span in inside) == pytest.approx(
            turn.end_time_unix_nano - turn.start_time_unix_nano, abs=2e3
        )


def test_a_reconfiguration_carries_its_actions_and_their_failures(collector: tuple[str, Received]) -> None:
    endpoint, received = collector
    telemetry = open_telemetry(TelemetryOptions(otlp_endpoint=endpoint))
    play_everything(telemetry)
    telemetry.close()
    (root,) = [span for span in received.spans if span.name == "pearl.reconfiguration"]
    actions = [span for span in received.spans if span.parent_span_id == root.span_id]
    names = [next(a.value.string_value for a in span.attributes if a.key == "pearl.action") for span in actions]
    assert names == ["start", "load_weights"]
    assert [span.status.message for span in actions] == ["", "timed out"]


def test_a_collector_that_is_gone_neither_raises_nor_holds_the_run_up() -> None:
    telemetry = open_telemetry(TelemetryOptions(otlp_endpoint="http://127.0.0.1:9"))
    RunTraces(epoch_s=EPOCH_S, tracer_provider=telemetry.tracer_provider).on_trajectory(trajectory(), 1)
    stopper = threading.Thread(target=telemetry.close)
    stopper.start()
    stopper.join(timeout=20)
    assert not stopper.is_alive()


# ---- files and page -------------------------------------------------------------------------------------------------


def test_json_lines_hold_every_span_and_point(tmp_path: Path) -> None:
    telemetry = open_telemetry(TelemetryOptions(jsonl=tmp_path))
    play_everything(telemetry)
    telemetry.close()
    spans = [json.loads(line) for line in (tmp_path / "spans.jsonl").read_text().splitlines()]
    points = [json.loads(line) for line in (tmp_path / "points.jsonl").read_text().splitlines()]
    assert {span["name"] for span in spans} == {span.name for span in all_spans()}
    assert {point["name"] for point in points} == {metric.name for metric in all_metrics()}
    (root,) = [span for span in spans if span["name"] == "pearl.trajectory"]
    assert root["start_s"] == pytest.approx(EPOCH_S + 10.0)
    assert root["parent"] is None


def test_the_prometheus_page_has_the_names_that_the_dashboard_asks_for() -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    telemetry = open_telemetry(TelemetryOptions(prometheus_port=port))
    try:
        play_everything(telemetry)
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
        with pytest.raises(TelemetryError, match=f"port {port}"):
            open_telemetry(TelemetryOptions(prometheus_port=port))
    finally:
        telemetry.close()
    families = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    assert {prometheus_name(metric) for metric in all_metrics()} <= families


def test_nothing_asked_for_needs_nothing() -> None:
    telemetry = open_telemetry(TelemetryOptions())
    assert telemetry.meter_provider is None
    telemetry.close()


def test_an_endpoint_that_is_no_address_is_one_line() -> None:
    with pytest.raises(TelemetryError, match="must begin with http"):
        open_telemetry(TelemetryOptions(otlp_endpoint="localhost:4318"))


def test_the_dashboard_shows_each_metric_once() -> None:
    panels = grafana()["panels"]
    assert [panel["title"] for panel in panels] == [metric.name for metric in all_metrics()]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    for panel, metric in zip(panels, all_metrics(), strict=True):
        assert prometheus_name(metric) in panel["targets"][0]["expr"]
        if metric.high is not None:
            assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]["value"] == metric.high
    assert prometheus_name(METRICS.steps).endswith("_total")
    assert METRICS.steps.kind is Kind.COUNTER


# ---- a profile from spans alone -------------------------------------------------------------------------------------


def test_our_own_spans_alone_give_the_profile_that_the_turns_give() -> None:
    by_spans, by_turns = RuntimeTracker(least_trajectories=1), RuntimeTracker(least_trajectories=1)
    provider = TracerProvider()
    provider.add_span_processor(TrackerSpanProcessor(by_spans))
    traces = RunTraces(epoch_s=EPOCH_S, tracer_provider=provider)
    from pearl_state.samples import TurnSample

    for turns in (2, 3, 5):
        one = trajectory(turns)
        traces.on_trajectory(one, 1)
        context, samples = 0, []
        for index, turn in enumerate(one.turns):
            context += len(turn.prompt)
            last = index + 1 == turns
            samples.append(
                TurnSample(
                    step=1, turn=index, new_prompt_tokens=len(turn.prompt), response_tokens=20,
                    retained_tokens=0 if last else 20, context_tokens=context, prefill_s=turn.prefill_s,
                    decode_s=turn.decode_s, queue_s=turn.queue_s, environment_s=turn.environment_s, last=last,
                )
            )  # fmt: skip
            context += 20
        by_turns.observe_turns(samples)
    for tracker in (by_spans, by_turns):
        tracker.finish_step(step=1, batch=3, makespan_s=12.0, decoding_fraction=0.5)
    ours, theirs = by_spans.profile(), by_turns.profile()
    assert ours is not None
    assert theirs is not None
    for name in ("turns", "new_prompt_tokens", "response_tokens", "context_tokens", "turn_environment_s", "mean_turns"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-6), name


def test_a_foreign_frameworks_genai_spans_give_a_profile() -> None:
    tracker = RuntimeTracker(least_trajectories=1)
    exported = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exported))
    provider.add_span_processor(TrackerSpanProcessor(tracker))
    tracer = provider.get_tracer("someone else")
    for _ in range(4):
        with tracer.start_as_current_span("agent", attributes={"gen_ai.operation.name": "invoke_agent"}):
            for context in (1000, 1500, 2000):
                usage = {"gen_ai.usage.input_tokens": context, "gen_ai.usage.output_tokens": 100}
                with tracer.start_as_current_span("chat m", attributes={"gen_ai.operation.name": "chat", **usage}):
                    pass
                with tracer.start_as_current_span("tool", attributes={"gen_ai.operation.name": "execute_tool"}):
                    pass
    tracker.finish_step(step=0, batch=4, makespan_s=1.0, decoding_fraction=0.5)
    profile = tracker.profile()
    assert profile is not None
    assert profile.mean_turns == pytest.approx(3)
    assert profile.response_tokens == pytest.approx(100)
    assert profile.new_prompt_tokens == pytest.approx((1000 + 400 + 400) / 3)


def test_runs_that_never_end_are_forgotten() -> None:
    processor = TrackerSpanProcessor(RuntimeTracker())
    provider = TracerProvider()
    provider.add_span_processor(processor)
    tracer = provider.get_tracer("x")
    for _ in range(10_050):
        tracer.start_span("chat", attributes={"gen_ai.operation.name": "chat"}).end()
    assert len(processor._runs) == 10_000
