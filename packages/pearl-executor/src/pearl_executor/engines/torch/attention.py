"""Packed attention: all tokens of an iteration in one row, each attending to its own request's KV in the pool.

Registered as a transformers attention implementation, so any model that calls `ALL_ATTENTION_FUNCTIONS` runs with it:
position-wise layers see one long row [1, tokens] without padding, attention finds the batch in its keyword arguments.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from pearl_executor.engines.torch.contract import EngineError
from pearl_executor.engines.torch.pool import KvPool, LayerShape

IMPLEMENTATION: Final = "pearl_packed"
"""Name under which transformers knows `packed_attention`."""


class PackedBatch(Protocol):
    """The requests behind one packed row."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        """Store `key` and `value` [tokens, KV heads, dim], attend. `query` and result: [tokens, heads, dim]."""
        ...


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_batch: PackedBatch,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: tensors [1, heads, tokens, dim] in, [1, tokens, heads, dim] out."""
    if attention_mask is not None or any(
        options.get(name) is not None for name in ("softcap", "s_aux", "position_bias")
    ):
        raise EngineError(f"{type(module).__name__} needs masks, soft caps, sinks or biases that the engine lacks")
    layer: int = module.layer_idx  # type: ignore[assignment]
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return packed_batch.attend(layer, query, key, value, scaling, sliding_window).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, packed_attention)


class ShapeProbe:
    """A batch that attends to nothing and notes what each layer would store."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.dtype = torch.float32

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        """Note the shapes; the result is zero."""
        del scaling, window
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2])
        self.dtype = key.dtype
        return query.new_zeros((*query.shape[:2], value.shape[2]))


@dataclass(slots=True)
class DecodeBatch:
    """One new token for each of several requests; all attend in one call."""

    pool: KvPool
    slots: Tensor
    """[requests]: where the new tokens' KV goes."""
    read: Tensor
    """[requests, longest]: slots of all tokens of each request, its new one included, padded with slot 0."""
    lengths: Tensor
    """[requests]: tokens of each request."""
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        """See `PackedBatch`. The query heads of a KV head take the place of query positions: no key is repeated."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        keys.index_copy_(0, self.slots, key)
        values.index_copy_(0, self.slots, value)
        read = self.read.flatten()
        requests, heads, dim = query.shape
        grouped = query.reshape(requests, key.shape[1], -1, dim)
        out = scaled_dot_product_attention(
            grouped,
            keys.index_select(0, read).view(*self.read.shape, *keys.shape[1:]).transpose(1, 2),
            values.index_select(0, read).view(*self.read.shape, *values.shape[1:]).transpose(1, 2),
            attn_mask=self._mask(window, query.dtype),
            scale=scaling,
        )
        return out.reshape(requests, heads, -1)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[requests, 1, 1, longest]: 0 where a request's new token may look, -inf elsewhere."""
        if window not in self._masks:
            position = torch.arange(self.read.shape[1], device=self.read.device)
            hidden = position >= self.lengths.unsqueeze(1)
            if window is not None:
                hidden |= position < self.lengths.unsqueeze(1) - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
            self._masks[window] = mask[:, None, None, :]
        return self._masks[window]


@dataclass(slots=True)
class Segment:
    """A prefill chunk: consecutive prompt tokens of one request, `begin` ≤ row index < `end` in the packed row."""

    begin: int
    end: int
    read: Tensor
    """[context]: slots of all tokens of the request up to the chunk's last."""
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype, groups: int) -> Tensor:
        """[groups · chunk, context]: each token sees itself and what is before it, at most `window` tokens."""
        if window not in self.masks:
            chunk, context = self.end - self.begin, len(self.read)
            key = torch.arange(context, device=self.read.device)
            query = key[context - chunk :].unsqueeze(1)
            hidden = key > query
            if window is not None:
                hidden |= key <= query - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
            self.masks[window] = mask.repeat(groups, 1)
        return self.masks[window]


@dataclass(slots=True)
class PrefillBatch:
    """Prompt chunks of several requests, packed without padding; attention goes chunk by chunk."""

    pool: KvPool
    slots: Tensor
    """[tokens]: where the tokens' KV goes."""
    segments: Sequence[Segment]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        """See `PackedBatch`."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        keys.index_copy_(0, self.slots, key)
        values.index_copy_(0, self.slots, value)
        out = query.new_empty((*query.shape[:2], value.shape[2]))
        for segment in self.segments:
            rows = slice(segment.begin, segment.end)
            whole = len(segment.read) == segment.end - segment.begin
            context_keys = key[rows] if whole else keys.index_select(0, segment.read)
            context_values = value[rows] if whole else values.index_select(0, segment.read)
            out[rows] = _attend_chunk(query[rows], context_keys, context_values, segment, scaling, window)
        return out


def _attend_chunk(
    query: Tensor, key: Tensor, value: Tensor, segment: Segment, scaling: float | None, window: int | None
) -> Tensor:
    """[chunk, heads, dim] over [context, KV heads, dim]: query heads of a KV head are stacked as further rows."""
    chunk, heads, dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    stacked = query.transpose(0, 1).reshape(1, kv_heads, groups * chunk, dim)
    out = scaled_dot_product_attention(
        stacked,
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        attn_mask=segment.mask(window, query.dtype, groups),
        scale=scaling,
    )
    return out.view(heads, chunk, -1).transpose(0, 1)
