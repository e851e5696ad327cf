"""`pearl-rl apply`: lead a run to a configuration that a file names, or say what that would take."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pearl_rl.cli.operate import answer_words, run_folder, send
from pearl_rl.errors import CommandError, ExitCode
from pearl_state.configuration import Configuration
from pearl_state.errors import ConfigurationError, StateError

if TYPE_CHECKING:
    from pearl_state.plan import TransitionPlan
    from pearl_state.table import WorkerTable


@dataclass(frozen=True, slots=True)
class Prospect:
    """What it takes to get from the workers of now to a target."""

    now: str
    target: Configuration
    plan: "TransitionPlan | None"
    """None where the target is there already."""
    reason: str = ""
    """Why there is no plan."""


def apply(file: Path, run: Path | None, *, dry_run: bool, as_json: bool) -> ExitCode:
    """Pin a run to the target in `file`; with `dry_run` only print the plan. Raises `CommandError`."""
    target = read_target(file)
    folder = run_folder(run)
    if not dry_run:
        answer = send(folder, {"pin": str(target)})
        print(json.dumps(answer) if as_json else answer_words(answer))
        return ExitCode.OK
    found = prospect(folder, target)
    if as_json:
        plan = None if found.plan is None else found.plan.to_json()
        print(json.dumps({"now": found.now, "target": str(target), "plan": plan, "reason": found.reason}))
    else:
        for line in words(found):
            print(line)
    return ExitCode.OK if not found.reason else ExitCode.INFEASIBLE


def read_target(file: Path) -> Configuration:
    """The target of a JSON file: `target` of a plan, or `selected` of a decision (`pearl-rl plan --json`)."""
    try:
        document: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"{file}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise CommandError(f"{file}: is no JSON ({error})") from None
    text = _target_text(document)
    if text is None:
        raise CommandError(f"{file}: holds neither 'target' of a plan nor 'selected' of a decision, like 2P3D")
    try:
        target = Configuration.parse(text)
    except ConfigurationError as error:
        raise CommandError(f"{file}: {error}") from None
    if not target.workers:
        raise CommandError(f"{file}: {text} has no worker, so that nothing would be served")
    return target


def _target_text(document: Any) -> str | None:
    if not isinstance(document, Mapping):
        return None
    for key in ("target", "selected"):
        if isinstance(document.get(key), str):
            return str(document[key])
    inner = document.get("plan") or document.get("decision")
    return _target_text(inner) if inner is not None else None


def prospect(folder: Path, target: Configuration) -> Prospect:
    """The minimal-change plan from a run's table of now to `target` (PEARL section 4.4.2)."""
    from pearl_planner.transition import choose_members, plan_transition
    from pearl_rl.live.table_now import table_now
    from pearl_state.lifecycle import Lifecycle
    from pearl_state.plan import PlanId
    from pearl_state.roles import Role

    table = table_now(folder)
    now = _now_words(table)
    at_hand = [
        row.id
        for row in table.rows.values()
        if row.role is not Role.TRAINING
        and not row.cordoned
        and row.lifecycle in (Lifecycle.ACTIVE, Lifecycle.PENDING_WEIGHTS)
    ]
    if len(at_hand) < target.workers:
        short = f"{target} needs {target.workers} workers, {len(at_hand)} are at hand; a pin keeps its ratio on fewer"
        return Prospect(now, target, None, short)
    try:
        members = choose_members(table, candidates=at_hand, count=target.workers)
        plan = plan_transition(table, members=members, target=target, plan_id=PlanId(0))
    except StateError as error:
        return Prospect(now, target, None, str(error))
    return Prospect(now, target, plan if plan.changes else None)


def _now_words(table: "WorkerTable") -> str:
    prefill, decode, colocated = table.active_roles
    if not prefill and not decode:
        return f"{colocated}C"
    return f"{prefill}P{decode}D" + (f"+{colocated}C" if colocated else "")


def words(found: Prospect) -> list[str]:
    """A prospect for people."""
    if found.reason:
        return [f"{found.now} → {found.target}: {found.reason}"]
    if found.plan is None:
        return [f"{found.now} is there already; nothing would change"]
    plan = found.plan
    lines = [
        f"{found.now} → {found.target}: {_counted(plan.changes, 'change')} in {_counted(len(plan.stages), 'stage')}"
    ]
    for number, stage in enumerate(plan.stages, start=1):
        parts = []
        if stage.leave:
            parts.append(f"workers {_ids(stage.leave)} leave")
        parts += [f"worker {id_} becomes {role}" for id_, role in sorted(stage.switch.items())]
        if stage.park:
            parts.append(f"workers {_ids(stage.park)} wait for their counterpart")
        parts += [f"worker {id_} joins as {role}" for id_, role in sorted(stage.join.items())]
        lines.append(f"stage {number}: {'; '.join(parts)}")
    return lines


def _ids(ids: Any) -> str:
    return ", ".join(str(id_) for id_ in sorted(ids))


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
