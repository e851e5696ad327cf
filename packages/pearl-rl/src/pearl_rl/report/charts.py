"""The plots of a report, each for a given width in pixels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Any

from pearl_rl.presentation.words import seconds
from pearl_rl.report.lines import finite
from pearl_rl.report.run_record import PARTS, RunRecord, step_tokens, step_window
from pearl_rl.report.svg import Plot, number
from pearl_rl.report.table_history import Lane, Level, Span, role_letter
from pearl_rl.report.thinning import means, sums

Draw = Callable[[RunRecord, int], Plot | None]

_MOST_LANES = 40
_MOST_POINTS = 800
_LANE_PX = 18


@dataclass(frozen=True, slots=True)
class Chart:
    """A plot with its words. `draw` gives None where the run has nothing to show."""

    key: str
    title: str
    about: str
    draw: Draw
    legend: Sequence[tuple[str, str]] = ()
    """(class, meaning)."""
    timed: bool = False
    """Whether its x axis is the run's clock, so that it takes part in the common cursor."""


def _bars(width: int) -> int:
    """How many bars can be told apart."""
    return max(20, width // 4)


def _apart(steps: Sequence[Mapping[str, Any]]) -> float:
    """Distance of two neighbours on the axis of steps."""
    return float(steps[1]["step"] - steps[0]["step"]) if len(steps) > 1 else 1.0


def _window(run: RunRecord) -> tuple[float, float]:
    return run.begin_s, max(run.end_s, run.begin_s + 1e-9)


def throughput(run: RunRecord, width: int) -> Plot | None:
    """Tokens per second of each step, over the GPUs that rollout had."""
    if not run.steps:
        return None
    steps = sums(run.steps, _MOST_POINTS)
    rates = [step_tokens(step) / step["duration_s"] if step["duration_s"] > 0 else 0.0 for step in steps]
    top = max(rates) * 1.08 or 1.0
    gpus = max((level.gpus for level in run.levels), default=0)
    plot = Plot(width, 250, _window(run), (0.0, top), "throughput over time over the GPU budget", top=24)
    plot.left = 52
    if gpus:
        plot.right = 34
        unit = top / (gpus * 1.08)
        _budget(plot, run.levels, run.end_s, unit)
        plot.y_axis("GPUs of rollout", right=True, scale=1 / unit, grid=False)
    plot.y_axis("tokens/s")
    plot.time_axis()
    points: list[tuple[float, float]] = []
    for step, rate in zip(steps, rates, strict=True):
        begin_s, end_s = step_window(step)
        points += [(begin_s, rate), (end_s, rate)]
    plot.line(points, "ink")
    return plot


def _budget(plot: Plot, levels: Sequence[Level], end_s: float, unit: float) -> None:
    lower = [0] * len(levels)
    for kind in ("reserved", "preemptible", "borrowed"):
        upper = [low + getattr(level, f"{kind}_gpus") for low, level in zip(lower, levels, strict=True)]
        edges = [(lv.at_s, lo * unit, up * unit) for lv, lo, up in zip(levels, lower, upper, strict=True)]
        plot.band(edges, end_s, kind)
        lower = upper


def worker_map(run: RunRecord, width: int) -> Plot | None:
    """One lane a worker: its role by colour, what is not serving paler."""
    if not run.lanes:
        return None
    if len(run.lanes) > _MOST_LANES:
        return role_counts(run, width)
    left = 118
    height = len(run.lanes) * _LANE_PX + 34
    plot = Plot(width, height, _window(run), (0.0, float(len(run.lanes))), "roles of each worker over time")
    plot.left, plot.top = left, 6
    group = ""
    for number_, lane in enumerate(run.lanes):
        y = plot.top + number_ * _LANE_PX
        if lane.group != group and group:
            plot.parts.append(f'<line class="grid strong" x1="0" x2="{width}" y1="{y}" y2="{y}"/>')
        group = lane.group
        plot.text(left - 6, y + 13, lane.name, anchor="end")
        for span in _visible(lane, plot):
            plot.rect(
                plot.px(span.start_s),
                y + 2,
                plot.px(span.end_s) - plot.px(span.start_s),
                _LANE_PX - 4,
                _span_class(span),
                f"{lane.name}: {span.role}, {span.state}, {seconds(span.end_s - span.start_s)} "
                f"from {seconds(span.start_s)}",
            )
    plot.time_axis()
    return plot


_HIDDEN = frozenset({"vacant", "released", "retired"})


def _span_class(span: Span) -> str:
    if span.state == "failed":
        return "failed"
    serving = span.state in ("active", "running")
    idle_training = span.role == "training" and span.state != "running"
    return span.role if serving and not idle_training else f"{span.role} pale"


def _visible(lane: Lane, plot: Plot) -> Sequence[Span]:
    """The spans of a lane that can be told apart at this width; a sliver is joined to what is before it."""
    second = (plot.x[1] - plot.x[0]) / max(1, plot.width - plot.left - plot.right)
    kept: list[Span] = []
    for span in lane.spans:
        if span.state in _HIDDEN:
            continue
        near = bool(kept) and span.start_s - kept[-1].end_s < second
        if near and (span.end_s - span.start_s < 0.5 * second or _span_class(kept[-1]) == _span_class(span)):
            last = kept[-1]
            kept[-1] = Span(last.start_s, span.end_s, last.role, last.state)
        else:
            kept.append(span)
    return kept


def role_counts(run: RunRecord, width: int) -> Plot | None:
    """Serving workers by role, stacked: for clusters too large for a lane each."""
    if not run.levels:
        return None
    most = max(level.prefill + level.decode + level.colocated for level in run.levels)
    plot = Plot(width, 220, _window(run), (0.0, max(1.0, most * 1.05)), "serving workers by role over time", top=24)
    plot.y_axis("serving workers")
    plot.time_axis()
    lower = [0] * len(run.levels)
    for role in ("prefill", "decode", "colocated"):
        upper = [low + getattr(level, role) for low, level in zip(lower, run.levels, strict=True)]
        edges = [(lv.at_s, float(lo), float(up)) for lv, lo, up in zip(run.levels, lower, upper, strict=True)]
        plot.band(edges, run.end_s, role)
        lower = upper
    return plot


def step_times(run: RunRecord, width: int) -> Plot | None:
    """Measured makespan of each batch with what was predicted for it."""
    if not run.steps:
        return None
    steps = means(run.steps, _bars(width))
    predicted = [(s["step"], s["predicted_rollout_s"]) for s in steps if s["predicted_rollout_s"] is not None]
    actual = [(s["step"], s["rollout_s"]) for s in steps]
    top = max(y for _, y in [*actual, *predicted]) * 1.1 or 1.0
    plot = Plot(width, 220, _steps_axis(run), (0.0, top), "predicted and measured makespan of each step", top=24)
    plot.y_axis("seconds")
    plot.x_axis("step")
    plot.line(predicted, "predicted", dots=True)
    plot.line(actual, "ink", dots=True)
    for step in steps:
        foreseen = step["predicted_rollout_s"]
        words = "nothing predicted" if foreseen is None else f"predicted {seconds(foreseen)}"
        tip = f"step {step['step']}: {seconds(step['rollout_s'])}, {words}, {step['configuration'] or 'changing'}"
        plot.dot(step["step"], step["rollout_s"], "hover", tip)
    return plot


COLOURS = ("decode", "prefill", "colocated", "training", "environment", "transfer")
"""Classes that tell the runs of a comparison apart."""


def makespans(runs: Sequence[RunRecord], width: int) -> Plot | None:
    """Measured makespan of each step of several runs, as many as can be told apart."""
    shown = [run for run in runs if run.steps][: len(COLOURS)]
    if not shown:
        return None
    lines = [[(step["step"], step["rollout_s"]) for step in means(run.steps, _bars(width))] for run in shown]
    top = max(y for line in lines for _, y in line) * 1.1 or 1.0
    first, last = min(line[0][0] for line in lines), max(line[-1][0] for line in lines)
    plot = Plot(width, 220, (first - 0.5, last + 0.5), (0.0, top), "makespan of each step of each run", top=24)
    plot.y_axis("seconds")
    plot.x_axis("step")
    for colour, line in zip(COLOURS, lines, strict=False):
        plot.line(line, colour, dots=True)
    return plot


def _steps_axis(run: RunRecord) -> tuple[float, float]:
    return run.steps[0]["step"] - 0.5, run.steps[-1]["step"] + 0.5


def reward(run: RunRecord, width: int) -> Plot | None:
    """Mean reward of each step with a moving mean of ten; a simulation learns nothing."""
    if not run.steps or run.simulated:
        return None
    told = [step for step in run.steps if isfinite(step["reward_mean"])]
    every = [step["reward_mean"] for step in told]
    ten = {step["step"]: fmean(every[max(0, i - 9) : i + 1]) for i, step in enumerate(told)}
    points = [(step["step"], step["reward_mean"]) for step in means(told, _bars(width))]
    if not points:
        return None
    values = [value for _, value in points]
    smooth = [(n, ten[n]) for n, _ in points]
    low, high = min(values), max(values)
    room = (high - low) * 0.1 or 0.1
    plot = Plot(width, 200, _steps_axis(run), (low - room, high + room), "mean reward of each step", top=24)
    plot.y_axis("reward")
    plot.x_axis("step")
    plot.line(points, "faint", dots=True)
    plot.line(smooth, "ink")
    return plot


def updates(run: RunRecord, width: int) -> Plot | None:
    """Gradient norm of each update, and which part of its tokens was clipped."""
    if not run.steps or run.simulated:
        return None
    steps = means(run.steps, _bars(width))
    norms = [(step["step"], step["gradient_norm"]) for step in steps if isfinite(step["gradient_norm"])]
    clipped = [100 * (finite(step["clipped_fraction"]) or 0.0) for step in steps]
    top = max((norm for _, norm in norms), default=0.0) * 1.1 or 1.0
    most = max(clipped) * 1.1 or 1.0
    plot = Plot(width, 180, _steps_axis(run), (0.0, top), "gradient norm and clipped tokens of each update", top=24)
    plot.right = 40
    plot.y_axis("gradient norm")
    plot.y_axis("% clipped, by step", right=True, scale=most / top, grid=False)
    plot.x_axis()
    half = 0.3 * _apart(steps)
    for step, part in zip(steps, clipped, strict=True):
        n = step["step"]
        tip = f"step {n}: {number(part)} % of the tokens clipped, gradient norm {number(step['gradient_norm'])}, "
        tip += f"loss {number(step['loss'])}, KL {number(step['kl'])}"
        plot.bar(n - half, n + half, 0.0, part * top / most, "muted", tip)
    plot.line(norms, "ink", dots=True)
    return plot


def gates(run: RunRecord, width: int) -> Plot | None:
    """Benefit and cost of every verdict of eq. (7)."""
    shown = [gate for gate in run.gates if not gate.first][-_bars(width) :]
    if not shown:
        return None
    values = [value for gate in shown for value in (gate.benefit_s, gate.toggle_s)]
    low, high = min(0.0, *values), max(values) or 1.0
    room = (high - low) * 0.08
    plot = Plot(width, 220, (-0.5, len(shown) - 0.5), (low - room * (low < 0), high + room), "borrowing", top=24)
    plot.y_axis("seconds")
    for number_, gate in enumerate(shown):
        verdict = "lend" if gate.open else "keep"
        tip = (
            f"at {seconds(gate.at_s)}: {verdict}, benefit {seconds_signed(gate.benefit_s)}, "
            f"cost {seconds(gate.toggle_s)}, {gate.remaining:.0f} of {gate.batch:.0f} trajectories left"
        )
        plot.bar(number_ - 0.36, number_ + 0.36, 0.0, gate.benefit_s, "borrowed" if gate.open else "muted", tip)
        plot.line([(number_ - 0.42, gate.toggle_s), (number_ + 0.42, gate.toggle_s)], "cost")
    plot.line([(-0.5, 0.0), (len(shown) - 0.5, 0.0)], "axisline")
    room = max(1, (width - plot.left - plot.right) // 100)
    for index in range(0, len(shown), max(1, -(-len(shown) // room))):
        plot.x_tick(index, seconds(shown[index].at_s))
    return plot


def seconds_signed(value: float) -> str:
    """A duration that may be negative."""
    return f"-{seconds(-value)}" if value < 0 else seconds(value)


def staleness(run: RunRecord, width: int) -> Plot | None:
    """Mean age at use of each step, in flight and in the queue, with the oldest."""
    if not run.steps:
        return None
    top = max(1.0, *(float(step["staleness_max"]) for step in run.steps)) * 1.1
    plot = Plot(width, 180, _steps_axis(run), (0.0, top), "age of trajectories at use, in weight versions", top=24)
    plot.y_axis("versions")
    plot.x_axis("step")
    steps = means(run.steps, _bars(width))
    half = 0.4 * _apart(steps)
    for step in steps:
        n = step["step"]
        flight, queue = step["staleness_in_flight_mean"], step["staleness_in_queue_mean"]
        tip = f"step {n}: mean age {number(step['staleness_mean'])}, oldest {step['staleness_max']}"
        plot.bar(n - half, n + half, 0.0, flight, "decode", tip)
        plot.bar(n - half, n + half, flight, flight + queue, "queue", tip)
    plot.line([(step["step"], step["staleness_max"]) for step in steps], "cost")
    return plot


def staleness_histogram(run: RunRecord) -> dict[int, int]:
    """Age in versions → trajectories, over the whole run."""
    total: dict[int, int] = {}
    for step in run.steps:
        for age, count in step["staleness_histogram"].items():
            total[int(age)] = total.get(int(age), 0) + count
    return dict(sorted(total.items()))


def latency(run: RunRecord, width: int) -> Plot | None:
    """What a turn's time is made of, mean of each step."""
    if not run.step_latency:
        return None
    rows = means([{"step": step, **parts} for step, parts in sorted(run.step_latency.items())], _bars(width))
    top = max(sum(row[part] for part in PARTS) for row in rows) * 1.08 or 1.0
    axis = (min(run.step_latency) - 0.5, max(run.step_latency) + 0.5)
    half = 0.42 * _apart(rows)
    plot = Plot(width, 220, axis, (0.0, top), "parts of a turn's time, mean of each step", top=24)
    plot.y_axis("seconds a turn")
    plot.x_axis("step")
    for row in rows:
        step, low = row["step"], 0.0
        tip = f"step {step}: " + ", ".join(f"{part} {seconds(row[part])}" for part in PARTS)
        for part in PARTS:
            plot.bar(step - half, step + half, low, low + row[part], part, tip)
            low += row[part]
    return plot


def step_parts(run: RunRecord, width: int) -> Plot | None:
    """Where each step's time went: rollout, waiting for GPUs, training, the rest."""
    if not run.steps:
        return None
    steps = means(run.steps, _bars(width))
    half = 0.42 * _apart(steps)
    rows = [step_shares(step) for step in steps]
    top = max(sum(row.values()) for row in rows) * 1.08 or 1.0
    plot = Plot(width, 200, _steps_axis(run), (0.0, top), "where the time of each step went", top=24)
    plot.y_axis("seconds a step")
    plot.x_axis("step")
    for step, row in zip(steps, rows, strict=True):
        n, low = step["step"], 0.0
        tip = f"step {n}: " + ", ".join(f"{name} {seconds(value)}" for name, value in row.items())
        for css, value in row.items():
            plot.bar(n - half, n + half, low, low + value, css, tip)
            low += value
    return plot


def step_shares(step: Mapping[str, Any]) -> dict[str, float]:
    """Parts of a step that add up to its duration, seconds: `training`, `waiting` for its GPUs, `rollout` alone."""
    training = min(step["training_s"], step["duration_s"])
    waiting = min(step["wait_grant_s"], step["duration_s"] - training)
    return {"training": training, "waiting": waiting, "rollout": step["duration_s"] - training - waiting}


_ROLE_LEGEND = tuple((role, f"{role_letter(role)} {role}") for role in ("prefill", "decode", "colocated", "training"))

CHARTS: Sequence[Chart] = (
    Chart(
        "throughput",
        "Throughput over the GPU budget",
        "Generated and trained tokens per second of each step; behind it the GPUs that rollout had.",
        throughput,
        (("ink", "tokens/s"), ("reserved", "reserved"), ("preemptible", "preemptible"), ("borrowed", "borrowed")),
        timed=True,
    ),
    Chart(
        "workers",
        "Workers and their roles",
        "Each lane is a worker on its GPUs. Pale: starting, draining, switching, without weights, or idle.",
        worker_map,
        (*_ROLE_LEGEND, ("failed", "failed")),
        timed=True,
    ),
    Chart(
        "steptime",
        "Predicted and measured step time",
        "Makespan of each batch, and what the planner predicted over the configurations that it ran under.",
        step_times,
        (("ink", "measured"), ("predicted", "predicted")),
    ),
    Chart(
        "reward",
        "Reward",
        "Mean of each step, and of the last ten.",
        reward,
        (("faint", "each step"), ("ink", "mean of ten")),
    ),
    Chart(
        "update",
        "Updates",
        "Gradient norm before it is scaled down, and the tokens whose importance weight was clipped.",
        updates,
        (("ink", "gradient norm"), ("muted", "part clipped")),
    ),
    Chart(
        "parts",
        "Where the time of a step goes",
        "Training and waiting for its GPUs; what remains is rollout that training could not hide.",
        step_parts,
        (("rollout", "rollout"), ("waiting", "waiting for GPUs"), ("training", "training")),
    ),
    Chart(
        "borrow",
        "Borrowing: benefit against cost",
        "Each verdict of the gate, eq. (7): predicted gain of lending training GPUs, and what lending and return cost.",
        gates,
        (("borrowed", "benefit, lent"), ("muted", "benefit, kept"), ("cost", "cost")),
    ),
    Chart(
        "staleness",
        "Staleness",
        "Age of trajectories when training used them, in weight versions.",
        staleness,
        (("decode", "in flight"), ("queue", "in the queue"), ("cost", "oldest")),
    ),
    Chart(
        "latency",
        "Latency of a turn",
        "Mean of each step.",
        latency,
        tuple((part, part) for part in PARTS),
    ),
)
"""In the order of the page."""

LEARNING = frozenset({"reward", "update"})
"""Charts of what a simulation has not."""
