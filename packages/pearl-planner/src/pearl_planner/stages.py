"""The order in which a plan's changes are carried out, so that something serves at every instant.

Those who leave go first, prepared workers join next, and role changes follow in waves that withdraw at most about half
of the pool. After every withdrawal and every admission prefill and decode workers are paired; colocated ones may serve
beside a pair until the plan is done.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from pearl_state.configuration import Configuration
from pearl_state.errors import InvariantError
from pearl_state.plan import Stage, TransitionPlan
from pearl_state.roles import ROLLOUT_ROLES, Role
from pearl_state.table import WorkerTable
from pearl_state.worker import WorkerId

_NO_ROLES: Mapping[WorkerId, Role] = {}


@dataclass(frozen=True, slots=True)
class _Serving:
    """How many workers of each role serve."""

    prefill: int
    decode: int
    colocated: int

    @property
    def paired(self) -> bool:
        """Whether prefill workers serve if and only if decode workers do."""
        return bool(self.prefill) is bool(self.decode)

    @property
    def workers(self) -> int:
        return self.prefill + self.decode + self.colocated

    def changed(self, minus: Collection[Role] = (), plus: Collection[Role] = ()) -> "_Serving":
        """After workers of the roles `minus` were withdrawn and those of `plus` admitted."""
        lost, won = list(minus), list(plus)
        return _Serving(
            self.prefill - lost.count(Role.PREFILL) + won.count(Role.PREFILL),
            self.decode - lost.count(Role.DECODE) + won.count(Role.DECODE),
            self.colocated - lost.count(Role.COLOCATED) + won.count(Role.COLOCATED),
        )


class StageBuilder:
    """Puts (W_add, W_remove, ρ) in order."""

    def __init__(
        self,
        table: WorkerTable,
        target: Configuration,
        *,
        leave: frozenset[WorkerId],
        survivors: Collection[WorkerId],
        reassign: Mapping[WorkerId, Role],
        add: Mapping[WorkerId, Role],
    ) -> None:
        self._rows = table.rows
        self._target = target
        self._leave = leave
        self._survivors = survivors
        self._pending = dict(reassign)
        self._add = dict(add)
        self._serving = _Serving(*table.active_roles)
        self._stages: list[Stage] = []

    def build(self) -> tuple[Stage, ...]:
        """All stages, in order."""
        if self._leave:
            self._depart()
        if self._add and self._serving.changed(plus=self._add.values()).paired:
            self._emit(join=self._take_joiners())
        while self._pending:
            wave = self._wave()
            alone = not self._add or self._serving.changed(self._roles(wave), wave.values()).paired
            self._emit(switch=wave, join={} if alone else self._take_joiners())
        if self._add:
            self._emit(join=self._take_joiners())
        return tuple(self._stages)

    def _roles(self, ids: Iterable[WorkerId]) -> list[Role]:
        rows = self._rows
        return [rows[id_].role for id_ in ids]

    def _take_joiners(self) -> dict[WorkerId, Role]:
        taken, self._add = self._add, {}
        return taken

    def _emit(
        self,
        *,
        leave: frozenset[WorkerId] = frozenset(),
        switch: Mapping[WorkerId, Role] = _NO_ROLES,
        park: frozenset[WorkerId] = frozenset(),
        join: Mapping[WorkerId, Role] = _NO_ROLES,
    ) -> None:
        """Append a stage and account for it."""
        lost = [*self._roles(leave), *self._roles(switch)]
        self._serving = self._serving.changed(lost, [*switch.values(), *join.values()])
        for id_ in switch:
            del self._pending[id_]
        self._stages.append(Stage(leave=leave, switch=switch, park=park, join=join))

    def _depart(self) -> None:
        """The stage in which W_remove leaves; whoever loses its counterpart by that leaves routing with it."""
        left = self._serving.changed(self._roles(self._leave))
        if left.paired:
            self._emit(leave=self._leave)
            return
        stranded = [id_ for id_ in self._survivors if self._rows[id_].role is not Role.COLOCATED]
        switch = {id_: self._pending[id_] for id_ in stranded if id_ in self._pending}
        park = frozenset(id_ for id_ in stranded if id_ not in switch)
        after = left.changed(self._roles(switch), switch.values())
        join: dict[WorkerId, Role] = {}
        if not after.paired:
            # Only prepared or colocated workers can bring the missing role: they come in with this stage.
            missing = Role.DECODE if after.prefill else Role.PREFILL
            if missing in self._add.values():
                join = self._take_joiners()
            else:
                switch[next(id_ for id_, role in self._pending.items() if role is missing)] = missing
        self._emit(leave=self._leave, switch=switch, park=park, join=join)

    def _wave(self) -> dict[WorkerId, Role]:
        """The next role changes: about half of what serves at most, and never one role of a pair alone."""
        pending = self._pending
        size = max(1, -(-self._serving.workers // 2))
        if len(pending) <= size:
            return dict(pending)
        if self._target.colocated:
            rows = self._rows
            by_role = [[id_ for id_ in pending if rows[id_].role is role] for role in (Role.PREFILL, Role.DECODE)]
            ids = _out_of_pair(by_role[0], by_role[1], size)
        else:
            by_role = [[id_ for id_, to in pending.items() if to is role] for role in (Role.PREFILL, Role.DECODE)]
            ids = _into_pair([ids for ids in by_role if ids], size)
        return {id_: pending[id_] for id_ in ids}


def _out_of_pair(prefill: list[WorkerId], decode: list[WorkerId], size: int) -> list[WorkerId]:
    """Towards colocation: part of both roles, at least one of each stays until the last wave."""
    both = len(prefill) + len(decode)
    if both <= 2:
        return prefill + decode
    size = min(size, both - 2)
    take = min(len(prefill) - 1, round(size * len(prefill) / both))
    take = max(take, size - (len(decode) - 1))
    return prefill[:take] + decode[: size - take]


def _into_pair(by_role: list[list[WorkerId]], size: int) -> list[WorkerId]:
    """Towards disaggregation: in the proportion of what is still to come, at least one of each role."""
    if len(by_role) == 1:
        return by_role[0][:size]
    prefill, decode = by_role
    size = max(size, 2)
    take = min(len(prefill), size - 1, max(1, round(size * len(prefill) / (len(prefill) + len(decode)))))
    return prefill[:take] + decode[: size - take]


def verify_plan(table: WorkerTable, plan: TransitionPlan) -> None:
    """Walk through `plan` on the roles of the active workers; raise `InvariantError` where an instant breaks a rule.

    Checked: prefill and decode are paired after each withdrawal and each admission; nobody is withdrawn who does not
    serve, or admitted who does; the change sets are those of the stages; the end is the plan's target.
    """
    serving = {id_: table.rows[id_].role for id_ in table.active()}
    add: dict[WorkerId, Role] = {}
    switched: dict[WorkerId, Role] = {}
    gone: set[WorkerId] = set()
    for i, stage in enumerate(plan.stages):
        parked = {id_: serving[id_] for id_ in stage.park if id_ in serving}
        for id_ in stage.withdraw:
            if serving.pop(id_, None) is None:
                raise InvariantError("plan_consistent", f"stage {i} withdraws {id_}, which does not serve")
        _check_paired(serving, f"after the withdrawal of stage {i}")
        for id_, role in {**stage.switch, **stage.join, **parked}.items():
            if id_ in serving:
                raise InvariantError("plan_consistent", f"stage {i} admits {id_}, which serves already")
            serving[id_] = role
        _check_paired(serving, f"after the admission of stage {i}")
        add |= stage.join
        switched |= stage.switch
        gone |= stage.leave
    if add != dict(plan.add) or switched != dict(plan.reassign) or gone != plan.remove:
        raise InvariantError("plan_consistent", "the stages do not add up to (W_add, W_remove, rho)")
    reached = Configuration(*_tally(serving))
    if reached != plan.target:
        raise InvariantError("plan_consistent", f"the plan ends at {reached}, not at {plan.target}")


def _tally(serving: Mapping[WorkerId, Role]) -> list[int]:
    roles = list(serving.values())
    return [roles.count(role) for role in ROLLOUT_ROLES]


def _check_paired(serving: Mapping[WorkerId, Role], when: str) -> None:
    prefill, decode, _ = _tally(serving)
    if bool(prefill) is not bool(decode):
        raise InvariantError("paired_roles", f"{prefill} prefill with {decode} decode workers {when}")
