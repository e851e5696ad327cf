"""Eqs. (1)-(3) as printed, and the extended model: equal without data, and term by term what each datum adds."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl_planner.capacity import least_decode_workers
from pearl_planner.extended import ExtendedModel, decode_per_sequence_s, residence_s, turn_groups, work_turns
from pearl_planner.makespan import PrintedModel, printed_colocated, printed_disaggregated
from pearl_state.errors import ProfileError
from pearl_state.profile import PlatformProfile, WorkloadProfile

seconds = st.floats(1e-6, 1.0)

BARE_WORKLOADS = st.builds(
    WorkloadProfile,
    batch=st.integers(1, 512),
    turns=st.floats(1.0, 60.0),
    new_prompt_tokens=st.floats(0.0, 5000.0),
    response_tokens=st.floats(1.0, 2000.0),
    bubble_ratio=st.floats(0.0, 5.0),
    environment_s=st.floats(0.0, 300.0),
)
BARE_PLATFORMS = st.builds(
    PlatformProfile,
    decode_fixed_s=seconds,
    decode_per_sequence_s=st.floats(0.0, 0.1),
    prefill_per_token_s=st.floats(1e-6, 1e-2),
    kv_bytes_per_token=st.floats(1.0, 1e6),
    transfer_bytes_per_s=st.floats(1e6, 1e12),
    overhead_per_turn_s=st.floats(0.0, 2.0),
)


def _grown(w, growth):
    contexts = tuple(w.context_tokens * (1.0 + growth * turn) for turn in range(len(w.active_by_turn)))
    return replace(w, context_by_turn=contexts)


FULL_WORKLOADS = st.builds(
    replace,
    BARE_WORKLOADS,
    slowest_turns=st.sampled_from([0.0, 1.0, 6.0, 30.0]),
    decoded_context_tokens=st.sampled_from([0.0, 3000.0, 30_000.0]),
    context_tokens=st.floats(0.0, 40_000.0),
    turn_environment_s=st.sampled_from([0.0, 0.01, 0.5, 5.0]),
    mean_turns=st.sampled_from([0.0, 0.5, 3.0]),
    active_by_turn=st.lists(st.floats(0.0, 1.0), max_size=40).map(
        lambda a: (1.0, *sorted(a, reverse=True)) if a else ()
    ),
)
FULL_WORKLOADS = st.builds(_grown, FULL_WORKLOADS, st.sampled_from([0.0, 0.1, 2.0]))
FULL_PLATFORMS = st.builds(
    replace,
    BARE_PLATFORMS,
    decode_per_context_token_s=st.sampled_from([0.0, 1e-8, 1e-6]),
    decode_context_tokens=st.sampled_from([0.0, 8000.0]),
    prefix_capacity_tokens=st.sampled_from([0.0, 1e4, 1e6]),
    kv_capacity_bytes=st.sampled_from([0.0, 1e9, 1e11]),
    handover_s=st.sampled_from([0.0, 0.01, 1.0]),
)
counts = st.integers(1, 40)

SWE = WorkloadProfile(
    batch=64, turns=16, new_prompt_tokens=1700, response_tokens=70, bubble_ratio=0.5, environment_s=60.0
)
H800 = PlatformProfile(
    decode_fixed_s=6.5e-3,
    decode_per_sequence_s=0.36e-3,
    prefill_per_token_s=20e-6,
    kv_bytes_per_token=147_456,
    transfer_bytes_per_s=80e9,
    overhead_per_turn_s=0.5,
)


@given(BARE_WORKLOADS, BARE_PLATFORMS, counts)
def test_eq_1_is_as_printed(w, p, n):
    turn = (
        w.batch * w.new_prompt_tokens / n * p.prefill_per_token_s
        + w.response_tokens * (p.decode_fixed_s + p.decode_per_sequence_s * w.batch / n)
        + p.overhead_per_turn_s
    )
    terms = printed_colocated(w, p, n)
    assert terms.total_s == pytest.approx(w.turns * turn + w.environment_s)
    assert terms.prefill_s + terms.decode_s + terms.overhead_s + terms.environment_s == pytest.approx(terms.total_s)


@given(BARE_WORKLOADS, BARE_PLATFORMS, counts, counts)
def test_eqs_2_and_3_are_as_printed(w, p, n_p, n_d):
    theta = w.bubble_ratio
    decode = (
        w.turns
        * w.response_tokens
        * (p.decode_fixed_s + p.decode_per_sequence_s * w.batch / (n_d * (1 + theta)))
        * (1 + theta)
    )
    insert = w.batch * w.new_prompt_tokens
    prefill = w.turns * (insert / n_p * p.prefill_per_token_s + insert * p.kv_bytes_per_token / p.transfer_bytes_per_s)
    terms = printed_disaggregated(w, p, n_p, n_d)
    assert terms.total_s == pytest.approx(max(prefill, decode) + w.environment_s)
    assert terms.prefill_s + terms.transfer_s == pytest.approx(prefill)
    assert terms.decode_s == pytest.approx(decode)
    assert terms.bottleneck == ("prefill" if terms.prefill_s + terms.transfer_s > terms.decode_s else "decode")


def test_a_pool_without_workers_has_no_makespan():
    with pytest.raises(ProfileError, match="needs at least 1"):
        printed_colocated(SWE, H800, 0)
    with pytest.raises(ProfileError, match="0P3D"):
        printed_disaggregated(SWE, H800, 0, 3)


@given(BARE_WORKLOADS, BARE_PLATFORMS, counts, counts)
def test_the_extended_model_is_the_printed_one_where_the_profile_lacks_data(w, p, n_p, n_d):
    extended, printed = ExtendedModel(w, p), PrintedModel(w, p)
    assert extended.is_printed
    for ours, theirs in (
        (extended.colocated(n_p), printed.colocated(n_p)),
        (extended.disaggregated(n_p, n_d), printed.disaggregated(n_p, n_d)),
    ):
        for name in ("total_s", "prefill_s", "decode_s", "transfer_s", "overhead_s", "environment_s"):
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-6, abs=1e-9)


@given(BARE_WORKLOADS, BARE_PLATFORMS, counts, counts)
def test_data_that_bind_nothing_change_nothing(w, p, n_p, n_d):
    """Room for every context, and every trajectory running through every turn."""
    turns = max(1, round(w.turns))
    w = replace(w, turns=turns, active_by_turn=(1.0,) * turns, mean_turns=turns, context_tokens=1000.0)
    p = replace(p, prefix_capacity_tokens=1e9, kv_capacity_bytes=1e18)
    printed = PrintedModel(w, p)
    extended = ExtendedModel(w, p)
    assert extended.colocated(n_p).total_s == pytest.approx(printed.colocated(n_p).total_s, rel=1e-6)
    assert extended.total_s(n_p, n_d) == pytest.approx(printed.total_s(n_p, n_d), rel=1e-6)


@given(FULL_WORKLOADS, FULL_PLATFORMS, st.integers(2, 60))
@settings(max_examples=60)
def test_paths_are_monotone_and_bisection_over_the_number_of_prefill_workers_finds_the_best(w, p, n):
    """But for prefixes lost to moves, which begin with the second prefill worker."""
    for model in (PrintedModel(w, p), ExtendedModel(w, p)):
        first, second = zip(*[model.paths(i, n - i) for i in range(1, n)], strict=True)
        totals = [model.total_s(i, n - i) for i in range(1, n)]
        assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(first))
        assert all(b >= a * (1 - 1e-12) for a, b in itertools.pairwise(second))
        low, high = 0, len(totals) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if totals[middle] <= totals[middle + 1] else (middle + 1, high)
        assert totals[low] <= 1.01 * min(totals)


@given(FULL_WORKLOADS, FULL_PLATFORMS, counts, counts)
def test_more_workers_are_never_slower(w, p, n_p, n_d):
    for model in (PrintedModel(w, p), ExtendedModel(w, p)):
        slack = 1 + 1e-9
        assert model.colocated(n_p + 1).total_s <= model.colocated(n_p).total_s * slack
        # The slowest trajectory may be one of few, long turns: it gains little where others get faster to decode.
        few = bool(w.turn_environment_s) and 0 < (w.slowest_turns or len(w.active_by_turn)) < w.turns
        assert few or model.total_s(n_p + 1, n_d) <= model.total_s(n_p, n_d) * slack
        assert model.total_s(n_p, n_d + 1) <= model.total_s(n_p, n_d) * slack
        assert model.total_s(n_p, n_d) == model.disaggregated(n_p, n_d).total_s


def test_evicted_prefixes_are_prefilled_again():
    """hit = min(1, N_P·cap/B), and the whole context on a miss."""
    w = replace(SWE, context_tokens=15_000.0)
    p = replace(H800, prefix_capacity_tokens=20 * 15_000.0)
    for n_p in (1, 2, 3, 4):
        hit = min(1.0, n_p * 20 / 64)
        tokens = hit * 1700 + (1 - hit) * 15_000
        terms = ExtendedModel(w, p).disaggregated(n_p, 4)
        assert terms.prefill_s == pytest.approx(16 * 64 * tokens * 20e-6 / n_p)
        assert terms.reprefill_s == pytest.approx(16 * 64 * (1 - hit) * (15_000 - 1700) * 20e-6 / n_p)
        shared = ExtendedModel(w, p).colocated(n_p)
        assert shared.prefill_s == pytest.approx(terms.prefill_s)
        assert shared.reprefill_s == pytest.approx(terms.reprefill_s)


def test_work_counts_the_trajectories_that_still_run_and_the_path_the_slowest_one():
    """S on the slowest trajectory overcounts work: two of sixteen turns hold half of the batch."""
    w = replace(SWE, active_by_turn=(1.0,) * 2 + (0.5,) * 14, bubble_ratio=0.0)
    assert work_turns(w) == 9.0
    assert sum(count for count, *_ in turn_groups(w)) == 16.0
    assert sum(count * running for count, running, _ in turn_groups(w)) == pytest.approx(9.0 * 64)
    terms = ExtendedModel(w, H800).colocated(4)
    assert terms.prefill_s == pytest.approx(9 * 64 / 4 * 1700 * 20e-6)
    assert terms.decode_s == pytest.approx(70 * (16 * 6.5e-3 + 9 * 0.36e-3 * 64 / 4))
    assert terms.overhead_s == 8.0
    by_mean = ExtendedModel(replace(SWE, mean_turns=9.0), H800).colocated(4)
    assert by_mean.total_s == pytest.approx(terms.total_s)


def test_a_small_prefill_pool_shows_although_the_batch_thins_out():
    """Turns with many trajectories wait for prefill, later ones for decode: neither path alone sees both."""
    w = replace(SWE, active_by_turn=(1.0,) * 4 + (0.02,) * 12, bubble_ratio=0.0)
    model = ExtendedModel(w, H800)
    assert model.total_s(1, 3) > max(model.paths(1, 3)) + 1.0


@given(
    st.integers(1, 500), st.integers(1, 16), st.integers(1, 16),
    st.floats(1e-3, 100.0), st.floats(1.0, 1e5), st.floats(2.0, 1e3),
)  # fmt: skip
def test_a_turn_is_nearly_the_exact_cycle_of_a_closed_network(batch, n_p, n_d, outside_s, prompt, response):
    w = replace(
        SWE, batch=batch, new_prompt_tokens=prompt, response_tokens=response,
        turn_environment_s=outside_s, environment_s=0.0,
    )  # fmt: skip
    each = (response - 1) * H800.decode_per_sequence_s
    f1, f2 = prompt * H800.prefill_per_token_s, (response - 0.5) * H800.decode_fixed_s + each
    g1, g2 = (batch - 1) / n_p * f1, max(0.0, (batch - 0.5) / n_d - 0.5) * each
    delay = outside_s + prompt * H800.kv_bytes_per_token / H800.transfer_bytes_per_s
    low, high = max(delay + f1 + f2, g1, g2), delay + f1 + g1 + f2 + g2
    for _ in range(100):
        middle = 0.5 * (low + high)
        free = middle > g1 and middle > g2
        if free and middle > delay + f1 * middle / (middle - g1) + f2 * middle / (middle - g2):
            high = middle
        else:
            low = middle
    assert ExtendedModel(w, H800).total_s(n_p, n_d) == pytest.approx(w.turns * high, rel=0.05)


def test_pools_that_are_balanced_make_each_other_wait():
    w = replace(SWE, turn_environment_s=0.1, environment_s=0.0)
    model = ExtendedModel(w, H800)
    totals = {n_p: model.disaggregated(n_p, 8 - n_p) for n_p in range(1, 8)}
    best = min(totals, key=lambda n_p: totals[n_p].total_s)
    assert totals[best].total_s > 1.05 * max(totals[best].prefill_s, model.paths(best, 8 - best)[1])
    # One prefill worker is far too few: what it computes is all that counts.
    assert totals[1].total_s == pytest.approx(totals[1].prefill_s, rel=0.02)


def test_the_first_token_is_prefill_s_and_a_request_joins_a_batch_between_iterations():
    w = replace(SWE, batch=1, turn_environment_s=1.0, environment_s=0.0)
    turn = 1.0 + 1700 * 20e-6 + 69.5 * 6.5e-3 + 69 * 0.36e-3
    bare = replace(H800, overhead_per_turn_s=0.0)
    assert ExtendedModel(w, bare).colocated(3).total_s == pytest.approx(16 * turn)
    turn += 1700 * 147_456 / 80e9
    assert ExtendedModel(w, bare).disaggregated(2, 3).total_s == pytest.approx(16 * turn)


def test_a_prefill_iteration_has_a_fixed_cost_that_prompts_share_where_many_wait():
    w = replace(SWE, turn_environment_s=1.0, environment_s=0.0)
    p = replace(H800, overhead_per_turn_s=0.0, prefill_fixed_s=0.05, prefill_marginal_s=10e-6)
    turn = 1.0 + 0.05 + 1700 * 10e-6 + 69.5 * 6.5e-3 + 69 * 0.36e-3
    assert ExtendedModel(replace(w, batch=1), p).colocated(3).total_s == pytest.approx(16 * turn)
    # On a busy colocated worker it is shared, but more prompts on it still take longer.
    free, fixed = ExtendedModel(w, replace(p, prefill_fixed_s=0.0, prefill_marginal_s=0.0)), ExtendedModel(w, p)
    assert fixed.colocated(4).total_s < fixed.colocated(3).total_s
    cheap = ExtendedModel(w, replace(p, prefill_fixed_s=1e-9))
    assert fixed.colocated(2).total_s - cheap.colocated(2).total_s < 16 * 32 * 0.05
    # Without that measurement, a token costs what the whole iteration did.
    assert free.colocated(3).prefill_s > cheap.colocated(3).prefill_s


def test_the_slowest_trajectory_may_be_one_of_few_and_long_turns():
    """S = 16 turns of mean length, which nobody took: at most 4. It decodes all of them, and waits for 4 prefills."""
    w = replace(SWE, batch=1, active_by_turn=(1.0,) * 4, turn_environment_s=1.0, environment_s=9.0)
    bare = replace(H800, overhead_per_turn_s=0.0)
    decode = 16 * (69.5 * 6.5e-3 + 69 * 0.36e-3)
    assert ExtendedModel(w, bare).colocated(3).total_s == pytest.approx(decode + 4 * 1700 * 20e-6 + 9.0)
    insert = 1700 * 20e-6 + 1700 * 147_456 / 80e9
    assert ExtendedModel(w, bare).disaggregated(2, 3).total_s == pytest.approx(decode + 4 * insert + 9.0)


def test_prefixes_lost_to_moves_and_new_weights_are_prefilled_again():
    w = replace(SWE, context_tokens=2700.0, moved_fraction=0.6, pair_moved_fraction=0.4, renewed_fraction=0.1)
    # Of 1000 tokens before each turn: (1 − 1/4)·0.6 + 0.1 under colocation, (1 − 1/2)·0.4 + 0.1 under disaggregation.
    assert ExtendedModel(w, H800).colocated(4).reprefill_s == pytest.approx(16 * 64 * 550 * 20e-6 / 4)
    assert ExtendedModel(w, H800).disaggregated(2, 3).reprefill_s == pytest.approx(16 * 64 * 300 * 20e-6 / 2)
    # One worker has nobody to lose a trajectory to, and two are never slower for all their moves.
    assert ExtendedModel(w, H800).disaggregated(1, 3).reprefill_s == pytest.approx(16 * 64 * 100 * 20e-6)
    long = ExtendedModel(replace(w, context_tokens=30_000.0, renewed_fraction=0.0), H800)
    assert long.disaggregated(2, 3).prefill_s == pytest.approx(long.disaggregated(1, 3).prefill_s)


@given(st.floats(1e-4, 10.0), st.floats(0.0, 100.0), st.floats(0.0, 100.0), st.floats(0.0, 10.0))
def test_the_residence_time_solves_the_closed_cycle(fixed, load, outside, more):
    x = residence_s(fixed, load, outside)
    assert x == pytest.approx(fixed + load * x / (x + outside), rel=1e-6)
    assert residence_s(fixed, load, 0.0) == pytest.approx(fixed + load)
    assert residence_s(fixed, load + more, outside) >= x * (1 - 1e-9)
    assert residence_s(fixed, load, outside + more) <= x * (1 + 1e-9)


def test_theta_follows_the_configuration_and_the_environment_counts_once():
    w = replace(SWE, turn_environment_s=3.0, environment_s=0.0)
    model = ExtendedModel(w, replace(H800, overhead_per_turn_s=0.0))
    few, many = model.disaggregated(4, 2).decode_s / 16, model.disaggregated(4, 16).decode_s / 16
    # Fewer decode workers: a longer decode, hence a smaller share of time outside it.
    assert 3.0 / few < 3.0 / many
    # Far from saturation a turn is its own prefill, decode of few sequences, and the environment, each once.
    alone = model.disaggregated(400, 400).total_s / 16
    assert alone == pytest.approx(3.0 + 0.034 + 70 * 6.5e-3, rel=0.02)
    # Saturated, environment time is hidden: throughput is what the decode pool gives.
    heavy = ExtendedModel(replace(w, batch=6400), H800).disaggregated(400, 2)
    assert heavy.total_s == pytest.approx(16 * 70 * 0.36e-3 * 6400 / 2, rel=0.01)


def test_colocation_that_cannot_hold_the_batch_queues():
    w = replace(SWE, context_tokens=15_000.0)
    roomy = ExtendedModel(w, H800).colocated(2)
    tight = ExtendedModel(w, replace(H800, kv_capacity_bytes=147_456 * 15_000.0 * 16)).colocated(2)
    # Half of the batch fits: the fixed cost of decode is paid twice.
    assert tight.total_s - roomy.total_s == pytest.approx(16 * 70 * 6.5e-3)


def test_a_hand_over_costs_once_a_turn():
    costly = ExtendedModel(SWE, replace(H800, handover_s=0.25)).disaggregated(2, 3)
    assert costly.overhead_s == 4.0
    assert costly.total_s == pytest.approx(printed_disaggregated(SWE, H800, 2, 3).total_s + 4.0)


@given(FULL_WORKLOADS, FULL_PLATFORMS)
def test_turn_groups_keep_turns_and_work(w, p):
    groups = turn_groups(w)
    assert len(groups) <= 3
    assert math.isclose(sum(c * running for c, running, _ in groups), w.batch * work_turns(w), rel_tol=1e-9)
    assert sum(c for c, *_ in groups) <= w.turns * (1 + 1e-9)


LONG = replace(
    SWE, active_by_turn=(1.0,) * 4 + (0.1,) * 12, context_tokens=8000.0, bubble_ratio=0.0, turn_environment_s=0.5
)


def test_contexts_that_grow_cost_little_while_many_decode():
    """Attention reads what is there: the mean context's cost is too much early and too little late."""
    platform = replace(H800, decode_per_context_token_s=4e-8, decode_context_tokens=8000.0, overhead_per_turn_s=0.0)
    growing = replace(LONG, context_by_turn=tuple(1000.0 * turn for turn in range(1, 17)))
    # Weighted by who is there, the mean context is `context_tokens` all the same.
    groups = turn_groups(growing)
    assert sum(c * n * tokens for c, n, tokens in groups) == pytest.approx(8000.0 * 64 * work_turns(growing))
    assert groups[0][2] < 8000.0 < groups[-1][2]
    # A sequence costs 0.36 ms an iteration at 8,000 tokens, and 0.04 us of it each of them.
    for tokens, each_s in ((2000.0, 0.12e-3), (8000.0, 0.36e-3), (16_000.0, 0.68e-3), (0.0, 0.36e-3)):
        assert decode_per_sequence_s(platform, tokens) == pytest.approx(each_s)
    assert decode_per_sequence_s(H800, 2000.0) == 0.36e-3
    # That is no printed equation, even where nothing else is known.
    plain = replace(SWE, context_tokens=16_000.0)
    bare = replace(platform, prefix_capacity_tokens=0.0, kv_capacity_bytes=0.0)
    assert ExtendedModel(plain, replace(bare, decode_per_context_token_s=0.0)).is_printed
    longer = ExtendedModel(plain, bare)
    assert not longer.is_printed
    assert longer.colocated(8).total_s > PrintedModel(plain, bare).colocated(8).total_s


