"""One figure says how far predictions are off, also where batches are complete in bursts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl_rl.prediction_error import overlapping_batches, prediction_error

STEPS = st.lists(st.tuples(st.floats(0.1, 1e4), st.floats(0.1, 1e4)), min_size=1, max_size=12)


def test_with_one_batch_at_a_time_it_is_the_weighted_absolute_error() -> None:
    assert prediction_error([(100.0, 90.0), (50.0, None), (300.0, 340.0)]) == pytest.approx(50 / 400)
    assert prediction_error([(1.0, None)]) is prediction_error([]) is None


def test_a_burst_after_a_wait_counts_as_the_steps_that_overlapped() -> None:
    # Three batches of which the models foresee one every 400 s come within 1,200 s, all at the end: nothing is off.
    bursts = [(1000.0, 400.0), (100.0, 400.0), (100.0, 400.0)]
    assert prediction_error(bursts, overlap=3) == pytest.approx(0.0)
    assert prediction_error(bursts) == pytest.approx(1.0)
    # A fourth step alone says nothing, unless there is nothing else.
    assert prediction_error([*bursts, (80.0, 400.0)], overlap=3) == pytest.approx(0.0)
    assert prediction_error([(80.0, 40.0)], overlap=3) == pytest.approx(0.5)


@given(steps=STEPS, overlap=st.integers(1, 5))
def test_exact_predictions_are_off_by_nothing_whatever_overlaps(steps: list[tuple[float, float]], overlap: int) -> None:
    assert prediction_error([(measured, measured) for measured, _ in steps], overlap) == pytest.approx(0.0, abs=1e-9)
    error = prediction_error(steps, overlap)
    assert error is not None
    assert error >= 0


@pytest.mark.parametrize(
    ("injection", "policy", "batches"),
    [
        ("auto", "pearl", 1),
        ("batch", "pearl+tiderl", 1),
        ("", "pearl+prorsa+tiderl", 5),
        ("continuous", "pearl", 5),
        ("auto", "tiderl", 5),
    ],
)
def test_batches_overlap_where_groups_enter_as_the_bound_allows(injection: str, policy: str, batches: int) -> None:
    assert overlapping_batches(injection, policy, 4) == batches
