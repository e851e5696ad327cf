"""What people see: words, the decision table, plain lines, and the live view."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pearl_rl.observer import StepRecord
from pearl_rl.presentation.decisions import decision_table
from pearl_rl.presentation.live import LiveView, budget_words, worker_map
from pearl_rl.presentation.plain import PlainView
from pearl_rl.presentation.words import decision_line, gain_words, reason_words, seconds, sparkline
from pearl_state.configuration import Configuration
from pearl_state.decision import Candidate, Constraint, Decision, MakespanTerms, Reason, SwitchKind
from pearl_state.events import GpusOffered, GpusReclaimed, RolloutProgressed, WorkerFailed
from pearl_state.lifecycle import Lifecycle
from pearl_state.roles import Role, Tenure, Zone
from pearl_state.table import WorkerTable
from pearl_state.worker import GpuId, Worker, WorkerId


def candidate(text: str, total_s: float, *violated: Constraint) -> Candidate:
    terms = MakespanTerms(total_s=total_s, prefill_s=0.25, decode_s=total_s, reprefill_s=0.125, bottleneck="decode")
    printed = MakespanTerms(total_s=total_s + 1, prefill_s=0.25, decode_s=total_s + 1)
    return Candidate(
        configuration=Configuration.parse(text),
        predicted=terms,
        printed=printed,
        feasible=not violated,
        violated=violated,
    )


DECISION = Decision(
    selected=Configuration.parse("2P3D"),
    previous=Configuration.parse("4C"),
    reason=Reason.BEST,
    budget_workers=5,
    candidates=(candidate("2P3D", 20.0), candidate("5C", 25.0), candidate("1P4D", 19.0, Constraint.PREFILL_LOAD)),
    considered=5,
    predicted_s=20.0,
    gain_s=6.0,
    threshold=0.1,
    switch=SwitchKind.RELAUNCH,
    switching_cost_s=0.3,
    limits=("prefill_load: fewer than 2 prefill workers fall behind decode",),
)


def table() -> WorkerTable:
    """A reserved pair that serves, a preemptible worker that starts, a retained overlap worker, training, a failure."""

    def worker(slot: int, role: Role, zone: Zone = Zone.DEDICATED, tenure: Tenure = Tenure.RESERVED) -> Worker:
        gpu = GpuId(0 if zone is Zone.OVERLAP else slot)
        return Worker(id=WorkerId(slot), gpus=frozenset({gpu}), role=role, zone=zone, tenure=tenure)

    workers = [
        worker(1, Role.PREFILL),
        worker(2, Role.DECODE),
        worker(3, Role.DECODE, tenure=Tenure.PREEMPTIBLE),
        worker(4, Role.COLOCATED, Zone.OVERLAP),
        worker(5, Role.TRAINING, Zone.OVERLAP),
        worker(6, Role.DECODE, tenure=Tenure.PREEMPTIBLE),
    ]
    made = WorkerTable().bind(*workers)
    pair = [WorkerId(1), WorkerId(2)]
    made = made.move([*pair, WorkerId(3), WorkerId(6)], Lifecycle.STARTING).move(pair, Lifecycle.PENDING_WEIGHTS)
    made = made.report(WorkerId(1), 0).report(WorkerId(2), 0).move(pair, Lifecycle.ACTIVE)
    return made.move([WorkerId(6)], Lifecycle.FAILED)


def drawn(renderable: object, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(renderable)
    return console.file.getvalue()


# ---- words ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 s"),
        (0.0012, "1.2 ms"),
        (0.0204, "20 ms"),
        (0.9996, "1.0 s"),
        (3.44, "3.4 s"),
        (99.94, "99.9 s"),
        (99.96, "1 min 40 s"),
        (125.0, "2 min 05 s"),
        (3599.6, "1 h 00 min"),
        (3720.0, "1 h 02 min"),
    ],
)
def test_durations_read_naturally(value, text):
    assert seconds(value) == text


@given(st.lists(st.floats(-1e6, 1e6), max_size=60), st.integers(1, 40))
def test_a_sparkline_shows_the_last_values_between_their_extremes(values, width):
    line = sparkline(values, width)
    shown = values[-width:]
    assert len(line) == len(shown)
    if shown and max(shown) > min(shown):
        assert line[shown.index(min(shown))] == "▁"
        assert line[shown.index(max(shown))] == "█"
    else:
        assert set(line) <= {"▁"}


def test_every_reason_has_words():
    assert len({reason_words(reason) for reason in Reason}) == len(Reason)


def test_a_decision_in_one_line_says_from_what_to_what_and_why():
    line = decision_line(DECISION, "GpusOffered")
    assert line.startswith("GpusOffered: 4C → 2P3D for 5 workers, 20.0 s a batch, gains 6.0 s")
    assert reason_words(Reason.BEST) in line


# ---- the table of candidates ----------------------------------------------------------------------------------------


def test_the_table_ranks_candidates_and_marks_the_selected_one():
    lines = drawn(decision_table(DECISION)).splitlines()
    rows = [line for line in lines if any(name in line for name in ("2P3D  ", "5C  ", "1P4D  "))]
    assert [row.replace("→", "").split()[0] for row in rows] == ["2P3D", "5C", "1P4D"]
    assert rows[0].lstrip().startswith("→")
    assert "→" not in rows[1]
    assert "prefill_load" in rows[2]
    text = "\n".join(lines)
    assert "selected 2P3D for 5 workers" in text
    assert "from 4C: gain 6.0 s a batch, needed 10%; switch relaunch, cost 300 ms" in text
    assert "prefill_load: fewer than 2 prefill workers fall behind decode" in text
    assert "2 further candidates are not shown" in text


def test_explaining_adds_the_terms_of_each_makespan():
    text = drawn(decision_table(DECISION, explain=True))
    assert all(word in text for word in ("reprefill", "environment", "transfer", "longer path", "125 ms"))
    assert "reprefill" not in drawn(decision_table(DECISION))


def test_only_the_best_few_rows_are_shown_where_asked():
    text = drawn(decision_table(DECISION, rows=1))
    assert "5C" not in text
    assert "4 further candidates are not shown" in text


# ---- plain lines ----------------------------------------------------------------------------------------------------


def test_plain_lines_tell_of_steps_decisions_and_gpus_and_of_nothing_else():
    lines: list[str] = []
    view = PlainView(lines.append)
    view.on_table(table())
    view.on_event(RolloutProgressed(now_s=1.0, step=1, remaining=3))
    assert lines == []
    view.on_event(GpusOffered(now_s=1.0, gpus=frozenset({GpuId(1), GpuId(2)})))
    view.on_event(GpusReclaimed(now_s=2.0, gpus=frozenset({GpuId(1)}), deadline_s=4.0))
    view.on_event(WorkerFailed(now_s=3.0, worker=WorkerId(2), incarnation=1, cause="killed"))
    view.on_decision(DECISION, "GpusOffered")
    view.on_decision(
        Decision(
            selected=Configuration.parse("4C"),
            previous=Configuration.parse("4C"),
            reason=Reason.ALREADY_BEST,
            budget_workers=4,
            candidates=(),
            considered=0,
            predicted_s=1.0,
        ),
        "ProfileRefitted",
    )
    view.on_step(StepRecord(step=1, steps=40, now_s=5.0, reward_mean=0.25, configuration="2P3D", borrowed=True))
    view.on_message("hello")
    assert [line.split()[0] for line in lines] == ["offered", "reclaimed", "failed", "decision", "step", "hello"]
    assert "2.0 s notice" in lines[1]
    assert "step  1/40  reward 0.250  2P3D borrowed" in lines[4]


# ---- the live view --------------------------------------------------------------------------------------------------


def test_the_worker_map_shows_every_worker_with_role_and_state():
    rows = {name: cells.plain for name, cells in worker_map(table())}
    assert rows == {
        "overlap": "4C·  ",
        "preemptible": "3D…  6D!  ",
        "reserved": "1P   2D   ",
        "training": "5T·  ",
    }


def test_the_budget_counts_who_serves_by_whose_gpu_it_is():
    assert budget_words(table()) == "1P1D: 2 serving = 2 reserved + 0 preemptible + 0 borrowed, weights v0"


def test_the_live_view_shows_progress_reward_workers_decision_and_time_left():
    now = [100.0]
    console = Console(file=io.StringIO(), width=140, height=50, force_terminal=True, color_system=None)
    view = LiveView(console, steps=40, wall_limit_s=600.0, clock=lambda: now[0])
    assert "limit in 10 min 00 s" in drawn(view.render())
    with view:
        view.on_table(table())
        view.on_decision(DECISION, "GpusOffered")
        view.on_event(GpusReclaimed(now_s=2.0, gpus=frozenset({GpuId(1)}), deadline_s=4.0))
        view.on_message("a message")
        now[0] += 40.0
        for step in range(1, 11):
            view.on_step(StepRecord(step=step, steps=40, now_s=4.0 * step, reward_mean=step / 10))
        view.tick()
    text = drawn(view.render())
    assert "10/40" in text
    assert "40.0 s, about 2 min 00 s left" in text
    assert "1.000" in text
    assert "mean of last 10: 0.550" in text
    assert "▁▂" in text
    assert "4C → 2P3D" in text
    assert "reclaimed 1 GPU," in text
    assert "a message" in text
    assert "training" in text
    assert "10/40" in console.file.getvalue()


def test_the_time_limit_is_shown_where_it_comes_before_the_last_step():
    now = [0.0]
    view = LiveView(Console(file=io.StringIO()), steps=100, wall_limit_s=50.0, clock=lambda: now[0])
    now[0] = 40.0
    view.on_step(StepRecord(step=1, steps=100, now_s=40.0, reward_mean=0.5))
    assert "limit in 10.0 s" in drawn(view.render())


def test_redrawing_is_throttled():
    now = [0.0]
    console = Console(file=io.StringIO(), width=140, height=50, force_terminal=True, color_system=None)
    with LiveView(console, steps=4, wall_limit_s=50.0, clock=lambda: now[0]) as view:
        size = len(console.file.getvalue())
        for _ in range(100):
            view.tick()
        assert len(console.file.getvalue()) == size
        now[0] = 1.0
        view.tick()
        assert len(console.file.getvalue()) > size


@pytest.mark.parametrize(
    ("gain_s", "taken", "words"),
    [
        (6.0, True, ", gains 6.0 s"),
        (0.349, False, ", a switch would gain 349 ms"),
        (0.0001, True, ""),
        (-1.0, False, ""),
    ],
)
def test_a_gain_is_told_as_had_or_as_missed_and_not_at_all_where_there_is_none(gain_s, taken, words):
    assert gain_words(gain_s, taken=taken) == words
