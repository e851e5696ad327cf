"""The folder of a run: its settings, what happened, what was decided and measured, checkpoints and weights.

The JSON Lines files only grow. Each line goes to the file in one write, so that a reader sees whole lines; after a
kill the last line may be torn, which `read_lines` skips and `LineFile` repairs when it is opened again.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pearl_rl.encoding import encode, encode_event, json_line
from pearl_rl.errors import CommandError
from pearl_rl.observer import StepRecord
from pearl_rl.rollout.recorded_generation import RequestRecord
from pearl_rl.rollout.serving import WorkerLoad
from pearl_rl.run_lock import LOCK
from pearl_rl.settings import ResolvedSettings, to_json, to_toml
from pearl_rl.summary import TrainSummary
from pearl_rl.training.ref_actor_auto import UpdateModeRecord
from pearl_state.decision import Decision
from pearl_state.events import Event
from pearl_state.phases import PhaseChange
from pearl_state.plan import TransitionPlan
from pearl_state.trajectory import Trajectory
from pearl_state.worker import WorkerId

CONFIG_TOML = "config.resolved.toml"
CONFIG_JSON = "config.resolved.json"
SCENARIO_JSON = "scenario.json"
SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
UPDATE_MODES = "update_modes.jsonl"


class LineFile:
    """An append-only JSON Lines file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _drop_torn_line(path)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, value: Any) -> None:
        """Write one value as one line, at once. Raises `ValueError` after `close`, else `OSError` with the file."""
        if self._file < 0:
            raise ValueError(f"{self.path} is closed")
        data = memoryview((json_line(value) + "\n").encode())
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def close(self) -> None:
        """Give the file back. May be called twice."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


class RunFolder:
    """A run's folder. `create` makes a new one, `open` continues one; both hold its line files open until `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.weights = path / "weights"
        self._events = LineFile(path / "events.jsonl")
        self._decisions = LineFile(path / "decisions.jsonl")
        self._trajectories = LineFile(path / "trajectories.jsonl")
        self._metrics = LineFile(path / METRICS)
        self._table = LineFile(path / "table.jsonl")
        self._requests = LineFile(path / "requests.jsonl")
        self._loads = LineFile(path / "loads.jsonl")
        self._phases = LineFile(path / "phases.jsonl")
        self._update_modes: LineFile | None = None
        self._decision_count = sum(1 for line in read_lines(self._decisions.path) if "decision" in line)

    @classmethod
    def create(cls, resolved: ResolvedSettings, path: Path | None = None) -> "RunFolder":
        """Make the folder at `path`, or one named after the time in `run.dir`, and write the settings into it.

        Raises `CommandError` where the folder exists and is not empty, or cannot be made; nothing is left then.
        """
        made = _make(path, "--run-dir") if path is not None else _make_named(Path(resolved.settings.run.dir))
        for name in ("checkpoints", "weights"):
            (made / name).mkdir()
        (made / CONFIG_JSON).write_text(json.dumps(to_json(resolved), indent=2) + "\n", encoding="utf-8")
        # Last, and whole: a folder that has it is a run.
        _write_whole(made / CONFIG_TOML, to_toml(resolved))
        return cls(made)

    @classmethod
    def create_simulation(cls, scenario: Mapping[str, Any], path: Path) -> "RunFolder":
        """Make the folder of a simulation at `path` and write the scenario into it, as `scenario.json`.

        Raises `CommandError` where the folder exists and is not empty, or cannot be made.
        """
        made = _make(path, "--record")
        (made / SCENARIO_JSON).write_text(json.dumps(encode(scenario), indent=2) + "\n", encoding="utf-8")
        return cls(made)

    @classmethod
    def start_over(cls, path: Path) -> "RunFolder":
        """Begin the run in `path` anew: of what it holds, only the settings stay. Raises as `open` does."""
        _require_run(path)
        for entry in path.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name not in (CONFIG_TOML, CONFIG_JSON, LOCK):
                entry.unlink()
        for name in ("checkpoints", "weights"):
            (path / name).mkdir()
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Continue the run in `path`. Raises `CommandError` where it holds no run."""
        _require_run(path)
        return cls(path)

    def record_event(self, event: Event) -> None:
        """Journal an event that was applied to the table."""
        self._events.append(encode_event(event))

    def record_decision(
        self,
        decision: Decision,
        *,
        now_s: float,
        trigger: str,
        plan: TransitionPlan | None = None,
        borrowed: bool = False,
        gate: Mapping[str, float] | None = None,
    ) -> int:
        """Keep a decision; `gate` are the terms of eq. (7) where it is about borrowing. Returns its number in the file,
        for `record_measured`.
        """
        number = self._decision_count
        self._decision_count += 1
        line = {"number": number, "now_s": now_s, "trigger": trigger, "borrowed": borrowed, "gate": gate, "plan": plan}
        self._decisions.append({**line, "decision": decision})
        return number

    def record_measured(self, number: int, *, now_s: float, step: int, makespan_s: float, predicted_s: float) -> None:
        """Keep what a step took under decision `number`, beside what was predicted for it, seconds."""
        self._decisions.append(
            {"number": number, "now_s": now_s, "step": step, "measured_s": makespan_s, "predicted_s": predicted_s}
        )

    def record_trajectory(self, trajectory: Trajectory, *, step: int) -> None:
        """Keep a trajectory that was rolled out in step `step`."""
        self._trajectories.append({"step": step, **encode(trajectory)})

    def record_counted(self, line: Mapping[str, Any]) -> None:
        """Keep a simulated trajectory, in which numbers of tokens stand for tokens."""
        self._trajectories.append(line)

    def record_step(self, record: StepRecord) -> None:
        """Keep a step's figures."""
        self._metrics.append(record)

    def record_table(self, change: Mapping[str, Any]) -> None:
        """Keep a change of the table, as `TableLog` makes it."""
        self._table.append(change)

    def record_request(self, record: RequestRecord) -> None:
        """Keep who served a request."""
        self._requests.append(record)

    def record_phase(self, change: PhaseChange) -> None:
        """Keep a change of a trajectory's phase."""
        self._phases.append(change)

    def record_update_mode(self, record: UpdateModeRecord, *, now_s: float) -> None:
        """Keep how reference and actor shared the GPUs in an update; a run without that choice has no such file."""
        if self._update_modes is None:
            self._update_modes = LineFile(self.path / UPDATE_MODES)
        self._update_modes.append({"now_s": now_s, **encode(record)})

    def record_loads(self, loads: Mapping[WorkerId, WorkerLoad], *, now_s: float) -> None:
        """Keep what each worker has to do at this moment."""
        self._loads.append({"now_s": now_s, "loads": loads})

    def write_summary(self, summary: TrainSummary | Mapping[str, Any]) -> None:
        """Write the summary, whole or not at all."""
        _write_whole(self.path / SUMMARY, json.dumps(encode(summary), indent=2) + "\n")

    def close(self) -> None:
        """Give the files back. May be called twice."""
        if self._update_modes is not None:
            self._update_modes.close()
        for file in (
            self._events,
            self._decisions,
            self._trajectories,
            self._metrics,
            self._table,
            self._requests,
            self._loads,
            self._phases,
        ):
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _require_run(path: Path) -> None:
    if not (path / CONFIG_TOML).is_file():
        raise CommandError(f"{path}: holds no {CONFIG_TOML}; give the folder of a run")


