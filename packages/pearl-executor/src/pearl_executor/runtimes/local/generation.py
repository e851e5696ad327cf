"""Model calls in flight, as the parent sees them: tokens so far, who serves them, and who wanted them ended."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pearl_executor.ports import Finish, GenerateResult, OnChunk, TokenChunk, WorkerError
from pearl_executor.runtimes.local.frames import Frame
from pearl_executor.runtimes.local.wire import Head, chunks_from_wire
from pearl_state.trajectory import WeightSpan, merge_spans
from pearl_state.worker import WorkerId


@dataclass(slots=True, eq=False)
class ModelCall:
    """One call of `generate` or `generate_pair`."""

    rid: str
    on_chunk: OnChunk
    workers: tuple[WorkerId, ...]
    """The worker, or the prefill and the decode worker."""
    broken: "asyncio.Future[Exception]"
    """Done once `on_chunk` raised."""
    over: "asyncio.Future[None]"
    decoding: bool = True
    """False while its prefill worker has it and its decode worker does not know of it yet."""
    interrupted: bool = False
    """To be ended as soon as its prefill is over."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[WeightSpan] = field(default_factory=list)

    def receive(self, tokens: tuple[int, ...], logprobs: tuple[float, ...], version: int) -> None:
        """Take new tokens and hand them on."""
        if self.broken.done():
            return
        chunk = TokenChunk(tokens, logprobs, version, len(self.tokens))
        self.tokens += tokens
        self.logprobs += logprobs
        self.spans[-1:] = merge_spans([*self.spans[-1:], WeightSpan(version, len(tokens))])
        try:
            self.on_chunk(chunk)
        except Exception as error:
            # The caller's own error ends the caller's own call, and nothing else.
            self.broken.set_result(error)

    def result(self, head: Head) -> GenerateResult:
        """The end of the call, as a worker reported it."""
        return GenerateResult(
            finish=Finish(head["finish"]),
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            spans=tuple(self.spans),
            cached_tokens=head["cached_tokens"],
            queue_s=head["queue_s"],
            prefill_s=head["prefill_s"],
            decode_s=head["decode_s"],
            transfer_s=head["transfer_s"],
        )


class ModelCalls:
    """All model calls in flight, by request id."""

    def __init__(self) -> None:
        self._calls: dict[str, ModelCall] = {}

    @contextmanager
    def entry(self, rid: str, on_chunk: OnChunk, *workers: WorkerId) -> Iterator[ModelCall]:
        """A call, in flight inside the `with` block. Raises `WorkerError` for an id that is in flight.

        Tokens that come for it after the block are dropped.
        """
        if rid in self._calls:
            raise WorkerError(f"request {rid} is in flight already; each attempt needs an id of its own")
        loop = asyncio.get_running_loop()
        call = ModelCall(rid, on_chunk, workers, loop.create_future(), loop.create_future(), len(workers) == 1)
        self._calls[rid] = call
        try:
            yield call
        finally:
            del self._calls[rid]
            call.over.set_result(None)

    def deliver(self, frame: Frame) -> None:
        """Hand the tokens of one iteration to their calls."""
        for rid, tokens, logprobs, version in chunks_from_wire(frame):
            call = self._calls.get(rid)
            if call is not None:
                call.receive(tokens, logprobs, version)

    def get(self, rid: str) -> ModelCall | None:
        """The call of that id, if it is in flight."""
        return self._calls.get(rid)

    def on_the_way_to(self, worker: WorkerId) -> list[ModelCall]:
        """Calls that `worker` will decode but does not know of yet."""
        return [call for call in self._calls.values() if call.workers[-1] == worker and not call.decoding]
