"""Decisions: the paper's choices, exact search, constraints, hysteresis, and reasons."""

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from pearl_planner.catalog import find_profile
from pearl_planner.decide import BOTH_MODES, DecideSettings, decide, scaled
from pearl_planner.explain import deciding_constraints, explain
from pearl_planner.makespan import PrintedModel
from pearl_planner.switching import SwitchCosts
from pearl_state.configuration import Configuration
from pearl_state.decision import Constraint, Decision, Reason, SwitchKind
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.roles import Mode

PROFILE = find_profile("swe-32k")
WORKLOAD = WorkloadProfile(**PROFILE.workload)
PLATFORM = PlatformProfile(**PROFILE.platform)
TABLE_2 = {2: "2C", 5: "2P3D", 6: "3P3D", 8: "3P5D", 13: "4P9D", 14: "4P10D", 16: "4P12D"}
PRINTED = DecideSettings(model="printed")
FREE = DecideSettings(ratio_threshold=0.0, mode_threshold=0.0)
NO_COST = SwitchCosts(flip_s=0.0, relaunch_s=0.0, new_worker_s=0.0)
DISAGGREGATION = frozenset({Mode.DISAGGREGATION})


def ask(workers: int, current: str | None = None, **options: object) -> Decision:
    arguments = {"workload": WORKLOAD, "platform": PLATFORM, **options}
    return decide(budget_workers=workers, current=Configuration.parse(current) if current else None, **arguments)


# ---- the paper's choices --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["printed", "extended"])
@pytest.mark.parametrize(("workers", "selected"), TABLE_2.items())
def test_the_bundled_profile_selects_the_ratios_of_table_2(workers, selected, model):
    decision = ask(workers, settings=DecideSettings(model=model))
    assert str(decision.selected) == selected
    assert decision.reason is Reason.INITIAL
    assert decision.considered == workers == len(decision.candidates)


def test_two_workers_are_colocated_because_one_cannot_hold_the_batch_s_kv():
    decision = ask(2, settings=PRINTED)
    assert deciding_constraints(decision) == (Constraint.DECODE_KV,)
    assert any("decode_kv decided: 1P1D" in words for words in decision.limits)


def dimensionless(epsilon: float, rho: float, kappa: float) -> tuple[WorkloadProfile, PlatformProfile]:
    """Profiles with the given ρ = ΔL·t/(r·b), κ = ΔL·K/(BW·r·b) and ε = A(1+θ)/(b·B) − κ."""
    batch, response, b, theta, prompt, kv = 64, 100, 1e-3, 0.5, 1000, 1e5
    unit = response * b
    workload = WorkloadProfile(
        batch=batch, turns=10, new_prompt_tokens=prompt, response_tokens=response, bubble_ratio=theta
    )
    platform = PlatformProfile(
        decode_fixed_s=(epsilon + kappa) * b * batch / (1 + theta),
        decode_per_sequence_s=b,
        prefill_per_token_s=rho * unit / prompt,
        kv_bytes_per_token=kv,
        transfer_bytes_per_s=prompt * kv / (kappa * unit) if kappa else 1e30,
    )
    return workload, platform


CORNERS = ((5 / 33, 32 / 33), (1 / 3, 4 / 3), (2 / 3, 7 / 3), (7 / 22, 18 / 11))


@given(st.lists(st.floats(0.02, 1.0), min_size=4, max_size=4), st.sampled_from([0.0, 0.05, 0.3]))
def test_every_point_of_the_region_gives_exactly_table_2(weights, kappa):
    """The quadrilateral of (ε, ρ) in which eqs. (2) and (3) select each ratio of Table 2."""
    total = sum(weights)
    epsilon = sum(w * corner[0] for w, corner in zip(weights, CORNERS, strict=True)) / total
    rho = sum(w * corner[1] for w, corner in zip(weights, CORNERS, strict=True)) / total
    workload, platform = dimensionless(epsilon, rho, kappa)
    for workers, selected in TABLE_2.items():
        if workers > 2:
            decision = decide(
                workload=workload,
                platform=platform,
                budget_workers=workers,
                allowed=DISAGGREGATION,
                settings=PRINTED,
            )
            assert str(decision.selected) == selected


@pytest.mark.parametrize(("epsilon", "rho"), [(0.1, 0.9), (0.5, 1.5), (0.7, 2.5), (0.2, 1.5)])
def test_points_outside_of_the_region_miss_a_ratio_of_table_2(epsilon, rho):
    workload, platform = dimensionless(epsilon, rho, 0.1)
    got = {
        n: str(decide(workload=workload, platform=platform, budget_workers=n, allowed=DISAGGREGATION).selected)
        for n in TABLE_2
        if n > 2
    }
    assert got != {n: selected for n, selected in TABLE_2.items() if n > 2}


