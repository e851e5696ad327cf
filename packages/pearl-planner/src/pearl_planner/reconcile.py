"""From where the cluster is towards where it should be: lend, expand, remove, and re-plan.

Level-triggered: each function looks at the whole state, not at the event that led to it, so that answers and signals
may come in any order. Each returns the next state and the effects that the shell must carry out.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from pearl_planner.decide import STEPS_AHEAD, scaled
from pearl_planner.elastic import Borrowing, ElasticState, Group, RunningPlan, Step
from pearl_planner.gate import NOBODY_S, borrow_gate
from pearl_planner.readiness import lends
from pearl_planner.transition import WorkerCosts, plan_transition
from pearl_state.configuration import Configuration
from pearl_state.decision import Decision
from pearl_state.effects import ApplyStage, Effect, GroupKind, PrepareGroup, RecordDecision, ReleaseTraining
from pearl_state.errors import ConfigurationError
from pearl_state.lifecycle import Lifecycle
from pearl_state.plan import PlanId
from pearl_state.profile import WorkloadProfile
from pearl_state.roles import ROLLOUT_ROLES, Role, Tenure, Zone
from pearl_state.table import WorkerTable
from pearl_state.worker import Worker, WorkerId


def rows(state: ElasticState, ids: frozenset[WorkerId] | tuple[WorkerId, ...]) -> tuple[Worker, ...]:
    """The rows of `ids`, in slot order."""
    return tuple(state.table.rows[id_] for id_ in sorted(ids))


def wanted(state: ElasticState) -> frozenset[WorkerId]:
    """Workers that may serve now: dedicated ones we hold, and overlap ones while training GPUs are lent."""
    table, ids = state.table, state.available
    if not state.training_wanted:
        ids = ids.union(table.where(zone=Zone.OVERLAP)).difference(table.training())
    return ids.difference(table.where(cordoned=True))


def standby(state: ElasticState) -> frozenset[WorkerId]:
    """Workers that are ready to be admitted: nothing is under way with them.

    Who loaded weights of which the planner is about to be told waits for that: no plan could admit it before.
    """
    busy, table = in_flight(state), state.table
    return frozenset(
        id_
        for id_ in table.where(Lifecycle.PENDING_WEIGHTS)
        if id_ not in busy and (table.rows[id_].weight_version or 0) <= table.target_version
    )


def in_flight(state: ElasticState) -> frozenset[WorkerId]:
    """Workers with which something is under way."""
    busy: set[WorkerId] = set()
    for group in state.groups.values():
        busy |= group.workers
    for ids in state.removals.values():
        busy |= ids
    if state.running is not None:
        busy |= state.running.busy
    return frozenset(busy)


def busy_or_withdrawn(state: ElasticState) -> frozenset[WorkerId]:
    """Workers in the hands of an executor now: `in_flight` less those whose stage still lets them serve."""
    serving = frozenset(state.table.active())
    running = frozenset() if state.running is None else state.running.busy & serving
    return in_flight(state) - running


def current_configuration(table: WorkerTable) -> Configuration | None:
    """π of the active workers; None where nobody serves or a transition mixes both modes."""
    try:
        configuration = table.configuration
    except ConfigurationError:
        return None
    return configuration if configuration.workers else None


def choose(state: ElasticState, budget_workers: int, *, current: Configuration | None) -> Decision:
    """The policy's answer for a budget."""
    remaining_fraction, steps_ahead = _horizon(state)
    return state.settings.policy.decide(
        workload=workload_of(state),
        platform=state.platform,
        budget_workers=budget_workers,
        current=current,
        remaining_fraction=remaining_fraction,
        steps_ahead=steps_ahead,
        calibrated=state.calibrated,
        pinned=state.pinned,
    )


def workload_of(state: ElasticState) -> WorkloadProfile:
    """The workload, steady where batches overlap: also before a step of the run said so."""
    workload = state.workload
    return replace(workload, steady=True) if state.continuous and not workload.steady else workload


def _changes_with_steps(state: ElasticState) -> bool:
    """Whether the pool is another one with every step: batches overlap, and training lends its GPUs between updates."""
    settings = state.settings
    return state.continuous and settings.borrowing is not Borrowing.OFF and settings.policy.borrows


