import asyncio
import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl_executor.availability import (
    ControlFileSource,
    FixedSource,
    TraceRow,
    TraceSource,
    bundled_trace,
    merge_sources,
    read_trace,
)
from pearl_executor.trace_kinds import synthetic_steps
from pearl_executor.virtual_time import run_virtual
from pearl_state.events import GpusOffered, GpusReclaimed
from pearl_state.roles import Tenure


def replay(source, *, return_after_s=0.0, until_s=None):
    """All events of `source` in virtual time; what is reclaimed comes back after `return_after_s`."""

    async def main():
        loop = asyncio.get_running_loop()
        events = []

        async def follow():
            async for event in source.events():
                events.append(event)
                if isinstance(event, GpusReclaimed) and return_after_s is not None:
                    loop.call_later(return_after_s, source.returned, event.gpus)

        try:
            async with asyncio.timeout(until_s):
                await follow()
        except TimeoutError:
            pass
        return events

    return run_virtual(main())


def counts(events):
    """(time, GPUs given out) after each event."""
    held, steps = set(), []
    for event in events:
        if isinstance(event, GpusOffered):
            assert not held & event.gpus
            held |= event.gpus
        else:
            assert event.gpus <= held
            held -= event.gpus
        steps.append((event.now_s, len(held)))
    return steps


# ---- traces ---------------------------------------------------------------------------------------------------------


def test_a_trace_is_replayed_at_its_times_with_its_counts():
    events = replay(TraceSource([(0, 2), (10, 3), (30, 1), (50, 4)], gpus=range(10, 14), notice_s=5.0))
    assert [type(e).__name__ for e in events] == ["GpusOffered", "GpusOffered", "GpusReclaimed", "GpusOffered"]
    assert counts(events) == [(0.0, 2), (10.0, 3), (30.0, 1), (50.0, 4)]
    assert events[0].gpus == {10, 11}
    assert events[0].tenure is Tenure.PREEMPTIBLE
    assert events[2].deadline_s == 35.0


def test_the_bundled_segment_is_replayed_exactly_under_time_scale():
    trace = read_trace(bundled_trace(), "segment2")
    source = TraceSource(bundled_trace(), "segment2", gpus=range(4, 8), time_scale=60.0, notice_s=0.5)
    steps = counts(replay(source))
    expected = []
    for row in trace:
        count = min(4, row.count)
        if not expected or expected[-1][1] != count:
            expected.append((row.t_s / 60.0, count))
    assert [count for _, count in steps] == [count for _, count in expected]
    assert [t for t, _ in steps] == pytest.approx([t for t, _ in expected])
    assert any(count < 4 for _, count in expected)


def test_the_bundled_segments_have_the_means_of_the_paper():
    for segment, mean in (("segment1", 13.6), ("segment2", 9.0), ("segment3", 11.8)):
        rows = read_trace(bundled_trace(), segment)
        total = sum(a.count * (b.t_s - a.t_s) for a, b in pairwise([*rows, TraceRow(7200.0, 0)]))
        assert 4 + total / 7200 == pytest.approx(mean, abs=0.02)


EVENTS = "t_ms,event,node\n0,add,a\n0,add,b\n2500,remove,a\n4000,remove,b\n4000,add,a\n"


def test_a_trace_of_events_is_counted(tmp_path):
    path = tmp_path / "events.csv"
    path.write_text(EVENTS)
    assert read_trace(path) == (TraceRow(0.0, 2), TraceRow(2.5, 1), TraceRow(4.0, 1))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("5000,lost,a", "7: event 'lost' is neither add nor remove"),
        ("5000,add,a", "7: add of node 'a', which is there already"),
        ("5000,remove,b", "7: remove of node 'b', which is not there"),
        ("3000,remove,a", "7: time goes back, t_ms 3000 after 4000; sort the trace"),
        ("nan,remove,a", "7: t_ms nan is not a finite number >= 0"),
        ("-1,remove,a", "7: t_ms -1 is not a finite number >= 0"),
        (",remove,a", "7: t_ms '' is not a number"),
        ("5000", "7: event None is neither add nor remove"),
    ],
)
def test_a_damaged_trace_of_events_is_refused_with_its_line(tmp_path, line, said):
    path = tmp_path / "events.csv"
    path.write_text(EVENTS + line + "\n")
    with pytest.raises(ValueError, match=said) as refused:
        read_trace(path)
    assert str(path) in str(refused.value)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 30), st.floats(50.0, 1e4), st.floats(50.0, 1e4), st.integers(0, 9))
