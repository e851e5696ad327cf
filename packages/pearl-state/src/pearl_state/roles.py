"""What a worker does (`Role`), whose GPU it sits on (`Zone`), and how long it may stay there (`Tenure`)."""

from enum import StrEnum


class Role(StrEnum):
    """The phase a worker runs, R_w of PEARL eq. (4). SGLang's `disaggregation_mode` is "null" for `COLOCATED`."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"
    TRAINING = "training"


ROLLOUT_ROLES = (Role.PREFILL, Role.DECODE, Role.COLOCATED)


class Mode(StrEnum):
    """The execution mode of a whole configuration (PEARL section 4.2)."""

    COLOCATION = "colocation"
    DISAGGREGATION = "disaggregation"


class Activity(StrEnum):
    """Membership in the active set W, a_w of PEARL eq. (4)."""

    ACTIVE = "active"
    """Receives and serves rollout requests."""
    INACTIVE = "inactive"
    """Serves nothing; its process may live on."""
    TRANSITIONING = "transitioning"
    """Being added, removed or reassigned: drains or initializes before it serves."""


class Zone(StrEnum):
    """Who owns the GPUs (PEARL section 4.4)."""

    DEDICATED = "dedicated"
    """Rollout's own GPUs: reserved ones and preemptible ones."""
    OVERLAP = "overlap"
    """Training GPUs, which rollout borrows in idle windows."""


class Tenure(StrEnum):
    """Whether the provider may take the GPUs back."""

    RESERVED = "reserved"
    PREEMPTIBLE = "preemptible"
