"""One model call's way over its attempts: what it has so far, and what each attempt adds.

An attempt is an epoch: what arrives for it after its end is void. Its tokens are kept whatever ends it, each with the
weight version that drew it; versions never go back within a trajectory and never lie below the floor that held when
the attempt was dispatched.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from pearl_executor.ports import Finish, GenerateRequest, GenerateResult, TokenChunk
from pearl_rl.rollout.calls import ModelCall, TurnResult
from pearl_rl.rollout.serving import Home, Route, Slot
from pearl_rl.rollout.statistics import RouterStatistics
from pearl_state.trajectory import WeightSpan, merge_spans


class Ending(StrEnum):
    """Why the router itself ended an attempt that a worker still ran."""

    LOST = "lost"
    """The table says that the worker is gone."""
    STALLED = "stalled"
    """No token for longer than the limit."""
    STALE = "stale"
    """A token of a weight version below the floor at dispatch."""
    REGRESSED = "regressed"
    """A token of an older version than the one before it."""
    DRAINED = "drained"
    """The router is being emptied."""


class ContractError(Exception):
    """A runtime gave a result that contradicts itself or the floor. `ending` says which rule it broke."""

    def __init__(self, message: str, ending: Ending | None = None) -> None:
        super().__init__(message)
        self.ending = ending


@dataclass(slots=True, eq=False)
class Progress:
    """A call and what its attempts brought so far."""

    call: ModelCall
    home: Home
    started_s: float
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    spans: list[WeightSpan] = field(default_factory=list[WeightSpan])
    attempts: int = 0
    failures: int = 0
    """Failing attempts since the last new token."""
    interruptions: int = 0
    cached_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    transfer_s: float = 0.0
    avoid: tuple[Slot, ...] = ()
    """Workers of the attempt that failed last."""
    last_error: str = ""

    @property
    def context_tokens(self) -> int:
        """Tokens that the next attempt's prompt has."""
        return len(self.call.prompt) + len(self.tokens)

    def request(self) -> GenerateRequest:
        """The next attempt: the prompt with all tokens so far, and what is left of the token budget."""
        call, generated = self.call, len(self.tokens)
        self.attempts += 1
        return GenerateRequest(
            rid=f"{call.trajectory}.{call.turn:04d}.{self.attempts:03d}",
            prompt=join(call.prompt, self.tokens) if generated else call.prompt,
            max_new_tokens=call.max_new_tokens - generated,
            sampling=call.sampling,
            affinity=call.trajectory,
            position=generated,
        )

    def ended(self) -> Finish | None:
        """Whether the tokens so far are a whole response: its end may have been lost with the worker's answer."""
        if self.tokens and self.tokens[-1] in self.call.sampling.stop_token_ids:
            return Finish.STOP
        return Finish.LENGTH if len(self.tokens) >= self.call.max_new_tokens else None

    def add(self, tokens: Sequence[int], logprobs: Sequence[float], spans: Sequence[WeightSpan]) -> int:
        """Keep tokens of an attempt that ended early. Returns how many."""
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)
        self.spans.extend(spans)
        if spans:
            self.home.version = spans[-1].version
        if tokens:
            self.failures = 0
            self.avoid = ()
        return len(tokens)

    def add_times(self, result: GenerateResult) -> None:
        """Sum up what an attempt measured."""
        self.cached_tokens += result.cached_tokens
        self.queue_s += result.queue_s
        self.prefill_s += result.prefill_s
        self.decode_s += result.decode_s
        self.transfer_s += result.transfer_s

    def restart(self) -> None:
        """Forget all tokens: the next attempt begins anew."""
        self.tokens.clear()
        self.logprobs.clear()
        self.spans.clear()

    def finish(self, finish: Finish, slot: Slot, now_s: float, last: GenerateResult | None = None) -> TurnResult:
        """The call's result; `last` is the final attempt's answer, which is not added yet."""
        tokens: Sequence[int] = self.tokens
        logprobs: Sequence[float] = self.logprobs
        spans = self.spans
        if last is not None:
            tokens = join(tokens, last.tokens) if tokens else last.tokens
            logprobs = [*logprobs, *last.logprobs] if logprobs else last.logprobs
            spans = [*spans, *last.spans]
            if last.spans:
                self.home.version = last.spans[-1].version
        return TurnResult(
            finish=finish,
            tokens=tokens,
            logprobs=logprobs,
            spans=merge_spans(spans),
            cached_tokens=self.cached_tokens,
            queue_s=self.queue_s,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            transfer_s=self.transfer_s,
            started_s=self.started_s,
            finished_s=now_s,
            interruptions=self.interruptions,
            worker=slot.worker.id,
        )


class AttemptLedger(Protocol):
    """Where attempts are accounted for."""

    statistics: RouterStatistics

    def first_token(self, attempt: "Attempt") -> None:
        """The first token of `attempt` arrived."""
        ...


