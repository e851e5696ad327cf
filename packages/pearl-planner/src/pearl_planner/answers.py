"""What executors answer: groups that are prepared, stages that are applied, workers that fail and are cleaned."""

from collections.abc import Iterable
from dataclasses import replace

from pearl_planner.elastic import ElasticState, Group, Step
from pearl_planner.policies import Observing
from pearl_planner.reconcile import begin_stage, rows, wanted, withdraw
from pearl_state import events
from pearl_state.decision import SwitchKind
from pearl_state.effects import CleanWorkers, GroupKind, SyncWeights
from pearl_state.errors import InvariantError
from pearl_state.lifecycle import Lifecycle
from pearl_state.plan import Stage
from pearl_state.roles import Role, Zone
from pearl_state.table import WorkerTable
from pearl_state.worker import WorkerId


def group_prepared(state: ElasticState, event: events.GroupPrepared) -> Step:
    """The whole group is up: its workers stand by for the plan that admits them all at once."""
    group = state.groups.get(event.plan_id)
    if group is None:
        return state, ()
    state = replace(state, groups={id_: g for id_, g in state.groups.items() if id_ != event.plan_id})
    # A worker may have been reported lost while the rest of its group came up.
    lost = group.workers & state.lost
    # A first borrow also starts processes; what recurs is a resume.
    resumed = all(state.table.rows[id_].lifecycle is Lifecycle.RESUMING for id_ in group.workers)
    up = [id_ for id_ in sorted(group.workers - lost) if state.table.rows[id_].lifecycle in _PREPARING]
    table = state.table.move(up, Lifecycle.PENDING_WEIGHTS).move(sorted(lost), Lifecycle.FAILED)
    for id_ in up:
        table = table.report(id_, event.reported[id_])
    if group.kind is GroupKind.BORROW and resumed:
        state = replace(state, toggle_costs=state.toggle_costs.observe_activation(event.duration_s))
    if group.kind is GroupKind.EXPANSION and state.smaller_groups is not None:
        grown = state.smaller_groups + 1
        state = replace(state, smaller_groups=grown if grown < state.settings.expansion_workers else None)
    state = replace(state, table=table, lost=state.lost - lost)
    return state, (CleanWorkers(workers=rows(state, tuple(sorted(lost)))),) if lost else ()


_PREPARING = (Lifecycle.STARTING, Lifecycle.RESUMING)


def group_failed(state: ElasticState, event: events.GroupFailed) -> Step:
    """All or nothing: nothing of the group is left. Those at fault use their restart budget up."""
    group = state.groups.get(event.plan_id)
    if group is None:
        return state, ()
    state = replace(state, groups={id_: g for id_, g in state.groups.items() if id_ != event.plan_id})
    table = state.table
    for id_ in sorted(group.workers):
        before = table.rows[id_].lifecycle
        if before not in _PREPARING:
            continue
        if id_ in event.failed:
            table = table.move([id_], Lifecycle.FAILED).move([id_], Lifecycle.VACANT)
        elif before is Lifecycle.RESUMING:
            table = table.move([id_], Lifecycle.RELEASED)
        else:
            table = table.move([id_], Lifecycle.VACANT)
    state = replace(state, table=table, lost=state.lost - group.workers)
    if group.kind is GroupKind.BORROW and not group.cancelled:
        state = replace(state, lend_refused=True)
    if group.kind is GroupKind.EXPANSION and event.failed:
        state = replace(state, smaller_groups=_smaller(state, len(group.workers)))
    return retire_spent(state, group), ()


