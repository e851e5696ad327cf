"""Requests, tokens and reports as frames: JSON values in the head, token ids and log-probabilities in the body."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pearl_executor.ports import Finish, GenerateRequest, GenerateResult, MemoryReport, Sampling, TokenChunk
from pearl_executor.runtimes.local.frames import Frame, FrameError
from pearl_state.roles import Role
from pearl_state.samples import DecodeSample, EngineSamples, PrefillSample, TransferSample

Head = dict[str, Any]


def request_to_wire(request: GenerateRequest) -> tuple[Head, bytes]:
    """Head and body of a model call."""
    head = {
        "rid": request.rid,
        "max_new_tokens": request.max_new_tokens,
        "sampling": asdict(request.sampling),
        "affinity": request.affinity,
        "position": request.position,
    }
    return head, array("i", request.prompt).tobytes()


def request_from_wire(frame: Frame) -> GenerateRequest:
    """The model call of `request_to_wire`."""
    head = frame.head
    sampling = dict(head["sampling"])
    sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    return GenerateRequest(
        rid=head["rid"],
        prompt=tuple(array("i", frame.body)),
        max_new_tokens=head["max_new_tokens"],
        sampling=Sampling(**sampling),
        affinity=head["affinity"],
        position=head["position"],
    )


def chunks_to_wire(chunks: Mapping[str, TokenChunk]) -> tuple[Head, bytes]:
    """One notice with the new tokens of all requests of an iteration."""
    tokens, logprobs = array("i"), array("d")
    index = []
    for rid, chunk in chunks.items():
        index.append((rid, len(chunk.tokens), chunk.version))
        tokens.extend(chunk.tokens)
        logprobs.extend(chunk.logprobs)
    return {"op": "tokens", "chunks": index}, tokens.tobytes() + logprobs.tobytes()


def chunks_from_wire(frame: Frame) -> Iterable[tuple[str, tuple[int, ...], tuple[float, ...], int]]:
    """Request id, tokens, log-probabilities and weight version of each chunk. Raises `FrameError`."""
    index: Sequence[tuple[str, int, int]] = frame.head["chunks"]
    total = sum(count for _, count, _ in index)
    tokens, logprobs = array("i"), array("d")
    split = total * tokens.itemsize
    if len(frame.body) != split + total * logprobs.itemsize:
        raise FrameError(f"a token notice announces {total} tokens but has {len(frame.body)} bytes")
    tokens.frombytes(frame.body[:split])
    logprobs.frombytes(frame.body[split:])
    start = 0
    for rid, count, version in index:
        end = start + count
        yield rid, tuple(tokens[start:end]), tuple(logprobs[start:end]), version
        start = end


def result_to_wire(result: GenerateResult, transfer_s: float) -> Head:
    """How a model call ended. Its tokens were sent before."""
    return {
        "finish": result.finish,
        "cached_tokens": result.cached_tokens,
        "queue_s": result.queue_s,
        "prefill_s": result.prefill_s,
        "decode_s": result.decode_s,
        "transfer_s": transfer_s,
    }


def interrupted_before_start() -> Head:
    """The end of a model call that never reached the engine."""
    return result_to_wire(GenerateResult(finish=Finish.INTERRUPTED, tokens=(), logprobs=(), spans=()), 0.0)


def memory_from_wire(head: Head) -> MemoryReport:
    """A memory report from the dictionary that `asdict` made of it."""
    return MemoryReport(head["before_bytes"], head["after_bytes"])


def samples_from_wire(head: Head) -> EngineSamples:
    """Samples from the dictionary that `asdict` made of them."""
    values = dict(head)
    return EngineSamples(
        role=Role(values.pop("role")),
        decode=tuple(DecodeSample(**s) for s in values.pop("decode")),
        prefill=tuple(PrefillSample(**s) for s in values.pop("prefill")),
        transfer=tuple(TransferSample(**s) for s in values.pop("transfer")),
        **values,
    )
