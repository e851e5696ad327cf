"""Simulations side by side: one row of figures each, as a table and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pearl_rl.simulation.outcome import SimulationResult


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


def print_rows(title: str, rows: Sequence[Row], base: Row, *, bars: bool = False) -> None:
    """A table, each row's throughput beside that of `base`; `bars` draws it, too."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.width = max(console.width, max(len(row.name) for row in rows) + (172 if bars else 144))
    console.print(title)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    relative = "of first" if base is rows[0] else f"of {base.name}"
    for name in ("tokens/s", relative, "step s", "rollout s", "training s", "prediction off", "GPU-s", "borrows"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("expansions", "switches"):
        table.add_column(name, justify="right", no_wrap=True)
    if bars:
        table.add_column("tokens/s", no_wrap=True)
    most = max((row.throughput for row in rows), default=0.0)
    for row in rows:
        cells = [
            row.name,
            f"{row.throughput:,.0f}" + (f" ± {row.spread:,.0f}" if row.spread is not None else ""),
            f"{row.throughput / base.throughput:.3f}" if base.throughput else "",
            f"{row.step_s:.1f}",
            f"{row.rollout_s:.1f}",
            f"{row.training_s:.1f}",
            "" if row.wape is None else f"{row.wape:.1%}",
            *("" if value is None else f"{value:,.0f}" for value in (row.gpu_s, row.borrows)),
            *("" if value is None else f"{value:g}" for value in (row.expansions, row.switches)),
        ]
        if bars:
            cells.append("█" * round(24 * row.throughput / most) if most else "")
        table.add_row(*cells)
    console.print(table)
