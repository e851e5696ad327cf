"""Traces and metrics reach real exporters: an OTLP/HTTP collector, JSON lines, and a Prometheus page."""

import json
import logging
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.proto")

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
from pearl_telemetry.context import TraceKeys
from pearl_telemetry.dashboard import grafana, prometheus_name
from pearl_telemetry.genai import TrackerSpanProcessor
from pearl_telemetry.instruments import Instruments
from pearl_telemetry.logs import CorrelatedLogs
from pearl_telemetry.metrics import METRICS, SPANS, Kind, all_metrics, all_spans
from pearl_telemetry.remote import WorkerSpans, open_worker_spans, served
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
    for turn in range(3):
        traces.on_request(f"t00000001.{turn:04d}.001", 4, 6, 0.1)
    traces.on_trajectory(trajectory(), 1)
    context = TraceKeys("").turn("t00000001", 0).traceparent
    for kind in ("request", "command"):
        WorkerSpans(telemetry).write(kind, context, 10**18, 10**18 + 10, {"pearl.op": kind}, None)
    for span in (SPANS.environment_request, SPANS.planner_request):
        with served({"traceparent": context}, span, {"pearl.op": "/start"}, telemetry.tracer_provider):
            pass
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


COLLECTOR = Path(__file__).with_name("otlp_collector.py")


