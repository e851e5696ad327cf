"""A worker's life: its states, the activity each means, and the legal transitions with the reason for each.

The paper names three activities (active, inactive, transitioning). Executing them safely needs finer states,
of which the activity is a function, so that the two can never disagree.
"""

from enum import StrEnum
from typing import Final

from pearl_state.roles import Activity


class Lifecycle(StrEnum):
    """Where a worker is in its life."""

    VACANT = "vacant"
    """The slot has no process and holds nothing of the GPU."""
    STARTING = "starting"
    """The process starts and takes device memory."""
    PENDING_WEIGHTS = "pending_weights"
    """Ready to serve but for the target weight version."""
    ACTIVE = "active"
    """In the router; serves requests. For a training worker: owns the GPUs and may train."""
    DRAINING = "draining"
    """Out of the router; finishes or interrupts what it holds, then gives device memory back."""
    SWITCHING = "switching"
    """Drained and changing its role."""
    RELEASED = "released"
    """The process lives, the device memory is given back (process retention, PEARL section 4.6)."""
    RESUMING = "resuming"
    """Takes its device memory again."""
    FAILED = "failed"
    """Broke or never answered; may still hold the GPU until it was killed and cleaned."""
    RETIRED = "retired"
    """Failed too often or was fenced off by hand; the slot is not used again until it is rebound."""


ACTIVITY: Final[dict[Lifecycle, Activity]] = {
    Lifecycle.VACANT: Activity.INACTIVE,
    Lifecycle.STARTING: Activity.TRANSITIONING,
    Lifecycle.PENDING_WEIGHTS: Activity.TRANSITIONING,
    Lifecycle.ACTIVE: Activity.ACTIVE,
    Lifecycle.DRAINING: Activity.TRANSITIONING,
    Lifecycle.SWITCHING: Activity.TRANSITIONING,
    Lifecycle.RELEASED: Activity.INACTIVE,
    Lifecycle.RESUMING: Activity.TRANSITIONING,
    Lifecycle.FAILED: Activity.INACTIVE,
    Lifecycle.RETIRED: Activity.INACTIVE,
}

HOLDS_GPU: Final[frozenset[Lifecycle]] = frozenset(
    {
        Lifecycle.STARTING,
        Lifecycle.PENDING_WEIGHTS,
        Lifecycle.ACTIVE,
        Lifecycle.DRAINING,
        Lifecycle.SWITCHING,
        Lifecycle.RESUMING,
        # A failed process is not known to have let go of the device before it was killed and cleaned.
        Lifecycle.FAILED,
    }
)
"""States in which a worker owns its GPUs' memory."""

TRANSITIONS: Final[dict[tuple[Lifecycle, Lifecycle], str]] = {
    (Lifecycle.VACANT, Lifecycle.STARTING): "an expansion starts a process in an empty slot",
    (Lifecycle.STARTING, Lifecycle.PENDING_WEIGHTS): "the engine is built; it still lacks the newest weights",
    (Lifecycle.STARTING, Lifecycle.RELEASED): "gated start: an overlap worker parks until it is first borrowed",
    (Lifecycle.STARTING, Lifecycle.VACANT): "the expansion was cancelled and the process cleaned up",
    (Lifecycle.STARTING, Lifecycle.DRAINING): "the expansion is cancelled; cleaning takes a while",
    (Lifecycle.PENDING_WEIGHTS, Lifecycle.ACTIVE): "it reported weights no older than any that serve and was admitted",
    (Lifecycle.PENDING_WEIGHTS, Lifecycle.DRAINING): "cancelled before admission; it must give its memory back",
    (Lifecycle.PENDING_WEIGHTS, Lifecycle.VACANT): "the expansion was cancelled and the process cleaned up",
    (Lifecycle.PENDING_WEIGHTS, Lifecycle.RELEASED): "a borrow was cancelled; rolled back to retention",
    (Lifecycle.ACTIVE, Lifecycle.DRAINING): "withdrawn from routing, to leave or to change its role",
    (Lifecycle.DRAINING, Lifecycle.SWITCHING): "idle: a role may only change on an idle engine",
    (Lifecycle.DRAINING, Lifecycle.RELEASED): "idle and its memory verified released; the process stays",
    (Lifecycle.DRAINING, Lifecycle.VACANT): "the process ended and the GPUs are given back",
    (
        Lifecycle.DRAINING,
        Lifecycle.PENDING_WEIGHTS,
    ): "kept after all: parked while its counterpart role was missing, or its release was rolled back",
    (Lifecycle.SWITCHING, Lifecycle.PENDING_WEIGHTS): "the new role is in place; versions are checked again",
    (Lifecycle.SWITCHING, Lifecycle.VACANT): "the worker was lost or reclaimed in the middle of a switch",
    (Lifecycle.SWITCHING, Lifecycle.DRAINING): "reclaimed in the middle of a switch",
    (Lifecycle.RELEASED, Lifecycle.RESUMING): "a borrow gives the GPU to this process",
    (Lifecycle.RELEASED, Lifecycle.VACANT): "the retained process is ended",
    (Lifecycle.RESUMING, Lifecycle.PENDING_WEIGHTS): "memory is back; weights from before the release are stale",
    (Lifecycle.RESUMING, Lifecycle.ACTIVE): "a training worker resumed; it owns the newest weights itself",
    (Lifecycle.RESUMING, Lifecycle.RELEASED): "the resume failed or was cancelled and was rolled back",
    (Lifecycle.RESUMING, Lifecycle.DRAINING): "a mandatory return overtook the borrow",
    (Lifecycle.RESUMING, Lifecycle.VACANT): "killed so that the GPU goes back in time",
    (Lifecycle.FAILED, Lifecycle.VACANT): "killed and cleaned; the GPU is free again",
    (Lifecycle.FAILED, Lifecycle.RETIRED): "the restart budget is spent",
    (Lifecycle.VACANT, Lifecycle.RETIRED): "fenced off, or its failures used the restart budget up",
    (Lifecycle.RETIRED, Lifecycle.VACANT): "put back into service by hand or with new GPUs",
    **{
        (state, Lifecycle.FAILED): "crash, missed deadline, or an answer that breaks the contract"
        for state in Lifecycle
        if state not in (Lifecycle.VACANT, Lifecycle.FAILED, Lifecycle.RETIRED)
    },
}
"""Every legal change of state, with why it exists. What is not here is illegal."""
