"""Follows a run's folder as it grows: what the cluster looks like now, what is under way, and what was decided."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pearl_planner.gate import NOBODY_S
from pearl_rl.control.control_server import read_control
from pearl_rl.presentation.update_mode import update_mode_words
from pearl_rl.presentation.words import gain_words, reason_words, seconds
from pearl_rl.report.lines import finite, of_run, parsed, step_of, unreadable
from pearl_rl.report.run_record import read_configuration, step_tokens
from pearl_rl.report.table_history import Snapshot, applied, configuration_text, gpu_words
from pearl_rl.run_folder import SCENARIO_JSON, SUMMARY
from pearl_rl.run_lock import held
from pearl_state.decision import Reason

_DECISIONS = 30
_NEWS = 40
_STEPS = 200
_CANDIDATES = 6
_QUIET_S, _START_S = 60.0, 300.0
"""A run that wrote nothing for so long, and has no summary, may have been killed; starting takes longer."""
_OVER = frozenset({"ended", "died"})
"""States of a run whose control plane is gone."""


class Tail:
    """The new whole lines of a growing JSON Lines file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = self._lines = 0
        self._inode: int | None = None

    def begins_anew(self) -> bool:
        """Whether the file is another one than was read until now: another run began in this folder."""
        try:
            now = self.path.stat()
        except OSError:
            return self._offset > 0
        return now.st_size < self._offset or self._inode not in (None, now.st_ino)

    def read(self) -> Iterator[dict[str, Any]]:
        """What was added since the last call; a line that is being written comes with a later one.

        Raises `CommandError` where the file cannot be read, or a line of it is damaged.
        """
        try:
            with self.path.open("rb") as file:
                if self.begins_anew():
                    self._offset = self._lines = 0
                self._inode = os.fstat(file.fileno()).st_ino
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        except OSError as error:
            raise unreadable(self.path, error) from None
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.split(b"\n")[:-1]:
            self._lines += 1
            yield parsed(self.path, self._lines, line)