def test_a_synthetic_trace_is_one_and_its_seed_s(gpus, present_s, absent_s, seed):
    def drawn():
        return synthetic_steps(gpus=gpus, present_s=present_s, absent_s=absent_s, until_s=5_000.0, seed=seed)

    steps = drawn()
    assert steps == drawn()
    assert steps[0][0] == 0.0
    assert all(a[0] < b[0] < 5_000.0 for a, b in pairwise(steps))
    assert all(0 <= count <= gpus for _, count in steps)


def test_gpus_of_a_synthetic_trace_are_there_as_much_of_the_time_as_asked():
    steps = synthetic_steps(gpus=40, present_s=300.0, absent_s=100.0, until_s=1e5, seed=3)
    held_s = sum(count * (until_s - at_s) for (at_s, count), (until_s, _) in pairwise([*steps, (1e5, 0)]))
    assert held_s / (40 * 1e5) == pytest.approx(0.75, abs=0.02)
    assert len(steps) == pytest.approx(2 * 40 * 1e5 / 400, rel=0.05)


def test_a_synthetic_trace_that_would_never_be_drawn_is_refused():
    with pytest.raises(ValueError, match=r"1000000 GPUs .* has 4e\+06 changes in 7200 s; at most 1,000,000 are drawn"):
        synthetic_steps(gpus=1_000_000, present_s=1800.0, absent_s=1800.0, until_s=7200.0, seed=0)


def test_the_seed_fixes_which_gpu_goes():
    trace = [(0, 8), *((t, 8 - t) for t in range(1, 8))]

    def order(seed):
        return [e.gpus for e in replay(TraceSource(trace, gpus=range(8), seed=seed))]

    assert order(1) == order(1)
    assert len({tuple(map(tuple, order(seed))) for seed in range(5)}) > 1


def test_a_gpu_is_offered_again_only_after_it_was_returned():
    trace = [(0, 2), (10, 1), (12, 2), (40, 2)]
    events = replay(TraceSource(trace, gpus=[1, 2]), return_after_s=7.0)
    assert [(e.now_s, len(e.gpus)) for e in events] == [(0.0, 2), (10.0, 1), (17.0, 1)]
    assert events[1].gpus == events[2].gpus


def test_a_rise_that_no_gpu_came_back_for_passes():
    trace = [(0, 2), (10, 0), (12, 2), (14, 1), (16, 0)]
    events = replay(TraceSource(trace, gpus=[1, 2]), return_after_s=3.5)
    # Both are back at 13.5: offered as owed, then taken again one by one.
    assert counts(events) == [(0.0, 2), (10.0, 0), (13.5, 2), (14.0, 1), (16.0, 0)]
    events = replay(TraceSource(trace, gpus=[1, 2]), return_after_s=5.0)
    assert counts(events) == [(0.0, 2), (10.0, 0), (15.0, 1), (16.0, 0)]
    assert counts(replay(TraceSource(trace, gpus=[1, 2]), return_after_s=None)) == [(0.0, 2), (10.0, 0)]


def test_counts_are_scaled_offset_and_clipped_to_the_pool():
    trace = [(0, 18), (1, 31), (2, 32), (3, 7)]
    source = TraceSource(trace, gpus=range(12), scale=0.5, offset=-4)
    assert source.steps == (TraceRow(0, 5), TraceRow(1, 11), TraceRow(2, 12), TraceRow(3, 0))


@settings(max_examples=50, deadline=None)
@given(
    gaps=st.lists(st.floats(0.5, 100), min_size=1, max_size=12),
    values=st.lists(st.integers(0, 9), min_size=12, max_size=12),
    seed=st.integers(0, 99),
    back_s=st.floats(0, 50),
    time_scale=st.floats(0.1, 50),
)
def test_any_trace_never_gives_more_than_it_says_and_never_one_gpu_twice(gaps, values, seed, back_s, time_scale):
    times = [sum(gaps[:i]) for i in range(len(gaps))]
    trace = list(zip(times, values, strict=False))
    source = TraceSource(trace, gpus=range(6), seed=seed, time_scale=time_scale)
    steps = counts(replay(source, return_after_s=back_s))
    assert all(b >= a for (a, _), (b, _) in pairwise(steps))
    for now_s, count in steps:
        at_this_time = [row.count for row in source.steps if row.t_s <= now_s + 1e-6]
        assert count <= max(at_this_time[-2:])
    if steps:
        assert steps[-1][1] <= source.steps[-1].count


