"""Training lends its GPUs and gets them back: the overlap zone (PEARL section 4.6)."""

from dataclasses import replace

from pearl_planner.elastic import ElasticState, Step
from pearl_planner.reconcile import rows
from pearl_state import events
from pearl_state.effects import GrantTraining, ResumeTraining, SyncWeights
from pearl_state.lifecycle import Lifecycle
from pearl_state.plan import PlanId
from pearl_state.roles import Role, Zone


def training_requested(state: ElasticState, event: events.TrainingRequested) -> Step:
    """Training wants its GPUs: whatever rollout has on them leaves first, by a deadline."""
    deadline = event.now_s + state.settings.return_s
    overlap = [
        replace(row, reclaim_at_s=deadline)
        for row in state.table.rows.values()
        if row.zone is Zone.OVERLAP and row.role is not Role.TRAINING
    ]
    return replace(state, training_wanted=True, lend_refused=False, table=state.table.update(overlap)), ()


def return_training(state: ElasticState) -> Step:
    """Once rollout holds none of its GPUs, have training take its memory again, then let it run."""
    if not state.training_wanted or state.training_running or state.releasing is not None:
        return state, ()
    table = state.table
    training = table.training()
    if all(table.rows[id_].lifecycle is Lifecycle.ACTIVE for id_ in training):
        return replace(state, training_running=True), (GrantTraining(),)
    free = not any(
        row.holds_gpu for row in table.rows.values() if row.zone is Zone.OVERLAP and row.role is not Role.TRAINING
    )
    parked = [id_ for id_ in training if table.rows[id_].lifecycle is Lifecycle.RELEASED]
    if not free or len(parked) < len(training):
        return state, ()
    plan_id = state.next_plan
    state = replace(
        state, table=table.move(parked, Lifecycle.RESUMING), resuming=plan_id, next_plan=PlanId(plan_id + 1)
    )
    return state, (ResumeTraining(workers=rows(state, tuple(parked)), plan_id=plan_id),)


def training_finished(state: ElasticState, event: events.TrainingFinished) -> Step:
    """The training GPUs are idle again: borrowing may be considered."""
    overlap = [
        replace(row, reclaim_at_s=None)
        for row in state.table.rows.values()
        if row.zone is Zone.OVERLAP and row.reclaim_at_s is not None
    ]
    state = replace(
        state,
        training_wanted=False,
        training_running=False,
        lend_refused=False,
        table=state.table.update(overlap),
    )
    return publish(state, event.weight_version)


def training_released(state: ElasticState, event: events.TrainingReleased) -> Step:
    """Training's memory is free: overlap workers may take it. A failed release leaves the GPUs with training."""
    if event.plan_id != state.releasing:
        return state, ()
    training = state.table.where(Lifecycle.DRAINING, role=Role.TRAINING)
    state = replace(state, releasing=None)
    table = state.table
    if event.failed is not None:
        table = table.move(training, Lifecycle.PENDING_WEIGHTS).move(training, Lifecycle.ACTIVE)
        return replace(state, table=table, lend_refused=True), ()
    return replace(state, table=table.move(training, Lifecycle.RELEASED)), ()


def training_resumed(state: ElasticState, event: events.TrainingResumed) -> Step:
    """Training holds its memory again, or tries once more. The answer to an earlier try says nothing of this one."""
    if event.plan_id != state.resuming:
        return state, ()
    resuming = state.table.where(Lifecycle.RESUMING, role=Role.TRAINING)
    # A failed resume is tried again: nothing else may use the GPUs, and the executor bounds each try.
    to = Lifecycle.ACTIVE if event.failed is None else Lifecycle.RELEASED
    return replace(state, table=state.table.move(resuming, to), resuming=None), ()


def publish(state: ElasticState, version: int) -> Step:
    """Make a version the target and bring everybody who serves to it."""
    if version <= state.table.target_version:
        return state, ()
    state = replace(state, table=state.table.publish(version))
    serving = state.table.active()
    return state, (SyncWeights(workers=rows(state, serving), version=version),) if serving else ()
