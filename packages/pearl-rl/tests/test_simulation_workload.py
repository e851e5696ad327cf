"""Workloads: marginals and dependence are reproduced, scripts fit their limits, recordings are replayed exactly."""

import gzip
import json
import math
import random
from statistics import fmean, median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl_rl.errors import CommandError, SettingsError
from pearl_rl.rollout.environments.protocol import Task
from pearl_rl.run_folder import RunFolder
from pearl_rl.simulation.batch_run import WorkerModel, run_batch
from pearl_rl.simulation.cluster import SimulatedCluster, simulate
from pearl_rl.simulation.parameters import load_parameters
from pearl_rl.simulation.scenario import load_scenario, scenario_from
from pearl_rl.simulation.sources import make_workload, run_scripts, session_scripts
from pearl_rl.simulation.turn_model import (
    BUNDLED,
    Marginal,
    _normals,
    bundled_turn_model,
    fit_turn_model,
    turn_model_from_json,
    turn_model_to_json,
)
from pearl_rl.simulation.workload import ModelWorkload, ScriptedWorkload, WorkloadOptions, fitted
from pearl_state.configuration import Configuration


def task(number=0) -> Task:
    return Task(id=f"{number:06d}", seed=number, payload={})


def draw(name, count):
    model = bundled_turn_model(name)
    return [model.trajectory(random.Random(f"t{i}"), random.Random(f"o{i}")) for i in range(count)]


@pytest.mark.parametrize(
    ("name", "turns", "response", "prompt"),
    # Medians and means of the tables that the models were fitted to.
    [("swe", (16, 21.2), (77, 119), (90, 606)), ("webshop", (7, 6.9), (8, 15), (6, 43))],
)
def test_a_bundled_model_draws_what_it_was_fitted_to(name, turns, response, prompt) -> None:
    drawn = draw(name, 1500)
    counts = [count for _, count, _ in drawn]
    assert counts == [len(t) for _, _, t in drawn]
    responses = [r for _, _, t in drawn for _, r, _ in t]
    prompts = [p for _, _, t in drawn for p, _, _ in t[1:]]
    assert median(counts) == pytest.approx(turns[0], rel=0.12)
    assert fmean(counts) == pytest.approx(turns[1], rel=0.12)
    assert median(responses) == pytest.approx(response[0], rel=0.25)
    assert fmean(responses) == pytest.approx(response[1], rel=0.25)
    assert fmean(prompts) == pytest.approx(prompt[1], rel=0.25)


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_models_say_what_they_rest_on_and_survive_json(name) -> None:
    model = bundled_turn_model(name)
    assert model.origin
    assert turn_model_from_json(json.loads(json.dumps(turn_model_to_json(model)))) == model


def test_a_fit_finds_the_dependence_that_its_sample_has() -> None:
    source = bundled_turn_model("swe")
    sample = []
    for i in range(1200):
        first, _, turns = source.trajectory(random.Random(f"t{i}"), random.Random(f"o{i}"))
        sample.append([(first if k == 0 else p, r, tool) for k, (p, r, tool) in enumerate(turns)])
    found = fit_turn_model("again", sample)
    for name in ("response_share", "prompt_share", "tool_share"):
        assert getattr(found, name) == pytest.approx(getattr(source, name), abs=0.08), name
    for name in ("turns_response", "turns_prompt"):
        assert getattr(found, name) == pytest.approx(getattr(source, name), abs=0.12), name
    assert found.response_prompt == pytest.approx(source.response_prompt, abs=0.1)


def test_long_trajectories_have_shorter_turns_and_a_task_is_shared() -> None:
    drawn = draw("swe", 1500)
    long_ = [fmean(r for _, r, _ in t) for _, _, t in drawn if len(t) > 35]
    short = [fmean(r for _, r, _ in t) for _, _, t in drawn if len(t) < 15]
    assert fmean(long_) < fmean(short)
    model = bundled_turn_model("swe")
    firsts = {model.trajectory(random.Random("same"), random.Random(i))[0] for i in range(8)}
    assert len(firsts) == 1


