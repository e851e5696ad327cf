"""Task batching carried out: tasks run, wait, are paused and go on, and every one of them ends."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl_planner.task_batching import PriorityWeights
from pearl_rl.rollout import task_batcher
from pearl_rl.rollout.task_batcher import TaskBatcher, TaskBatchingSettings, TaskState
from pearl_rl.simulation.tiderl_platform import WEBSHOP, TidePlatform
from pearl_rl.simulation.tiderl_rollout import RequestBatching, TokenBatching, roll_out
from pearl_rl.simulation.tiderl_steps import LoopSettings, run_loop
from pearl_state.trajectory import GroupId, TrajectoryId
from pearl_state.worker import WorkerId

W0, W1 = WorkerId(0), WorkerId(1)
A, B, D = TrajectoryId("a"), TrajectoryId("b"), TrajectoryId("d")


class Log:
    def __init__(self, budgets: dict[WorkerId, int], **rest: object) -> None:
        self.ran: list[tuple[str, int]] = []
        self.paused: list[str] = []
        self.resumed: list[str] = []
        made = TaskBatchingSettings(probe_tokens=30, group_size=2, **rest)  # type: ignore[arg-type]
        self.batcher = TaskBatcher(
            made,
            on_run=lambda task, worker: self.ran.append((task, worker)),
            on_pause=self.paused.append,
            on_resume=self.resumed.append,
        )
        self.batcher.set_budgets(budgets)


def test_a_group_is_probed_by_its_first_task_and_the_others_follow_its_footprint() -> None:
    log = Log({W0: 100})
    log.batcher.add(A, GroupId("g"))
    log.batcher.add(B, GroupId("g"))
    assert log.ran == [("a", W0)]
    log.batcher.turn_over(A, 60)
    assert log.batcher.state(B) is TaskState.NEW
    log.batcher.end(A)
    assert log.ran == [("a", W0), ("b", W0)]
    assert log.batcher.usage_tokens == {W0: 60}


def test_a_probe_that_ends_with_its_first_turn_does_not_hold_its_group_back() -> None:
    log = Log({W0: 100})
    log.batcher.add(A, GroupId("g"))
    log.batcher.add(B, GroupId("g"))
    log.batcher.end(A)
    assert log.ran == [("a", W0), ("b", W0)]


def test_a_pass_that_can_place_and_pause_nobody_counts_and_looks_at_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log({W0: 100})
    log.batcher.add(D, GroupId("h"))
    log.batcher.add(A, GroupId("g"))
    log.batcher.add(B, GroupId("g"))  # waits for the first turn of its group
    before = log.batcher.counts.rounds
    with monkeypatch.context() as patched:
        patched.delattr(task_batcher, "schedule_round")
        log.batcher.turn_over(D, 20)
    assert log.batcher.counts.rounds == before + 1
    log.batcher.turn_over(A, 30)
    assert log.ran == [("d", W0), ("a", W0), ("b", W0)]


def test_a_task_that_outgrows_its_worker_is_paused_and_its_environment_told() -> None:
    log = Log({W0: 100})
    for task in (A, B):
        log.batcher.add(task, GroupId(task))
        log.batcher.turn_over(task, 40)
    log.batcher.turn(A, 60, 10)
    assert log.paused == ["b"]
    assert log.ran[-1] == ("a", W0)
    # Its environment answers, but there is no room; once there is, it goes on.
    log.batcher.turn(B, 45, 5)
    assert log.batcher.state(B) is TaskState.PAUSED
    log.batcher.end(A)
    assert log.resumed == ["b"]
    assert log.ran[-1] == ("b", W0)


def test_tasks_of_a_worker_that_leaves_go_on_at_their_next_turn_elsewhere() -> None:
    log = Log({W0: 50, W1: 100})
    log.batcher.add(A, GroupId("a"))
    log.batcher.turn_over(A, 40)
    assert log.ran == [("a", W1)]
    log.batcher.set_budgets({W0: 50})
    log.batcher.turn(A, 42, 3)
    assert log.ran[-1] == ("a", W0)


@settings(max_examples=25)
@given(st.integers(0, 10_000))
def test_every_task_ends_and_usage_is_never_above_the_budget_where_turns_begin(seed: int) -> None:
    draw = random.Random(seed)
    turns = {TrajectoryId(f"t{n:03d}"): draw.randint(1, 5) for n in range(draw.randint(2, 24))}
    context = dict.fromkeys(turns, 0)
    running: list[TrajectoryId] = []
    thinking: list[TrajectoryId] = []
    batcher = TaskBatcher(
        TaskBatchingSettings(probe_tokens=20, group_size=4, max_passed_over=5, environment_slots=draw.randint(3, 30)),
        on_run=lambda task, _worker: running.append(task),
    )
    budgets = {W0: 100, W1: 90}
    batcher.set_budgets(budgets)
    for number, task in enumerate(turns):
        batcher.add(task, GroupId(f"g{number // 4}"), evaluation=draw.random() < 0.2)
    for _ in range(4000):
        if not running and not thinking:
            break
        if running and (not thinking or draw.random() < 0.5):
            task = running.pop(draw.randrange(len(running)))
            context[task] += draw.randint(5, 15)
            turns[task] -= 1
            if turns[task] == 0:
                batcher.end(task)
            else:
                batcher.turn_over(task, context[task])
                thinking.append(task)
        else:
            task = thinking.pop(draw.randrange(len(thinking)))
            batcher.turn(task, context[task], 5)
            assert all(batcher.usage_tokens[w] <= budgets[w] for w in budgets)
    assert not any(turns.values())


def test_task_batching_keeps_prefixes_that_a_fixed_concurrency_evicts() -> None:
    """A small KV budget, so that the same happens with few tasks."""
    scripts = WEBSHOP.scripts(96, 8)
    model = TidePlatform.of(WEBSHOP.model).worker
    model = replace(model, limits=replace(model.limits, kv_tokens=40_000))
    settings_ = TaskBatchingSettings(probe_tokens=800, group_size=8, weights=PriorityWeights(context_scale_tokens=8192))
    batched = roll_out(scripts, 8, model, TokenBatching(settings=settings_))
    fixed = roll_out(scripts, 8, model, RequestBatching(concurrency=64))
    assert batched.generated_tokens == fixed.generated_tokens
    assert batched.hit_rate > 1.5 * fixed.hit_rate
    assert batched.tokens_per_s > 1.1 * fixed.tokens_per_s


@pytest.mark.parametrize("scaling", [False, True])
def test_a_training_loop_makes_its_steps_within_the_bound(scaling: bool) -> None:
    batching = TokenBatching(settings=TaskBatchingSettings(probe_tokens=800, group_size=8))
    made = run_loop(
        LoopSettings(batching=batching, scaling=scaling, groups=4, steps=3, evaluation_tasks=8, evaluate_every=2),
        WEBSHOP,
    )
    assert made.consumed_tokens > 0
    assert made.discarded == 0
    assert 0 <= made.staleness <= 1
    assert made.trainer_wait_s + made.rollout_wait_s < 2 * made.elapsed_s
