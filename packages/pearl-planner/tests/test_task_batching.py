"""Continuous Task Batching: Algorithm 1 by hand, Table 1's order, budgets that hold, and nobody who starves."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl_planner.task_batching import (
    AdmissionLimits,
    BatchedTask,
    Footprints,
    PriorityWeights,
    priority,
    schedule_round,
)
from pearl_state.trajectory import GroupId, TrajectoryId
from pearl_state.worker import WorkerId

W0, W1 = WorkerId(0), WorkerId(1)


def task(name: str, tokens: int, worker: WorkerId | None = None, **more: object) -> BatchedTask:
    values: dict[str, object] = {"group": GroupId(f"g-{name}"), "context_tokens": tokens, **more}
    return BatchedTask(id=TrajectoryId(name), footprint_tokens=tokens, worker=worker, **values)  # type: ignore[arg-type]


def test_the_score_is_the_weighted_sum_of_the_four_terms() -> None:
    weights = PriorityWeights(evaluation=8, completion=4, executing=2, context=1, context_scale_tokens=1000)
    whole = task("a", 500, evaluation=True, group_finished=3, group_size=4, executing=True)
    assert priority(whole, weights) == 8 + 4 * 0.75 + 2 + 0.5
    assert priority(task("b", 250), weights) == 0.25


def test_default_weights_make_the_terms_strict_tiers() -> None:
    """Table 1: task type, group completion, execution state, context length, whatever the lower ones say."""
    weights = PriorityWeights()
    assert weights.strict_for(16)
    assert weights.strict_for(128)
    assert not weights.strict_for(1000)
    size = 16
    for finished, executing, context in itertools.product((0, 7, 15), (False, True), (0, 32_768)):
        low = task("x", context, group_finished=finished, group_size=size, executing=executing)
        assert priority(task("e", 0, evaluation=True), weights) > priority(low, weights)
        assert priority(task("c", 0, group_finished=finished + 1, group_size=size), weights) > priority(low, weights)
    assert priority(task("a", 0, executing=True), weights) > priority(task("l", 32_768), weights)
    assert priority(task("l", 2), weights) > priority(task("s", 1), weights)


def test_a_worker_over_its_budget_pauses_its_lowest_priorities_and_no_more() -> None:
    """Budget 100, usage 150: the short waiting task (30) and then the running one of a fresh group (40) go."""
    active = [
        task("evaluation", 50, W0, evaluation=True),
        task("nearly", 30, W0, group_finished=3, group_size=4),
        task("running", 40, W0, executing=True, group_size=4),
        task("waiting", 30, W0, group_size=4),
    ]
    made = schedule_round(budgets={W0: 100}, active=active)
    assert made.pause == ("waiting", "running")
    assert made.usage_tokens == {W0: 80}
    assert made.resume == ()


def test_a_task_that_outgrew_its_worker_goes_on_elsewhere_at_once() -> None:
    active = [task("a", 60, W0, executing=True), task("b", 50, W0)]
    made = schedule_round(budgets={W0: 100, W1: 100}, active=active)
    assert made.pause == ("b",)
    assert made.resume == (("b", W1),)


def test_tasks_of_a_closed_worker_move_to_the_others() -> None:
    made = schedule_round(budgets={W1: 100}, active=[task("a", 60, W0), task("b", 50, W0), task("c", 30, W1)])
    assert set(made.pause) == {"a", "b"}
    assert made.resume == (("a", W1),)


def test_paused_tasks_come_before_new_ones() -> None:
    made = schedule_round(
        budgets={W0: 100}, active=[], paused=[task("p", 60, W0), task("q", 30, W0)], new=[task("n", 30), task("m", 10)]
    )
    assert made.resume == (("p", W0), ("q", W0))
    assert made.admit == (("m", W0),)


def test_a_paused_task_returns_to_its_worker_else_to_its_group() -> None:
    friend = task("friend", 10, W1, group=GroupId("g"))
    own = schedule_round(budgets={W0: 100, W1: 100}, active=[friend], paused=[task("p", 20, W0, group=GroupId("g"))])
    assert own.resume == (("p", W0),)
    full = task("full", 90, W0)
    group = schedule_round(
        budgets={W0: 100, W1: 100, WorkerId(2): 100},
        active=[full, friend],
        paused=[task("p", 20, W0, group=GroupId("g"))],
    )
    assert group.resume == (("p", W1),)


def test_environment_slots_count_paused_tasks_too() -> None:
    made = schedule_round(
        budgets={W0: 100},
        active=[task("a", 80, W0)],
        paused=[task("p", 50, W0)],
        new=[task("n", 5), task("m", 5)],
        limits=AdmissionLimits(environment_slots=3),
    )
    assert made.admit == (("n", W0),)


def test_the_staleness_allowance_bounds_training_tasks_only() -> None:
    new = [task("t1", 5), task("t2", 5), task("e1", 5, evaluation=True)]
    made = schedule_round(budgets={W0: 100}, active=[], new=new, limits=AdmissionLimits(staleness_allowance=1))
    assert set(made.admit) == {("e1", W0), ("t1", W0)}


def test_kinds_are_spread_over_workers_within_the_lookahead() -> None:
    new = [task(f"a{i}", 10, kind="shop") for i in range(2)] + [task(f"b{i}", 10, kind="house") for i in range(2)]
    made = schedule_round(budgets={W0: 100, W1: 100}, active=[], new=new)
    kinds = {W0: set(), W1: set()}  # type: dict[WorkerId, set[str]]
    for id_, worker in made.admit:
        kinds[worker].add(id_[0])
    assert kinds == {W0: {"a", "b"}, W1: {"a", "b"}}
    in_order = schedule_round(budgets={W0: 100}, active=[], new=new, limits=AdmissionLimits(lookahead=1))
    assert [id_ for id_, _ in in_order.admit] == ["a0", "a1", "b0", "b1"]


def test_headroom_is_kept_for_a_task_that_waited_too_long() -> None:
    large = task("large", 80, W0, waits_since=6)
    limits = AdmissionLimits(max_passed_over=4)
    made = schedule_round(
        budgets={W0: 100}, active=[task("a", 50, W0)], paused=[large], new=[task("n", 10)], limits=limits, number=10
    )
    assert made.admit == ()
    assert made.resume == ()
    young = schedule_round(
        budgets={W0: 100}, active=[task("a", 50, W0)], paused=[large], new=[task("n", 10)], limits=limits, number=9
    )
    assert young.admit == (("n", W0),)


def test_a_footprint_beyond_every_budget_is_named() -> None:
    made = schedule_round(budgets={W0: 100}, active=[task("a", 120, W0)], new=[task("n", 101)])
    assert made.pause == ("a",)
    assert made.unfit == {"a", "n"}


def test_a_group_waits_for_its_probe() -> None:
    known = Footprints(default_tokens=500)
    group, first, second = GroupId("g"), TrajectoryId("t1"), TrajectoryId("t2")
    assert known.expected(group) == 500
    assert known.may_start(first, group)
    known.started(first, group)
    assert known.may_start(first, group)
    assert not known.may_start(second, group)
    known.measured(group, 320)
    assert known.may_start(second, group)
    assert known.expected(group) == 320
    known.measured(group, 350)
    assert known.expected(group) == 350
    known.forget(group)
    assert known.expected(group) == 500


def test_a_lost_probe_makes_room_for_another() -> None:
    known = Footprints(default_tokens=500)
    group = GroupId("g")
    known.started(TrajectoryId("t1"), group)
    known.lost(TrajectoryId("t1"), group)
    assert known.may_start(TrajectoryId("t2"), group)


_tasks = st.lists(
    st.tuples(
        st.integers(1, 60), st.booleans(), st.integers(0, 3), st.booleans(), st.integers(0, 2), st.integers(0, 40)
    ),
    max_size=12,
)


def _drawn(prefix: str, drawn: list[tuple[int, bool, int, bool, int, int]], active: bool) -> list[BatchedTask]:
    return [
        task(
            f"{prefix}{i}",
            tokens,
            WorkerId(worker) if active or worker < 2 else None,
            evaluation=evaluation,
            group_finished=finished,
            group_size=4,
            executing=executing and active,
            waits_since=None if passed == 0 else passed,
        )
        for i, (tokens, evaluation, finished, executing, worker, passed) in enumerate(drawn)
    ]


@settings(max_examples=120)
@given(_tasks, _tasks, _tasks, st.integers(40, 120), st.integers(0, 12), st.integers(0, 6))
def test_no_budget_is_exceeded_after_a_round_and_every_task_is_in_one_place(
    on: list[tuple[int, bool, int, bool, int, int]],
    off: list[tuple[int, bool, int, bool, int, int]],
    fresh: list[tuple[int, bool, int, bool, int, int]],
    budget: int,
    slots: int,
    allowance: int,
) -> None:
    active, paused, new = _drawn("a", on, True), _drawn("p", off, False), _drawn("n", fresh, False)
    budgets = {W0: budget, W1: budget + 7}
    limits = AdmissionLimits(environment_slots=slots, staleness_allowance=allowance)
    made = schedule_round(budgets=budgets, active=active, paused=paused, new=new, limits=limits, number=60)
    by_id = {t.id: t for t in (*active, *paused, *new)}
    usage = dict.fromkeys(budgets, 0)
    placed = {t.id: t.worker for t in active if t.id not in made.pause} | dict(made.resume) | dict(made.admit)
    for id_, worker in placed.items():
        assert worker is not None
        usage[worker] += by_id[id_].footprint_tokens
    assert usage == dict(made.usage_tokens)
    assert all(usage[w] <= budgets[w] for w in budgets)
    assert {id_ for id_, _ in made.resume} <= {*made.pause, *(t.id for t in paused)}
    assert {id_ for id_, _ in made.admit} <= {t.id for t in new}
    assert len(made.admit) <= max(0, slots - len(active) - len(paused))
    assert sum(not by_id[id_].evaluation for id_, _ in made.admit) <= allowance


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(4, 30), st.booleans()), min_size=1, max_size=14))
def test_every_task_ends_though_new_ones_keep_coming(plan: list[tuple[int, int, bool]]) -> None:
    """Turns end for active tasks one at a time, contexts grow, and a stream of small tasks never runs dry."""
    limits = AdmissionLimits(max_passed_over=6, environment_slots=20)
    alive = {
        TrajectoryId(f"t{i}"): (task(f"t{i}", size, evaluation=evaluation), turns)
        for i, (turns, size, evaluation) in enumerate(plan)
    }
    mine = set(alive)
    active: dict[TrajectoryId, BatchedTask] = {}
    paused: dict[TrajectoryId, BatchedTask] = {}
    queue = [t for t, _ in alive.values()]
    fillers = itertools.count()
    for number in range(3000):
        if not mine:
            break
        filler = task(f"f{next(fillers)}", 3)
        queue.append(filler)
        alive[filler.id] = (filler, 2)
        made = schedule_round(
            budgets={W0: 70},
            active=active.values(),
            paused=list(paused.values()),
            new=queue,
            limits=limits,
            number=number,
        )
        for id_ in made.pause:
            paused[id_] = active.pop(id_)
        for id_, worker in made.resume:
            active[id_] = replace(paused.pop(id_), worker=worker)
        for id_, worker in made.admit:
            active[id_] = replace(next(t for t in queue if t.id == id_), worker=worker)
        queue = [t for t in queue if t.id not in active]
        paused = {i: t if t.waits_since is not None else replace(t, waits_since=number) for i, t in paused.items()}
        queue = [t if i or t.waits_since is not None else replace(t, waits_since=number) for i, t in enumerate(queue)]
        if active:
            id_ = sorted(active)[number % len(active)]
            turning, turns = alive[id_]
            if turns == 1:
                del active[id_]
                mine.discard(id_)
            else:
                grown = active[id_].footprint_tokens + 5
                active[id_] = replace(active[id_], footprint_tokens=grown, context_tokens=grown, waits_since=None)
                alive[id_] = (turning, turns - 1)
    assert not mine


@pytest.mark.parametrize("size", [1, 8, 64])
def test_tiers_are_strict_for_usual_group_sizes(size: int) -> None:
    assert PriorityWeights().strict_for(size)
