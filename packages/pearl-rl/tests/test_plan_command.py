"""`pearl-rl plan`: the paper's selections, the shape of its JSON, profiles from files, and what is refused."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pearl_planner.catalog import find_profile
from pearl_rl.cli import app
from pearl_rl.errors import ExitCode

RUNNER = CliRunner()
SETTING = ["--model", "qwen3-8b", "--gpu", "h800", "--tp", "2"]
WORKLOAD = {"batch": 8, "turns": 4, "new_prompt_tokens": 100, "response_tokens": 50, "context_tokens": 400}
PLATFORM = {
    "decode_fixed_s": 0.02,
    "decode_per_sequence_s": 0.001,
    "prefill_per_token_s": 1e-4,
    "kv_bytes_per_token": 1000,
    "transfer_bytes_per_s": 1e9,
}


def plan(*arguments: str) -> tuple[int, str, str]:
    result = RUNNER.invoke(app, ["plan", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def decided(*arguments: str) -> dict:
    code, out, err = plan(*SETTING, *arguments, "--json")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    return json.loads(out)


def refused(*arguments: str, code: int = 2) -> str:
    """The one line of a question that cannot be answered."""
    got, out, err = plan(*arguments)
    assert (got, out) == (code, "")
    assert err.startswith("pearl-rl: ")
    assert err.count("\n") == 1
    return err


def profile_file(folder, workload: object = WORKLOAD, platform: object = PLATFORM) -> str:
    path = folder / "profile.json"
    document = {"workload": workload} | ({} if platform is None else {"platform": platform})
    path.write_text(json.dumps(document))
    return str(path)


# ---- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "selected"),
    [(2, "2C"), (5, "2P3D"), (6, "3P3D"), (8, "3P5D"), (13, "4P9D"), (14, "4P10D"), (16, "4P12D")],
)
def test_the_papers_setting_selects_what_the_paper_selected(workers, selected):
    assert decided("--workers", str(workers))["selected"] == selected


def test_the_json_holds_ranked_candidates_with_terms_reason_and_constraint():
    data = decided("--workers", "5")
    assert data["reason"] == "initial"
    assert data["constraint"] == []
    assert (data["model"], data["gpu"], data["tp"], data["budget_workers"]) == ("qwen3-8b", "h800", 2, 5)
    candidates = data["candidates"]
    assert sorted(c["configuration"] for c in candidates) == ["1P4D", "2P3D", "3P2D", "4P1D", "5C"]
    assert candidates[0]["configuration"] == data["selected"]
    feasible = [c for c in candidates if c["feasible"]]
    assert candidates[: len(feasible)] == feasible
    assert [c["makespan_s"] for c in feasible] == sorted(c["makespan_s"] for c in feasible)
    for candidate in candidates:
        assert candidate["terms"]["total_s"] == candidate["makespan_s"] > 0
        assert candidate["printed_terms"]["total_s"] > 0
        assert candidate["feasible"] is (candidate["violated"] == [])
    assert data["origin"]["workload"].keys() >= {"batch", "turns"}
    assert any("swe-32k" in note for note in data["notes"])


def test_where_a_constraint_decided_it_is_named():
    for printed in ([], ["--printed"]):
        data = decided("--workers", "2", *printed)
        assert (data["selected"], data["constraint"]) == ("2C", ["decode_kv"])


def test_the_current_configuration_is_kept_unless_another_is_better_by_the_threshold():
    assert decided("--workers", "5", "--current", "2P3D")["reason"] == "already_best"
    kept = decided("--workers", "5", "--current", "5C")
    assert (kept["selected"], kept["previous"], kept["reason"]) == ("5C", "5C", "within_hysteresis")
    forced = decided("--workers", "3", "--current", "2P3D")
    assert forced["reason"] == "forced"


def test_people_get_a_ranked_table_and_the_reason():
    code, out, _ = plan(*SETTING, "--workers", "5")
    assert code == 0
    assert "→" in next(line for line in out.splitlines() if "2P3D" in line)
    assert "selected 2P3D for 5 workers" in out
    assert "decode_kv" in out
    assert "overhead" not in out
    explained = plan(*SETTING, "--workers", "5", "--explain")[1]
    assert all(word in explained for word in ("overhead", "environment", "reprefill", "longer path", "shared"))


def test_a_large_budget_is_answered_with_the_best_few():
    data = decided("--workers", "100000")
    assert data["considered"] == 100_000
    assert len(data["candidates"]) < 100
    assert "further candidates are not shown" in plan(*SETTING, "--workers", "100000")[1]


def test_another_gpu_than_the_profiles_is_judged_by_a_roofline_and_says_so():
    data = json.loads(plan("--model", "qwen3-30b-a3b", "--gpu", "h100", "--tp", "2", "--workers", "4", "--json")[1])
    assert any("roofline" in note and "not measured" in note for note in data["notes"])


# ---- profiles from files --------------------------------------------------------------------------------------------


def test_a_profile_file_gives_workload_and_platform(tmp_path):
    data = decided("--workers", "4", "--profile", profile_file(tmp_path))
    assert data["profile"].endswith("profile.json")
    assert data["predicted_s"] < 60


def test_a_profile_file_without_platform_is_judged_by_a_roofline(tmp_path):
    data = decided("--workers", "4", "--profile", profile_file(tmp_path, platform=None))
    assert any("roofline" in note for note in data["notes"])


def test_the_bundled_profile_written_to_a_file_decides_alike(tmp_path):
    bundled = find_profile("swe-32k")

    def with_origins(values) -> dict:
        origins = values["origin"]
        return {k: {"value": v, "origin": origins.get(k, "")} for k, v in values.items() if k != "origin"}

    path = profile_file(tmp_path, with_origins(bundled.workload), with_origins(bundled.platform))
    from_file = decided("--workers", "13", "--profile", path)
    assert from_file["candidates"] == decided("--workers", "13")["candidates"]
    assert from_file["origin"]["workload"]["turns"] == bundled.workload["origin"]["turns"]


@pytest.mark.parametrize(
    ("workload", "platform", "words"),
    [
        ({}, None, "lacks batch, new_prompt_tokens, response_tokens, turns"),
        ({**WORKLOAD, "turns": float("nan")}, None, "WorkloadProfile.turns = nan: must be a finite number"),
        ({**WORKLOAD, "batch": 0}, None, "WorkloadProfile.batch = 0: must be positive"),
        ({**WORKLOAD, "batch": "many"}, None, "batch"),
        ({**WORKLOAD, "turn": 3}, None, "has no field turn; the nearest is turns"),
        ([], None, 'needs an object "workload"'),
        (WORKLOAD, {**PLATFORM, "kv_capacity_bytes": -1}, "PlatformProfile.kv_capacity_bytes = -1: must be at least 0"),
        (WORKLOAD, 3, "PlatformProfile is not an object"),
        (WORKLOAD, {}, "PlatformProfile lacks decode_fixed_s"),
    ],
)
def test_a_bad_profile_is_refused_with_the_field_and_the_rule(tmp_path, workload, platform, words):
    line = refused(*SETTING, "--workers", "4", "--profile", profile_file(tmp_path, workload, platform))
    assert words in line


def test_a_profile_may_say_how_many_are_under_way_at_each_turn_and_how_long_contexts_are_then(tmp_path):
    by_turn = {
        "steady": False,
        "context_tokens": 2000,
        "active_by_turn": {"value": [1, 0.75, 0.25], "origin": "seen"},
        "context_by_turn": [1000, 3000, 4000.5],
    }
    path = profile_file(tmp_path, WORKLOAD | by_turn)
    data = decided("--workers", "5", "--profile", path)
    assert data["origin"]["workload"] == {"active_by_turn": "seen"}
    wrong = profile_file(tmp_path, WORKLOAD | by_turn | {"context_by_turn": [1000]})
    assert "as many as active_by_turn" in refused(*SETTING, "--workers", "5", "--profile", wrong)
    for name, value in (("context_by_turn", 5), ("context_by_turn", ["x"]), ("steady", 1)):
        wrong = profile_file(tmp_path, WORKLOAD | by_turn | {name: value})
        assert f"{name} = " in refused(*SETTING, "--workers", "5", "--profile", wrong)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from([*WORKLOAD, "value", "x"]), inner),
    max_leaves=6,
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.fixed_dictionaries({key: JSON | st.just(value) for key, value in WORKLOAD.items()}), st.none() | JSON)
def test_any_profile_is_an_answer_or_one_line(tmp_path, workload, platform):
    code, out, err = plan(*SETTING, "--workers", "3", "--profile", profile_file(tmp_path, workload, platform), "--json")
    assert code in (0, 2, 3)
    if code == 2:
        assert out == ""
        assert err.count("\n") == 1


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "qwen3-8b", "--gpu", "h800", "--tp", "3", "--workers", "5"], "tp = 3 does not divide"),
        (["--model", "no-such-model", "--gpu", "h800", "--tp", "2", "--workers", "5"], "no model 'no-such-model'"),
        (["--model", "qwen3-8b", "--gpu", "no-such-gpu", "--tp", "2", "--workers", "5"], "no GPU 'no-such-gpu'"),
        ([*SETTING, "--workers", "-4"], "--workers -4: must be from 1"),
        ([*SETTING, "--workers", "0"], "--workers 0: must be from 1"),
        ([*SETTING, "--workers", "5", "--current", "3P"], "configuration '3P' is not like"),
        ([*SETTING, "--workers", "5", "--profile", "none"], "no profile 'none'"),
        ([*SETTING, "--workers", "5", "--profile", "none.json"], "none.json: cannot be read"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused_in_one_line(arguments, words):
    assert words in refused(*arguments)


def test_a_model_that_does_not_fit_is_infeasible():
    line = refused(
        "--model", "qwen3-235b-a22b", "--gpu", "h800", "--tp", "1", "--workers", "4", code=ExitCode.INFEASIBLE
    )
    assert "does not fit on 1 x" in line
    assert "it needs at least" in line
