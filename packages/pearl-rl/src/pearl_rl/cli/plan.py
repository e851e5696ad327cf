"""`pearl-rl plan`: ask the PD Decision Engine about a budget of workers, and show how it ranks the candidates."""

import json
import sys
from dataclasses import MISSING, dataclass, fields
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Literal, TypeVar

from pearl_planner.catalog import CatalogError, find_gpu, find_model, find_profile
from pearl_planner.decide import DecideSettings, decide
from pearl_planner.roofline import PlanningInputs, check_tensor_parallel, planning_inputs, platform_profile
from pearl_rl.errors import CommandError, ExitCode
from pearl_state.configuration import Configuration
from pearl_state.decision import Candidate, Constraint, Decision, Reason
from pearl_state.errors import ConfigurationError, ProfileError
from pearl_state.profile import PlatformProfile, WorkloadProfile

_Profile = TypeVar("_Profile", WorkloadProfile, PlatformProfile)
_SEVERAL = frozenset({"active_by_turn", "context_by_turn"})
"""Fields that hold a number for each turn."""
_LARGEST = 1e15
_MOST_SEQUENCES = 4_096
_MOST_WORKERS = 10_000_000
_ROWS = 12
_PLAIN_COLUMNS, _EXPLAINED_COLUMNS = 80, 140


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """What is asked, as it was typed."""

    model: str
    gpu: str
    tp: int
    workers: int
    profile: str = "swe-32k"
    """A bundled name, or a JSON file."""
    current: str | None = None
    makespan: Literal["extended", "printed"] = "extended"


def answer(question: PlanQuestion, *, explain: bool, as_json: bool) -> ExitCode:
    """Print the decision. Raises `CommandError`; the code is `INFEASIBLE` where nothing meets every constraint."""
    inputs = planning(question)
    decision = decide(
        workload=inputs.workload,
        platform=inputs.platform,
        budget_workers=question.workers,
        current=None if question.current is None else _configuration(question.current),
        settings=DecideSettings(model=question.makespan),
    )
    if as_json:
        print(json.dumps({**decision_json(decision, inputs), **_asked(question)}, allow_nan=False))
    else:
        _print_table(question, decision, inputs, explain=explain)
    if decision.reason is Reason.FALLBACK:
        print(f"pearl-rl: nothing for {question.workers} workers meets every constraint", file=sys.stderr)
        return ExitCode.INFEASIBLE
    return ExitCode.OK


def planning(question: PlanQuestion) -> PlanningInputs:
    """The workload and platform that the question names. Raises `CommandError`."""
    if not 1 <= question.workers <= _MOST_WORKERS:
        raise CommandError(f"--workers {question.workers}: must be from 1 to {_MOST_WORKERS}")
    try:
        model, gpu = find_model(question.model), find_gpu(question.gpu)
        check_tensor_parallel(model, question.tp)
        file = _profile_file(question.profile)
        bundled = None if file else find_profile(question.profile)
    except CatalogError as error:
        raise CommandError(str(error)) from None
    try:
        if bundled is not None:
            return planning_inputs(bundled, model, gpu, question.tp)
        workload, platform = _read_profile(Path(question.profile))
        if platform is not None:
            return PlanningInputs(workload=workload, platform=platform, notes=(f"profile {question.profile}",))
        context = workload.context_tokens or workload.max_context_tokens
        roofline = platform_profile(
            model, gpu, question.tp, context_tokens=context, most_sequences=min(workload.batch, _MOST_SEQUENCES)
        )
    except CatalogError as error:
        raise CommandError(str(error), ExitCode.INFEASIBLE) from None
    source = f"roofline of {model.name} on {question.tp} x {gpu.name}, not measured"
    return PlanningInputs(
        workload=workload, platform=roofline, notes=(f"workload: {question.profile}", f"platform: {source}")
    )


def deciding_constraints(decision: Decision) -> tuple[Constraint, ...]:
    """What the fastest candidate breaks, by either model, where it beats the selected one; empty: speed decided."""
    selected = next(c for c in decision.candidates if c.configuration == decision.selected)
    faster = [c for c in decision.candidates if not c.feasible and _at_best_s(c) < selected.makespan_s]
    return min(faster, key=_at_best_s).violated if faster else ()


