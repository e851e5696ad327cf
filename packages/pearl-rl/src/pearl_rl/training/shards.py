"""A rank's share of an update as bytes: packed by the control plane without torch, read by the rank without pickle.

The head describes the rows, `{"steps": [[[T, …] per micro-batch] per optimizer step]}`; the body holds, for all rows in
that order: tokens int32, log-probabilities float32, masks uint8 (T each), then advantages and weights float32 (1 each).
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pearl_rl.training.batch import MiniBatch, TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


def encode_shard(batch: TrainBatch, plan: Sequence[MiniBatch], rank: int) -> tuple[dict[str, Any], bytes]:
    """Head and body of what `rank` trains on."""
    tokens, logprobs, mask = array("i"), array("f"), bytearray()
    advantages, weights = array("f"), array("f")
    steps: list[list[list[int]]] = []
    for step in plan:
        weight = dict(step.row_weights)
        steps.append([])
        for micro in step.ranks[rank]:
            steps[-1].append([len(batch.sequences[row].tokens) for row in micro.rows])
            for row in micro.rows:
                sequence = batch.sequences[row]
                tokens.extend(sequence.tokens)
                logprobs.extend(sequence.logprobs)
                mask += bytes(sequence.mask)
                advantages.append(sequence.advantage)
                weights.append(weight[row])
    body = b"".join((tokens.tobytes(), logprobs.tobytes(), mask, advantages.tobytes(), weights.tobytes()))
    return {"steps": steps}, body


def join_shards(shards: Sequence[tuple[Mapping[str, Any], bytes]]) -> tuple[dict[str, Any], bytes]:
    """All actors' shards as one message, for a rank that scores them all."""
    return {"shards": [[dict(head), len(body)] for head, body in shards]}, b"".join(body for _, body in shards)


def split_shards(head: Mapping[str, Any], body: bytes) -> list[tuple[Mapping[str, Any], bytes]]:
    """Read what `join_shards` wrote."""
    shards: list[tuple[Mapping[str, Any], bytes]] = []
    at = 0
    for own, length in head["shards"]:
        shards.append((own, body[at : at + length]))
        at += length
    return shards


@dataclass(frozen=True, slots=True)
class MicroTensors:
    """B rows, right-padded to T. Where there are none: one row of two masked tokens, to run collectives on."""

    tokens: "Tensor"
    """[B, T] int64."""
    mask: "Tensor"
    """[B, T] bool: generated tokens."""
    logprobs: "Tensor"
    """[B, T] float32: of the behaviour policy."""
    advantages: "Tensor"
    """[B] float32."""
    weights: "Tensor"
    """[B] float32: of each generated token of the row in the loss."""
    padding: int
    """Tokens of the B × T that are none."""


def decode_shard(head: Mapping[str, Any], body: bytes, device: str) -> list[list[MicroTensors]]:
    """Read what `encode_shard` wrote: for each optimizer step its micro-batches, on `device`."""
    return [[_to_device(_pad(rows), device) for rows in step] for step in _rows(head["steps"], bytearray(body))]


def _rows(steps: Sequence[Sequence[Sequence[int]]], body: bytearray) -> "Iterator[list[list[tuple[Tensor, ...]]]]":
    import torch

    lengths = [length for step in steps for micro in step for length in micro]
    total, count = sum(lengths), len(lengths)

    def section(dtype: "torch.dtype", items: int, offset: int) -> "Tensor":
        return torch.frombuffer(body, dtype=dtype, count=items, offset=offset) if items else torch.zeros(0, dtype=dtype)

    tokens = torch.split(section(torch.int32, total, 0), lengths)
    logprobs = torch.split(section(torch.float32, total, 4 * total), lengths)
    mask = torch.split(section(torch.uint8, total, 8 * total), lengths)
    # What follows is not aligned to 4 bytes.
    rest = torch.frombuffer(bytearray(body[9 * total :]), dtype=torch.float32) if count else torch.zeros(0)
    columns = list(zip(tokens, logprobs, mask, rest[:count], rest[count:], strict=True))
    at = 0
    for step in steps:
        micros: list[list[tuple[Tensor, ...]]] = []
        for micro in step:
            micros.append(list(columns[at : at + len(micro)]))
            at += len(micro)
        yield micros


def _pad(rows: "Sequence[tuple[Tensor, ...]]") -> MicroTensors:
    import torch

    height = max(1, len(rows))
    width = max([2, *(len(row[0]) for row in rows)])
    tokens = torch.zeros(height, width, dtype=torch.int64)
    logprobs = torch.zeros(height, width)
    mask = torch.zeros(height, width, dtype=torch.bool)
    advantages, weights = torch.zeros(height), torch.zeros(height)
    for number, (row_tokens, row_logprobs, row_mask, advantage, weight) in enumerate(rows):
        length = len(row_tokens)
        tokens[number, :length] = row_tokens
        logprobs[number, :length] = row_logprobs
        mask[number, :length] = row_mask.bool()
        advantages[number], weights[number] = advantage, weight
    padding = height * width - sum(len(row[0]) for row in rows)
    return MicroTensors(tokens, mask, logprobs, advantages, weights, padding)


def _to_device(micro: MicroTensors, device: str) -> MicroTensors:
    if device == "cpu":
        return micro
    tensors = (micro.tokens, micro.mask, micro.logprobs, micro.advantages, micro.weights)
    tokens, mask, logprobs, advantages, weights = (tensor.to(device) for tensor in tensors)
    return MicroTensors(tokens, mask, logprobs, advantages, weights, micro.padding)