CSV = "t_s,preemptible_gpus\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CSV + "0,1\n60,2\n30,3\n", r"trace\.csv:4: time goes back or stands still, t_s 30 after 60"),
        (CSV + "0,1\n0,2\n", r"trace\.csv:3: time goes back or stands still"),
        (CSV + "0,1\n60,-2\n", r"trace\.csv:3: preemptible_gpus -2 is not a whole number >= 0"),
        (CSV + "0,1.5\n", r"trace\.csv:2: preemptible_gpus 1.5 is not a whole number"),
        (CSV + "0,nan\n", r"trace\.csv:2: preemptible_gpus nan is not a finite number"),
        (CSV + "inf,1\n", r"trace\.csv:2: t_s inf is not a finite number"),
        (CSV + "-5,1\n", r"trace\.csv:2: t_s -5 is negative"),
        (CSV + "\n0,many\n", r"trace\.csv:3: preemptible_gpus 'many' is not a number"),
        (CSV + "0\n", r"trace\.csv:2: preemptible_gpus None is not a number"),
        (CSV, r"trace\.csv:1: the availability trace has no rows"),
        ("", r"trace\.csv:1: the availability trace has no rows"),
        ("time,instances\n0,1\n", r"trace\.csv:1: .* no column t_s"),
        ("t_s,gpus\n0,1\n", r"trace\.csv:1: .* neither column preemptible_gpus nor instances"),
        ("segment,t_s,instances\na,0,1\nb,0,1\n", r"trace\.csv:1: the trace has several segments \(a, b\)"),
    ],
)
def test_a_bad_trace_is_one_line_with_file_and_line(tmp_path, text, message):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        TraceSource(path, gpus=[1])
    assert "\n" not in str(error.value)


def test_an_unknown_segment_or_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="no segment 'segment9'; it has segment1, segment2, segment3"):
        read_trace(bundled_trace(), "segment9")
    with pytest.raises(ValueError, match=r"nowhere\.csv: cannot read"):
        read_trace(tmp_path / "nowhere.csv")


def test_plain_step_files_need_no_segment(tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text("t_s,instances\n480,1\n540,2\n")
    assert read_trace(path) == (TraceRow(480.0, 1), TraceRow(540.0, 2))
    assert counts(replay(TraceSource(path, gpus=[7, 8]))) == [(480.0, 1), (540.0, 2)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time_scale": 0.0}, "time_scale is 0.0"),
        ({"time_scale": float("nan")}, "time_scale is nan"),
        ({"notice_s": -1.0}, "notice_s is -1.0"),
        ({"scale": 0.0}, "scale is 0.0"),
        ({"gpus": []}, "needs distinct GPU ids"),
        ({"gpus": [1, 1]}, "needs distinct GPU ids"),
    ],
)
def test_bad_settings_of_a_source_are_one_line(options, message):
    with pytest.raises(ValueError, match=message):
        TraceSource([(0, 1)], **{"gpus": [1], **options})


@pytest.mark.parametrize("rows", [[], [(0, -1)], [(1, 1), (0, 1)], [(0, float("nan"))], [(0, 1.5)]])
def test_rows_are_checked_like_a_file(rows):
    with pytest.raises(ValueError, match="availability"):
        TraceSource(rows, gpus=[1])


# ---- control file ---------------------------------------------------------------------------------------------------


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def control(tmp_path, script, **options):
    """Events and complaints of a control file to which `script` (time, text) is appended."""
    path = tmp_path / "control.jsonl"
    complaints = []
    source = ControlFileSource(path, gpus=[4, 5, 6], on_error=complaints.append, **options)

    async def main():
        loop = asyncio.get_running_loop()
        for at_s, text in script:
            loop.call_at(at_s, append, path, text)
        events = []

        async def follow():
            async for event in source.events():
                events.append(event)
                if isinstance(event, GpusReclaimed):
                    source.returned(event.gpus)

        try:
            async with asyncio.timeout(20):
                await follow()
        except TimeoutError:
            pass
        return events

    return run_virtual(main()), complaints


