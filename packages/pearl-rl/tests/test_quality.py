"""The oracle takes the best of all that it simulates, and the planner is judged by it."""

import itertools

import pytest

from pearl_rl.simulation.batch_run import run_batch
from pearl_rl.simulation.cluster import SimulatedCluster
from pearl_rl.simulation.experiments.bench import Bench, batch_scripts
from pearl_rl.simulation.experiments.quality import QualityJob, draw, judge, summarize, telemetry
from pearl_rl.simulation.oracle import best, configurations, simulated_makespans
from pearl_state.configuration import Configuration

SMALL = 23
"""Seed of a case that takes half a second."""


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


def test_judging_a_case_twice_gives_the_same() -> None:
    assert judge(draw(SMALL)) == judge(draw(SMALL))
