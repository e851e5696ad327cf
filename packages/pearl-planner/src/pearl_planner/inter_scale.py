"""Preemptible GPUs come and go, and people fence workers: the budget of the dedicated zone (PEARL section 4.5)."""

from dataclasses import replace

from pearl_planner.elastic import ElasticState, Step
from pearl_planner.reconcile import busy_or_withdrawn, remove, wanted
from pearl_state import events
from pearl_state.effects import CancelGroup, Effect, ReturnGpus
from pearl_state.lifecycle import Lifecycle
from pearl_state.roles import Role, Zone
from pearl_state.worker import GpuId, Worker


def offered(state: ElasticState, event: events.GpusOffered) -> Step:
    """Bind free slots to the new GPUs; leftovers wait for enough of them on their node."""
    state = _spared(state, event.gpus)
    held = {gpu for row in state.table.rows.values() for gpu in row.gpus}
    for ids in state.loose.values():
        held |= ids
    pool = sorted((event.gpus - held) | state.loose.get(event.node, frozenset()))
    size = state.settings.gpus_per_worker
    whole = len(pool) // size
    slots = state.table.free_slots(whole)
    workers = [
        Worker(
            id=slot,
            gpus=frozenset(pool[i * size : (i + 1) * size]),
            role=Role.COLOCATED,
            zone=Zone.DEDICATED,
            tenure=event.tenure,
            node=event.node,
        )
        for i, slot in enumerate(slots)
    ]
    rest = frozenset(pool[whole * size :])
    loose = {node: gpus for node, gpus in state.loose.items() if node != event.node}
    if rest:
        loose[event.node] = rest
    table = state.table.bind(*workers) if workers else state.table
    return replace(state, table=table, available=state.available.union(slots), loose=loose), ()


def _spared(state: ElasticState, gpus: frozenset[GpuId]) -> ElasticState:
    """Keep slots whose reclaim the provider takes back before they are empty."""
    spared = frozenset(id_ for id_, asked in state.doomed.items() if asked <= gpus)
    if not spared:
        return state
    return replace(
        state,
        doomed={id_: asked for id_, asked in state.doomed.items() if id_ not in spared},
        available=state.available | spared,
        table=state.table.update([replace(state.table.rows[id_], reclaim_at_s=None) for id_ in sorted(spared)]),
    )


def reclaimed(state: ElasticState, event: events.GpusReclaimed) -> Step:
    """Take the slots out of the budget; what serves on them leaves by the deadline."""
    gone = {node: gpus & event.gpus for node, gpus in state.loose.items()}
    loose = {node: gpus - event.gpus for node, gpus in state.loose.items() if gpus - event.gpus}
    effects: list[Effect] = [ReturnGpus(gpus=gpus) for gpus in gone.values() if gpus]
    doomed = dict(state.doomed)
    changed = []
    for row in state.table.rows.values():
        if row.zone is Zone.DEDICATED and row.gpus & event.gpus:
            doomed[row.id] = doomed.get(row.id, frozenset()) | (row.gpus & event.gpus)
            deadline = event.deadline_s if row.reclaim_at_s is None else min(row.reclaim_at_s, event.deadline_s)
            changed.append(replace(row, reclaim_at_s=deadline))
    state = replace(
        state,
        loose=loose,
        doomed=doomed,
        table=state.table.update(changed),
        available=state.available - doomed.keys(),
        lend_refused=False,
    )
    return state, tuple(effects)


def release_unwanted(state: ElasticState) -> Step:
    """Cancel preparations and remove workers that may not serve any more; free slots whose GPUs were asked back."""
    effects: list[Effect] = []
    want = wanted(state)
    groups = dict(state.groups)
    for plan_id, group in state.groups.items():
        if not group.cancelled and not group.workers <= want:
            groups[plan_id] = replace(group, cancelled=True)
            effects.append(CancelGroup(plan_id=plan_id))
    if effects:
        state = replace(state, groups=groups)
    busy = busy_or_withdrawn(state)
    up = state.table.where(Lifecycle.ACTIVE, Lifecycle.PENDING_WEIGHTS)
    idle = (state.table.rows[id_] for id_ in up if id_ not in want and id_ not in busy)
    leaving = [row for row in idle if row.role is not Role.TRAINING]
    for deadline in sorted({_deadline(row) for row in leaving}):
        ids = frozenset(row.id for row in leaving if _deadline(row) == deadline)
        state, more = remove(state, ids, None if deadline == float("inf") else deadline)
        effects.extend(more)
    state, more = _free_doomed(state)
    return state, (*effects, *more)


def _deadline(row: Worker) -> float:
    return float("inf") if row.reclaim_at_s is None else row.reclaim_at_s


def _free_doomed(state: ElasticState) -> Step:
    """Unbind doomed slots that hold nothing; give the provider its GPUs, keep the others of a split worker."""
    effects: list[Effect] = []
    table, doomed, loose = state.table, dict(state.doomed), dict(state.loose)
    for id_, gpus in state.doomed.items():
        row = table.rows[id_]
        if row.lifecycle not in (Lifecycle.VACANT, Lifecycle.RETIRED):
            continue
        table = table.unbind([id_])
        del doomed[id_]
        effects.append(ReturnGpus(gpus=gpus))
        kept: frozenset[GpuId] = row.gpus - gpus
        if kept:
            loose[row.node] = loose.get(row.node, frozenset()) | kept
    if not effects:
        return state, ()
    return replace(state, table=table, doomed=doomed, loose=loose), tuple(effects)


def cordoned(state: ElasticState, event: events.WorkersCordoned) -> Step:
    """Fence workers, or lift the fence; slots that are not bound are passed over."""
    known = [id_ for id_ in sorted(event.workers) if id_ in state.table.rows]
    table = state.table.update([replace(state.table.rows[id_], cordoned=event.cordoned) for id_ in known])
    return replace(state, table=table), ()
