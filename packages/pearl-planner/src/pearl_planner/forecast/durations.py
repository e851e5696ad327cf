"""What is known of how long things take: empirical distributions and moving averages, each by class of what is alike.

A class is a tuple of names, the most telling first: (mode, image, node, load). A lookup takes the narrowest class with
enough samples, so a rare combination falls back to what it has in common with others (Prorsa appendices B.3, B.5).
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Hashable
from typing import Final, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Class = tuple[Hashable, ...]

_RUNNING: Final = 0.25
"""Of a class that is known at most so many run for each one that has ended: four fifths have."""

EMA_WEIGHT: Final = 0.1
"""α of eq. (9)."""


def ema(mean: float | None, observed: float, weight: float = EMA_WEIGHT) -> float:
    """τ ← (1 - α) τ + α τ̂ (Prorsa eq. 9); the first observation is the mean."""
    return observed if mean is None else (1.0 - weight) * mean + weight * observed


class EmpiricalDurations:
    """The newest `most` durations of one class, seconds."""

    __slots__ = ("_array", "_most", "_order", "_sorted", "_sums")

    def __init__(self, most: int = 512) -> None:
        self._most = most
        self._order: deque[float] = deque()
        self._sorted: list[float] = []
        self._array: Floats | None = None
        self._sums: Floats | None = None

    def __len__(self) -> int:
        return len(self._sorted)

    def observe(self, duration_s: float) -> None:
        """Take a completed duration in; the oldest gives way."""
        if not 0.0 <= duration_s < float("inf"):
            raise ValueError(f"a duration of {duration_s} s: must be a finite number of at least 0")
        if len(self._order) == self._most:
            del self._sorted[bisect_left(self._sorted, self._order.popleft())]
        self._order.append(duration_s)
        insort(self._sorted, duration_s)
        self._array = None

    def ends_within(self, elapsed_s: float, horizon_s: float) -> float:
        """q = Pr(T < e + S | T > e), in [0, 1] (Prorsa eqs. 2 and 6).

        What outlived every sample has no empirical tail: it is as likely to last as long again, S / (e + S).
        """
        if horizon_s <= 0.0:
            return 0.0
        longer = len(self._sorted) - bisect_right(self._sorted, elapsed_s)
        if not longer:
            return horizon_s / (elapsed_s + horizon_s) if elapsed_s + horizon_s > 0 else 1.0
        within = bisect_left(self._sorted, elapsed_s + horizon_s) - bisect_right(self._sorted, elapsed_s)
        return max(0, within) / longer

    def residuals_s(self, elapsed_s: Floats, horizon_s: float) -> tuple[Floats, Floats]:
        """For each elapsed time e: q as `ends_within`, and E[T - e | e < T < e + S], S/2 where no sample is there."""
        times, sums = self._frozen()
        first = np.searchsorted(times, elapsed_s, side="right")
        last = np.maximum(np.searchsorted(times, elapsed_s + horizon_s, side="left"), first)
        longer = len(times) - first
        count = last - first
        tail = horizon_s / np.maximum(elapsed_s + horizon_s, 1e-300)
        chance = np.where(longer > 0, count / np.maximum(longer, 1), tail)
        mean = (sums[last] - sums[first]) / np.maximum(count, 1) - elapsed_s
        return chance, np.where(count > 0, mean, 0.5 * horizon_s)

    def _frozen(self) -> tuple[Floats, Floats]:
        if self._array is None or self._sums is None:
            self._array = np.array(self._sorted, dtype=np.float64)
            self._sums = np.concatenate(([0.0], np.cumsum(self._array)))
        return self._array, self._sums


class _Collects(Protocol):
    """What is kept for a class."""

    def __len__(self) -> int: ...

    def observe(self, value: float, /) -> None: ...


class Average:
    """A moving average of one class (eq. 9) and how many observations it has."""

    __slots__ = ("_count", "value")

    def __init__(self) -> None:
        self._count = 0
        self.value = 0.0

    def __len__(self) -> int:
        return self._count

    def observe(self, value: float) -> None:
        """Average one observation in."""
        self.value = ema(self.value if self._count else None, value)
        self._count += 1


Kept = TypeVar("Kept", bound=_Collects)


class _Tally(Generic[Kept]):
    """What is known of one class; `kept` is None before its first observation."""

    __slots__ = ("ended", "kept", "running")

    def __init__(self) -> None:
        self.kept: Kept | None = None
        self.running = 0
        self.ended = 0


class ByClass(Generic[Kept]):
    """One `Kept` for each class and for all that it falls back to, down to the class of everything, ().

    What began and has not ended yet is told by `began`: of a class that is young only the short ones have ended, and
    what is known of it is true of those alone.
    """

    def __init__(self, make: type[Kept], least: int = 8) -> None:
        self._make = make
        self._least = least
        self._tallies: dict[Class, _Tally[Kept]] = {}
        self._chains: dict[Class, tuple[_Tally[Kept], ...]] = {}
        """Class → its own tally and those of all that it falls back to, the broadest last."""
        self._found: dict[Class, Kept | None] = {}

    def began(self, kind: Class) -> None:
        """Something of `kind` began that `observe` or `left` will end."""
        for tally in self._chain(kind):
            tally.running += 1
        self._found.clear()

    def left(self, kind: Class) -> None:
        """Something of `kind` that began ended as nothing that is observed."""
        for tally in self._chain(kind):
            if tally.running:
                tally.running -= 1
        self._found.clear()

    def observe(self, kind: Class, value: float) -> None:
        """Take one observation of `kind` in."""
        for tally in self._chain(kind):
            if tally.kept is None:
                tally.kept = self._make()
            tally.kept.observe(value)
            tally.ended += 1
            if tally.running:
                tally.running -= 1
        self._found.clear()

    def find(self, kind: Class) -> Kept | None:
        """What is known of the narrowest class around `kind` with at least `least` observations of which most have
        ended, else of everything; None before the first observation.
        """
        if kind in self._found:
            return self._found[kind]
        *narrower, everything = self._chain(kind)
        known = (tally.kept for tally in narrower if tally.running <= _RUNNING * tally.ended)
        best = next((kept for kept in known if kept is not None and len(kept) >= self._least), everything.kept)
        self._found[kind] = best
        return best

    def _chain(self, kind: Class) -> tuple[_Tally[Kept], ...]:
        chain = self._chains.get(kind)
        if chain is None:
            names = [kind[:length] for length in range(len(kind), -1, -1)]
            chain = self._chains[kind] = tuple(self._tallies.setdefault(name, _Tally()) for name in names)
        return chain


def magnitude(count: float) -> int:
    """A coarse size, so that loads and lengths that are about the same are one class: the power of two below."""
    return max(0, int(count)).bit_length()
