"""Where a scenario's trajectories come from: a turn model, a run that was recorded, or a trace of sessions."""

import csv
import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pearl_rl.errors import SettingsError
from pearl_rl.report.lines import of_run, read_lines, read_object
from pearl_rl.run_folder import SCENARIO_JSON
from pearl_rl.settings.messages import short
from pearl_rl.simulation.parameters import Parameters, load_parameters
from pearl_rl.simulation.scenario import Scenario, scenario_from
from pearl_rl.simulation.turn_model import BUNDLED, TurnModel, bundled_turn_model, turn_model_from_json
from pearl_rl.simulation.workload import ModelWorkload, Script, ScriptedWorkload, Workload, WorkloadOptions, fitted

LONGEST_GAP_S = 60.0
"""Gaps of a session trace count as tool time up to here; beyond, somebody was waited for."""
_SCALES = (
    "turns_scale",
    "turns_spread",
    "first_prompt_scale",
    "prompt_scale",
    "response_scale",
    "tool_scale",
    "retained_fraction",
    "stable_fraction",
    "reset_s",
)


def make_workload(scenario: Scenario, parameters: Parameters) -> Workload:
    """The workload of a scenario. Raises `SettingsError`."""
    section = scenario.workload
    replayed = bool(section.replay)
    # The parameter set describes the paper's task; other models and recordings are taken as they are.
    scales: dict[str, Any] = dict(parameters.workload) if section.model == "swe" and not replayed else {}
    if replayed:
        scales = _of_recording(Path(section.replay))
    scales.update({name: getattr(section, name) for name in _SCALES if getattr(section, name) is not None})
    options = replace(
        WorkloadOptions(max_context_tokens=section.max_context_tokens, max_turns=section.max_turns), **scales
    )
    if replayed:
        scripts = list(_recorded(Path(section.replay), options))
        if not scripts:
            raise SettingsError(f"workload.replay = {section.replay}: holds no trajectory")
        return ScriptedWorkload(scripts, stable_fraction=options.stable_fraction)
    return ModelWorkload(_turn_model(section.model), options, scenario.run.seed)


def _of_recording(path: Path) -> dict[str, Any]:
    """What a recorded simulation knew of its prompts beyond their length: how much of one the next repeats."""
    file = path / SCENARIO_JSON
    if not file.is_file():
        return {}
    with of_run(path):
        recorded = scenario_from(read_object(file), str(file))
    section = recorded.workload
    if section.stable_fraction is not None:
        return {"stable_fraction": section.stable_fraction}
    usual = load_parameters(recorded.parameters, recorded.model).workload
    drawn = section.model == "swe" and not section.replay and "stable_fraction" in usual
    return {"stable_fraction": usual["stable_fraction"]} if drawn else {}


def _turn_model(name: str) -> TurnModel:
    if name in BUNDLED:
        return bundled_turn_model(name)
    if not name.endswith(".json"):
        raise SettingsError(f"workload.model = {name}: no such turn model; use {', '.join(BUNDLED)} or a JSON file")
    try:
        return turn_model_from_json(json.loads(Path(name).read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise SettingsError(f"workload.model = {name}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"workload.model = {name}: is no turn model ({error})") from None


def _recorded(path: Path, options: WorkloadOptions) -> Iterator[Script]:
    if path.is_dir():
        return run_scripts(path, options)
    if path.name.endswith((".csv", ".csv.gz")):
        return session_scripts(path, options)
    raise SettingsError(f"workload.replay = {path}: give a run folder, or a CSV of sessions")


def run_scripts(folder: Path, options: WorkloadOptions) -> Iterator[Script]:
    """The trajectories of a recorded run, in the order in which they were dispatched."""
    with of_run(folder):
        lines = sorted(read_lines(folder / "trajectories.jsonl"), key=lambda line: str(line["id"]))
    if not lines:
        raise SettingsError(f"workload.replay = {folder}: has no trajectories.jsonl with trajectories")
    for line in lines:
        with of_run(folder):
            turns = [
                (_count(turn["prompt"]), _count(turn["response"]), _time(turn["environment_s"]) * options.tool_scale)
                for turn in line["turns"]
            ]
            root, reward = f"group {line['group']}", float(line["reward"])
            stays = [_staying(turn) for turn in line["turns"]] if options.retained_fraction == 1.0 else []
            yield fitted(turns, options, root=root, reward=reward, retained=stays)


def _time(seconds: Any) -> float:
    if not 0.0 <= float(seconds) < math.inf:
        raise ValueError(f"environment_s = {seconds}")
    return float(seconds)


def _staying(turn: Mapping[str, Any]) -> int | None:
    tokens = turn.get("retained_tokens")
    if tokens is not None and not (isinstance(tokens, int) and tokens >= 0):
        raise ValueError(f"retained_tokens = {tokens}")
    return tokens


def _count(tokens: Any) -> int:
    return tokens if isinstance(tokens, int) else len(tokens)


def session_scripts(path: Path, options: WorkloadOptions) -> Iterator[Script]:
    """The sessions of a WEKA trace, whole and in order; a context that shrinks adds one token."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            rows = [_checked(row, f"workload.replay = {path}:{reader.line_num}") for row in reader]
    except (OSError, EOFError, ValueError, csv.Error, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise SettingsError(f"workload.replay = {path}: cannot be read ({reason})") from None
    for session in _sessions(rows):
        yield fitted(list(session_turns(session, options.tool_scale)), options)


_SESSION_COLUMNS = ("trace", "kind", "in_tokens", "out_tokens", "gap_s")
_MOST_TOKENS = 10**9


def _checked(row: Mapping[str, str | None], where: str) -> Mapping[str, str]:
    """A row of a session trace. Raises `SettingsError` for one that is none."""
    for name in _SESSION_COLUMNS:
        text = row.get(name)
        if text is None:
            what = "has no" if name in row else "belongs to no trace of sessions: it has no column"
            raise SettingsError(f"{where}: {what} {name}")
        if name.endswith("_tokens") and not (text.isdecimal() and int(text[:20]) <= _MOST_TOKENS):
            raise SettingsError(f"{where}: {name} = {short(text)}: must be a whole number from 0 to {_MOST_TOKENS}")
        if name == "gap_s" and text and not _is_time(text):
            raise SettingsError(f"{where}: gap_s = {short(text)}: must be seconds from 0 on, or empty")
    return row  # type: ignore[return-value]


def _is_time(text: str) -> bool:
    try:
        return 0.0 <= float(text) < math.inf
    except ValueError:
        return False


def _sessions(rows: Iterable[Mapping[str, str]]) -> Iterator[list[Mapping[str, str]]]:
    session: list[Mapping[str, str]] = []
    for row in rows:
        if session and row["trace"] != session[-1]["trace"]:
            yield session
            session = []
        session.append(row)
    if session:
        yield session


def session_turns(session: list[Mapping[str, str]], tool_scale: float = 1.0) -> Iterator[tuple[int, int, float]]:
    """(new prompt tokens, generated tokens, tool time) of each request of a session."""
    held = 0
    for row, following in zip(session, [*session[1:], None], strict=True):
        new = int(row["in_tokens"]) - held
        held = int(row["in_tokens"]) + int(row["out_tokens"])
        tool_s = 0.0
        if following is not None and following["kind"] == "t" and following["gap_s"]:
            tool_s = min(LONGEST_GAP_S, float(following["gap_s"]))
        yield max(1, new), max(1, int(row["out_tokens"])), tool_s * tool_scale
