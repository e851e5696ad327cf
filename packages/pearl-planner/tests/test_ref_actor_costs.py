"""Appendix A by hand, the choice of the mode, and the rules that form and dispatch micro-batches."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl_planner.micro_batching import (
    form_micro_batches,
    least_rounds,
    logical_groups,
    ready_micro_batch,
    smallest_last,
    straggling,
    zig_zag,
)
from pearl_planner.ref_actor import (
    MicroBatchCosts,
    ReadinessSignals,
    RefActorMode,
    TrainerShape,
    arrivals,
    backlog_s,
    break_even_ras,
    choose_mode,
    colocated_pipeline_s,
    colocated_s,
    decoupled_pipeline_s,
    decoupled_s,
    fastest_references,
    signals,
)

COSTS = MicroBatchCosts(ref_forward_s=1.0, actor_forward_s=1.0, actor_backward_s=2.0, swap_s=0.5)


def test_printed_decoupled_cost_is_the_fill_plus_the_larger_of_gap_and_actor_time() -> None:
    """M = 3: fill 0 + 1 + 2. N0 = 2 ready (3 each), δ3 = max(a3, 0) = 5, δ4 = 2 (the actor's 3 count), δ5 = 6."""
    assert decoupled_s((-1.0, 0.0, 5.0, 7.0, 13.0), COSTS, actors=3) == 3 + 3 + 3 + 5 + 3 + 6


def test_printed_colocated_cost_follows_the_five_steps() -> None:
    """T = 0, k = 2: 0.5 + 2 + 0.5 + 6 = 9; by then a3 and a4 arrived: 0.5 + 2 + 0.5 + 6 → 18; wait for 30, → 35."""
    assert colocated_s((0.0, 0.0, 5.0, 9.0, 30.0), COSTS) == 35.0


def test_aggregation_is_capped_by_memory() -> None:
    """k = 1 each: 4 s a micro-batch (two swaps, reference, actor)."""
    assert colocated_s((0.0, 0.0, 0.0), COSTS, aggregate=1) == 3 * 5.0
    assert colocated_s((0.0, 0.0, 0.0), COSTS, aggregate=2) == (1.0 + 2 + 6) + 5.0


def test_the_pipeline_follows_figure_6() -> None:
    """Three actors: F0, F3, F6 end at 1; references at 1, 2, 3; backwards at 3, 4, 5; then the second round."""
    shape = TrainerShape(ranks=4)
    assert decoupled_pipeline_s((0.0,) * 3, COSTS, shape) == 5.0
    # Actors are free at 3, 4, 5; the references 4, 5, 6 are over when the forwards (4, 5, 6) are.
    assert decoupled_pipeline_s((0.0,) * 6, COSTS, shape) == 8.0
    assert colocated_pipeline_s((0.0,) * 8, COSTS, shape) == 0.5 + 2 + 0.5 + 6


def test_signals_are_the_backlog_and_the_mean_gap() -> None:
    assert signals((0.0, 0.0, 4.0, 6.0, 10.0)) == ReadinessSignals(2, 3.0)
    assert signals((0.0, 0.0)) == ReadinessSignals(2, 0.0)
    assert signals((5.0,)) == ReadinessSignals(0, 5.0)
    assert signals(arrivals(5, ras=2, tprm_s=3.0)) == ReadinessSignals(2, 3.0)


def test_a_backlog_with_dear_swaps_is_decoupled_and_a_sparse_stream_colocated() -> None:
    shape = TrainerShape(ranks=4, aggregate=1)
    dear = MicroBatchCosts(ref_forward_s=0.3, actor_forward_s=0.3, actor_backward_s=0.6, swap_s=1.0)
    assert choose_mode(arrivals(16, ras=16, tprm_s=0.0), dear, shape).mode is RefActorMode.DECOUPLED
    sparse = choose_mode(arrivals(4, ras=0, tprm_s=30.0), dear, shape, margin=0.05)
    assert sparse.mode is RefActorMode.COLOCATED
    assert choose_mode((0.0,), dear, TrainerShape(ranks=1)).mode is RefActorMode.COLOCATED


def test_break_even_is_where_the_choice_turns() -> None:
    shape = TrainerShape(ranks=4, aggregate=1)
    dear = MicroBatchCosts(ref_forward_s=0.3, actor_forward_s=0.3, actor_backward_s=0.6, swap_s=0.4)
    ras = break_even_ras(12, 20.0, dear, shape, margin=0.05)
    assert ras is not None
    assert 0 < ras <= 12
    at = choose_mode(arrivals(12, ras=ras, tprm_s=20.0), dear, shape, margin=0.05)
    below = choose_mode(arrivals(12, ras=ras - 1, tprm_s=20.0), dear, shape, margin=0.05)
    assert (at.mode, below.mode) == (RefActorMode.DECOUPLED, RefActorMode.COLOCATED)
    free = MicroBatchCosts(ref_forward_s=1, actor_forward_s=1, actor_backward_s=2, swap_s=0)
    assert break_even_ras(12, 0.0, free, TrainerShape(ranks=2)) is None


@settings(max_examples=80)
@given(
    st.lists(st.floats(0, 20), min_size=1, max_size=12),
    st.floats(0.01, 2),
    st.floats(0.01, 2),
    st.floats(0, 2),
    st.integers(2, 5),
)
def test_no_mode_beats_its_own_bounds(
    times: list[float], reference_s: float, actor_s: float, swap_s: float, ranks: int
) -> None:
    ready = sorted(times)
    costs = MicroBatchCosts(
        ref_forward_s=reference_s, actor_forward_s=actor_s, actor_backward_s=2 * actor_s, swap_s=swap_s
    )
    shape = TrainerShape(ranks=ranks)
    apart, together = decoupled_pipeline_s(ready, costs, shape), colocated_pipeline_s(ready, costs, shape)
    last = ready[-1] + max(reference_s, actor_s) + 2 * actor_s
    assert apart >= max(last, len(ready) * reference_s + 2 * actor_s) - 1e-9
    assert apart >= len(ready) * 3 * actor_s / (ranks - 1) - 1e-9
    work = len(ready) * (reference_s + 3 * actor_s) / ranks
    assert together >= max(ready[-1] + 2 * swap_s + reference_s + 3 * actor_s, work + 2 * swap_s) - 1e-9
    later = [t + 1.0 for t in ready]
    assert decoupled_pipeline_s(later, costs, shape) <= apart + 1.0 + 1e-9
    assert colocated_s(ready, costs) >= len(ready) * (reference_s + 3 * actor_s) + 2 * swap_s - 1e-9


def test_bad_costs_and_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="swap_s"):
        MicroBatchCosts(ref_forward_s=1, actor_forward_s=1, actor_backward_s=1, swap_s=-1)
    with pytest.raises(ValueError, match="two ranks"):
        decoupled_pipeline_s((0.0,), COSTS, TrainerShape(ranks=1))
    with pytest.raises(ValueError, match="ascend"):
        decoupled_s((1.0, 0.0), COSTS, 1)
    with pytest.raises(ValueError, match="ras"):
        arrivals(3, ras=-1, tprm_s=0)


