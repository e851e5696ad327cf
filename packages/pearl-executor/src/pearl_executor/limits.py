"""How long an executor waits for anything: the one place that defines it."""

import math
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of all waits, in seconds. Each is for one call on one worker unless it says otherwise.

    An expired limit is a failure of that worker which names the call and the limit. The defaults suit workers of
    several GPUs; `scaled` makes them fit smaller ones.
    """

    start_s: float = 600.0
    """Process start and engine construction."""
    load_s: float = 300.0
    """Loading one snapshot while a worker is being prepared."""
    sync_s: float = 300.0
    """Loading one snapshot on a worker that serves or is about to be admitted."""
    drain_s: float = 20.0
    """A worker that must leave may finish its requests for so long, where its deadline allows it; then they end with
    what they have."""
    interrupt_s: float = 5.0
    """Ending all requests of a worker with their partial tokens."""
    interrupt_again_s: float = 1.0
    """A worker that is not idle by then is interrupted again: a request may have been under way to it."""
    idle_s: float = 15.0
    """From the first interruption until the engine is idle."""
    release_s: float = 30.0
    resume_s: float = 60.0
    switch_s: float = 120.0
    """Changing the role of an idle engine in place."""
    refresh_s: float = 15.0
    """Renewing what peers know of a worker's KV buffers."""
    probe_s: float = 5.0
    """Answering whether it is there, just before a group is declared ready."""
    stop_s: float = 20.0
    """Ending a process in order, where no earlier deadline is set."""
    kill_s: float = 5.0
    """Ending a process for certain. This much of a deadline is kept for it."""
    retry_s: float = 1.0
    """Pause before a kill or a resume of training that failed is tried again; doubles each time."""
    retry_max_s: float = 30.0
    """Longest such pause."""
    cancel_s: float = 1.0
    """How long a call may take to end once it is cancelled, at most a quarter of its limit; then it is left alone."""
    settle_s: float = 10.0
    """How long a cancelled borrow waits for a resume under way, whose outcome decides whether the process is kept."""
    training_release_s: float = 120.0
    training_resume_s: float = 120.0

    def __post_init__(self) -> None:
        """Raise `ValueError` for a limit that is not a positive number."""
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise ValueError(f"limit {item.name} = {value!r}: must be a positive number of seconds")

    def scaled(self, factor: float) -> "Limits":
        """All limits multiplied by `factor`."""
        return replace(self, **{item.name: getattr(self, item.name) * factor for item in fields(self)})