@given(st.floats(0.01, 3.0), st.floats(0.01, 10.0), st.integers(3, 200))
def test_the_best_ratio_is_where_the_inequality_says(epsilon, rho, workers):
    """P is optimal iff (P−1)(ε + 1/(N−P)) ≤ ρ ≤ P(ε + 1/(N−P−1))."""
    workload, platform = dimensionless(epsilon, rho, 0.0)
    limitless = replace(PRINTED, prefill_load_limit=1e9)
    decision = decide(
        workload=workload, platform=platform, budget_workers=workers, allowed=DISAGGREGATION, settings=limitless
    )
    p = decision.selected.prefill
    slack = 1 + 1e-9
    assert (p - 1) * (epsilon + 1 / (workers - p)) <= rho * slack
    assert p == workers - 1 or rho <= p * (epsilon + 1 / (workers - p - 1)) * slack


def test_colocation_is_an_answer_beyond_some_batch_size():
    """sglang#24488, verl#6117: disaggregation pays only while decode is not crowded."""
    wide = replace(PLATFORM, kv_capacity_bytes=0.0, prefix_capacity_tokens=0.0, overhead_per_turn_s=0.3)
    modes = [ask(5, platform=wide, workload=replace(WORKLOAD, batch=b)).selected.mode for b in range(8, 400, 8)]
    flips = sum(a is not b for a, b in itertools.pairwise(modes))
    assert modes[0] is Mode.DISAGGREGATION
    assert modes[-1] is Mode.COLOCATION
    assert flips == 1


# ---- search ---------------------------------------------------------------------------------------------------------

WORKLOADS = st.builds(
    WorkloadProfile,
    batch=st.integers(1, 512),
    turns=st.floats(1.0, 40.0),
    new_prompt_tokens=st.floats(1.0, 5000.0),
    response_tokens=st.floats(1.0, 1000.0),
    bubble_ratio=st.floats(0.0, 3.0),
    environment_s=st.floats(0.0, 100.0),
    context_tokens=st.sampled_from([0.0, 2_000.0, 30_000.0]),
    turn_environment_s=st.sampled_from([0.0, 0.05, 3.0]),
    active_by_turn=st.sampled_from([(), (1.0, 0.9, 0.4, 0.1), tuple(1 - i / 20 for i in range(20))]),
)
PLATFORMS = st.builds(
    PlatformProfile,
    decode_fixed_s=st.floats(1e-4, 0.1),
    decode_per_sequence_s=st.floats(1e-6, 0.01),
    prefill_per_token_s=st.floats(1e-6, 1e-3),
    kv_bytes_per_token=st.just(100_000.0),
    transfer_bytes_per_s=st.floats(1e9, 1e12),
    overhead_per_turn_s=st.floats(0.0, 2.0),
    kv_capacity_bytes=st.sampled_from([0.0, 2e10, 1e11]),
    prefix_capacity_tokens=st.sampled_from([0.0, 2e5]),
    handover_s=st.sampled_from([0.0, 0.02]),
)
MODELS = st.sampled_from(["printed", "extended"])


@given(WORKLOADS, PLATFORMS, st.integers(2, 60), MODELS, st.sampled_from([0.5, 1.0, 2.0, 8.0]))
@example(  # No ratio is feasible: one lacks decode KV, the other falls behind in prefill.
    workload=WorkloadProfile(
        batch=101, turns=1, new_prompt_tokens=3, response_tokens=1, bubble_ratio=0.0, context_tokens=2000.0
    ),
    platform=PlatformProfile(
        decode_fixed_s=0.0625,
        decode_per_sequence_s=0.0078125,
        prefill_per_token_s=9e-4,
        kv_bytes_per_token=1e5,
        transfer_bytes_per_s=1e9,
        kv_capacity_bytes=2e10,
    ),
    workers=3,
    model="printed",
    limit=0.5,
)
def test_bisection_finds_what_brute_force_finds(workload, platform, workers, model, limit):
    everything = DecideSettings(model=model, prefill_load_limit=limit, explain_all_up_to=1000)
    few = replace(everything, explain_all_up_to=0, explain=3)
    for allowed in (BOTH_MODES, DISAGGREGATION):
        full = decide(
            workload=workload, platform=platform, budget_workers=workers, settings=everything, allowed=allowed
        )
        fast = decide(workload=workload, platform=platform, budget_workers=workers, settings=few, allowed=allowed)
        best = min(full.candidates, key=lambda c: (len(c.violated), c.makespan_s))
        assert full.predicted_s == best.makespan_s
        # A closed cycle is one step of an approximation: neighbours may be out of order by what that leaves.
        off = 0.01 if model == "extended" and workload.turn_environment_s else 1e-12
        assert fast.predicted_s == pytest.approx(best.makespan_s, rel=off)
        assert fast.considered == full.considered == len(full.candidates)
        shown, ranked = (
            [c.makespan_s for c in d.candidates if c.feasible and c.configuration.prefill] for d in (fast, full)
        )
        assert shown == pytest.approx(ranked[: len(shown)], rel=max(off, 1e-6))
        assert len(shown) == min(3, len(ranked))


