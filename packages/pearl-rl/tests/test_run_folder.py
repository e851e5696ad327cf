"""The run folder: what it holds, what it refuses, and what a reader sees at any moment."""

import json
import math
import tomllib
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pearl_rl import run_folder
from pearl_rl.encoding import EVENT_TYPES, decode_event, encode, encode_event, json_line
from pearl_rl.errors import CommandError, ExitCode
from pearl_rl.observer import StepRecord
from pearl_rl.run_folder import LineFile, RunFolder, read_decisions, read_lines
from pearl_rl.settings import load_settings
from pearl_rl.summary import TrainSummary
from pearl_state.configuration import Configuration
from pearl_state.decision import Candidate, Constraint, Decision, MakespanTerms, Reason
from pearl_state.events import GpusOffered, GpusReclaimed, RolloutBegan, RolloutProgressed, StageApplied
from pearl_state.plan import PlanId, Stage, TransitionPlan
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.roles import Role, Tenure
from pearl_state.trajectory import GroupId, Trajectory, TrajectoryId, Turn, WeightSpan
from pearl_state.worker import GpuId, WorkerId

FILES = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

SUMMARY = TrainSummary(
    steps=2,
    reward_first10=0.25,
    reward_last10=0.5,
    trajectories=128,
    lost_trajectories=0,
    stale_served=0,
    expansions=1,
    reclaims=1,
    borrows=2,
    returns=2,
    mode_switches=1,
    ratio_switches=1,
    tokens_per_s=123.5,
    wall_s=10.0,
    run_dir="runs/x",
)


def decision(selected: str = "2P3D") -> Decision:
    terms = MakespanTerms(total_s=3.0, prefill_s=1.0, decode_s=2.0, bottleneck="decode")
    candidate = Candidate(
        configuration=Configuration.parse(selected),
        predicted=terms,
        printed=terms,
        feasible=False,
        violated=(Constraint.DECODE_KV,),
    )
    return Decision(
        selected=candidate.configuration,
        previous=Configuration.parse("4C"),
        reason=Reason.BEST,
        budget_workers=5,
        candidates=(candidate,),
        considered=1,
        predicted_s=3.0,
    )


# ---- making it ------------------------------------------------------------------------------------------------------


def test_a_new_folder_holds_settings_that_load_again_and_room_for_the_rest(tmp_path):
    resolved = load_settings(None, ["run.seed=5"])
    with RunFolder.create(resolved, tmp_path / "a" / "b") as folder:
        names = {path.name for path in folder.path.iterdir()}
    assert names == {
        "config.resolved.toml",
        "config.resolved.json",
        "events.jsonl",
        "decisions.jsonl",
        "trajectories.jsonl",
        "metrics.jsonl",
        "table.jsonl",
        "requests.jsonl",
        "loads.jsonl",
        "phases.jsonl",
        "checkpoints",
        "weights",
    }
    assert load_settings(folder.path / "config.resolved.toml").settings == resolved.settings
    assert "seed = 5  # --set" in (folder.path / "config.resolved.toml").read_text()
    stored = json.loads((folder.path / "config.resolved.json").read_text())
    assert stored["settings"]["run"]["seed"] == 5
    assert stored["origins"]["run.seed"] == "--set"
    assert tomllib.loads((folder.path / "config.resolved.toml").read_text()) == stored["settings"]


def test_a_folder_that_is_not_empty_is_refused_and_left_as_it_was(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(CommandError, match="exists and is not empty; choose another --run-dir") as caught:
        RunFolder.create(load_settings(), tmp_path)
    assert caught.value.exit_code is ExitCode.CONFIG
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandError, match="cannot be made"):
        RunFolder.create(load_settings(), tmp_path / "file")
    with pytest.raises(CommandError, match=r"run\.dir = .*: cannot be written"):
        RunFolder.create(load_settings(None, [f"run.dir={tmp_path / 'file'}"]))
    with pytest.raises(CommandError, match="cannot be"):
        RunFolder.create(load_settings(None, [f"run.dir={tmp_path / 'file' / 'below'}"]))


def test_two_runs_of_one_second_get_two_folders(tmp_path):
    now = datetime(2026, 1, 2, 3, 4, 5)
    made = [run_folder._make_named(tmp_path, now).name for _ in range(3)]
    assert made == ["20260102-030405", "20260102-030405-2", "20260102-030405-3"]


