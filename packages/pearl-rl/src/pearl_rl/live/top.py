"""A run in a terminal: what `pearl-rl top` redraws and `pearl-rl status` prints once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from pearl_rl.presentation.words import seconds, sparkline
from pearl_rl.report.charts import seconds_signed
from pearl_rl.report.svg import number
from pearl_rl.report.table_history import gpu_words, role_letter

_STYLE = {"prefill": "yellow", "decode": "cyan", "colocated": "green", "training": "magenta"}
_SHOWN = 6
_BAR, _SPARK = 30, 40
_STATES = {
    "starting": "starting",
    "running": "running",
    "ended": "ended",
    "died": "died",
    "silent": "nothing written for a while; killed?",
}


def whole(view: Mapping[str, Any], *, most_workers: int = 40) -> RenderableType:
    """Everything about a run, for one screen."""
    return Group(
        Text.assemble((f"{view['run']}  ", "bold"), _STATES[view["state"]], f"  at {seconds(view['now_s'])}"),
        *([Text(view["outcome"])] if view["outcome"] else []),
        facts(view),
        *([WorkerTable(view["workers"][:most_workers])] if view["workers"] else []),
        *([Text(f"{len(view['workers']) - most_workers} more workers", style="dim")] * _more(view, most_workers)),
        *(Text(line) for line in under_way(view)),
        *(Text(line) for line in decided(view["decisions"])[:_SHOWN]),
        *(Text(f"  {limit}", style="dim") for limit in newest_limits(view)),
        *(Text(f"{seconds(item['at_s'])}  {item['text']}", style="dim") for item in view["news"][:_SHOWN]),
    )


def _more(view: Mapping[str, Any], most: int) -> int:
    return int(len(view["workers"]) > most)


def facts(view: Mapping[str, Any]) -> RenderableType:
    """Progress and figures of the last step."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    done, steps = view["completed"], view["steps"]
    grid.add_row("step", _bar(done, steps) if steps and steps < 10**6 else str(done))
    if view["batch"] and not view["outcome"]:
        complete = view["batch"] - view["remaining"]
        grid.add_row(
            "batch", f"step {view['step']}: {complete} of {view['batch']} complete; training {view['training']}"
        )
    history = view["history"]
    if history:
        last = history[-1]
        rates = sparkline([step["tokens_per_s"] for step in history], _SPARK)
        grid.add_row("tokens/s", f"{number(last['tokens_per_s'])} {rates}")
        foreseen = "" if last["predicted_s"] is None else f", predicted {seconds(last['predicted_s'])}"
        grid.add_row("makespan", f"{seconds(last['rollout_s'])}{foreseen}")
        if last["reward"] is not None:
            rewards = sparkline([step["reward"] for step in history if step["reward"] is not None], _SPARK)
            grid.add_row("reward", f"{last['reward']:.3f} {rewards}")
    pinned = f", pinned to {view['pinned']}" if view["pinned"] else ""
    if view["workers"]:
        grid.add_row("serving", f"{view['configuration']}{pinned}, {weight_words(view)}")
    return grid


def weight_words(view: Mapping[str, Any]) -> str:
    """The weights that are served, and the newest ones where those are others: a run may end as they are published."""
    served, newest = view["serving_versions"], view["weight_version"]
    words = f"weights v{served[0]}" + (f" to v{served[-1]}" if len(served) > 1 else "") if served else "no weights"
    return words if served == [newest] else f"{words}, newest v{newest}"


def _bar(done: int, steps: int) -> Text:
    filled = round(_BAR * min(1.0, done / steps))
    return Text(f"{done}/{steps} ").append("━" * filled, style="green").append("━" * (_BAR - filled), style="dim")


