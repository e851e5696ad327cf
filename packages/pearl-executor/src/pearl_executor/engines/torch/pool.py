"""KvPool: keys and values of all tokens the engine holds, one slot a token, allocated once.

A request's tokens may lie in any slots; the slot table says where, one row per live request. Slot 0 stays zero and
unowned: rows point to it beyond their end, so that padding never reads another request's values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores for a token."""

    heads: int
    """KV heads."""
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shapes and type of the KV of a whole model."""

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        """The type's name, such as "float32"."""
        return str(self.dtype).removeprefix("torch.")


class KvPool:
    """Slots for `tokens` tokens, and a slot table of `rows` rows of `row_tokens` tokens."""

    def __init__(self, layout: KvLayout, tokens: int, rows: int, row_tokens: int, device: torch.device) -> None:
        self.layout = layout
        self.capacity = tokens
        self.device = device
        self._table_shape = (rows, row_tokens)
        self.allocate()
        self._free_slots = list(range(tokens, 0, -1))
        self._free_rows = list(range(rows - 1, -1, -1))

    @property
    def free(self) -> int:
        """Slots that no one owns."""
        return len(self._free_slots)

    @property
    def used(self) -> int:
        """Slots that live requests and kept prefixes own."""
        return self.capacity - len(self._free_slots)

    def allocate(self) -> None:
        """Take device memory; all slots hold zeros."""
        self.keys = [self._zeros(shape.heads, shape.key_dim) for shape in self.layout.layers]
        self.values = [self._zeros(shape.heads, shape.value_dim) for shape in self.layout.layers]
        self.table = torch.zeros(self._table_shape, dtype=torch.int64, device=self.device)

    def release(self) -> None:
        """Give device memory back. No slot is owned any more."""
        self.keys, self.values = [], []
        self.table = torch.zeros((0, 0), dtype=torch.int64, device=self.device)

    def tensors(self) -> list[Tensor]:
        """All device tensors of the pool."""
        return [*self.keys, *self.values, self.table]

    def take(self, count: int) -> list[int]:
        """Own `count` free slots. The caller made sure that they are there."""
        if count > len(self._free_slots):
            raise AssertionError(f"{count} KV slots taken, {len(self._free_slots)} free")
        split = len(self._free_slots) - count
        taken = self._free_slots[split:][::-1]
        del self._free_slots[split:]
        return taken

    def give_back(self, slots: Sequence[int]) -> None:
        """Disown slots."""
        self._free_slots.extend(reversed(slots))

    def take_row(self) -> int:
        """Own a row of the slot table."""
        return self._free_rows.pop()

    def set_row(self, row: int, slots: Sequence[int]) -> None:
        """Let `row` say that its first tokens lie in `slots`, and nothing follows."""
        self.table[row].zero_()
        self.table[row, : len(slots)] = self.indices(slots)

    def give_row_back(self, row: int) -> None:
        """Disown a row."""
        self._free_rows.append(row)

    def store(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put the KV of new tokens [tokens, heads, dim] into their slots. Returns the layer's whole pools."""
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)
        return keys, values

    def indices(self, numbers: Sequence[int]) -> Tensor:
        """Slot or row numbers as an index tensor on the device."""
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def read(self, slots: Sequence[int]) -> tuple[tuple[npt.NDArray[Any], ...], tuple[npt.NDArray[Any], ...]]:
        """Copy the KV of `slots` to host memory: keys and values per layer, [tokens, heads, dim]."""
        index = self.indices(slots)
        return tuple(_to_host(k[index]) for k in self.keys), tuple(_to_host(v[index]) for v in self.values)

    def write(self, slots: Sequence[int], keys: Sequence[npt.NDArray[Any]], values: Sequence[npt.NDArray[Any]]) -> None:
        """Copy KV from host memory (as `read` gives it) into `slots`."""
        index = self.indices(slots)
        for pools, arrays in ((self.keys, keys), (self.values, values)):
            for pool, array in zip(pools, arrays, strict=True):
                pool[index] = self._from_host(array)

    def _zeros(self, heads: int, dim: int) -> Tensor:
        return torch.zeros((self.capacity + 1, heads, dim), dtype=self.layout.dtype, device=self.device)

    def _from_host(self, array: npt.NDArray[Any]) -> Tensor:
        # A blob that came as bytes is read-only, which torch does not take.
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        return tensor.view(self.layout.dtype).to(self.device)


def _to_host(tensor: Tensor) -> npt.NDArray[Any]:
    tensor = tensor.cpu()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    array: npt.NDArray[Any] = np.asarray(tensor.numpy())
    return array