def test_normals_are_those_of_the_standard_library() -> None:
    ours, theirs = _normals(random.Random(7)), random.Random(7)
    assert [next(ours) for _ in range(101)] == [theirs.gauss(0.0, 1.0) for _ in range(101)]


@pytest.mark.parametrize("most", [1, 3, 1000])
def test_a_list_that_is_cut_short_changes_nothing_that_is_drawn_after_it(most) -> None:
    model = bundled_turn_model("webshop")
    for seed in range(50):
        whole, part = random.Random(seed), random.Random(seed)
        first, count, turns = model.trajectory(random.Random("same"), whole)
        assert model.trajectory(random.Random("same"), part, most) == (first, count, turns[:most])
        assert whole.random() == part.random()


@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=50), st.floats(-5, 5))
def test_a_marginal_stays_within_its_sample(sample, score) -> None:
    marginal = Marginal.of([sample], least=0.01)
    assert min(sample) * 0.99 - 1e-4 <= marginal.at(score) <= max(sample) * 1.01 + 1e-4


@given(
    limit=st.integers(2, 5000),
    turns=st.lists(st.tuples(st.integers(0, 900), st.integers(0, 900), st.floats(0, 9)), min_size=1, max_size=30),
    retained=st.floats(0, 1),
)
@settings(max_examples=150)
def test_a_script_never_exceeds_its_context(limit, turns, retained) -> None:
    script = fitted(turns, WorkloadOptions(max_context_tokens=limit, retained_fraction=retained))
    context = 0
    for turn in script.turns:
        context += turn.prompt_tokens
        assert turn.response_tokens >= 1
        assert context + turn.response_tokens <= limit
        assert turn.retained_tokens <= turn.response_tokens
        context += turn.retained_tokens