def _passing(state: ElasticState) -> bool:
    """Whether those that serve are a pool for moments: beside an update, or while others are about to join them."""
    busy = state.training_wanted or state.releasing is not None or bool(state.groups)
    return busy and _changes_with_steps(state)


def _part_of_whole(state: ElasticState, workers: int) -> Configuration:
    """What `workers` of a pool for moments should be: the best configuration of the whole pool, on so many of them."""
    overlap = [id_ for id_ in state.table.where(zone=Zone.OVERLAP) if _lendable(state, id_)]
    whole = choose(state, max(workers, len(state.available) + len(overlap)), current=None).selected
    return scaled(whole, workers)


def _horizon(state: ElasticState) -> tuple[float, float]:
    """How long a configuration may pay: the part of the workload's batch that is left, and batches after it.

    Where batches overlap, the workload's batch is all that is in flight, and a step takes a part of it. Where training
    lends GPUs, the pool changes with every step: what is chosen for it is gone with the step. Those that serve beside
    an update, or while others are about to join them, are a pool for moments: nothing pays there that costs anything.
    """
    if not state.continuous:
        return min(1.0, state.remaining / state.batch) if state.batch else 1.0, STEPS_AHEAD
    if not _changes_with_steps(state):
        return 1.0, STEPS_AHEAD
    return 0.0 if _passing(state) else min(1.0, state.batch / state.workload.batch), 0.0


# ---- removing -------------------------------------------------------------------------------------------------------


def withdraw(table: WorkerTable, ids: frozenset[WorkerId], to: Lifecycle) -> WorkerTable:
    """Take `ids` out of routing towards `to`.

    Where this leaves prefill without decode workers or the reverse, the others of the pair leave routing in the same
    instant and wait, with what they hold, to be admitted again or given another role.
    """
    active = set(table.active()) - ids
    left = {role: {id_ for id_ in active if table.rows[id_].role is role} for role in ROLLOUT_ROLES}
    broken = bool(left[Role.PREFILL]) is not bool(left[Role.DECODE])
    orphans = frozenset(left[Role.PREFILL] | left[Role.DECODE]) if broken else frozenset()
    changed = []
    for id_ in sorted(ids | orphans):
        row = table.rows[id_]
        lifecycle = Lifecycle.DRAINING if id_ in orphans else to
        failures = row.failures + (lifecycle is Lifecycle.FAILED)
        changed.append(replace(row, lifecycle=lifecycle, failures=failures))
    return table.update(changed).move(sorted(orphans), Lifecycle.PENDING_WEIGHTS)


def remove(state: ElasticState, ids: frozenset[WorkerId], deadline_s: float | None) -> Step:
    """Have workers leave now, by a mandatory plan of one stage beside whatever else runs."""
    plan_id = state.next_plan
    table = withdraw(state.table, ids, Lifecycle.DRAINING)
    state = replace(
        state,
        table=table,
        removals={**state.removals, plan_id: ids},
        next_plan=PlanId(plan_id + 1),
    )
    if state.running is not None:
        state = replace(state, running=replace(state.running, overtaken=True))
    effect = ApplyStage(
        plan_id=plan_id,
        stage=0,
        leave=rows(state, ids),
        target_version=table.target_version,
        deadline_s=deadline_s,
        mandatory=True,
    )
    return state, (effect,)


# ---- lending --------------------------------------------------------------------------------------------------------