@dataclass(frozen=True, slots=True)
class WorkerTable:
    """One line a worker. A narrow terminal gets shorter cells, and then fewer of them."""

    workers: Sequence[Mapping[str, Any]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The fullest table that has room."""
        columns = {name: [cell(worker) for worker in self.workers] for name, cell in _CELLS.items()}
        table = _table(columns)
        for narrow in _NARROWER:
            if Measurement.get(console, options.update(max_width=1_000), table).maximum <= options.max_width:
                break
            narrow(columns)
            table = _table(columns)
        yield table


def _table(columns: Mapping[str, Sequence[RenderableType]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in columns:
        table.add_column(name, justify="right" if name in ("worker", "load", "weights", "fails") else "left")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def _role(worker: Mapping[str, Any]) -> Text:
    role = worker["role"]
    return Text(f"{role_letter(role)} {role}", style=_STYLE[role] if worker["lifecycle"] == "active" else "dim")


def _state(worker: Mapping[str, Any]) -> Text:
    lifecycle = worker["lifecycle"]
    text = lifecycle.replace("_", " ") + (", fenced" if worker["cordoned"] else "")
    if worker["reclaim_at_s"] is not None:
        text += f", gone at {seconds(worker['reclaim_at_s'])}"
    return Text(text, style="bold red" if lifecycle in ("failed", "retired") else "")


def _load(worker: Mapping[str, Any]) -> Text:
    """Requests that decode + that wait."""
    return Text("" if worker["role"] == "training" else f"{worker['running']}+{worker['waiting']}")


_CELLS: Mapping[str, Callable[[Mapping[str, Any]], Text]] = {
    "worker": lambda worker: Text(f"{worker['id']}"),
    "role": _role,
    "state": _state,
    "on": lambda worker: Text(worker["place"]),
    "zone": lambda worker: Text(worker["group"]),
    "load": _load,
    "weights": lambda worker: Text("" if worker["weight_version"] is None else f"v{worker['weight_version']}"),
    "fails": lambda worker: Text(f"{worker['failures']}" if worker["failures"] else ""),
}

_Columns = dict[str, list[Text]]


def _without_empty(columns: _Columns) -> None:
    for name in [name for name, cells in columns.items() if not any(cells)]:
        del columns[name]


def _as_letters(columns: _Columns) -> None:
    columns["role"] = [cell[:1] for cell in columns["role"]]


def _as_numbers(columns: _Columns) -> None:
    columns["GPU"] = [Text(cell.plain.removeprefix("GPU ")) for cell in columns["on"]]
    columns.update({name: columns.pop(name) for name in ("zone", "load", "weights", "fails") if name in columns})
    del columns["on"]


def _less(name: str) -> Callable[[_Columns], None]:
    def narrow(columns: _Columns) -> None:
        columns.pop(name, None)

    return narrow


_NARROWER: Sequence[Callable[[_Columns], None]] = (
    _without_empty,
    _as_numbers,
    _as_letters,
    *map(_less, ("zone", "weights", "load", "fails")),
)
"""What makes the table narrower, the least loss first."""


def under_way(view: Mapping[str, Any]) -> list[str]:
    """What is being changed, one line each."""
    lines = []
    plan = view["plan"]
    if plan:
        lines.append(
            f"plan {plan['id']} to {plan['target']}: stage {plan['stage'] + 1} of {plan['stages']}, "
            f"workers {_ids(plan['workers'])}"
        )
    for group in view["groups"]:
        given_up = ", being given up" if group["cancelled"] else ""
        lines.append(f"preparing {group['kind']} {group['id']}: workers {_ids(group['workers'])}{given_up}")
    lines += [f"removing workers {_ids(removal['workers'])}" for removal in view["removals"]]
    for node, gpus in view["loose"].items():
        where = f" on {node}" if node else ""
        lines.append(f"{gpu_words(gpus)}{where}: offered, and fewer than one worker needs")
    return lines


def _ids(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids))


def newest_limits(view: Mapping[str, Any]) -> Sequence[str]:
    """What bounded the newest choice of mode and ratio, in words."""
    chosen = [decision for decision in view["decisions"] if decision["gate"] is None]
    return chosen[0]["limits"] if chosen else ()


def decided(decisions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Decisions, the newest first, one line each; the same one again and again is one line, at its newest time."""
    lines = []
    for _, same in groupby(decisions, key=_what):
        first, *others = same
        lines.append(decision_words(first) + (f", {len(others) + 1} times" if others else ""))
    return lines


def _what(decision: Mapping[str, Any]) -> Any:
    """What is told of a decision but its time; each verdict of the gate, and each change, is its own."""
    if decision["gate"] is not None or decision["previous"] != decision["selected"]:
        return decision["number"]
    return decision["selected"], decision["budget_workers"], decision["why"]


def decision_words(decision: Mapping[str, Any]) -> str:
    """A decision in one line."""
    when, gate = seconds(decision["at_s"]), decision["gate"]
    if gate is not None:
        verdict = "lend" if gate["open"] else "keep"
        if gate["benefit_s"] is None:
            return f"{when}  {verdict} training GPUs: no dedicated worker serves yet"
        return (
            f"{when}  {verdict} training GPUs: benefit {seconds_signed(gate['benefit_s'])}, "
            f"cost {seconds(gate['toggle_s'])}"
        )
    before, after = decision["previous"], decision["selected"]
    change = f"stays {after}" if before == after else f"{before or 'nothing'} → {after}"
    return f"{when}  {change} for {decision['budget_workers']} workers ({decision['why']})"