def test_first_micro_batches_fill_the_ranks_and_the_last_is_small() -> None:
    """Two ranks of 100: 90 + 80 + 70 = 240 ≥ 200, then 60 + 50 + 40 + 30 + 20 = 200 leave 10 for the last."""
    lengths = [10, 90, 20, 80, 30, 70, 40, 60, 50]
    batches = form_micro_batches(lengths, saturating_tokens=100, ranks=2)
    assert [[lengths[i] for i in batch] for batch in batches] == [[90, 80, 70], [60, 50, 40, 30, 20], [10]]
    even = form_micro_batches([100, 60, 40], saturating_tokens=100)
    assert even == ((0,), (1,), (2,))
    assert form_micro_batches([100], saturating_tokens=100) == ((0,),)
    assert form_micro_batches([], saturating_tokens=100) == ()


def test_a_micro_batch_waits_until_it_fills_the_ranks_unless_it_is_the_last() -> None:
    assert ready_micro_batch([60, 50], saturating_tokens=100, ranks=1, last=False) == 2
    assert ready_micro_batch([60, 50, 90], saturating_tokens=100, ranks=1, last=False) == 2
    assert ready_micro_batch([60], saturating_tokens=100, ranks=1, last=False) == 0
    assert ready_micro_batch([60], saturating_tokens=100, ranks=1, last=True) == 1
    assert ready_micro_batch([], saturating_tokens=100, ranks=1, last=True) == 0


