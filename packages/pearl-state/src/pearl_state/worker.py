"""A worker: one engine (or training rank) bound for life to a fixed set of GPUs, as one row of the table."""

from dataclasses import dataclass
from typing import NewType

from pearl_state.lifecycle import ACTIVITY, HOLDS_GPU, Lifecycle
from pearl_state.roles import Activity, Role, Tenure, Zone

WorkerId = NewType("WorkerId", int)
"""A stable slot number. Slots are never renumbered."""

GpuId = NewType("GpuId", int)
"""A GPU of the cluster, by a number that is never reused for another device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One row of the table M of PEARL eq. (4). `gpus` is bound for life; the rest changes.

    A process is identified by (`id`, `incarnation`), never by an address: a message of an older incarnation is void.
    """

    id: WorkerId
    gpus: frozenset[GpuId]
    """G_w."""
    role: Role
    """R_w: the current role, or while it transitions the role it will have."""
    zone: Zone
    tenure: Tenure = Tenure.RESERVED
    lifecycle: Lifecycle = Lifecycle.VACANT
    incarnation: int = 0
    """How many processes this slot has had; grows at each start."""
    weight_version: int | None = None
    """The version that the process reported last; None before its first report and after its memory went."""
    failures: int = 0
    """Failures of this slot since it was bound."""
    node: str = ""
    """Where the GPUs are, for placement; empty on one machine."""
    reclaim_at_s: float | None = None
    """When the provider takes the GPUs (an announced deadline), None where none is known."""
    cordoned: bool = False
    """Fenced by a person: it leaves in order and counts out of the budget until the fence is lifted."""

    @property
    def activity(self) -> Activity:
        """a_w: membership in the active set, a function of the lifecycle."""
        return ACTIVITY[self.lifecycle]

    @property
    def holds_gpu(self) -> bool:
        """Whether this worker owns its GPUs' memory now."""
        return self.lifecycle in HOLDS_GPU
