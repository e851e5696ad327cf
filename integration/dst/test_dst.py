"""The explorer itself: what it plays is repeatable, what it finds is small, and every kind of happening occurs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dst.explore import describe, failure
from dst.script import _DRAWS, Op, Script, draw, shrink
from dst.world import Life, play
from pearl_state.decision import Reason


def test_the_same_seed_gives_the_same_events() -> None:
    for seed in (3, 14, 15):
        assert play(draw(seed)).digest == play(draw(seed)).digest


def test_a_script_survives_its_json() -> None:
    for seed in range(50):
        assert Script.from_json(draw(seed).to_json()) == replace(
            draw(seed), ops=Script.from_json(draw(seed).to_json()).ops
        )
    script = draw(7)
    assert Script.from_json(Script.from_json(script.to_json()).to_json()) == Script.from_json(script.to_json())


def test_every_kind_of_happening_is_drawn() -> None:
    assert {op.name for seed in range(400) for op in draw(seed).ops} == set(_DRAWS)
    assert all(hasattr(Life, f"op_{name}") for name in _DRAWS)


def test_a_failing_script_shrinks_to_what_makes_it_fail() -> None:
    script = draw(21)
    script = replace(script, ops=(*script.ops, Op(3.3, "crash", (2, True)), *script.ops))
    small = shrink(script, lambda candidate: any(op.name == "crash" and op.args[0] == 2 for op in candidate.ops))
    assert [op.name for op in small.ops] == ["crash"]
    assert small.steps == 1


def test_a_failure_is_told_with_the_seed_that_reproduces_it(monkeypatch) -> None:
    def broken(self, *args):
        raise RuntimeError("planted")

    monkeypatch.setattr(Life, "op_offer", broken)
    seed = next(seed for seed in range(100) if any(op.name == "offer" for op in draw(seed).ops))
    error = failure(draw(seed))
    assert error is not None
    told = describe(draw(seed), error)
    assert f"--seed {seed}" in told
    assert "planted" in told


def test_scripts_reach_all_events_and_effects_that_a_run_without_people_and_refits_has() -> None:
    seen = set()
    for seed in range(60):
        if failure(draw(seed)) is None:
            seen |= play(draw(seed)).seen
    assert seen >= {
        "GpusOffered",
        "GpusReclaimed",
        "GroupPrepared",
        "GroupFailed",
        "StageApplied",
        "WorkerFailed",
        "WorkersCleaned",
        "WeightsReported",
        "TrainingReleased",
        "TrainingResumed",
        "PrepareGroup",
        "CancelGroup",
        "ApplyStage",
        "SyncWeights",
        "CleanWorkers",
        "ReleaseTraining",
        "ResumeTraining",
        "GrantTraining",
        "ReturnGpus",
        "LoadForecast",
        "ReadinessMeasured",
        "EvaluationFinished",
        Reason.FORECAST,
    }


FOUND = [json.loads(line) for line in Path(__file__).with_name("found.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("found", FOUND, ids=lambda found: found["what"].replace(" ", "_"))
def test_what_broke_once_holds(found) -> None:
    play(Script.from_json(json.dumps(found["script"])))
