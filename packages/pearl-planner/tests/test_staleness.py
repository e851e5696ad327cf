"""Which groups an update waits for: by hand, and whatever the order in which groups become complete."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl_planner.staleness import AgeingGroup, awaited
from pearl_state.trajectory import GroupId


def groups(*later_missing: tuple[int, int]) -> list[AgeingGroup]:
    """Groups 0, 1, … in the order opened."""
    return [
        AgeingGroup(id=GroupId(str(number)), later=later, missing=missing)
        for number, (later, missing) in enumerate(later_missing)
    ]


@pytest.mark.parametrize(
    ("open_", "expected"),
    [
        # Two an update. The first is this update's last chance.
        ([(0, 1), (1, 0), (1, 0)], ["0"]),
        # Three that the next update must take would be left, and it takes two: one of them must go now.
        ([(1, 3), (1, 1), (1, 2), (2, 0), (2, 0)], ["1"]),
        # One more is taken now in place of a young one; two are left.
        ([(1, 3), (1, 0), (1, 2), (2, 0), (2, 0)], []),
        # Five for two updates, and the young ones are complete: one of the five must go now, the one that lacks least.
        ([(2, 2), (2, 4), (2, 1), (2, 3), (2, 5), (3, 0), (3, 0)], ["2"]),
        # Both: the first must, and of the next three one.
        ([(0, 9), (1, 2), (1, 1), (1, 3), (2, 0), (2, 0)], ["0", "2"]),
        # All that is taken is as old: nothing would be gained by another one.
        ([(1, 0), (1, 0), (1, 1), (1, 1), (1, 1)], []),
        ([], []),
    ],
)
def test_an_update_waits_for_those_that_it_must_take_and_for_no_others(
    open_: list[tuple[int, int]], expected: list[str]
) -> None:
    assert awaited(groups(*open_), 2) == tuple(expected)


@given(
    bound=st.integers(0, 5),
    per_update=st.integers(1, 4),
    order=st.lists(st.integers(0, 1 << 30), min_size=1, max_size=200),
)
def test_whatever_the_order_no_group_becomes_too_old_and_no_update_waits_for_ever(
    bound: int, per_update: int, order: list[int]
) -> None:
    version = 0
    outstanding: dict[int, int] = {}  # group, in the order opened → version at its dispatch
    complete: set[int] = set()
    opened = 0
    for choice in order:
        while opened < (bound + version + 1) * per_update:
            outstanding[opened] = version
            opened += 1
        open_ = [number for number in outstanding if number not in complete]
        if open_:
            complete.add(open_[choice % len(open_)])
        while len(complete) >= per_update:
            state = [
                AgeingGroup(id=GroupId(str(n)), later=at + bound - version, missing=int(n not in complete))
                for n, at in outstanding.items()
            ]
            waits = awaited(state, per_update)
            assert {int(id_) for id_ in waits}.isdisjoint(complete)
            if waits:
                break
            for number in sorted(complete)[:per_update]:
                assert version - outstanding.pop(number) <= bound
                complete.remove(number)
            version += 1
        # Where all are complete, the next update finds what it takes.
        assert len(complete) < per_update or len(complete) < len(outstanding)
