"""The whole control plane over simulated ports: nothing lost, the same log for the same seed, policies as named."""

import gc
import json
import logging
import math
import os
import pickle
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pearl_executor.virtual_time import run_virtual
from pearl_rl.cli.app import app
from pearl_rl.errors import ExitCode, SettingsError
from pearl_rl.rollout.serving import ServingLimits
from pearl_rl.simulation.archive import Archive
from pearl_rl.simulation.batch_run import RIGID_SLACK, run_batch
from pearl_rl.simulation.cluster import SimulatedCluster, simulate
from pearl_rl.simulation.experiments.bench import batch_scripts
from pearl_rl.simulation.parameters import load_parameters
from pearl_rl.simulation.policies import serving_limits
from pearl_rl.simulation.scenario import BUNDLED, load_scenario, scenario_from
from pearl_state.configuration import Configuration
from pearl_state.events import RolloutBegan

SMALL = {
    "name": "small",
    "cluster": {"training_gpus": 4, "reserved_rollout_gpus": 4, "max_preemptible_gpus": 0},
    "availability": {"trace": "none"},
    "rollout": {"batch": 16, "group_size": 4},
    "workload": {"max_turns": 6, "max_context_tokens": 8192},
    "run": {"steps": 3},
}


def small(**sections):
    document = {key: dict(value) if isinstance(value, dict) else value for key, value in SMALL.items()}
    for key, value in sections.items():
        document[key] = {**document.get(key, {}), **value} if isinstance(value, dict) else value
    return scenario_from(document)


@pytest.mark.parametrize(
    "policy", ["roll", "rlboost", "bidirl", "pearl", "pearl-disaggregated", "pearl-ungated", "pearl-no-borrowing"]
)
def test_every_policy_makes_its_steps_and_loses_nothing(policy) -> None:
    result = simulate(small(policy={"name": policy}))
    assert len(result.steps) == 3
    assert result.counts.lost_trajectories == 0
    assert result.counts.stale_served == 0
    assert result.counts.failed_calls == 0
    assert all(step.staleness_max <= 1 for step in result.steps)
    assert result.throughput > 0
    modes = {(i.colocated > 0, i.prefill > 0) for i in result.timeline if i.colocated + i.prefill + i.decode}
    if policy in ("roll", "rlboost", "bidirl"):
        assert modes == {(True, False)}
        assert result.counts.mode_switches == 0
    if policy == "pearl-disaggregated":
        assert modes == {(False, True)}
    if policy == "pearl-ungated":
        assert result.counts.borrows > 0
    if policy in ("roll", "rlboost", "pearl-no-borrowing", "pearl-disaggregated"):
        assert result.counts.borrows == 0


