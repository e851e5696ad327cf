"""A run as a trace for Perfetto: workers with their roles and requests, decisions, plans, training, trajectories."""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pearl_rl.report.lines import of_run
from pearl_rl.report.run_clock import RunClock
from pearl_rl.report.run_record import check_run_folder
from pearl_rl.report.table_history import Snapshot, lanes, levels, snapshots
from pearl_rl.report.trace import (
    TraceEvent,
    arrow,
    counter,
    instant,
    name_process,
    name_thread,
    side_by_side,
    span,
)
from pearl_rl.report.whole_file import whole_file
from pearl_rl.run_folder import UPDATE_MODES, joined_decisions

CONTROL, TRAJECTORIES, WORKERS = 1, 2, 100
"""Process numbers: the control plane, trajectories, and worker 0."""
_EVENTS, _DECISIONS, _TRAINING, _PLAN, _PREPARATION = 1, 2, 3, 4, 10
_ROLE, _REQUESTS = 1, 10
_SHOWN_CANDIDATES = 6
_QUIET = frozenset({"RolloutProgressed", "WeightsReported"})
"""Events too frequent for a mark each."""


class Detail(StrEnum):
    """How much of a run goes into the trace."""

    CONTROL = "control"
    """Events, decisions, plans, roles."""
    REQUESTS = "requests"
    """And every request on its workers."""
    ALL = "all"
    """And every trajectory with its turns."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    start_s: float
    end_s: float
    name: str
    args: Mapping[str, Any]


def write_timeline(run: Path, out: Path, detail: Detail = Detail.ALL) -> int:
    """Write the trace of a run's folder to `out`, compressed where its name ends with `.gz`; returns how many events.

    Raises `CommandError` where `run` holds no run, `OSError` where `out` cannot be written; nothing is written then.
    """
    check_run_folder(run)
    opened = gzip.open if out.suffix == ".gz" else open
    count = 0
    with whole_file(out) as part, opened(part, "wt", encoding="utf-8") as file, of_run(run):
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for event in timeline(run, detail):
            file.write((",\n" if count else "") + json.dumps(event, separators=(",", ":"), allow_nan=False))
            count += 1
        file.write("\n]}\n")
    return count


def timeline(run: Path, detail: Detail = Detail.ALL) -> Iterator[TraceEvent]:
    """The events of a trace of the run in folder `run`."""
    clock = RunClock.of(run)
    history = list(snapshots(clock.lines(run / "table.jsonl")))
    end_s = _end_s(clock, run, history)
    yield from name_process(CONTROL, "control plane", 0)
    yield from _moments(clock, run)
    yield from _control_spans(history, end_s)
    yield from _counters(clock, run, history)
    yield from _roles(history, end_s)
    if detail is not Detail.CONTROL:
        yield from _requests(clock, run)
    if detail is Detail.ALL:
        yield from _trajectories(clock, run)


def _end_s(clock: RunClock, run: Path, history: Sequence[Snapshot]) -> float:
    last = max((line["now_s"] for line in clock.lines(run / "events.jsonl")), default=0.0)
    return max(last, history[-1].at_s if history else 0.0)


# ---- the control plane ----------------------------------------------------------------------------------------------


def _moments(clock: RunClock, run: Path) -> Iterator[TraceEvent]:
    yield from name_thread(CONTROL, _EVENTS, "events")
    for line in clock.lines(run / "events.jsonl"):
        if line["event"] not in _QUIET:
            args = {key: value for key, value in line.items() if key not in ("event", "now_s")}
            yield instant(CONTROL, _EVENTS, line["event"], line["now_s"], args)
    yield from name_thread(CONTROL, _DECISIONS, "decisions")
    for line in joined_decisions(clock.lines(run / "decisions.jsonl")):
        yield instant(CONTROL, _DECISIONS, _decision_name(line), line["now_s"], _decision_args(line))
    for line in clock.lines(run / UPDATE_MODES):
        yield instant(CONTROL, _DECISIONS, f"update {line['decision']['mode']}", line["now_s"], dict(line["decision"]))


def _decision_name(line: Mapping[str, Any]) -> str:
    decision = line["decision"]
    if line["gate"] is not None:
        return "lend training GPUs" if line["gate"]["open"] else "keep training GPUs"
    if decision["previous"] in (None, decision["selected"]):
        return f"stay {decision['selected']}" if decision["previous"] else f"begin with {decision['selected']}"
    return f"{decision['previous']} → {decision['selected']}"


def _decision_args(line: Mapping[str, Any]) -> dict[str, Any]:
    decision = line["decision"]
    candidates = {c["configuration"]: round(c["makespan_s"], 3) for c in decision["candidates"][:_SHOWN_CANDIDATES]}
    args = {
        "trigger": line["trigger"],
        "reason": decision["reason"],
        "budget_workers": decision["budget_workers"],
        "makespan_s": candidates,
    }
    if line["gate"] is not None:
        args["gate"] = line["gate"]
    if line["plan"] is not None:
        args["plan"] = line["plan"]["id"]
    return args


def _control_spans(history: Sequence[Snapshot], end_s: float) -> Iterator[TraceEvent]:
    yield from name_thread(CONTROL, _TRAINING, "training")
    for stretch in _stretches(history, end_s, _training):
        yield span(CONTROL, _TRAINING, stretch.name, stretch.start_s, stretch.end_s)
    yield from name_thread(CONTROL, _PLAN, "plan under way")
    for stretch in _stretches(history, end_s, _plan):
        yield span(CONTROL, _PLAN, stretch.name, stretch.start_s, stretch.end_s, stretch.args)
    named = 0
    for lane, stretch in side_by_side(_stretches(history, end_s, _background)):
        if lane >= named:
            yield from name_thread(CONTROL, _PREPARATION + lane, f"beside it {lane + 1}")
            named = lane + 1
        yield span(CONTROL, _PREPARATION + lane, stretch.name, stretch.start_s, stretch.end_s, stretch.args)


_Found = tuple[Any, str, Mapping[str, Any]]
"""(key, name, args) of something under way."""


def _training(snapshot: Snapshot) -> Iterator[_Found]:
    state = snapshot.about["training"]
    if state != "idle":
        yield state, {"running": "update", "waiting": "waits for its GPUs"}[state], {}


def _plan(snapshot: Snapshot) -> Iterator[_Found]:
    plan = snapshot.about["plan"]
    if plan is not None:
        stage = f"plan {plan['id']} to {plan['target']}, stage {plan['stage'] + 1} of {plan['stages']}"
        yield (plan["id"], plan["stage"]), stage, {"workers": plan["workers"]}


def _background(snapshot: Snapshot) -> Iterator[_Found]:
    for group in snapshot.about["groups"]:
        yield ("group", group["id"]), f"{group['kind']} {group['id']}", {"workers": group["workers"]}
    for removal in snapshot.about["removals"]:
        yield ("removal", removal["id"]), f"removal {removal['id']}", {"workers": removal["workers"]}


def _stretches(history: Iterable[Snapshot], end_s: float, find: Any) -> Iterator[_Stretch]:
    """For how long each thing that `find` finds was under way, in the order of their ends."""
    open_: dict[Any, tuple[float, str, Mapping[str, Any]]] = {}
    for snapshot in history:
        now = {key: (name, args) for key, name, args in find(snapshot)}
        for key in [key for key in open_ if key not in now]:
            start_s, name, args = open_.pop(key)
            yield _Stretch(start_s, snapshot.at_s, name, args)
        for key, (name, args) in now.items():
            open_.setdefault(key, (snapshot.at_s, name, args))
    for start_s, name, args in open_.values():
        yield _Stretch(start_s, end_s, name, args)


def _counters(clock: RunClock, run: Path, history: Sequence[Snapshot]) -> Iterator[TraceEvent]:
    for level in levels(history):
        gpus = {
            "reserved": level.reserved_gpus,
            "preemptible": level.preemptible_gpus,
            "borrowed": level.borrowed_gpus,
        }
        yield counter(CONTROL, "GPUs of rollout", level.at_s, gpus)
        workers = {"prefill": level.prefill, "decode": level.decode, "colocated": level.colocated}
        yield counter(CONTROL, "serving workers", level.at_s, workers)
    for line in clock.lines(run / "events.jsonl"):
        if line["event"] == "RolloutBegan":
            yield counter(CONTROL, "trajectories left", line["now_s"], {"left": line["batch"]})
        elif line["event"] == "RolloutProgressed":
            yield counter(CONTROL, "trajectories left", line["now_s"], {"left": line["remaining"]})
    for step in clock.lines(run / "metrics.jsonl"):
        if step["duration_s"] > 0:
            rate = (step["generated_tokens"] + step["trained_tokens"]) / step["duration_s"]
            yield counter(CONTROL, "tokens/s", max(0.0, step["now_s"] - step["duration_s"]), {"tokens/s": rate})


# ---- workers and trajectories ---------------------------------------------------------------------------------------


def _roles(history: Sequence[Snapshot], end_s: float) -> Iterator[TraceEvent]:
    for lane in lanes(history, end_s):
        if lane.group == "training":
            continue
        slot = int(lane.name.split()[0])
        pid = WORKERS + slot
        yield from name_process(pid, f"worker {lane.name}, {lane.group}", 10 + slot)
        yield from name_thread(pid, _ROLE, "role")
        for stretch in lane.spans:
            if stretch.state == "vacant":
                continue
            name = stretch.role if stretch.state == "active" else f"{stretch.role}, {stretch.state}"
            yield span(pid, _ROLE, name, stretch.start_s, stretch.end_s)


@dataclass(frozen=True, slots=True)
class _Served:
    """A request's time on one worker."""

    start_s: float
    end_s: float
    line: Mapping[str, Any]
    part: str


