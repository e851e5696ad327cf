"""PrefixCache: KV that ended requests leave behind, for the next turn of the same trajectory.

One entry per affinity (the trajectory's id), each with slots of its own. A new request takes over the part of the
entry that equals its prompt. Everything here was computed by one and the same weights: `clear` on every load.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pearl_executor.engines.torch.pool import KvPool


@dataclass(slots=True)
class _Entry:
    tokens: npt.NDArray[np.int64]
    slots: list[int]


class PrefixCache:
    """Kept prefixes over the slots of `pool`, least recently kept first out."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self.tokens = 0
        """Slots owned here; all of them can be evicted."""

    def __len__(self) -> int:
        return len(self._entries)

    def keep(self, affinity: str, tokens: list[int], slots: list[int]) -> None:
        """Own `slots`, which hold the KV of `tokens`, in place of what `affinity` had. Without affinity, free them."""
        if old := self._entries.pop(affinity, None):
            self._free(old.slots)
        if not affinity or not slots:
            self._pool.give_back(slots)
            return
        self._entries[affinity] = _Entry(np.asarray(tokens, dtype=np.int64), slots)
        self.tokens += len(slots)

    def match(self, affinity: str, tokens: Sequence[int]) -> int:
        """Length of the longest common prefix of `tokens` and what is kept for `affinity`."""
        entry = self._entries.get(affinity)
        if entry is None:
            return 0
        length = min(len(entry.tokens), len(tokens))
        differs = entry.tokens[:length] != np.asarray(tokens[:length], dtype=np.int64)
        return int(differs.argmax()) if differs.any() else length

    def take(self, affinity: str, tokens: list[int]) -> list[int]:
        """Hand over the slots of the longest common prefix with `tokens`; the rest of that entry goes."""
        length = self.match(affinity, tokens)
        entry = self._entries.pop(affinity, None)
        if entry is None:
            return []
        self.tokens -= length
        self._free(entry.slots[length:])
        return entry.slots[:length]

    def slots(self, affinity: str, length: int) -> list[int]:
        """The first `length` slots kept for `affinity`, which stay here."""
        return self._entries[affinity].slots[:length]

    def evict(self, tokens: int) -> None:
        """Free at least `tokens` slots, or all: ends of the least recently kept prefixes first."""
        while tokens > 0 and self._entries:
            affinity, entry = next(iter(self._entries.items()))
            keep = max(0, len(entry.slots) - tokens)
            tokens -= len(entry.slots) - keep
            self._free(entry.slots[keep:])
            entry.tokens, entry.slots = entry.tokens[:keep], entry.slots[:keep]
            if not keep:
                del self._entries[affinity]

    def clear(self) -> None:
        """Free everything."""
        self.evict(self.tokens)

    def _free(self, slots: list[int]) -> None:
        self.tokens -= len(slots)
        self._pool.give_back(slots)
