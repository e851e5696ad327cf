"""Notes which worker served which request, and for how long: a `GenerationPort` around another one."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from pearl_executor.ports import GenerateRequest, GenerateResult, GenerationPort, OnChunk
from pearl_state.worker import Worker, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request from its dispatch to its end; one line of `requests.jsonl`. Times on the run's clock, seconds."""

    rid: str
    """Trajectory, turn and attempt, joined by dots."""
    worker: WorkerId
    """Who decoded (or did both)."""
    prefill: WorkerId | None
    """Who prefilled, under disaggregation."""
    started_s: float
    finished_s: float
    finish: str
    """`stop`, `length`, `interrupted`, or the name of the failure."""
    prompt_tokens: int
    cached_tokens: int = 0
    tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0


class RecordedGeneration:
    """Passes calls on to `port` unchanged and tells `record` of each that ended, however it ended."""

    def __init__(self, port: GenerationPort, record: Callable[[RequestRecord], None]) -> None:
        self._port = port
        self._record = record

    async def generate(self, worker: Worker, request: GenerateRequest, on_chunk: OnChunk) -> GenerateResult:
        """See `GenerationPort`."""
        return await self._noted(worker, None, request, self._port.generate(worker, request, on_chunk))

    async def generate_pair(
        self, prefill: Worker, decode: Worker, request: GenerateRequest, on_chunk: OnChunk
    ) -> GenerateResult:
        """See `GenerationPort`."""
        answer = self._port.generate_pair(prefill, decode, request, on_chunk)
        return await self._noted(decode, prefill, request, answer)

    async def abort(self, worker: Worker, rid: str) -> None:
        """See `GenerationPort`."""
        await self._port.abort(worker, rid)

    async def _noted(
        self, worker: Worker, prefill: Worker | None, request: GenerateRequest, answer: Awaitable[GenerateResult]
    ) -> GenerateResult:
        """The answer, on record."""
        loop = asyncio.get_running_loop()
        record = partial(
            RequestRecord,
            rid=request.rid,
            worker=worker.id,
            prefill=None if prefill is None else prefill.id,
            started_s=loop.time(),
            prompt_tokens=len(request.prompt),
        )
        try:
            result = await answer
        except BaseException as error:
            self._record(record(finished_s=loop.time(), finish=type(error).__name__))
            raise
        self._record(
            record(
                finished_s=loop.time(),
                finish=str(result.finish),
                cached_tokens=result.cached_tokens,
                tokens=len(result.tokens),
                queue_s=result.queue_s,
                prefill_s=result.prefill_s,
                transfer_s=result.transfer_s,
                decode_s=result.decode_s,
            )
        )
        return result
