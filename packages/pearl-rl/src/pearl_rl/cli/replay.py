"""`pearl-rl replay`: a recorded run in the simulator, as it was and with other settings."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pearl_executor.virtual_time import SimulationDeadlockError
from pearl_rl.cli.compared import Row, print_rows, row_of
from pearl_rl.cli.recordings import Recordings
from pearl_rl.errors import CommandError, ExitCode
from pearl_rl.prediction_error import overlapping_batches, prediction_error
from pearl_rl.run_folder import RunFolder

_CALIBRATIONS, _CLOSE_ENOUGH, _MOST_SLOWDOWN = 4, 0.03, 20.0

_LEARNING = ("train.", "model.", "environment.", "rollout.", "run.seed")
"""Settings that would have made other trajectories."""

if TYPE_CHECKING:
    from pearl_rl.simulation.outcome import SimulationResult
    from pearl_rl.simulation.replay import Recorded
    from pearl_rl.simulation.scenario import Scenario


def run_replay(
    run_dir: Path, overrides: Sequence[str], *, as_json: bool, report: Path | None, record: Path | None
) -> ExitCode:
    """Replay a run and, where something is changed, replay it once more with the changes. Raises `CommandError`."""
    from pearl_rl.simulation.replay import read_recorded

    recorder = Recordings(record, report)
    as_was, result = calibrated(run_dir)
    changed = read_recorded(run_dir, overrides, as_was.slowdown) if overrides else None
    if report is not None or record is not None:
        result = replayed(as_was, recorder, "replayed")
    rows = [recorded_row(as_was), row_of("replayed", [result])]
    if changed is not None:
        rows.append(row_of(", ".join(overrides), [replayed(changed, recorder, "changed")]))
    base = rows[1]
    if as_json:
        print(
            json.dumps(
                {**document(run_dir, rows), "slowdown": as_was.slowdown, "missing_trajectories": as_was.missing},
                allow_nan=False,
            )
        )
    else:
        print_rows(f"{run_dir}: {len(as_was.steps)} recorded steps", rows, base)
        print(fidelity(rows[0], base, as_was.slowdown))
        for line in (*gaps(as_was), *assumptions(changed)):
            print(line)
    recorder.finish(f"replay of {run_dir.resolve().name}")
    return ExitCode.OK


def calibrated(run_dir: Path) -> "tuple[Recorded, SimulationResult]":
    """The run as it was, its workers slowed down until batches take what they took. Raises `CommandError`.

    An emulated device keeps its stated pace only where its machine keeps up with it.
    """
    from pearl_rl.simulation.replay import read_recorded

    slowdown, best = 1.0, None
    for _ in range(_CALIBRATIONS):
        recorded = read_recorded(run_dir, slowdown=slowdown)
        result = replayed(recorded, Recordings(None, None), "replayed")
        measured_s = fmean([step["rollout_s"] for step in recorded.steps])
        error = result.rollout_s / measured_s - 1 if measured_s else 0.0
        if best is None or abs(error) < abs(best[0]):
            best = (error, recorded, result)
        if abs(error) <= _CLOSE_ENOUGH or not measured_s:
            break
        slowdown = min(_MOST_SLOWDOWN, max(1.0, slowdown / (1 + error)))
    assert best is not None
    return best[1], best[2]


def replayed(recorded: "Recorded", recorder: Recordings, name: str) -> "SimulationResult":
    """Play one. Raises `CommandError`."""
    from pearl_rl.simulation.cluster import run_to_end
    from pearl_rl.simulation.replay import ReplayedCluster, replay_scenario

    def play(_scenario: "Scenario", folder: RunFolder | None) -> "SimulationResult":
        try:
            return run_to_end(ReplayedCluster(recorded, folder))
        except SimulationDeadlockError as error:
            raise CommandError(f"{recorded.path}: the control plane hangs: {error}", ExitCode.PARTIAL) from None

    return recorder.run(replay_scenario(recorded), play, name)


def recorded_row(recorded: "Recorded") -> Row:
    """What the run itself measured."""
    steps = recorded.steps
    durations = [step["duration_s"] for step in steps]
    tokens = sum(step["generated_tokens"] + step["trained_tokens"] for step in steps)
    settings = recorded.settings
    bound = settings.train.max_staleness_versions
    overlap = overlapping_batches(settings.rollout.injection, settings.planner.policy, bound)
    return Row(
        name="recorded",
        throughput=tokens / sum(durations) if sum(durations) else 0.0,
        spread=None,
        steps=float(len(steps)),
        step_s=fmean(durations),
        rollout_s=fmean([step["rollout_s"] for step in steps]),
        training_s=fmean([step["training_s"] for step in steps]),
        wape=prediction_error([(step["rollout_s"], step["predicted_rollout_s"]) for step in steps], overlap),
        gpu_s=None,
        borrows=None,
        expansions=None,
        switches=None,
    )


def document(run_dir: Path, rows: Sequence[Row]) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {"run": str(run_dir), "results": [row.to_json() for row in rows]}


def fidelity(recorded: Row, played: Row, slowdown: float) -> str:
    """How far the replay is from the run."""
    error = played.rollout_s / recorded.rollout_s - 1 if recorded.rollout_s else 0.0
    pace = f"workers ran at {1 / slowdown:.0%} of their stated speed; " if slowdown > 1.005 else ""
    return (
        f"{pace}replayed batches take {abs(error):.1%} {'more' if error > 0 else 'less'} than recorded ones; "
        "compare changes with 'replayed'"
    )


def gaps(recorded: "Recorded") -> Sequence[str]:
    """What a replay had to fill in, as the folder lacks it."""
    if not recorded.missing:
        return ()
    trained = sum(step["trajectories"] for step in recorded.steps)
    return (
        f"{recorded.missing} of {trained} trajectories are not in trajectories.jsonl: others were played in their "
        "place, and figures are not those of the run",
    )


def assumptions(changed: "Recorded | None") -> Sequence[str]:
    """What a changed replay takes for granted."""
    if changed is None:
        return ()
    lines = []
    if "cluster.max_preemptible_gpus" in changed.changed:
        lines.append("added preemptible GPUs are there from the start and never taken away")
    if "cluster.gpus_per_worker" in changed.changed:
        lines.append("a worker is as fast as it was, on however many GPUs")
    if any(key.startswith(_LEARNING) for key in changed.changed):
        lines.append("trajectories and updates are the recorded ones, whatever other settings would have learned")
    return lines
