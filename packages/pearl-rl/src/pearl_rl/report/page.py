"""One self-contained HTML page of a run, or of several to compare: no request leaves it, every string is escaped."""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from statistics import fmean
from typing import Any

from pearl_rl.presentation.words import gain_words, reason_words, seconds
from pearl_rl.report.charts import CHARTS, COLOURS, LEARNING, Chart, makespans, staleness_histogram
from pearl_rl.report.diagnosis import diagnose, reward_ends
from pearl_rl.report.lines import finite, of_run
from pearl_rl.report.run_record import PARTS, RunRecord, step_tokens
from pearl_rl.report.svg import number
from pearl_rl.report.thinning import sums
from pearl_state.decision import Reason

WIDE, NARROW = 1080, 346
"""Widths of the plots, pixels: one is shown, by the width of the window."""

_MOST_DECISIONS, _MOST_STEPS = 400, 2000

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)


def asset(name: str) -> str:
    """The text of a file beside this module."""
    return (files("pearl_rl.report") / "assets" / name).read_text(encoding="utf-8")


def run_page(run: RunRecord) -> str:
    """The report of one run."""
    kind = "simulation" if run.simulated else "run"
    return document(f"PEARL {kind} {run.name}", f'<article class="run">{body(run)}</article>')


def comparison_page(runs: Sequence[RunRecord], title: str) -> str:
    """Several runs: a table that compares them, and the report of each, folded."""
    folded = "".join(
        f'<details class="one"><summary>{escape(run.name)}</summary>'
        f'<article class="run">{body(run)}</article></details>'
        for run in runs
    )
    return document(f"PEARL {title}", f"<h1>{escape(title)}</h1>{_comparison(runs)}{folded}")


