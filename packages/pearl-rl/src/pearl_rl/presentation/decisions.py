"""A decision as a ranked table of its candidates."""

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pearl_rl.presentation.words import reason_words, seconds
from pearl_state.decision import Candidate, Decision

_TERMS = ("prefill", "decode", "transfer", "overhead", "environment", "reprefill")


def decision_table(decision: Decision, *, explain: bool = False, rows: int | None = None) -> RenderableType:
    """The candidates from best to worst with both predictions, what was selected, and why.

    `explain` adds what each makespan is made of; `rows` shows only the best few.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("candidate")
    table.add_column("makespan", justify="right")
    table.add_column("as printed", justify="right")
    if explain:
        for name in _TERMS:
            table.add_column(name, justify="right")
        table.add_column("longer path")
    table.add_column("breaks")
    shown = decision.candidates if rows is None else decision.candidates[:rows]
    for candidate in shown:
        chosen = candidate.configuration == decision.selected
        cells = ["→" if chosen else "", *_cells(candidate, explain=explain)]
        table.add_row(*cells, style="bold" if chosen else ("" if candidate.feasible else "dim"))
    left_out = decision.considered - len(shown)
    lines = [f"selected {decision.selected} for {decision.budget_workers} workers: {reason_words(decision.reason)}"]
    if decision.previous is not None:
        lines.append(
            f"from {decision.previous}: gain {seconds(max(0.0, decision.gain_s))} a batch, needed "
            f"{decision.threshold:.0%}; switch {decision.switch}, cost {seconds(decision.switching_cost_s)}"
        )
    lines.extend(decision.limits)
    if left_out > 0:
        lines.append(f"{left_out} further candidates are not shown")
    return Group(table, Text("\n".join(lines)))


def _cells(candidate: Candidate, *, explain: bool) -> list[str]:
    predicted = candidate.predicted
    cells = [str(candidate.configuration), seconds(predicted.total_s), seconds(candidate.printed.total_s)]
    if explain:
        cells += [seconds(getattr(predicted, f"{name}_s")) for name in _TERMS]
        cells.append(predicted.bottleneck)
    cells.append(", ".join(candidate.violated))
    return cells
