"""Tokens and log-probabilities that nobody computes: a simulation counts them."""

from collections.abc import Sequence
from functools import lru_cache
from typing import overload


class ConstantSequence(Sequence[float]):
    """`length` times the same value, in no memory."""

    __slots__ = ("_length", "_value")

    def __init__(self, value: float, length: int) -> None:
        self._value = value
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[float]: ...
    def __getitem__(self, index: int | slice) -> float | Sequence[float]:
        if isinstance(index, slice):
            return ConstantSequence(self._value, len(range(*index.indices(self._length))))
        if not -self._length <= index < self._length:
            raise IndexError(index)
        return self._value


@lru_cache(maxsize=4096)
def logprobs(count: int) -> Sequence[float]:
    """Log-probabilities of `count` simulated tokens."""
    return ConstantSequence(-1.0, count)