def _at_best_s(candidate: Candidate) -> float:
    return min(candidate.predicted.total_s, candidate.printed.total_s)


def decision_json(decision: Decision, inputs: PlanningInputs) -> dict[str, Any]:
    """The decision with what decided it and where its inputs come from."""
    return {
        **decision.to_json(),
        "constraint": [str(constraint) for constraint in deciding_constraints(decision)],
        "notes": list(inputs.notes),
        "origin": {"workload": dict(inputs.workload.origin), "platform": dict(inputs.platform.origin)},
    }


def _asked(question: PlanQuestion) -> dict[str, Any]:
    return {"model": question.model, "gpu": question.gpu, "tp": question.tp, "profile": question.profile}


def _configuration(text: str) -> Configuration:
    try:
        return Configuration.parse(text)
    except ConfigurationError as error:
        raise CommandError(f"--current {text}: {error}") from None


def _profile_file(name: str) -> bool:
    return name.endswith(".json") or "/" in name


def _read_profile(path: Path) -> tuple[WorkloadProfile, PlatformProfile | None]:
    """A profile file: `workload`, and `platform` where it was measured. Raises `CommandError`."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CommandError(f"profile {path}: cannot be read as JSON ({reason})") from None
    if not isinstance(document, dict) or not isinstance(document.get("workload"), dict):
        raise CommandError(f'profile {path}: needs an object "workload", and may have an object "platform"')
    platform = document.get("platform")
    workload = _profile(WorkloadProfile, document["workload"], path)
    return workload, None if platform is None else _profile(PlatformProfile, platform, path)


def _profile(kind: type[_Profile], values: Any, path: Path) -> _Profile:
    """One profile from numbers, or from objects of a `value` and its `origin`."""
    where = f"profile {path}: {kind.__name__}"
    if not isinstance(values, dict):
        raise CommandError(f"{where} is not an object")
    known = {field.name for field in fields(kind)} - {"origin"}
    unknown = sorted(values.keys() - known)
    if unknown:
        near = max(known, key=lambda name: SequenceMatcher(None, unknown[0], name).ratio())
        raise CommandError(f"{where} has no field {unknown[0]}; the nearest is {near}")
    plain = {key: item.get("value") if isinstance(item, dict) else item for key, item in values.items()}
    origin = {key: str(item["origin"]) for key, item in values.items() if isinstance(item, dict) and "origin" in item}
    missing = sorted(_required(kind) - plain.keys())
    if missing:
        raise CommandError(f"{where} lacks {', '.join(missing)}")
    try:
        return kind(**{key: _value(key, value) for key, value in plain.items()}, origin=origin)
    except ProfileError as error:
        raise CommandError(f"profile {path}: {error}") from None


def _value(key: str, value: Any) -> Any:
    """A number, for a field that has several a tuple of numbers, or whether. Raises `ProfileError`."""
    if key == "steady":
        if not isinstance(value, bool):
            raise ProfileError(f"{key} = {value!r}: must be true or false")
        return value
    if key not in _SEVERAL:
        return _number(key, value)
    if not isinstance(value, list):
        raise ProfileError(f"{key} = {value!r}: must be a list of numbers")
    return tuple(_number(key, item) for item in value)


def _number(key: str, value: Any) -> int | float:
    whole = key == "batch"
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise ProfileError(f"{key} = {value!r}: must be {'a whole number' if whole else 'a number'}")
    if abs(value) > _LARGEST:
        raise ProfileError(f"{key}: must be at most {_LARGEST:.0e}")
    return value


def _required(kind: type[Any]) -> set[str]:
    return {field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING}


def _print_table(question: PlanQuestion, decision: Decision, inputs: PlanningInputs, *, explain: bool) -> None:
    from rich.console import Console

    from pearl_rl.presentation.decisions import decision_table

    console = Console(highlight=False)
    # A narrow terminal wraps long lines itself; a table squeezed into it could not be read.
    console.width = max(console.width, _EXPLAINED_COLUMNS if explain else _PLAIN_COLUMNS)
    console.print(f"{question.model} on {question.gpu}, {question.tp} GPUs a worker, {question.workers} workers")
    console.print(decision_table(decision, explain=explain, rows=None if explain else _ROWS))
    for note in inputs.notes:
        console.print(note, style="dim")
