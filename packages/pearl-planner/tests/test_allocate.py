"""Prorsa eq. (1): the largest common margin, by hand and by brute force."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl_planner.allocate import (
    Ahead,
    Demand,
    allocate,
    instances_for,
    stretch,
    target_configuration,
    weigh_switch,
)
from pearl_planner.switching import SwitchCosts
from pearl_state.configuration import Configuration


def demand(prefill: float, decode: float) -> Demand:
    """Demands in instances: a and b of eq. (1)."""
    return Demand(
        prefill_tokens=prefill * 10.0 * 500.0,
        decode_kv_bytes=decode * 80.0,
        horizon_s=10.0,
        prefill_tokens_per_s=500.0,
        kv_capacity_bytes=80.0,
    )


needs = st.floats(0.0, 30.0).map(lambda need: round(need, 3))
sizes = st.integers(1, 4)


def test_eq_1_gives_the_counts_of_the_largest_margin() -> None:
    # a = 1.5, b = 2: of the pairs in 8 GPUs (3, 5) bears min(2, 2.5) - 1 = 1 and (4, 4) bears min(2.67, 2) - 1 = 1.
    found = allocate(demand(1.5, 2.0), gpus=8)
    assert found.margin == pytest.approx(1.0)
    assert (found.prefill, found.decode) == (3, 4), "at δ = 1: ⌈3.0⌉ and ⌈4.0⌉"
    assert found.feasible


def test_roles_may_take_different_numbers_of_gpus() -> None:
    # m = (1, 4), G = 12: pairs (4, 2) and (8, 1). a = 2, b = 1: margins 1 and 0.
    found = allocate(demand(2.0, 1.0), gpus=12, prefill_gpus=1, decode_gpus=4)
    assert (found.prefill, found.decode, found.margin) == (4, 2, pytest.approx(1.0))


def test_an_infeasible_demand_minimizes_the_larger_ratio() -> None:
    # a = 6, b = 4 in 5 GPUs: ratios (6/1, 4/4), (6/2, 4/3), (6/3, 4/2), (6/4, 4/1) - the third is the least bad.
    found = allocate(demand(6.0, 4.0), gpus=5)
    assert not found.feasible
    assert (found.prefill, found.decode) == (3, 2)
    assert found.margin == pytest.approx(1 / 2 - 1)


@given(needs, needs, st.integers(2, 16), sizes, sizes)
def test_no_allocation_in_the_budget_has_a_larger_margin(
    a: float, b: float, gpus: int, prefill_gpus: int, decode_gpus: int
) -> None:
    gpus = max(gpus, prefill_gpus + decode_gpus)
    wanted = demand(a, b)
    found = allocate(wanted, gpus=gpus, prefill_gpus=prefill_gpus, decode_gpus=decode_gpus)
    assert prefill_gpus * found.prefill + decode_gpus * found.decode <= gpus
    assert found.prefill >= 1
    assert found.decode >= 1
    best = max(
        wanted.margin(p, d)
        for p in range(1, gpus + 1)
        for d in range(1, gpus + 1)
        if prefill_gpus * p + decode_gpus * d <= gpus
    )
    assert found.margin == best or math.isclose(found.margin, best, rel_tol=1e-6, abs_tol=1e-9)
    # The counts bear the margin that they are given for, and are those of eq. (1) where it holds.
    assert wanted.margin(found.prefill, found.decode) >= found.margin - 1e-6
    if found.feasible and math.isfinite(found.margin) and a and b:
        assert found.prefill == instances_for(wanted.prefill, found.margin)
        assert found.decode == instances_for(wanted.decode, found.margin)


@given(needs.filter(bool), needs.filter(bool), st.integers(2, 40), sizes, sizes)
def test_the_counts_of_eq_1_fit_at_the_margin_and_at_no_larger_one(
    a: float, b: float, gpus: int, prefill_gpus: int, decode_gpus: int
) -> None:
    """Eq. (1) itself, without `Demand.margin`: the larger the margin, the more GPUs; ours is where they are used up."""
    gpus = max(gpus, prefill_gpus + decode_gpus)
    found = allocate(demand(a, b), gpus=gpus, prefill_gpus=prefill_gpus, decode_gpus=decode_gpus)

    def asks(margin: float) -> int:
        return prefill_gpus * math.ceil(a * (1 + margin)) + decode_gpus * math.ceil(b * (1 + margin))

    assert asks(found.margin - 1e-6) <= gpus or not found.feasible
    assert asks(found.margin + 1e-6) > gpus


@given(needs, needs, st.integers(2, 40))
def test_all_workers_get_a_role_and_the_margin_stays(a: float, b: float, workers: int) -> None:
    wanted = demand(a, b)
    target = target_configuration(wanted, workers)
    assert target.workers == workers
    found = allocate(wanted, gpus=workers)
    assert wanted.margin(target.prefill, target.decode) >= found.margin - 1e-6


def test_one_sided_demand_leaves_one_instance_to_the_other_role() -> None:
    assert target_configuration(demand(5.0, 0.0), 8) == Configuration(7, 1)
    assert target_configuration(demand(0.0, 5.0), 8) == Configuration(1, 7)
    assert math.isinf(allocate(demand(0.0, 0.0), gpus=8).margin)


def test_budgets_and_demands_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"4 GPUs hold no pair of 1 \+ 4"):
        allocate(demand(1, 1), gpus=4, decode_gpus=4)
    with pytest.raises(ValueError, match="1 workers hold no pair"):
        target_configuration(demand(1, 1), 1)
    with pytest.raises(ValueError, match="prefill_tokens_per_s = 0"):
        Demand(prefill_tokens=1, decode_kv_bytes=1, horizon_s=10, prefill_tokens_per_s=0, kv_capacity_bytes=1)


def test_a_switch_is_made_where_the_time_it_saves_exceeds_what_it_costs() -> None:
    wanted = demand(3.0, 1.0)
    current, target = Configuration(2, 6), Configuration(6, 2)
    costs = SwitchCosts(flip_s=5.0)
    # δ goes from -1/3 to 1: the load from 1.5 to 0.5, and what that stretches from 3 to 1.25.
    verdict = weigh_switch(wanted, current=current, target=target, costs=costs, ahead=Ahead(persistence_s=30.0))
    assert verdict.gain_s == pytest.approx(30.0 * (1 - 1.25 / 3))
    assert verdict.cost_s == pytest.approx(4 / 8 * 5.0)
    assert verdict.switch
    # Two and a half seconds of loss against 4.2 · 0.583 of gain: not worth it.
    assert not weigh_switch(wanted, current=current, target=target, costs=costs, ahead=Ahead(persistence_s=4.2)).switch
    assert not weigh_switch(wanted, current=target, target=target, costs=costs, ahead=Ahead(persistence_s=30.0)).switch


@given(st.floats(-0.99, 50.0), st.floats(-0.99, 50.0))
def test_a_larger_margin_never_stretches_more_and_an_endless_one_not_at_all(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert stretch(low) >= stretch(high) >= 1.0
    assert stretch(math.inf) == 1.0
    assert stretch(0.0) == pytest.approx(2.0)


@given(needs, needs, st.integers(2, 12), st.integers(1, 11), st.floats(0.0, 100.0))
def test_never_is_a_smaller_margin_paid_for(a: float, b: float, workers: int, prefill: int, persist_s: float) -> None:
    current = Configuration(min(prefill, workers - 1), workers - min(prefill, workers - 1))
    wanted = demand(a, b)
    verdict = weigh_switch(
        wanted,
        current=current,
        target=target_configuration(wanted, workers),
        costs=SwitchCosts(),
        ahead=Ahead(persistence_s=persist_s),
    )
    assert verdict.gain_s >= 0.0
    if verdict.switch:
        assert verdict.margin > verdict.margin_before


def test_a_switch_is_weighed_for_a_queue_until_it_is_gone_and_for_what_comes_after_it() -> None:
    queue, after = demand(3.0, 1.0), demand(0.5, 3.0)
    current, target = Configuration(4, 4), Configuration(6, 2)

    def gain_s(**ahead: float) -> float:
        asked = Ahead(persistence_s=30.0, later=after, **ahead)
        return weigh_switch(queue, current=current, target=target, costs=SwitchCosts(), ahead=asked).gain_s

    # The queue loads 3 / 4 of prefill, then 1 / 2: 1.5625 to 1.25. After it decode is loaded by 3 / 4, then 3 / 2.
    now, later = 1.0 - 1.25 / 1.5625, 1.0 - 3.0 / 1.5625
    assert gain_s(later_from_s=29.0) == pytest.approx(29.0 * now + 1.0 * later)
    assert gain_s(later_from_s=40.0) == pytest.approx(30.0 * now)
    assert gain_s(later_from_s=29.0, bound_s=32.0) == pytest.approx(29.0 * now + 3.0 * later)
    assert gain_s(later_from_s=20.0, bound_s=60.0) == 0.0
    # What is good for longer than demand is known to last is not counted: only what it would lose.
    lasting = Ahead(persistence_s=30.0, bound_s=60.0)
    verdict = weigh_switch(queue, current=current, target=target, costs=SwitchCosts(), ahead=lasting)
    assert verdict.gain_s == pytest.approx(30.0 * now)


@given(needs, needs, needs, needs, st.floats(0.0, 100.0), st.floats(0.0, 100.0), st.integers(2, 12))
def test_what_comes_later_and_is_worse_never_makes_a_switch_better(
    a: float, b: float, later_a: float, later_b: float, later_from_s: float, bound_s: float, workers: int
) -> None:
    wanted, later = demand(a, b), demand(later_a, later_b)
    current, target = Configuration(1, workers - 1), target_configuration(wanted, workers)

    def gain_s(ahead: Ahead, of: Demand = wanted) -> float:
        return weigh_switch(of, current=current, target=target, costs=SwitchCosts(), ahead=ahead).gain_s

    persistence_s = 30.0
    alone_s = gain_s(Ahead(persistence_s=persistence_s), later)
    now_s = gain_s(Ahead(persistence_s=persistence_s))
    found_s = gain_s(Ahead(persistence_s=persistence_s, later=later, later_from_s=later_from_s, bound_s=bound_s))
    assert 0.0 <= found_s <= max(now_s, alone_s) + 1e-9
