"""Simulations side by side: one row of figures each, as a table and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from pearl_rl.simulation.outcome import SimulationResult


_BAR = "throughput"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One thing that is compared: means over its seeds."""

    name: str
    throughput: float
    """Tokens per second."""
    spread: float | None
    """Standard deviation over seeds; None for one seed."""
    steps: float
    step_s: float
    rollout_s: float
    training_s: float
    wape: float | None
    gpu_s: float | None
    """GPU-seconds that rollout workers served or could have."""
    borrows: float | None
    expansions: float | None
    switches: float | None

    def to_json(self) -> dict[str, Any]:
        """A JSON-able form."""
        return {
            "name": self.name,
            "throughput_tokens_per_s": self.throughput,
            "throughput_stdev": self.spread,
            "steps": self.steps,
            "step_s": self.step_s,
            "rollout_s": self.rollout_s,
            "training_s": self.training_s,
            "prediction_wape": self.wape,
            "rollout_gpu_s": self.gpu_s,
            "borrows": self.borrows,
            "expansions": self.expansions,
            "switches": self.switches,
        }


def row_of(name: str, group: "Sequence[SimulationResult]") -> Row:
    """The means over results that differ in their seed only."""
    rates = [result.throughput for result in group]
    errors = [error for error in (result.prediction_error for result in group) if error is not None]
    durations = [step.duration_s for result in group for step in result.steps]
    counts = [result.counts for result in group]
    return Row(
        name=name,
        throughput=fmean(rates),
        spread=stdev(rates) if len(rates) > 1 else None,
        steps=fmean([len(result.steps) for result in group]),
        step_s=fmean(durations) if durations else 0.0,
        rollout_s=fmean([result.rollout_s for result in group]),
        training_s=fmean([result.training_s for result in group]),
        wape=fmean(errors) if errors else None,
        gpu_s=fmean([result.rollout_gpu_s for result in group]),
        borrows=fmean([count.borrows for count in counts]),
        expansions=fmean([count.expansions for count in counts]),
        switches=fmean([count.mode_switches + count.ratio_switches for count in counts]),
    )


_DROPPED_FIRST = (_BAR, "GPU-s", "training s", "step s", "expansions", "prediction off", "borrows")
"""Columns that a narrow terminal does without; `--json` has all."""


def print_rows(title: str, rows: Sequence[Row], base: Row, *, bars: bool = False) -> None:
    """A table, each row's throughput beside that of `base`; `bars` draws it, too.

    A terminal gets the columns that it has room for.
    """
    from rich.console import Console

    console = Console(highlight=False)
    columns = _columns(rows, base, bars=bars)
    table = _table(columns)
    dispensable = [name for name in _DROPPED_FIRST if name in columns]
    while console.is_terminal and dispensable and _width(console, table) > console.width:
        del columns[dispensable.pop(0)]
        table = _table(columns)
    if not console.is_terminal:
        console.width = max(console.width, _width(console, table))
    console.print(title)
    console.print(table)


def _columns(rows: Sequence[Row], base: Row, *, bars: bool) -> dict[str, list[str]]:
    """Title → cells."""
    relative = "of first" if base is rows[0] else f"of {base.name}"
    columns = {
        "": [row.name for row in rows],
        "tokens/s": [
            f"{row.throughput:,.0f}" + ("" if row.spread is None else f" ± {row.spread:,.0f}") for row in rows
        ],
        relative: [f"{row.throughput / base.throughput:.3f}" if base.throughput else "" for row in rows],
        "step s": [f"{row.step_s:.1f}" for row in rows],
        "rollout s": [f"{row.rollout_s:.1f}" for row in rows],
        "training s": [f"{row.training_s:.1f}" for row in rows],
        "prediction off": ["" if row.wape is None else f"{row.wape:.1%}" for row in rows],
        "GPU-s": ["" if row.gpu_s is None else f"{row.gpu_s:,.0f}" for row in rows],
        "borrows": ["" if row.borrows is None else f"{row.borrows:,.0f}" for row in rows],
        "expansions": ["" if row.expansions is None else _count(row.expansions) for row in rows],
        "switches": ["" if row.switches is None else _count(row.switches) for row in rows],
    }
    most = max((row.throughput for row in rows), default=0.0)
    if bars:
        columns[_BAR] = ["█" * round(24 * row.throughput / most) if most else "" for row in rows]
    return columns


def _count(mean: float) -> str:
    """A mean of counts: whole where it is, else to a tenth."""
    return f"{round(mean, 1):g}"


def _table(columns: Mapping[str, Sequence[str]]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in columns:
        table.add_column(title, justify="left" if title in ("", _BAR) else "right", no_wrap=title != "")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def _width(console: "Console", table: "Table") -> int:
    """Characters that the table needs on a line."""
    from rich.measure import Measurement

    return Measurement.get(console, console.options.update(max_width=1_000), table).maximum
