"""Plans: the fewest changes, an order that serves at every instant, and the right workers."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl_planner.transition import PlanError, WorkerCosts, choose_members, plan_transition, verify_plan
from pearl_state.configuration import Configuration
from pearl_state.errors import InvariantError
from pearl_state.lifecycle import Lifecycle
from pearl_state.plan import PlanId, Stage, TransitionPlan
from pearl_state.roles import Role, Tenure, Zone
from pearl_state.table import WorkerTable
from pearl_state.worker import GpuId, Worker, WorkerId

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED
ROLES = (P, D, C)


def roles_of(configuration: Configuration) -> list[Role]:
    return [role for role in ROLES for _ in range(configuration.count(role))]


def cluster(active: Sequence[Role], prepared: Sequence[Role] = (), borrowed: int = 0) -> WorkerTable:
    """Active workers in slots 0, 1, … and then prepared ones, one GPU each; the first are on `borrowed` GPUs."""
    workers = [
        Worker(
            id=WorkerId(i),
            gpus=frozenset({GpuId(i)}),
            role=role,
            zone=Zone.OVERLAP if i < borrowed else Zone.DEDICATED,
        )
        for i, role in enumerate([*active, *prepared])
    ]
    table = WorkerTable().bind(*workers)
    ids = [w.id for w in workers]
    table = table.move(ids, Lifecycle.STARTING).move(ids, Lifecycle.PENDING_WEIGHTS)
    table = table.update([replace(row, weight_version=0) for row in table.rows.values()])
    return table.move(ids[: len(active)], Lifecycle.ACTIVE)


def plan_between(source: str, target: str, costs: WorkerCosts | None = None) -> tuple[WorkerTable, TransitionPlan]:
    table = cluster(roles_of(Configuration.parse(source)))
    goal = Configuration.parse(target)
    plan = plan_transition(table, members=table.active(), target=goal, plan_id=PlanId(1), costs=costs or WorkerCosts())
    verify_plan(table, plan)
    return table, plan


def lower_bound(survivors: Sequence[Role], joined: int, left: int, target: Configuration) -> int:
    """Eqs. (5) and (6)."""
    source = Counter(survivors)
    return joined + left + sum(source[r] - min(source[r], target.count(r)) for r in ROLES)


def brute_force(survivors: Sequence[Role], joined: int, left: int, target: Configuration) -> int:
    """The fewest changes over every assignment of the target's roles to survivors and joiners."""
    goal = roles_of(target)
    best = min(
        sum(old is not new for old, new in zip(survivors, assignment, strict=False))
        for assignment in set(itertools.permutations(goal))
    )
    return best + joined + left


SMALL = [Configuration(p, d) for p in range(1, 4) for d in range(1, 4)] + [Configuration(colocated=c) for c in range(6)]


@pytest.mark.parametrize("source", SMALL, ids=str)
def test_every_small_transition_serves_in_pairs_and_meets_the_lower_bound(source):
    for extra, target in itertools.product(range(3), SMALL):
        for kinds in itertools.product(ROLES, repeat=extra):
            table = cluster(roles_of(source), kinds)
            for keep in range(source.workers + 1):
                if keep + extra != target.workers:
                    continue
                for kept in {tuple(range(keep)), tuple(range(source.workers - keep, source.workers))}:
                    members = [*kept, *range(source.workers, source.workers + extra)]
                    plan = plan_transition(table, members=map(WorkerId, members), target=target, plan_id=PlanId(1))
                    verify_plan(table, plan)
                    survivors = [table.rows[WorkerId(i)].role for i in kept]
                    assert plan.changes == lower_bound(survivors, extra, source.workers - keep, target)


@given(
    st.lists(st.sampled_from(ROLES), min_size=0, max_size=5),
    st.integers(0, 2),
    st.integers(0, 3),
    st.data(),
)
def test_the_lower_bound_is_what_brute_force_finds(survivors, joined, left, data):
    total = len(survivors) + joined
    prefill = data.draw(st.integers(0, max(0, total - 1)))
    target = Configuration(prefill, total - prefill) if prefill else Configuration(colocated=total)
    assert lower_bound(survivors, joined, left, target) == brute_force(survivors, joined, left, target)


