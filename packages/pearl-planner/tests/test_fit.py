"""Fits recover what made the samples, ignore outliers, and refuse to extrapolate."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl_planner.extended import ExtendedModel, decode_per_sequence_s
from pearl_planner.fit import FitSettings, StepMeasurement, fit_overhead, fit_platform
from pearl_planner.makespan import PrintedModel
from pearl_planner.robust import clipped_mean, quantiles, robust_line, weighted_median
from pearl_planner.workload_fit import fit_workload
from pearl_state.configuration import Configuration
from pearl_state.errors import ProfileError
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.samples import DecodeSample, PrefillSample, TransferSample, TurnSample

PRIOR = PlatformProfile(
    decode_fixed_s=1.0,
    decode_per_sequence_s=0.5,
    prefill_per_token_s=0.1,
    kv_bytes_per_token=1000.0,
    transfer_bytes_per_s=1e9,
    origin={"decode_fixed_s": "guess", "kv_bytes_per_token": "guess"},
)
WORKLOAD = WorkloadProfile(batch=8, turns=1, new_prompt_tokens=1, response_tokens=1)


def decode_samples(a: float, b: float, rng: np.random.Generator, outliers: float = 0.0, noise: float = 0.02):
    out = []
    for n in rng.integers(1, 40, size=200):
        iterations = int(rng.integers(1, 9))
        each = (a + b * n) * (1 + noise * abs(rng.standard_normal()))
        if rng.random() < outliers:
            each *= rng.uniform(3, 50)
        out.append(DecodeSample(int(n), iterations, each * iterations))
    return out


def line(n: int, slope: float = 1.0, intercept: float = 2.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x = np.arange(1.0, n + 1)
    return x, intercept + slope * x, np.ones(n)


@given(st.floats(1e-3, 0.1), st.floats(1e-5, 0.01), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.15]))
@settings(max_examples=40, deadline=None)
def test_a_and_b_are_recovered_within_ten_percent_whatever_a_sixth_of_the_samples_say(a, b, seed, outliers):
    rng = np.random.default_rng(seed)
    fit = fit_platform(decode=decode_samples(a, b, rng, outliers), prior=PRIOR)
    at = [fit.profile.decode_fixed_s + fit.profile.decode_per_sequence_s * n for n in (2, 20, 38)]
    assert at == pytest.approx([a + b * n for n in (2, 20, 38)], rel=0.1)
    if b * 20 > 0.5 * a > 0.05 * b:
        assert fit.profile.decode_per_sequence_s == pytest.approx(b, rel=0.1)
    assert fit.profile.origin["decode_fixed_s"].startswith("telemetry")
    assert fit.residuals["decode"] < 0.1


def test_exact_samples_give_the_exact_line():
    samples = [DecodeSample(n, 3, 3 * (0.02 + 0.0008 * n)) for n in (4, 8, 16, 32)]
    fit = fit_platform(decode=samples, prior=PRIOR)
    assert fit.profile.decode_fixed_s == pytest.approx(0.02)
    assert fit.profile.decode_per_sequence_s == pytest.approx(0.0008)
    assert fit.used["decode_fixed_s"] == 12
    assert not fit.calibrated


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([], "0 decode iterations, needs 12"),
        ([DecodeSample(4, 5, 0.1), DecodeSample(8, 5, 0.2)], "10 decode iterations, needs 12"),
        ([DecodeSample(n, 100, 1.0) for n in (8, 9)], "only 2 distinct batch sizes, a line needs 3"),
        ([DecodeSample(n, 100, 1.0) for n in (20, 21, 22)], "batch sizes lie within 20..22"),
    ],
)
def test_too_few_or_too_similar_decode_samples_keep_the_prior_and_say_why(samples, reason):
    fit = fit_platform(decode=samples, prior=PRIOR)
    assert fit.profile.decode_fixed_s == PRIOR.decode_fixed_s
    assert fit.profile.decode_per_sequence_s == PRIOR.decode_per_sequence_s
    assert fit.refused["decode_fixed_s"].startswith(reason)
    assert fit.refused["decode_per_sequence_s"].startswith(reason)
    assert fit.profile.origin["decode_fixed_s"] == "guess"


def test_a_line_that_falls_or_starts_below_zero_is_bent_to_what_is_possible():
    falling = fit_platform(decode=[DecodeSample(n, 9, 9 * (0.05 - 0.0001 * n)) for n in (4, 8, 16)], prior=PRIOR)
    assert falling.profile.decode_per_sequence_s == 0.0
    assert 0.048 < falling.profile.decode_fixed_s < 0.05
    steep = fit_platform(decode=[DecodeSample(n, 9, 9 * (0.01 * n - 0.02)) for n in (4, 8, 16)], prior=PRIOR)
    assert 0 < steep.profile.decode_fixed_s < 1e-3
    assert steep.profile.decode_per_sequence_s == pytest.approx(0.0075)


def test_t_prefill_is_what_a_token_costs_at_the_sizes_that_occur():
    samples = [PrefillSample(n, 2e-4 * n) for n in (64, 128, 256, 512) * 5]
    late = [PrefillSample(32, 1.0)] * 4
    empty = [PrefillSample(0, 0.5)] * 50
    fit = fit_platform(prefill=[*samples, *late, *empty], prior=PRIOR)
    assert fit.profile.prefill_per_token_s == pytest.approx(2e-4)
    assert fit.used["prefill_per_token_s"] == 24
    few = fit_platform(prefill=samples[:5], prior=PRIOR)
    assert few.profile.prefill_per_token_s == PRIOR.prefill_per_token_s
    assert few.refused["prefill_per_token_s"] == "5 prefill iterations, needs 12"
    assert "no time" in fit_platform(prefill=[PrefillSample(64, 0.0)] * 20, prior=PRIOR).refused["prefill_per_token_s"]


def test_hand_overs_give_bandwidth_fixed_cost_and_bytes_per_token():
    samples = [TransferSample(n, 2048 * n, 0.002 + 2048 * n / 2e8) for n in (20, 40, 80, 160) * 4]
    fit = fit_platform(transfer=samples, prior=PRIOR)
    assert fit.profile.transfer_bytes_per_s == pytest.approx(2e8)
    assert fit.profile.handover_s == pytest.approx(0.002)
    assert fit.profile.kv_bytes_per_token == 2048.0


def test_hand_overs_of_one_size_give_their_cost_but_no_bandwidth():
    fit = fit_platform(transfer=[TransferSample(100, 1_000_000, 0.006)] * 20, prior=PRIOR)
    assert fit.profile.transfer_bytes_per_s == PRIOR.transfer_bytes_per_s
    assert fit.profile.handover_s == pytest.approx(0.005)
    assert "distinct hand-over sizes" in fit.refused["transfer_bytes_per_s"]
    flat = fit_platform(transfer=[TransferSample(n, 1000 * n, 0.01) for n in (1, 2, 4, 8) * 4], prior=PRIOR)
    assert "bandwidth does not limit them" in flat.refused["transfer_bytes_per_s"]
    assert fit_platform(transfer=[], prior=PRIOR).refused["handover_s"] == "0 hand-overs, needs 12"


def test_a_profile_is_calibrated_once_a_b_and_t_prefill_are_measured():
    rng = np.random.default_rng(0)
    fit = fit_platform(decode=decode_samples(0.02, 0.001, rng), prefill=[PrefillSample(100, 0.02)] * 20, prior=PRIOR)
    assert fit.calibrated
    assert set(fit.refused) == {"prefill_fixed_s", "transfer_bytes_per_s", "handover_s"}


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ({"decode": [DecodeSample(1, 1, math.nan)]}, "decode sample 0: duration_s = nan"),
        (
            {"decode": [DecodeSample(0, 1, 0.1)]},
            "decode sample 0: sequences = 0: must be a finite number of at least 1",
        ),
        ({"decode": [DecodeSample(1, 1, 0.1), DecodeSample(1, 1, -0.1)]}, "decode sample 1: duration_s = -0.1"),
        ({"prefill": [PrefillSample(4, math.inf)]}, "prefill sample 0: duration_s = inf"),
        ({"transfer": [TransferSample(1, -2, 0.1)]}, "transfer sample 0: bytes = -2"),
    ],
)
def test_a_sample_that_is_no_number_is_an_error_however_few_there_are(samples, message):
    with pytest.raises(ProfileError, match=message):
        fit_platform(**samples, prior=PRIOR)


def turn(step: int, index: int, last: bool = False, **values: float) -> TurnSample:
    made = {
        "new_prompt_tokens": 100,
        "response_tokens": 20,
        "retained_tokens": 20,
        "context_tokens": 100 + 120 * index,
        "prefill_s": 0.1,
        "decode_s": 1.0,
        "queue_s": 0.1,
        "environment_s": 0.0 if last else 0.8,
        **values,
    }
    return TurnSample(step=step, turn=index, last=last, **made)


def trajectories(*lengths: int, step: int = 0) -> list[list[TurnSample]]:
    return [[turn(step, i, i == n - 1) for i in range(n)] for n in lengths]


def test_workload_statistics_are_those_of_the_turns():
    fit = fit_workload([*trajectories(1, 2, 3, 6), *trajectories(2, 2, 2, 4, step=1)], batch=4, prior=WORKLOAD)
    profile = fit.profile
    assert profile.batch == 4
    assert profile.turns == 5.0
    assert (profile.new_prompt_tokens, profile.response_tokens) == (100, 20)
    assert profile.mean_turns == 22 / 8
    assert profile.active_by_turn == (1.0, 7 / 8, 3 / 8, 2 / 8, 1 / 8, 1 / 8)
    assert profile.turn_environment_s == pytest.approx(0.8)
    assert profile.environment_s == pytest.approx(4 * 0.8)
    # Outside decode: 0.2 s of every turn, and 0.8 s after all but the last.
    assert profile.bubble_ratio == pytest.approx((22 * 0.2 + 14 * 0.8) / 22)
    assert profile.max_context_tokens == 700
    assert profile.origin["turns"] == "telemetry, 22 turns of 2 steps"


def test_s_and_t_env_belong_to_the_trajectory_that_took_longest():
    quick, slow = [turn(0, i) for i in range(6)], [turn(0, i, environment_s=9.0) for i in range(3)]
    profile = fit_workload([quick, slow], batch=4, prior=WORKLOAD).profile
    assert (profile.turns, profile.environment_s) == (3.0, 27.0)
    assert profile.active_by_turn == (1.0, 1.0, 1.0, 0.5, 0.5, 0.5)


def test_a_few_wild_turns_do_not_move_the_mean_far():
    wild = [turn(0, 0, new_prompt_tokens=10**7)] * 2
    spread = [turn(0, 0, new_prompt_tokens=80 + i % 40) for i in range(200)]
    fit = fit_workload([[*spread, *wild]], batch=4, prior=WORKLOAD)
    assert fit.profile.new_prompt_tokens == pytest.approx(100, rel=0.05)


def test_too_few_turns_keep_the_prior():
    fit = fit_workload(trajectories(3), batch=16, prior=WORKLOAD)
    assert fit.profile == replace(WORKLOAD, batch=16)
    assert fit.refused["turns"] == "3 turns, needs 8"


def test_turns_without_decode_time_or_tokens_keep_those_fields():
    idle = [turn(0, 0, decode_s=0.0, response_tokens=0)] * 10
    fit = fit_workload([idle], batch=4, prior=WORKLOAD)
    assert fit.refused == {
        "bubble_ratio": "no decode time was measured",
        "response_tokens": "no turn generated a token",
    }
    assert fit.profile.response_tokens == 1


def test_a_turn_that_is_no_number_is_an_error():
    with pytest.raises(ProfileError, match="turn sample 2: environment_s = nan"):
        fit_workload([[turn(0, 0), turn(0, 1)], [turn(0, 0, environment_s=math.nan)]], batch=4, prior=WORKLOAD)


def test_t_over_is_what_colocated_steps_leave_over_per_turn():
    workload = replace(WORKLOAD, batch=64, turns=16, new_prompt_tokens=1000, response_tokens=50)
    truth = PrintedModel(workload, replace(PRIOR, overhead_per_turn_s=0.5))
    measured = [
        StepMeasurement(segments=((Configuration(colocated=n), truth.colocated(n).total_s),)) for n in (2, 3, 4)
    ]
    wild = StepMeasurement(segments=((Configuration(colocated=4), 1e6),))
    paired = StepMeasurement(segments=((Configuration(2, 2), 1.0),))
    fit = fit_overhead([*measured, wild, paired], workload=workload, platform=PRIOR, extended=False)
    assert fit.profile.overhead_per_turn_s == pytest.approx(0.5)
    assert fit.used == {"overhead_per_turn_s": 4}
    again = fit_overhead(measured, workload=workload, platform=fit.profile, extended=False)
    assert again.profile.overhead_per_turn_s == pytest.approx(0.5)
    fast = [StepMeasurement(segments=((m.segments[0][0], 1.0),)) for m in measured]
    assert fit_overhead(fast, workload=workload, platform=PRIOR).profile.overhead_per_turn_s == 0.0
    few = fit_overhead([paired, measured[0]], workload=workload, platform=PRIOR)
    assert few.refused == {
        "overhead_per_turn_s": "1 steps in colocation, needs 2",
        "handover_s": "1 steps in disaggregation, needs 2",
    }
    assert few.profile is PRIOR
    broken = StepMeasurement(segments=((Configuration(2, 2), math.nan),))
    with pytest.raises(ProfileError, match="step sample 1: seconds = nan"):
        fit_overhead([paired, broken], workload=workload, platform=PRIOR)


def test_a_step_under_several_configurations_is_explained_by_its_progress_under_each():
    workload = replace(WORKLOAD, batch=64, turns=16, new_prompt_tokens=1000, response_tokens=50)
    truth = PrintedModel(workload, replace(PRIOR, overhead_per_turn_s=0.5))
    # A third of the work with three workers, the rest with five: a borrow in the middle of each step.
    parts = ((Configuration(colocated=3), 1 / 3), (Configuration(colocated=5), 2 / 3))
    step = StepMeasurement(segments=tuple((c, share * truth.colocated(c.colocated).total_s) for c, share in parts))
    fit = fit_overhead([step, step], workload=workload, platform=PRIOR, extended=False)
    assert fit.profile.overhead_per_turn_s == pytest.approx(0.5)


def test_the_hand_over_cost_is_what_disaggregated_steps_leave_over_per_turn():
    workload = replace(WORKLOAD, batch=64, turns=16, new_prompt_tokens=100, response_tokens=50)
    truth = ExtendedModel(workload, replace(PRIOR, handover_s=0.25))
    measured = [StepMeasurement(segments=((Configuration(1, n), truth.total_s(1, n)),)) for n in (1, 2, 3)]
    fit = fit_overhead(measured, workload=workload, platform=PRIOR)
    assert fit.profile.handover_s == pytest.approx(0.25)
    assert fit.residuals["step"] < 1e-9
    printed = fit_overhead(measured, workload=workload, platform=PRIOR, extended=False)
    assert printed.refused["handover_s"] == "eqs. (2) and (3) have no term for it"


def test_s_counts_turns_of_mean_length():
    """Four turns of 60 tokens are a path of eight of the mean 30."""
    brief = [[turn(0, i, response_tokens=10, decode_s=0.5) for i in range(6)]]
    talkative = [turn(0, i, response_tokens=60, decode_s=3.0) for i in range(4)]
    assert fit_workload([*brief, talkative], batch=4, prior=WORKLOAD).profile.turns == 8.0


def test_the_needs_of_a_fit_are_settings():
    samples = [DecodeSample(n, 1, 0.1 + 0.01 * n) for n in (1, 2)]
    fit = fit_platform(decode=samples, prior=PRIOR, settings=FitSettings(least_samples=2, least_distinct=2))
    assert fit.profile.decode_fixed_s == pytest.approx(0.1)


# ---- robust statistics ----------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_the_weighted_median_of_equal_weights_is_the_median(values):
    column = np.array(values)
    assert weighted_median(column, np.ones(len(values))) == pytest.approx(float(np.median(column)), abs=1e-6)


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(1, 5)), min_size=1, max_size=20))
def test_a_weight_counts_as_so_many_copies(pairs):
    values, weights = (np.array(c, dtype=float) for c in zip(*pairs, strict=True))
    copies = np.repeat(values, weights.astype(int))
    assert weighted_median(values, weights) == pytest.approx(float(np.median(copies)))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_a_fifth_of_the_points_anywhere_does_not_move_the_line(seed):
    rng = np.random.default_rng(seed)
    x, y, weights = line(60)
    bad = rng.choice(60, size=12, replace=False)
    y[bad] = rng.uniform(-1000, 1000, size=12)
    intercept, slope, _ = robust_line(x, y, weights)
    assert (intercept, slope) == pytest.approx((2.0, 1.0), abs=0.05)


def test_thousands_of_distinct_points_are_binned():
    x, y, weights = line(5000, slope=0.01)
    intercept, slope, left = robust_line(x, y, weights)
    assert (intercept, slope) == pytest.approx((2.0, 0.01), rel=1e-3)
    assert left < 1e-6


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=40))
def test_quantiles_are_those_of_numpy(sample):
    parts = np.linspace(0.0, 1.0, 97).tolist()
    assert quantiles(np.array(sample), parts) == np.quantile(sample, parts).tolist()


def test_the_clipped_mean_is_the_mean_of_tame_values():
    tame = np.array([1.0, 2.0, 3.0, 9.0])
    assert clipped_mean(tame) == tame.mean()
    assert clipped_mean(np.full(5, 7.0)) == 7.0


def test_contexts_that_grow_while_the_batch_thins_out_do_not_pass_for_a_fixed_cost():
    """12 ms, 0.1 ms a sequence and 40 ns for each token of its context; the fewer are left, the longer they are."""
    samples = [
        DecodeSample(n, 4, 4 * (0.012 + n * (1e-4 + 4e-8 * context)), context)
        for n in range(1, 33)
        for context in (400.0 * (40 - n), 500.0 * (40 - n))
    ]
    mean = sum(s.sequences * s.context_tokens for s in samples) / sum(s.sequences for s in samples)
    fit = fit_platform(decode=samples, prior=PRIOR)
    assert fit.profile.decode_fixed_s == pytest.approx(0.012, rel=1e-3)
    assert fit.profile.decode_per_sequence_s == pytest.approx(1e-4 + 4e-8 * mean, rel=1e-3)
    blind = fit_platform(decode=[replace(s, context_tokens=0.0) for s in samples], prior=PRIOR)
    assert blind.profile.decode_per_sequence_s < 0.7 * fit.profile.decode_per_sequence_s
    # Contexts that cost nothing, or all alike: the line over the number of sequences says it all.
    plain = fit_platform(decode=[DecodeSample(n, 1, 0.02 + 0.001 * n, 100.0) for n in range(1, 20)], prior=PRIOR)
    assert plain.profile.decode_fixed_s == pytest.approx(0.02)
    assert plain.profile.decode_per_sequence_s == pytest.approx(0.001)
    # They say so of their own contexts, whatever an earlier fit knew of others.
    again = fit_platform(decode=[DecodeSample(n, 1, 0.02 + 0.001 * n, 9e4) for n in range(1, 20)], prior=fit.profile)
    assert decode_per_sequence_s(again.profile, 9e4) == pytest.approx(0.001)


def test_what_a_prefill_iteration_costs_however_small_is_told_apart():
    sizes = [64, 128, 256, 512, 1024, 2048] * 4
    fit = fit_platform(prefill=[PrefillSample(n, 0.03 + 2e-5 * n) for n in sizes], prior=PRIOR)
    assert fit.profile.prefill_fixed_s == pytest.approx(0.03)
    assert fit.profile.prefill_marginal_s == pytest.approx(2e-5)
    assert fit.profile.prefill_per_token_s > 2e-5
    alike = fit_platform(prefill=[PrefillSample(512, 0.04)] * 20, prior=PRIOR)
    assert alike.profile.prefill_fixed_s == 0.0
    assert "distinct prefill sizes" in alike.refused["prefill_fixed_s"]


def test_a_mode_that_no_step_shows_leaves_over_half_of_what_the_other_one_does():
    workload = WorkloadProfile(batch=8, turns=10, new_prompt_tokens=10, response_tokens=10, turn_environment_s=0.1)
    platform = replace(PRIOR, decode_fixed_s=0.02, decode_per_sequence_s=0.001, prefill_per_token_s=0.001)
    model = ExtendedModel(workload, platform)
    colocated = StepMeasurement(segments=((Configuration(colocated=4), model.colocated(4).total_s + 2.0),))
    known = fit_overhead([colocated] * 2, workload=workload, platform=platform).profile
    # A stall of the worker holds up all on it: it is less than what a turn of theirs leaves over.
    assert 0.1 < known.overhead_per_turn_s < 0.2
    assert ExtendedModel(workload, known).colocated(4).total_s == pytest.approx(colocated.makespan_s)
    assert known.handover_s == pytest.approx(0.1)
    assert "half of what steps in colocation leave over" in known.origin["handover_s"]
    paired = StepMeasurement(segments=((Configuration(2, 2), model.total_s(2, 2)),))
    both = fit_overhead([colocated] * 2 + [paired] * 2, workload=workload, platform=platform).profile
    assert both.overhead_per_turn_s == pytest.approx(known.overhead_per_turn_s)
    assert both.handover_s == pytest.approx(0.0, abs=1e-9)
    slow = StepMeasurement(segments=((Configuration(2, 2), model.total_s(2, 2) + 2.0),))
    other = fit_overhead([slow] * 2, workload=workload, platform=platform).profile
    assert other.handover_s > 0.1
    left_s = 10 * other.handover_s
    assert ExtendedModel(workload, other).colocated(4).total_s - model.colocated(4).total_s == pytest.approx(
        0.5 * left_s, rel=1e-6
    )


@pytest.mark.parametrize("visits", [2.0, 5.0, 40.0])
def test_what_the_other_mode_leaves_over_is_found_however_few_turns_ask_for_prefill(visits):
    workload = WorkloadProfile(
        batch=4, turns=40, new_prompt_tokens=10, response_tokens=10, turn_environment_s=0.1, slowest_turns=visits
    )
    platform = replace(PRIOR, decode_fixed_s=0.02, decode_per_sequence_s=0.001, prefill_per_token_s=0.001)
    model = ExtendedModel(workload, platform)
    slow = StepMeasurement(segments=((Configuration(2, 2), model.total_s(2, 2) + 20.0),))
    found = fit_overhead([slow] * 2, workload=workload, platform=platform).profile
    more_s = ExtendedModel(workload, found).colocated(4).total_s - model.colocated(4).total_s
    assert more_s == pytest.approx(0.5 * 40 * found.handover_s, rel=1e-6)


def test_a_step_is_explained_by_who_was_slowest_in_it_and_steps_that_agree_say_how_sure_predictions_are():
    workload = WorkloadProfile(batch=8, turns=10, new_prompt_tokens=10, response_tokens=10, turn_environment_s=0.1)
    platform = replace(PRIOR, decode_fixed_s=0.02, decode_per_sequence_s=0.001, prefill_per_token_s=0.001)
    truth = replace(platform, overhead_per_turn_s=0.05)

    def step(turns, factor=1.0):
        own = replace(workload, turns=turns, slowest_turns=turns, environment_s=3.0)
        took_s = factor * ExtendedModel(own, truth).colocated(4).total_s
        return StepMeasurement(
            segments=((Configuration(colocated=4), took_s),), turns=turns, slowest_turns=turns, environment_s=3.0
        )

    lucky = [step(turns) for turns in (6.0, 10.0, 14.0, 20.0)]
    fit = fit_overhead(lucky, workload=workload, platform=platform).profile
    assert fit.overhead_per_turn_s == pytest.approx(0.05, rel=1e-6)
    assert fit.step_error == pytest.approx(0.0, abs=1e-9)
    unlike = [step(10.0, factor) for factor in (0.96, 1.0, 1.04, 1.08)]
    unsure = fit_overhead(unlike, workload=workload, platform=platform).profile
    assert 0.01 < unsure.step_error < 0.1
    assert fit_overhead(unlike[:3], workload=workload, platform=platform).profile.step_error == 0.0