def document(title: str, content: str, *, script: str = "report.js", policy: str = _POLICY) -> str:
    """A whole page around `content`, which is HTML already; `title` is text."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{asset('page.css')}</style></head><body>"
        f"<main>{content}</main><script>{asset(script)}</script></body></html>\n"
    )


# ---- the parts of one run -------------------------------------------------------------------------------------------


def body(run: RunRecord) -> str:
    """Everything about one run. Raises `CommandError` where a file of it holds something else than a run writes."""
    with of_run(run.path):
        return "".join(
            (
                _head(run),
                _tiles(run),
                _diagnosis(run),
                '<div class="readout" aria-live="polite" hidden></div>',
                *(_part(run, chart) for chart in CHARTS if not (run.simulated and chart.key in LEARNING)),
                _decisions(run),
                _update_modes(run),
                _settings(run),
                _data(run),
            )
        )


def _head(run: RunRecord) -> str:
    config = run.config
    if run.simulated:
        words = f"simulated: {config['model']} on {config['gpu']}, {config['tp']} GPUs a worker"
    else:
        cluster = config["cluster"]
        words = (
            f"{config['model']['path']} on {config['environment']['name']}; {cluster['training_gpus']} training, "
            f"{cluster['reserved_rollout_gpus']} reserved, up to {cluster['max_preemptible_gpus']} preemptible GPUs; "
            f"policy {config['planner']['policy']}, borrowing {cluster['borrowing']}"
        )
    return (
        '<header><button type="button" class="theme" title="light, dark, or as the system (key: t)">theme</button>'
        f"<h1>{escape(run.name)}</h1><p>{escape(words)}</p></header>"
    )


def tiles(run: RunRecord) -> list[tuple[str, str, str]]:
    """(key, value, meaning) of the outcome."""
    steps, counts = run.steps, run.counts
    # The summary of a command counts from its start on, when nothing is generated yet.
    whole = (
        f"; {number(counts['tokens_per_s'])} with start-up" if "tokens_per_s" in counts and not run.simulated else ""
    )
    meaning = f"tokens/s over all steps, generated and trained{whole}"
    shown = [("throughput", number(run.throughput), meaning), ("steps", str(len(steps)), "steps")]
    if steps and not run.simulated:
        first, last, part = reward_ends(run)
        shown.append(("reward", f"{first:.3f} → {last:.3f}", f"reward, first {part} → last {part}"))
    shown.append(("duration", seconds(run.end_s - run.begin_s), "from the first event to the last"))
    if run.wape is not None:
        shown.append(("wape", f"{run.wape:.1%}", "predicted step time off by"))
    if steps:
        shown.append(("lost", str(steps[-1]["lost_trajectories"]), "trajectories lost"))
    if "stale_served" in counts:
        shown.append(("stale", str(counts["stale_served"]), "served by stale weights"))
    shown.append(("reclaims", str(run.events["GpusReclaimed"]), "reclaims of GPUs"))
    for key, meaning in (
        ("expansions", "expansions"),
        ("borrows", "borrows"),
        ("mode_switches", "mode switches"),
        ("ratio_switches", "ratio switches"),
    ):
        if key in counts:
            shown.append((key, str(counts[key]), meaning))
    return shown


def _tiles(run: RunRecord) -> str:
    cells = "".join(
        f'<div data-key="{escape(key)}"><dd>{escape(value)}</dd><dt>{escape(meaning)}</dt></div>'
        for key, value, meaning in tiles(run)
    )
    return f'<dl class="tiles">{cells}</dl>'


def _diagnosis(run: RunRecord) -> str:
    items = "".join(
        f'<li class="{finding.level}"><b>{finding.level}</b> {escape(finding.text)}</li>' for finding in diagnose(run)
    )
    return f'<section><h2>Diagnosis</h2><ul class="findings">{items}</ul></section>'


def _part(run: RunRecord, chart: Chart) -> str:
    """A plot with the table that belongs to it."""
    tables = {"borrow": _borrowing, "staleness": _histogram, "latency": _latency_table}
    table = tables.get(chart.key)
    return _chart(run, chart) + (table(run) if table is not None else "")


def _chart(run: RunRecord, chart: Chart) -> str:
    wide = chart.draw(run, WIDE)
    narrow = chart.draw(run, NARROW)
    head = f"<h2>{escape(chart.title)}</h2><p>{escape(chart.about)}</p>"
    if wide is None or narrow is None:
        return f'<section data-chart="{chart.key}">{head}<p class="none">Nothing was recorded for this.</p></section>'
    legend = "".join(f'<li><i class="{css}"></i>{escape(words)}</li>' for css, words in chart.legend)
    focus = ' tabindex="0" role="group" aria-label="arrow keys move from step to step"' if chart.timed else ""
    return (
        f'<section data-chart="{chart.key}">{head}<ul class="legend">{legend}</ul>'
        f'<div class="draw"{focus}>{wide.svg("wide", cursor=chart.timed)}{narrow.svg("narrow", cursor=chart.timed)}'
        "</div></section>"
    )


def _borrowing(run: RunRecord) -> str:
    """What was measured with training GPUs lent and without; steps differ in other ways, too."""
    rows = ""
    for words, lent in (("with borrowed workers", True), ("without", False)):
        steps = [step for step in run.steps if bool(step["borrowed"]) is lent]
        if steps:
            cells = (fmean([step[key] for step in steps]) for key in ("rollout_s", "wait_grant_s", "duration_s"))
            rows += f"<tr><td>{words}</td><td>{len(steps)}</td>{''.join(f'<td>{seconds(c)}</td>' for c in cells)}</tr>"
    if not rows:
        return ""
    head = "<tr><th>steps</th><th>number</th><th>makespan</th><th>wait for training's GPUs</th><th>whole step</th></tr>"
    lent_gpu_s = lent_gpu_seconds(run)
    words = f"Rollout had {number(lent_gpu_s)} GPU-seconds of training's GPUs." if lent_gpu_s else "Nothing was lent."
    return f'<section data-table="borrowing"><h3>Borrowing, measured</h3><p>{words}</p>{_table(head, rows)}</section>'


def lent_gpu_seconds(run: RunRecord) -> float:
    """Training GPUs that served rollout, times for how long, seconds."""
    ends = [level.at_s for level in run.levels[1:]] + [run.end_s]
    return sum(level.borrowed_gpus * max(0.0, end - level.at_s) for level, end in zip(run.levels, ends, strict=False))


def _histogram(run: RunRecord) -> str:
    counts = staleness_histogram(run)
    if not counts:
        return ""
    total = sum(counts.values())
    rows = "".join(
        f"<tr><td>{age}</td><td>{count:,}</td><td>{count / total:.1%}</td></tr>" for age, count in counts.items()
    )
    head = "<tr><th>age in versions</th><th>trajectories</th><th>part</th></tr>"
    return f'<section data-table="staleness"><h3>Ages at use</h3>{_table(head, rows)}</section>'


def _latency_table(run: RunRecord) -> str:
    if not run.latency:
        return ""
    rows = ""
    for part in PARTS:
        if part in run.latency:
            p = run.latency[part]
            cells = "".join(f"<td>{seconds(value)}</td>" for value in (p.mean_s, p.p50_s, p.p90_s, p.p99_s))
            rows += f'<tr data-part="{part}"><td>{part}</td>{cells}<td>{p.share:.1%}</td></tr>'
    head = "<tr><th>part of a turn</th><th>mean</th><th>median</th><th>p90</th><th>p99</th><th>share</th></tr>"
    return f'<section data-table="latency"><h3>Over all {run.turns:,} turns</h3>{_table(head, rows)}</section>'


def _table(head: str, rows: str) -> str:
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>'


# ---- decisions ------------------------------------------------------------------------------------------------------


def _decisions(run: RunRecord) -> str:
    items = "".join(_decision(line) for line in run.decisions[-_MOST_DECISIONS:])
    if not items:
        return ""
    earlier = len(run.decisions) - _MOST_DECISIONS
    note = f" The {earlier:,} earlier ones are in decisions.jsonl." if earlier > 0 else ""
    buttons = "".join(
        f'<button type="button" data-filter="{key}" aria-pressed="{str(key == "all").lower()}">{words}</button>'
        for key, words in (("all", "all"), ("switch", "changes only"), ("stay", "kept only"))
    )
    return (
        '<section class="decisions"><h2>Decisions</h2>'
        "<p>What was chosen and why; open one for the candidates that lost. Keys: j and k go on and back."
        f"{note}</p>"
        f'<div class="controls">{buttons}<label>find <input type="search" class="find" '
        'placeholder="2P3D, ProfileRefitted, …"></label><span class="count" aria-live="polite"></span></div>'
        f'<div class="list">{items}</div></section>'
    )


def _decision(line: Mapping[str, Any]) -> str:
    decision = line["decision"]
    before, after = decision["previous"], decision["selected"]
    switch = before is not None and before != after
    change = f"{before or 'nothing'} → {after}" if before != after else f"stays {after}"
    reason = reason_words(Reason(decision["reason"]))
    gain = gain_words(decision["gain_s"], taken=switch)
    asked = f"{line['trigger']}, {decision['budget_workers']} workers"
    return (
        f'<details class="decision" data-kind="{"switch" if switch else "stay"}"><summary>'
        f'<span class="when">{seconds(line["now_s"])}</span><b>{escape(change)}</b>'
        f'<span class="why">{escape(reason)}{gain} · {escape(asked)}</span></summary>'
        f"{_candidates(decision)}{_consequences(line)}</details>"
    )


def _candidates(decision: Mapping[str, Any]) -> str:
    rows = ""
    best = decision["predicted_s"]
    for candidate in decision["candidates"]:
        terms, chosen = candidate["terms"], candidate["configuration"] == decision["selected"]
        lost = [str(word).replace("_", " ") for word in candidate["violated"]]
        slower = candidate["makespan_s"] - best if best is not None else 0.0
        verdict = "selected" if chosen else f"breaks {', '.join(lost)}" if lost else f"{_more(slower)}"
        cells = "".join(
            f"<td>{seconds(terms[name])}</td>" for name in ("prefill_s", "decode_s", "transfer_s", "environment_s")
        )
        rows += (
            f"<tr{' class=chosen' if chosen else ''}><td>{escape(candidate['configuration'])}</td>"
            f"<td>{seconds(candidate['makespan_s'])}</td><td>{seconds(candidate['printed_terms']['total_s'])}</td>"
            f"{cells}<td>{escape(terms['bottleneck'])}</td><td>{escape(verdict)}</td></tr>"
        )
    head = "".join(
        f"<th>{name}</th>"
        for name in (
            "candidate",
            "makespan",
            "as printed",
            "prefill",
            "decode",
            "transfer",
            "environment",
            "longer path",
            "verdict",
        )
    )
    return _table(f"<tr>{head}</tr>", rows)


def _more(slower_s: float) -> str:
    if abs(slower_s) < 0.0005:
        return "as fast"
    return f"{seconds(slower_s)} slower" if slower_s > 0 else f"{seconds(-slower_s)} faster, not taken"


def _consequences(line: Mapping[str, Any]) -> str:
    decision = line["decision"]
    parts = [f"{decision['considered']} candidates considered."]
    if decision["previous"] is not None:
        parts.append(
            f"From {decision['previous']}: gain {seconds(max(0.0, decision['gain_s']))}, needed "
            f"{decision['threshold']:.0%}; switch {decision['switch'].replace('_', ' ')}, cost "
            f"{seconds(decision['switching_cost_s'])}."
        )
    parts += [f"{limit}." for limit in decision["limits"]]
    plan = line["plan"]
    if plan is not None:
        changes = len(plan["add"]) + len(plan["remove"]) + len(plan["reassign"])
        parts.append(
            f"Plan {plan['id']}: {len(plan['add'])} join, {len(plan['remove'])} leave, {len(plan['reassign'])} change "
            f"role, {changes} changes in {len(plan['stages'])} stages."
        )
    for measured in line["measured"]:
        parts.append(
            f"Step {measured['step']} took {seconds(measured['measured_s'])}, predicted "
            f"{seconds(measured['predicted_s'])}."
        )
    return f"<p>{escape(' '.join(parts))}</p>"


def _update_modes(run: RunRecord) -> str:
    """Where reference and actor worked in each update; nothing where a setting says it for the whole run."""
    rows = ""
    for line in run.update_modes:
        decision = line["decision"]
        times = (decision["colocated_s"], decision["decoupled_s"], line["measured_s"], decision["reform_s"])
        cells = "".join(f"<td>{'–' if value is None else seconds(value)}</td>" for value in times)
        change = " (formed anew)" if decision["changes"] else ""
        told = (line["version"], f"{decision['mode']}{change}", decision["ras"])
        rows += f"<tr>{''.join(f'<td>{escape(str(value))}</td>' for value in told)}{cells}</tr>"
    if not rows:
        return ""
    names = ("version", "mode", "ready micro-batches", "colocated", "decoupled", "measured", "forming anew")
    head = "".join(f"<th>{name}</th>" for name in names)
    return (
        "<details class=settings><summary>Reference and actor</summary>"
        "<p>The mode of each update, what either was expected to take, and what the update took.</p>"
        f"{_table(f'<tr>{head}</tr>', rows)}</details>"
    )


# ---- settings, data, comparison -------------------------------------------------------------------------------------


def _settings(run: RunRecord) -> str:
    rows = "".join(
        f"<tr{'' if origin == 'default' else ' class=chosen'}><td>{escape(key)}</td><td>{escape(str(value))}</td>"
        f"<td>{escape(origin)}</td></tr>"
        for key, value, origin in flat(run.config, run.origins)
    )
    head = "<tr><th>key</th><th>value</th><th>from</th></tr>"
    word = "Scenario" if run.simulated else "Settings"
    return f"<details class=settings><summary>{word}</summary>{_table(head, rows)}</details>"


def flat(config: Mapping[str, Any], origins: Mapping[str, str], prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """(dotted key, value, origin) of nested settings."""
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from flat(value, origins, f"{key}.")
        else:
            yield key, value, origins.get(key, "")


def _data(run: RunRecord) -> str:
    """What the script reads out at the cursor."""
    steps = [
        {
            "step": step["step"],
            "end_s": step["now_s"],
            "begin_s": max(0.0, step["now_s"] - step["duration_s"]),
            "tokens_per_s": step_tokens(step) / step["duration_s"] if step["duration_s"] > 0 else 0.0,
            "rollout_s": step["rollout_s"],
            "predicted_s": step["predicted_rollout_s"],
            # Nothing is learned in a simulation.
            "reward": None if run.simulated else finite(step["reward_mean"]),
            "configuration": step["configuration"],
            "borrowed": step["borrowed"],
            "age": step["staleness_mean"],
        }
        for step in sums(run.steps, _MOST_STEPS)
    ]
    return f'<script type="application/json" class="data">{script_json({"steps": steps})}</script>'


def script_json(value: Any) -> str:
    """JSON that may stand inside a script element: no `<`, and no line separators that scripts may not hold."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _comparison(runs: Sequence[RunRecord]) -> str:
    base = runs[0].throughput
    rows = ""
    for run in runs:
        wape = "" if run.wape is None else f"{run.wape:.1%}"
        relative = f"{run.throughput / base:.3f}" if base else ""
        counts = run.counts
        cells = (
            number(run.throughput),
            relative,
            str(len(run.steps)),
            wape,
            str(run.events["GpusReclaimed"]),
            str(counts.get("borrows", "")),
            str(counts["mode_switches"] + counts["ratio_switches"]) if "mode_switches" in counts else "",
        )
        rows += f"<tr><td>{escape(run.name)}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
    names = ("run", "tokens/s", "of first", "steps", "prediction off", "reclaims", "borrows", "switches")
    head = f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>"
    return f'<section data-table="comparison">{_table(head, rows)}</section>{_compared_steps(runs)}'


def _compared_steps(runs: Sequence[RunRecord]) -> str:
    # By seed, so that no policy is left out where there are more runs than colours.
    runs = sorted(runs, key=lambda run: run.config.get("run", {}).get("seed", 0))
    wide, narrow = makespans(runs, WIDE), makespans(runs, NARROW)
    if wide is None or narrow is None:
        return ""
    shown = [run for run in runs if run.steps]
    legend = "".join(
        f'<li><i class="{colour}"></i>{escape(run.name)}</li>' for colour, run in zip(COLOURS, shown, strict=False)
    )
    more = f" The first {len(COLOURS)} of {len(shown)} runs, by seed." if len(shown) > len(COLOURS) else ""
    return (
        f'<section data-chart="makespans"><h2>Makespan of each batch</h2><p>As measured.{more}</p>'
        f'<ul class="legend">{legend}</ul><div class="draw">{wide.svg("wide")}{narrow.svg("narrow")}</div></section>'
    )