@given(WORKLOADS, PLATFORMS, st.integers(1, 30), st.integers(0, 30), st.data())
def test_an_infeasible_configuration_is_never_selected_where_a_feasible_one_exists(
    workload, platform, workers, before, data
):
    prefill = data.draw(st.integers(0, max(0, before - 1)))
    current = Configuration(prefill, before - prefill) if prefill else Configuration(colocated=before)
    allowed = data.draw(st.sampled_from([BOTH_MODES, DISAGGREGATION, frozenset({Mode.COLOCATION})]))
    decision = decide(
        workload=workload,
        platform=platform,
        budget_workers=workers,
        current=current,
        allowed=allowed,
        calibrated=data.draw(st.booleans()),
        remaining_fraction=data.draw(st.floats(0.0, 1.0)),
    )
    (chosen,) = [c for c in decision.candidates if c.configuration == decision.selected]
    assert decision.selected.workers == workers
    assert chosen.feasible or not any(c.feasible for c in decision.candidates)
    assert (decision.reason is Reason.FALLBACK) is not chosen.feasible
    assert decision.selected.mode in allowed or workers == 1
    assert json.loads(json.dumps(decision.to_json()))["selected"] == str(decision.selected)
    assert str(decision.selected) in explain(decision)


def test_a_hundred_thousand_workers_are_explained_by_the_best_few():
    decision = ask(100_000, settings=DecideSettings(explain=8))
    assert decision.considered == 100_000
    assert len(decision.candidates) == 9
    assert "99991 more" in explain(decision)
    ranks = [c.makespan_s for c in decision.candidates]
    assert ranks == sorted(ranks)


def test_equal_makespans_are_told_apart_the_same_way_every_time():
    """Without decode growth every N_P that keeps up is equally good: the fewest prefill workers win."""
    platform = replace(PLATFORM, decode_per_sequence_s=0.0, kv_capacity_bytes=0.0, prefix_capacity_tokens=0.0)
    decision = ask(12, platform=platform, allowed=DISAGGREGATION)
    best = [c for c in decision.candidates if c.makespan_s == decision.predicted_s]
    assert len(best) > 2
    assert decision.selected.prefill == min(c.configuration.prefill for c in best)


# ---- switching ------------------------------------------------------------------------------------------------------


def test_what_runs_stays_while_the_gain_is_below_the_threshold():
    decision = ask(8, "4P4D")
    assert (str(decision.selected), decision.reason) == ("4P4D", Reason.WITHIN_HYSTERESIS)
    assert 0 < decision.gain_s < 0.05 * 77.4
    assert decision.switch is SwitchKind.NONE
    assert any("3P5D is 1.7% faster, below the threshold of 5%" in words for words in decision.limits)


def test_a_mode_switch_needs_more_than_a_change_of_ratio():
    # 3P5D is 8.2 % faster than 8C: enough for a ratio, not for a mode.
    assert ask(8, "8C").reason is Reason.WITHIN_HYSTERESIS
    assert ask(8, "8C").threshold == 0.10
    eager = ask(8, "8C", settings=DecideSettings(mode_threshold=0.08), steps_ahead=5.0)
    assert (str(eager.selected), eager.reason, eager.switch) == ("3P5D", Reason.BEST, SwitchKind.RELAUNCH)
    with pytest.raises(ValueError, match="below ratio_threshold"):
        DecideSettings(ratio_threshold=0.2, mode_threshold=0.1)


