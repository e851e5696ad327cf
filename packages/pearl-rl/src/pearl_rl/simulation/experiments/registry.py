"""All experiments by their target's id.

PEARL's own are `EXPERIMENTS`; `all` means them. A target of another paper is one function in a module of its own,
`rows(bench, *, quick)`, and one line in `OTHER_PAPERS`: it runs what it needs with `Bench.prepare` and `Bench.result`
(any frozen dataclass with `run()` is a job) and yields `TargetRow`s.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Protocol

from pearl_rl.errors import SettingsError
from pearl_rl.simulation.experiments.bench import AnyJob, Bench
from pearl_rl.simulation.experiments.effort import FULL, QUICK, Effort
from pearl_rl.simulation.experiments.figure2 import Figure2a, Figure2b, Figure2c
from pearl_rl.simulation.experiments.figures import Figure5, Figure7, Figure8
from pearl_rl.simulation.experiments.tables import Recovery, Table2, Table3
from pearl_rl.simulation.experiments.targets import TargetRow


class Experiment(Protocol):
    """Knows what to run, and what to say about it."""

    def jobs(self) -> list[AnyJob]:
        """What must be run."""
        ...

    def rows(self, bench: Bench) -> Iterable[TargetRow]:
        """Paper and ours."""
        ...


class PaperRows(Protocol):
    """Everything about a target of another paper."""

    def __call__(self, bench: Bench, *, quick: bool) -> Iterable[TargetRow]:
        """Run what is needed (`quick`: as little as shows that it works), and say what came out."""
        ...


OTHER_PAPERS: Mapping[str, str] = {
    "prorsa": "prorsa:rows",
    "tiderl": "tiderl:rows",
    "quality": "quality:rows",
}
"""Target → `module:function` (a `PaperRows`) under this package; imported only when asked for. Not part of `all`.

`quality` is no paper's: demands on the planner, judged by the oracle."""

EXPERIMENTS: Mapping[str, Callable[[Effort], Experiment]] = {
    "F2a": Figure2a,
    "F2b": Figure2b,
    "F2c": Figure2c,
    "T2": Table2,
    "T3": Table3,
    "F5": Figure5,
    "F7": Figure7,
    "F8": Figure8,
    "R": Recovery,
}
"""Target id → its experiment."""


def reproduce(targets: Sequence[str], bench: Bench, effort: Effort = FULL) -> list[TargetRow]:
    """The rows of `targets` (ids in any case; `all`: PEARL's). Raises `SettingsError` for an unknown one."""
    names = [*EXPERIMENTS, *OTHER_PAPERS]
    known = {name.lower(): name for name in names}
    wanted: list[str] = []
    for target in targets or ("all",):
        if target.lower() == "all":
            wanted += EXPERIMENTS
        elif target.lower() in known:
            wanted.append(known[target.lower()])
        else:
            raise SettingsError(f"no target '{target}': use all, or some of {', '.join(names)}")
    wanted = list(dict.fromkeys(wanted))
    chosen = [EXPERIMENTS[name](effort) for name in wanted if name in EXPERIMENTS]
    bench.prepare([job for experiment in chosen for job in experiment.jobs()])
    rows = [row for experiment in chosen for row in experiment.rows(bench)]
    for name in wanted:
        if name in OTHER_PAPERS:
            rows += paper_rows(name)(bench, quick=effort is QUICK)
    return rows


def paper_rows(name: str) -> PaperRows:
    """The function of one of `OTHER_PAPERS`."""
    module, _, function = OTHER_PAPERS[name].partition(":")
    found: PaperRows = getattr(import_module(f"pearl_rl.simulation.experiments.{module}"), function)
    return found
