"""The injection policy f(·) of Prorsa eq. (4): how many samples are launched because others became eligible."""

import math
from dataclasses import dataclass
from typing import Protocol


class InjectionPolicy(Protocol):
    """f: expected eligible completions within a horizon → expected launches within it, with the sampler held fixed."""

    def launches(self, eligible: float, horizon_s: float) -> float:
        """Launches, not necessarily whole; 0 for a horizon of 0."""
        ...


@dataclass(frozen=True, slots=True)
class NoInjection:
    """Synchronous rollout: nothing is launched before the batch is over."""

    def launches(self, eligible: float, horizon_s: float) -> float:
        """See `InjectionPolicy`."""
        del eligible, horizon_s
        return 0.0


@dataclass(frozen=True, slots=True)
class ReplaceOnReward:
    """One new sample for every eligible one, as long as the staleness bound has `room` for more."""

    room: float = math.inf

    def launches(self, eligible: float, horizon_s: float) -> float:
        """See `InjectionPolicy`."""
        return min(eligible, self.room) if horizon_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class FixedRate:
    """`per_s` samples a second, whatever completes."""

    per_s: float

    def launches(self, eligible: float, horizon_s: float) -> float:
        """See `InjectionPolicy`."""
        del eligible
        return self.per_s * max(0.0, horizon_s)


@dataclass(frozen=True, slots=True)
class GroupReplenishment:
    """A whole group of `size` when a group is complete.

    `missing` holds, for each open group, how many of its members are not complete. The expected completions are taken
    to go to the groups nearest to their end: a plug-in estimate, as the paper says, not an expectation.
    """

    size: int
    missing: tuple[int, ...]

    def launches(self, eligible: float, horizon_s: float) -> float:
        """See `InjectionPolicy`."""
        if horizon_s <= 0:
            return 0.0
        groups = 0
        for count in sorted(self.missing):
            # The expected completions are sums of probabilities: a hair below a whole number is that number.
            if count > eligible + 1e-9:
                break
            eligible -= count
            groups += 1
        return float(groups * self.size)
