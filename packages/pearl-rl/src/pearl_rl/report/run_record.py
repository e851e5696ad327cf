"""A run as it lies in its folder, read for people: steps, decisions, the table over time, latencies."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from pearl_planner.gate import NOBODY_S
from pearl_rl.errors import CommandError
from pearl_rl.prediction_error import overlapping_batches, prediction_error
from pearl_rl.report.lines import of_run, read_lines, read_object, step_of
from pearl_rl.report.run_clock import RunClock
from pearl_rl.report.table_history import Lane, Level, lanes, levels, snapshots
from pearl_rl.run_folder import CONFIG_JSON, SCENARIO_JSON, SUMMARY, UPDATE_MODES, joined_decisions

PARTS = ("queue", "prefill", "transfer", "decode", "environment")
"""What a turn's time is made of."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of one part of all turns, seconds."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    share: float
    """Part of all turns' time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One verdict of eq. (7). Seconds."""

    at_s: float
    benefit_s: float
    toggle_s: float
    open: bool
    remaining: float
    batch: float
    first: bool
    """Whether no dedicated worker served, so that nothing was compared."""


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """Everything that a report says of one run. Times on the run's clock, seconds."""

    path: Path
    name: str
    simulated: bool
    config: Mapping[str, Any]
    """Settings of the run, or the scenario."""
    origins: Mapping[str, str]
    summary: Mapping[str, Any] | None
    """None where the run is not over, or was killed."""
    steps: Sequence[Mapping[str, Any]]
    """Lines of `metrics.jsonl`; see `StepRecord`."""
    decisions: Sequence[Mapping[str, Any]]
    """Lines of `decisions.jsonl` that are about mode and ratio, each with `measured`."""
    gates: Sequence[Gate]
    update_modes: Sequence[Mapping[str, Any]]
    """How reference and actor shared the training GPUs, by update, where that was chosen; see `UpdateModeRecord`."""
    levels: Sequence[Level]
    lanes: Sequence[Lane]
    overlap: int = 1
    """Batches that were under way at a time."""
    events: Counter[str] = field(default_factory=Counter[str])
    """How often each event happened."""
    failures: Sequence[tuple[float, str]] = ()
    """(when, what): workers and preparations that failed."""
    latency: Mapping[str, Percentiles] = field(default_factory=dict[str, Percentiles])
    """Part of a turn → its distribution over all turns."""
    step_latency: Mapping[int, Mapping[str, float]] = field(default_factory=dict[int, Mapping[str, float]])
    """Step → part → mean a turn, seconds."""
    turns: int = 0
    interrupted: int = 0
    """Requests that came back unfinished and were resumed elsewhere."""
    begin_s: float = 0.0
    end_s: float = 0.0

    @property
    def counts(self) -> Mapping[str, int]:
        """Borrows, switches and the like by name; empty where there is no summary. A simulation nests them."""
        summary = self.summary or {}
        counts: Mapping[str, int] = summary.get("counts", summary)
        return counts

    @property
    def wape(self) -> float | None:
        """WAPE of predicted against measured makespans; None where nothing was predicted."""
        return prediction_error([(s["rollout_s"], s["predicted_rollout_s"]) for s in self.steps], self.overlap)

    @property
    def throughput(self) -> float:
        """(Generated + trained) tokens of all steps over their time (PEARL section 6.1)."""
        duration_s = sum(step["duration_s"] for step in self.steps)
        return sum(map(step_tokens, self.steps)) / duration_s if duration_s > 0 else 0.0


def step_tokens(step: Mapping[str, Any]) -> int:
    """Generated and trained tokens of a step."""
    return int(step["generated_tokens"]) + int(step["trained_tokens"])


def step_window(step: Mapping[str, Any]) -> tuple[float, float]:
    """When a step began and ended, seconds."""
    return max(0.0, step["now_s"] - step["duration_s"]), step["now_s"]


def check_run_folder(path: Path) -> None:
    """Raise `CommandError` where `path` holds no run."""
    if not (path / CONFIG_JSON).is_file() and not (path / SCENARIO_JSON).is_file():
        what = "does not exist" if not path.exists() else f"holds neither {CONFIG_JSON} nor {SCENARIO_JSON}"
        raise CommandError(f"{path}: {what}; give the folder of a run or of a recorded simulation")


def read_configuration(path: Path) -> Mapping[str, Any]:
    """A run's settings, or a simulation's scenario. Raises `CommandError` where `path` holds none, or a broken file."""
    check_run_folder(path)
    simulated = (path / SCENARIO_JSON).is_file()
    document = read_object(path / (SCENARIO_JSON if simulated else CONFIG_JSON))
    with of_run(path):
        found: Mapping[str, Any] = document if simulated else document["settings"]
    return found


def read_run(path: Path) -> RunRecord:
    """Read a run's folder, also of a run that goes on. Raises `CommandError` where it holds none, or a broken file."""
    check_run_folder(path)
    with of_run(path):
        return _read(path)