def line(**command):
    return json.dumps(command) + "\n"


def test_people_offer_and_reclaim_by_count_or_by_id(tmp_path):
    script = [
        (1.1, line(offer=2)),
        (2.1, line(reclaim=[4], notice_s=12)),
        (3.1, line(reclaim=1)),
        (4.1, line(offer=[6, 4])),
    ]
    events, complaints = control(tmp_path, script, notice_s=30.0)
    assert complaints == []
    assert [e.gpus for e in events] == [{4, 5}, {4}, {5}, {4, 6}]
    assert [e.now_s for e in events] == pytest.approx([1.5, 2.5, 3.5, 4.5])
    assert events[1].deadline_s == pytest.approx(14.5)
    assert events[2].deadline_s == pytest.approx(33.5)


def test_a_half_written_line_waits_for_its_end(tmp_path):
    text = line(offer=1)
    events, complaints = control(tmp_path, [(1.1, text[:6]), (3.1, text[6:])])
    assert [(e.now_s, e.gpus) for e in events] == [(pytest.approx(3.5), {4})]
    assert complaints == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("offer 2\n", "Expecting value"),
        ("[1]\n", "a command is one of"),
        (line(offer=1, reclaim=1), "a command is one of"),
        (line(grow=1), "a command is one of"),
        (line(offer=4), "cannot offer 4 GPUs; free are [4, 5, 6]"),
        (line(offer=0), "cannot offer 0 GPUs"),
        (line(offer=True), "cannot offer True GPUs"),
        (line(offer=[]), "cannot offer GPUs []"),
        (line(offer=[9]), "cannot offer GPUs [9]"),
        (line(offer=[4, 4]), "cannot offer GPUs [4, 4]"),
        (line(reclaim=1), "cannot reclaim 1 GPUs; given out are []"),
        (line(offer=1, notice_s=3), "no key notice_s with an offer"),
        (line(offer=1, when=3), "no key ['when']"),
    ],
)
def test_a_bad_command_is_told_with_its_line_and_changes_nothing(tmp_path, text, message):
    events, complaints = control(tmp_path, [(0.1, "\n" + text + line(offer=3))])
    assert [e.gpus for e in events] == [{4, 5, 6}]
    assert len(complaints) == 1
    assert complaints[0].startswith(f"{tmp_path / 'control.jsonl'}:2: ")
    assert message in complaints[0]


def test_a_bad_notice_is_refused(tmp_path):
    script = [(0.1, line(offer=1) + line(reclaim=1, notice_s=-1) + line(reclaim=1, notice_s="soon"))]
    events, complaints = control(tmp_path, script)
    assert len(events) == 1
    assert len(complaints) == 2


# ---- fixed and merged -----------------------------------------------------------------------------------------------


def test_a_fixed_pool_is_offered_once():
    (event,) = replay(FixedSource([0, 1], node="here"))
    assert (event.gpus, event.tenure, event.node) == ({0, 1}, Tenure.RESERVED, "here")
    assert replay(FixedSource([])) == []


def test_merged_sources_give_all_events_in_order_of_time_and_know_their_own_gpus():
    trace = TraceSource([(5, 1), (10, 0), (11, 1)], gpus=[9])
    other = TraceSource([(0, 1), (7, 0)], gpus=[3])
    events = replay(merge_sources(FixedSource([0]), trace, other), return_after_s=0.5)
    assert [(e.now_s, set(e.gpus)) for e in events] == [
        (0.0, {0}),
        (0.0, {3}),
        (5.0, {9}),
        (7.0, {3}),
        (10.0, {9}),
        (11.0, {9}),
    ]
    single = FixedSource([1])
    assert merge_sources(single) is single


def test_a_source_that_fails_fails_the_merge():
    class Broken:
        async def events(self):
            await asyncio.sleep(3)
            raise OSError("provider is gone")
            yield

        def returned(self, gpus):
            pass

    with pytest.raises(OSError, match="provider is gone"):
        replay(merge_sources(TraceSource([(0, 1), (100, 0)], gpus=[1]), Broken()))