def _smaller(state: ElasticState, size: int) -> int | None:
    """Half of a group that failed, where it was about as large as groups are: a smaller one says nothing of those."""
    if 2 * size <= state.group_workers:
        return state.smaller_groups
    return min(state.group_workers, max(1, size // 2))


def retire_spent(state: ElasticState, group: Group) -> ElasticState:
    """Retire vacant slots that failed too often."""
    table = state.table
    for id_ in sorted(group.workers):
        row = table.rows[id_]
        if row.lifecycle is Lifecycle.VACANT and row.failures > state.settings.max_restarts and _spare(state, table):
            table = table.move([id_], Lifecycle.RETIRED)
    return replace(state, table=table)


def _spare(state: ElasticState, table: WorkerTable) -> bool:
    """Whether one slot less still leaves `min_healthy`."""
    usable = sum(table.rows[id_].lifecycle is not Lifecycle.RETIRED for id_ in table.rollout())
    return usable > state.settings.min_healthy


def stage_applied(state: ElasticState, event: events.StageApplied) -> Step:
    """Settle everybody the stage named; then admit, go on with the plan, or plan anew."""
    if event.plan_id in state.removals:
        ids = state.removals[event.plan_id]
        state = replace(state, removals={id_: w for id_, w in state.removals.items() if id_ != event.plan_id})
        overlap = any(state.table.rows[id_].zone is Zone.OVERLAP for id_ in ids)
        state, effects = _settle_leavers(state, ids, event)
        if overlap and not event.failed:
            state = replace(state, toggle_costs=state.toggle_costs.observe_deactivation(event.duration_s))
        return state, effects
    running = state.running
    if running is None or running.plan.id != event.plan_id or running.stage != event.stage:
        return state, ()
    stage = running.plan.stages[running.stage]
    state = _learn(state, stage, event)
    state, effects = _settle_leavers(state, stage.leave - running.lost, event)
    state, more = _settle_survivors(state, event)
    state, admitted = _admit(state)
    effects = (*effects, *more, *(_catch_up(state, stage.admit) if admitted else ()))
    last = running.stage + 1 == len(running.plan.stages)
    if last or not admitted or event.failed or running.overtaken:
        return replace(state, running=None), effects
    state = replace(state, running=replace(running, stage=running.stage + 1, lost=frozenset()))
    state, begun = begin_stage(state)
    return state, (*effects, *begun)


def _learn(state: ElasticState, stage: Stage, event: events.StageApplied) -> ElasticState:
    """Tell a policy that wants to know how long a stage of this kind took."""
    policy = state.settings.policy
    if event.failed or not event.duration_s or not isinstance(policy, Observing):
        return state
    rows = state.table.rows
    turned = [(rows[id_].role, role) for id_, role in stage.switch.items() if id_ in rows]
    if any(Role.COLOCATED in pair for pair in turned):
        kind = SwitchKind.RELAUNCH
    elif turned:
        kind = SwitchKind.FLIP
    elif stage.join:
        kind = SwitchKind.NEW_WORKERS
    else:
        return state
    return replace(state, settings=replace(state.settings, policy=policy.observing(kind, event.duration_s)))


def _settle_leavers(state: ElasticState, ids: Iterable[WorkerId], event: events.StageApplied) -> Step:
    """Workers that left are gone (dedicated) or parked (overlap); those that failed to are killed."""
    table = state.table
    broken = []
    for id_ in sorted(ids):
        row = table.rows[id_]
        if row.lifecycle is not Lifecycle.DRAINING:
            continue
        if id_ in event.left:
            table = table.move([id_], Lifecycle.RELEASED if row.zone is Zone.OVERLAP else Lifecycle.VACANT)
        else:
            table = table.move([id_], Lifecycle.FAILED)
            broken.append(id_)
    state = replace(state, table=table)
    return state, (CleanWorkers(workers=rows(state, tuple(broken))),) if broken else ()


def _settle_survivors(state: ElasticState, event: events.StageApplied) -> Step:
    """Switched and joining workers stand by with the version that they report; those that failed are killed."""
    running = state.running
    assert running is not None
    stage = running.plan.stages[running.stage]
    table = state.table
    roles = {**stage.switch, **stage.join}
    broken = []
    for id_ in sorted(stage.admit - running.lost):
        row = table.rows[id_]
        if row.lifecycle not in (Lifecycle.DRAINING, Lifecycle.PENDING_WEIGHTS):
            continue
        if id_ in event.failed or id_ not in event.reported:
            table = table.move([id_], Lifecycle.FAILED)
            broken.append(id_)
            continue
        if row.lifecycle is Lifecycle.DRAINING:
            if id_ in roles and row.role is not roles[id_]:
                table = table.move([id_], Lifecycle.SWITCHING).set_roles({id_: roles[id_]})
            table = table.move([id_], Lifecycle.PENDING_WEIGHTS)
        table = table.report(id_, max(event.reported[id_], table.rows[id_].weight_version or 0))
    state = replace(state, table=table)
    return state, (CleanWorkers(workers=rows(state, tuple(broken))),) if broken else ()


def _admit(state: ElasticState) -> tuple[ElasticState, bool]:
    """Admit the stage's workers, all at once, if all of them may serve; tells whether they do."""
    running = state.running
    assert running is not None
    ids = sorted(running.plan.stages[running.stage].admit)
    table, want = state.table, wanted(state)
    ready = running.lost.isdisjoint(ids) and all(
        table.rows[id_].lifecycle is Lifecycle.PENDING_WEIGHTS
        and table.up_to_date(table.rows[id_].weight_version)
        and id_ in want
        for id_ in ids
    )
    if not ready:
        return state, False
    try:
        return replace(state, table=table.move(ids, Lifecycle.ACTIVE)), True
    except InvariantError:
        # Someone else of the pair was lost meanwhile: they stand by, and the next plan takes them in.
        return state, False


def _catch_up(state: ElasticState, admitted: frozenset[WorkerId]) -> tuple[SyncWeights, ...]:
    """Bring those just admitted to what was published while they loaded, beside all others who serve."""
    table = state.table
    behind = tuple(row for row in rows(state, admitted) if row.weight_version != table.target_version)
    return (SyncWeights(workers=behind, version=table.target_version),) if behind else ()


def worker_failed(state: ElasticState, event: events.WorkerFailed) -> Step:
    """A crash outside a plan: out of routing at once, then killed for certain."""
    row = state.table.rows.get(event.worker)
    if row is None or row.incarnation != event.incarnation or row.role is Role.TRAINING:
        return state, ()
    if row.lifecycle in (Lifecycle.VACANT, Lifecycle.FAILED, Lifecycle.RETIRED):
        return state, ()
    if row.lifecycle in _PREPARING:
        # Its group fails with it; where the group was just declared ready, its answer finds the loss noted here.
        return replace(state, lost=state.lost | {event.worker}), ()
    if any(event.worker in ids for ids in state.removals.values()):
        # The executor that removes it sees the same failure and answers for it.
        return state, ()
    if row.lifecycle is Lifecycle.RELEASED:
        # It held nothing of the GPU, which may be training's now: there is nothing to free, only to reap.
        gone = replace(row, lifecycle=Lifecycle.VACANT, weight_version=None, failures=row.failures + 1)
        return replace(state, table=state.table.update([gone])), (CleanWorkers(workers=(row,)),)
    state = replace(state, table=withdraw(state.table, frozenset({event.worker}), Lifecycle.FAILED))
    if state.running is not None:
        lost = state.running.lost | {event.worker}
        state = replace(state, running=replace(state.running, overtaken=True, lost=lost))
    return state, (CleanWorkers(workers=rows(state, (event.worker,))),)


def cleaned(state: ElasticState, event: events.WorkersCleaned) -> Step:
    """The processes are gone for certain: their slots may start again, or retire after too many failures."""
    table = state.table
    for id_, incarnation in sorted(event.workers.items()):
        row = table.rows.get(id_)
        if row is None or row.incarnation != incarnation or row.lifecycle is not Lifecycle.FAILED:
            continue
        spent = row.failures > state.settings.max_restarts
        table = table.move([id_], Lifecycle.VACANT)
        if spent and _spare(state, table):
            table = table.move([id_], Lifecycle.RETIRED)
    return replace(state, table=table), ()
