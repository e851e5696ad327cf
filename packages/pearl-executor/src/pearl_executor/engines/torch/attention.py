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


@dataclass(frozen=True, slots=True)
class Terms:
    """What a layer's attention has beside queries, keys and values."""

    scaling: float | None = None
    """Factor of the scores; None means 1/√dim."""
    window: int | None = None
    """A token sees itself and the `window` - 1 tokens before; None means all."""
    softcap: float | None = None
    """Scores s become softcap · tanh(s / softcap)."""
    sinks: Tensor | None = None
    """[heads]: one more score per head that takes probability and gives no value."""

    @property
    def plain(self) -> bool:
        """Whether torch's own attention can do it."""
        return self.softcap is None and self.sinks is None


class PackedBatch(Protocol):
    """The requests behind one packed row."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, terms: Terms) -> Tensor:
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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: tensors [1, heads, tokens, dim] in, [1, tokens, heads, dim] out."""
    if attention_mask is not None or options.get("position_bias") is not None:
        raise EngineError(f"{type(module).__name__} brings its own attention mask or bias, which the engine lacks")
    layer: int = module.layer_idx  # type: ignore[assignment]
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    terms = Terms(scaling, sliding_window, softcap, s_aux)
    return packed_batch.attend(layer, query, key, value, terms).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, packed_attention)


class ShapeProbe:
    """A batch that attends to nothing and notes what each layer would store."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.windows: dict[int, int | None] = {}
        self.dtype = torch.float32

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, terms: Terms) -> Tensor:
        """Note the shapes; the result is zero."""
        self.windows[layer] = terms.window
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

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, terms: Terms) -> Tensor:
        """See `PackedBatch`. The query heads of a KV head take the place of query positions: no key is repeated."""
        keys, values = self.pool.store(layer, self.slots, key, value)
        read = self.read.flatten()
        requests, heads, dim = query.shape
        out = _attend(
            query.reshape(requests, key.shape[1], -1, dim),
            keys.index_select(0, read).view(*self.read.shape, *keys.shape[1:]).transpose(1, 2),
            values.index_select(0, read).view(*self.read.shape, *values.shape[1:]).transpose(1, 2),
            self._mask(terms.window, query.dtype),
            terms,
            None if terms.sinks is None else terms.sinks.view(1, key.shape[1], -1, 1),
        )
        return out.reshape(requests, heads, -1)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[requests, 1, 1, longest]: 0 where a request's new token may look, -inf elsewhere."""
        if window not in self._masks:
            key = torch.arange(self.read.shape[1], device=self.read.device)
            newest = self.lengths.unsqueeze(1) - 1
            self._masks[window] = _causal(newest, key, window, dtype)[:, None, None, :]
        return self._masks[window]


@dataclass(slots=True)
class Segment:
    """A prefill chunk: consecutive prompt tokens of one request, `begin` ≤ row index < `end` in the packed row."""

    begin: int
    end: int
    read: Tensor
    """[context]: slots of all tokens of the request up to the chunk's last."""
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether the chunk is all of the context, so that nothing is read from the pool."""
        return len(self.read) == self.end - self.begin

    def mask(self, terms: Terms, dtype: torch.dtype) -> Tensor | None:
        """[chunk, context]: 0 where a token may look, -inf elsewhere; None where torch's causal attention will do."""
        window = terms.window
        if self.whole and terms.plain and (window is None or window >= len(self.read)):
            return None
        if window not in self._masks:
            key = torch.arange(len(self.read), device=self.read.device)
            query = key[self.begin - self.end :].unsqueeze(1)
            self._masks[window] = _causal(query, key, window, dtype)
        return self._masks[window]


@dataclass(slots=True)
class PrefillBatch:
    """Prompt chunks of several requests, packed without padding; attention goes chunk by chunk."""

    pool: KvPool
    slots: Tensor
    """[tokens]: where the tokens' KV goes."""
    segments: Sequence[Segment]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, terms: Terms) -> Tensor:
        """See `PackedBatch`."""
        keys, values = self.pool.store(layer, self.slots, key, value)
        out = query.new_empty((*query.shape[:2], value.shape[2]))
        for segment in self.segments:
            rows = slice(segment.begin, segment.end)
            context_keys = key[rows] if segment.whole else keys.index_select(0, segment.read)
            context_values = value[rows] if segment.whole else values.index_select(0, segment.read)
            out[rows] = _attend_chunk(query[rows], context_keys, context_values, segment, terms)
        return out


def _attend_chunk(query: Tensor, key: Tensor, value: Tensor, segment: Segment, terms: Terms) -> Tensor:
    """[chunk, heads, dim] over [context, KV heads, dim]: KV heads take the place of the batch, none is repeated."""
    chunk, heads, dim = query.shape
    kv_heads, groups = key.shape[1], heads // key.shape[1]
    out = _attend(
        query.transpose(0, 1).reshape(kv_heads, groups, chunk, dim),
        key.transpose(0, 1).unsqueeze(1).expand(-1, groups, -1, -1),
        value.transpose(0, 1).unsqueeze(1).expand(-1, groups, -1, -1),
        segment.mask(terms, query.dtype),
        terms,
        None if terms.sinks is None else terms.sinks.view(kv_heads, groups, 1, 1),
    )
    return out.reshape(heads, chunk, -1).transpose(0, 1)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, terms: Terms, sinks: Tensor | None
) -> Tensor:
    """Attention over the last two axes; `mask` and `sinks` are broadcast to the scores. No mask means causal."""
    if mask is None or terms.plain:
        causal = mask is None
        return scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=terms.scaling)
    scores = query @ key.transpose(2, 3) * (terms.scaling or query.shape[-1] ** -0.5)
    if terms.softcap is not None:
        scores = terms.softcap * torch.tanh(scores / terms.softcap)
    scores = (scores + mask).float()
    context = scores.shape[-1]
    if sinks is not None:
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    return scores.softmax(-1)[..., :context].to(value.dtype) @ value


def _causal(query: Tensor, key: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """[queries, keys]: 0 where position `query` [queries, 1] sees position `key` [keys], -inf elsewhere."""
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
