"""TideRL's rows: what they compare, without running them at length."""

from pearl_planner.ref_actor import TrainerShape, colocated_pipeline_s
from pearl_rl.simulation.experiments import tiderl
from pearl_rl.simulation.experiments.bench import Bench
from pearl_rl.simulation.experiments.registry import OTHER_PAPERS, paper_rows
from pearl_rl.simulation.tiderl_platform import OSWORLD, WEBSHOP, TidePlatform


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


def test_one_step_of_few_tasks_gives_the_rows_of_task_batching() -> None:
    rows = list(tiderl._task_batching(Bench(), 24))
    assert [row.paper for row in rows] == [1.58, 1.15, 15.6] * 2
    assert all(row.at_least and row.use == "predict" for row in rows)
    assert all(row.ours == row.ours for row in rows)
