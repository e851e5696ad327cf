"""Minimal-change plans of PEARL section 4.4.2 (eqs. 5 and 6), and which workers they change.

Who joins and who leaves is fixed by the target membership. Of the survivors each role keeps as many as it can; the
excess changes role: workers whose reclaim is announced last of all, and the cheapest to interrupt first.
`stages` puts the changes in order.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pearl_planner.stages import StageBuilder, verify_plan
from pearl_state.configuration import Configuration
from pearl_state.errors import StateError
from pearl_state.lifecycle import Lifecycle
from pearl_state.plan import PlanId, TransitionPlan
from pearl_state.roles import ROLLOUT_ROLES, Role, Tenure, Zone
from pearl_state.table import WorkerTable
from pearl_state.worker import Worker, WorkerId

__all__ = ["PlanError", "WorkerCosts", "choose_members", "plan_transition", "verify_plan"]

_NO_ROLES: Mapping[WorkerId, Role] = {}


class PlanError(StateError, ValueError):
    """A target that the named members cannot reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCosts:
    """What it costs to take a worker out of service for a moment; workers that are not named cost nothing."""

    load: Mapping[WorkerId, float] = field(default_factory=dict[WorkerId, float])
    """Requests that it holds (each is interrupted and resumed)."""
    cached_tokens: Mapping[WorkerId, float] = field(default_factory=dict[WorkerId, float])
    """Prefix tokens that it keeps and would have to be prefilled again."""
    request_s: float = 1.0
    """Seconds lost per interrupted request."""
    cached_token_s: float = 2e-5
    """Seconds of prefill per lost token (t_prefill)."""


_FAR = 1e12
"""Beyond any time on a run's clock, seconds."""


class _Order:
    """The order in which workers of a table are taken: who stays longest first, then by cost, then by slot."""

    def __init__(self, table: WorkerTable, ids: Iterable[WorkerId], costs: WorkerCosts) -> None:
        rows = table.rows
        workers = [rows[id_] for id_ in ids]
        self._price: dict[WorkerId, float] = {}
        self._hurry: dict[WorkerId, float] = {}
        if costs.load or costs.cached_tokens:
            load, cached = costs.load.get, costs.cached_tokens.get
            request_s, token_s = costs.request_s, costs.cached_token_s
            self._price = {row.id: load(row.id, 0.0) * request_s + cached(row.id, 0.0) * token_s for row in workers}
        # A glance first: most clusters have nobody in a hurry, and ten thousand rows take time.
        preemptible, overlap = Tenure.PREEMPTIBLE, Zone.OVERLAP
        if [1 for r in workers if r.tenure is preemptible or r.zone is overlap or r.reclaim_at_s is not None]:
            self._hurry = {row.id: _hurry(row) for row in workers}

    def __call__(self, ids: Iterable[WorkerId], *, cheapest: bool = True) -> list[WorkerId]:
        """`ids` in order; the dearest to interrupt come first where `cheapest` is false."""
        found = sorted(ids)
        if self._price:
            found.sort(key=self._price.__getitem__, reverse=not cheapest)
        if self._hurry:
            found.sort(key=self._hurry.__getitem__)
        return found


def _hurry(row: Worker) -> float:
    """0 for who stays, 1 for who may have to go, 2 for who goes with the next training step, and more the sooner an
    announced reclaim comes.
    """
    if row.reclaim_at_s is not None:
        return _FAR - row.reclaim_at_s
    if row.zone is Zone.OVERLAP:
        return 2.0
    return 1.0 if row.tenure is Tenure.PREEMPTIBLE else 0.0


def choose_members(
    table: WorkerTable,
    *,
    candidates: Iterable[WorkerId],
    count: int,
    costs: WorkerCosts = WorkerCosts(),
) -> frozenset[WorkerId]:
    """The `count` of `candidates` to keep or admit: who is reclaimed soonest goes, then who costs least to interrupt.

    Raises `PlanError` where there are fewer candidates than `count`.
    """
    ids = list(candidates)
    if len(ids) < count:
        raise PlanError(f"{count} workers wanted, {len(ids)} at hand")
    return frozenset(_Order(table, ids, costs)(ids, cheapest=False)[:count])


