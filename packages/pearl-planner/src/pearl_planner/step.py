"""The whole control plane as one pure function: (state, event) -> (state', effects).

All elastic events take the four stages of PEARL section 4.1.2: the budget changes (here), the PD Decision Engine
chooses (`reconcile.choose`), orchestration plans (`reconcile.replan`), and the effects name what to execute.
A worker is marked as transitioning when its effect is *emitted* and settled when the answer comes; the answer of
a plan that is not under way any more changes nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pearl_planner import answers, inter_scale, intra_scale, recovery
from pearl_planner.elastic import ElasticState, Step
from pearl_planner.in_step import REMEMBERED, rebalance
from pearl_planner.inter_scale import release_unwanted
from pearl_planner.intra_scale import publish, return_training
from pearl_planner.reconcile import expand, lend, replan
from pearl_state import events
from pearl_state.worker import WorkerId

_SIGNALS = (
    events.GpusOffered,
    events.GpusReclaimed,
    events.TrainingRequested,
    events.TrainingFinished,
    events.ProfileRefitted,
    events.ConfigurationPinned,
    events.WorkersCordoned,
    events.RunResumed,
)
"""Events on which mode and ratio are considered again even where no worker came or went."""

_NO_LOADS: Mapping[WorkerId, float] = {}


def step(state: ElasticState, event: events.Event, loads: Mapping[WorkerId, float] = _NO_LOADS) -> Step:
    """Take one event in; return the next state and what the executors must do.

    `loads` tells how busy each worker is (requests it holds), so that a plan moves the least loaded ones.
    Total: every event is legal in every state. Raises only for a bug (a broken invariant).
    """
    handled, effects = _HANDLERS[type(event)](state, event)
    if isinstance(event, events.WeightsReported):
        # Nobody comes, goes or changes by it, and of thousands of workers each reports every version.
        return handled, effects
    trigger = type(event).__name__
    out = list(effects)
    state = handled
    for act in (
        release_unwanted,
        return_training,
        lambda s: lend(s, trigger),
        expand,
        lambda s: replan(s, trigger, loads, signal=isinstance(event, _SIGNALS)),
        lambda s: rebalance(s, trigger, loads) if isinstance(event, events.LoadForecast) else (s, ()),
    ):
        state, effects = act(state)
        out.extend(effects)
    if state is not handled:
        # Where nothing changed since it was called first, there is nothing to release either.
        state, effects = release_unwanted(state)
        out.extend(effects)
    return state, tuple(out)


def _weights_published(state: ElasticState, event: events.WeightsPublished) -> Step:
    return publish(state, event.version)


def _weights_reported(state: ElasticState, event: events.WeightsReported) -> Step:
    """What is older than the weights of all who serve may not serve any more."""
    row = state.table.rows.get(event.worker)
    if row is None or row.incarnation != event.incarnation or not row.holds_gpu:
        return state, ()
    if row.weight_version is not None and event.version < row.weight_version:
        return state, ()
    table = state.table.report(event.worker, event.version)
    if not any(table.rows[id_].weight_version == table.floor_version for id_ in table.active()):
        oldest = min((table.rows[id_].weight_version or 0 for id_ in table.active()), default=table.target_version)
        table = table.raise_floor(min(oldest, table.target_version))
    return replace(state, table=table), ()


def _rollout_began(state: ElasticState, event: events.RolloutBegan) -> Step:
    state = replace(state, step=event.step, batch=event.batch, continuous=event.continuous)
    return replace(state, remaining=event.batch, lend_refused=False), ()


def _rollout_progressed(state: ElasticState, event: events.RolloutProgressed) -> Step:
    return (replace(state, remaining=event.remaining) if event.step == state.step else state), ()


def _rollout_finished(state: ElasticState, event: events.RolloutFinished) -> Step:
    costs = state.toggle_costs.observe_step(event.borrowed, event.makespan_s)
    remaining = 0 if event.step == state.step else state.remaining
    return replace(state, toggle_costs=costs, remaining=remaining), ()


def _refitted(state: ElasticState, event: events.ProfileRefitted) -> Step:
    return replace(state, workload=event.workload, platform=event.platform, calibrated=event.calibrated), ()


def _forecast(state: ElasticState, event: events.LoadForecast) -> Step:
    return replace(state, forecasts=(*state.forecasts, event)[-REMEMBERED:]), ()


def _readiness(state: ElasticState, event: events.ReadinessMeasured) -> Step:
    return replace(state, readiness=event.reason, lend_refused=False), ()


def _nothing(state: ElasticState, event: events.EvaluationFinished) -> Step:
    """On record only."""
    del event
    return state, ()


def _pinned(state: ElasticState, event: events.ConfigurationPinned) -> Step:
    return replace(state, pinned=event.configuration), ()


_HANDLERS: dict[type, Callable[[ElasticState, Any], Step]] = {
    events.GpusOffered: inter_scale.offered,
    events.GpusReclaimed: inter_scale.reclaimed,
    events.WorkersCordoned: inter_scale.cordoned,
    events.TrainingRequested: intra_scale.training_requested,
    events.TrainingFinished: intra_scale.training_finished,
    events.TrainingReleased: intra_scale.training_released,
    events.TrainingResumed: intra_scale.training_resumed,
    events.GroupPrepared: answers.group_prepared,
    events.GroupFailed: answers.group_failed,
    events.StageApplied: answers.stage_applied,
    events.WorkerFailed: answers.worker_failed,
    events.WorkersCleaned: answers.cleaned,
    events.WeightsPublished: _weights_published,
    events.WeightsReported: _weights_reported,
    events.RolloutBegan: _rollout_began,
    events.RolloutProgressed: _rollout_progressed,
    events.RolloutFinished: _rollout_finished,
    events.ProfileRefitted: _refitted,
    events.ConfigurationPinned: _pinned,
    events.RunResumed: recovery.resumed,
    events.LoadForecast: _forecast,
    events.ReadinessMeasured: _readiness,
    events.EvaluationFinished: _nothing,
}
