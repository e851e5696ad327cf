"""A control plane goes on where another one ended: nothing of its processes is left (PEARL sections 4.4 and 4.5)."""

from dataclasses import replace

from pearl_planner.elastic import ElasticState, Step
from pearl_state import events
from pearl_state.lifecycle import Lifecycle
from pearl_state.roles import Tenure, Zone

_GONE = (Lifecycle.VACANT, Lifecycle.FAILED, Lifecycle.RETIRED)


def resumed(state: ElasticState, event: events.RunResumed) -> Step:
    """Forget everything that was under way, and keep what was learned.

    All slots are empty, which is nobody's failure; those of reserved GPUs stay bound, those of preemptible or reclaimed
    ones are free, since the provider says anew what it lends. Training holds its GPUs and has `weight_version`.
    """
    table = state.table
    # A released process holds nothing of its GPUs, which may be another's: it does not pass through FAILED.
    table = table.move(table.where(Lifecycle.RELEASED), Lifecycle.VACANT)
    living = [row for row in table.rows.values() if row.lifecycle not in _GONE]
    # All at once: prefill and decode workers end in the same instant.
    table = table.update([replace(row, lifecycle=Lifecycle.FAILED) for row in living])
    table = table.move(table.where(Lifecycle.FAILED), Lifecycle.VACANT)
    dropped = frozenset(
        row.id
        for row in table.rows.values()
        if row.zone is Zone.DEDICATED and (row.tenure is Tenure.PREEMPTIBLE or row.id in state.doomed)
    )
    table = table.unbind(sorted(dropped))
    table = table.update([replace(row, reclaim_at_s=None) for row in table.rows.values()])
    for lifecycle in (Lifecycle.STARTING, Lifecycle.PENDING_WEIGHTS, Lifecycle.ACTIVE):
        table = table.move(table.training(), lifecycle)
    version = max(event.weight_version, table.target_version)
    return replace(
        state,
        table=table.publish(version).raise_floor(version),
        available=state.available - dropped,
        loose={},
        doomed={},
        groups={},
        lost=frozenset(),
        removals={},
        running=None,
        releasing=None,
        resuming=None,
        training_wanted=False,
        training_running=False,
        lend_refused=False,
        batch=0,
        remaining=0,
        reconsider=False,
        forecasts=(),
    ), ()
