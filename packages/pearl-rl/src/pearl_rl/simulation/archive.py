"""A growing list of records that takes little memory: all but the newest ones are packed."""

import pickle
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Generic, TypeVar, overload

_T = TypeVar("_T")

_BLOCK: Final = 128
"""Records packed together: enough alike for a tenth of their size, few enough to unpack at once."""


class Archive(Sequence[_T], Generic[_T]):
    """Append-only, but for the newest record. Reads like a tuple; reading all of it unpacks one block at a time.

    The records of a long simulation are much alike: packed they are a tenth to a thirtieth of what they are as objects,
    so that a simulated week holds hardly more memory than a day.
    """

    def __init__(self, records: Iterable[_T] = ()) -> None:
        self._packed: list[bytes] = []
        self._newest: list[_T] = []
        for record in records:
            self.append(record)

    def append(self, record: _T) -> None:
        """Add a record. It must be picklable and never change again."""
        if len(self._newest) == 2 * _BLOCK:
            self._packed.append(zlib.compress(pickle.dumps(self._newest[:_BLOCK], pickle.HIGHEST_PROTOCOL)))
            del self._newest[:_BLOCK]
        self._newest.append(record)

    def pop(self) -> _T:
        """Take the newest record back. Raises `IndexError` where there is none."""
        return self._newest.pop()

    def __len__(self) -> int:
        return _BLOCK * len(self._packed) + len(self._newest)

    def __iter__(self) -> Iterator[_T]:
        for block in self._packed:
            yield from _unpacked(block)
        yield from list(self._newest)

    @overload
    def __getitem__(self, index: int) -> _T: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[_T]: ...

    def __getitem__(self, index: int | slice) -> _T | Sequence[_T]:
        if isinstance(index, slice):
            return tuple(self)[index]
        place = range(len(self))[index]
        block, inside = divmod(place, _BLOCK)
        if block < len(self._packed):
            record: _T = _unpacked(self._packed[block])[inside]
            return record
        return self._newest[place - _BLOCK * len(self._packed)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Archive | tuple | list):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Archive({list(self)!r})"


def _unpacked(block: bytes) -> "list[_T]":
    records: list[_T] = pickle.loads(zlib.decompress(block))
    return records
