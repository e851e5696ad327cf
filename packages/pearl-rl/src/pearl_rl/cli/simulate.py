"""`pearl-rl simulate`: run a scenario under one or more policies in virtual time, and compare them."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pearl_executor.virtual_time import SimulationDeadlockError
from pearl_rl.cli.compared import print_rows, row_of
from pearl_rl.cli.progress import ProgressBar
from pearl_rl.cli.recordings import Recordings
from pearl_rl.errors import CommandError, ExitCode, SettingsError

if TYPE_CHECKING:
    from pearl_rl.run_folder import RunFolder
    from pearl_rl.simulation.outcome import SimulationResult
    from pearl_rl.simulation.scenario import Scenario

_MOST_SEEDS = 1000


def run_simulation(
    source: str,
    *,
    policies: str = "",
    seeds: int = 1,
    overrides: Sequence[str] = (),
    as_json: bool = False,
    full: bool = False,
    report: Path | None = None,
    record: Path | None = None,
) -> ExitCode:
    """Simulate every policy (comma-separated; empty: the scenario's own) with `seeds` seeds each, and print.

    `as_json` prints one object on the last line; with `full` it holds every step, decision and interval. `record` is a
    folder that gets the run folder of each simulation, `report` a file that gets one page of all. Raises
    `CommandError`.
    """
    if not 1 <= seeds <= _MOST_SEEDS:
        raise CommandError(f"--seeds {seeds}: must be from 1 to {_MOST_SEEDS}")
    plans = _plans(source, policies, seeds, overrides)
    results: dict[str, list[SimulationResult]] = {}
    recorder = Recordings(record, report)
    with ProgressBar() as bar:
        for number, scenario in enumerate(plans):
            what = f"{scenario.policy.name}, seed {scenario.run.seed}"
            simulated = partial(simulate_one, on_progress=_part(bar, number, len(plans), what))
            results.setdefault(scenario.policy.name, []).append(recorder.run(scenario, simulated))
    if as_json:
        print(json.dumps(_document(plans[0], results, full=full), allow_nan=False))
    else:
        first = plans[0]
        rows = [row_of(name, group) for name, group in results.items()]
        print_rows(f"{first.name}: {first.model} on {first.gpu}, {first.tp} GPUs a worker", rows, rows[0])
    recorder.finish(plans[0].name)
    return ExitCode.OK


def _plans(source: str, policies: str, seeds: int, overrides: Sequence[str]) -> "list[Scenario]":
    """Every (policy, seed) to run. All are checked before the first one runs."""
    from pearl_rl.simulation.scenario import load_scenario

    first = load_scenario(source, overrides)
    names = [name.strip() for name in policies.split(",") if name.strip()]
    if policies and not names:
        raise CommandError(f"--policy {policies}: names none")
    names = names or [first.policy.name]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise CommandError(f"--policy {policies}: names {twice} twice; --seeds repeats each policy")
    check_own(names)
    runs = [(name, seed) for name in names for seed in range(first.run.seed, first.run.seed + seeds)]
    return [load_scenario(source, [*overrides, f"policy.name={name}", f"run.seed={seed}"]) for name, seed in runs]


def check_own(names: Sequence[str]) -> None:
    """Load those of `names` that are policies of the user's own. Raises `CommandError` where one is none."""
    from pearl_rl.own_policy import PolicyError, own_policy

    for name in names:
        if ":" in name:
            try:
                own_policy(name)
            except PolicyError as error:
                raise CommandError(str(error)) from None


def _part(bar: ProgressBar, number: int, of: int, what: str) -> Callable[[float], None]:
    """Shows a part of simulation `number`."""
    return lambda part: bar.show(number + min(part, 0.999), of, what)


def simulate_one(
    scenario: "Scenario", folder: "RunFolder | None" = None, on_progress: Callable[[float], None] | None = None
) -> "SimulationResult":
    """Run one simulation, recorded in `folder` where one is given; see `simulate`. Raises `CommandError`."""
    from pearl_rl.own_policy import PolicyError
    from pearl_rl.simulation.cluster import simulate

    try:
        return simulate(scenario, folder=folder, on_progress=on_progress)
    except SimulationDeadlockError as error:
        raise CommandError(
            f"{scenario.name}, policy {scenario.policy.name}: the control plane hangs: {error}", ExitCode.PARTIAL
        ) from None
    except (SettingsError, CommandError):
        raise
    except PolicyError as error:
        raise CommandError(f"{scenario.name}: {error}") from None
    except ValueError as error:
        # A trajectory that no engine can hold, a trace that is none: the scenario can never finish.
        raise CommandError(f"{scenario.name}: {error}", ExitCode.INFEASIBLE) from None


def _document(scenario: "Scenario", results: "dict[str, list[SimulationResult]]", *, full: bool) -> dict[str, object]:
    return {
        "scenario": scenario.name,
        "model": scenario.model,
        "gpu": scenario.gpu,
        "results": [result.to_json(full=full) for group in results.values() for result in group],
    }
