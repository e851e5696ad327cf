"""Elastic Resource Scaling: each reason by hand, and bounds that hold."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl_planner.gate import ToggleCosts
from pearl_planner.readiness import (
    BatchInterval,
    BufferReadiness,
    RankSplit,
    ReadinessSettings,
    consumption_deficit,
    decide_scaling,
    fixed_batch,
    generation_deficit,
    lends,
)
from pearl_planner.ref_actor import MicroBatchCosts, RefActorMode
from pearl_planner.split_waits import WaitMemory
from pearl_state.decision import ScalingReason

SETTINGS = ReadinessSettings(batch=BatchInterval(minimum=32, ideal=64), retention_steps=2, hidden_s=3.0)
BUFFER = BufferReadiness(volume=64, ready=64, ras=4, tprm_s=5.0, head_of_line_s=10.0, step_s=60.0, break_even_ras=8)
SPLIT = RankSplit(rollout=4, actor=4)


def test_deficits_are_what_the_buffer_lacks_and_what_waits_too_long() -> None:
    assert generation_deficit(replace(BUFFER, volume=40, ready=40), SETTINGS.batch) == 24
    assert generation_deficit(replace(BUFFER, volume=90), SETTINGS.batch) == 0
    assert not consumption_deficit(BUFFER, SETTINGS)
    assert consumption_deficit(replace(BUFFER, head_of_line_s=61.0), SETTINGS)
    assert consumption_deficit(replace(BUFFER, ras=8), SETTINGS)
    assert not consumption_deficit(replace(BUFFER, ras=99, break_even_ras=None), SETTINGS)
    assert not consumption_deficit(replace(BUFFER, volume=63, head_of_line_s=999.0), SETTINGS)


def test_a_starving_trainer_colocates_and_its_reference_ranks_go_to_rollout() -> None:
    split = RankSplit(rollout=3, actor=4, reference=1)
    made = decide_scaling(replace(BUFFER, volume=40, ready=40), split, SETTINGS)
    assert (made.reason, made.mode) == (ScalingReason.GENERATION_DEFICIT, RefActorMode.COLOCATED)
    assert made.split == RankSplit(rollout=4, actor=4)
    again = decide_scaling(replace(BUFFER, volume=40, ready=40), made.split, SETTINGS)
    assert again.split == made.split
    worse = decide_scaling(replace(BUFFER, volume=10), made.split, SETTINGS)
    assert worse.split == RankSplit(rollout=5, actor=3)


def test_a_backlog_takes_one_rollout_rank_for_the_reference_at_a_time() -> None:
    backlog = replace(BUFFER, head_of_line_s=61.0)
    first = decide_scaling(backlog, SPLIT, SETTINGS)
    assert (first.reason, first.mode) == (ScalingReason.CONSUMPTION_DEFICIT, RefActorMode.DECOUPLED)
    assert first.split == RankSplit(rollout=3, actor=4, reference=1)
    second = decide_scaling(backlog, first.split, SETTINGS)
    assert second.split == RankSplit(rollout=2, actor=5, reference=1)
    least = decide_scaling(backlog, RankSplit(rollout=1, actor=6, reference=1), SETTINGS)
    assert least.split.rollout == 1


@pytest.mark.parametrize("field", ["cold_start", "evaluating"])
def test_cold_starts_and_evaluations_send_everything_to_rollout_at_once(field: str) -> None:
    made = decide_scaling(replace(BUFFER, **{field: True}), RankSplit(rollout=2, actor=5, reference=1), SETTINGS)
    assert made.split == RankSplit(rollout=7, actor=1)
    assert made.reason is (ScalingReason.COLD_START if field == "cold_start" else ScalingReason.EVALUATION)


def test_a_balanced_buffer_moves_nobody() -> None:
    made = decide_scaling(BUFFER, SPLIT, SETTINGS)
    assert (made.split, made.reason, made.exposed_s) == (SPLIT, ScalingReason.BALANCED, 0.0)


def test_after_a_scale_down_of_rollout_the_trainer_takes_less_for_a_while() -> None:
    """Two steps at half of what is ready, within [32, 64], then B_ideal again."""
    made = decide_scaling(replace(BUFFER, volume=100, ready=100, head_of_line_s=61.0), SPLIT, SETTINGS)
    assert (made.fetch, made.paced_steps) == (50, 2)
    then = decide_scaling(replace(BUFFER, volume=40, ready=40), made.split, SETTINGS, paced_steps=made.paced_steps)
    assert (then.fetch, then.paced_steps) == (32, 1)
    last = decide_scaling(BUFFER, then.split, SETTINGS, paced_steps=then.paced_steps)
    assert (last.fetch, last.paced_steps) == (64, 0)


def test_a_move_costs_what_the_broadcast_does_not_hide_by_the_account_of_borrowing() -> None:
    costs = ToggleCosts(prior_activation_s=4.0, prior_deactivation_s=2.0)
    backlog = replace(BUFFER, head_of_line_s=61.0)
    assert decide_scaling(backlog, SPLIT, SETTINGS, costs=costs).exposed_s == 3.0
    seen = costs.observe_activation(1.0).observe_deactivation(1.0)
    assert decide_scaling(backlog, SPLIT, SETTINGS, costs=seen).exposed_s == 0.0


@settings(max_examples=100)
@given(
    st.integers(1, 7),
    st.integers(0, 3),
    st.integers(1, 5),
    st.integers(0, 200),
    st.integers(0, 20),
    st.floats(0, 200),
    st.booleans(),
    st.integers(0, 2),
)
def test_ranks_are_conserved_bounds_hold_and_the_trainer_grows_by_one(
    rollout: int, reference: int, actor: int, ready: int, ras: int, waits_s: float, evaluating: bool, paced: int
) -> None:
    split = RankSplit(rollout=rollout, actor=actor, reference=reference)
    buffer = replace(BUFFER, volume=ready, ready=ready // 2, ras=ras, head_of_line_s=waits_s, evaluating=evaluating)
    made = decide_scaling(buffer, split, SETTINGS, paced_steps=paced)
    assert made.split.total == split.total
    assert made.split.rollout >= min(SETTINGS.min_rollout_ranks, split.rollout)
    assert made.split.actor >= min(SETTINGS.min_actor_ranks, split.actor)
    assert split.rollout - made.split.rollout <= SETTINGS.max_trainer_growth
    assert SETTINGS.batch.minimum <= made.fetch <= SETTINGS.batch.ideal


def test_a_batch_interval_must_be_one() -> None:
    with pytest.raises(ValueError, match="minimum <= ideal"):
        BatchInterval(minimum=5, ideal=4)
    assert fixed_batch(64).batch == BatchInterval(minimum=64, ideal=64)


def test_what_was_lent_for_an_evaluation_comes_back_at_once() -> None:
    before = RankSplit(rollout=2, actor=5, reference=1)
    made = decide_scaling(replace(BUFFER, evaluating=True), before, SETTINGS)
    assert (made.split.rollout, made.lent) == (7, before)
    after = decide_scaling(BUFFER, made.split, SETTINGS, lent=made.lent)
    assert (after.split, after.lent) == (before, None)


def test_a_trainer_that_waits_for_each_micro_batch_starves() -> None:
    """None ready, one each 5 s, 2 s of work: RAS and TPRM say so although the volume was enough."""
    slow = replace(BUFFER, ras=0, tprm_s=5.0, micro_batch_s=2.0)
    made = decide_scaling(slow, SPLIT, SETTINGS)
    assert (made.reason, made.split) == (ScalingReason.GENERATION_DEFICIT, RankSplit(rollout=5, actor=3))
    assert decide_scaling(replace(slow, micro_batch_s=6.0), SPLIT, SETTINGS).split == SPLIT
    assert decide_scaling(replace(slow, ras=1), SPLIT, SETTINGS).split == SPLIT


def test_an_evaluation_leaves_the_trainer_what_it_needs_to_be_through_when_rollout_is() -> None:
    """Eight micro-batches of 2 s on 4 ranks are 64 rank-seconds; 8 - 4 lacking and 12 of evaluation at 5 s on 4 ranks
    320: with 2 ranks of training 32 s against 53 s, with one 64 s against 46 s."""
    known = replace(BUFFER, evaluating=True, micro_batch_s=2.0, micro_batches=8, evaluation_load=12.0)
    assert decide_scaling(known, SPLIT, SETTINGS).split == RankSplit(rollout=6, actor=2)
    assert decide_scaling(replace(known, evaluation_load=100.0), SPLIT, SETTINGS).split == RankSplit(rollout=7, actor=1)
    assert decide_scaling(replace(known, micro_batch_s=90.0), SPLIT, SETTINGS).split == SPLIT


def test_an_evaluation_after_another_reckons_with_the_ranks_that_its_times_were_measured_on() -> None:
    """The same work as two ranks of training and six of rollout see it, which the evaluation before left."""
    first = replace(BUFFER, evaluating=True, micro_batch_s=2.0, micro_batches=8, evaluation_load=12.0)
    made = decide_scaling(first, SPLIT, SETTINGS)
    second = replace(first, micro_batch_s=2.0 * 4 / made.split.actor, tprm_s=BUFFER.tprm_s * 4 / made.split.rollout)
    assert decide_scaling(second, made.split, SETTINGS, lent=made.lent).split == made.split


# ---- what splits waited ---------------------------------------------------------------------------------------------


def _seen(**parts: float) -> WaitMemory:
    """Splits by their rollout ranks (`r4=0.2`: four ranks waited a fifth of a step)."""
    memory = WaitMemory()
    for name, part in parts.items():
        memory = memory.with_step(int(name[1:]), part * 60.0, 60.0)
    return memory


def test_nobody_moves_for_a_deficit_while_nothing_waits_nor_to_a_split_that_waited_more() -> None:
    backlog, lack = replace(BUFFER, head_of_line_s=61.0), replace(BUFFER, volume=10)
    for buffer, there, rollout in ((backlog, "r3", 3), (lack, "r5", 5)):
        assert decide_scaling(buffer, SPLIT, SETTINGS, waits=_seen(r4=0.04)).split == SPLIT
        assert decide_scaling(buffer, SPLIT, SETTINGS, waits=_seen(**{there: 0.3, "r4": 0.2})).split == SPLIT
        for known in (_seen(r4=0.2), _seen(**{there: 0.1, "r4": 0.2}), WaitMemory()):
            assert decide_scaling(buffer, SPLIT, SETTINGS, waits=known).split.rollout == rollout


def test_a_rank_goes_back_to_a_split_that_waited_less() -> None:
    down = decide_scaling(BUFFER, SPLIT, SETTINGS, waits=_seen(r3=0.02, r4=0.1))
    assert (down.split.rollout, down.reason) == (3, ScalingReason.CONSUMPTION_DEFICIT)
    assert (down.fetch, down.paced_steps) == (64, 0)
    up = decide_scaling(BUFFER, SPLIT, SETTINGS, waits=_seen(r5=0.02, r3=0.05, r4=0.2))
    assert (up.split, up.reason) == (RankSplit(rollout=5, actor=3), ScalingReason.GENERATION_DEFICIT)
    assert decide_scaling(BUFFER, SPLIT, SETTINGS, waits=_seen(r3=0.06, r5=0.07, r4=0.1)).split == SPLIT


def test_of_several_ranks_that_would_move_at_once_the_split_that_they_lead_to_is_what_waited_more_or_less() -> None:
    backlog, fast = replace(BUFFER, head_of_line_s=61.0), replace(SETTINGS, max_trainer_growth=2)
    assert decide_scaling(backlog, SPLIT, fast, waits=_seen(r2=0.3, r3=0.1, r4=0.2)).split == SPLIT
    assert decide_scaling(backlog, SPLIT, fast, waits=_seen(r2=0.1, r3=0.3, r4=0.2)).split.rollout == 2
    apart = RankSplit(rollout=4, actor=2, reference=2)
    assert decide_scaling(BUFFER, apart, SETTINGS, waits=_seen(r4=0.2, r5=0.02, r6=0.3)).split == apart
    assert decide_scaling(BUFFER, apart, SETTINGS, waits=_seen(r4=0.2, r5=0.3, r6=0.02)).split.rollout == 6


def test_a_rank_that_rollout_gives_up_joins_the_mode_that_is_faster() -> None:
    """On five ranks: 64 x 3.5 / 5 = 44.8 s colocated, and 64 x 3 / 4 = 48 s decoupled; two swaps of 2 s turn it."""
    backlog = replace(BUFFER, head_of_line_s=61.0, micro_batches=64)
    costs = MicroBatchCosts(ref_forward_s=0.5, actor_forward_s=1.0, actor_backward_s=2.0, swap_s=0.0)
    assert decide_scaling(backlog, SPLIT, SETTINGS, training=costs).split == RankSplit(rollout=3, actor=5)
    swaps = replace(costs, swap_s=2.0)
    made = decide_scaling(backlog, SPLIT, SETTINGS, training=swaps)
    assert made.split == RankSplit(rollout=3, actor=4, reference=1)


# ---- what it means for lending --------------------------------------------------------------------------------------


def test_a_deficit_decides_on_lending_and_balance_leaves_it_to_the_gate() -> None:
    assert lends(None) is None
    assert lends(ScalingReason.BALANCED) is None
    assert lends(ScalingReason.CONSUMPTION_DEFICIT) is False
    assert all(
        lends(reason) is True
        for reason in (ScalingReason.COLD_START, ScalingReason.EVALUATION, ScalingReason.GENERATION_DEFICIT)
    )
