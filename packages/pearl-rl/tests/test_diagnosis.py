"""What a rollout waits for: the cause, whose duty it is, and whether more workers would help."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl_rl.rollout.diagnosis import DUTY, Cause, Observation, diagnose, told


def test_clients_that_time_out_while_engines_idle_are_the_routers_fault_and_no_reason_to_scale_up() -> None:
    """prime-rl#3211: 8,283 timeouts, engines at 1 % of their KV, a queue of 9."""
    found = diagnose(Observation(serving=4, in_flight=1268, waiting=1259, running=9, timeouts=8283, kv_used=0.01))
    assert (found.cause, found.duty, found.scale_up) == (Cause.ROUTER_STALL, "router", False)


@pytest.mark.parametrize(
    ("seen", "cause", "scale_up"),
    [
        (Observation(serving=4, in_flight=64, running=60, kv_used=0.95), Cause.KV_BOUND, True),
        (Observation(serving=4, in_flight=64, running=3), Cause.ENVIRONMENT_BOUND, False),
        (Observation(serving=0, draining=2, pending_weights=1), Cause.DRAIN, False),
        (Observation(serving=0, pending_weights=2, in_flight=9, waiting=9), Cause.WEIGHT_WAIT, False),
        (Observation(serving=0, in_flight=9, waiting=9), Cause.NO_WORKER, True),
        (Observation(serving=4), Cause.TRAINER, False),
        (Observation(serving=4, in_flight=64, running=40), Cause.NONE, False),
    ],
)
def test_each_cause_is_told_from_the_others(seen, cause, scale_up) -> None:
    found = diagnose(seen)
    assert (found.cause, found.scale_up) == (cause, scale_up)
    assert found.words


@given(
    st.builds(
        Observation,
        serving=st.integers(0, 9),
        draining=st.integers(0, 9),
        pending_weights=st.integers(0, 9),
        in_flight=st.integers(0, 99),
        waiting=st.integers(0, 99),
        timeouts=st.integers(0, 9),
        running=st.integers(0, 99),
        kv_used=st.none() | st.floats(0, 1),
    )
)
def test_more_workers_are_never_the_answer_while_those_there_are_idle(seen) -> None:
    found = diagnose(seen)
    assert found.duty == DUTY[found.cause]
    if seen.serving and (seen.kv_used is None or seen.kv_used < 0.9):
        assert not found.scale_up


def test_a_rollout_that_nothing_holds_up_is_nobody_s_to_mend() -> None:
    said = told(diagnose(Observation(serving=7, in_flight=64, running=64)))
    assert said == "nothing holds it up, it takes that long; 64 requests run on 7 workers"
    assert told(diagnose(Observation(serving=0))).startswith("no_worker, for the provider of GPUs to mend; nobody")