def test_an_overhead_stalls_everybody_on_the_worker():
    """Changing phases for one prompt keeps the others waiting: it costs the more, the more share a worker."""
    busy = replace(SWE, turn_environment_s=0.5, bubble_ratio=0.0)

    def added_s(w, workers):
        without = ExtendedModel(w, replace(H800, overhead_per_turn_s=0.0)).colocated(workers)
        assert without.overhead_s == 0.0
        return ExtendedModel(w, replace(H800, overhead_per_turn_s=0.05)).colocated(workers).total_s - without.total_s

    alone = added_s(replace(busy, batch=1), 1)
    assert alone == pytest.approx(16 * 0.05)
    assert added_s(busy, 16) > 1.5 * alone
    assert added_s(busy, 4) > added_s(busy, 16)


def test_the_slowest_goes_its_way_while_the_others_go_theirs():
    """Few long turns wait less often for prefill, and no path ends before the crowd is through."""
    p = replace(H800, overhead_per_turn_s=0.0)
    heavy = replace(LONG, new_prompt_tokens=8000.0)
    few, same, many = (
        ExtendedModel(replace(heavy, slowest_turns=turns), p).total_s(1, 7) for turns in (4.0, 16.0, 40.0)
    )
    assert few < same == many
    # All prompts of the first four turns, which everybody takes, pass through the one prefill worker.
    assert few > 4 * 64 * 8000 * 20e-6
    assert same == pytest.approx(ExtendedModel(heavy, p).total_s(1, 7))
    light = replace(LONG, new_prompt_tokens=1.0, context_tokens=0.0)
    paths = [ExtendedModel(replace(light, slowest_turns=turns), p).total_s(7, 1) for turns in (4.0, 16.0)]
    assert paths[0] == pytest.approx(paths[1], rel=1e-3)


def test_the_kv_constraint_is_the_paper_s():
    w = replace(SWE, context_tokens=15_000.0)
    # 64 x 15,000 x 147,456 bytes = 141.6 GB
    for capacity, workers in ((120e9, 2), (141.6e9, 1), (47.1e9, 4), (0.0, 1)):
        assert least_decode_workers(w, replace(H800, kv_capacity_bytes=capacity)) == workers
    only_max = replace(SWE, max_context_tokens=32_768.0)
    assert least_decode_workers(only_max, replace(H800, kv_capacity_bytes=120e9)) == 3
    assert least_decode_workers(w, replace(H800, kv_capacity_bytes=120e9), headroom=2.0) == 3
