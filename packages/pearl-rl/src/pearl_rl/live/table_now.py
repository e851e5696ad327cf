"""The table of a run as it is now, as the value that the planner works on."""

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pearl_rl.errors import CommandError
from pearl_rl.report.lines import of_run, read_lines
from pearl_rl.report.run_record import check_run_folder
from pearl_rl.report.table_history import snapshots
from pearl_state.lifecycle import Lifecycle
from pearl_state.roles import Role, Tenure, Zone
from pearl_state.table import WorkerTable
from pearl_state.worker import GpuId, Worker, WorkerId


def table_now(folder: Path) -> WorkerTable:
    """The newest table in `table.jsonl`. Raises `CommandError` where there is none, or a damaged one."""
    check_run_folder(folder)
    with of_run(folder):
        return _newest(folder)


def _newest(folder: Path) -> WorkerTable:
    history = deque(snapshots(read_lines(folder / "table.jsonl")), maxlen=1)
    if not history:
        raise CommandError(f"{folder}: has no table yet; the run has not begun")
    newest = history[0]
    rows = {WorkerId(id_): _worker(row) for id_, row in newest.rows.items()}
    roles = dict.fromkeys((Role.PREFILL, Role.DECODE, Role.COLOCATED), 0)
    for worker in rows.values():
        if worker.lifecycle is Lifecycle.ACTIVE and worker.role in roles:
            roles[worker.role] += 1
    return WorkerTable(
        rows=dict(sorted(rows.items())),
        version=newest.about["version"],
        target_version=newest.about["target_version"],
        floor_version=newest.about["floor_version"],
        holders={gpu: worker.id for worker in rows.values() if worker.holds_gpu for gpu in worker.gpus},
        incarnations={worker.id: worker.incarnation for worker in rows.values()},
        active_roles=(roles[Role.PREFILL], roles[Role.DECODE], roles[Role.COLOCATED]),
    )


def _worker(row: Mapping[str, Any]) -> Worker:
    return Worker(
        id=WorkerId(row["id"]),
        gpus=frozenset(GpuId(gpu) for gpu in row["gpus"]),
        role=Role(row["role"]),
        zone=Zone(row["zone"]),
        tenure=Tenure(row["tenure"]),
        lifecycle=Lifecycle(row["lifecycle"]),
        incarnation=row["incarnation"],
        weight_version=row["weight_version"],
        failures=row["failures"],
        node=row["node"],
        reclaim_at_s=row["reclaim_at_s"],
        cordoned=row["cordoned"],
    )