def lend(state: ElasticState, trigger: str) -> Step:
    """Begin a borrow where training is idle and eq. (7) says that it pays (PEARL section 4.6)."""
    settings, table = state.settings, state.table
    overlap = [
        id_ for id_ in table.where(Lifecycle.VACANT, Lifecycle.RELEASED, zone=Zone.OVERLAP) if _lendable(state, id_)
    ]
    training = table.training()
    idle = all(table.rows[id_].lifecycle is Lifecycle.ACTIVE for id_ in training)
    if (
        settings.borrowing is Borrowing.OFF
        or not settings.policy.borrows
        or state.training_wanted
        or state.releasing is not None
        or state.lend_refused
        or not state.remaining
        or not overlap
        or not training
        or not idle
    ):
        return state, ()
    dedicated = len([id_ for id_ in table.active() if table.rows[id_].zone is Zone.DEDICATED])
    full = choose(state, dedicated + len(overlap), current=None)
    full_s = full.predicted_s
    ded_s = choose(state, dedicated, current=None).predicted_s if dedicated else NOBODY_S
    verdict = borrow_gate(
        remaining=state.remaining,
        batch=max(state.workload.batch if state.continuous else state.batch, state.remaining),
        ded_s=ded_s,
        full_s=full_s,
        toggle_cost_s=state.toggle_costs.toggle_s,
    )
    told = lends(state.readiness)
    # Readiness overrides the sum of eq. (7), but lends nothing that would not serve anybody.
    open_ = verdict.borrow if told is None else told and full_s < ded_s
    open_ = open_ or settings.borrowing is Borrowing.UNGATED
    record = RecordDecision(
        decision=full,
        trigger=trigger,
        borrowed=True,
        gate={
            "remaining": state.remaining,
            "batch": state.batch,
            "dedicated_s": ded_s,
            "full_s": full_s,
            "benefit_s": verdict.benefit_s,
            "toggle_s": verdict.cost_s,
            "open": float(open_),
        },
    )
    if not open_:
        # One verdict a window: R only falls from here on, so the answer stays no.
        return replace(state, lend_refused=True), (record,)
    plan_id = state.next_plan
    state = replace(
        state,
        table=table.move(training, Lifecycle.DRAINING),
        releasing=plan_id,
        next_plan=PlanId(plan_id + 1),
    )
    return state, (record, ReleaseTraining(plan_id=plan_id, workers=rows(state, training)))


def _lendable(state: ElasticState, id_: WorkerId) -> bool:
    row = state.table.rows[id_]
    return row.role is not Role.TRAINING and not row.cordoned


# ---- expanding ------------------------------------------------------------------------------------------------------


def expand(state: ElasticState) -> Step:
    """Start processes on dedicated GPUs that have none, and resume overlap workers on lent GPUs; in the background.

    Processes start in groups of bounded size, of which each is ready on its own: a worker that fails keeps few others
    from serving.
    """
    effects: list[Effect] = []
    want, busy = wanted(state), in_flight(state)
    vacant = frozenset(
        id_ for id_ in state.available & want if state.table.rows[id_].lifecycle is Lifecycle.VACANT and id_ not in busy
    )
    if not state.settings.policy.expands:
        vacant = frozenset(id_ for id_ in vacant if state.table.rows[id_].tenure is Tenure.RESERVED)
    if vacant:
        state, begun = _start_groups(state, GroupKind.EXPANSION, sorted(vacant), state.group_workers)
        effects.extend(begun)
    if state.lent and not state.lend_refused:
        parked = frozenset(
            id_
            for id_ in want - state.available
            if state.table.rows[id_].lifecycle in (Lifecycle.VACANT, Lifecycle.RELEASED) and id_ not in busy
        )
        if parked:
            state, begun = _start_groups(state, GroupKind.BORROW, sorted(parked), len(parked))
            effects.extend(begun)
    return state, tuple(effects)


