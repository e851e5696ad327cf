"""Lifecycle, configuration, profiles, trajectories, plans and decisions."""

import json
import math
from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl_state.configuration import Configuration
from pearl_state.decision import Candidate, Constraint, Decision, MakespanTerms, Reason, SwitchKind
from pearl_state.errors import ConfigurationError, ProfileError, StateError
from pearl_state.lifecycle import ACTIVITY, HOLDS_GPU, TRANSITIONS, Lifecycle
from pearl_state.plan import PlanId, Stage, TransitionPlan
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.roles import Activity, Mode, Role, Zone
from pearl_state.trajectory import GroupId, Trajectory, TrajectoryId, Turn, WeightSpan, merge_spans
from pearl_state.worker import GpuId, Worker, WorkerId

# ---- lifecycle ------------------------------------------------------------------------------------------------------


def reachable(start: Lifecycle) -> set[Lifecycle]:
    seen, frontier = {start}, [start]
    while frontier:
        state = frontier.pop()
        for before, after in TRANSITIONS:
            if before is state and after not in seen:
                seen.add(after)
                frontier.append(after)
    return seen


def test_every_state_can_be_reached_from_an_empty_slot_and_left_for_one() -> None:
    assert reachable(Lifecycle.VACANT) == set(Lifecycle)
    assert all(Lifecycle.VACANT in reachable(state) for state in Lifecycle)


def test_activity_is_a_function_of_the_lifecycle_and_only_active_serves() -> None:
    assert ACTIVITY.keys() == set(Lifecycle)
    assert [state for state in Lifecycle if ACTIVITY[state] is Activity.ACTIVE] == [Lifecycle.ACTIVE]
    for state in Lifecycle:
        row = Worker(id=WorkerId(1), gpus=frozenset({GpuId(1)}), role=Role.DECODE, zone=Zone.DEDICATED, lifecycle=state)
        assert row.activity is ACTIVITY[state]
        assert row.holds_gpu is (state in HOLDS_GPU)


def test_whatever_serves_or_transitions_owns_its_gpus() -> None:
    for state in Lifecycle:
        if ACTIVITY[state] is not Activity.INACTIVE:
            assert state in HOLDS_GPU
    assert Lifecycle.FAILED in HOLDS_GPU, "a failed process may still sit on its GPUs"
    assert not {Lifecycle.VACANT, Lifecycle.RELEASED, Lifecycle.RETIRED} & HOLDS_GPU


def test_every_transition_says_why_and_changes_something() -> None:
    for (before, after), why in TRANSITIONS.items():
        assert before is not after
        assert len(why.split()) >= 4


def test_nothing_serves_without_having_waited_for_weights_but_resumed_training() -> None:
    into_active = {before for before, after in TRANSITIONS if after is Lifecycle.ACTIVE}
    assert into_active == {Lifecycle.PENDING_WEIGHTS, Lifecycle.RESUMING}
    assert "training" in TRANSITIONS[Lifecycle.RESUMING, Lifecycle.ACTIVE]


# ---- configuration --------------------------------------------------------------------------------------------------

COUNTS = st.integers(1, 10**6)
CONFIGURATIONS = st.one_of(
    st.builds(lambda p, d: Configuration(prefill=p, decode=d), COUNTS, COUNTS),
    st.builds(lambda c: Configuration(colocated=c), st.integers(0, 10**6)),
)


@given(CONFIGURATIONS)
def test_a_configuration_is_read_back_from_its_text(configuration: Configuration) -> None:
    for text in (str(configuration), str(configuration).lower(), f"  {configuration} "):
        assert Configuration.parse(text) == configuration


@given(CONFIGURATIONS)
def test_counts_and_mode_agree(configuration: Configuration) -> None:
    assert sum(configuration.count(role) for role in Role) == configuration.workers
    assert configuration.count(Role.TRAINING) == 0
    assert (configuration.mode is Mode.DISAGGREGATION) is (configuration.count(Role.PREFILL) > 0)


