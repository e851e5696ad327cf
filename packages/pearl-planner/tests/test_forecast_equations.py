"""Prorsa's appendix B, equation by equation: each against numbers worked out by hand, and a property."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl_planner.forecast import (
    Arrival,
    BiasCorrection,
    BusySpeed,
    ByClass,
    EmpiricalDurations,
    FixedRate,
    ForecastError,
    GroupReplenishment,
    InstanceQueue,
    NoInjection,
    ReplaceOnReward,
    completion_times,
    decode_admissions,
    ema,
)
from pearl_planner.forecast.durations import Average
from pearl_planner.forecast.sources import (
    backlog_tokens,
    eligible,
    launch_horizon_s,
    sampler_launches,
    tool_arrivals,
    tool_residual_s,
    weighted_tokens,
)
from pearl_planner.forecast.speed import ServiceTimes
from pearl_state.worker import WorkerId

times_s = st.floats(0.0, 100.0)


def known(*durations_s: float) -> EmpiricalDurations:
    kept = EmpiricalDurations()
    for duration_s in durations_s:
        kept.observe(duration_s)
    return kept


# ---- (2) and (6): conditional probabilities -------------------------------------------------------------------------


def test_eqs_2_and_6_condition_on_what_has_passed() -> None:
    rewards = known(2.0, 4.0, 6.0, 8.0, 20.0)
    # Of the five, 6, 8 and 20 s are longer than the 5 s that passed; 6 and 8 end before 15 s.
    assert rewards.ends_within(5.0, 10.0) == pytest.approx(2 / 3)
    # Nothing has passed: four of five end within 10 s.
    assert rewards.ends_within(0.0, 10.0) == pytest.approx(4 / 5)
    # Strictly within: a duration of exactly e + S does not count, one of exactly e is over.
    assert rewards.ends_within(4.0, 4.0) == pytest.approx(1 / 3)
    assert rewards.ends_within(5.0, 0.0) == 0.0


def test_what_outlived_every_sample_may_last_as_long_again() -> None:
    assert known(1.0, 2.0).ends_within(30.0, 10.0) == pytest.approx(0.25)


@given(st.lists(times_s, max_size=12), times_s, st.floats(0.0, 50.0), st.floats(0.0, 50.0))
def test_conditional_probabilities_are_probabilities_and_grow_with_the_horizon(
    samples: list[float], elapsed_s: float, horizon_s: float, more_s: float
) -> None:
    durations = known(*samples)
    q = durations.ends_within(elapsed_s, horizon_s)
    assert 0.0 <= q <= durations.ends_within(elapsed_s, horizon_s + more_s) <= 1.0


@given(st.lists(times_s, min_size=1, max_size=12), st.lists(times_s, min_size=1, max_size=6), st.floats(0.1, 50.0))
def test_many_at_once_give_what_each_gives(samples: list[float], elapsed: list[float], horizon_s: float) -> None:
    durations = known(*samples)
    chances, residuals = durations.residuals_s(np.array(elapsed), horizon_s)
    assert chances.tolist() == pytest.approx([durations.ends_within(e, horizon_s) for e in elapsed])
    assert all(0.0 <= residual <= horizon_s + 1e-9 for residual in residuals.tolist())


def test_the_residual_is_the_mean_of_what_ends_within_the_horizon() -> None:
    _, residuals = known(6.0, 8.0, 20.0).residuals_s(np.array([5.0]), 10.0)
    assert residuals.tolist() == pytest.approx([(6 + 8) / 2 - 5])


def test_only_the_newest_durations_count() -> None:
    durations = EmpiricalDurations(most=2)
    for duration_s in (1.0, 50.0, 60.0):
        durations.observe(duration_s)
    assert durations.ends_within(0.0, 10.0) == 0.0
    with pytest.raises(ValueError, match="a duration of nan s"):
        durations.observe(math.nan)


# ---- (3), (4) and (5): the sampler ----------------------------------------------------------------------------------


def test_eqs_3_to_5_launch_what_reward_frees() -> None:
    # Two in reward: q = 2/3 and 4/5, three in four may be trained on.
    chances = (2 / 3, 4 / 5)
    assert eligible(chances, 0.75) == pytest.approx(1.1)
    launches = sampler_launches(chances, 0.75, ReplaceOnReward(), launch_horizon_s(10.0, 4.0))
    assert weighted_tokens([Arrival(0.0, 2000.0, launches)]) == pytest.approx(2200.0)
    # The first request takes longer than the horizon: nothing arrives in it.
    assert launch_horizon_s(10.0, 12.0) == 0.0
    assert sampler_launches(chances, 0.75, FixedRate(3.0), 0.0) == 0.0


def test_each_injection_policy_follows_its_rule() -> None:
    assert NoInjection().launches(5.0, 10.0) == 0.0
    assert ReplaceOnReward(room=3.0).launches(5.0, 10.0) == 3.0
    assert FixedRate(per_s=0.5).launches(99.0, 10.0) == 5.0
    # Five completions are expected: they fill the groups that lack 1 and 3, and not the one that lacks 4.
    assert GroupReplenishment(size=8, missing=(4, 1, 3)).launches(5.0, 10.0) == 16.0
    assert GroupReplenishment(size=8, missing=(2,)).launches(1.9, 10.0) == 0.0


@given(st.lists(st.floats(0, 1), max_size=8), st.floats(0, 1), st.integers(1, 6))
def test_replacement_never_launches_more_than_complete(chances: list[float], acceptance: float, size: int) -> None:
    complete = len(chances)
    assert 0.0 <= sampler_launches(chances, acceptance, ReplaceOnReward(), 10.0) <= complete + 1e-9
    groups = GroupReplenishment(size=size, missing=(size,) * 3)
    assert sampler_launches(chances, acceptance, groups, 10.0) <= complete + 1e-6


def test_an_acceptance_that_is_no_fraction_is_refused() -> None:
    with pytest.raises(ValueError, match=r"training-admission rate of 1\.5"):
        eligible((0.5,), 1.5)


# ---- (7), (8), (11), (12): sums -------------------------------------------------------------------------------------


def test_eq_7_weighs_both_startup_modes_by_their_probability() -> None:
    prewarmed, cold = known(1.0, 2.0, 3.0), known(10.0, 20.0, 30.0, 40.0)
    arrivals = [
        Arrival(0.0, 1000.0, prewarmed.ends_within(1.5, 10.0)),
        Arrival(0.0, 1000.0, cold.ends_within(15.0, 10.0)),
    ]
    # Prewarmed: both that are longer than 1.5 s end in time. Cold: 20 s of 20, 30, 40 s ends before 25 s.
    assert weighted_tokens(arrivals) == pytest.approx(1000.0 + 1000.0 / 3)


def test_eqs_8_and_12_count_whole_prompts() -> None:
    assert backlog_tokens([1200, 800, 0]) == 2000.0


# ---- (9), (10), (11): tools -----------------------------------------------------------------------------------------


def test_eqs_9_to_11_follow_the_moving_average_of_tools() -> None:
    mean = ema(ema(None, 10.0), 20.0)
    assert mean == pytest.approx(0.9 * 10 + 0.1 * 20)
    assert tool_residual_s(mean, 4.0) == pytest.approx(7.0)
    assert tool_residual_s(mean, 15.0) == 0.0
    arrivals = tool_arrivals(100.0, 10.0, [(11.0, 4.0, 500.0), (11.0, 0.5, 700.0), (11.0, 15.0, 900.0)])
    # Residuals 7, 10.5 and 0 s: the second is not back within 10 s.
    assert arrivals == (Arrival(107.0, 500.0), Arrival(100.0, 900.0))
    assert weighted_tokens(arrivals) == 1400.0


@given(st.lists(st.tuples(times_s, times_s, st.floats(1, 1e5)), max_size=10), st.floats(0.1, 50.0))
def test_tools_contribute_exactly_what_returns_in_time(
    running: list[tuple[float, float, float]], horizon_s: float
) -> None:
    arrivals = tool_arrivals(0.0, horizon_s, running)
    assert all(0.0 <= arrival.at_s < horizon_s and arrival.weight == 1.0 for arrival in arrivals)
    assert len(arrivals) == sum(max(0.0, mean - elapsed) < horizon_s for mean, elapsed, _ in running)


def test_a_rare_class_falls_back_to_what_it_has_in_common() -> None:
    tools: ByClass[Average] = ByClass(Average, least=2)
    assert tools.find(("swe", "pytest")) is None
    for kind, duration_s in ((("swe", "pytest"), 30.0), (("swe", "ls"), 1.0), (("swe", "ls"), 1.0)):
        tools.observe(kind, duration_s)
    found, rare, unknown = (tools.find(kind) for kind in (("swe", "ls"), ("swe", "pytest"), ("web", "click")))
    assert found is not None
    assert found.value == pytest.approx(1.0)
    assert rare is not None
    assert rare.value == pytest.approx(30 * 0.9 * 0.9 + 1 * 0.1 * 0.9 + 1 * 0.1)
    assert unknown is not None
    assert unknown.value == rare.value


# ---- (13) and (14): admissions --------------------------------------------------------------------------------------

A, B = WorkerId(1), WorkerId(2)


def test_eq_13_serves_each_instance_in_order_and_waits_for_arrivals() -> None:
    # Free at 2 s. u = 0, 0, 9: b = 2 + 3, 5 + 1, then it idles until 9.
    assert completion_times([0.0, 0.0, 9.0], [3.0, 1.0, 2.0], [2.0]) == ([5.0, 6.0, 11.0], [11.0])
    # With a second rank that is free at 3 s: 2 + 3, 3 + 1, then the one that was free at 4 s idles until 9.
    assert completion_times([0.0, 0.0, 9.0], [3.0, 1.0, 2.0], [2.0, 3.0]) == ([5.0, 4.0, 11.0], [5.0, 11.0])


def test_eq_14_counts_what_is_admitted_before_the_end() -> None:
    admitted = decode_admissions(
        now_s=0.0,
        horizon_s=10.0,
        instances={
            A: InstanceQueue(in_flight=[(4.0, 400)], queued=[(500, 500.0), (100, 100.0)]),
            B: InstanceQueue(),
        },
        unassigned=[],
        arrivals=[Arrival(8.0, 100.0), Arrival(1.0, 600.0)],
        service_s=lambda tokens: tokens / 100.0,
        kv_bytes=lambda tokens: 2.0 * tokens,
    )
    # A: 400 at 4 s, 500 at 9 s, 100 at 10 s (not before the end). B: 600 from 1 to 7 s, 100 from 8 to 9 s.
    assert admitted.tokens == 400 + 500 + 600 + 100
    assert admitted.kv_bytes == 2 * admitted.tokens
    assert admitted.available_s == {A: 10.0, B: 9.0}


def test_a_likely_arrival_takes_and_counts_its_part() -> None:
    admitted = decode_admissions(
        now_s=0.0,
        horizon_s=10.0,
        instances={A: InstanceQueue()},
        unassigned=[],
        arrivals=[Arrival(0.0, 800.0, 0.5), Arrival(0.0, 400.0)],
        service_s=lambda tokens: tokens / 100.0,
        kv_bytes=float,
    )
    assert admitted.tokens == 0.5 * 800 + 400
    assert admitted.available_s[A] == pytest.approx(8.0)


def test_without_an_instance_nothing_is_admitted() -> None:
    nothing = decode_admissions(
        now_s=0.0, horizon_s=10.0, instances={}, unassigned=[(5, 5.0)], arrivals=[], service_s=float, kv_bytes=float
    )
    assert (nothing.tokens, nothing.kv_bytes) == (0.0, 0.0)


@given(st.lists(st.tuples(times_s, st.floats(0.0, 5.0)), max_size=10), times_s)
def test_completions_never_overlap_nor_precede_their_arrival(
    requests: list[tuple[float, float]], available_s: float
) -> None:
    arrivals, services = [u for u, _ in requests], [g for _, g in requests]
    finished, (last,) = completion_times(arrivals, services, [available_s])
    before = available_s
    for (arrival_s, service_s), finish_s in zip(requests, finished, strict=True):
        assert finish_s - service_s >= max(arrival_s, before) - 1e-9
        before = finish_s
    assert last == before


@given(st.lists(st.integers(1, 5000), max_size=12), st.integers(1, 4), st.floats(0.5, 40.0))
def test_admissions_never_exceed_the_requests_and_grow_with_the_horizon(
    prompts: list[int], instances: int, horizon_s: float
) -> None:
    def admitted(horizon_s: float) -> float:
        return decode_admissions(
            now_s=0.0,
            horizon_s=horizon_s,
            instances={WorkerId(i): InstanceQueue() for i in range(instances)},
            unassigned=[(prompt, float(prompt)) for prompt in prompts],
            arrivals=[],
            service_s=lambda tokens: tokens / 500.0,
            kv_bytes=float,
        ).tokens

    assert 0.0 <= admitted(horizon_s) <= admitted(2 * horizon_s) <= sum(prompts)


def test_each_attention_rank_serves_one_prompt_after_the_other() -> None:
    admitted = decode_admissions(
        now_s=0.0,
        horizon_s=10.0,
        instances={A: InstanceQueue(in_flight=[(5.0, 400)], queued=[(5000, 700.0), (5000, 300.0), (800, 800.0)])},
        unassigned=[],
        arrivals=[Arrival(6.0, 5000.0, new_tokens=100.0)],
        service_s=lambda tokens: tokens / 100.0,
        kv_bytes=lambda tokens: 2.0 * tokens,
        latency_s=1.0,
        ranks=2,
    )
    # One rank is free at 4 s (in flight to 5 s, of which the last second is the iteration's), the other at once.
    # 700 to compute there: free at 7, out at 8. 300 on the first: free at 7, out at 8. 800: free at 15.
    # The arrival at 6 s goes to the other rank: free at 8, out at 9.
    assert admitted.tokens == 400 + 5000 + 5000 + 5000
    assert admitted.kv_bytes == 2 * admitted.tokens
    assert admitted.available_s == {A: 15.0}


@given(st.lists(st.integers(1, 5000), max_size=12), st.integers(1, 4), st.floats(0.5, 40.0), st.floats(0.0, 3.0))
def test_one_instance_with_ranks_does_what_as_many_instances_of_one_rank_do(
    prompts: list[int], ranks: int, horizon_s: float, latency_s: float
) -> None:
    def admitted(instances: int, ranks: int) -> float:
        return decode_admissions(
            now_s=3.0,
            horizon_s=horizon_s,
            instances={WorkerId(i): InstanceQueue() for i in range(instances)},
            unassigned=[(prompt, 0.5 * prompt) for prompt in prompts],
            arrivals=[],
            service_s=lambda tokens: tokens / 500.0,
            kv_bytes=float,
            latency_s=latency_s,
            ranks=ranks,
        ).tokens

    assert admitted(1, ranks) == admitted(ranks, 1) <= admitted(1, ranks + 1)


# ---- (15): correction, and the error it is judged by ----------------------------------------------------------------


def test_eq_15_is_corrected_by_what_windows_had_over_what_was_forecast() -> None:
    bias = BiasCorrection(weight=0.5)
    assert bias.factor == 1.0
    # The first window counts beside an even one of the same size: (1500 + 1500) / (1500 + 1000).
    bias = bias.observe(1000.0, 1500.0)
    assert bias.factor == pytest.approx(1.2)
    bias = bias.observe(1000.0, 500.0)
    assert bias.factor == pytest.approx((0.5 * 1500 + 0.5 * 500) / (0.5 * 1250 + 0.5 * 1000))


@given(st.floats(0.4, 2.5), st.lists(st.floats(1.0, 1e3), min_size=1, max_size=5))
def test_a_constant_bias_is_found_whatever_the_load(bias: float, loads: list[float]) -> None:
    correction = BiasCorrection()
    for load in [loads[0], *loads] + [max(loads)] * 60:
        correction = correction.observe(load, bias * load)
    assert correction.factor == pytest.approx(bias, rel=0.02)


def test_a_window_without_a_forecast_says_nothing_of_the_bias() -> None:
    known = BiasCorrection().observe(100.0, 200.0)
    assert known.observe(0.0, 0.0) == known.observe(0.0, 500.0) == known
    assert BiasCorrection().observe(0.0, 700.0).factor == 1.0


@given(st.lists(st.tuples(st.floats(0.0, 1e6), st.floats(0.0, 1e6)), max_size=8))
def test_no_correction_is_wild(windows: list[tuple[float, float]]) -> None:
    correction = BiasCorrection()
    for raw, measured in windows:
        correction = correction.observe(raw, measured)
    assert 1 / 3 <= correction.factor <= 3.0


def test_the_error_of_forecasts_weighs_windows_by_tokens() -> None:
    error = ForecastError()
    error.add(5.0, 0.0)
    assert error.wape is None, "nothing was measured yet"
    error.add(90.0, 100.0)
    error.add(320.0, 300.0)
    assert error.wape == pytest.approx(35 / 400)
    assert error.windows == 3


# ---- section 4.2: the speed -----------------------------------------------------------------------------------------


def test_the_speed_counts_busy_intervals_and_no_idle_time() -> None:
    speed = BusySpeed()
    assert speed.tokens_per_s(1000, profiled_fresh_per_s=7.0) == 7.0
    # 0 to 3 s: two overlapping prompts of 1000 tokens share the time. Then idle until 10 s. 10 to 11 s: one more.
    speed.began(A, 0.0)
    speed.began(A, 1.0)
    speed.served(A, 1000, 2.0)
    assert speed.tokens_per_s(1000, profiled_fresh_per_s=7.0) == 7.0, "the interval is not over"
    speed.served(A, 1000, 3.0)
    speed.began(A, 10.0)
    speed.served(A, 1000, 11.0)
    assert speed.tokens_per_s(1000, profiled_fresh_per_s=7.0) == pytest.approx(3000 / 4)


def test_a_speed_is_above_zero_also_where_prompts_were_empty() -> None:
    speed = BusySpeed()
    speed.began(A, 0.0)
    speed.served(A, 0, 1.0)
    assert speed.tokens_per_s(0, profiled_fresh_per_s=50.0) == 1.0, "a request a second, of a token at least"


def test_an_interval_that_was_cut_is_no_measurement() -> None:
    speed = BusySpeed()
    speed.began(A, 0.0)
    speed.began(A, 0.0)
    speed.served(A, 1000, 1.0)
    speed.cut(A, 2.0)
    assert speed.tokens_per_s(1000, profiled_fresh_per_s=7.0) == 7.0


def test_prompts_of_another_length_take_what_a_request_and_what_its_tokens_took() -> None:
    speed = BusySpeed()
    for tokens, busy_s in ((100, 1.1), (10_000, 11.0)):
        speed.began(B, 0.0)
        speed.served(B, tokens, busy_s)
    assert speed.tokens_per_s(90, profiled_fresh_per_s=7.0) == pytest.approx(100 / 1.1), "of its own profile"
    # A second a request and a millisecond a token.
    assert speed.tokens_per_s(50_000, profiled_fresh_per_s=7.0) == pytest.approx(50_000 / 51.0)


def test_a_load_that_never_ends_is_measured_piece_by_piece() -> None:
    speed = BusySpeed()
    speed.began(A, 0.0)
    for second in range(1, 31):
        speed.began(A, second - 0.5)
        speed.served(A, 1000, float(second))
    # One prompt is always in hand, so the interval goes on; what was served in it is known all the same.
    assert speed.tokens_per_s(1000, profiled_fresh_per_s=7.0) == pytest.approx(1000.0)


def test_a_piece_with_less_served_than_in_hand_is_no_measurement() -> None:
    speed = BusySpeed()
    for _ in range(8):
        speed.began(A, 0.0)
    speed.served(A, 1000, 20.0)
    assert speed.tokens_per_s(1000, profiled_fresh_per_s=7.0) == 7.0


def test_a_speed_holds_for_prompts_of_which_as_much_is_new() -> None:
    speed = BusySpeed()
    assert speed.tokens_per_s(1000, profiled_fresh_per_s=50.0, fresh=0.1) == pytest.approx(500.0), "as profiled"
    speed.began(A, 0.0)
    speed.served(A, 1000, 2.0, fresh=0.25)
    assert speed.tokens_per_s(1000, profiled_fresh_per_s=50.0, fresh=0.25) == pytest.approx(500.0)
    # Nothing cached: four times as much to compute, until a busy interval of such prompts says better.
    assert speed.tokens_per_s(1000, profiled_fresh_per_s=50.0, fresh=1.0) == pytest.approx(125.0)
    speed.began(A, 10.0)
    speed.served(A, 1000, 20.0, fresh=1.0)
    assert speed.tokens_per_s(1000, profiled_fresh_per_s=50.0, fresh=1.0) == pytest.approx(100.0)
    assert speed.tokens_per_s(1000, profiled_fresh_per_s=50.0, fresh=0.25) == pytest.approx(500.0)


def test_service_times_are_a_line_through_what_answers_told() -> None:
    service = ServiceTimes()
    # Nothing told: 30 s of service at 10 ms a token.
    assert service.line(0.01) == pytest.approx((0.0, 0.01))
    for _ in range(400):
        # Half a second for any prompt and 2 ms for each token.
        service.observe(100.0, 0.7)
        service.observe(2000.0, 4.5)
    each_s, token_s = service.line(0.01)
    assert each_s == pytest.approx(0.5, abs=0.05)
    assert token_s == pytest.approx(0.002, rel=0.05)


def test_answers_that_are_all_alike_do_not_say_that_tokens_cost_nothing() -> None:
    """All prompts were in the cache but for a token: what a token costs is still as it was profiled."""
    service = ServiceTimes()
    for _ in range(50):
        service.observe(1.0, 0.4)
    each_s, token_s = service.line(0.001)
    assert each_s == pytest.approx(0.4, rel=0.01)
    assert token_s == pytest.approx(0.001, rel=0.01)


@given(
    st.lists(st.tuples(st.floats(0.0, 1e5), st.floats(0.0, 200.0)), max_size=30),
    st.floats(1e-6, 1.0),
    st.floats(0.0, 1e5),
)
def test_no_prompt_takes_less_than_nothing(
    answers: list[tuple[float, float]], prior_token_s: float, tokens: float
) -> None:
    service = ServiceTimes()
    for new_tokens, seconds in answers:
        service.observe(new_tokens, seconds)
    each_s, token_s = service.line(prior_token_s)
    assert each_s >= 0.0
    assert token_s >= 0.0
    assert 0.0 <= each_s + token_s * tokens < float("inf")


@given(st.lists(st.tuples(st.integers(100, 120), st.floats(0.5, 2.0)), min_size=1, max_size=40))
def test_the_speed_lies_between_the_slowest_and_the_fastest_interval(intervals: list[tuple[int, float]]) -> None:
    speed = BusySpeed()
    at_s = 0.0
    for tokens, busy_s in intervals:
        speed.began(A, at_s)
        speed.served(A, tokens, at_s + busy_s)
        at_s += busy_s + 3.0
    rates = [tokens / busy_s for tokens, busy_s in intervals]
    assert min(rates) * 0.99 <= speed.tokens_per_s(100, profiled_fresh_per_s=1.0) <= max(rates) * 1.01


def test_a_class_of_which_most_still_run_knows_the_short_ones_only_and_is_not_asked() -> None:
    durations = ByClass(EmpiricalDurations)
    for _ in range(40):
        durations.began(("old",))
        durations.observe(("old",), 60.0)
    for _ in range(20):
        durations.began(("young",))
    for _ in range(10):
        durations.observe(("young",), 1.0)
    # 10 of 20 have ended, those that take a second. Of all, 40 of 50 took a minute.
    known = durations.find(("young",))
    assert known is not None
    assert known.ends_within(0.0, 10.0) == pytest.approx(10 / 50)
    for _ in range(8):
        durations.left(("young",))
    known = durations.find(("young",))
    assert known is not None
    assert known.ends_within(0.0, 10.0) == 1.0, "two still run for ten that have ended"


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["began", "left", "ended"])), max_size=60))
def test_something_is_known_once_anything_has_ended(events: list[tuple[str, str]]) -> None:
    durations, ended = ByClass(EmpiricalDurations), 0
    for name, event in events:
        if event == "began":
            durations.began((name,))
        elif event == "left":
            durations.left((name,))
        else:
            durations.observe((name,), 1.0)
            ended += 1
        assert (durations.find((name,)) is not None) is (ended > 0)