class Collector:
    """A collector in a process of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(COLLECTOR)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.endpoint = f"http://127.0.0.1:{self._process.stdout.readline().strip()}"

    def received(self) -> dict[str, Any]:
        """End it; what it was sent."""
        out, _ = self._process.communicate(timeout=30)
        assert self._process.returncode == 0
        found: dict[str, Any] = json.loads(out)
        assert found["refused"] == []
        return found

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


@pytest.fixture
def collector() -> Iterator[Collector]:
    process = Collector()
    yield process
    process.close()


_ON_THE_WIRE = {Kind.COUNTER: "sum", Kind.HISTOGRAM: "histogram", Kind.GAUGE: "gauge"}


def test_a_collector_receives_every_kind_of_span_and_every_metric(collector: Collector) -> None:
    telemetry = open_telemetry(TelemetryOptions(otlp_endpoint=collector.endpoint, run="r1", process="control"))
    play_everything(telemetry)
    telemetry.close()
    received = collector.received()
    assert {span["name"] for span in received["spans"]} == {span.name for span in all_spans()}
    assert received["metrics"] == {
        metric.name: {
            "unit": metric.unit,
            "kind": _ON_THE_WIRE[metric.kind],
            "attributes": sorted(metric.attributes),
        }
        for metric in all_metrics()
    }
    for span in received["spans"]:
        assert span["resource"]["service.name"] == "pearl"
        assert span["resource"]["pearl.run"] == "r1"
        assert span["resource"]["service.instance.id"] == "control"


def test_a_trajectory_is_one_trace_whose_spans_add_up(collector: Collector) -> None:
    telemetry = open_telemetry(TelemetryOptions(otlp_endpoint=collector.endpoint))
    traces = RunTraces(epoch_s=EPOCH_S, tracer_provider=telemetry.tracer_provider)
    for turn in range(3):
        traces.on_request(f"t00000001.{turn:04d}.001", 4, 6, 0.0)
        traces.on_request(f"t00000001.{turn:04d}.002", 5, 6, 0.1)
    traces.on_trajectory(trajectory(), 1)
    telemetry.close()
    spans = collector.received()["spans"]
    by_id = {span["span"]: span for span in spans}
    roots = [span for span in spans if span["parent"] not in by_id]
    assert [span["name"] for span in roots] == ["pearl.trajectory"]
    assert len({span["trace"] for span in spans}) == 1
    turns = [span for span in spans if span["name"] == "pearl.turn"]
    assert len(turns) == 3
    for turn in turns:
        inside = sorted((s for s in spans if s["parent"] == turn["span"]), key=lambda span: span["start_ns"])
        assert [span["name"] for span in inside] == [
            "pearl.queue", "pearl.prefill", "pearl.kv_transfer", "chat", "execute_tool"
        ]  # fmt: skip
        lasted_ns = sum(span["end_ns"] - span["start_ns"] for span in inside)
        workers = {span["name"]: span["attributes"].get("pearl.workers") for span in inside}
        assert (workers["pearl.prefill"], workers["chat"]) == ("6,6", "4,5")
        assert lasted_ns == pytest.approx(turn["end_ns"] - turn["start_ns"], abs=2e3)


def test_no_span_of_a_large_batch_is_dropped(collector: Collector) -> None:
    telemetry = open_telemetry(TelemetryOptions(otlp_endpoint=collector.endpoint))
    traces = RunTraces(epoch_s=EPOCH_S, tracer_provider=telemetry.tracer_provider)
    for _ in range(1_000):
        traces.on_trajectory(trajectory(1), 1)
    telemetry.close()
    assert len(collector.received()["spans"]) == 6_000


def test_a_turn_without_a_hand_over_has_none(collector: Collector) -> None:
    telemetry = open_telemetry(TelemetryOptions(otlp_endpoint=collector.endpoint))
    traces = RunTraces(epoch_s=EPOCH_S, tracer_provider=telemetry.tracer_provider)
    traces.on_request("t00000001.0000.001", 4, None, 0.0)
    traces.on_trajectory(trajectory(1), 1)
    telemetry.close()
    names = {span["name"] for span in collector.received()["spans"]}
    assert names == {"pearl.trajectory", "pearl.turn", "pearl.queue", "pearl.prefill", "chat", "execute_tool"}


def test_a_reconfiguration_carries_its_actions_and_their_failures(collector: Collector) -> None:
    telemetry = open_telemetry(TelemetryOptions(otlp_endpoint=collector.endpoint))
    play_everything(telemetry)
    telemetry.close()
    spans = collector.received()["spans"]
    (root,) = [span for span in spans if span["name"] == "pearl.reconfiguration"]
    actions = [span for span in spans if span["parent"] == root["span"]]
    assert [span["attributes"]["pearl.action"] for span in actions] == ["start", "load_weights"]
    assert [span["error"] for span in actions] == ["", "timed out"]


def test_another_process_names_a_turn_before_it_is_written(collector: Collector) -> None:
    telemetry = open_telemetry(TelemetryOptions(otlp_endpoint=collector.endpoint))
    keys, one = TraceKeys("runs/7"), trajectory(2)
    context = keys.turn(one.id, 1).traceparent
    workers = open_worker_spans({"jsonl": "", "otlp_endpoint": collector.endpoint, "run": "7"}, "w4-1")
    workers.write("request", context, 10**18, 10**18 + 5, {"pearl.op": "decode"}, "it hung up")
    workers.close()
    traces = RunTraces(epoch_s=EPOCH_S, tracer_provider=telemetry.tracer_provider, keys=keys, ids=telemetry.ids)
    traces.on_trajectory(one, 1)
    telemetry.close()
    spans = collector.received()["spans"]
    (request,) = [span for span in spans if span["name"] == "pearl.worker.request"]
    (turn,) = [span for span in spans if span["span"] == request["parent"]]
    assert (turn["name"], turn["attributes"]["pearl.turn"]) == ("pearl.turn", 1)
    assert {span["trace"] for span in spans} == {request["trace"]}
    assert request["error"] == "it hung up"
    assert request["resource"]["service.instance.id"] == "w4-1"


def test_log_records_arrive_with_the_span_that_their_task_works_for(collector: Collector, tmp_path: Path) -> None:
    telemetry = open_telemetry(TelemetryOptions(otlp_endpoint=collector.endpoint, jsonl=tmp_path))
    assert telemetry.logger_provider is not None
    contexts = [TraceKeys("r").turn("t1", 2).traceparent, ""]
    handler, log = CorrelatedLogs(telemetry.logger_provider, lambda: contexts.pop(0)), logging.getLogger("pearl_test")
    log.addHandler(handler)
    try:
        log.warning("worker %d did not answer", 4)
        try:
            raise ValueError("broken")
        except ValueError:
            log.exception("given up")
    finally:
        log.removeHandler(handler)
    telemetry.close()
    first, second = collector.received()["logs"]
    ids = TraceKeys("r").turn("t1", 2)
    assert (first["text"], first["level"], first["severity"]) == ("worker 4 did not answer", "WARNING", 13)
    assert (first["trace"], first["span"]) == (f"{ids.trace:032x}", f"{ids.span:016x}")
    assert (second["trace"], second["attributes"]["exception.message"]) == ("", "broken")
    rows = [json.loads(line) for line in (tmp_path / "logs.jsonl").read_text().splitlines()]
    assert [(row["text"], row["trace"]) for row in rows] == [(first["text"], first["trace"]), ("given up", None)]


def test_a_log_record_that_cannot_be_passed_on_stops_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    telemetry = open_telemetry(TelemetryOptions(jsonl=tmp_path))
    assert telemetry.logger_provider is not None
    handler = CorrelatedLogs(telemetry.logger_provider, lambda: "")
    for text, given in (("%d workers", ("three",)), ("%d more", (2,))):
        handler.handle(logging.LogRecord("pearl_test", logging.WARNING, "", 0, text, given, None))
    telemetry.close()
    assert "three" in capsys.readouterr().err
    assert [json.loads(line)["text"] for line in (tmp_path / "logs.jsonl").read_text().splitlines()] == ["2 more"]


def test_ids_follow_from_run_and_trajectory_alone() -> None:
    first, again = TraceKeys("runs/7"), TraceKeys("runs/7")
    assert first.turn("t1", 0) == again.turn("t1", 0)
    places = {first.turn(t, n).span for t in ("t1", "t2") for n in range(3)} | {first.trajectory("t1").span}
    assert len(places) == 7
    assert first.turn("t1", 2).trace == first.trajectory("t1").trace
    assert TraceKeys("runs/8").trajectory("t1") != first.trajectory("t1")
    version, trace_id, span_id, flags = first.turn("t1", 0).traceparent.split("-")
    assert (version, len(trace_id), len(span_id), flags) == ("00", 32, 16, "01")


def test_a_server_spans_only_requests_that_bring_a_context() -> None:
    exported, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exported))
    for headers in ({}, {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}, {"traceparent": "nonsense"}):
        with served(headers, SPANS.environment_request, {"pearl.op": "/start"}, provider):
            pass
    parents = [span.parent and f"{span.parent.span_id:016x}" for span in exported.get_finished_spans()]
    assert parents == ["b" * 16, None]


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
    samples: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(\w+)(?:\{(.*)\})? \S+$", page, re.MULTILINE):
        samples.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    for panel in grafana()["panels"]:
        (target,) = panel["targets"]
        asked = set(re.findall(r"\bpearl_\w+", re.sub(r"by \([^)]*\)", "", target["expr"])))
        grouped = set(re.findall(r"pearl_\w+", " ".join(re.findall(r"by \(([^)]*)\)", target["expr"]))))
        assert asked
        for name in asked:
            # What is asked for is there, with the labels that it is grouped by and that the legend names.
            assert grouped | set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= samples[name], panel["title"]


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
        shown = panel["fieldConfig"]["defaults"]
        assert shown["unit"] == ("s" if metric.unit == "s" else "percentunit" if metric.is_share else "none")
        # The bounds are normal themselves, and are shown so; of what is measured, what is just within the upper one.
        within = [] if metric.low is None else [metric.low]
        if metric.high is not None:
            within.append(metric.high if metric.unit.startswith("{") else metric.high * 0.999)
        for value in within:
            steps = [s for s in shown["thresholds"]["steps"] if s["value"] is None or value >= s["value"]]
            assert steps[-1]["color"] == "green", metric.name
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


def test_a_foreign_span_may_hold_anything() -> None:
    tracker = RuntimeTracker(least_trajectories=1)
    provider = TracerProvider()
    provider.add_span_processor(TrackerSpanProcessor(tracker))
    tracer = provider.get_tracer("x")
    odd = {"gen_ai.usage.input_tokens": float("inf"), "gen_ai.server.time_to_first_token": float("nan")}
    usage = {"gen_ai.operation.name": "chat", "gen_ai.usage.output_tokens": 10, **odd}
    for step in ("the third", float("inf"), 0):
        attributes = {"gen_ai.operation.name": "invoke_agent", "pearl.step": step}
        with tracer.start_as_current_span("agent", attributes=attributes):
            tracer.start_span("chat", attributes=usage).end()
    tracker.finish_step(step=0, batch=3, makespan_s=1.0, decoding_fraction=None)
    profile = tracker.profile()
    assert profile is not None
    assert (profile.mean_turns, profile.response_tokens, profile.context_tokens) == (1, 10, 0)


def test_the_calls_of_agents_that_an_agent_asks_are_turns_of_its_run() -> None:
    tracker = RuntimeTracker(least_trajectories=1)
    provider = TracerProvider()
    provider.add_span_processor(TrackerSpanProcessor(tracker))
    tracer = provider.get_tracer("x")
    agent = {"gen_ai.operation.name": "invoke_agent"}
    usage = {"gen_ai.operation.name": "chat", "gen_ai.usage.input_tokens": 100, "gen_ai.usage.output_tokens": 10}
    for _ in range(3):
        with tracer.start_as_current_span("request"), tracer.start_as_current_span("agent", attributes=agent):
            tracer.start_span("chat", attributes=usage).end()
            for _ in range(2):
                with tracer.start_as_current_span("asked", attributes=agent):
                    tracer.start_span("chat", attributes=usage).end()
            tracer.start_span("chat", attributes=usage).end()
    tracker.finish_step(step=0, batch=3, makespan_s=1.0, decoding_fraction=None)
    profile = tracker.profile()
    assert profile is not None
    assert profile.mean_turns == 4


def test_runs_that_never_end_are_forgotten() -> None:
    processor = TrackerSpanProcessor(RuntimeTracker())
    provider = TracerProvider()
    provider.add_span_processor(processor)
    tracer = provider.get_tracer("x")
    for _ in range(10_050):
        tracer.start_span("chat", attributes={"gen_ai.operation.name": "chat"}).end()
    assert len(processor._runs) == 10_000
