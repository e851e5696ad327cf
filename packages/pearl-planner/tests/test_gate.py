"""The benefit-aware gate, eq. (7), and the account of what a toggle costs."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl_planner.gate import ToggleCosts, borrow_gate

times = st.floats(0.0, 1e4)


@given(st.integers(0, 64), times, times, times)
def test_it_borrows_exactly_where_eq_7_holds(remaining, ded_s, full_s, cost_s):
    verdict = borrow_gate(remaining=remaining, batch=64, ded_s=ded_s, full_s=full_s, toggle_cost_s=cost_s)
    assert verdict.borrow is (remaining / 64 * (ded_s - full_s) > cost_s)
    assert verdict.cost_s == cost_s


@given(st.integers(1, 64), times, times, times)
def test_it_never_opens_as_the_batch_runs_out(remaining, ded_s, full_s, cost_s):
    """R only falls: a window that does not pay now will not pay later."""
    late = borrow_gate(remaining=remaining - 1, batch=64, ded_s=ded_s, full_s=full_s, toggle_cost_s=cost_s)
    now = borrow_gate(remaining=remaining, batch=64, ded_s=ded_s, full_s=full_s, toggle_cost_s=cost_s)
    assert now.borrow or not late.borrow


def test_no_dedicated_worker_means_an_endless_batch_that_any_borrow_ends():
    assert borrow_gate(remaining=1, batch=64, ded_s=math.inf, full_s=90.0, toggle_cost_s=9.4).borrow
    assert not borrow_gate(remaining=0, batch=64, ded_s=math.inf, full_s=90.0, toggle_cost_s=9.4).borrow
    assert not borrow_gate(remaining=64, batch=64, ded_s=math.inf, full_s=math.inf, toggle_cost_s=9.4).borrow


def test_the_verdict_says_why():
    verdict = borrow_gate(remaining=32, batch=64, ded_s=120.0, full_s=80.0, toggle_cost_s=9.44)
    assert verdict.benefit_s == 20.0
    assert verdict.reason == "32/64 x (120.00 - 80.00) s = 20.00 s > 9.44 s"


@pytest.mark.parametrize(
    "bad",
    [
        {"remaining": -1},
        {"remaining": 65},
        {"batch": 0, "remaining": 0},
        {"ded_s": math.nan},
        {"full_s": math.nan},
        {"toggle_cost_s": math.nan},
        {"toggle_cost_s": -1.0},
    ],
)
def test_numbers_that_mean_nothing_are_refused(bad):
    good = {"remaining": 10, "batch": 64, "ded_s": 100.0, "full_s": 80.0, "toggle_cost_s": 9.0}
    with pytest.raises(ValueError, match=r"needs|numbers"):
        borrow_gate(**{**good, **bad})


def test_the_prior_holds_until_something_was_measured_and_measurements_are_averaged():
    costs = ToggleCosts(prior_activation_s=6.0, prior_deactivation_s=3.0, weight=0.5)
    assert costs.toggle_s == 9.0
    first = costs.observe_activation(2.0)
    assert first.toggle_s == 5.0
    assert first.observe_deactivation(1.0).toggle_s == 3.0
    assert first.observe_activation(4.0).activation_s == 3.0
    assert costs.activation_s is None


def test_steps_with_and_without_borrowing_are_accounted_apart():
    costs = ToggleCosts(weight=0.5).observe_step(True, 80.0).observe_step(False, 120.0).observe_step(True, 90.0)
    assert (costs.borrowed_step_s, costs.plain_step_s) == (85.0, 120.0)
    assert (costs.borrowed_steps, costs.plain_steps) == (2, 1)


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=30))
def test_an_average_stays_within_what_was_seen(seconds):
    costs = ToggleCosts()
    for value in seconds:
        costs = costs.observe_activation(value)
    assert costs.activation_s is not None
    assert min(seconds) - 1e-9 <= costs.activation_s <= max(seconds) + 1e-9
    assert costs.activations == len(seconds)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -0.1])
def test_a_duration_is_a_finite_number(seconds):
    for observe in (
        ToggleCosts().observe_activation,
        ToggleCosts().observe_deactivation,
        lambda s: ToggleCosts().observe_step(True, s),
    ):
        with pytest.raises(ValueError, match="a duration is a finite number"):
            observe(seconds)
