"""Turn scheduled sequences into what the model runs: one packed row of tokens and the batch behind it."""

from collections.abc import Sequence as Many
from dataclasses import dataclass

from torch import Tensor

from pearl_executor.engines.torch.attention import DecodeBatch, PackedBatch, PrefillBatch, Segment
from pearl_executor.engines.torch.pool import KvPool
from pearl_executor.engines.torch.scheduler import Chunk
from pearl_executor.engines.torch.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Input of one forward pass."""

    tokens: Tensor
    """[tokens]"""
    positions: Tensor
    """[tokens]: position of each in its own request."""
    wanted: Tensor
    """Row indices whose logits are needed."""
    batch: PackedBatch


def prefill_row(pool: KvPool, chunks: Many[Chunk]) -> PackedRow:
    """All chunks one after the other; logits of the last token of each that completes its prompt."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    segments: list[Segment] = []
    for chunk in chunks:
        sequence, begin, end = chunk.sequence, chunk.begin, chunk.end
        first = len(tokens)
        tokens += sequence.tokens[begin:end]
        positions += range(begin, end)
        slots += sequence.slots[begin:end]
        segments.append(Segment(first, len(tokens), pool.table[sequence.row, :end]))
    wanted = [segment.end - 1 for segment, chunk in zip(segments, chunks, strict=True) if chunk.completes]
    packed = pool.indices([*tokens, *positions, *slots])
    size = len(tokens)
    batch = PrefillBatch(pool, packed[2 * size :], segments)
    return PackedRow(packed[:size], packed[size : 2 * size], pool.indices(wanted), batch)


def decode_row(pool: KvPool, running: Many[Sequence]) -> PackedRow:
    """The newest token of each running sequence; its slot is entered into the slot table here."""
    size = len(running)
    packed = pool.indices(
        [
            *(s.tokens[-1] for s in running),
            *(len(s.tokens) - 1 for s in running),
            *(s.slots[-1] for s in running),
            *(s.row for s in running),
            *range(size),
        ]
    )
    tokens, positions, slots, rows, wanted = packed.view(5, size)
    pool.table[rows, positions] = slots
    longest = max(len(s.tokens) for s in running)
    batch = DecodeBatch(pool, slots, pool.table[:, :longest].index_select(0, rows), positions + 1)
    return PackedRow(tokens, positions, wanted, batch)