def _start_groups(state: ElasticState, kind: GroupKind, ids: list[WorkerId], most: int) -> Step:
    """Mark `ids` as starting or resuming in the roles that the policy would give them now.

    As few groups of about equal size as hold `most` workers each, neighbours together, every role spread over all.
    """
    table = state.table
    roles = _roles_for(state, kind, len(ids))
    count = -(-len(ids) // most)
    changed: list[Worker] = []
    groups = []
    for number in range(count):
        mine = [_begun(table, id_, role) for id_, role in zip(ids[len(changed) :], roles[number::count], strict=False)]
        changed += mine
        groups.append(frozenset(row.id for row in mine))
    plans = {PlanId(state.next_plan + number): group for number, group in enumerate(groups)}
    state = replace(
        state,
        table=table.update(changed),
        groups={**state.groups, **{id_: Group(kind=kind, workers=group) for id_, group in plans.items()}},
        next_plan=PlanId(state.next_plan + count),
    )
    effects = (PrepareGroup(plan_id=id_, kind=kind, workers=rows(state, group)) for id_, group in plans.items())
    return state, tuple(effects)


def _begun(table: WorkerTable, id_: WorkerId, role: Role) -> Worker:
    row = replace(table.rows[id_], role=role)
    if row.lifecycle is Lifecycle.RELEASED:
        return replace(row, lifecycle=Lifecycle.RESUMING)
    return replace(row, lifecycle=Lifecycle.STARTING, incarnation=table.incarnations[id_] + 1)


def _roles_for(state: ElasticState, kind: GroupKind, count: int) -> list[Role]:
    """Roles for `count` workers to start in: what the best configuration of the grown budget lacks.

    Decided again at admission. A mode that would be kept then is kept here: who started in a role of the other one
    would have to start once more before serving.
    """
    there = frozenset(state.table.active()) | standby(state)
    if kind is GroupKind.EXPANSION:
        # A borrow does not wait for processes that start; other processes are up about as soon as these.
        starting = (g.workers for g in state.groups.values() if g.kind is kind and not g.cancelled)
        there = there.union(*starting)
    budget = len(there) + count
    steps = _changes_with_steps(state)
    if steps:
        target = _part_of_whole(state, budget)
    else:
        target = choose(state, budget, current=None).selected
        current = current_configuration(state.table)
        if current is not None and current.mode is not target.mode:
            target = choose(state, budget, current=current).selected
    have = Counter(state.table.rows[id_].role for id_ in there)
    lacking = [role for role in ROLLOUT_ROLES for _ in range(max(0, target.count(role) - have[role]))]
    spare = Role.DECODE if target.prefill else Role.COLOCATED
    return [*lacking, *[spare] * (count - len(lacking))][:count]


# ---- planning -------------------------------------------------------------------------------------------------------


def replan(state: ElasticState, trigger: str, loads: Mapping[WorkerId, float], *, signal: bool) -> Step:
    """Decide for the workers at hand and begin the plan that gets there.

    `signal` marks an elastic or workload signal, on which the ratio is considered even where membership stays.
    """
    signal = signal or state.reconsider
    if state.running is not None:
        # One plan at a time: what came up meanwhile is decided on when it is over.
        return (state if state.reconsider == signal else replace(state, reconsider=signal)), ()
    if state.reconsider:
        state = replace(state, reconsider=False)
    active = frozenset(state.table.active())
    members = (active | standby(state)) & wanted(state)
    if not members or (members == active and not signal and current_configuration(state.table) is not None):
        return state, ()
    current = current_configuration(state.table)
    if current is None and _passing(state):
        current = _part_of_whole(state, len(members))
    decision = choose(state, len(members), current=current)
    return carry_out(state, decision, members, trigger, loads)


def carry_out(
    state: ElasticState,
    decision: Decision,
    members: frozenset[WorkerId],
    trigger: str,
    loads: Mapping[WorkerId, float],
) -> Step:
    """Begin the plan with the fewest changes from what serves to `decision.selected` on `members`."""
    plan = plan_transition(
        state.table,
        members=members,
        target=decision.selected,
        plan_id=state.next_plan,
        costs=WorkerCosts(load=dict(loads)),
    )
    borrowed = any(state.table.rows[id_].zone is Zone.OVERLAP for id_ in members)
    state = replace(state, last_decision=decision)
    if not plan.stages:
        record = RecordDecision(decision=decision, trigger=trigger, plan=None, borrowed=borrowed)
        return state, (record,)
    record = RecordDecision(decision=decision, trigger=trigger, plan=plan, borrowed=borrowed)
    # What was forecast until now was so under another configuration.
    state = replace(state, running=RunningPlan(plan=plan), next_plan=PlanId(plan.id + 1), forecasts=())
    state, effects = begin_stage(state)
    return state, (record, *effects)


def begin_stage(state: ElasticState) -> Step:
    """Withdraw whom the current stage withdraws and hand the stage to the executors."""
    running = state.running
    assert running is not None
    stage = running.plan.stages[running.stage]
    table = state.table
    # A prepared worker that joins in another role than it was prepared for switches first.
    late = {id_: role for id_, role in stage.join.items() if table.rows[id_].role is not role}
    switch = {**stage.switch, **late}
    table = table.move(sorted(stage.withdraw | switch.keys()), Lifecycle.DRAINING)
    state = replace(state, table=table)
    admit = tuple(replace(table.rows[id_], role=switch.get(id_, table.rows[id_].role)) for id_ in sorted(stage.admit))
    effect = ApplyStage(
        plan_id=running.plan.id,
        stage=running.stage,
        leave=rows(state, stage.leave),
        switch=switch,
        admit=admit,
        target_version=table.target_version,
        deadline_s=running.plan.deadline_s,
        mandatory=running.plan.mandatory,
    )
    return state, (effect,)
