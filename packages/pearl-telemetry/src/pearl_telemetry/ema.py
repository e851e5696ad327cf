"""Exponential moving averages (PEARL section 5): adjacent steps are alike, but the workload drifts."""

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest

_VANISHING = 1e-3
"""Fraction that is no more than what an earlier step left behind."""


class Ema:
    """Averages named numbers and two lists, each step weighing `weight`, all earlier ones together the rest."""

    def __init__(self, weight: float = 0.3) -> None:
        if not 0 < weight <= 1:
            raise ValueError(f"weight is {weight}; the newest observation weighs more than 0 and at most 1")
        self._weight = weight
        self._values: dict[str, float] = {}
        self._list: tuple[float, ...] = ()
        self._amounts: tuple[float, ...] = ()
        self.count = 0
        """Observations so far."""
        self.counts: dict[str, int] = {}
        """Observations so far of each name."""

    def observe(
        self, values: Mapping[str, float], fractions: Sequence[float] = (), amounts: Sequence[float] = ()
    ) -> None:
        """Average one observation in. A shorter list counts as 0 beyond its end. Raises `ValueError` for NaN.

        `amounts` belong to those of whom `fractions` tells how many there are, and are averaged with that weight.
        """
        for name, value in values.items():
            if not math.isfinite(value):
                raise ValueError(f"{name} is {value}; only finite numbers can be averaged")
        weight = self._weight if self.count else 1.0
        for name, value in values.items():
            old = self._values.get(name, value)
            self.counts[name] = self.counts.get(name, 0) + 1
            self._values[name] = old + weight * (value - old)
        shares = [share * amount for share, amount in zip(fractions, amounts, strict=False)]
        self._list = _mixed(self._list, fractions, weight)
        self._amounts = _mixed(self._amounts, shares, weight)
        self.count += 1

    def __getitem__(self, name: str) -> float:
        """The average of `name`; `KeyError` where it was never observed."""
        return self._values[name]

    def get(self, name: str, default: float) -> float:
        """The average of `name`, or `default`."""
        return self._values.get(name, default)

    @property
    def fractions(self) -> tuple[float, ...]:
        """The averaged list, without its vanishing end."""
        kept = [value for value in self._list if value > _VANISHING]
        return tuple(min(1.0, value) for value in kept)

    @property
    def amounts(self) -> tuple[float, ...]:
        """The averaged amounts, of as many as `fractions`."""
        pairs = zip(self._list, self._amounts, strict=False)
        return tuple(amount / share for share, amount in pairs if share > _VANISHING)


def _mixed(before: Sequence[float], after: Sequence[float], weight: float) -> tuple[float, ...]:
    pairs = zip_longest(before, after, fillvalue=0.0)
    return tuple(old + weight * (new - old) for old, new in pairs)
