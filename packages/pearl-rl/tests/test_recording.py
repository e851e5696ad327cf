"""A simulation writes the records of a run: events, decisions, trajectories, steps, the table's changes, requests."""

import json

import pytest

from pearl_rl.encoding import decode_event
from pearl_rl.errors import CommandError
from pearl_rl.run_folder import RunFolder, read_decisions, read_lines
from pearl_rl.simulation.cluster import simulate
from pearl_rl.simulation.scenario import load_scenario
from pearl_state.events import RolloutBegan

SMALL = ("rollout.batch=16", "rollout.group_size=4", "run.steps=2", "workload.max_turns=3")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    scenario = load_scenario("webshop", SMALL)
    path = tmp_path_factory.mktemp("simulated") / "run"
    with RunFolder.create_simulation(scenario.model_dump(), path) as folder:
        result = simulate(scenario, folder=folder)
    return path, result


def test_every_record_of_a_run_is_there(recorded):
    path, result = recorded
    events = [decode_event(line) for line in read_lines(path / "events.jsonl")]
    assert sum(isinstance(event, RolloutBegan) for event in events) >= len(result.steps) == 2
    assert len(read_decisions(path / "decisions.jsonl")) == len(result.decisions)
    steps = list(read_lines(path / "metrics.jsonl"))
    assert [step["generated_tokens"] for step in steps] == [step.generated_tokens for step in result.steps]
    assert json.loads((path / "scenario.json").read_text())["rollout"]["batch"] == 16


def test_recorded_tokens_are_those_of_the_steps(recorded):
    path, result = recorded
    trajectories = list(read_lines(path / "trajectories.jsonl"))
    for number, step in enumerate(result.steps, start=1):
        turns = [turn for line in trajectories if line["step"] == number for turn in line["turns"]]
        assert sum(turn["response"] for turn in turns) == step.generated_tokens


def test_the_table_log_gives_the_active_workers_of_the_timeline(recorded):
    path, result = recorded
    rows = {}
    for line in read_lines(path / "table.jsonl"):
        rows.update(line["rows"])
        for id_ in line["gone"]:
            del rows[str(id_)]
    serving = [row for row in rows.values() if row["lifecycle"] == "active" and row["role"] != "training"]
    last = result.timeline[-1]
    assert len(serving) == last.prefill + last.decode + last.colocated


def test_every_request_names_its_worker_and_its_end(recorded):
    path, result = recorded
    requests = list(read_lines(path / "requests.jsonl"))
    assert len(requests) >= result.counts.turns > 0
    assert {request["finish"] for request in requests} <= {"stop", "length", "interrupted", "CancelledError"}
    for request in requests:
        assert request["finished_s"] >= request["started_s"] >= 0
        assert request["cached_tokens"] <= request["prompt_tokens"]


def test_recording_changes_nothing(recorded):
    _, result = recorded
    assert simulate(load_scenario("webshop", SMALL)).to_json() == result.to_json()


def test_a_folder_that_holds_something_is_refused(tmp_path):
    (tmp_path / "other").write_text("mine")
    with pytest.raises(CommandError, match="not empty"):
        RunFolder.create_simulation({}, tmp_path)