def test_the_tokens_of_the_steps_are_those_of_the_scripts() -> None:
    scenario = small()
    result = simulate(scenario)
    cluster = SimulatedCluster(scenario)
    from pearl_rl.simulation.workload import SimulatedTasks

    scripts = [cluster.workload.script(SimulatedTasks().task(i // 4), i) for i in range(16)]
    assert result.steps[0].generated_tokens == sum(script.response_tokens for script in scripts)
    assert result.steps[0].trained_tokens == sum(script.total_tokens for script in scripts)
    assert result.engines.generated_tokens >= sum(step.generated_tokens for step in result.steps)


def test_throughput_is_generated_and_trained_tokens_over_time() -> None:
    result = simulate(small())
    tokens = sum(step.generated_tokens + step.trained_tokens for step in result.steps)
    assert result.throughput == pytest.approx(tokens / sum(step.duration_s for step in result.steps))
    assert sum(step.duration_s for step in result.steps) == pytest.approx(result.steps[-1].now_s)


def test_more_workers_never_make_a_batch_slower_by_much() -> None:
    few = simulate(small(cluster={"reserved_rollout_gpus": 2}, policy={"name": "roll"}))
    many = simulate(small(cluster={"reserved_rollout_gpus": 16}, policy={"name": "roll"}))
    assert many.rollout_s < few.rollout_s


def test_borrowed_gpus_speed_up_a_pool_that_is_too_small() -> None:
    heavy = {
        "workload": {"response_scale": 20.0, "tool_scale": 0.05, "max_context_tokens": 32768},
        "rollout": {"batch": 64},
        "cluster": {"training_gpus": 16, "reserved_rollout_gpus": 2},
    }
    alone = simulate(small(policy={"name": "roll"}, **heavy))
    borrowing = simulate(small(policy={"name": "bidirl"}, **heavy))
    assert borrowing.counts.borrows > 0
    assert borrowing.counts.returns > 0
    assert borrowing.throughput > 1.2 * alone.throughput


def test_seeding_lends_training_gpus_for_a_window_after_each_update_and_no_longer() -> None:
    """RLBoost: of no window nothing changes; of one that outlasts a step nothing is left that gating would lend."""
    heavy: dict = {
        "workload": {"max_turns": 100, "max_context_tokens": 16_384},
        "rollout": {"batch": 64},
        "cluster": {"training_gpus": 16, "reserved_rollout_gpus": 2},
    }
    plain, short, long = (
        simulate(small(policy={"name": "rlboost", "seeding_s": window_s}, **heavy)) for window_s in (0.0, 60.0, 1e6)
    )
    ungated = simulate(small(policy={"name": "pearl-colocated", "borrowing": "ungated"}, **heavy))
    assert plain.counts.borrows == 0
    assert short.counts.borrows == short.counts.returns == 3
    assert long.throughput == ungated.throughput
    assert plain.throughput < short.throughput < long.throughput
    # All that overlap workers serve lies within the window; then they leave within the seconds that GPUs take to go.
    starts = [0.0, *(step.now_s for step in short.steps)]
    spans = [(interval.at_s, following.at_s) for interval, following in pairwise(short.timeline) if interval.borrowed]
    assert spans
    for at_s, end_s in spans:
        assert end_s - max(start for start in starts if start <= at_s) < 60.0 + 5.0
    assert short.counts.lost_trajectories == short.counts.stale_served == 0


def test_rolls_trajectories_stay_with_their_workers_and_others_are_balanced() -> None:
    limits = {
        name: serving_limits(small(policy={"name": name}), binds=True)
        for name in ("roll", "roll-large", "rlboost", "pearl")
    }
    assert limits["roll"] == limits["roll-large"]
    assert limits["roll"].affinity_slack == math.inf
    assert limits["rlboost"] == limits["pearl"] == ServingLimits()
    unbound = serving_limits(small(policy={"name": "roll"}), binds=False)
    assert ServingLimits().affinity_slack < unbound.affinity_slack < math.inf
    cluster = SimulatedCluster(small(rollout={"batch": 24}, workload={"max_turns": 100, "max_context_tokens": 16_384}))
    scripts = batch_scripts(cluster, 1)[0]
    moved = {
        rigid: run_batch(scripts, Configuration.parse("4C"), cluster.worker_model(), rigid=rigid).moved_tokens
        for rigid in (None, RIGID_SLACK, math.inf)
    }
    assert moved[None] > moved[RIGID_SLACK] > moved[math.inf] == 0


def test_thresholds_are_taken_together_and_a_mode_is_never_easier_to_change_than_a_ratio() -> None:
    both = small(policy={"ratio_threshold": 0.2, "mode_threshold": 0.3}, run={"steps": 1})
    assert both.policy.thresholds == (0.2, 0.3)
    assert simulate(both).steps
    with pytest.raises(SettingsError, match=r"policy.mode_threshold = 0.01 is below policy.ratio_threshold = 0.05: "):
        small(policy={"mode_threshold": 0.01})


def test_memory_does_not_grow_with_the_length_of_a_run() -> None:
    long = small(
        rollout={"batch": 1, "group_size": 1},
        workload={"max_turns": 1, "max_context_tokens": 2048},
        policy={"name": "pearl", "prior": "roofline"},
        run={"steps": 701},
    )
    cluster, held = SimulatedCluster(long), {}

    def look(event, _state, _effects):
        if isinstance(event, RolloutBegan) and event.step in (301, 701):
            gc.collect()
            held[event.step] = len(gc.get_objects())

    cluster.on_control.append(look)
    result = run_virtual(cluster.run())
    assert len(result.steps) == 701
    # Records of steps and decisions, more than one of each step, are packed after a while.
    assert held[701] - held[301] < 0.25 * 400, f"objects at the beginning of steps: {held}"


@given(st.lists(st.integers(0, 5), max_size=6), st.integers(0, 700))
def test_an_archive_reads_like_the_tuple_of_what_was_put_into_it(pops, count) -> None:
    archive, plain = Archive(), []
    for number in range(count):
        archive.append((number, "x"))
        plain.append((number, "x"))
        if number % 100 < len(pops):
            assert archive.pop() == plain.pop()
    assert archive == plain == list(archive)
    assert len(archive) == len(plain)
    assert archive != [*plain, 1]
    assert archive[-3:] == tuple(plain[-3:])
    for place in (0, len(plain) // 2, -1):
        if plain:
            assert archive[place] == plain[place]
    with pytest.raises(IndexError):
        archive[len(plain)]
    assert pickle.loads(pickle.dumps(archive)) == archive


def test_the_same_seed_gives_the_same_log_byte_for_byte_in_any_process() -> None:
    code = (
        "import json; from pearl_rl.simulation.cluster import simulate;"
        "from pearl_rl.simulation.scenario import load_scenario;"
        "print(json.dumps(simulate(load_scenario('paper-segment2', ['run.duration_s=900'])).to_json()))"
    )

    def log(hash_seed):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert log("1") == log("2")


def test_another_seed_gives_other_trajectories() -> None:
    first, second = simulate(small(run={"seed": 1})), simulate(small(run={"seed": 2}))
    assert first.steps[0].generated_tokens != second.steps[0].generated_tokens


@given(
    batch=st.integers(1, 6),
    gpus=st.integers(1, 5),
    training=st.integers(1, 4),
    policy=st.sampled_from(["pearl", "pearl-ungated", "rlboost", "bidirl"]),
    staleness=st.integers(0, 2),
    segment=st.sampled_from(["segment1", "segment2", "segment3"]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_scenario_finishes_with_every_trajectory_accounted_for(
    batch, gpus, training, policy, staleness, segment, seed
) -> None:
    scenario = scenario_from(
        {
            "name": "random",
            "cluster": {
                "training_gpus": 2 * training,
                "reserved_rollout_gpus": 2 * gpus,
                "max_preemptible_gpus": 12,
            },
            # An hour of the trace in a minute: GPUs come and go faster than workers start.
            "availability": {"segment": segment, "time_scale": 30.0, "notice_s": 5.0},
            "rollout": {"batch": 4 * batch, "group_size": 4, "max_staleness": staleness},
            "workload": {"max_turns": 5},
            "policy": {"name": policy},
            "run": {"steps": 3, "seed": seed},
        }
    )
    result = simulate(scenario)
    assert len(result.steps) == 3
    assert result.counts.lost_trajectories == 0
    assert result.counts.stale_served == 0
    assert all(step.staleness_max <= staleness for step in result.steps)


def test_a_synthetic_trace_is_the_seed_s_and_gpus_come_and_go_by_it() -> None:
    sets = ["availability.trace=synthetic", "availability.present_s=200", "availability.absent_s=100", "run.steps=1"]
    sets += ["rollout.batch=16", "run.duration_s=2000"]
    first, again = (simulate(load_scenario("paper-segment1", sets)) for _ in range(2))
    assert first.counts.reclaims > 0
    assert json.dumps(first.to_json()) == json.dumps(again.to_json())
    other = simulate(load_scenario("paper-segment1", [*sets, "run.seed=1"]))
    assert [interval.at_s for interval in other.timeline] != [interval.at_s for interval in first.timeline]


@pytest.mark.parametrize("length", ["run.steps=2", "run.duration_s=150"])
def test_progress_rises_to_the_whole_and_changes_nothing(length) -> None:
    scenario = load_scenario("paper-fixed", [length, "rollout.batch=16", "workload.max_turns=5"])
    parts: list[float] = []
    told = simulate(scenario, on_progress=parts.append)
    assert parts == sorted(parts)
    assert (parts[0] < 0.2, parts[-1]) == (True, 1.0)
    assert any(0.3 < part < 0.9 for part in parts)
    assert json.dumps(told.to_json()) == json.dumps(simulate(scenario).to_json())


def test_the_bar_is_for_terminals_and_nothing_of_it_stays(capsys, monkeypatch) -> None:
    sets = ["run.steps=1", "rollout.batch=16", "workload.max_turns=3"]
    words = ["simulate", "paper-fixed", "--json", *(word for text in sets for word in ("--set", text))]
    assert app(words, standalone_mode=False) == ExitCode.OK
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert app(words, standalone_mode=False) == ExitCode.OK
    drawn = capsys.readouterr().err
    assert "0 of 1 simulations: pearl, seed 0" in drawn
    assert drawn.endswith("\r\033[K")


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_scenarios_run(name) -> None:
    smaller = ["cluster.training_gpus=40", "cluster.reserved_rollout_gpus=200", "rollout.batch=480"]
    result = simulate(load_scenario(name, ["run.steps=1", *(smaller if name == "hyperscale" else [])]))
    assert len(result.steps) == 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.batc=3"], "unknown key rollout.batc; the nearest is rollout.batch"),
        (["rollout.batch=63"], "does not divide into groups of 16"),
        (["run.duration_s=-1"], "must be greater than 0"),
        (["policy.name=magic"], "policy.name = magic: must be 'roll'"),
        (["model=qwen9"], "no model 'qwen9' in the catalog"),
        (["tp=3"], "does not divide"),
        (["tp=32"], "does not divide"),
        (["tp=4", "cluster.reserved_rollout_gpus=0", "cluster.max_preemptible_gpus=2"], "hold no worker of tp = 4"),
        (["model=qwen3-235b-a22b"], "use more GPUs a worker"),
        (["availability.segment=segment9"], "has no segment 'segment9'"),
        (["availability.trace=/nowhere.csv"], "cannot read the availability trace"),
        (["availability.trace=/nowhere.csv", "cluster.max_preemptible_gpus=0"], "cannot read the availability trace"),
        (["availability.trace=synthetic", "availability.present_s=1e-6", "availability.absent_s=1e-6"], "changes in"),
        (["parameters=other"], "no such parameter set"),
        (["workload.model=chess"], "no such turn model"),
        (["workload.replay=/nowhere"], "give a run folder"),
        (["policy.name=static-pd"], "needs policy.configuration"),
        (
            ["policy.name=rlboost", "policy.seeding_s=9", "policy.borrowing=off"],
            "policy.seeding_s = 9: nothing is seeded",
        ),
        (
            ["policy.name=rlboost", "policy.seeding_s=9", "rollout.injection=continuous"],
            "no batch begins that could be",
        ),
        (["policy.seeding_s=-1"], "policy.seeding_s"),
        (["policy.name=static-pd", "policy.configuration=3X"], "configuration '3X' is not like '2P3D' or '4C'"),
        (["policy.name=static-pd", "policy.configuration=0C"], "policy.configuration = 0C: has no worker"),
        (["cluster.reserved_rollout_gpus=0", "cluster.max_preemptible_gpus=0"], "hold no worker"),
    ],
)
def test_bad_scenarios_are_one_clear_line(overrides, words, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["simulate", "paper-segment1", *(part for text in overrides for part in ("--set", text))])
    assert ended.value.code in (ExitCode.CONFIG, ExitCode.INFEASIBLE)
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert words in lines[0]


@pytest.mark.parametrize(
    ("rows", "words", "code"),
    [
        ("0,4\n50,2\n20,3", "time goes back", ExitCode.CONFIG),
        ("-5,4", "t_s -5 is negative", ExitCode.CONFIG),
        ("0,-4", "preemptible_gpus", ExitCode.CONFIG),
        ("0,0", "never finishes under policy rlboost", ExitCode.INFEASIBLE),
    ],
)
def test_a_trace_that_is_none_or_never_gives_a_gpu_is_one_clear_line(
    rows, words, code, tmp_path, capsys, monkeypatch
) -> None:
    # As in a shell: without a handler, warnings of a log go to stderr.
    monkeypatch.setattr(logging.root, "handlers", [])
    path = tmp_path / "trace.csv"
    path.write_text(f"t_s,preemptible_gpus\n{rows}\n", encoding="utf-8")
    sets = [f"availability.trace={path}", "availability.segment=", "cluster.reserved_rollout_gpus=0", "run.steps=1"]
    with pytest.raises(SystemExit) as ended:
        app(["simulate", "paper-segment1", "--policy", "rlboost", *(p for text in sets for p in ("--set", text))])
    assert ended.value.code == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert words in lines[0]


def test_an_unknown_scenario_names_the_bundled_ones() -> None:
    with pytest.raises(SettingsError, match="nearest: paper-segment1"):
        load_scenario("paper-segmnt1")


def test_parameters_say_where_they_come_from() -> None:
    for model in ("qwen3-8b", "qwen3-30b-a3b"):
        parameters = load_parameters("paper", model)
        assert all(len(text) >= 7 for text in parameters.origin.values())
    with pytest.raises(SettingsError, match="no such parameter"):
        load_parameters("paper", "qwen3-8b", {"times.nothing": 1.0})


@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3-30b-a3b"])
def test_a_parameter_set_takes_from_its_base_what_it_does_not_set(model) -> None:
    base, edited = load_parameters("paper", model), load_parameters("history-edited", model)
    assert edited.times == base.times
    assert edited.workload["stable_fraction"] > base.workload["stable_fraction"] == 0.0
    assert set(edited.workload) == set(base.workload)


def test_the_command_compares_policies_and_prints_json(capsys) -> None:
    arguments = ["simulate", "paper-fixed", "--policy", "roll,pearl", "--set", "run.steps=1"]
    with pytest.raises(SystemExit) as ended:
        app([*arguments, "--json"])
    assert ended.value.code == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [r["policy"] for r in document["results"]] == ["roll", "pearl"]
    assert all(r["throughput_tokens_per_s"] > 0 for r in document["results"])
    with pytest.raises(SystemExit):
        app(arguments)
    table = capsys.readouterr().out
    assert "roll" in table
    assert "tokens/s" in table
