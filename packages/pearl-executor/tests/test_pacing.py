"""What an emulated device costs."""

import math

import pytest

from pearl_executor.pacing import Pace


def test_a_decode_iteration_costs_a_fixed_part_and_one_for_each_sequence():
    pace = Pace(decode_fixed_s=0.02, decode_per_sequence_s=0.001)
    assert pace.decode_s(0) == 0.02
    assert pace.decode_s(16) == pytest.approx(0.036)


def test_prefill_costs_by_the_token_and_a_transfer_by_the_byte():
    pace = Pace(prefill_per_token_s=0.0001, kv_bytes_per_s=1e6, handover_s=0.005)
    assert pace.prefill_s(250) == pytest.approx(0.025)
    assert pace.transfer_s(20_000) == pytest.approx(0.025)


def test_nothing_is_paced_by_default_and_an_unlimited_link_is_free():
    pace = Pace()
    assert pace.decode_s(100) == pace.prefill_s(100) == pace.transfer_s(10**9) == 0.0


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_a_duration_that_no_device_has_is_refused_by_name(value):
    with pytest.raises(ValueError, match="resume_s"):
        Pace(resume_s=value)