def test_once_steps_say_how_sure_predictions_are_a_mode_needs_no_more_than_that():
    def threshold(error):
        return ask(8, "8C", platform=replace(PLATFORM, step_error=error)).threshold

    # 3P5D is 8.2 % faster than 8C. What the switch costs is charged beside it, whatever the threshold.
    assert [threshold(error) for error in (0.0, 0.001, 0.04, 0.3)] == [0.10, 0.05, 0.08, 0.10]
    sure = ask(8, "8C", platform=replace(PLATFORM, step_error=0.02), steps_ahead=5.0)
    assert (str(sure.selected), sure.reason) == ("3P5D", Reason.BEST)
    assert ask(8, "8C", platform=replace(PLATFORM, step_error=0.02), steps_ahead=0.0).reason is Reason.COST_EXCEEDS_GAIN
    # And back again only for as much.
    back = ask(8, "3P5D", platform=replace(PLATFORM, step_error=0.02, overhead_per_turn_s=0.0))
    assert back.reason is Reason.ALREADY_BEST or back.threshold == 0.05


def test_a_blocked_mode_switch_does_not_block_a_better_ratio():
    """Colocation is best by 9 %, too little for a mode switch; the ratio at hand is bad enough for a flip."""
    platform = replace(PLATFORM, overhead_per_turn_s=0.0)
    free = ask(4, platform=platform, settings=replace(FREE, mode_threshold=0.5))
    best_ratio = next(c for c in free.candidates if c.configuration.prefill and c.feasible)
    worst = next(c for c in reversed(free.candidates) if c.configuration.prefill and c.feasible)
    assert free.candidates[0].configuration.mode is Mode.COLOCATION
    decision = ask(
        4, str(worst.configuration), platform=platform, settings=replace(FREE, mode_threshold=0.5), costs=NO_COST
    )
    assert decision.selected == best_ratio.configuration
    assert decision.switch is SwitchKind.FLIP


def test_a_switch_must_repay_its_cost_in_what_is_left():
    costs = SwitchCosts(relaunch_s=40.0)
    eager = DecideSettings(mode_threshold=0.05)
    late = ask(8, "8C", settings=eager, costs=costs, remaining_fraction=0.1, steps_ahead=0.0)
    assert (str(late.selected), late.reason) == ("8C", Reason.COST_EXCEEDS_GAIN)
    assert any("less than the switch costs" in words for words in late.limits)
    early = ask(8, "8C", settings=eager, costs=costs, remaining_fraction=1.0, steps_ahead=20.0)
    assert (str(early.selected), early.reason) == ("3P5D", Reason.BEST)
    assert early.switching_cost_s > 40.0


def test_lost_prefix_caches_are_part_of_what_a_flip_costs():
    """SGLang: a flip empties the instance's cache, so its contexts are prefilled again."""
    forgetful = ask(8, "6P2D", settings=FREE)
    empty = ask(8, "6P2D", settings=FREE, remaining_fraction=0.0)
    assert str(forgetful.selected) == str(empty.selected) == "3P5D"
    again = 3 / 8 * 64 * 15_000 * 20e-6 / 3
    assert forgetful.switching_cost_s - empty.switching_cost_s == pytest.approx(again)


@given(WORKLOADS, PLATFORMS, st.integers(1, 30), st.integers(2, 30), st.data())
@settings(max_examples=200)
def test_hysteresis_never_blocks_a_forced_switch(workload, platform, workers, before, data):
    """Where what runs cannot go on, even the highest thresholds and costs leave a feasible choice."""
    prefill = data.draw(st.integers(1, before - 1))
    current = Configuration(prefill, before - prefill)
    stubborn = {
        "settings": DecideSettings(ratio_threshold=0.9, mode_threshold=0.99),
        "costs": SwitchCosts(flip_s=1e6, relaunch_s=1e6),
    }
    decision = decide(workload=workload, platform=platform, budget_workers=workers, current=current, **stubborn)
    reachable = [
        c
        for c in decision.candidates
        if c.configuration.prefill
        and c.feasible
        and min(prefill, workers - current.decode) <= c.configuration.prefill <= max(prefill, workers - current.decode)
    ]
    assume(not reachable)
    free = decide(workload=workload, platform=platform, budget_workers=workers, current=current, settings=FREE)
    assert decision.reason is Reason.FORCED
    assert decision.selected == decision.candidates[0].configuration
    assert decision.predicted_s == free.candidates[0].makespan_s


def test_a_pair_that_shrinks_to_one_worker_is_colocated():
    decision = ask(1, "1P1D")
    assert (str(decision.selected), decision.reason) == ("1C", Reason.FORCED)


def test_a_shrink_keeps_roles_where_that_is_good_enough():
    decision = ask(6, "3P5D")
    assert (str(decision.selected), decision.reason) == ("3P3D", Reason.FORCED)
    assert decision.switch is SwitchKind.NEW_WORKERS
    # A shrink is no reason to relaunch what is 7 % slower than the best.
    assert str(ask(6, "8C").selected) == "6C"
    assert any("below the threshold" in words for words in ask(6, "8C").limits)


