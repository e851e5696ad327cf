"""One model call on a simulated worker or pair, from its dispatch to its answer."""

import asyncio
import math
from collections.abc import Callable

from pearl_executor.ports import Finish, GenerateRequest, GenerateResult, OnChunk, TokenChunk, WorkerLostError
from pearl_rl.simulation.process import SimulatedProcess
from pearl_rl.simulation.requests import EngineRequest, Outcome
from pearl_rl.simulation.tokens import logprobs
from pearl_state.trajectory import WeightSpan, merge_spans

Send = Callable[[SimulatedProcess, SimulatedProcess, int, float], tuple[float, float]]
"""Begin a hand-over of so many tokens now; returns when it begins and when it is over."""


class SimulatedCall:
    """Listens to the engine requests that make up one call, and delivers tokens as `range` objects."""

    __slots__ = (
        "_arrival",
        "_delivered",
        "_on_chunk",
        "_prefilling",
        "_send",
        "_spans",
        "_start",
        "_transfer_s",
        "decode",
        "future",
        "on_decode",
        "on_prefill",
        "prefill",
    )

    def __init__(
        self,
        request: GenerateRequest,
        on_chunk: OnChunk,
        new_request: Callable[[], EngineRequest],
        decode: SimulatedProcess,
        prefill: SimulatedProcess | None,
        send: Send,
    ) -> None:
        self.future: asyncio.Future[GenerateResult] = asyncio.get_running_loop().create_future()
        self.decode = decode
        self.prefill = prefill
        self.on_decode = new_request()
        self.on_decode.payload = self
        self.on_prefill = self.on_decode
        if prefill is not None:
            self.on_prefill = new_request()
            self.on_prefill.payload = self
        self._prefilling = False
        self._on_chunk = on_chunk
        self._send = send
        self._start = len(request.prompt)
        self._delivered = 0
        self._spans: list[WeightSpan] = []
        self._arrival: asyncio.TimerHandle | None = None
        self._transfer_s = 0.0

    def begin(self) -> None:
        """Hand the request to its engine; of a pair, to the prefill side once the decode side has room for it."""
        now_s = self.decode.now_s()
        if self.prefill is None:
            self.decode.engine.submit(self.on_decode, now_s)
            self.decode.follow()
        elif self.decode.engine.reserve(self.on_decode, now_s):
            self._prefill()

    def close(self) -> None:
        """Nobody waits any more: stop computing for it where it is not over, and let go of its requests, which refer
        to it (a cycle for each call is much garbage).
        """
        if not self.future.done() or self.future.cancelled():
            self._end_prefill()
            if not self.decode.lost:
                self.decode.handle(self.decode.engine.abort(self.on_decode, self.decode.now_s()))
        self.on_decode.payload = self.on_prefill.payload = None

    # ---- what engines say -------------------------------------------------------------------------------------------

    def on_outcome(self, process: SimulatedProcess, request: EngineRequest, outcome: Outcome) -> None:
        """See `EngineListener`."""
        match outcome:
            case Outcome.RESERVED:
                self._prefill()
            case Outcome.PREFILLED:
                if self.prefill is None:
                    self._deliver(1, process.version or 0)
                else:
                    self._hand_over(process)
            case Outcome.FINISHED:
                self._deliver(request.generated - self._delivered, process.version or 0)
                self._resolve(Finish.LENGTH)

    def on_interrupted(self, process: SimulatedProcess, request: EngineRequest) -> None:
        """See `EngineListener`. The other side of a pair is freed too."""
        # A hand-over that is under way ends with either side: what would arrive belongs to nobody.
        self._end_prefill()
        if request is self.on_decode:
            self._deliver(request.generated - self._delivered, process.version or 0)
        else:
            self._end_decode()
        self._resolve(Finish.INTERRUPTED)

    def on_lost(self, error: WorkerLostError) -> None:
        """See `EngineListener`."""
        self._end_prefill()
        self._end_decode()
        if not self.future.done():
            self.future.set_exception(error)

    def on_new_weights(self, process: SimulatedProcess, request: EngineRequest) -> None:
        """See `EngineListener`."""
        if request is self.on_decode and self._delivered:
            self._deliver(process.engine.generated(request) - self._delivered, process.version or 0)

    # ---- the way of a pair ------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        assert self.prefill is not None
        if self.prefill.lost:
            self.on_lost(WorkerLostError(f"worker {self.prefill.worker.id} is gone", self.prefill.worker.id))
            return
        self._prefilling = True
        self.prefill.engine.submit(self.on_prefill, self.prefill.now_s())
        self.prefill.follow()

    def _hand_over(self, prefill: SimulatedProcess) -> None:
        """Send what the decode side lacks; its prefill engine keeps the KV until then."""
        now_s = prefill.now_s()
        tokens = self.on_decode.prompt_tokens - self.on_decode.cached_tokens
        _, over_s = self._send(prefill, self.decode, tokens, now_s)
        self._transfer_s = over_s - now_s
        version = prefill.version or 0
        self._arrival = asyncio.get_running_loop().call_at(over_s, self._arrived, version)

    def _arrived(self, version: int) -> None:
        self._arrival = None
        self._end_prefill()
        outcomes = self.decode.engine.join(self.on_decode, self.decode.now_s())
        self._deliver(1, version)
        self.decode.handle(outcomes)

    def _end_prefill(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None
        process, request = self.prefill, self.on_prefill
        if self._prefilling and process is not None and not process.lost and process.engine.holds(request):
            process.handle(process.engine.abort(request, process.now_s()))
        self._prefilling = False

    def _end_decode(self) -> None:
        if not self.decode.lost and self.decode.engine.holds(self.on_decode):
            self.decode.handle(self.decode.engine.abort(self.on_decode, self.decode.now_s()))

    # ---- the answer -------------------------------------------------------------------------------------------------

    def _deliver(self, count: int, version: int) -> None:
        if count <= 0:
            return
        first = self._start + self._delivered
        offset, self._delivered = self._delivered, self._delivered + count
        spans = self._spans
        if spans and spans[-1].version == version:
            spans[-1] = WeightSpan(version, spans[-1].tokens + count)
        else:
            spans.append(WeightSpan(version, count))
        self._on_chunk(TokenChunk(range(first, first + count), logprobs(count), version, offset))

    def _resolve(self, finish: Finish) -> None:
        if self.future.done():
            return
        first, on_decode, now_s = self.on_prefill, self.on_decode, self.decode.now_s()
        began_s = now_s if math.isnan(first.prefill_s) else first.prefill_s
        token_s = now_s if math.isnan(on_decode.token_s) else on_decode.token_s
        count = self._delivered
        self.future.set_result(
            GenerateResult(
                finish=finish,
                tokens=range(self._start, self._start + count),
                logprobs=logprobs(count),
                spans=merge_spans(self._spans),
                cached_tokens=first.cached_tokens,
                queue_s=max(0.0, min(began_s, token_s) - on_decode.submitted_s),
                prefill_s=max(0.0, token_s - self._transfer_s - began_s),
                decode_s=max(0.0, now_s - token_s),
                transfer_s=self._transfer_s,
            )
        )