@given(st.lists(st.sampled_from(ROLES), max_size=24), st.lists(st.sampled_from(ROLES), max_size=6), st.data())
def test_a_plan_from_any_mixture_verifies(active, prepared, data):
    """Also from tables that an overtaken plan left with both modes in them."""
    counts = Counter(active)
    if bool(counts[P]) is not bool(counts[D]):
        active = [C for _ in active]
    table = cluster(active, prepared)
    everybody = range(len(active) + len(prepared))
    members = data.draw(st.sets(st.sampled_from(everybody) if everybody else st.nothing()))
    prefill = data.draw(st.integers(0, max(0, len(members) - 1)))
    target = Configuration(prefill, len(members) - prefill) if prefill else Configuration(colocated=len(members))
    plan = plan_transition(table, members=map(WorkerId, members), target=target, plan_id=PlanId(7))
    verify_plan(table, plan)
    kept = [role for i, role in enumerate(active) if i in members]
    joined = len(members) - len(kept)
    assert plan.changes == lower_bound(kept, joined, len(active) - len(kept), target)


def test_one_flip_keeps_both_pools_alive():
    """sglang#14284: a decode instance cannot prefill for itself."""
    _, plan = plan_between("2P3D", "3P2D")
    assert [dict(s.switch) for s in plan.stages] == [{WorkerId(2): P}]


def test_a_pair_that_loses_its_prefill_worker_becomes_colocated_in_one_stage():
    table = cluster([P, D])
    plan = plan_transition(table, members=[WorkerId(1)], target=Configuration(colocated=1), plan_id=PlanId(1))
    verify_plan(table, plan)
    assert plan.stages == (Stage(leave=frozenset({WorkerId(0)}), switch={WorkerId(1): C}),)


def test_survivors_whose_counterpart_leaves_are_parked_until_one_of_them_takes_its_place():
    table = cluster([P, D, D, D])
    plan = plan_transition(table, members=map(WorkerId, (1, 2, 3)), target=Configuration(1, 2), plan_id=PlanId(1))
    verify_plan(table, plan)
    (stage,) = plan.stages
    assert dict(stage.switch) == {WorkerId(1): P}
    assert stage.park == {WorkerId(2), WorkerId(3)}


def test_a_prepared_worker_takes_the_place_of_the_counterpart_that_leaves():
    table = cluster([P, D], [P])
    plan = plan_transition(table, members=map(WorkerId, (1, 2)), target=Configuration(1, 1), plan_id=PlanId(1))
    verify_plan(table, plan)
    assert plan.stages == (Stage(leave=frozenset({WorkerId(0)}), park=frozenset({WorkerId(1)}), join={WorkerId(2): P}),)


def test_a_mode_switch_goes_through_a_first_pair():
    _, plan = plan_between("4C", "1P3D")
    first, second = plan.stages
    assert sorted(first.switch.values()) == [D, P]
    assert sorted(second.switch.values()) == [D, D]


