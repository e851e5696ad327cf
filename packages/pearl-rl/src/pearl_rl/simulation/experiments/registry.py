"""All experiments by their target's id."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from pearl_rl.errors import SettingsError
from pearl_rl.simulation.experiments.bench import Bench, Job
from pearl_rl.simulation.experiments.figure2 import Figure2a, Figure2b, Figure2c
from pearl_rl.simulation.experiments.figures import Figure5, Figure7, Figure8
from pearl_rl.simulation.experiments.tables import Recovery, Table2, Table3
from pearl_rl.simulation.experiments.targets import TargetRow


class Experiment(Protocol):
    """Knows what to run, and what to say about it."""

    def jobs(self) -> list[Job]:
        """What must be run."""
        ...

    def rows(self, bench: Bench) -> Iterable[TargetRow]:
        """Paper and ours."""
        ...


EXPERIMENTS: Mapping[str, Callable[[], Experiment]] = {
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
"""Target id → its experiment at full length."""

QUICK: Mapping[str, Callable[[], Experiment]] = {
    "F2a": lambda: Figure2a(batches=1),
    "F2b": lambda: Figure2b(batches=1),
    "F2c": lambda: Figure2c(batches=1),
    "T2": lambda: Table2(steps=2, batches=1),
    "T3": Table3,
    "F5": lambda: Figure5(duration_s=1800.0, seeds=1),
    "F7": lambda: Figure7(steps=2),
    "F8": lambda: Figure8(steps=2),
    "R": lambda: Recovery(batches=1),
}
"""The same, too short to be trusted, to see that everything runs."""


def reproduce(targets: Sequence[str], bench: Bench, *, quick: bool = False) -> list[TargetRow]:
    """The rows of `targets` (ids in any case; `all`). Raises `SettingsError` for an unknown one."""
    known = {name.lower(): name for name in EXPERIMENTS}
    wanted = list(EXPERIMENTS) if not targets or "all" in targets else []
    for target in targets:
        if target == "all":
            continue
        if target.lower() not in known:
            raise SettingsError(f"no target '{target}': use all, or some of {', '.join(EXPERIMENTS)}")
        wanted.append(known[target.lower()])
    chosen = [(QUICK if quick else EXPERIMENTS)[name]() for name in dict.fromkeys(wanted)]
    bench.prepare([job for experiment in chosen for job in experiment.jobs()])
    return [row for experiment in chosen for row in experiment.rows(bench)]
