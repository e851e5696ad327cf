"""Model calls on SGLang servers: one stream, or two under disaggregation, and how each may end."""

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from pearl_executor.engines.sglang import bodies
from pearl_executor.engines.sglang.answers import Answer, AnswerError
from pearl_executor.engines.sglang.client import RefusedError, SglangClient, StreamEndedError
from pearl_executor.engines.sglang.options import SglangTimeouts
from pearl_executor.engines.sglang.server import SglangServer
from pearl_executor.ports import (
    Finish,
    GenerateRequest,
    GenerateResult,
    OnChunk,
    TransferError,
    WorkerError,
)

_EXIT_REPORT_S = 0.3


@dataclass(slots=True, eq=False)
class Call:
    """A model call in flight."""

    rid: str
    servers: tuple[SglangServer, ...]
    """The server, or the prefill and the decode server."""
    on_chunk: OnChunk
    answer: Answer = field(default_factory=Answer)
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its stream shall be closed from this side."""
    interrupted: bool = False
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with its first token, or with its end: under disaggregation its hand-over is over then."""

    def has_part(self, server: SglangServer) -> bool:
        """Whether `server` still works on it."""
        return server is self.servers[-1] or (server in self.servers and not self.begun.is_set())


class Calls:
    """All model calls in flight, by request id."""

    def __init__(self, client: SglangClient, timeouts: SglangTimeouts) -> None:
        self._client = client
        self._timeouts = timeouts
        self._calls: dict[str, Call] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- running ----------------------------------------------------------------------------------------------------

    async def colocated(self, server: SglangServer, request: GenerateRequest, on_chunk: OnChunk) -> GenerateResult:
        """The whole call on one server."""
        with self._entry(Call(request.rid, (server,), on_chunk)) as call:
            await self._wait_open(call)
            if not call.interrupted:
                await self._stream(call, server, bodies.generate(request))
            return _result(call, cached_tokens=call.answer.cached_tokens)

    async def pair(
        self, prefill: SglangServer, decode: SglangServer, request: GenerateRequest, on_chunk: OnChunk
    ) -> tuple[GenerateResult, int]:
        """The same body to both servers at once; the decode server's answer is the result.

        Also returns how many prompt tokens the decode server held already; the result tells the prefill server's.
        """
        with self._entry(Call(request.rid, (prefill, decode), on_chunk)) as call:
            await self._wait_open(call)
            if call.interrupted:
                return _result(call), 0
            room = (prefill.options.host, prefill.ports.bootstrap, secrets.randbits(62))
            body = bodies.generate(request, room)
            first = asyncio.ensure_future(self._prefill(prefill, body))
            try:
                await self._stream(call, decode, body, beside=first)
                prefilled = await self._prefilled(first)
                if prefilled is not None and prefilled.finish is Finish.INTERRUPTED:
                    # Its prefill was ended on purpose (new weights, a drain): what it has goes on elsewhere.
                    call.interrupted = True
            finally:
                if not first.done():
                    first.cancel()
                    await asyncio.wait([first], timeout=1.0)
                elif not first.cancelled():
                    # Seen, also where something else ended the call.
                    first.exception()
            transfer_s = max(0.0, call.answer.first_token_s - prefilled.total_s) if prefilled else 0.0
            result = _result(
                call,
                cached_tokens=prefilled.cached_tokens if prefilled else 0,
                prefill_s=prefilled.prefill_s if prefilled else 0.0,
                transfer_s=transfer_s,
            )
            return result, call.answer.cached_tokens

    async def _prefilled(self, first: "asyncio.Task[Answer]") -> Answer | None:
        """The prefill server's own account; None where it does not come in time: the result does not hang on it."""
        await asyncio.wait([first], timeout=self._timeouts.grace_s)
        if not first.done() or first.cancelled() or first.exception() is not None:
            return None
        return first.result()

    async def _prefill(self, server: SglangServer, body: bodies.Body) -> Answer:
        answer = Answer()
        async with aclosing(
            self._client.stream(server.url + "/generate", body, timeout_s=self._timeouts.generate_s)
        ) as events:
            async for event in events:
                answer.add(event)
        if answer.failure:
            raise TransferError(f"{server} did not prefill: {answer.failure}")
        return answer

    async def _stream(
        self, call: Call, server: SglangServer, body: bodies.Body, beside: "asyncio.Task[Answer] | None" = None
    ) -> None:
        """Read one stream to its end, or until the call is cut, or the prefill beside it fails."""
        reading = asyncio.ensure_future(self._read(call, server, body))
        cut = asyncio.ensure_future(call.cut.wait())
        try:
            waiting: set[asyncio.Future[Any]] = {reading, cut}
            if beside is not None:
                waiting.add(beside)
            while not reading.done() and not call.cut.is_set():
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if beside is not None and beside in waiting and beside.done():
                    waiting.discard(beside)
                    error = None if beside.cancelled() else beside.exception()
                    if error is not None and not call.interrupted:
                        await self._raise(call, error)
            if reading.done():
                error = reading.exception()
                if error is not None and not call.interrupted:
                    await self._raise(call, error)
            else:
                # Hanging up ends the request in the server too.
                call.answer.finish = Finish.INTERRUPTED
        finally:
            cut.cancel()
            if not reading.done():
                if not call.interrupted:
                    self._abort_later(call)
                reading.cancel()
                with suppress(asyncio.CancelledError, WorkerError):
                    await reading
            elif not reading.cancelled():
                # Seen, also where the caller is cancelled in the same moment.
                reading.exception()

    async def _read(self, call: Call, server: SglangServer, body: bodies.Body) -> None:
        async with aclosing(
            self._client.stream(server.url + "/generate", body, timeout_s=self._timeouts.generate_s)
        ) as events:
            async for event in events:
                chunk = call.answer.add(event)
                if chunk is not None:
                    call.begun.set()
                    call.on_chunk(chunk)

    async def _raise(self, call: Call, error: BaseException) -> None:
        """Raise what a failed stream means: a server that is gone, a hand-over that failed, or a refusal."""
        if not isinstance(error, WorkerError | AnswerError):
            raise error
        if isinstance(error, StreamEndedError | RefusedError):
            # A process that ends is reaped in a moment, and then the error can say which it was.
            exits = [server.process.exited for server in call.servers]
            await asyncio.wait(exits, timeout=_EXIT_REPORT_S, return_when=asyncio.FIRST_COMPLETED)
        for server in call.servers:
            if server.process.exited.done():
                raise server.lost() from error
        kind = TransferError if len(call.servers) == 2 else WorkerError
        raise kind(f"{call.rid} on {' and '.join(map(str, call.servers))}: {error}") from error

    async def _wait_open(self, call: Call) -> None:
        """Hold the call while one of its servers is being changed, and while a pair holds different weights."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._timeouts.versions_s
        cut = asyncio.ensure_future(call.cut.wait())
        try:
            while not call.interrupted and not _may_begin(call):
                if loop.time() > until_s:
                    raise self._never_opened(call)
                closed: list[asyncio.Future[Any]] = [
                    asyncio.ensure_future(s.open.wait()) for s in call.servers if not s.open.is_set()
                ]
                exits: list[asyncio.Future[Any]] = [s.process.exited for s in call.servers]
                try:
                    await asyncio.wait([*closed, *exits, cut], timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for task in closed:
                        task.cancel()
                for server in call.servers:
                    if server.process.exited.done() or server.ending:
                        raise server.lost()
        finally:
            cut.cancel()

    def _never_opened(self, call: Call) -> WorkerError:
        states = ", ".join(
            f"{s} holds weights {s.version}{'' if s.open.is_set() else ', closed'}" for s in call.servers
        )
        kind = TransferError if len(call.servers) == 2 else WorkerError
        return kind(f"{call.rid} could not begin within {self._timeouts.versions_s:g} s: {states}")

    # ---- ending -----------------------------------------------------------------------------------------------------

    async def interrupt(self, server: SglangServer) -> int:
        """End every call that this server has a part in. Returns how many there were.

        A hand-over under way is given a moment to end first: aborted in its middle it keeps both servers busy until
        their long time limits, since neither may touch the KV before the other let go of it.
        """
        calls = self.of(server)
        await asyncio.gather(*(self._end(call) for call in calls))
        if not server.disaggregated:
            # Also what this side does not know of may still run there.
            await self._tell(server, bodies.abort_all(), calls)
        return len(calls)

    async def _end(self, call: Call) -> None:
        call.interrupted = True
        if len(call.servers) == 2 and not call.begun.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timeouts.handover_s):
                    await call.begun.wait()
        self._mark(call)
        await self._abort_everywhere(call)

    async def abort(self, rid: str) -> None:
        """End one call, if it is in flight."""
        call = self._calls.get(rid)
        if call is not None:
            await self._end(call)

    async def _abort_everywhere(self, call: Call) -> None:
        """At the servers themselves, decode first: it also tells its prefill server."""
        for server in reversed(call.servers):
            await self._tell(server, bodies.abort(call.rid), [call])

    def _mark(self, call: Call) -> None:
        """Whatever its servers do, its stream is closed a moment later."""
        asyncio.get_running_loop().call_later(self._timeouts.grace_s, call.cut.set)

    async def _tell(self, server: SglangServer, body: bodies.Body, calls: list[Call]) -> None:
        try:
            if not server.process.exited.done():
                await server.tell("/abort_request", body, timeout_s=self._timeouts.grace_s)
        except WorkerError:
            # It did not take the abort: hanging up ends the request too.
            for call in calls:
                call.cut.set()

    def _abort_later(self, call: Call) -> None:
        """Nobody waits for this call any more: its servers need not work on it for the seconds until they notice."""
        task = asyncio.get_running_loop().create_task(self._abort_everywhere(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Wait for aborts under way; each is bounded."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def of(self, server: SglangServer) -> list[Call]:
        """Calls in flight that this server has a part in; a prefill server's part ends with the hand-over."""
        return [call for call in self._calls.values() if call.has_part(server)]

    @contextmanager
    def _entry(self, call: Call) -> Iterator[Call]:
        if call.rid in self._calls:
            raise WorkerError(f"request {call.rid} is in flight already; each attempt needs an id of its own")
        self._calls[call.rid] = call
        try:
            yield call
        finally:
            del self._calls[call.rid]
            call.begun.set()


