"""What it costs to get from one configuration to another: flip in place, relaunch, or new workers."""

import math
from dataclasses import dataclass, replace

from pearl_state.configuration import Configuration
from pearl_state.decision import SwitchKind


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchCosts:
    """Seconds for which a worker does not serve, by what is done to it. Immutable; `observe` averages them."""

    flip_s: float = 5.0
    """Prefill ↔ decode in place, weights resident (Prorsa measures about 5 s)."""
    relaunch_s: float = 20.0
    """Between colocation and disaggregation: role rebinding, graph recapture ("tens of seconds", PEARL 4.3.2)."""
    new_worker_s: float = 11.05
    """Finalization of an expansion; its preparation runs in the background (PEARL Table 3, Qwen3-8B)."""
    weight: float = 0.3
    """Weight of the newest observation."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for costs that are negative or not finite."""
        for name in ("flip_s", "relaunch_s", "new_worker_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"SwitchCosts.{name} = {value}: must be a finite number of at least 0")

    def of(self, kind: SwitchKind) -> float:
        """Seconds of one worker's switch."""
        match kind:
            case SwitchKind.NONE:
                return 0.0
            case SwitchKind.FLIP:
                return self.flip_s
            case SwitchKind.RELAUNCH:
                return self.relaunch_s
            case SwitchKind.NEW_WORKERS:
                return self.new_worker_s

    def observe(self, kind: SwitchKind, seconds: float) -> "SwitchCosts":
        """Average one measured switch in (EMA)."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"a {kind} took {seconds} s: a duration is a finite number of at least 0")
        mixed = (1 - self.weight) * self.of(kind) + self.weight * seconds
        match kind:
            case SwitchKind.NONE:
                return self
            case SwitchKind.FLIP:
                return replace(self, flip_s=mixed)
            case SwitchKind.RELAUNCH:
                return replace(self, relaunch_s=mixed)
            case SwitchKind.NEW_WORKERS:
                return replace(self, new_worker_s=mixed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """The way from one configuration to another."""

    kind: SwitchKind
    """The most expensive part of it."""
    flipped: int = 0
    """Survivors that change role within disaggregation."""
    relaunched: int = 0
    """Survivors that change mode."""
    joined: int = 0
    """Workers that are new."""
    left: int = 0
    """Workers that leave; free of charge."""
    cost_s: float = 0.0
    """Batch time lost: each affected worker's share of the pool, times the seconds it does not serve, plus what its
    lost prefix cache costs."""


def switch_between(
    current: Configuration | None, target: Configuration, costs: SwitchCosts, cached_prefill_s: float = 0.0
) -> Switch:
    """What must happen to get from `current` (None: nothing runs) to `target`, at best.

    Who leaves in a shrink is taken to be whoever the target needs least. Cost: a switch that keeps k of N workers from
    serving for t seconds costs k/N·t; and since a changed role empties the cache, k/N of all running contexts are
    prefilled again: `cached_prefill_s` is what that takes for all of them on one worker.
    """
    if current is None or current.workers == 0:
        joined = target.workers
        kind = SwitchKind.NEW_WORKERS if joined else SwitchKind.NONE
        return Switch(kind=kind, joined=joined, cost_s=costs.new_worker_s if joined else 0.0)
    joined = max(0, target.workers - current.workers)
    left = max(0, current.workers - target.workers)
    survivors = min(current.workers, target.workers)
    flipped = relaunched = 0
    if current.mode is not target.mode and target.workers:
        relaunched = survivors
    elif target.prefill:
        kept = min(current.prefill, target.prefill) + min(current.decode, target.decode)
        flipped = max(0, survivors - kept)
    if relaunched:
        kind = SwitchKind.RELAUNCH
    elif flipped:
        kind = SwitchKind.FLIP
    else:
        kind = SwitchKind.NEW_WORKERS if joined or left else SwitchKind.NONE
    pool = max(1, target.workers)
    cost = (relaunched * costs.relaunch_s + flipped * costs.flip_s + joined * costs.new_worker_s) / pool
    cost += (relaunched + flipped) / pool * cached_prefill_s / max(1, target.prefill or target.colocated)
    return Switch(kind=kind, flipped=flipped, relaunched=relaunched, joined=joined, left=left, cost_s=cost)
