"""Keeps how the table changed, for people: one line of `table.jsonl` for each change, with only what is new in it."""

from collections.abc import Callable, Mapping
from typing import Any

from pearl_planner.elastic import ElasticState
from pearl_rl.encoding import encode
from pearl_state.worker import Worker, WorkerId


class TableLog:
    """Writes a line whenever the table, the plan under way, a preparation or a pin changed.

    A line has `now_s`, `version`, `target_version` and `floor_version` of the table, `rows` (only those that changed),
    `gone` (slots that were unbound), `plan` and `groups` under way, `pinned`, `training` (`idle`, `waiting` or
    `running`), `loose` (node to GPUs that are too few for a worker) and `loads` (requests that each worker held). The
    first line of a process is `fresh`: nothing before it holds. Applying the lines in order gives every table of the
    run.
    """

    def __init__(
        self, append: Callable[[Any], None], loads: Callable[[], Mapping[WorkerId, float]] = dict[WorkerId, float]
    ) -> None:
        self._append = append
        self._loads = loads
        self._rows: Mapping[WorkerId, Worker] = {}
        self._table: object = None
        self._fresh = True
        self._about: dict[str, Any] = {}

    def follow(self, state: ElasticState, now_s: float) -> None:
        """Take the state after an event in; `now_s` is on the run's clock."""
        about = _about(state)
        if state.table is self._table and about == self._about:
            return
        rows = state.table.rows
        changed = {id_: row for id_, row in rows.items() if self._rows.get(id_) != row}
        gone = sorted(self._rows.keys() - rows.keys())
        self._table, self._rows, self._about = state.table, rows, about
        loads = {id_: load for id_, load in self._loads().items() if load}
        line = {"now_s": now_s, **about, "rows": encode(changed), "gone": gone, "loads": encode(loads)}
        self._append({**line, "fresh": True} if self._fresh else line)
        self._fresh = False


def _about(state: ElasticState) -> dict[str, Any]:
    running = state.running
    plan = running and {
        "id": running.plan.id,
        "target": str(running.plan.target),
        "stage": running.stage,
        "stages": len(running.plan.stages),
        "workers": sorted(running.busy),
    }
    groups = [
        {"id": id_, "kind": str(group.kind), "workers": sorted(group.workers), "cancelled": group.cancelled}
        for id_, group in sorted(state.groups.items())
    ]
    removals = [{"id": id_, "workers": sorted(workers)} for id_, workers in sorted(state.removals.items())]
    training = "running" if state.training_running else "waiting" if state.training_wanted else "idle"
    return {
        "version": state.table.version,
        "target_version": state.table.target_version,
        "floor_version": state.table.floor_version,
        "training": training,
        "pinned": None if state.pinned is None else str(state.pinned),
        "plan": plan,
        "groups": groups,
        "removals": removals,
        "loose": {node: sorted(gpus) for node, gpus in sorted(state.loose.items())},
    }
