"""A large expansion is prepared in groups, each ready on its own, that shrink where groups fail and grow again."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl_planner.catalog import find_profile
from pearl_planner.elastic import Borrowing, ElasticSettings, ElasticState, initial_state
from pearl_planner.policies import colocated_elastic, pearl
from pearl_planner.step import step
from pearl_state import events
from pearl_state.effects import ApplyStage, CancelGroup, CleanWorkers, GroupKind, PrepareGroup
from pearl_state.lifecycle import Lifecycle
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.roles import ROLLOUT_ROLES, Tenure
from pearl_state.worker import GpuId

PROFILE = find_profile("swe-32k")
WORKLOAD, PLATFORM = WorkloadProfile(**PROFILE.workload), PlatformProfile(**PROFILE.platform)


def start(most: int, policy=None) -> ElasticState:
    chosen = ElasticSettings(
        policy=policy or colocated_elastic(),
        borrowing=Borrowing.OFF,
        max_restarts=1_000_000,
        expansion_workers=most,
    )
    state = initial_state(settings=chosen, workload=WORKLOAD, platform=PLATFORM, training_gpus=1)
    return replace(state, calibrated=True)


class World:
    """Answers stages at once and well; groups are answered by the test."""

    def __init__(self, state: ElasticState) -> None:
        self.state = state
        self.groups: list[PrepareGroup] = []
        self.cancelled: list[CancelGroup] = []

    def post(self, event) -> None:
        todo = [event]
        while todo:
            self.state, effects = step(self.state, todo.pop(0))
            for effect in effects:
                match effect:
                    case PrepareGroup():
                        self.groups.append(effect)
                    case CancelGroup():
                        self.cancelled.append(effect)
                    case ApplyStage():
                        todo.append(
                            events.StageApplied(
                                now_s=0.0,
                                plan_id=effect.plan_id,
                                stage=effect.stage,
                                reported={w.id: effect.target_version for w in effect.admit},
                                left=frozenset(w.id for w in effect.leave),
                                failed={},
                                duration_s=0.1,
                            )
                        )
                    case CleanWorkers():
                        gone = {w.id: w.incarnation for w in effect.workers}
                        todo.append(events.WorkersCleaned(now_s=0.0, workers=gone))

    def offer(self, count: int) -> None:
        self.post(offer(range(10, 10 + count)))

    def answer(self, group: PrepareGroup, *broken) -> None:
        self.groups.remove(group)
        if broken:
            failed = {w.id: "will not start" for w in broken}
            self.post(events.GroupFailed(now_s=0.0, plan_id=group.plan_id, failed=failed))
        else:
            reported = {w.id: self.state.table.target_version for w in group.workers}
            self.post(events.GroupPrepared(now_s=0.0, plan_id=group.plan_id, reported=reported, duration_s=1.0))

    @property
    def active(self) -> set:
        return set(self.state.table.active())


def offer(gpus) -> events.GpusOffered:
    return events.GpusOffered(now_s=0.0, gpus=frozenset(map(GpuId, gpus)), tenure=Tenure.PREEMPTIBLE)


@given(count=st.integers(1, 300), most=st.integers(1, 80))
@settings(max_examples=40, deadline=None)
def test_groups_are_as_few_and_as_equal_as_the_bound_allows_and_have_every_worker_once(count: int, most: int) -> None:
    world = World(start(most))
    world.offer(count)
    sizes = [len(group.workers) for group in world.groups]
    assert len(sizes) == -(-count // most)
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= most
    ids = [w.id for group in world.groups for w in group.workers]
    assert len(set(ids)) == len(ids) == count
    assert {group.plan_id for group in world.groups} == world.state.groups.keys()


@given(data=st.data(), count=st.integers(2, 60), most=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_a_group_serves_as_a_whole_or_not_at_all_whatever_becomes_of_the_others(data, count: int, most: int) -> None:
    world = World(start(most, pearl()))
    world.offer(count)
    for _ in range(12):
        if not world.groups:
            break
        group = data.draw(st.sampled_from(world.groups))
        before, ids = world.active, {w.id for w in group.workers}
        broken = data.draw(st.lists(st.sampled_from(group.workers), unique=True, max_size=2))
        world.answer(group, *broken)
        assert world.active == (before if broken else before | ids)
        for other in world.groups:
            states = {world.state.table.rows[w.id].lifecycle for w in other.workers}
            assert states == {Lifecycle.STARTING}


@given(count=st.integers(2, 400), most=st.integers(1, 80), batch=st.sampled_from([64, 512, 4096]))
@settings(max_examples=40, deadline=None)
def test_all_groups_together_have_the_roles_of_the_whole_and_each_its_share(count: int, most: int, batch: int) -> None:
    def begin(limit: int) -> list[PrepareGroup]:
        state = start(limit, pearl())
        world = World(replace(state, workload=replace(WORKLOAD, batch=batch)))
        world.offer(count)
        return world.groups

    (whole,) = begin(count)
    groups = begin(most)
    for role in ROLLOUT_ROLES:
        shares = [sum(w.role is role for w in group.workers) for group in groups]
        assert sum(shares) == sum(w.role is role for w in whole.workers)
        assert max(shares) - min(shares) <= 1


def test_groups_of_later_tries_count_those_that_are_still_under_way() -> None:
    """Else what is tried again would be given the roles of a small cluster."""
    world = World(start(4, pearl()))
    world.offer(16)
    roles = sorted(w.role for group in world.groups for w in group.workers)
    group = world.groups[0]
    world.answer(group, group.workers[0])
    assert sorted(w.role for group in world.groups for w in group.workers) == roles


def test_a_reclaim_gives_up_the_groups_that_it_concerns_and_no_other() -> None:
    world = World(start(10))
    world.offer(40)
    gone = next(iter(world.groups[2].workers[0].gpus))
    world.post(events.GpusReclaimed(now_s=1.0, gpus=frozenset({gone}), deadline_s=30.0))
    assert [effect.plan_id for effect in world.cancelled] == [world.groups[2].plan_id]


def test_groups_are_halved_where_they_fail_and_one_larger_with_each_that_comes_up() -> None:
    world = World(start(16))
    world.offer(48)
    for group in list(world.groups):
        # What failed at the same time tells once.
        world.answer(group, group.workers[0])
        assert world.state.group_workers == 8
    assert {len(group.workers) for group in world.groups} == {8}
    for larger in range(9, 15):
        world.answer(world.groups[0])
        assert world.state.group_workers == larger
    assert len(world.active) == 48
    # One that fails alone says nothing of groups.
    row = world.state.table.rows[min(world.active)]
    world.post(events.WorkerFailed(now_s=1.0, worker=row.id, incarnation=row.incarnation, cause="crash"))
    world.answer(world.groups[0], world.groups[0].workers[0])
    assert world.state.group_workers == 14
    for crashed in sorted(world.active)[:2]:
        world.answer(world.groups[0])
        row = world.state.table.rows[crashed]
        world.post(events.WorkerFailed(now_s=1.0, worker=row.id, incarnation=row.incarnation, cause="crash"))
    assert world.state.group_workers == 16
    assert world.state.smaller_groups is None


def test_a_group_that_was_given_up_says_nothing_of_the_size() -> None:
    world = World(start(16))
    world.offer(16)
    (group,) = world.groups
    world.post(events.GpusReclaimed(now_s=1.0, gpus=group.workers[0].gpus, deadline_s=30.0))
    world.groups.remove(group)
    world.post(events.GroupFailed(now_s=1.0, plan_id=group.plan_id))
    assert world.state.group_workers == 16


@pytest.mark.parametrize(
    ("count", "failing", "most_tries"), [(1000, 0.0, 1), (1000, 0.02, 20), (1000, 0.05, 20), (200, 0.5, 40)]
)
def test_a_thousand_workers_come_up_however_often_they_fail_meanwhile(
    count: int, failing: float, most_tries: int
) -> None:
    """In one group of a thousand of which 5 % fail in every try, nobody would serve for 10^22 tries."""
    draw = random.Random(0)
    world = World(start(64))
    world.offer(count)
    tries = 0
    while world.groups:
        tries += 1
        assert tries <= most_tries, f"{len(world.active)} serve after {tries} tries of everybody"
        for group in list(world.groups):
            world.answer(group, *(w for w in group.workers if draw.random() < failing))
    assert len(world.active) == count


def test_a_borrow_stays_one_group() -> None:
    state = initial_state(
        settings=ElasticSettings(policy=colocated_elastic(), borrowing=Borrowing.UNGATED, expansion_workers=2),
        workload=WORKLOAD,
        platform=PLATFORM,
        training_gpus=6,
    )
    state = replace(state, table=state.table.move(state.table.training(), Lifecycle.DRAINING))
    state = replace(state, table=state.table.move(state.table.training(), Lifecycle.RELEASED))
    world = World(replace(state, step=1, batch=64, remaining=64))
    world.post(events.RolloutProgressed(now_s=0.0, step=1, remaining=60))
    assert [(g.kind, len(g.workers)) for g in world.groups] == [(GroupKind.BORROW, 6)]