class Follower:
    """A run as it is now. `refresh` reads what is new; `view` says it as one JSON-able object."""

    def __init__(self, path: Path, wall_s: Callable[[], float] | None = None) -> None:
        """`wall_s` is the clock of file times, seconds since the epoch. Raises `CommandError` for no run's folder."""
        self.config = read_configuration(path)
        self.path = path
        self.simulated = (path / SCENARIO_JSON).is_file()
        self._wall_s = wall_s or _wall_s
        self._begin()

    def _begin(self) -> None:
        """Nothing was read yet."""
        self.rows: Mapping[int, Mapping[str, Any]] = {}
        self.about: Mapping[str, Any] = {}
        self.loads: Mapping[str, Mapping[str, Any]] = {}
        self.steps: deque[dict[str, Any]] = deque(maxlen=_STEPS)
        self.decisions: deque[dict[str, Any]] = deque(maxlen=_DECISIONS)
        self.news: deque[tuple[float, str]] = deque(maxlen=_NEWS)
        self.now_s = 0.0
        self.batch = self.remaining = self.step = 0
        self.reclaims = 0
        self._handlers: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
            "events": self._event,
            "decisions": self._decision,
            "metrics": self._step_done,
            "table": self._table,
            "loads": self._loads,
            "update_modes": self._update_mode,
        }
        self._tails = {name: Tail(self.path / f"{name}.jsonl") for name in self._handlers}

    def refresh(self) -> bool:
        """Read what is new. Returns whether there was anything. Raises `CommandError` where a file is damaged."""
        changed = False
        if any(tail.begins_anew() for tail in self._tails.values()):
            self._begin()
        with of_run(self.path):
            for name, tail in self._tails.items():
                handle = self._handlers[name]
                for line in tail.read():
                    handle(line)
                    changed = True
        return changed

    # ---- what was read ----------------------------------------------------------------------------------------------

    def _event(self, line: Mapping[str, Any]) -> None:
        # A process that goes on counts from 0 again.
        self.now_s = line["now_s"]
        kind = line["event"]
        if kind == "RolloutBegan":
            self.step, self.batch, self.remaining = line["step"], line["batch"], line["batch"]
        elif kind == "RolloutProgressed":
            self.remaining = line["remaining"] if line["step"] == self.step else self.remaining
        elif kind == "GpusReclaimed":
            self.reclaims += 1
        words = event_words(line)
        if words:
            self.news.append((line["now_s"], words))

    def _decision(self, line: Mapping[str, Any]) -> None:
        if "decision" in line:
            self.decisions.append(brief_decision(line))
            return
        for known in self.decisions:
            if known["number"] == line["number"]:
                known["measured"] = {"step": line["step"], "seconds": line["measured_s"]}

    def _update_mode(self, line: Mapping[str, Any]) -> None:
        # Those that stay are one a step, and would leave no room for other news.
        if line["decision"]["changes"]:
            self.news.append((line["now_s"], f"ref-actor {update_mode_words(line)}"))

    def _step_done(self, line: Mapping[str, Any]) -> None:
        self.steps.append(step_of(line))

    def _table(self, line: Mapping[str, Any]) -> None:
        self.rows, self.about = applied(self.rows, line), line

    def _loads(self, line: Mapping[str, Any]) -> None:
        self.loads = line["loads"]

    # ---- what is said -----------------------------------------------------------------------------------------------

    def state(self) -> str:
        """`ended`, `died` without a summary, `starting`, `running`, or `silent` where nothing was written for long."""
        alive = held(self.path)
        # A run that goes on after it ended has the summary of then.
        if alive is not True and (self.path / SUMMARY).is_file():
            return "ended"
        if alive is False:
            return "died"
        quiet_s, begun = self._wall_s() - self._written_at_s(), self.now_s > 0 or self.batch > 0
        if quiet_s > (_QUIET_S if begun else _START_S):
            return "silent"
        return "running" if begun else "starting"

    def _written_at_s(self) -> float:
        """When the run last wrote anything, seconds since the epoch."""
        newest = 0.0
        for file in (*self.path.glob("*.json*"), *self.path.glob("journal/*")):
            # It may get another name, or go, while we look.
            with suppress(FileNotFoundError):
                newest = max(newest, file.stat().st_mtime)
        return newest

    def outcome(self, state: str) -> str:
        """How a run ended and what to do then, for people; empty while it goes on."""
        if state not in _OVER:
            return ""
        when = f"{state} at {datetime.fromtimestamp(self._written_at_s()):%Y-%m-%d %H:%M:%S}"
        done, steps = self.steps[-1]["step"] if self.steps else 0, self._planned_steps()
        go_on = f"to go on: pearl-rl resume {self.path}"
        if state == "died":
            why = "without a summary: it was killed, or its terminal says why"
            return f"{when}, after {done} of {steps} steps, {why}; {go_on}"
        return when if self.simulated or done >= steps else f"{when}, after {done} of {steps} steps; {go_on}"

    def snapshot(self) -> Snapshot:
        """The table now."""
        return Snapshot(self.now_s, self.rows, self.about)

    def view(self, most_workers: int | None = None) -> dict[str, Any]:
        """All there is to see, as one object; of large clusters only the first `most_workers` workers.

        Raises `CommandError` where a file of the run lacks what it should have.
        """
        with of_run(self.path):
            return self._view(most_workers)

    def _view(self, most_workers: int | None) -> dict[str, Any]:
        control, state = read_control(self.path), self.state()
        last = self.steps[-1] if self.steps else None
        # With its control plane everything under way ended.
        under_way = {} if state in _OVER else self.about
        return {
            "run": self.path.resolve().name,
            "state": state,
            "outcome": self.outcome(state),
            "simulated": self.simulated,
            "now_s": self.now_s,
            "step": self.step,
            "steps": self._planned_steps(),
            "completed": last["step"] if last else 0,
            "batch": self.batch,
            "remaining": self.remaining,
            "training": self.about.get("training", "idle"),
            "configuration": configuration_text(self.rows.values()),
            "pinned": self.about.get("pinned"),
            "weight_version": self.about.get("target_version", 0),
            "serving_versions": sorted({row["weight_version"] for row in self._serving()}),
            "plan": under_way.get("plan"),
            "groups": under_way.get("groups", []),
            "removals": under_way.get("removals", []),
            "loose": self.about.get("loose", {}),
            "workers": [self._worker(id_, row) for id_, row in sorted(self.rows.items())[:most_workers]],
            "more_workers": max(0, len(self.rows) - most_workers) if most_workers is not None else 0,
            "serving_gpus": sum(len(row["gpus"]) for row in self._serving()),
            "decoding": sum(load["running"] for load in self.loads.values()),
            "waiting": sum(load["waiting"] for load in self.loads.values()),
            "reclaims": self.reclaims,
            "last_step": None if last is None else self._brief_step(last),
            "history": [self._brief_step(step) for step in self.steps],
            "decisions": list(self.decisions)[::-1],
            "news": [{"at_s": at_s, "text": text} for at_s, text in self.news][::-1],
            "control": control is not None,
        }

    def _serving(self) -> Iterator[Mapping[str, Any]]:
        return (row for row in self.rows.values() if row["lifecycle"] == "active" and row["role"] != "training")

    def _planned_steps(self) -> int:
        if self.steps:
            return int(self.steps[-1]["steps"])
        return int(self.config["run"]["steps"])

    def _worker(self, id_: int, row: Mapping[str, Any]) -> dict[str, Any]:
        load = self.loads.get(str(id_), {})
        group = "training" if row["role"] == "training" else "borrowed" if row["zone"] == "overlap" else row["tenure"]
        return {
            "id": id_,
            "gpus": sorted(row["gpus"]),
            "place": gpu_words(row["gpus"]),
            "group": group,
            "role": row["role"],
            "lifecycle": row["lifecycle"],
            "incarnation": row["incarnation"],
            "weight_version": row["weight_version"],
            "cordoned": row["cordoned"],
            "failures": row["failures"],
            # A deadline concerns only who still holds something.
            "reclaim_at_s": None if row["lifecycle"] in ("vacant", "released", "retired") else row["reclaim_at_s"],
            "running": load.get("running", 0),
            "waiting": load.get("waiting", 0),
        }

    def _brief_step(self, step: Mapping[str, Any]) -> dict[str, Any]:
        duration_s = step["duration_s"]
        return {
            "step": step["step"],
            # Nothing is learned in a simulation.
            "reward": None if self.simulated else finite(step["reward_mean"]),
            "tokens_per_s": step_tokens(step) / duration_s if duration_s > 0 else 0.0,
            "rollout_s": step["rollout_s"],
            "predicted_s": step["predicted_rollout_s"],
            "training_s": step["training_s"],
            "configuration": step["configuration"],
            "staleness": step["staleness_mean"],
            "lost": step["lost_trajectories"],
        }


