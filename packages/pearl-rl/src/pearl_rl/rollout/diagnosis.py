"""What a rollout waits for, and whose duty that is. More workers are the answer to two of the causes only."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

_IDLE_KV: Final = 0.1
"""Below this part of its KV memory an engine has next to nothing to do."""
_IDLE_REQUESTS: Final = 16
"""So few requests on all workers are next to nothing, too."""
_FULL_KV: Final = 0.9
_MOSTLY: Final = 0.8


class Cause(StrEnum):
    """What holds a rollout up."""

    ROUTER_STALL = "router_stall"
    ENVIRONMENT_BOUND = "environment_bound"
    KV_BOUND = "kv_bound"
    WEIGHT_WAIT = "weight_wait"
    DRAIN = "drain"
    TRAINER = "trainer"
    NO_WORKER = "no_worker"
    NONE = "none"


DUTY: Final[dict[Cause, str]] = {
    Cause.ROUTER_STALL: "router",
    Cause.ENVIRONMENT_BOUND: "environments",
    Cause.KV_BOUND: "engines",
    Cause.WEIGHT_WAIT: "weight sync",
    Cause.DRAIN: "executors",
    Cause.TRAINER: "trainer",
    Cause.NO_WORKER: "provider of GPUs",
    Cause.NONE: "nobody",
}
"""Who must act."""

MORE_WORKERS_HELP: Final = frozenset({Cause.KV_BOUND, Cause.NO_WORKER})
"""Causes that further workers cure. A stalled router only stalls more of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What can be seen of a rollout at one moment."""

    serving: int
    """Active workers."""
    draining: int = 0
    pending_weights: int = 0
    in_flight: int = 0
    """Trajectories under way."""
    waiting: int = 0
    """Model calls that no worker was given."""
    timeouts: int = 0
    """Model calls whose callers gave up."""
    running: int = 0
    """Requests on workers."""
    kv_used: float | None = None
    """Part of the serving workers' KV memory in use; None where nobody measured it."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A cause and who must act on it."""

    cause: Cause
    words: str

    @property
    def duty(self) -> str:
        """Who must act."""
        return DUTY[self.cause]

    @property
    def scale_up(self) -> bool:
        """Whether more workers would help."""
        return self.cause in MORE_WORKERS_HELP


def told(found: Diagnosis) -> str:
    """A diagnosis in a clause: what holds the rollout up, and who must act."""
    if found.cause is Cause.NONE:
        return f"nothing holds it up, it takes that long; {found.words}"
    return f"{found.cause}, for the {found.duty} to mend; {found.words}"


def diagnose(seen: Observation) -> Diagnosis:
    """The first cause that explains what is seen."""
    if not seen.serving:
        return _nobody_serves(seen)
    idle = seen.running <= _IDLE_REQUESTS and (seen.kv_used is None or seen.kv_used < _IDLE_KV)
    if idle and (seen.timeouts or seen.waiting > seen.running):
        words = f"{seen.waiting} calls wait and {seen.timeouts} timed out while {seen.serving} workers idle"
        return Diagnosis(Cause.ROUTER_STALL, words)
    if seen.kv_used is not None and seen.kv_used >= _FULL_KV:
        return Diagnosis(Cause.KV_BOUND, f"{seen.kv_used:.0%} of the KV memory is in use")
    playing = seen.in_flight - seen.running - seen.waiting
    if seen.in_flight and playing >= _MOSTLY * seen.in_flight:
        words = f"{playing} of {seen.in_flight} trajectories wait for their environments"
        return Diagnosis(Cause.ENVIRONMENT_BOUND, words)
    if not seen.in_flight:
        return Diagnosis(Cause.TRAINER, "nothing is under way: the next batch waits for training")
    return Diagnosis(Cause.NONE, f"{seen.running} requests run on {seen.serving} workers")


def _nobody_serves(seen: Observation) -> Diagnosis:
    if seen.draining:
        return Diagnosis(Cause.DRAIN, f"nobody serves: {seen.draining} workers drain")
    if seen.pending_weights:
        return Diagnosis(Cause.WEIGHT_WAIT, f"nobody serves: {seen.pending_weights} workers wait for weights")
    return Diagnosis(Cause.NO_WORKER, "nobody serves, and nobody is about to")