def test_zig_zag_deals_the_longest_to_and_fro() -> None:
    lengths = [8, 7, 6, 5, 4, 3, 2, 1]
    assert zig_zag(lengths, 2) == ((0, 3, 4, 7), (1, 2, 5, 6))
    assert [sum(lengths[i] for i in share) for share in zig_zag(lengths, 2)] == [18, 18]


def test_smallest_last_feeds_the_smallest_sequence_at_the_end() -> None:
    """9 → r0, 7 → r1, 5 → r1 (7 < 9), 3 → r0 (9 < 12), 1 → r0 or r1 (12 = 12: r0)."""
    assert smallest_last([1, 9, 3, 7, 5], 2) == ((1, 2, 0), (3, 4))


def test_logical_ranks_get_sequences_of_like_lengths() -> None:
    lengths = [10, 100, 12, 98, 50, 52, 11, 99]
    groups = logical_groups(lengths, ranks=4, group_size=2)
    assert groups == (((1, 7), (6, 0)), ((3, 5), (4, 2)))
    mixed = (((1, 0), (3, 2)), ((4, 6), (7, 5)))
    assert sum(straggling(lengths, g) for g in groups) < sum(straggling(lengths, g) for g in mixed)
    assert least_rounds(8, 4) == 2
    with pytest.raises(ValueError, match="divide"):
        logical_groups(lengths, ranks=4, group_size=3)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 900))
def test_every_sequence_is_dispatched_once_and_loads_are_even(lengths: list[int], ranks: int, full: int) -> None:
    everything = list(range(len(lengths)))
    for shares in (zig_zag(lengths, ranks), smallest_last(lengths, ranks)):
        assert sorted(i for share in shares for i in share) == everything
        loads = [sum(lengths[i] for i in share) for share in shares]
        assert max(loads) - min(loads) <= max(lengths)
    batches = form_micro_batches(lengths, saturating_tokens=full, ranks=ranks)
    assert sorted(i for batch in batches for i in batch) == everything
    sums = [sum(lengths[i] for i in batch) for batch in batches]
    assert all(tokens >= full * ranks for tokens in sums[:-2])
    assert sums[-1] == min(sums) or len(sums) == 1
    for dealt in (logical_groups(lengths, ranks * 2, 2),):
        assert sorted(i for group in dealt for members in group for i in members) == everything


@settings(max_examples=50)
@given(st.tuples(*[st.floats(0.0, 10.0)] * 4), st.integers(1, 64), st.integers(1, 9))
def test_no_number_of_reference_ranks_is_through_a_backlog_before_the_fastest(
    seconds: tuple[float, float, float, float], micro_batches: int, ranks: int
) -> None:
    costs = MicroBatchCosts(
        ref_forward_s=seconds[0], actor_forward_s=seconds[1], actor_backward_s=seconds[2], swap_s=seconds[3]
    )

    def took(references: int) -> float:
        return backlog_s(micro_batches, costs, actors=ranks - references, references=references)

    assert took(fastest_references(micro_batches, costs, ranks)) == min(took(number) for number in range(ranks))


def test_two_ranks_may_be_one_of_each() -> None:
    """64 x 3 = 192 s with one for the reference; colocated 64 x 4 / 2 = 128 s, and two swaps of 50 s."""
    assert fastest_references(64, COSTS, 2) == 0
    slow = MicroBatchCosts(ref_forward_s=1.0, actor_forward_s=1.0, actor_backward_s=2.0, swap_s=50.0)
    assert fastest_references(64, slow, 2) == 1
