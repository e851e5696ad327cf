"""What switches cost, and what each policy may do."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl_planner.catalog import find_profile
from pearl_planner.decide import DecideSettings
from pearl_planner.policies import Policy, colocated_elastic, fixed, pearl, static_pd
from pearl_planner.switching import SwitchCosts, switch_between
from pearl_state.configuration import Configuration
from pearl_state.decision import Reason, SwitchKind
from pearl_state.profile import PlatformProfile, WorkloadProfile

COSTS = SwitchCosts(flip_s=5.0, relaunch_s=20.0, new_worker_s=10.0)
WORKLOAD = WorkloadProfile(**find_profile("swe-32k").workload)
PLATFORM = PlatformProfile(**find_profile("swe-32k").platform)


@pytest.mark.parametrize(
    ("current", "target", "kind", "cost_s"),
    [
        ("2P3D", "2P3D", SwitchKind.NONE, 0.0),
        ("2P3D", "3P2D", SwitchKind.FLIP, 1 / 5 * 5.0),
        ("5C", "2P3D", SwitchKind.RELAUNCH, 20.0),
        ("2P3D", "5C", SwitchKind.RELAUNCH, 20.0),
        ("2P3D", "3P3D", SwitchKind.NEW_WORKERS, 1 / 6 * 10.0),
        ("2P3D", "2P2D", SwitchKind.NEW_WORKERS, 0.0),
        ("2P3D", "1P5D", SwitchKind.FLIP, (5.0 + 10.0) / 6),
        ("4C", "2P4D", SwitchKind.RELAUNCH, (4 * 20.0 + 2 * 10.0) / 6),
        (None, "4C", SwitchKind.NEW_WORKERS, 10.0),
        ("0C", "4C", SwitchKind.NEW_WORKERS, 10.0),
        ("4C", "0C", SwitchKind.NEW_WORKERS, 0.0),
        (None, "0C", SwitchKind.NONE, 0.0),
    ],
)
def test_a_switch_costs_the_share_of_the_pool_that_it_keeps_from_serving(current, target, kind, cost_s):
    before = None if current is None else Configuration.parse(current)
    switch = switch_between(before, Configuration.parse(target), COSTS)
    assert switch.kind is kind
    assert switch.cost_s == pytest.approx(cost_s)


pairs = st.builds(Configuration, st.integers(1, 9), st.integers(1, 9))


@given(pairs, pairs)
def test_flips_are_the_fewest_that_any_choice_of_survivors_needs(current, target):
    switch = switch_between(current, target, COSTS)
    survivors = min(current.workers, target.workers)
    kept = min(current.prefill, target.prefill) + min(current.decode, target.decode)
    assert switch.flipped == max(0, survivors - kept)
    assert switch.joined - switch.left == target.workers - current.workers


def test_only_changed_roles_lose_their_prefixes():
    target = Configuration(3, 2)
    plain = switch_between(Configuration(2, 3), target, COSTS)
    cached = switch_between(Configuration(2, 3), target, COSTS, cached_prefill_s=30.0)
    assert cached.cost_s - plain.cost_s == pytest.approx(30.0 / 5 / 3)
    grown = switch_between(Configuration(2, 2), target, COSTS, cached_prefill_s=30.0)
    assert grown.cost_s == switch_between(Configuration(2, 2), target, COSTS).cost_s


def test_measured_switches_are_averaged_in():
    costs = SwitchCosts(flip_s=4.0, relaunch_s=8.0, new_worker_s=16.0, weight=0.25)
    assert costs.observe(SwitchKind.FLIP, 0.0).flip_s == 3.0
    assert costs.observe(SwitchKind.RELAUNCH, 0.0).relaunch_s == 6.0
    assert costs.observe(SwitchKind.NEW_WORKERS, 0.0).new_worker_s == 12.0
    assert costs.observe(SwitchKind.NONE, 3.0) == costs
    with pytest.raises(ValueError, match="flip took nan s"):
        costs.observe(SwitchKind.FLIP, math.nan)
    with pytest.raises(ValueError, match=r"SwitchCosts\.flip_s = -1"):
        SwitchCosts(flip_s=-1.0)


@pytest.mark.parametrize(
    ("policy", "expands", "borrows", "selected"),
    [
        (pearl(), True, True, "3P5D"),
        (colocated_elastic(), True, False, "8C"),
        (static_pd(Configuration(1, 1)), True, False, "4P4D"),
        (fixed(), False, False, "8C"),
        (fixed(Configuration(1, 3)), False, False, "2P6D"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_policies(policy: Policy, expands, borrows, selected):
    decision = policy.decide(workload=WORKLOAD, platform=PLATFORM, budget_workers=8)
    assert str(decision.selected) == selected
    assert (policy.expands, policy.borrows) == (expands, borrows)


def test_a_person_s_pin_comes_before_the_policy():
    pinned = Configuration(5, 3)
    for policy in (pearl(), colocated_elastic(), static_pd(Configuration(1, 1)), fixed()):
        decision = policy.decide(workload=WORKLOAD, platform=PLATFORM, budget_workers=8, pinned=pinned)
        assert (decision.selected, decision.reason) == (pinned, Reason.FIXED)


def test_pearl_takes_its_thresholds_and_costs_from_outside():
    eager = pearl(DecideSettings(ratio_threshold=0.0, mode_threshold=0.0), SwitchCosts(relaunch_s=0.0))
    decision = eager.decide(
        workload=WORKLOAD, platform=PLATFORM, budget_workers=8, current=Configuration.parse("8C"), steps_ahead=5.0
    )
    assert str(decision.selected) == "3P5D"
