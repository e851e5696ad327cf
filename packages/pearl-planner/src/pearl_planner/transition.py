"""Minimal-change plans of PEARL section 4.4.2 (eqs. 5 and 6), in an order that serves at every instant.

Who joins and who leaves is fixed by the target membership. Of the survivors each role keeps as many as it can; the
excess changes role, cheapest workers first. The changes are then put into stages: those who leave go first, prepared
workers join next, and role changes follow in waves that withdraw at most about half of the pool. After every withdrawal
and every admission prefill and decode workers are paired; colocated ones may serve beside a pair until the plan is
done.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pearl_state.configuration import Configuration
from pearl_state.errors import InvariantError, StateError
from pearl_state.lifecycle import Lifecycle
from pearl_state.plan import PlanId, Stage, TransitionPlan
from pearl_state.roles import ROLLOUT_ROLES, Role, Tenure
from pearl_state.table import WorkerTable
from pearl_state.worker import Worker, WorkerId

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

    def of(self, worker: WorkerId) -> float:
        """Seconds of work lost when `worker` is interrupted and loses its cache."""
        return self.load.get(worker, 0.0) * self.request_s + self.cached_tokens.get(worker, 0.0) * self.cached_token_s


def _leaves_soon(row: Worker) -> tuple[bool, float, bool]:
    """Sort key: workers that stay longest first (no announced reclaim, reserved before preemptible)."""
    announced = row.reclaim_at_s is not None
    return announced, -row.reclaim_at_s if row.reclaim_at_s is not None else 0.0, row.tenure is Tenure.PREEMPTIBLE


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
    ids.sort(key=lambda id_: (*_leaves_soon(table.rows[id_]), -costs.of(id_), id_))
    return frozenset(ids[:count])


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
    leave = frozenset(id_ for id_ in active if id_ not in chosen)
    survivors = [id_ for id_ in active if id_ in chosen]
    still = frozenset(survivors)
    joining = sorted(id_ for id_ in chosen if id_ not in still)
    reassign, add = _assign(table, survivors, joining, target, costs, prepared)
    stages = _Stages(table, target, leave, survivors, reassign, add, costs).build()
    return TransitionPlan(
        id=plan_id,
        target=target,
        add=add,
        remove=leave,
        reassign=reassign,
        stages=stages,
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
        if row.role is Role.TRAINING or row.lifecycle not in (Lifecycle.ACTIVE, Lifecycle.PENDING_WEIGHTS):
            raise PlanError(
                f"member {id_} is a {row.role} worker and {row.lifecycle}: must be an active or prepared rollout worker"
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
    holders: dict[Role, list[WorkerId]] = {role: [] for role in ROLLOUT_ROLES}
    for id_ in survivors:
        holders[rows[id_].role].append(id_)
    lacking: dict[Role, int] = {}
    movers: list[WorkerId] = []
    for role, ids in holders.items():
        excess = len(ids) - target.count(role)
        lacking[role] = max(0, -excess)
        if excess > 0:
            ids.sort(key=lambda id_: (costs.of(id_), id_))
            movers += ids[:excess]
    add: dict[WorkerId, Role] = {}
    others: list[WorkerId] = []
    # Who stays longest takes the scarcer role: a pool of few is hurt most by a loss.
    for id_ in sorted(joining, key=lambda id_: (*_leaves_soon(rows[id_]), id_)):
        role = prepared.get(id_, rows[id_].role)
        if lacking.get(role, 0) > 0:
            add[id_] = role
            lacking[role] -= 1
        else:
            others.append(id_)
    scarce = sorted((role for role in ROLLOUT_ROLES if lacking[role]), key=lambda role: (target.count(role), role))
    open_roles = [role for role in scarce for _ in range(lacking[role])]
    movers.sort(key=lambda id_: (*_leaves_soon(rows[id_]), costs.of(id_), id_))
    fill = [*movers, *others]
    fill.sort(key=lambda id_: _leaves_soon(rows[id_]))
    roles = dict(zip(fill, open_roles, strict=True))
    add.update((id_, roles[id_]) for id_ in others)
    return {id_: roles[id_] for id_ in movers}, add


class _Stages:
    """Puts the changes of a plan in order, on counts of active roles."""

    def __init__(
        self,
        table: WorkerTable,
        target: Configuration,
        leave: frozenset[WorkerId],
        survivors: list[WorkerId],
        reassign: Mapping[WorkerId, Role],
        add: Mapping[WorkerId, Role],
        costs: WorkerCosts,
    ) -> None:
        self._rows = table.rows
        self._target = target
        self._leave = leave
        self._survivors = survivors
        self._add = dict(add)
        self._pending = dict(reassign)
        self._costs = costs
        self._count = dict(zip((Role.PREFILL, Role.DECODE, Role.COLOCATED), table.active_roles, strict=True))
        self._stages: list[Stage] = []

    def build(self) -> tuple[Stage, ...]:
        """All stages, in order."""
        if self._leave:
            self._depart()
        if self._add and self._paired_after(self._add.values()):
            self._emit(join=self._take_joiners())
        while self._pending:
            wave = self._wave()
            join = {}
            if self._add and not self._paired_without_joiners(wave):
                join = self._take_joiners()
            self._emit(switch=wave, join=join)
        if self._add:
            self._emit(join=self._take_joiners())
        return tuple(self._stages)

    def _take_joiners(self) -> dict[WorkerId, Role]:
        taken, self._add = self._add, {}
        return taken

    def _paired_after(self, roles: Iterable[Role]) -> bool:
        count = dict(self._count)
        for role in roles:
            count[role] += 1
        return bool(count[Role.PREFILL]) is bool(count[Role.DECODE])

    def _paired_without_joiners(self, wave: Mapping[WorkerId, Role]) -> bool:
        count = dict(self._count)
        for id_, role in wave.items():
            count[self._rows[id_].role] -= 1
            count[role] += 1
        return bool(count[Role.PREFILL]) is bool(count[Role.DECODE])

    def _emit(
        self,
        *,
        leave: frozenset[WorkerId] = frozenset(),
        switch: Mapping[WorkerId, Role] = _NO_ROLES,
        park: frozenset[WorkerId] = frozenset(),
        join: Mapping[WorkerId, Role] = _NO_ROLES,
    ) -> None:
        """Append a stage and account for it."""
        for id_ in leave:
            self._count[self._rows[id_].role] -= 1
        for id_, role in switch.items():
            self._count[self._rows[id_].role] -= 1
            self._count[role] += 1
            del self._pending[id_]
        for role in join.values():
            self._count[role] += 1
        self._stages.append(Stage(leave=leave, switch=dict(switch), park=park, join=dict(join)))

    def _depart(self) -> None:
        """The stage in which W_remove leaves; whoever loses its counterpart by that leaves routing with it."""
        left = dict(self._count)
        for id_ in self._leave:
            left[self._rows[id_].role] -= 1
        if bool(left[Role.PREFILL]) is bool(left[Role.DECODE]):
            self._emit(leave=self._leave)
            return
        stranded = [id_ for id_ in self._survivors if self._rows[id_].role in (Role.PREFILL, Role.DECODE)]
        switch = {id_: self._pending[id_] for id_ in stranded if id_ in self._pending}
        park = frozenset(id_ for id_ in stranded if id_ not in switch)
        after = {role: left[role] for role in ROLLOUT_ROLES}
        for id_, role in switch.items():
            after[self._rows[id_].role] -= 1
            after[role] += 1
        join: dict[WorkerId, Role] = {}
        if bool(after[Role.PREFILL]) is not bool(after[Role.DECODE]):
            # Only prepared or colocated workers can bring the missing role: they come in with this stage.
            missing = Role.PREFILL if not after[Role.PREFILL] else Role.DECODE
            if missing in self._add.values():
                join = self._take_joiners()
            else:
                found = [id_ for id_, role in self._pending.items() if role is missing and id_ not in switch]
                switch[found[0]] = missing
        self._emit(leave=self._leave, switch=switch, park=park, join=join)

    def _wave(self) -> dict[WorkerId, Role]:
        """The next role changes: about half of what serves at most, and never one role of a pair alone."""
        serving = sum(self._count.values())
        size = max(1, -(-serving // 2))
        if len(self._pending) <= size:
            return dict(self._pending)
        into = [role for role in ROLLOUT_ROLES if role in set(self._pending.values())]
        if self._target.colocated or not into:
            return self._out_of_pair(size)
        return self._into_pair(size, into)

    def _out_of_pair(self, size: int) -> dict[WorkerId, Role]:
        """Towards colocation: part of both roles, at least one of each stays until the last wave."""
        by_role: dict[Role, list[WorkerId]] = {Role.PREFILL: [], Role.DECODE: []}
        for id_ in self._pending:
            by_role[self._rows[id_].role].append(id_)
        prefill, decode = len(by_role[Role.PREFILL]), len(by_role[Role.DECODE])
        if prefill + decode <= 2:
            return dict(self._pending)
        size = min(size, prefill + decode - 2)
        take = min(prefill - 1, round(size * prefill / (prefill + decode)))
        take = max(take, size - (decode - 1))
        ids = by_role[Role.PREFILL][:take] + by_role[Role.DECODE][: size - take]
        return {id_: self._pending[id_] for id_ in ids}

    def _into_pair(self, size: int, into: list[Role]) -> dict[WorkerId, Role]:
        """Towards disaggregation: in the proportion of what is still to come, at least one of each role."""
        size = max(size, len(into))
        by_role: dict[Role, list[WorkerId]] = {role: [] for role in into}
        for id_, role in self._pending.items():
            by_role[role].append(id_)
        ids: list[WorkerId] = []
        rest = size
        for i, role in enumerate(into):
            later = len(into) - 1 - i
            share = max(1, round(size * len(by_role[role]) / len(self._pending)))
            take = min(len(by_role[role]), rest - later, share) if later else min(len(by_role[role]), rest)
            ids += by_role[role][:take]
            rest -= take
        return {id_: self._pending[id_] for id_ in ids}


def verify_plan(table: WorkerTable, plan: TransitionPlan) -> None:
    """Walk through `plan` on the roles of the active workers; raise `InvariantError` where an instant breaks a rule.

    Checked: prefill and decode are paired after each withdrawal and each admission; nobody is withdrawn who does not
    serve, or admitted who does; the change sets are those of the stages; the end is the plan's target.
    """
    serving = {id_: table.rows[id_].role for id_ in table.active()}
    count = dict.fromkeys(ROLLOUT_ROLES, 0)
    for role in serving.values():
        count[role] += 1
    add: dict[WorkerId, Role] = {}
    switched: dict[WorkerId, Role] = {}
    gone: set[WorkerId] = set()
    for i, stage in enumerate(plan.stages):
        parked = {id_: serving[id_] for id_ in stage.park if id_ in serving}
        for id_ in stage.withdraw:
            if id_ not in serving:
                raise InvariantError("plan_consistent", f"stage {i} withdraws {id_}, which does not serve")
            count[serving.pop(id_)] -= 1
        _check_paired(count, f"after the withdrawal of stage {i}")
        for id_, role in {**stage.switch, **stage.join, **parked}.items():
            if id_ in serving:
                raise InvariantError("plan_consistent", f"stage {i} admits {id_}, which serves already")
            serving[id_] = role
            count[role] += 1
        _check_paired(count, f"after the admission of stage {i}")
        add |= stage.join
        switched |= stage.switch
        gone |= stage.leave
    if add != dict(plan.add) or switched != dict(plan.reassign) or gone != plan.remove:
        raise InvariantError("plan_consistent", "the stages do not add up to (W_add, W_remove, rho)")
    reached = Configuration(count[Role.PREFILL], count[Role.DECODE], count[Role.COLOCATED])
    if reached != plan.target:
        raise InvariantError("plan_consistent", f"the plan ends at {reached}, not at {plan.target}")


def _check_paired(count: Mapping[Role, int], when: str) -> None:
    if bool(count[Role.PREFILL]) is not bool(count[Role.DECODE]):
        raise InvariantError(
            "paired_roles", f"{count[Role.PREFILL]} prefill with {count[Role.DECODE]} decode workers {when}"
        )