def test_an_earlier_run_is_continued_and_nothing_else_is(tmp_path):
    with RunFolder.create(load_settings(), tmp_path / "run") as folder:
        assert folder.record_decision(decision(), now_s=1.0, trigger="GpusOffered") == 0
    with RunFolder.open(tmp_path / "run") as folder:
        assert folder.record_decision(decision("3P2D"), now_s=2.0, trigger="GpusReclaimed") == 1
    with pytest.raises(CommandError, match="holds no"):
        RunFolder.open(tmp_path)


# ---- what goes into it ----------------------------------------------------------------------------------------------


def test_each_decision_is_kept_with_what_was_measured_later(tmp_path):
    plan = TransitionPlan(
        id=PlanId(3),
        target=Configuration.parse("2P3D"),
        add={WorkerId(4): Role.DECODE},
        stages=(Stage(join={WorkerId(4): Role.DECODE}),),
    )
    with RunFolder.create(load_settings(), tmp_path / "run") as folder:
        first = folder.record_decision(decision(), now_s=1.0, trigger="GpusOffered", plan=plan, borrowed=True)
        folder.record_measured(first, now_s=5.0, step=1, makespan_s=3.3, predicted_s=3.0)
        second = folder.record_decision(decision("4C"), now_s=6.0, trigger="GpusReclaimed")
        folder.record_measured(first, now_s=7.0, step=2, makespan_s=2.9, predicted_s=3.0)
    kept = read_decisions(folder.path / "decisions.jsonl")
    assert [line["number"] for line in kept] == [first, second]
    assert kept[0]["decision"]["selected"] == "2P3D"
    assert kept[0]["decision"]["candidates"][0]["violated"] == ["decode_kv"]
    assert kept[0]["plan"]["add"] == {"4": "decode"}
    assert kept[0]["borrowed"] is True
    assert [line["measured_s"] for line in kept[0]["measured"]] == [3.3, 2.9]
    assert kept[1]["measured"] == []


def test_events_trajectories_steps_and_summary_are_readable_json(tmp_path):
    turn = Turn(prompt=range(3), response=(7, 8), logprobs=(-0.5, -math.inf), spans=(WeightSpan(1, 2),))
    trajectory = Trajectory(
        id=TrajectoryId("t00000001"),
        group=GroupId("g1"),
        task="bisect-000001",
        turns=(turn,),
        reward=0.5,
        dispatch_version=1,
        started_s=0.0,
        finished_s=2.0,
    )
    with RunFolder.create(load_settings(), tmp_path / "run") as folder:
        folder.record_event(GpusOffered(now_s=1.5, gpus=frozenset({GpuId(11), GpuId(9)})))
        folder.record_trajectory(trajectory, step=4)
        folder.record_step(StepRecord(step=1, steps=2, now_s=3.0, reward_mean=0.25))
        folder.write_summary(SUMMARY)
    (event,) = read_lines(folder.path / "events.jsonl")
    assert event == {"event": "GpusOffered", "now_s": 1.5, "gpus": [9, 11], "tenure": "preemptible", "node": ""}
    (kept,) = read_lines(folder.path / "trajectories.jsonl")
    assert (kept["step"], kept["id"], kept["turns"][0]["prompt"]) == (4, "t00000001", [0, 1, 2])
    assert kept["turns"][0]["logprobs"] == [-0.5, "-Infinity"]
    (step,) = read_lines(folder.path / "metrics.jsonl")
    assert step["reward_mean"] == 0.25
    assert json.loads((folder.path / "summary.json").read_text()) == SUMMARY.to_json()
    assert not list(folder.path.glob("*.partial"))


def test_every_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    with RunFolder.create(load_settings(), tmp_path / "run") as folder:
        for number in range(3):
            folder.record_event(GpusReclaimed(now_s=float(number), gpus=frozenset(), deadline_s=9.0))
            assert len(list(read_lines(folder.path / "events.jsonl"))) == number + 1


def test_a_closed_folder_takes_nothing_more(tmp_path):
    with RunFolder.create(load_settings(), tmp_path / "run") as folder:
        pass
    folder.close()
    with pytest.raises(ValueError, match="is closed"):
        folder.record_step(StepRecord(step=1, steps=2, now_s=3.0, reward_mean=0.25))


@FILES
@given(
    values=st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=200)), max_size=5), cut=st.integers(0, 2_000)
)
def test_a_file_torn_at_any_byte_reads_as_whole_lines_and_can_be_continued(tmp_path_factory, values, cut):
    path: Path = tmp_path_factory.mktemp("torn") / "lines.jsonl"
    file = LineFile(path)
    for value in values:
        file.append(value)
    file.close()
    data = path.read_bytes()
    torn = data[: min(cut, len(data))]
    path.write_bytes(torn)
    whole = values[: torn.count(b"\n")]
    assert list(read_lines(path)) == whole
    again = LineFile(path)
    again.append({"after": 1})
    again.close()
    assert list(read_lines(path)) == [*whole, {"after": 1}]


