"""TideRL's rows: what they compare, without running them at length."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pearl_planner.ref_actor import TrainerShape, colocated_pipeline_s
from pearl_rl.simulation.experiments import tiderl
from pearl_rl.simulation.experiments.bench import Bench, Job
from pearl_rl.simulation.experiments.registry import OTHER_PAPERS, paper_rows
from pearl_rl.simulation.tiderl_platform import OSWORLD, QWEN3_VL_4B, WEBSHOP, TidePlatform
from pearl_rl.simulation.tiderl_rollout import RequestBatching, SimulatedTask, TaskRollout, VisualWindow
from pearl_rl.simulation.tiderl_steps import LoopOutcome, LoopSettings, run_loop
from pearl_rl.simulation.workload import Script, ScriptedTurn
from pearl_state.trajectory import GroupId, TrajectoryId


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


def test_osworld_has_the_rounds_and_tokens_of_the_papers_table_with_its_window_of_screenshots() -> None:
    """Table 4: 35 rounds and sequences of 12,000 tokens at the beginning, with 5 to 9 screenshots (appendix C.2)."""
    scripts = OSWORLD.scripts(160, 8)
    assert max(len(script.turns) for script in scripts) <= 50
    assert 34 < sum(len(script.turns) for script in scripts) / len(scripts) < 36
    ended: list[SimulatedTask] = []
    rollout = TaskRollout(
        TidePlatform.of(OSWORLD.model).worker, RequestBatching(concurrency=64), workers=3, window=OSWORLD.window
    )
    rollout.add(
        [
            SimulatedTask(TrajectoryId(f"t{n:08d}"), GroupId("g"), script, lambda task, _now_s: ended.append(task))
            for n, script in enumerate(scripts)
        ]
    )
    rollout.run()
    # The window is pruned before the tenth turn, and each fifth one after it.
    sequences = sum(1 + max(0, (len(task.script.turns) - 5) // 5) for task in ended)
    assert 11_500 < sum(task.tokens for task in ended) / sequences < 12_500
    assert max(task.context for task in ended) < 9 * 880 + 1500 + 50 * 300


def test_a_pruned_context_keeps_its_text_and_the_newest_screenshots_and_is_computed_anew_behind_the_first_prompt() -> (
    None
):
    """Turns of 10 + 1000 + 5 tokens, at most 3 screenshots, 2 after pruning.

    3045 tokens after the third; two screenshots less 1045, and two turns later 3075 and 1075, and the last makes 2090.
    Found are 1015, 2030, 10 of the first prompt's text, 2060, and 10 again, less the last token of each, which has no
    KV yet.
    """
    turn = ScriptedTurn(prompt_tokens=1010, response_tokens=5, tool_s=0.1, retained_tokens=5)
    task = SimulatedTask(TrajectoryId("t"), GroupId("g"), Script(turns=(turn,) * 6), lambda _task, _now_s: None)
    window = VisualWindow(image_tokens=1000, most=4, kept=2)
    rollout = TaskRollout(TidePlatform.of(OSWORLD.model).worker, RequestBatching(concurrency=1), 1, window)
    rollout.add([task])
    rollout.run()
    assert (task.split, task.context, task.tokens) == (3045 + 3075, 2090, 8210)
    (worker,) = rollout.workers.values()
    assert worker.engine.meter.cached_tokens == 1014 + 2029 + 10 + 2059 + 10


class Speeds(Bench):
    """Loops are as fast as they are said to be."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[LoopSettings] = []

    def prepare(self, jobs: Sequence[Job[object]]) -> None:
        self.asked += [job.settings for job in jobs if isinstance(job, tiderl.LoopJob)]

    def result(self, job: Job[object]) -> LoopOutcome:  # type: ignore[override]
        assert isinstance(job, tiderl.LoopJob)
        settings = job.settings
        speed = {1: 1.0, 2: 3.0, 4: 2.0}[settings.rollout] + settings.pipelining + settings.scaling
        return LoopOutcome(
            elapsed_s=1.0,
            rollout_wait_s=0.0,
            trainer_wait_s=0.0,
            consumed_tokens=round(1000 * speed),
            discarded=0,
            staleness=0.0,
            rollout_ranks=2.0,
            decoupled_steps=0,
        )


def test_the_parts_begin_at_the_ratio_at_which_the_baseline_is_fastest() -> None:
    """Section 6.1; and each is asked of the same loop, with the ranks that the model's memory needs."""
    bench = Speeds()
    order, ratio = tiderl._parts(bench, 10)
    # A part that adds nothing comes before the one that it was added to.
    assert order.ours == "streaming < +RA2P < +CTB < +ERS"
    assert not order.ok
    assert ratio.ours == pytest.approx(5 / 3)
    assert {(settings.gpus, settings.rollout, settings.least_actors) for settings in bench.asked} == {(8, 2, 2)}
    assert bench.asked[0].final_turns == pytest.approx(30 / 35)


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


def test_the_model_of_the_breakdown_is_as_large_as_its_two_towers() -> None:
    """4.44e9 weights at 6 bytes leave 50.7 of 77.3 GB; 53.3 GB of optimizer take two of them."""
    model = QWEN3_VL_4B
    attention = 2 * model.hidden * (model.heads + model.kv_heads) * model.head_dim
    layer = attention + 3 * model.hidden * model.intermediate
    matrices = model.layers * layer + model.vocab * model.hidden
    assert model.flops_per_token == 2 * matrices
    assert model.params_active == matrices + model.layers * (2 * model.hidden + 2 * model.head_dim) + model.hidden
    assert model.kv_bytes_per_token == 4 * model.layers * model.kv_heads * model.head_dim
    assert TidePlatform.of(OSWORLD.model).least_actors() == 2


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
