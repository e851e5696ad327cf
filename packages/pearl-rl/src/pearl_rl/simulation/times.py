"""How long reconfigurations take in simulation: PEARL Table 3, and what it leaves open as named assumptions."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconfigurationTimes:
    """Seconds. Defaults: Qwen3-8B of PEARL Table 3; its sums are split over the steps by assumption.

    Expansion: `start_s` is its preparation, `first_load_s` its finalization. Activation of a borrow: training releases,
    the retained process resumes and loads (`training_release_s` + `resume_s` + `sync_s`). Deactivation: `release_s` +
    `training_resume_s`.
    """

    start_s: float = 56.29
    """Process start and engine construction."""
    first_load_s: float = 11.05
    """Weights of a process that just started, with its entry into routing and communication groups."""
    sync_s: float = 2.5
    """Newer weights for a process that is there."""
    sync_pause_s: float = 2.5
    """For how long an engine generates nothing while its weights are replaced."""
    resume_s: float = 1.76
    release_s: float = 1.2
    training_release_s: float = 2.0
    training_resume_s: float = 1.98
    flip_s: float = 5.0
    """Prefill ↔ decode in place (Prorsa: about 5 s)."""
    relaunch_s: float = 20.0
    """Between colocated and disaggregated roles ("tens of seconds", PEARL section 4.3.2)."""
    resumes_in_any_role: bool = False
    """Whether a process that was just resumed takes another role up in the same time, as PEARL Table 3's mean
    activation lets one think; otherwise it changes its role as any other process does."""
    stop_s: float = 0.5
    refresh_s: float = 0.1
    """Renewing what peers know of KV buffers."""
    warm_s: float = 1.0
    """Processes that are started this early in a run are there already: a segment is a window of a longer run."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"reconfiguration time {item.name} = {value}: must be a number of at least 0 seconds")

    @property
    def activation_s(self) -> float:
        """A borrow, from the decision until it serves."""
        return self.training_release_s + self.resume_s + self.sync_s

    @property
    def deactivation_s(self) -> float:
        """A return, from the request of training until it holds its GPUs."""
        return self.release_s + self.training_resume_s