def _write_whole(path: Path, text: str) -> None:
    """Write a file so that a kill leaves all of it or nothing."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The values of a JSON Lines file, also of one that is being written or was torn by a kill."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def read_decisions(path: Path) -> list[dict[str, Any]]:
    """The decisions of a run, each with `measured`: the steps that ran under it."""
    return joined_decisions(read_lines(path))


def joined_decisions(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of `decisions.jsonl` as `read_decisions` gives them."""
    decisions: list[dict[str, Any]] = []
    numbered: dict[int, dict[str, Any]] = {}
    for line in lines:
        if "decision" in line:
            decisions.append({**line, "measured": []})
            numbered[line["number"]] = decisions[-1]
        elif line["number"] in numbered:
            # Else its decision was a line that got damaged, and was taken out.
            numbered[line["number"]]["measured"].append(line)
    return decisions


def _drop_torn_line(path: Path) -> None:
    """Cut off what follows the last line end, if a kill left anything there."""
    with suppress(FileNotFoundError), path.open("r+b") as file:
        position = file.seek(0, os.SEEK_END)
        size, tail = position, b""
        while position and b"\n" not in tail:
            start = max(0, position - 65_536)
            file.seek(start)
            tail, position = file.read(position - start), start
        keep = position + tail.rfind(b"\n") + 1
        if keep < size:
            file.truncate(keep)


def _make(path: Path, option: str) -> Path:
    """Make `path`, which may exist only as an empty folder; `option` is the one that chooses it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        occupied = next(path.iterdir(), None)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CommandError(f"run folder {path}: cannot be made ({reason}); choose another {option}") from None
    if occupied is not None:
        raise CommandError(f"run folder {path}: exists and is not empty; choose another {option}, or remove it")
    return path


def _make_named(parent: Path, now: datetime | None = None) -> Path:
    """Make a folder in `parent` named after the local time; a number is added where two runs start in one second."""
    stamp = f"{now or datetime.now():%Y%m%d-%H%M%S}"
    for name in _names(stamp, 1_000):
        path = parent / name
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise CommandError(f"run.dir = {parent}: cannot be written ({reason}); choose another folder") from None
        return path
    raise CommandError(f"run.dir = {parent}: too many runs of the name {stamp}; choose another folder")


def _names(stamp: str, count: int) -> Sequence[str]:
    return [stamp, *(f"{stamp}-{number}" for number in range(2, count))]