def test_the_same_sample_has_the_same_script_and_scales_scale_it() -> None:
    def scripts(**options):
        workload = ModelWorkload(bundled_turn_model("swe"), WorkloadOptions(max_context_tokens=10**9, **options), 7)
        return [workload.script(task(i // 16), i) for i in range(200)]

    plain, again, longer = scripts(), scripts(), scripts(turns_scale=3.0, response_scale=2.0, tool_scale=0.5)
    assert plain == again
    assert fmean(len(s.turns) for s in longer) == pytest.approx(3 * fmean(len(s.turns) for s in plain), rel=0.02)
    tools = [t.tool_s for s in plain for t in s.turns]
    assert fmean(t.tool_s for s in longer for t in s.turns) == pytest.approx(0.5 * fmean(tools), rel=0.05)


def test_a_wider_spread_makes_the_tail_longer_and_keeps_the_median() -> None:
    def counts(spread):
        options = WorkloadOptions(max_context_tokens=10**9, turns_spread=spread)
        workload = ModelWorkload(bundled_turn_model("swe"), options, 1)
        return [len(workload.script(task(i), i).turns) for i in range(600)]

    narrow, wide = counts(1.0), counts(1.5)
    assert median(wide) == pytest.approx(median(narrow), rel=0.1)
    assert max(wide) > 1.5 * max(narrow)


SESSIONS = """trace,turn,episode,kind,in_tokens,miss_tokens,out_tokens,gap_s,api_s
1,0,0,u,1000,1000,50,0,7
1,1,0,t,1300,300,60,12,9
1,2,1,t,1200,100,70,900,9
2,0,0,u,500,500,20,,1
"""


@pytest.mark.parametrize("packed", [False, True])
def test_sessions_are_replayed_turn_by_turn_with_capped_gaps(tmp_path, packed) -> None:
    path = tmp_path / ("weka.csv.gz" if packed else "weka.csv")
    if packed:
        with gzip.open(path, "wt", encoding="utf-8") as file:
            file.write(SESSIONS)
    else:
        path.write_text(SESSIONS, encoding="utf-8")
    first, second = session_scripts(path, WorkloadOptions())
    assert [(t.prompt_tokens, t.response_tokens, t.tool_s) for t in first.turns] == [
        (1000, 50, 12.0),
        (250, 60, 60.0),
        (1, 70, 0.0),
    ]
    assert [(t.prompt_tokens, t.response_tokens) for t in second.turns] == [(500, 20)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no trajectory"),
        ("x,y\n1,2\n", ":2: belongs to no trace of sessions: it has no column trace"),
        (SESSIONS + "3,0,0,u,10\n", ":6: has no out_tokens"),
        (SESSIONS.replace("1300", "-5"), ":3: in_tokens = -5: must be a whole number from 0 to 1000000000"),
        (SESSIONS.replace("1300", "1e3"), ":3: in_tokens = 1e3: must be a whole number"),
        (SESSIONS.replace("1300", "9" * 5000), ":3: in_tokens = 9999.*…: must be a whole number"),
        (SESSIONS.replace("900", "nan"), ":4: gap_s = nan: must be seconds from 0 on, or empty"),
        (SESSIONS.replace("900", "inf"), ":4: gap_s = inf: must be seconds"),
        (SESSIONS.replace("900", "-9"), ":4: gap_s = -9: must be seconds"),
        ("\xff", "cannot be read"),
    ],
)
def test_what_is_no_trace_of_sessions_is_one_line_that_names_it(tmp_path, text, said) -> None:
    path = tmp_path / "weka.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SettingsError, match=said) as refused:
        make_workload(scenario_from({"workload": {"replay": str(path)}}), load_parameters("paper", "qwen3-8b"))
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_sessions_of_a_spreadsheet_are_read_too(tmp_path, start) -> None:
    path = tmp_path / "weka.csv"
    path.write_bytes((start + SESSIONS.replace("\n", "\r\n")).encode())
    assert len(list(session_scripts(path, WorkloadOptions()))) == 2


def changed_model(**changes) -> str:
    return json.dumps({**turn_model_to_json(bundled_turn_model("webshop")), **changes})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no turn model"),
        ("[]", "has no name"),
        ("3", "has no name"),
        ("[" * 100_000, "is no turn model"),
        (changed_model(wins=1), "has an unknown wins"),
        (changed_model(turns=[1.0]), "turns: has 1 values; it needs 31"),
        (changed_model(turns=3), "turns: "),
        (changed_model(response=[2.0] * 30 + [1.0]), r"response: 1 follows 2; values must lie in \(0, 1e\+09\]"),
        (changed_model(response=[math.nan] * 31), "response: nan follows 0"),
        (changed_model(tool_s=[1e308] * 31), r"tool_s: 1e\+308 follows 0"),
        (changed_model(task_share=None), "task_share: "),
        (changed_model(task_share=math.nan), r"task_share = nan: must be in \[0, 1\]"),
        (changed_model(prompt_tool=-2), r"prompt_tool = -2\.0: must be in \[-1, 1\]"),
    ],
)
def test_what_is_no_turn_model_is_one_line_that_names_it(tmp_path, text, said) -> None:
    path = tmp_path / "model.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError, match=said) as refused:
        make_workload(scenario_from({"workload": {"model": str(path)}}), load_parameters("paper", "qwen3-8b"))
    assert str(path) in str(refused.value)


def test_a_recorded_simulation_is_replayed_exactly(tmp_path) -> None:
    sets = ["run.steps=1", "rollout.batch=16", "workload.max_turns=6", "workload.max_context_tokens=8192"]
    scenario = load_scenario("paper-fixed", sets)
    with RunFolder.create_simulation(scenario.model_dump(), tmp_path / "run") as folder:
        recorded = simulate(scenario, folder=folder)
    replayed = simulate(load_scenario("paper-fixed", [*sets, f"workload.replay={tmp_path / 'run'}"]))
    assert [(s.rollout_s, s.generated_tokens, s.trained_tokens) for s in replayed.steps] == [
        (s.rollout_s, s.generated_tokens, s.trained_tokens) for s in recorded.steps
    ]
    assert replayed.engines == recorded.engines