def _may_begin(call: Call) -> bool:
    if not all(server.open.is_set() for server in call.servers):
        return False
    # KV that other weights computed must not be decoded with: both sides load at the same time, one is a little later.
    versions = {server.version for server in call.servers}
    return len(versions) == 1 and None not in versions


def _result(
    call: Call, *, cached_tokens: int = 0, prefill_s: float | None = None, transfer_s: float = 0.0
) -> GenerateResult:
    answer = call.answer
    if call.interrupted and answer.finish is None:
        answer.finish = Finish.INTERRUPTED
    if answer.failure and not call.interrupted:
        kind = TransferError if len(call.servers) == 2 else WorkerError
        raise kind(f"{call.rid} on {' and '.join(map(str, call.servers))}: {answer.failure}")
    if answer.finish is None:
        raise WorkerError(f"{call.rid} on {call.servers[-1]}: it ended without a reason")
    return GenerateResult(
        finish=answer.finish,
        tokens=tuple(answer.tokens),
        logprobs=tuple(answer.logprobs),
        spans=tuple(answer.spans),
        cached_tokens=cached_tokens,
        queue_s=answer.queue_s,
        prefill_s=answer.prefill_s if prefill_s is None else prefill_s,
        decode_s=max(0.0, answer.total_s - answer.first_token_s),
        transfer_s=transfer_s,
    )