def _read(path: Path) -> RunRecord:
    simulated = (path / SCENARIO_JSON).is_file()
    document = read_object(path / (SCENARIO_JSON if simulated else CONFIG_JSON))
    config, origins = (document, {}) if simulated else (document["settings"], document["origins"])
    summary_file = path / SUMMARY
    clock = RunClock.of(path)
    steps = [step_of(line) for line in clock.lines(path / "metrics.jsonl")]
    events, failures, times = _events(clock.lines(path / "events.jsonl"))
    history = list(snapshots(clock.lines(path / "table.jsonl")))
    begin_s = min(times, default=0.0)
    end_s = max([*times, *(step["now_s"] for step in steps)], default=0.0)
    all_decisions = joined_decisions(clock.lines(path / "decisions.jsonl"))
    latency, step_latency, turns = _latency(path)
    return RunRecord(
        path=path,
        name=_name(config, path, simulated=simulated),
        simulated=simulated,
        config=config,
        origins=origins,
        summary=read_object(summary_file) if summary_file.is_file() else None,
        steps=steps,
        decisions=[line for line in all_decisions if line["gate"] is None],
        gates=[_gate(line) for line in all_decisions if line["gate"] is not None],
        update_modes=list(clock.lines(path / UPDATE_MODES)),
        levels=levels(history),
        lanes=lanes(history, end_s),
        overlap=_overlap(config, simulated=simulated),
        events=events,
        failures=failures,
        latency=latency,
        step_latency=step_latency,
        turns=turns,
        interrupted=sum(line["finish"] == "interrupted" for line in read_lines(path / "requests.jsonl")),
        begin_s=begin_s,
        end_s=end_s,
    )


def _overlap(config: Mapping[str, Any], *, simulated: bool) -> int:
    injection = config["rollout"]["injection"]
    if simulated:
        return overlapping_batches(injection, config["policy"]["name"], config["rollout"]["max_staleness"])
    return overlapping_batches(injection, config["planner"]["policy"], config["train"]["max_staleness_versions"])


def _name(config: Mapping[str, Any], path: Path, *, simulated: bool) -> str:
    if simulated:
        return f"{config['name']}, policy {config['policy']['name']}, seed {config['run']['seed']}"
    return path.resolve().name


def _events(lines: Iterable[Mapping[str, Any]]) -> tuple[Counter[str], list[tuple[float, str]], list[float]]:
    counts: Counter[str] = Counter()
    failures: list[tuple[float, str]] = []
    times: list[float] = []
    for line in lines:
        kind = line["event"]
        counts[kind] += 1
        times.append(line["now_s"])
        if kind == "WorkerFailed":
            failures.append((line["now_s"], f"worker {line['worker']} failed: {line['cause']}"))
        elif kind in ("GroupFailed", "StageApplied"):
            failures += [(line["now_s"], f"worker {id_} failed: {cause}") for id_, cause in line["failed"].items()]
        elif kind in ("TrainingReleased", "TrainingResumed") and line["failed"]:
            failures.append((line["now_s"], f"{kind}: {line['failed']}"))
    return counts, failures, times


def _gate(line: Mapping[str, Any]) -> Gate:
    gate = line["gate"]
    return Gate(
        at_s=line["now_s"],
        benefit_s=gate["benefit_s"],
        toggle_s=gate["toggle_s"],
        open=bool(gate["open"]),
        remaining=gate["remaining"],
        batch=gate["batch"],
        first=gate["dedicated_s"] >= NOBODY_S,
    )


def _latency(path: Path) -> tuple[dict[str, Percentiles], dict[int, dict[str, float]], int]:
    """Distribution of each part over all turns, means a step, and the number of turns."""
    transfers: dict[str, float] = {}
    for line in read_lines(path / "requests.jsonl"):
        if line["transfer_s"]:
            turn = line["rid"].rpartition(".")[0]
            transfers[turn] = transfers.get(turn, 0.0) + line["transfer_s"]
    values: dict[str, list[float]] = {part: [] for part in PARTS}
    sums: dict[int, Counter[str]] = {}
    for line in read_lines(path / "trajectories.jsonl"):
        step = sums.setdefault(line["step"], Counter())
        for number, turn in enumerate(line["turns"]):
            step["turns"] += 1
            for part in PARTS:
                moved = transfers.get(f"{line['id']}.{number:04d}", 0.0)
                value = moved if part == "transfer" else turn[f"{part}_s"]
                values[part].append(value)
                step[part] += value  # type: ignore[assignment]
    total = sum(map(sum, values.values()))
    latency = {part: percentiles(found, total) for part, found in values.items() if found}
    means = {
        step: {part: total[part] / total["turns"] for part in PARTS} for step, total in sums.items() if total["turns"]
    }
    return latency, means, len(values["decode"])


def percentiles(values: Sequence[float], total: float) -> Percentiles:
    """Mean and nearest-rank percentiles of values, of which there must be some; `total` is what they are a share of."""
    ordered = sorted(values)

    def rank(part: float) -> float:
        return ordered[max(0, ceil(part * len(ordered)) - 1)]

    amount = sum(ordered)
    return Percentiles(amount / len(ordered), rank(0.5), rank(0.9), rank(0.99), amount / total if total else 0.0)