def _served(clock: RunClock, run: Path) -> Iterator[tuple[int, _Served]]:
    for line in clock.lines(run / "requests.jsonl"):
        start_s, end_s = line["started_s"], line["finished_s"]
        if line["prefill"] is None:
            yield line["worker"], _Served(start_s, end_s, line, "")
            continue
        handed_s = min(end_s, start_s + line["queue_s"] + line["prefill_s"])
        yield line["prefill"], _Served(start_s, handed_s if line["prefill_s"] else end_s, line, "prefill")
        if line["decode_s"]:
            yield line["worker"], _Served(max(handed_s, end_s - line["decode_s"]), end_s, line, "decode")


def _requests(clock: RunClock, run: Path) -> Iterator[TraceEvent]:
    by_worker: dict[int, list[_Served]] = {}
    for worker, served in _served(clock, run):
        by_worker.setdefault(worker, []).append(served)
    sources: dict[str, tuple[int, int, float]] = {}
    targets: dict[str, tuple[int, int, float]] = {}
    for worker, requests in sorted(by_worker.items()):
        pid, named = WORKERS + worker, 0
        for lane, served in side_by_side(requests):
            if lane >= named:
                yield from name_thread(pid, _REQUESTS + lane, f"requests {lane + 1}")
                named = lane + 1
            tid, line = _REQUESTS + lane, served.line
            args = {key: value for key, value in line.items() if key not in ("rid", "started_s", "finished_s")}
            name = f"{served.part} {line['rid']}".strip()
            yield span(pid, tid, name, served.start_s, served.end_s, args)
            if served.part == "prefill":
                sources[line["rid"]] = (pid, tid, served.end_s)
            elif served.part == "decode":
                targets[line["rid"]] = (pid, tid, served.start_s)
    for number, (rid, source) in enumerate(sources.items()):
        if rid in targets:
            yield from arrow(number, "KV hand-over", source, targets[rid])