def test_a_recorded_run_is_replayed_in_the_order_of_its_dispatch(tmp_path) -> None:
    lines = [
        {
            "id": f"t{i:08d}",
            "group": "g0",
            "reward": i,
            "turns": [{"prompt": [1] * (10 + i), "response": [2, 3], "environment_s": 0.5}],
        }
        for i in (1, 0)
    ]
    (tmp_path / "trajectories.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    scripts = list(run_scripts(tmp_path, WorkloadOptions()))
    assert [s.turns[0].prompt_tokens for s in scripts] == [10, 11]
    assert [s.reward for s in scripts] == [0.0, 1.0]
    workload = ScriptedWorkload(scripts)
    assert workload.script(task(), 3) == scripts[1]
    scenario = scenario_from(
        {
            "workload": {"replay": str(tmp_path)},
            "rollout": {"batch": 4, "group_size": 2},
            "availability": {"trace": "none"},
            "run": {"steps": 2},
        }
    )
    result = simulate(scenario)
    assert result.steps[0].generated_tokens == 8
    with pytest.raises(SettingsError, match="has no trajectories"):
        list(run_scripts(tmp_path / "none", WorkloadOptions()))


@pytest.mark.parametrize("tokens", [-5, 2.5, "3"])
def test_a_recorded_turn_of_which_no_tokens_can_stay_is_one_line(tmp_path, tokens) -> None:
    turn = {"prompt": 9, "response": 4, "environment_s": 0.5}
    line = {"id": "t0", "group": "g0", "reward": 1.0, "turns": [turn | {"retained_tokens": 3}, turn]}
    (tmp_path / "trajectories.jsonl").write_text(json.dumps(line) + "\n")
    (script,) = run_scripts(tmp_path, WorkloadOptions())
    assert [each.retained_tokens for each in script.turns] == [3, 4]
    line["turns"][1] = turn | {"retained_tokens": tokens}
    (tmp_path / "trajectories.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(CommandError, match=f"retained_tokens = {tokens}"):
        list(run_scripts(tmp_path, WorkloadOptions()))


def model_of(scenario) -> tuple[WorkerModel, SimulatedCluster]:
    cluster = SimulatedCluster(scenario)
    return cluster.worker_model(), cluster


@pytest.mark.parametrize("configuration", ["4C", "2P2D"])
def test_a_batch_alone_takes_what_it_takes_under_the_whole_control_plane(configuration) -> None:
    scenario = scenario_from(
        {
            "cluster": {"reserved_rollout_gpus": 8, "max_preemptible_gpus": 0},
            "availability": {"trace": "none"},
            "policy": {"name": "static-pd", "configuration": configuration},
            "run": {"steps": 1},
        }
    )
    model, cluster = model_of(scenario)
    scripts = [cluster.workload.script(task(i // 16), i) for i in range(64)]
    alone = run_batch(
        scripts, Configuration.parse(configuration), model, stable_fraction=cluster.workload.stable_fraction
    )
    whole = simulate(scenario)
    # The router keeps trajectories at home a little longer: its slack counts requests a GPU, not a worker.
    assert alone.makespan_s == pytest.approx(whole.rollout_s, rel=0.08)
    assert alone.generated_tokens == sum(s.response_tokens for s in scripts)


def test_a_batch_needs_workers_and_trajectories() -> None:
    model, cluster = model_of(scenario_from({}))
    with pytest.raises(ValueError, match="at least one worker"):
        run_batch([cluster.workload.script(task(), 0)], Configuration(), model)
    with pytest.raises(ValueError, match="at least one trajectory"):
        run_batch([], Configuration(colocated=1), model)