@given(st.text(alphabet="0123456789PDCpdc -+.", max_size=8))
def test_any_text_is_read_or_refused_with_one_clear_line(text: str) -> None:
    refusal = None
    try:
        configuration = Configuration.parse(text)
    except ConfigurationError as error:
        refusal = str(error)
    if refusal is None:
        assert Configuration.parse(str(configuration)) == configuration
    else:
        assert len(refusal.splitlines()) == 1


@pytest.mark.parametrize("text", ["", "P", "2P", "3D", "0P3D", "2P0D", "2P3D4C", "-1C", "1.5C", "2D3P", "C"])
def test_what_is_no_configuration_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        Configuration.parse(text)


@pytest.mark.parametrize(
    "counts",
    [
        {"prefill": -1, "decode": 1},
        {"colocated": -1},
        {"prefill": 1},
        {"decode": 1},
        {"prefill": 1, "decode": 1, "colocated": 1},
    ],
)
def test_a_mixture_or_a_lonely_role_is_no_configuration(counts: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError):
        Configuration(**counts)


# ---- profiles -------------------------------------------------------------------------------------------------------

WORKLOAD: dict[str, Any] = {"batch": 64, "turns": 16.0, "new_prompt_tokens": 1700.0, "response_tokens": 70.0}
PLATFORM: dict[str, Any] = {
    "decode_fixed_s": 0.0065,
    "decode_per_sequence_s": 0.00036,
    "prefill_per_token_s": 2e-5,
    "kv_bytes_per_token": 147456.0,
    "transfer_bytes_per_s": 8e10,
}
POSITIVE = {
    "batch",
    "turns",
    "response_tokens",
    "decode_fixed_s",
    "prefill_per_token_s",
    "kv_bytes_per_token",
    "transfer_bytes_per_s",
}
NUMBERS = [
    (profile, base, item.name)
    for profile, base in ((WorkloadProfile, WORKLOAD), (PlatformProfile, PLATFORM))
    for item in fields(profile)
    if item.name not in ("origin", "active_by_turn", "context_by_turn", "steady")
]


@pytest.mark.parametrize(
    ("profile", "base", "name"), NUMBERS, ids=lambda value: getattr(value, "__name__", str(value))[:30]
)
def test_every_number_of_a_profile_is_checked(profile: type, base: dict[str, Any], name: str) -> None:
    for value in (math.nan, math.inf, -math.inf, -1.0, True):
        with pytest.raises(ProfileError, match=rf"^{profile.__name__}\.{name} = .*: must be"):
            profile(**{**base, name: value})
    if name in POSITIVE:
        with pytest.raises(ProfileError, match="must be positive"):
            profile(**{**base, name: 0})
    else:
        profile(**{**base, name: 0})
    assert getattr(profile(**{**base, name: 3}), name) == 3


@given(st.lists(st.floats(-0.5, 1.5), max_size=6))
def test_the_fraction_that_reaches_a_turn_never_rises(fractions: list[float]) -> None:
    legal = all(0 <= f <= 1 for f in fractions) and all(a >= b for a, b in pairwise(fractions))
    if legal:
        assert WorkloadProfile(**WORKLOAD, active_by_turn=tuple(fractions)).active_by_turn == tuple(fractions)
    else:
        with pytest.raises(ProfileError, match="active_by_turn"):
            WorkloadProfile(**WORKLOAD, active_by_turn=tuple(fractions))


# ---- trajectories ---------------------------------------------------------------------------------------------------

SPANS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=12).map(
    lambda pairs: [WeightSpan(version, tokens) for version, tokens in pairs]
)


@given(SPANS)
def test_merged_spans_keep_every_token_and_join_neighbours_or_say_that_a_version_goes_back(
    spans: list[WeightSpan],
) -> None:
    versions = [span.version for span in spans if span.tokens]
    if versions != sorted(versions):
        with pytest.raises(StateError, match="goes back"):
            merge_spans(spans)
        return
    merged = merge_spans(spans)
    assert [s.version for s in merged] == sorted(set(versions))
    assert all(span.tokens > 0 for span in merged)
    for version in set(versions):
        assert sum(s.tokens for s in spans if s.version == version) == sum(
            s.tokens for s in merged if s.version == version
        )
    assert merge_spans(merged) == merged