def test_a_long_torn_line_is_dropped_whole(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a":1}\n' + b"x" * 200_000)
    LineFile(path).close()
    assert path.read_bytes() == b'{"a":1}\n'
    path.write_bytes(b"x" * 200_000)
    LineFile(path).close()
    assert path.read_bytes() == b""


def test_a_file_that_does_not_exist_reads_as_empty(tmp_path):
    assert list(read_lines(tmp_path / "none.jsonl")) == []


# ---- encoding -------------------------------------------------------------------------------------------------------


CONFIGURATIONS = st.builds(
    lambda p, d: Configuration(prefill=p, decode=d), st.integers(1, 9), st.integers(1, 9)
) | st.builds(lambda c: Configuration(colocated=c), st.integers(0, 9))
POSITIVE = st.floats(0.001, 1e6)


def values_of(kind: Any) -> st.SearchStrategy:
    """Any value of a type that events are made of, but for NaN, which equals nothing."""
    kind = getattr(kind, "__supertype__", kind)
    origin, args = get_origin(kind), get_args(kind)
    if origin is frozenset:
        return st.frozensets(values_of(args[0]), max_size=3)
    if origin is Mapping:
        return st.dictionaries(values_of(args[0]), values_of(args[1]), max_size=3)
    if type(None) in args:
        return st.none() | values_of(args[0])
    if kind in (WorkloadProfile, PlatformProfile):
        hints = get_type_hints(kind)
        rest = {name: values_of(hint) for name, hint in hints.items() if hint not in (int, float, tuple[float, ...])}
        numbers = {name: POSITIVE for name, hint in hints.items() if hint is float}
        by_turn = {"active_by_turn": st.just((1.0, 0.5)), "context_by_turn": st.just((10.0, 20.5))}
        counts = {"batch": st.integers(1, 99), **by_turn} if kind is WorkloadProfile else {}
        return st.builds(kind, **rest, **numbers, **counts)
    if kind is Configuration:
        return CONFIGURATIONS
    return st.floats(allow_nan=False) if kind is float else st.from_type(kind)


# What an event counts is refused below 0, as is what a profile measures.
COUNTS = {(RolloutBegan, "batch"), (RolloutProgressed, "remaining")}


def events_of(kind: type) -> st.SearchStrategy:
    hints = get_type_hints(kind).items()
    return st.builds(kind, **{n: st.integers(0) if (kind, n) in COUNTS else values_of(hint) for n, hint in hints})


EVENTS = st.sampled_from(list(EVENT_TYPES.values())).flatmap(events_of)


@settings(deadline=None)
@given(EVENTS)
def test_every_event_comes_back_from_its_line(event):
    line = json_line(encode_event(event))
    assert "\n" not in line
    assert decode_event(json.loads(line)) == event


def test_the_numbers_in_keys_are_in_order_and_come_back_as_numbers():
    event = StageApplied(now_s=1.0, plan_id=PlanId(1), stage=0, reported={WorkerId(10): 3, WorkerId(9): 4})
    data = encode_event(event)
    assert list(data["reported"]) == ["9", "10"]
    assert decode_event(data) == event
    assert (
        decode_event(encode_event(GpusOffered(now_s=0.0, gpus=frozenset(), tenure=Tenure.RESERVED))).tenure
        is Tenure.RESERVED
    )


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"event": "Nothing"},
        {"event": "GpusOffered"},
        {"event": "GpusOffered", "now_s": "soon", "gpus": []},
        {"event": "GpusOffered", "now_s": 1.0, "gpus": [], "tenure": "borrowed"},
        {"event": "GpusOffered", "now_s": 1.0, "gpus": 3},
        {"event": "GpusOffered", "now_s": 1.0, "gpus": [], "colour": "red"},
    ],
)
def test_what_is_no_event_is_refused(data):
    with pytest.raises(ValueError, match=r"."):
        decode_event(data)


def test_what_json_cannot_hold_is_refused():
    with pytest.raises(TypeError, match="no JSON for object"):
        encode({"a": object()})
    assert encode([math.nan, math.inf, 1.5, True, None]) == ["NaN", "Infinity", 1.5, True, None]