def plan_transition(
    table: WorkerTable,
    *,
    members: Iterable[WorkerId],
    target: Configuration,
    plan_id: PlanId,
    costs: WorkerCosts = WorkerCosts(),
    prepared: Mapping[WorkerId, Role] = _NO_ROLES,
    mandatory: bool = False,
    deadline_s: float | None = None,
) -> TransitionPlan:
    """The plan with the fewest changes, D_worker + D_role, that leads from the active workers to `target`.

    `members` = W′ shall be active at the end: survivors (ACTIVE) and prepared workers (PENDING_WEIGHTS), as many as
    `target` has workers. `prepared` names the role in which a worker was prepared; default is the role of its row.
    A worker joins in that role where it is wanted. Raises `PlanError` for members that do not fit.
    """
    chosen = frozenset(members)
    _check_members(table, chosen, target)
    active = table.active()
    leave = frozenset(active) - chosen
    survivors = [id_ for id_ in active if id_ in chosen]
    joining = sorted(chosen.difference(active))
    reassign, add = _assign(table, survivors, joining, target, costs, prepared)
    builder = StageBuilder(table, target, leave=leave, survivors=survivors, reassign=reassign, add=add)
    return TransitionPlan(
        id=plan_id,
        target=target,
        add=add,
        remove=leave,
        reassign=reassign,
        stages=builder.build(),
        mandatory=mandatory,
        deadline_s=deadline_s,
    )


def _check_members(table: WorkerTable, members: frozenset[WorkerId], target: Configuration) -> None:
    if len(members) != target.workers:
        raise PlanError(f"{target} needs {target.workers} workers, {len(members)} are named as members")
    for id_ in members:
        row = table.rows.get(id_)
        if row is None:
            raise PlanError(f"member {id_} is no worker of the table")
        state = row.lifecycle
        if row.role is Role.TRAINING or (state is not Lifecycle.ACTIVE and state is not Lifecycle.PENDING_WEIGHTS):
            raise PlanError(
                f"member {id_} is a {row.role} worker and {state}: must be an active or prepared rollout worker"
            )


def _assign(
    table: WorkerTable,
    survivors: list[WorkerId],
    joining: list[WorkerId],
    target: Configuration,
    costs: WorkerCosts,
    prepared: Mapping[WorkerId, Role],
) -> tuple[dict[WorkerId, Role], dict[WorkerId, Role]]:
    """ρ and the roles of W_add: everybody keeps or gets the role it has, as far as the target allows."""
    rows = table.rows
    order = _Order(table, [*survivors, *joining], costs)
    lacking: dict[Role, int] = {}
    movers: list[WorkerId] = []
    for role in ROLLOUT_ROLES:
        holders = [id_ for id_ in survivors if rows[id_].role is role]
        excess = len(holders) - target.count(role)
        lacking[role] = max(0, -excess)
        if excess > 0:
            movers += order(holders)[:excess]
    add: dict[WorkerId, Role] = {}
    others: list[WorkerId] = []
    for id_ in order(joining):
        role = prepared.get(id_, rows[id_].role)
        if lacking.get(role, 0) > 0:
            add[id_] = role
            lacking[role] -= 1
        else:
            others.append(id_)
    # Who stays longest takes the scarcer role: a pool of few is hurt most by a loss.
    scarce = sorted((role for role in ROLLOUT_ROLES if lacking[role]), key=target.count)
    open_roles = [role for role in scarce for _ in range(lacking[role])]
    fill = order([*movers, *others])
    roles = dict(zip(fill, open_roles, strict=True))
    add.update((id_, roles.pop(id_)) for id_ in others)
    return roles, add
