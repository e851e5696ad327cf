"""What each split of the ranks was seen to wait. Pure.

The signals of TideRL section 5.2 speak of one boundary: a few long trajectories look like a deficit, and where the
staleness bound is 1 no micro-batch waits much longer than a step, so that nothing says of a rollout with a rank too
many that it stands still. What a split waited over several steps is the better witness between splits that were tried.
It says nothing of those that were not: with few tasks on each rank a turn's latency sets the pace and not their number,
so that waits do not follow from each other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

_NEWEST: Final = 0.3
"""Weight of the newest step. One step leaves the next a stock or a lack, so single ones say little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitWait:
    """What a split waited."""

    part: float
    """RWT + TWT over the duration of a step, smoothed."""
    age: int = 0
    """Steps since it was in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitMemory:
    """Waits of splits by their rollout ranks."""

    seen: Mapping[int, SplitWait] = field(default_factory=dict)
    keep_steps: int = 40
    """How long a split counts that is not in use; trajectories change as training goes on."""

    def with_step(self, rollout_ranks: int, waited_s: float, step_s: float) -> "WaitMemory":
        """After a step of `step_s` seconds on so many rollout ranks, in which both sides together waited `waited_s`."""
        if step_s <= 0.0:
            return self
        older = {ranks: replace(wait, age=wait.age + 1) for ranks, wait in self.seen.items()}
        seen = {ranks: wait for ranks, wait in older.items() if wait.age <= self.keep_steps}
        part, before = waited_s / step_s, seen.get(rollout_ranks)
        smoothed = part if before is None else before.part + _NEWEST * (part - before.part)
        return replace(self, seen={**seen, rollout_ranks: SplitWait(part=smoothed)})

    def part(self, rollout_ranks: int) -> float | None:
        """What so many rollout ranks waited, as a part of a step; None where they were not in use lately."""
        wait = self.seen.get(rollout_ranks)
        return None if wait is None else wait.part

    def saves(self, here: int, there: int) -> float | None:
        """Part of a step that so many rollout ranks as `there` waited less than `here`; None where one is not known."""
        if here not in self.seen or there not in self.seen:
            return None
        return self.seen[here].part - self.seen[there].part