@pytest.mark.parametrize(
    ("source", "target"), [("4C", "1P3D"), ("1P3D", "4C"), ("16C", "4P12D"), ("4P12D", "16C"), ("9C", "1P8D")]
)
def test_half_of_the_pool_serves_throughout_a_mode_switch(source, target):
    _, plan = plan_between(source, target)
    workers = Configuration.parse(source).workers
    assert all(len(stage.withdraw) <= -(-workers // 2) for stage in plan.stages)


def test_leaving_workers_go_first_and_joiners_enter_at_once():
    table = cluster([P, P, D, D, D, D], [P, D])
    members = map(WorkerId, (0, 2, 3, 4, 6, 7))
    plan = plan_transition(
        table, members=members, target=Configuration(2, 4), plan_id=PlanId(1), mandatory=True, deadline_s=9.0
    )
    verify_plan(table, plan)
    assert [s.leave for s in plan.stages] == [frozenset({WorkerId(1), WorkerId(5)}), frozenset()]
    assert dict(plan.stages[1].join) == {WorkerId(6): P, WorkerId(7): D}
    assert plan.mandatory
    assert plan.deadline_s == 9.0


def test_the_least_loaded_worker_changes_role():
    _, plan = plan_between("2P3D", "3P2D", WorkerCosts(load={WorkerId(2): 9, WorkerId(3): 1, WorkerId(4): 5}))
    assert dict(plan.reassign) == {WorkerId(3): P}


def test_the_worker_with_the_fullest_cache_keeps_its_role():
    costs = WorkerCosts(cached_tokens={WorkerId(0): 500_000, WorkerId(1): 20_000})
    _, plan = plan_between("2P3D", "1P4D", costs)
    assert dict(plan.reassign) == {WorkerId(1): D}


def test_a_worker_about_to_be_reclaimed_does_not_take_the_scarce_role():
    table = cluster([C, C, C])
    table = table.update([replace(table.rows[WorkerId(0)], reclaim_at_s=30.0)])
    plan = plan_transition(table, members=table.active(), target=Configuration(1, 2), plan_id=PlanId(1))
    verify_plan(table, plan)
    assert plan.reassign[WorkerId(0)] is D


def test_a_borrowed_worker_does_not_take_the_scarce_role():
    """Training takes its GPU back at its next step."""
    table = cluster([C, C, C, C], borrowed=1)
    plan = plan_transition(table, members=table.active(), target=Configuration(1, 3), plan_id=PlanId(1))
    verify_plan(table, plan)
    assert plan.reassign[WorkerId(0)] is D
    # The others may have to go; it will.
    others = [replace(table.rows[WorkerId(i)], tenure=Tenure.PREEMPTIBLE) for i in (1, 2, 3)]
    plan = plan_transition(table.update(others), members=table.active(), target=Configuration(1, 3), plan_id=PlanId(1))
    assert plan.reassign[WorkerId(0)] is D


def test_who_is_reclaimed_soonest_leaves_then_who_costs_least():
    table = cluster([C] * 5)
    table = table.update(
        [
            replace(table.rows[WorkerId(1)], reclaim_at_s=90.0),
            replace(table.rows[WorkerId(3)], reclaim_at_s=30.0),
            replace(table.rows[WorkerId(4)], tenure=Tenure.PREEMPTIBLE),
        ]
    )
    costs = WorkerCosts(load={WorkerId(0): 3, WorkerId(2): 1})
    order = [choose_members(table, candidates=table.active(), count=n, costs=costs) for n in range(6)]
    joined = [next(iter(b - a)) for a, b in itertools.pairwise(order)]
    assert joined == [0, 2, 4, 1, 3]
    with pytest.raises(PlanError, match="6 workers wanted, 5 at hand"):
        choose_members(table, candidates=table.active(), count=6)


def test_a_prepared_worker_joins_in_the_role_it_was_prepared_for():
    table = cluster([P, D], [D, P])
    plan = plan_transition(table, members=map(WorkerId, range(4)), target=Configuration(2, 2), plan_id=PlanId(1))
    assert dict(plan.add) == {WorkerId(2): D, WorkerId(3): P}
    plan = plan_transition(
        table,
        members=map(WorkerId, range(4)),
        target=Configuration(2, 2),
        plan_id=PlanId(1),
        prepared={WorkerId(2): P, WorkerId(3): D},
    )
    assert dict(plan.add) == {WorkerId(2): P, WorkerId(3): D}


@pytest.mark.parametrize(
    ("members", "target", "message"),
    [
        ([0], "2C", "2C needs 2 workers, 1 are named"),
        ([0, 9], "2C", "member 9 is no worker"),
        ([0, 3], "2C", "member 3 is a colocated worker and vacant"),
    ],
)
def test_members_that_do_not_fit_are_refused(members, target, message):
    table = cluster([C, C, C]).bind(Worker(id=WorkerId(3), gpus=frozenset({GpuId(3)}), role=C, zone=Zone.DEDICATED))
    with pytest.raises(PlanError, match=message):
        plan_transition(table, members=map(WorkerId, members), target=Configuration.parse(target), plan_id=PlanId(1))


@pytest.mark.parametrize(
    ("stages", "invariant"),
    [
        ((Stage(switch={WorkerId(0): C}),), "paired_roles"),
        ((Stage(switch={WorkerId(0): C, WorkerId(1): P}),), "paired_roles"),
        ((Stage(leave=frozenset({WorkerId(7)})),), "plan_consistent"),
        ((Stage(join={WorkerId(0): P}),), "plan_consistent"),
        ((), "plan_consistent"),
    ],
)
def test_verification_refuses_a_plan_that_breaks_a_rule(stages, invariant):
    table = cluster([P, D])
    plan = TransitionPlan(
        id=PlanId(1),
        target=Configuration(colocated=2),
        reassign={id_: role for s in stages for id_, role in s.switch.items()},
        remove=frozenset(id_ for s in stages for id_ in s.leave),
        add={id_: role for s in stages for id_, role in s.join.items()},
        stages=stages,
    )
    with pytest.raises(InvariantError) as error:
        verify_plan(table, plan)
    assert error.value.invariant == invariant
