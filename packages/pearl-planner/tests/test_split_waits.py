"""What splits waited: smoothing by hand, and what is forgotten."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl_planner.split_waits import WaitMemory


def test_waits_are_parts_of_a_step_and_the_newest_counts_three_tenths() -> None:
    memory = WaitMemory().with_step(2, 5.0, 20.0)
    assert memory.part(2) == 0.25
    assert memory.with_step(2, 1.0, 20.0).part(2) == pytest.approx(0.25 - 0.3 * 0.2)
    assert memory.with_step(2, 1.0, 0.0) == memory


def test_two_splits_are_compared_only_where_both_are_known() -> None:
    memory = WaitMemory().with_step(2, 5.0, 20.0)
    assert memory.saves(2, 3) is None
    assert memory.saves(3, 2) is None
    assert memory.with_step(3, 1.0, 20.0).saves(2, 3) == pytest.approx(0.2)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 3), st.floats(0, 50), st.floats(1, 100)), min_size=1, max_size=30))
def test_a_split_that_was_not_in_use_for_long_is_forgotten(steps: list[tuple[int, float, float]]) -> None:
    memory = WaitMemory(keep_steps=4)
    for ranks, waited_s, step_s in steps:
        memory = memory.with_step(ranks, waited_s, step_s)
    used = {ranks: age for age, (ranks, _, _) in reversed(list(enumerate(reversed(steps))))}
    assert {ranks: wait.age for ranks, wait in memory.seen.items()} == {r: a for r, a in used.items() if a <= 4}
    parts = [waited_s / step_s for _, waited_s, step_s in steps]
    assert all(-1e-9 <= wait.part <= max(parts) + 1e-9 for wait in memory.seen.values())