class Attempt:
    """One request on one worker or pair, and the tokens that arrived for it."""

    __slots__ = (
        "_cancelled",
        "_ledger",
        "_task",
        "chunks",
        "context_tokens",
        "ending",
        "floor",
        "held_tokens",
        "kept_tokens",
        "last_at_s",
        "live",
        "loop",
        "progress",
        "queued_tokens",
        "received",
        "request",
        "route",
        "slots",
        "stayed",
        "version",
    )

    def __init__(
        self,
        progress: Progress,
        route: Route,
        floor: int,
        ledger: AttemptLedger,
    ) -> None:
        self.progress = progress
        self.route = route
        self.slots = route.slots
        self.request = progress.request()
        self.context_tokens = len(self.request.prompt)
        self.queued_tokens = 0
        self.held_tokens = 0
        self.kept_tokens = 0
        self.stayed = True
        self.floor = floor
        self.version = progress.home.version
        self.chunks: list[TokenChunk] = []
        self.received = 0
        self.live = True
        self.ending: Ending | None = None
        self._cancelled = False
        self.loop = asyncio.get_running_loop()
        self.last_at_s = self.loop.time()
        self._task: asyncio.Task[object] | None = None
        self._ledger = ledger

    async def run(self, answer: Awaitable[GenerateResult]) -> GenerateResult | None:
        """Await the port's answer. None where the router ended the attempt meanwhile; `ending` says why."""
        task = self._task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        try:
            return await answer
        except asyncio.CancelledError:
            if not self._cancelled:
                raise
            # As asyncio.timeout does: our own cancellation ends here, anybody else's goes on.
            self._cancelled = False
            if task.uncancel() > before:
                raise
            return None
        finally:
            self.live = False
            self._task = None
            if self._cancelled:
                self._cancelled = False
                task.uncancel()

    def on_chunk(self, chunk: TokenChunk) -> None:
        """Take newly generated tokens; those of an ended attempt, and those that came before, are dropped."""
        count = len(chunk.tokens)
        if not self.live:
            self._ledger.statistics.late_tokens += count
            return
        if 0 <= chunk.offset != self.received:
            if chunk.offset > self.received:
                # Tokens in between are missing: nothing after the gap can be kept from this attempt's stream.
                return
            repeated = min(self.received - chunk.offset, count)
            self._ledger.statistics.duplicate_tokens += repeated
            chunk = TokenChunk(chunk.tokens[repeated:], chunk.logprobs[repeated:], chunk.version, self.received)
            count -= repeated
        if count == 0:
            return
        if chunk.version < self.floor:
            self.give_up(Ending.STALE)
            return
        if chunk.version < self.version:
            self.give_up(Ending.REGRESSED)
            return
        self.version = chunk.version
        self.chunks.append(chunk)
        self.received += count
        self.last_at_s = self.loop.time()
        if self.received == count:
            self._ledger.first_token(self)

    def give_up(self, ending: Ending) -> None:
        """End the attempt now, whatever its worker does: `run` returns None as soon as the loop gets there."""
        if self.live and self.ending is None:
            self.ending = ending
            self.live = False
            # Not at once: tokens may arrive from inside the port's own coroutine, which cannot cancel itself.
            self.loop.call_soon(self._interrupt)

    def _interrupt(self) -> None:
        if self._task is not None:
            self._cancelled = True
            self._task.cancel()

    def collected(self) -> tuple[list[int], list[float], list[WeightSpan]]:
        """What arrived, within the token budget and up to a stop token: all that a lost answer leaves."""
        tokens: list[int] = []
        logprobs: list[float] = []
        spans: list[WeightSpan] = []
        left = self.request.max_new_tokens
        for chunk in self.chunks:
            kept = min(len(chunk.tokens), left)
            tokens.extend(chunk.tokens[:kept])
            logprobs.extend(chunk.logprobs[:kept])
            spans.append(WeightSpan(chunk.version, kept))
            left -= kept
            if left == 0:
                break
        return tokens, logprobs, spans

    def check(self, result: GenerateResult) -> None:
        """Raise `ContractError` for a result that contradicts itself, its request, or the weight-version rules."""
        count = len(result.tokens)
        if len(result.logprobs) != count or sum(span.tokens for span in result.spans) != count:
            raise ContractError(
                f"{self.request.rid}: {count} tokens with {len(result.logprobs)} logprobs and spans {result.spans}"
            )
        if count > self.request.max_new_tokens:
            raise ContractError(f"{self.request.rid}: {count} tokens, asked for {self.request.max_new_tokens}")
        version = self.progress.home.version
        for span in result.spans:
            if span.version < self.floor:
                raise ContractError(
                    f"{self.request.rid}: tokens of version {span.version}, floor {self.floor}", Ending.STALE
                )
            if span.version < version:
                raise ContractError(
                    f"{self.request.rid}: version goes back {version} -> {span.version}", Ending.REGRESSED
                )
            version = span.version


def join(first: Sequence[int], second: Sequence[int]) -> Sequence[int]:
    """Both after each other; stays a `range` where a simulation counts tokens on."""
    if isinstance(first, range) and isinstance(second, range) and first.stop == second.start:
        return range(first.start, second.stop)
    return [*first, *second]
