"""Notes which worker served which request, and for how long: a `GenerationPort` around another one."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

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
        started_s = asyncio.get_running_loop().time()
        try:
            result = await self._port.generate(worker, request, on_chunk)
        except BaseException as error:
            self._failed(worker, None, request, started_s, error)
            raise
        self._ended(worker, None, request, started_s, result)
        return result

    async def generate_pair(
        self, prefill: Worker, decode: Worker, request: GenerateRequest, on_chunk: OnChunk
    ) -> GenerateResult:
        """See `GenerationPort`."""
        started_s = asyncio.get_running_loop().time()
        try:
            result = await self._port.generate_pair(prefill, decode, request, on_chunk)
        except BaseException as error:
            self._failed(decode, prefill, request, started_s, error)
            raise
        self._ended(decode, prefill, request, started_s, result)
        return result

    async def abort(self, worker: Worker, rid: str) -> None:
        """See `GenerationPort`."""
        await self._port.abort(worker, rid)

    def _ended(
        self, worker: Worker, prefill: Worker | None, request: GenerateRequest, started_s: float, result: GenerateResult
    ) -> None:
        self._record(
            RequestRecord(
                rid=request.rid,
                worker=worker.id,
                prefill=None if prefill is None else prefill.id,
                started_s=started_s,
                finished_s=asyncio.get_running_loop().time(),
                finish=str(result.finish),
                prompt_tokens=len(request.prompt),
                cached_tokens=result.cached_tokens,
                tokens=len(result.tokens),
                queue_s=result.queue_s,
                prefill_s=result.prefill_s,
                transfer_s=result.transfer_s,
                decode_s=result.decode_s,
            )
        )

    def _failed(
        self, worker: Worker, prefill: Worker | None, request: GenerateRequest, started_s: float, error: BaseException
    ) -> None:
        self._record(
            RequestRecord(
                rid=request.rid,
                worker=worker.id,
                prefill=None if prefill is None else prefill.id,
                started_s=started_s,
                finished_s=asyncio.get_running_loop().time(),
                finish=type(error).__name__,
                prompt_tokens=len(request.prompt),
            )
        )