def turn(*spans: tuple[int, int]) -> Turn:
    tokens = sum(count for _, count in spans)
    return Turn(
        prompt=range(3),
        response=range(tokens),
        logprobs=(0.0,) * tokens,
        spans=tuple(WeightSpan(version, count) for version, count in spans),
    )


def trajectory(*turns: Turn) -> Trajectory:
    return Trajectory(
        id=TrajectoryId("t00000001"),
        group=GroupId("g000001"),
        task="find the bad commit",
        turns=turns,
        reward=1.0,
        dispatch_version=2,
        started_s=0.0,
        finished_s=1.0,
    )


def test_a_trajectory_tells_which_of_its_tokens_came_from_which_weights() -> None:
    """slime#2092: 2 + 2 + 8 tokens of versions 2, 4 and 6 are three spans, or one where it began anew."""
    interrupted = trajectory(turn((2, 2), (4, 2)), turn((6, 8)))
    assert interrupted.spans == (WeightSpan(2, 2), WeightSpan(4, 2), WeightSpan(6, 8))
    assert trajectory(turn((6, 12))).spans == (WeightSpan(6, 12),)
    assert interrupted.response_tokens == 12
    assert interrupted.total_tokens == 12 + 2 * 3


def test_spans_across_turns_join_and_never_go_back() -> None:
    assert trajectory(turn((3, 5)), turn((3, 4), (4, 1))).spans == (WeightSpan(3, 9), WeightSpan(4, 1))
    with pytest.raises(StateError):
        _ = trajectory(turn((4, 1)), turn((3, 1))).spans


# ---- plans and decisions --------------------------------------------------------------------------------------------


def test_a_stage_withdraws_and_admits_what_its_parts_say() -> None:
    stage = Stage(
        leave=frozenset({WorkerId(1)}),
        switch={WorkerId(2): Role.PREFILL},
        park=frozenset({WorkerId(3)}),
        join={WorkerId(4): Role.DECODE},
    )
    assert stage.withdraw == {1, 2, 3}
    assert stage.admit == {2, 3, 4}
    plan = TransitionPlan(
        id=PlanId(9),
        target=Configuration(prefill=1, decode=2),
        add={WorkerId(4): Role.DECODE},
        remove=frozenset({WorkerId(1)}),
        reassign={WorkerId(2): Role.PREFILL},
        stages=(stage,),
    )
    assert plan.changes == 3
    printed = json.loads(json.dumps(plan.to_json()))
    assert printed["target"] == "1P2D"
    assert printed["add"] == {"4": "decode"}
    assert printed["stages"] == [{"leave": [1], "switch": {"2": "prefill"}, "park": [3], "join": {"4": "decode"}}]


def test_a_decision_prints_everything_that_it_rests_on() -> None:
    terms = MakespanTerms(total_s=10.0, prefill_s=4.0, decode_s=6.0, bottleneck="decode")
    candidates = (
        Candidate(configuration=Configuration(prefill=1, decode=3), predicted=terms, printed=terms, feasible=True),
        Candidate(
            configuration=Configuration(colocated=4),
            predicted=terms,
            printed=terms,
            feasible=False,
            violated=(Constraint.DECODE_KV,),
        ),
    )
    decision = Decision(
        selected=candidates[0].configuration,
        previous=Configuration(colocated=4),
        reason=Reason.FORCED,
        budget_workers=4,
        candidates=candidates,
        considered=4,
        predicted_s=candidates[0].makespan_s,
        switch=SwitchKind.RELAUNCH,
        limits=("the current configuration does not fit",),
    )
    printed = json.loads(json.dumps(decision.to_json()))
    assert printed["selected"] == "1P3D"
    assert printed["previous"] == "4C"
    assert printed["reason"] == "forced"
    assert printed["switch"] == "relaunch"
    assert [c["feasible"] for c in printed["candidates"]] == [True, False]
    assert printed["candidates"][1]["violated"] == ["decode_kv"]
    assert printed["candidates"][0]["terms"]["decode_s"] == 6.0
