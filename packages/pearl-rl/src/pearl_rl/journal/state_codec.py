"""The Elastic Scheduler's state as JSON and back. Settings and policy are not in it: the run's settings give them."""

from collections import Counter
from dataclasses import fields, replace
from typing import Any, Final, get_type_hints

from pearl_planner.elastic import ElasticSettings, ElasticState, RunningPlan
from pearl_planner.policies import Recalling
from pearl_planner.switching import SwitchCosts
from pearl_rl.encoding import decode, encode
from pearl_rl.journal.frames import JournalError
from pearl_state.errors import StateError
from pearl_state.plan import TransitionPlan
from pearl_state.roles import Role, Zone
from pearl_state.worker import WorkerId

_LEFT_OUT: Final = frozenset({"settings", "last_decision"})
"""`last_decision` is for people: nothing is decided by it."""


def encode_state(state: ElasticState) -> dict[str, Any]:
    """A JSON-able form that `decode_state` gives back."""
    encoded = {item.name: encode(getattr(state, item.name)) for item in fields(state) if item.name not in _LEFT_OUT}
    if isinstance(state.settings.policy, Recalling):
        # The one thing in the settings that a run learns.
        encoded["switch_costs"] = encode(state.settings.policy.costs)
    if state.running is not None:
        # A plan's usual JSON is for people.
        plan = state.running.plan
        encoded["running"] = {
            "plan": {item.name: encode(getattr(plan, item.name)) for item in fields(plan)},
            "stage": state.running.stage,
            "overtaken": state.running.overtaken,
            "lost": sorted(state.running.lost),
        }
    return encoded


def decode_state(data: dict[str, Any], settings: ElasticSettings) -> ElasticState:
    """The state that `encode_state` made `data` from. Raises `JournalError` for anything else."""
    try:
        hints = get_type_hints(ElasticState)
        running = data.pop("running", None)
        policy = settings.policy
        if (costs := data.pop("switch_costs", None)) is not None and isinstance(policy, Recalling):
            settings = replace(settings, policy=policy.recalling(decode(SwitchCosts, costs)))
        values = {name: decode(hints[name], value) for name, value in data.items()}
        if running is not None:
            values["running"] = RunningPlan(
                plan=decode(TransitionPlan, running["plan"]),
                stage=int(running["stage"]),
                overtaken=bool(running["overtaken"]),
                lost=frozenset(WorkerId(int(id_)) for id_ in running["lost"]),
            )
        state = ElasticState(settings=settings, **values)
        check_parts(state)
        return state
    except (ValueError, TypeError, LookupError, StateError) as error:
        raise JournalError(f"the snapshot's state cannot be read: {error}") from None


def check_parts(state: ElasticState) -> None:
    """Raise `StateError` or `ValueError` where the parts of a state do not belong together: it may be a stranger's.

    Whatever `step` leads to passes, since a run may be killed, and must go on, after any event.
    """
    state.table.check()
    named = {
        "available": state.available,
        "doomed": state.doomed.keys(),
        "lost": state.lost,
        **{f"group {id_}": group.workers for id_, group in state.groups.items()},
        **{f"removal {id_}": ids for id_, ids in state.removals.items()},
    }
    if state.running is not None:
        # Who failed meanwhile may have given its slot back: the stage goes on without it.
        named["the plan under way"] = state.running.busy - state.running.lost
    rows = state.table.rows
    if min(state.step, state.batch, state.remaining, state.next_plan) < 0 or not state.group_workers > 0:
        raise ValueError("counts are negative, or groups of nobody")
    for what, ids in named.items():
        if unknown := sorted(ids - rows.keys()):
            raise ValueError(f"{what} names worker {unknown[0]}, which has no row")
    if strange := sorted((state.available | state.doomed.keys()) - set(state.table.where(zone=Zone.DEDICATED))):
        raise ValueError(f"worker {strange[0]} is said to come and go, and is in the overlap zone")
    bound = Counter(gpu for row in rows.values() if row.zone is Zone.DEDICATED for gpu in row.gpus)
    bound.update({gpu for row in rows.values() if row.zone is Zone.OVERLAP for gpu in row.gpus})
    # Training and who borrows share GPUs, and only they: neither shares one with its like.
    training = Counter(gpu for id_ in state.table.training() for gpu in rows[id_].gpus)
    borrowers = Counter(
        gpu for row in rows.values() if row.zone is Zone.OVERLAP and row.role is not Role.TRAINING for gpu in row.gpus
    )
    if twice := [gpu for count in (bound, training, borrowers) for gpu, slots in count.items() if slots > 1]:
        raise ValueError(f"GPU {twice[0]} is bound to two slots")
