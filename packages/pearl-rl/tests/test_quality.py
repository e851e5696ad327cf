"""The oracle takes the best of all that it simulates, and the planner is judged by it."""

import itertools

import pytest

from pearl_rl.errors import SettingsError
from pearl_rl.simulation import prior
from pearl_rl.simulation.batch_run import run_batch
from pearl_rl.simulation.cluster import SimulatedCluster, simulate
from pearl_rl.simulation.experiments.bench import Bench, batch_scripts, variant
from pearl_rl.simulation.experiments.quality import QualityJob, draw, judge, summarize, telemetry
from pearl_rl.simulation.oracle import best, configurations, first_batches, simulated_makespans
from pearl_state.configuration import Configuration

SMALL = 23
"""Seed of a case that takes half a second."""
BASE = {
    "cluster": {"training_gpus": 2, "reserved_rollout_gpus": 4, "max_preemptible_gpus": 2},
    "availability": {"trace": "none"},
    "rollout": {"batch": 8, "group_size": 4},
    "workload": {"max_turns": 4},
    "run": {"steps": 2},
}


def test_the_candidates_of_a_budget_are_all_of_both_modes() -> None:
    assert [str(c) for c in configurations(4)] == ["4C", "1P3D", "2P2D", "3P1D"]
    assert configurations(1) == [Configuration(colocated=1)]
    with pytest.raises(ValueError, match="needs at least 1"):
        configurations(0)


def test_of_equally_fast_configurations_the_first_is_best() -> None:
    one, two = configurations(2)
    assert best({one: 3.0, two: 2.0}) == two
    assert best({one: 2.0, two: 2.0}) == one


def test_the_same_seed_draws_the_same_case_and_others_differ() -> None:
    assert draw(SMALL) == draw(SMALL)
    cases = [draw(seed) for seed in range(40)]
    assert len({case.scenario.model_dump_json() for case in cases}) == 40
    assert all(Configuration.parse(case.before).workers == case.workers for case in cases)
    assert {case.workers for case in cases} == set(range(2, 9))


def test_a_case_is_judged_by_what_was_simulated() -> None:
    case = draw(SMALL)
    result = Bench().result(QualityJob(case))
    assert list(result.seen_s) == [str(c) for c in configurations(case.workers)]
    mean = {c: (result.seen_s[c] + 2 * result.later_s[c]) / 3 for c in result.seen_s}
    for score in result.scores.values():
        assert score.regret == pytest.approx(mean[score.chosen] / mean[score.oracle] - 1)
        assert score.regret_of_all == pytest.approx(mean[score.chosen] / min(mean.values()) - 1)
        assert set(score.predicted_s) == set(mean)
    # The colocated step is known, so that its makespan is met; the printed equations miss where S is no mean.
    colocated = f"{case.workers}C"
    assert result.scores["extended"].predicted_s[colocated] == pytest.approx(result.seen_s[colocated], rel=0.1)
    rows = summarize([result])
    assert [row.model for row in rows][:2] == ["extended", "printed"]
    assert rows[0].wape_all < 0.2 < rows[1].wape_all
    with pytest.raises(ValueError, match="no case"):
        summarize([])


def test_a_batch_tells_what_caches_held_and_what_engines_measured() -> None:
    case = draw(SMALL)
    cluster = SimulatedCluster(case.scenario)
    (scripts,) = batch_scripts(cluster, 1)
    one, several = Configuration(1, 3), Configuration(3, 1)
    outcomes = {c: run_batch(scripts, c, cluster.worker_model()) for c in (one, several)}
    for outcome in outcomes.values():
        assert [len(found) for found in outcome.cached_by_turn] == [len(script.turns) for script in scripts]
        assert sum(engine.prefill_tokens for engine in outcome.samples) == outcome.prefill_tokens
        assert 0 <= outcome.moved_tokens <= outcome.kept_tokens
    # A single prefill worker has nobody to lose a trajectory to.
    assert outcomes[one].moved_tokens == 0
    assert outcomes[several].moved_tokens > 0
    workload, platform = telemetry(cluster, scripts, several, outcomes[several])
    assert workload.pair_moved_fraction > 0
    assert workload.batch == len(scripts)
    assert platform.origin["decode_fixed_s"].startswith("telemetry")


def test_more_simulated_batches_are_averaged() -> None:
    case = draw(SMALL)
    cluster = SimulatedCluster(case.scenario)
    batches = batch_scripts(cluster, 2)
    candidate = Configuration(colocated=2)
    alone = [simulated_makespans([batch], [candidate], cluster.worker_model())[candidate] for batch in batches]
    both = simulated_makespans(batches, [candidate], cluster.worker_model())[candidate]
    assert both == pytest.approx(sum(alone) / 2)
    assert not any(a == b for a, b in itertools.pairwise(alone))


def test_a_case_is_the_same_one_with_the_engines_of_another_parameter_set() -> None:
    usual, other = draw(SMALL), draw(SMALL, "roll-sglang")
    assert usual.scenario.parameters == "paper"
    assert other.scenario.parameters == "roll-sglang"
    assert other.scenario.model_copy(update={"parameters": "paper"}) == usual.scenario
    assert (other.workers, other.before) == (usual.workers, usual.before)


def test_judging_a_case_twice_gives_the_same() -> None:
    assert judge(draw(SMALL)) == judge(draw(SMALL))


def test_the_oracle_s_policy_takes_the_fastest_that_the_planner_deems_feasible() -> None:
    cluster = SimulatedCluster(variant(BASE, policy={"name": "oracle"}))
    policy = cluster.setup.policy
    workload, platform = prior.workload_prior(cluster.workload, 8, 4), None
    platform = prior.platform_prior(cluster, workload)
    decision = policy.decide(workload=workload, platform=platform, budget_workers=3)
    batches = first_batches(cluster.workload, 8, 4)
    stable = cluster.workload.stable_fraction
    simulated = simulated_makespans(batches, configurations(3), cluster.worker_model(), stable_fraction=stable)
    assert {c.configuration: c.makespan_s for c in decision.candidates} == dict(simulated)
    feasible = {c.configuration: c.makespan_s for c in decision.candidates if c.feasible}
    assert decision.selected == best(feasible)
    assert decision.predicted_s == min(feasible.values())
    # A person's choice stays a person's, and what runs stays where a switch would not pay.
    slowest = max(feasible, key=feasible.__getitem__)
    asked = {"workload": workload, "platform": platform, "budget_workers": 3}
    assert policy.decide(**asked, pinned=slowest).selected == slowest
    kept = policy.decide(**asked, current=slowest, remaining_fraction=0.0, steps_ahead=0.0)
    assert kept.selected == slowest


def test_a_run_under_the_oracle_trains_every_step() -> None:
    result = simulate(variant(BASE, policy={"name": "oracle"}))
    assert len(result.steps) == 2
    assert result.decisions


def test_a_cluster_of_too_many_configurations_is_refused_in_one_line() -> None:
    with pytest.raises(SettingsError, match=r"policy oracle simulates every configuration: \d+ workers, at most 24"):
        SimulatedCluster(variant(BASE, policy={"name": "oracle"}, cluster={"max_preemptible_gpus": 200}))
