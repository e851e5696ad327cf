"""Exponential moving averages (PEARL section 5): adjacent steps are alike, but the workload drifts."""

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest


class Ema:
    """Averages named numbers and one list, each step weighing `weight`, all earlier ones together the rest."""

    def __init__(self, weight: float = 0.3) -> None:
        if not 0 < weight <= 1:
            raise ValueError(f"weight is {weight}; the newest observation weighs more than 0 and at most 1")
        self._weight = weight
        self._values: dict[str, float] = {}
        self._list: tuple[float, ...] = ()
        self.count = 0
        """Observations so far."""
        self.counts: dict[str, int] = {}
        """Observations so far of each name."""

    def observe(self, values: Mapping[str, float], fractions: Sequence[float] = ()) -> None:
        """Average one observation in. A shorter `fractions` counts as 0 beyond its end. Raises `ValueError` for NaN."""
        for name, value in values.items():
            if not math.isfinite(value):
                raise ValueError(f"{name} is {value}; only finite numbers can be averaged")
        weight = self._weight if self.count else 1.0
        for name, value in values.items():
            old = self._values.get(name, value)
            self.counts[name] = self.counts.get(name, 0) + 1
            self._values[name] = old + weight * (value - old)
        pairs = zip_longest(self._list, fractions, fillvalue=0.0)
        self._list = tuple(old + weight * (new - old) for old, new in pairs)
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
        kept = [value for value in self._list if value > 1e-3]
        return tuple(min(1.0, value) for value in kept)
