"""`pearl-rl what-if`: sweep a setting over a scenario or a recorded run, and compare."""

import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pearl_rl.cli.compared import Row, print_rows, row_of
from pearl_rl.cli.progress import ProgressBar
from pearl_rl.cli.recordings import Recordings
from pearl_rl.cli.simulate import check_own
from pearl_rl.errors import CommandError, ExitCode
from pearl_rl.settings.messages import short

if TYPE_CHECKING:
    from pearl_rl.simulation.outcome import SimulationResult
    from pearl_rl.simulation.scenario import Scenario

_MOST_RUNS = 1000


def run_what_if(
    source: str,
    *,
    vary: Sequence[str],
    policies: str,
    seeds: int,
    overrides: Sequence[str],
    as_json: bool,
    plot: Path | None,
) -> ExitCode:
    """Simulate every combination of the varied values, for each policy. Raises `CommandError`."""
    knobs = _knobs(vary)
    names = [name.strip() for name in policies.split(",") if name.strip()] or [""]
    recorded = Path(source).is_dir()
    if not recorded and os.sep in source and not Path(source).exists():
        raise CommandError(f"{source}: does not exist; give the folder of a run, a TOML file or a bundled scenario")
    _check_choices(policies, names, seeds, [key for key, _ in knobs])
    if recorded and (names != [""] or seeds != 1):
        raise CommandError(f"{source}: a recorded run is replayed as it was: vary planner.policy instead of --policy")
    if plot is not None:
        from pearl_rl.cli.report import check_target

        check_target(plot)
    grid = [dict(values) for values in itertools.product(*([(key, v) for v in values] for key, values in knobs))]
    if not 1 <= seeds <= _MOST_RUNS or len(grid) * len(names) * seeds > _MOST_RUNS:
        raise CommandError(
            f"{len(grid)} values × {len(names)} policies × --seeds {seeds}: must be 1 to {_MOST_RUNS} runs"
        )
    points = [_Point(source, overrides, name, values, seeds) for name, values in itertools.product(names, grid)]
    for point in points:
        point.check(recorded=recorded)
    slowdown = _slowdown(source) if recorded else 1.0
    rows: list[Row] = []
    with ProgressBar() as bar:
        for number, point in enumerate(points):

            def on_part(part: float, before: int = number, label: str = point.label) -> None:
                bar.show(before + min(part, 0.999), len(points), label)

            on_part(0.0)
            rows.append(_replay(source, point, slowdown) if recorded else _simulate(point, on_part))
    if as_json:
        results = [
            {"set": dict(point.values), "policy": point.policy or None, **row.to_json()}
            for point, row in zip(points, rows, strict=True)
        ]
        print(json.dumps({"source": source, "results": results}, allow_nan=False))
    else:
        print_rows(f"{source}: what if", rows, rows[0], bars=True)
    if plot is not None:
        _plot(plot, source, knobs[0], names, rows)
    return ExitCode.OK


def _knobs(vary: Sequence[str]) -> list[tuple[str, list[str]]]:
    """What is varied, and over which values. Raises `CommandError`."""
    knobs = [parse_knob(text) for text in vary]
    if not knobs:
        raise CommandError("what-if needs something to vary, like --vary cluster.max_preemptible_gpus=0,4,8")
    keys = [key for key, _ in knobs]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise CommandError(f"--vary {twice}: is given twice; give all its values in one, like --vary {twice}=1,2,3")
    if math.prod(len(values) for _, values in knobs) > _MOST_RUNS:
        raise CommandError(f"--vary of {' and '.join(keys)}: more than {_MOST_RUNS} combinations")
    return knobs


def parse_knob(text: str) -> tuple[str, list[str]]:
    """`key=1,2,3` or `key=0:12:4` (from, to, step) as a key and its values. Raises `CommandError`."""
    key, equals, values = text.partition("=")
    if not equals or not key.strip() or not values.strip():
        raise CommandError(f"--vary {text}: is not like cluster.max_preemptible_gpus=0,4,8 or =0:12:4")
    if values.count(":") == 2:
        return key.strip(), list(_range(text, values.split(":")))
    found = [value.strip() for value in values.split(",")]
    if not all(found) or len(set(found)) != len(found):
        raise CommandError(f"--vary {text}: has an empty value, or the same one twice")
    return key.strip(), found


def _range(text: str, parts: Sequence[str]) -> Iterator[str]:
    try:
        start, stop, step = (float(part) for part in parts)
        count = int((stop - start) / step + 1e-9) + 1
    except (ValueError, ZeroDivisionError, OverflowError):
        raise CommandError(f"--vary {text}: is not like =0:12:4 (from, to, step)") from None
    if not 1 <= count <= _MOST_RUNS:
        raise CommandError(f"--vary {text}: gives {short(count)} values; must be 1 to {_MOST_RUNS}")
    whole = all(float(part).is_integer() for part in parts)
    for number in range(count):
        value = start + number * step
        yield str(int(value)) if whole else f"{value:.10g}"