@dataclass(frozen=True, slots=True)
class _Played:
    """A trajectory's time."""

    start_s: float
    end_s: float
    line: Mapping[str, Any]


def _trajectories(clock: RunClock, run: Path) -> Iterator[TraceEvent]:
    yield from name_process(TRAJECTORIES, "trajectories", 1)
    keep = ("id", "group", "task", "reward", "dispatch_version", "step")
    played = [
        _Played(
            line["started_s"],
            line["finished_s"],
            {**{key: line[key] for key in keep}, "turns": [_times(turn) for turn in line["turns"]]},
        )
        for line in clock.lines(run / "trajectories.jsonl")
    ]
    named = 0
    for lane, item in side_by_side(played):
        if lane >= named:
            yield from name_thread(TRAJECTORIES, lane + 1, f"trajectories {lane + 1}")
            named = lane + 1
        args = {key: value for key, value in item.line.items() if key != "turns"}
        yield span(TRAJECTORIES, lane + 1, item.line["id"], item.start_s, item.end_s, args)
        for number, (start_s, end_s, environment_s) in enumerate(item.line["turns"]):
            start_s, end_s = max(start_s, item.start_s), min(end_s, item.end_s)
            yield span(TRAJECTORIES, lane + 1, f"turn {number}", start_s, max(start_s, end_s))
            after_s = min(item.end_s, end_s + environment_s)
            if environment_s > 0 and after_s > end_s:
                yield span(TRAJECTORIES, lane + 1, "environment", end_s, after_s)


def _times(turn: Mapping[str, Any]) -> tuple[float, float, float]:
    return turn["started_s"], turn["finished_s"], turn["environment_s"]