def _wall_s() -> float:
    return datetime.now(UTC).timestamp()


def brief_decision(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of `decisions.jsonl` with its best candidates."""
    decision, gate = line["decision"], line["gate"]
    return {
        "number": line["number"],
        "at_s": line["now_s"],
        "trigger": line["trigger"],
        "previous": decision["previous"],
        "selected": decision["selected"],
        "reason": decision["reason"],
        "why": reason_words(Reason(decision["reason"])),
        "budget_workers": decision["budget_workers"],
        "gain": gain_words(decision["gain_s"], taken=decision["previous"] != decision["selected"]),
        "gate": None if gate is None else {"open": bool(gate["open"]), **_gate_terms(gate)},
        "candidates": [
            {"configuration": c["configuration"], "makespan_s": c["makespan_s"], "violated": c["violated"]}
            for c in decision["candidates"][:_CANDIDATES]
        ],
        "considered": decision["considered"],
        "limits": decision["limits"],
        "measured": None,
    }


def _gate_terms(gate: Mapping[str, float]) -> dict[str, float | None]:
    compared = gate["dedicated_s"] < NOBODY_S
    return {"benefit_s": gate["benefit_s"] if compared else None, "toggle_s": gate["toggle_s"]}


def event_words(line: Mapping[str, Any]) -> str:
    """An event in a few words; empty for those too frequent to tell."""
    match line["event"]:
        case "GpusOffered":
            return f"{gpu_words(line['gpus'])} offered ({line['tenure']})"
        case "GpusReclaimed":
            return (
                f"{gpu_words(line['gpus'])} reclaimed, {seconds(max(0.0, line['deadline_s'] - line['now_s']))} notice"
            )
        case "WorkerFailed":
            return f"worker {line['worker']} failed: {line['cause']}"
        case "GroupFailed" if line["failed"]:
            return "preparation failed: " + "; ".join(f"worker {id_}: {why}" for id_, why in line["failed"].items())
        case "GroupPrepared":
            return f"workers {', '.join(line['reported'])} are ready after {seconds(line['duration_s'])}"
        case "TrainingFinished":
            return f"update to weights v{line['weight_version']} took {seconds(line['duration_s'])}"
        case "WorkersCordoned":
            ids = ", ".join(map(str, line["workers"]))
            return f"workers {ids} {'fenced off' if line['cordoned'] else 'back in service'} by a person"
        case "ConfigurationPinned":
            chosen = line["configuration"]
            return f"pinned to {chosen} by a person" if chosen else "unpinned by a person"
    return ""