def _check_choices(policies: str, names: Sequence[str], seeds: int, keys: Sequence[str]) -> None:
    """Raise `CommandError` where `--policy` names one twice or none, or `--vary` what that or `--seeds` chooses."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise CommandError(f"--policy {policies}: names {twice} twice; --seeds repeats each policy")
    if policies and names == [""]:
        raise CommandError(f"--policy {policies}: names none")
    if policies and "policy.name" in keys:
        raise CommandError("--vary policy.name with --policy: both choose policies; use one of them")
    if "run.seed" in keys and seeds > 1:
        raise CommandError(f"--vary run.seed with --seeds {seeds}: both choose seeds; use one of them")
    check_own(names)


@dataclass(frozen=True, slots=True)
class _Point:
    """One combination of the varied values under one policy."""

    source: str
    given: Sequence[str]
    policy: str
    """Empty for the scenario's own."""
    values: Mapping[str, str]
    seeds: int

    @property
    def label(self) -> str:
        """What tells it from the others."""
        return ", ".join([*(f"{key}={value}" for key, value in self.values.items()), *filter(None, [self.policy])])

    @property
    def overrides(self) -> list[str]:
        """Settings, those that all points have in common first."""
        policy = [f"policy.name={self.policy}"] if self.policy else []
        return [*self.given, *(f"{key}={value}" for key, value in self.values.items()), *policy]

    def scenarios(self) -> "list[Scenario]":
        """One for each seed. Raises `SettingsError`."""
        from pearl_rl.simulation.scenario import load_scenario

        first = load_scenario(self.source, self.overrides).run.seed
        return [load_scenario(self.source, [*self.overrides, f"run.seed={first + n}"]) for n in range(self.seeds)]

    def check(self, *, recorded: bool) -> None:
        """Raise `CommandError` for values that cannot be simulated, before anything is."""
        if not recorded:
            self.scenarios()
            return
        from pearl_rl.run_of_train import require_run
        from pearl_rl.settings import load_settings

        load_settings(require_run(Path(self.source)), [*self.overrides, 'run.resume_from=""'])


def _simulate(point: _Point, on_part: Callable[[float], None]) -> Row:
    from pearl_rl.cli.simulate import simulate_one

    results: list[SimulationResult] = []
    for number, scenario in enumerate(point.scenarios()):
        on_progress = partial(_of_seeds, on_part, number, point.seeds)
        results.append(simulate_one(scenario, on_progress=on_progress))
    return row_of(point.label, results)


def _of_seeds(on_part: Callable[[float], None], number: int, seeds: int, part: float) -> None:
    """Tell a part of seed `number` as one of the whole point."""
    on_part((number + part) / seeds)


def _slowdown(source: str) -> float:
    from pearl_rl.cli.replay import calibrated

    return calibrated(Path(source))[0].slowdown


def _replay(source: str, point: _Point, slowdown: float) -> Row:
    from pearl_rl.cli.replay import replayed
    from pearl_rl.simulation.replay import read_recorded

    recorded = read_recorded(Path(source), point.overrides, slowdown)
    return row_of(point.label, [replayed(recorded, Recordings(None, None), point.label)])


def _plot(path: Path, source: str, knob: tuple[str, list[str]], policies: Sequence[str], rows: Sequence[Row]) -> None:
    """Throughput over the first knob's values, a group of bars for each value."""
    from pearl_rl.cli.report import write_plot
    from pearl_rl.report.standalone import framed
    from pearl_rl.report.svg import Plot

    key, values = knob
    colours = ("decode", "prefill", "colocated", "training", "environment", "transfer")
    per_value = len(rows) // len(values)
    top = max(row.throughput for row in rows) * 1.1 or 1.0
    plot = Plot(960, 320, (-0.5, len(values) - 0.5), (0.0, top), f"throughput over {key}", left=64, top=24)
    plot.y_axis("tokens/s")
    plot.text(948, 18, f"by {key}", anchor="end", css="axis title")
    inner = len(rows) // len(policies) // len(values)
    groups = [
        [row for number, row in enumerate(rows) if (number // inner) % len(values) == position]
        for position in range(len(values))
    ]
    for position, value in enumerate(values):
        plot.x_tick(position, value)
        for index, row in enumerate(groups[position]):
            left = position - 0.4 + 0.8 * index / per_value
            tip = f"{row.name}: {row.throughput:,.0f} tokens/s"
            plot.bar(left, left + 0.76 / per_value, 0.0, row.throughput, colours[index % len(colours)], tip)
    # What tells the bars of a group apart: their names without what the group has in common.
    names = [", ".join(part for part in row.name.split(", ") if part != f"{key}={values[0]}") for row in groups[0]]
    legend = [(colours[index % len(colours)], name) for index, name in enumerate(names) if name]
    write_plot(path, framed(plot, f"{source}: throughput over {key}", legend))
