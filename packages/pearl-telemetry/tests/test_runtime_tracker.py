from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl_state.roles import Role
from pearl_state.samples import DecodeSample, EngineSamples, PrefillSample, TurnSample
from pearl_telemetry.ema import Ema
from pearl_telemetry.tracker import RuntimeTracker
from pearl_telemetry.window import SampleWindow


def trajectory(step: int, turns: int, *, prompt: int = 20, response: int = 5, environment_s: float = 0.2):
    context = 0
    out = []
    for turn in range(turns):
        context += prompt
        out.append(
            TurnSample(
                step=step,
                turn=turn,
                new_prompt_tokens=prompt,
                response_tokens=response,
                retained_tokens=0 if turn == turns - 1 else response,
                context_tokens=context,
                prefill_s=0.01,
                decode_s=0.1,
                queue_s=0.0,
                environment_s=environment_s,
                last=turn == turns - 1,
            )
        )
        context += response
    return out


def finish(tracker: RuntimeTracker, step: int, fraction: float | None = 0.5) -> None:
    tracker.finish_step(step=step, batch=64, makespan_s=3.0, decoding_fraction=fraction)


def test_nothing_is_said_before_a_step_with_enough_trajectories() -> None:
    tracker = RuntimeTracker(least_trajectories=4)
    for _ in range(3):
        tracker.observe_turns(trajectory(1, 2))
    finish(tracker, 1)
    assert tracker.profile() is None


def test_a_step_of_known_trajectories_gives_its_profile() -> None:
    tracker = RuntimeTracker()
    for turns in (1, 2, 2, 4):
        tracker.observe_turns(trajectory(1, turns))
    finish(tracker, 1)
    profile = tracker.profile()
    assert profile is not None
    assert (profile.batch, profile.turns, profile.mean_turns) == (64, 4.0, 2.25)
    assert (profile.new_prompt_tokens, profile.response_tokens) == (20.0, 5.0)
    assert profile.active_by_turn == (1.0, 0.75, 0.25, 0.25)
    assert profile.environment_s == pytest.approx(0.8)
    assert profile.turn_environment_s == pytest.approx(0.2)
    assert profile.bubble_ratio == pytest.approx(1.0)
    assert profile.max_context_tokens == 4 * 25


def test_contexts_are_averaged_by_turn_over_those_who_reach_it() -> None:
    tracker = RuntimeTracker(weight=0.5)
    for turns in (1, 2, 2, 4):
        tracker.observe_turns(trajectory(1, turns))
    finish(tracker, 1)
    assert tracker.slowest == (4.0, 4, pytest.approx(0.8))
    for _ in range(4):
        tracker.observe_turns(trajectory(2, 1, prompt=40, response=10))
    finish(tracker, 2)
    profile = tracker.profile()
    assert profile is not None
    # Three of eight took a second turn, and the contexts there are theirs alone.
    assert profile.active_by_turn == pytest.approx((1.0, 0.375, 0.125, 0.125))
    assert profile.context_by_turn == pytest.approx((30.0, 45.0, 70.0, 95.0))
    assert profile.slowest_turns == 2.5
    contexts = [20, 20, 45, 20, 45, 20, 45, 70, 95]
    assert profile.decoded_context_tokens == pytest.approx((sum(contexts) / 9 + 2.5 + 45.0) / 2)
    finish(tracker, 3)
    assert tracker.slowest is None


def test_the_newest_step_weighs_what_it_should_and_others_fade() -> None:
    tracker = RuntimeTracker(weight=0.5)
    for step, prompt in ((1, 20), (2, 40)):
        for _ in range(4):
            tracker.observe_turns(trajectory(step, 2, prompt=prompt))
        finish(tracker, step)
    profile = tracker.profile()
    assert profile is not None
    assert profile.new_prompt_tokens == 30.0
    assert "2 steps" in profile.origin["turns"]


