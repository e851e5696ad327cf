"""The predictor as a whole: sums over all sources, learning from residuals, and no knowledge of the future."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl_planner.forecast import Forecast, PredictorSettings, ReplaceOnReward, WorkloadPredictor
from pearl_state.phases import PhaseChange, StartupMode, follow_up
from pearl_state.trajectory import GroupId, TrajectoryId, TrajectoryPhase
from pearl_state.worker import WorkerId

P = TrajectoryPhase
PREFILL, DECODE = WorkerId(1), WorkerId(2)


def life(name: str, at_s: float, turns: list[tuple[int, float, float, float]]) -> Iterator[PhaseChange]:
    """A trajectory that starts prewarmed in 2 s; turns of (prompt, prefill, decode, tool seconds); reward in 3 s."""
    record = PhaseChange(trajectory=TrajectoryId(name), group=GroupId(name), phase=P.SAMPLED, at_s=at_s, task="swe")
    yield record
    record = follow_up(record, P.ENVIRONMENT_STARTING, at_s, startup=StartupMode.PREWARMED)
    yield record
    at_s += 2.0
    for number, (prompt, prefill_s, decode_s, tool_s) in enumerate(turns):
        record = follow_up(record, P.READY, at_s, prompt_tokens=prompt, turn=number, instance=PREFILL)
        yield record
        record = follow_up(record, P.PREFILL, at_s, instance=PREFILL)
        yield record
        at_s += prefill_s
        record = follow_up(record, P.DECODE, at_s, instance=DECODE)
        yield record
        at_s += decode_s
        record = follow_up(record, P.TOOL, at_s, prompt_tokens=prompt + 50)
        yield record
        at_s += tool_s
    record = follow_up(record, P.REWARD, at_s)
    yield record
    yield follow_up(record, P.DONE, at_s + 3.0, accepted=True)


def forecast(predictor: WorkloadPredictor, now_s: float) -> Forecast:
    return predictor.forecast(now_s, prefill=[PREFILL], profiled_tokens_per_s=100.0, kv_bytes_per_token=2.0)


def seen(predictor: WorkloadPredictor, changes: list[PhaseChange], until_s: float) -> None:
    for change in changes:
        if change.at_s <= until_s:
            predictor.observe(change)


def test_the_forecast_is_the_sum_of_all_sources() -> None:
    predictor = WorkloadPredictor(PredictorSettings(returns=False), ReplaceOnReward())
    once = [(1000, 1.0, 20.0, 4.0)]
    changes = [
        *life("past", 0.0, [*once, (1100, 1.1, 20.0, 4.0)]),
        *life("rewarding", 73.0, once),  # 0 of 3 s: q = 1, p̂ = 1, d̂ = 2 s, so one launch of x̂ = 1000
        *life("tool", 76.0, once),  # 1 of 4 s: r = 3 < 10; then 50 tokens more than now
        *life("decoding", 96.0, once),
        *life("serving", 98.0, once),
        *[c for c in life("ready", 98.0, once) if c.phase is not P.PREFILL],
        *life("starting", 99.0, once),  # 1 of 2 s: q = 1
    ]
    seen(predictor, sorted(changes, key=lambda change: change.at_s), 100.0)
    found = forecast(predictor, 100.0)
    assert found.sources.sampler == pytest.approx(1000.0)
    assert found.sources.startup == pytest.approx(1000.0)
    assert found.sources.ready == 1000.0
    assert found.sources.inflight == 1000.0
    assert found.sources.tool == pytest.approx(1100.0)
    assert found.prefill_tokens == pytest.approx(5100.0)
    assert found.decode_kv_bytes == 2.0 * 1000
    # θ = 1000 tokens in each busy second. In flight to 101, ready to 102, startup (101) to 103, tool (103) to 104.1,
    # sampler (106) to 107: all before 110.
    assert found.tokens_per_s == pytest.approx(1000.0)
    assert found.admitted_tokens == pytest.approx(5100.0)
    assert found.admitted_kv_bytes == pytest.approx(2.0 * 5100.0)


def test_a_trajectory_in_decode_counts_where_it_is_expected_back() -> None:
    predictor = WorkloadPredictor()
    for change in life("past", 0.0, [(1000, 1.0, 5.0, 1.0), (1100, 1.0, 5.0, 1.0)]):
        predictor.observe(change)
    for change in life("now", 50.0, [(1000, 1.0, 5.0, 1.0)]):
        if change.phase is P.TOOL:
            break
        predictor.observe(change)
    # It came back after 6 s of decode and tool in half of the cases, with 100 tokens more; 3 s have passed.
    found = forecast(predictor, 56.0)
    assert found.sources.returns == pytest.approx(0.9 * 1100.0), "the last of two observations weighs 0.1"
    assert forecast(predictor, 70.0).sources.returns == pytest.approx(0.9 * 1100.0 * 10 / (17 + 10))


def test_backlog_is_exact_and_never_corrected() -> None:
    predictor = WorkloadPredictor()
    predictor.prefill_bias = predictor.prefill_bias.observe(100.0, 900.0)
    changes = [c for c in life("now", 0.0, [(1000, 1.0, 5.0, 1.0)]) if c.phase in (P.SAMPLED, P.ENVIRONMENT_STARTING)]
    seen(predictor, [*changes, follow_up(changes[-1], P.READY, 2.0, prompt_tokens=640)], 5.0)
    assert forecast(predictor, 5.0).prefill_tokens == 640.0


def test_a_request_that_is_sent_again_is_no_new_arrival() -> None:
    predictor = WorkloadPredictor()
    forecast(predictor, 0.0)
    decoding = [change for change in life("now", 0.0, [(1000, 1.0, 5.0, 1.0)]) if change.at_s <= 3.0][-1]
    seen(predictor, list(life("now", 0.0, [(1000, 1.0, 5.0, 1.0)])), 3.0)
    again = follow_up(decoding, P.READY, 4.0, prompt_tokens=1010, instance=PREFILL)
    serving = follow_up(again, P.PREFILL, 4.0, instance=PREFILL)
    seen(predictor, [again, serving, follow_up(serving, P.DECODE, 5.0, instance=DECODE)], 9.0)
    forecast(predictor, 10.0)
    assert predictor.last is not None
    assert predictor.last.prefill_tokens == 1000.0, "the trajectory asked once"
    assert predictor.last.admitted_tokens == 1000.0 + 1010.0, "decode was given it twice"


def test_the_bias_learns_from_windows_of_the_right_length_only() -> None:
    predictor = WorkloadPredictor()
    trajectories = [list(life(f"t{i}", 3.0 * i, [(1000, 0.1, 2.0, 1.0)] * 6)) for i in range(30)]
    changes = sorted((c for life_ in trajectories for c in life_), key=lambda c: c.at_s)
    done = 0
    for window in range(8):
        while done < len(changes) and changes[done].at_s <= 10.0 * window:
            predictor.observe(changes[done])
            done += 1
        forecast(predictor, 10.0 * window)
    learned = predictor.prefill_bias.windows
    assert learned >= 5
    assert predictor.last is not None
    forecast(predictor, 73.0)
    assert predictor.prefill_bias.windows == learned, "a window of 3 s is no window of 10 s"


lives = st.lists(
    st.tuples(
        st.floats(0.0, 60.0),
        st.lists(
            st.tuples(st.integers(1, 4000), st.floats(0.01, 3.0), st.floats(0.1, 20.0), st.floats(0.0, 20.0)),
            min_size=1,
            max_size=4,
        ),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40)
@given(lives, lives, st.floats(10.0, 80.0))
def test_a_forecast_depends_on_the_past_only(
    one: list[tuple[float, list[tuple[int, float, float, float]]]],
    other: list[tuple[float, list[tuple[int, float, float, float]]]],
    now_s: float,
) -> None:
    """Two futures that begin alike until now get the same forecasts until now."""

    def changes(spec: list[tuple[float, list[tuple[int, float, float, float]]]], name: str) -> list[PhaseChange]:
        found = [c for i, (at_s, turns) in enumerate(spec) for c in life(f"{name}{i}", at_s, turns)]
        return sorted(found, key=lambda change: change.at_s)

    shared = changes(one, "a")
    futures = (
        shared,
        [c for c in shared if c.at_s <= now_s],
        sorted(
            [c for c in shared if c.at_s <= now_s] + changes([(now_s + 0.1 + a, t) for a, t in other], "b"),
            key=lambda c: c.at_s,
        ),
    )
    results = []
    for future in futures:
        predictor, done, forecasts = WorkloadPredictor(), 0, []
        for at_s in (0.5 * now_s, now_s, now_s + 20.0):
            while done < len(future) and future[done].at_s <= at_s:
                predictor.observe(future[done])
                done += 1
            forecasts.append(forecast(predictor, at_s))
        results.append(forecasts[:2])
    assert results[0] == results[1] == results[2]
    for found in results[0]:
        assert found.prefill_tokens >= found.sources.ready + found.sources.inflight
        assert found.admitted_tokens >= 0.0


def test_admissions_that_are_over_within_the_horizon_take_their_part_of_the_kv() -> None:
    """Decode takes 2 s of a horizon of 10: a fifth of the admissions is there at a time; the paper counts all."""
    found = {}
    for reclaimed in (True, False):
        predictor = WorkloadPredictor(PredictorSettings(reclaimed=reclaimed))
        seen(predictor, list(life("past", 0.0, [(1000, 1.0, 2.0, 1.0)])), 50.0)
        seen(predictor, [c for c in life("ready", 48.0, [(1000, 1.0, 2.0, 1.0)]) if c.phase is not P.PREFILL], 50.0)
        found[reclaimed] = forecast(predictor, 50.0)
    assert found[True].admitted_tokens == found[False].admitted_tokens == 1000.0
    assert found[False].admitted_kv_bytes == 2.0 * 1000
    assert found[True].admitted_kv_bytes == pytest.approx(0.2 * 2.0 * 1000)


def test_a_tool_that_outlived_the_mean_is_expected_as_others_that_ran_as_long() -> None:
    """Nine of ten tools take a second, one a minute: after 20 s it is one of those, and 30 s are left."""
    found = {}
    for residuals in (True, False):
        predictor = WorkloadPredictor(PredictorSettings(returns=False, tool_residuals=residuals))
        turns = [(1000, 1.0, 2.0, 60.0 if turn % 10 == 0 else 1.0) for turn in range(20)]
        seen(predictor, list(life("past", 0.0, [*turns, (1000, 1.0, 2.0, 1.0)])), 400.0)
        seen(predictor, list(life("now", 500.0, [(1000, 1.0, 2.0, 60.0)])), 525.0)
        found[residuals] = [forecast(predictor, at_s).sources.tool for at_s in (506.0, 525.0, 556.0)]
    assert found[True][0] == pytest.approx(0.9 * found[False][0], rel=0.1), "just begun, it is likely a short one"
    assert found[True][1] == 0.0, "the paper's mean expects it at once"
    assert found[False][1] > 0.0
    assert found[True][2] == pytest.approx(found[False][2])


def test_members_of_a_group_share_the_work_of_their_first_prompt() -> None:
    predictor = WorkloadPredictor()
    for member in range(4):
        record = PhaseChange(trajectory=TrajectoryId(f"m{member}"), group=GroupId("g"), phase=P.SAMPLED, at_s=0.0)
        predictor.observe(record)
        record = follow_up(record, P.ENVIRONMENT_STARTING, 0.0, startup=StartupMode.PREWARMED)
        predictor.observe(record)
    for member in range(4):
        record = follow_up(predictor.live.records[TrajectoryId(f"m{member}")], P.READY, 1.0, prompt_tokens=1000)
        predictor.observe(record)
        assert predictor.history.fresh[record.trajectory] == pytest.approx(0.25)
    # 4,000 tokens wait of which 1,000 are to be computed, 100 of them a second.
    assert forecast(predictor, 1.0).tokens_per_s == pytest.approx(400.0)


def test_nothing_is_remembered_of_groups_that_are_over() -> None:
    predictor = WorkloadPredictor()
    for number in range(5):
        for change in life(f"t{number}", 100.0 * number, [(1000, 1.0, 5.0, 1.0)]):
            predictor.observe(change)
    # Its environment ended before it asked for anything.
    record = follow_up(member("silent", predictor), P.REWARD, 9.0)
    predictor.observe(record)
    predictor.observe(follow_up(record, P.DONE, 9.0, accepted=True))
    history = predictor.history
    assert not history.group_prompt
    assert not history.fresh
    assert not history._sampled_s


def member(name: str, predictor: WorkloadPredictor) -> PhaseChange:
    """A trajectory of group "g" whose environment starts at 0 s."""
    record = PhaseChange(trajectory=TrajectoryId(name), group=GroupId("g"), phase=P.SAMPLED, at_s=0.0)
    predictor.observe(record)
    record = follow_up(record, P.ENVIRONMENT_STARTING, 0.0, startup=StartupMode.PREWARMED)
    predictor.observe(record)
    return record


def assigned(record: PhaseChange, predictor: WorkloadPredictor, at_s: float, prompt: int, weights: int) -> PhaseChange:
    """It joins the ready queue and `PREFILL` is chosen for it."""
    record = follow_up(record, P.READY, at_s, prompt_tokens=prompt)
    predictor.observe(record)
    record = follow_up(record, P.READY, at_s, prompt_tokens=prompt, instance=PREFILL, weights=weights)
    predictor.observe(record)
    return record


def turned(record: PhaseChange, predictor: WorkloadPredictor, at_s: float, prefill_s: float) -> PhaseChange:
    """It is prefilled by `at_s`, decodes for a second and calls a tool with 50 tokens more."""
    record = follow_up(record, P.PREFILL, record.at_s, instance=PREFILL, weights=record.weights)
    predictor.observe(record)
    record = follow_up(record, P.DECODE, at_s, instance=DECODE)
    predictor.observe(record)
    record = follow_up(record, P.TOOL, at_s + 1.0, prompt_tokens=record.prompt_tokens + 50, prefill_s=prefill_s)
    predictor.observe(record)
    return record


def test_newer_weights_make_whole_prompts_new_again_but_for_what_a_member_computed() -> None:
    predictor = WorkloadPredictor()
    one, other, third = (member(name, predictor) for name in ("one", "other", "third"))
    fresh = predictor.history.fresh
    one = assigned(one, predictor, 1.0, 1000, weights=3)
    other = assigned(other, predictor, 1.0, 1000, weights=3)
    assert fresh[one.trajectory] == 1.0
    assert fresh[other.trajectory] == 0.0, "the instance computes what they share once"
    one = turned(one, predictor, 2.0, 1.0)
    one = assigned(one, predictor, 5.0, 1250, weights=3)
    assert fresh[one.trajectory] == pytest.approx(250 / 1250)
    # The other one's next prompt is computed by newer weights: nobody computed anything of it with them.
    other = turned(other, predictor, 6.0, 0.1)
    other = assigned(other, predictor, 8.0, 1600, weights=4)
    assert fresh[other.trajectory] == 1.0
    # Once it is done, its first 1,000 tokens, which the group shares, are there.
    turned(other, predictor, 9.0, 1.6)
    third = assigned(third, predictor, 9.0, 1000, weights=4)
    assert fresh[third.trajectory] == 0.0
    # The first one was chosen before that: it is computed by the newer weights all the same.
    assert predictor.history.new_tokens(one, 1250) == 250.0


def test_a_prompt_that_was_taken_from_its_instance_before_it_was_computed_is_as_new_as_it_was() -> None:
    predictor = WorkloadPredictor()
    one, other = (member(name, predictor) for name in ("one", "other"))
    fresh = predictor.history.fresh
    one = assigned(one, predictor, 1.0, 1000, weights=3)
    # The instance leaves, and comes back as another process.
    one = assigned(one, predictor, 2.0, 1000, weights=3)
    assert fresh[one.trajectory] == 1.0
    predictor.observe(follow_up(one, P.FAILED, 3.0))
    other = assigned(other, predictor, 3.0, 1000, weights=3)
    assert fresh[other.trajectory] == 1.0, "nobody else computes it for this one any more"


def test_who_is_done_late_with_older_weights_makes_nothing_new_that_newer_ones_computed() -> None:
    predictor = WorkloadPredictor()
    late, first, third = (member(name, predictor) for name in ("late", "first", "third"))
    late = assigned(late, predictor, 1.0, 1000, weights=3)
    turned(assigned(first, predictor, 1.0, 1000, weights=4), predictor, 2.0, 1.0)
    turned(late, predictor, 3.0, 1.0)
    third = assigned(third, predictor, 4.0, 1000, weights=4)
    assert predictor.history.fresh[third.trajectory] == 0.0


def test_admissions_count_what_must_be_computed_and_not_what_is_cached() -> None:
    """100 tokens a second: of two prompts of 5,000 tokens one is new, the other is all but new."""
    predictor = WorkloadPredictor()
    one = turned(assigned(member("one", predictor), predictor, 0.0, 5000, weights=1), predictor, 50.0, 50.0)
    for _ in range(200):
        predictor.history.service.observe(5000.0, 50.0)
    assigned(one, predictor, 60.0, 5100, weights=1)
    found = forecast(predictor, 60.0)
    assert found.admitted_raw_tokens == 5100.0, "100 of its tokens are new: a second"
    later = WorkloadPredictor()
    one = turned(assigned(member("one", later), later, 0.0, 5000, weights=1), later, 50.0, 50.0)
    for _ in range(200):
        later.history.service.observe(5000.0, 50.0)
    assigned(one, later, 60.0, 5100, weights=2)
    assert forecast(later, 60.0).admitted_raw_tokens == 0.0, "newer weights compute it whole: 51 s"


def test_the_speed_of_ranks_that_had_no_prompt_counts() -> None:
    """One prompt at a time on an instance of four ranks, a second each: it could do four times as much."""
    speeds = []
    for ranks in (1, 4):
        predictor = WorkloadPredictor(PredictorSettings(ranks=ranks))
        for i in range(40):
            for change in life(f"t{i}", 4.0 * i, [(1000, 1.0, 1.0, 1.0)]):
                predictor.observe(replace(change, prefill_s=1.0 if change.phase is P.TOOL else None))
        speeds.append(
            predictor.forecast(
                200.0, prefill=[PREFILL], profiled_tokens_per_s=1000.0 * ranks, kv_bytes_per_token=2.0
            ).tokens_per_s
        )
    assert speeds == [pytest.approx(1000.0), pytest.approx(4000.0)]


def test_who_arrives_too_late_to_be_prefilled_is_no_admission_of_the_window() -> None:
    """A tool began now; such tools took 2, 4, 6 and 8 s, and a prompt 5 s: after two of them it is admitted in 10 s."""
    predictor = WorkloadPredictor(PredictorSettings(returns=False))
    at_s = 0.0
    for tool_s in (2.0, 4.0, 6.0, 8.0) * 3:
        for change in life(f"past{at_s}", at_s, [(1000, 5.0, 1.0, tool_s), (1000, 5.0, 1.0, 1e-3)]):
            predictor.observe(change)
        at_s += 40.0
    seen(predictor, list(life("now", 1000.0, [(1000, 5.0, 1.0, 99.0)])), 1008.0)
    found = forecast(predictor, 1008.0)
    assert found.sources.tool == pytest.approx(1050.0, rel=0.05)
    assert found.admitted_raw_tokens == pytest.approx(0.5 * 1050.0, rel=0.05)


def test_what_arrives_has_a_speed_of_its_own() -> None:
    """100 tokens a second: a queue of prompts that newer weights make new, and a tool whose context is computed."""
    predictor = WorkloadPredictor(PredictorSettings(returns=False))
    for i in range(10):
        for change in life(f"past{i}", 100.0 * i, [(1000, 10.0, 1.0, 4.0), (1050, 0.5, 1.0, 4.0)]):
            predictor.observe(change)
    for change in life("old", 2000.0, [(1000, 10.0, 1.0, 99.0)]):
        if change.at_s <= 2014.0:
            predictor.observe(change)
    assigned(member("new", predictor), predictor, 2014.0, 1000, weights=None)
    found = forecast(predictor, 2014.0)
    assert found.sources.tool > 900.0
    assert found.sources.ready + found.sources.inflight == 1000.0
    assert found.arriving_tokens_per_s > 4.0 * found.tokens_per_s > 0.0
    nothing = forecast(WorkloadPredictor(), 0.0)
    assert nothing.arriving_tokens_per_s == nothing.tokens_per_s