def test_a_growth_adds_workers_in_the_best_roles():
    decision = ask(13, "3P5D")
    assert (str(decision.selected), decision.reason) == ("4P9D", Reason.BEST)
    assert decision.switch is SwitchKind.NEW_WORKERS
    assert decision.gain_s > 0


def test_the_current_best_stays():
    decision = ask(8, "3P5D")
    assert (str(decision.selected), decision.reason, decision.gain_s) == ("3P5D", Reason.ALREADY_BEST, 0.0)
    assert decision.switching_cost_s == 0.0


# ---- special cases --------------------------------------------------------------------------------------------------


def test_a_prior_changes_nothing_that_runs_and_starts_colocated():
    """A model without a profile gets an analytic default; nothing is risked on it, and the decision says so."""
    kept = ask(8, "4P4D", calibrated=False)
    assert (str(kept.selected), kept.reason) == ("4P4D", Reason.UNCALIBRATED)
    first = ask(8, calibrated=False)
    assert (str(first.selected), first.reason) == ("8C", Reason.UNCALIBRATED)
    assert any("prior" in words for words in first.limits)


@pytest.mark.parametrize(
    ("pinned", "workers", "target"),
    [("2P3D", 5, "2P3D"), ("2P3D", 10, "4P6D"), ("2P3D", 2, "1P1D"), ("2P3D", 1, "1C"), ("4C", 7, "7C")],
)
def test_a_pinned_configuration_is_held_in_proportion(pinned, workers, target):
    configuration = Configuration.parse(pinned)
    assert str(scaled(configuration, workers)) == target
    decision = ask(workers, "5P3D", pinned=configuration, allowed=frozenset({Mode.COLOCATION}))
    assert (str(decision.selected), decision.reason) == (target, Reason.FIXED)
    assert (pinned == target) is not any("is its like" in words for words in decision.limits)


def test_a_pinned_configuration_that_breaks_a_constraint_says_so():
    decision = ask(2, pinned=Configuration(1, 1))
    assert any("pinned 1P1D breaks decode_kv" in words for words in decision.limits)


def test_where_nothing_is_feasible_the_least_bad_runs_and_names_what_it_breaks():
    decision = ask(2, allowed=DISAGGREGATION)
    assert (str(decision.selected), decision.reason) == ("1P1D", Reason.FALLBACK)
    assert decision.candidates[0].violated == (Constraint.DECODE_KV,)
    assert deciding_constraints(decision) == (Constraint.DECODE_KV,)


def test_prefill_that_falls_behind_is_infeasible():
    heavy = replace(WORKLOAD, new_prompt_tokens=12_000.0)
    decision = ask(8, workload=heavy)
    broken = {str(c.configuration) for c in decision.candidates if Constraint.PREFILL_LOAD in c.violated}
    assert "1P7D" in broken
    model = PrintedModel(heavy, PLATFORM)
    assert decision.selected.mode is Mode.COLOCATION or decision.selected.prefill > 1
    assert model.paths(1, 7)[0] > 2 * model.paths(1, 7)[1]


def test_no_worker_runs_nothing():
    decision = ask(0, "3P5D")
    assert (str(decision.selected), decision.reason, decision.candidates) == ("0C", Reason.FORCED, ())
    assert decision.to_json()["predicted_s"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget_workers": -1}, "budget_workers = -1: must be at least 0"),
        ({"remaining_fraction": 1.5}, "remaining_fraction = 1.5"),
        ({"steps_ahead": float("nan")}, "steps_ahead = nan"),
        ({"allowed": ()}, "allowed is empty"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    arguments = {"workload": WORKLOAD, "platform": PLATFORM, "budget_workers": 4, **options}
    with pytest.raises(ValueError, match=message):
        decide(**arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "guess"}, "must be 'extended' or 'printed'"),
        ({"ratio_threshold": 1.0}, "ratio_threshold = 1.0"),
        ({"prefill_load_limit": float("nan")}, "prefill_load_limit = nan"),
        ({"explain": 0}, "explain = 0"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DecideSettings(**options)


def test_explain_prints_every_candidate_in_aligned_columns():
    text = explain(ask(5, "4C"))
    lines = text.splitlines()
    assert len({line.index(".") for line in lines[1:6]}) <= 2
    assert sum(line.startswith(">") for line in lines) == 1
    assert all(name in text for name in ("5C", "1P4D", "2P3D", "3P2D", "4P1D", "breaks decode_kv", "was 4C"))
