"""A trace holds every worker, role, request, decision and trajectory of a run, and no track has crossing spans."""

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pearl_rl.cli.app import app
from pearl_rl.report.timeline import CONTROL, TRAJECTORIES, WORKERS, Detail, timeline
from pearl_rl.report.trace import side_by_side
from pearl_rl.run_folder import RunFolder, read_decisions, read_lines
from pearl_rl.simulation.cluster import simulate
from pearl_rl.simulation.scenario import load_scenario


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    values = ("rollout.batch=16", "rollout.group_size=4", "run.steps=3", "workload.max_turns=3")
    scenario = load_scenario("paper-segment1", ("policy.name=static-pd", "policy.configuration=2P3D", *values))
    path = tmp_path_factory.mktemp("timeline") / "run"
    with RunFolder.create_simulation(scenario.model_dump(), path) as made:
        simulate(scenario, folder=made)
    return path


@pytest.fixture(scope="module")
def events(folder):
    return list(timeline(folder))


def spans(events):
    return [event for event in events if event["ph"] == "X"]


def test_spans_of_a_track_lie_inside_or_beside_each_other(events):
    tracks = defaultdict(list)
    for event in spans(events):
        assert event["dur"] >= 0
        assert event["ts"] >= 0
        tracks[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
    for track in tracks.values():
        ends = []
        for start, negative in sorted(track):
            while ends and ends[-1] <= start + 0.002:
                ends.pop()
            assert not ends or start - negative <= ends[-1] + 0.002
            ends.append(start - negative)


def test_every_track_with_spans_is_named(events):
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    assert {(event["pid"], event["tid"]) for event in spans(events)} <= named
    assert {event["pid"] for event in events} <= processes


def test_every_request_is_on_its_workers(events, folder):
    shown = {(event["pid"] - WORKERS, event["name"].split()[-1]) for event in spans(events) if event["pid"] >= WORKERS}
    requests = list(read_lines(folder / "requests.jsonl"))
    assert requests
    for request in requests:
        first = request["worker"] if request["prefill"] is None else request["prefill"]
        assert (first, request["rid"]) in shown
        if request["prefill"] is not None and request["decode_s"]:
            assert (request["worker"], request["rid"]) in shown


def test_hand_overs_are_arrows_from_prefill_to_decode(events):
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys() != set()
    for number, begin in begins.items():
        assert begin["ts"] <= ends[number]["ts"]
        assert begin["pid"] != ends[number]["pid"]


def test_every_decision_is_a_mark(events, folder):
    marks = [event for event in events if event["ph"] == "i" and event["tid"] == 2 and event["pid"] == CONTROL]
    recorded = read_decisions(folder / "decisions.jsonl")
    assert len(marks) == len(recorded) > 0
    for mark, line in zip(marks, recorded, strict=True):
        assert mark["args"]["reason"] == line["decision"]["reason"]


def test_every_trajectory_and_turn_is_a_span(events, folder):
    lines = list(read_lines(folder / "trajectories.jsonl"))
    found = [event for event in spans(events) if event["pid"] == TRAJECTORIES]
    assert {event["name"] for event in found if event["name"].startswith("t0")} == {line["id"] for line in lines}
    turns = sum(len(line["turns"]) for line in lines)
    assert sum(event["name"].startswith("turn ") for event in found) == turns


def test_less_detail_is_a_part_of_more(folder, events):
    control = list(timeline(folder, Detail.CONTROL))
    requests = list(timeline(folder, Detail.REQUESTS))
    assert len(control) < len(requests) < len(events)
    assert all(event in events for event in control[:50])


@dataclass(frozen=True)
class Item:
    start_s: float
    end_s: float


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=25))
@settings(max_examples=60)
def test_overlapping_items_get_lanes_of_their_own_and_no_lane_is_wasted(pairs):
    items = [Item(float(start), float(start + length)) for start, length in pairs]
    lanes = defaultdict(list)
    for lane, item in side_by_side(items):
        lanes[lane].append(item)
    for track in lanes.values():
        for item, following in pairwise(track):
            assert item.end_s <= following.start_s
    deepest = max((sum(i.start_s <= at.start_s < i.end_s for i in items) for at in items), default=0)
    instants = sum(item.start_s == item.end_s for item in items)
    assert len(lanes) <= deepest + instants


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_command_writes_json_that_loads(folder, tmp_path, name):
    out = tmp_path / name
    result = CliRunner().invoke(app, ["timeline", str(folder), "-o", str(out), "--detail", "control"])
    assert result.exit_code == 0, result.output
    text = gzip.decompress(out.read_bytes()) if name.endswith("gz") else out.read_bytes()
    assert json.loads(text)["traceEvents"]


@pytest.mark.parametrize(
    ("words", "said"), [(["--detail", "most"], "most"), (["-o", "/proc/none/t.json"], "/proc/none")]
)
def test_bad_options_are_one_line(folder, capsys, words, said):
    assert app(["timeline", str(folder), *words], standalone_mode=False) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
