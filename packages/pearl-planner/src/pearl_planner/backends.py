"""What a KV-transfer backend allows a plan to do, asked before anything is changed.

Some backends change a role in place, others need the process relaunched. Some find a replaced prefill worker by
themselves, others keep stale addresses until every decode worker renews what it knows, and some never do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pearl_planner.transition import PlanError
from pearl_state.plan import TransitionPlan
from pearl_state.roles import Role
from pearl_state.table import WorkerTable
from pearl_state.worker import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Capabilities of one transfer backend."""

    name: str
    flips_in_place: bool
    """Prefill ↔ decode without a new process."""
    modes_in_place: bool = False
    """Between colocation and disaggregation without a new process."""
    finds_peers: bool
    """A replaced prefill worker is reached without further ado."""
    renews_peers: bool
    """Decode workers can renew what they know of prefill workers while they serve."""


BACKENDS: Mapping[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend(name="local", flips_in_place=True, modes_in_place=True, finds_peers=True, renews_peers=True),
        Backend(name="mooncake", flips_in_place=True, finds_peers=True, renews_peers=True),
        Backend(name="mooncake_tcp", flips_in_place=True, finds_peers=True, renews_peers=True),
        Backend(name="mori", flips_in_place=True, finds_peers=False, renews_peers=True),
        Backend(name="nixl", flips_in_place=False, finds_peers=False, renews_peers=True),
    )
}
"""The embedded engine's own hand-over, and the backends of SGLang 0.5.23 as its source and its users describe them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendNeeds:
    """What a plan needs beyond its stages."""

    relaunch: frozenset[WorkerId] = frozenset()
    """Workers whose change of role needs a new process."""
    refresh_peers: Mapping[int, frozenset[WorkerId]] = field(default_factory=dict[int, frozenset[WorkerId]])
    """Stage → decode workers that must renew what they know before its admission."""


def backend_needs(
    table: WorkerTable, plan: TransitionPlan, backend: Backend, *, expert_parallel: int = 1, pipeline_parallel: int = 1
) -> BackendNeeds:
    """What `plan` needs on `backend`. Engines that are expert- or pipeline-parallel never change roles in place.

    Raises `PlanError` where a prefill worker is replaced that decode workers could never reach.
    """
    whole = expert_parallel == 1 and pipeline_parallel == 1
    relaunch = set()
    for id_, role in plan.reassign.items():
        mode = Role.COLOCATED in (role, table.rows[id_].role)
        if not (whole and (backend.modes_in_place if mode else backend.flips_in_place)):
            relaunch.add(id_)
    refresh: dict[int, frozenset[WorkerId]] = {}
    decoding = set(table.active(Role.DECODE))
    for i, stage in enumerate(plan.stages):
        decoding -= stage.withdraw
        admitted = {**stage.switch, **stage.join, **{id_: table.rows[id_].role for id_ in stage.park}}
        # Whoever starts a new process learns of its peers by that.
        knowing = decoding | {id_ for id_ in stage.park if table.rows[id_].role is Role.DECODE}
        decoding |= {id_ for id_, role in admitted.items() if role is Role.DECODE}
        arrives = any(role is Role.PREFILL for role in (*stage.switch.values(), *stage.join.values()))
        if not arrives or backend.finds_peers or not knowing:
            continue
        if not backend.renews_peers:
            raise PlanError(
                f"stage {i} brings new prefill workers, which {len(knowing)} decode workers cannot reach over "
                f"{backend.name}: restart them in the same plan, or use another transfer backend"
            )
        refresh[i] = frozenset(knowing)
    return BackendNeeds(relaunch=frozenset(relaunch), refresh_peers=refresh)
