"""TideRL's rows: what they compare, without running them at length."""

from dataclasses import replace

import pytest

from pearl_planner.ref_actor import TrainerShape, colocated_pipeline_s
from pearl_rl.simulation.experiments import tiderl
from pearl_rl.simulation.experiments.bench import Bench
from pearl_rl.simulation.experiments.registry import OTHER_PAPERS, paper_rows
from pearl_rl.simulation.tiderl_platform import OSWORLD, WEBSHOP, TidePlatform
from pearl_rl.simulation.tiderl_steps import LoopOutcome, run_loop


def test_the_target_is_known_by_its_name() -> None:
    assert OTHER_PAPERS["tiderl"] == "tiderl:rows"
    assert paper_rows("tiderl") is tiderl.rows


def test_workloads_have_the_rounds_and_tokens_of_the_papers_table() -> None:
    """Table 4: 8 rounds and 3,400 tokens at the beginning; WebShop's own limits of 20 rounds and 8,192 tokens."""
    scripts = WEBSHOP.scripts(400, 8)
    rounds = sum(len(script.turns) for script in scripts) / len(scripts)
    tokens = sum(script.total_tokens for script in scripts) / len(scripts)
    assert 7 < rounds < 9
    assert 3000 < tokens < 3800
    assert max(len(script.turns) for script in scripts) <= 20
    assert max(script.total_tokens for script in scripts) <= 8192
    assert {script.root for script in scripts[:8]} == {scripts[0].root}
    assert max(len(script.turns) for script in OSWORLD.scripts(64, 8)) <= 50


def test_goodput_is_asked_of_the_composed_policy_on_each_segment_and_bound() -> None:
    jobs = [tiderl.segment_job("segment2", bound, policy, 600.0) for bound in (1, 4) for policy in ("pearl", "x:y")]
    assert len(set(jobs)) == 4
    assert {job.scenario.rollout.max_staleness for job in jobs} == {1, 4}
    assert tiderl._goodput("segment2", 1, 1501.0, 1000.0).ok
    assert not tiderl._goodput("segment2", 4, 2499.0, 1000.0).ok


def test_streaming_with_offload_pays_a_swap_for_each_round_of_micro_batches() -> None:
    costs = TidePlatform.of(WEBSHOP.model).micro_batch(8192, offload=True)
    bare = TidePlatform.of(WEBSHOP.model).micro_batch(8192, offload=False)
    shape = TrainerShape(ranks=4, aggregate=1)
    extra_s = colocated_pipeline_s((0.0,) * 8, costs, shape) - colocated_pipeline_s((0.0,) * 8, bare, shape)
    assert abs(extra_s - 4 * (costs.swap_s - bare.swap_s)) < 1e-9


def test_a_trainer_keeps_the_ranks_that_its_memory_needs() -> None:
    """7.6e9 weights at 6 bytes leave 31.6 of 77.3 GB; 91.4 GB of optimizer take three of them."""
    assert TidePlatform.of("qwen2.5-7b").least_actors() == 3
    assert tiderl.scaling_job("ERS", 2).settings.least_actors == 3


@pytest.fixture(scope="module")
def few() -> dict[str, LoopOutcome]:
    """Six steps of 64 trajectories with two evaluations, instead of a hundred of 256."""
    jobs = {name: tiderl.scaling_job(name, 6) for name in ("0.125", "0.25", "ERS")}
    small = {"groups": 8, "evaluation_tasks": 200, "evaluate_every": 3}
    return {name: run_loop(replace(job.settings, **small), job.workload) for name, job in jobs.items()}


def test_scaling_waits_less_than_the_ratio_it_begins_with_for_as_many_tokens(few: dict[str, LoopOutcome]) -> None:
    ours, fixed = few["ERS"], few["0.25"]
    assert ours.wait_s < 0.8 * fixed.wait_s
    assert ours.consumed_tokens == pytest.approx(fixed.consumed_tokens, rel=0.05)
    assert ours.tokens_per_s > 1.1 * fixed.tokens_per_s


def test_waiting_of_rollout_is_time_without_a_request_and_not_the_broadcast(few: dict[str, LoopOutcome]) -> None:
    """With one of eight GPUs rollout is the side that lacks time: what it waits is less than the broadcasts' pauses."""
    assert few["0.125"].rollout_wait_s < 6 * 1.0


def test_one_step_of_few_tasks_gives_the_rows_of_task_batching() -> None:
    rows = list(tiderl._task_batching(Bench(), 24))
    assert [row.paper for row in rows] == [1.58, 1.15, 15.6] * 2
    assert all(row.at_least and row.use == "predict" for row in rows)
    assert all(row.ours == row.ours for row in rows)
