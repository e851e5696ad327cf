"""`pearl-rl reproduce`: what the paper measured, beside what the simulation gives."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pearl_rl.cli.progress import ProgressBar
from pearl_rl.errors import CommandError, ExitCode

if TYPE_CHECKING:
    from pearl_rl.simulation.experiments.targets import TargetRow

_MOST_JOBS = 256
_MOST_SEEDS = 100


def run_reproduction(
    targets: Sequence[str],
    *,
    jobs: int | None = None,
    seeds: int = 1,
    parameters: str = "",
    quick: bool = False,
    as_json: bool = False,
) -> ExitCode:
    """Print every row of the targets, simulated in `jobs` processes (None: one for each core that may be used).

    Raises `CommandError` for an unknown target or parameter set.
    """
    from pearl_rl.cli.doctor import usable_cores
    from pearl_rl.simulation.experiments.bench import Bench
    from pearl_rl.simulation.experiments.effort import FULL, QUICK
    from pearl_rl.simulation.experiments.registry import reproduce
    from pearl_rl.simulation.parameters import load_parameters

    if jobs is None:
        jobs = min(_MOST_JOBS, max(1, int(usable_cores())))
    if not 1 <= jobs <= _MOST_JOBS:
        raise CommandError(f"--jobs {jobs}: must be from 1 to {_MOST_JOBS}")
    if not 1 <= seeds <= _MOST_SEEDS:
        raise CommandError(f"--seeds {seeds}: must be from 1 to {_MOST_SEEDS}")
    if parameters:
        load_parameters(parameters, "qwen3-8b")
    with ProgressBar() as bar:
        bench = Bench(jobs, bar.show, parameters=parameters)
        rows = reproduce(targets, bench, QUICK if quick else replace(FULL, seeds=seeds))
    if as_json:
        print(json.dumps([row.to_json() for row in rows], allow_nan=False))
    else:
        _print_table(rows)
    return ExitCode.OK


def _print_table(rows: "Sequence[TargetRow]") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from pearl_rl.simulation.experiments.targets import summary

    console = Console(highlight=False)
    console.width = max(console.width, 120)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("target", "what", "use", "paper", "ours", "error", "ok"):
        table.add_column(name, justify="right" if name in ("paper", "ours", "error") else "left")
    for row in rows:
        error = ""
        if row.error is not None:
            error = f"{row.error:+.1f} points" if row.unit in ("points", "within") else f"{row.error:+.1%}"
        paper = f"{_BOUND[row.noise is None]} {_text(row.paper)}" if row.at_least else _text(row.paper)
        table.add_row(row.id, row.name, row.use, paper, _text(row.ours), error, "yes" if row.ok else "no")
    console.print(table)
    console.print(summary(rows))


_BOUND = {True: ">", False: ">="}
"""Whether the bound itself is not enough."""


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