def test_every_figure_says_where_it_comes_from() -> None:
    tracker = RuntimeTracker()
    for step, fraction in ((1, None), (2, 0.5), (3, 0.25)):
        for _ in range(4):
            tracker.observe_turns(trajectory(step, 2))
        finish(tracker, step, fraction)
        profile = tracker.profile()
        assert profile is not None
        assert profile.origin.keys() == {item.name for item in fields(profile)} - {"origin"}
        assert profile.origin["turns"] == f"telemetry, moving average over {step} steps"
        expected = "not measured" if step == 1 else f"over {step - 1} steps"
        assert expected in profile.origin["bubble_ratio"]


def test_turns_of_the_next_step_wait_for_its_end() -> None:
    tracker = RuntimeTracker()
    for _ in range(4):
        tracker.observe_turns(trajectory(1, 2))
        tracker.observe_turns(trajectory(2, 4))
    finish(tracker, 1)
    profile = tracker.profile()
    assert profile is not None
    assert profile.mean_turns == 2.0
    finish(tracker, 2)
    assert tracker.steps == 2


@given(st.lists(st.lists(st.integers(1, 9), min_size=4, max_size=12), min_size=1, max_size=6))
def test_survival_never_rises_and_adds_up_to_mean_turns(steps: list[list[int]]) -> None:
    tracker = RuntimeTracker()
    for number, turns in enumerate(steps, 1):
        for n in turns:
            tracker.observe_turns(trajectory(number, n))
        finish(tracker, number)
    profile = tracker.profile()
    assert profile is not None
    reach = profile.active_by_turn
    assert reach[0] == pytest.approx(1.0)
    assert list(reach) == sorted(reach, reverse=True)
    assert sum(reach) == pytest.approx(profile.mean_turns, abs=0.02)


def test_an_average_refuses_what_is_no_number() -> None:
    with pytest.raises(ValueError, match="nan"):
        Ema().observe({"turns": float("nan")})
    with pytest.raises(ValueError, match="weight"):
        Ema(0.0)


def test_rare_batch_sizes_outlive_thousands_of_common_ones() -> None:
    window = SampleWindow(per_stratum=8, strata=4)
    window.add(EngineSamples(role=Role.DECODE, decode=(DecodeSample(2, 1, 0.02),)))
    for _ in range(1000):
        window.add(EngineSamples(role=Role.DECODE, decode=(DecodeSample(16, 1, 0.03),)))
    assert {sample.sequences for sample in window.decode} == {2, 16}
    assert len(window.decode) == 9


def test_the_window_is_bounded() -> None:
    window = SampleWindow(per_stratum=2, strata=3)
    for tokens in range(1, 4000):
        window.add(
            EngineSamples(
                role=Role.PREFILL, prefill=(PrefillSample(tokens, 0.1),), decode=(DecodeSample(tokens, 1, 0.1),)
            )
        )
    assert len(window.prefill) <= 6
    assert sorted({s.sequences for s in window.decode}) == [3997, 3998, 3999]


def test_where_batches_overlap_a_path_is_that_of_a_mean_trajectory_and_has_no_tail() -> None:
    tracker = RuntimeTracker()
    for turns in (1, 2, 2, 4):
        tracker.observe_turns(trajectory(1, turns))
    tracker.finish_step(step=1, batch=200, makespan_s=3.0, decoding_fraction=0.5, steady=True)
    profile = tracker.profile()
    assert profile is not None
    assert (profile.batch, profile.turns, profile.mean_turns) == (200, 2.25, 2.25)
    assert profile.active_by_turn == ()
    assert profile.environment_s == pytest.approx(2.25 * 0.2)
    finish(tracker, 2)
    for turns in (1, 2, 2, 4):
        tracker.observe_turns(trajectory(3, turns))
    finish(tracker, 3)
    again = tracker.profile()
    assert again is not None
    assert (again.batch, again.turns) == (64, 4.0)
