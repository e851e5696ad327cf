"""One inference engine, request by request: continuous batching, chunked prefill, a prefix cache, a real KV budget.

Time jumps from event to event. While the batch stays the same, decode iterations are summed analytically over the
growing contexts; an arrival cuts such a run at the next boundary of an iteration. The engine knows no clock: whoever
drives it calls `advance` when `wake_s` comes.

As SGLang schedules: waiting prompts come before decode, first come first served, up to `chunk_tokens` a time; with
`mixed` the running sequences decode one token in the same iteration. A batch that outgrows the KV budget gives the
sequence with the fewest generated tokens back to the queue (retraction).
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pearl_rl.simulation.batch import DecodeBatch
from pearl_rl.simulation.kernels import DecodeCurve
from pearl_rl.simulation.kv import KvPool
from pearl_rl.simulation.meter import EngineMeter
from pearl_rl.simulation.requests import EngineRequest, Outcome, SimulatedEngineLimits, Stage
from pearl_state.roles import Role


class IterationCosts(Protocol):
    """What iterations cost; see `kernels.WorkerCosts`."""

    def prefill_s(
        self, chunks: Sequence[tuple[int, int]], finished: int, sequences: int = 0, context_tokens: float = 0.0
    ) -> float:
        """An iteration with prefill, seconds."""
        ...

    def decode_curve(self, sequences: int) -> DecodeCurve:
        """Decode iterations of a batch of this size."""
        ...


@dataclass(slots=True)
class _Prefill:
    """A running iteration with prefill, and those of a long prompt that follow it whatever comes."""

    parts: list[tuple[EngineRequest, int]]
    """Request and the tokens of its prompt in this iteration."""
    began_s: float
    ends_s: float
    mixed: bool
    """Whether the running sequences decode along."""
    further_s: list[float]
    """Durations of the iterations after this one that the same prompt fills alone: whoever comes meanwhile waits."""

    @property
    def last_s(self) -> float:
        """When the last of them is over."""
        at_s = self.ends_s
        for seconds in self.further_s:
            at_s += seconds
        return at_s


@dataclass(slots=True)
class _Run:
    """Decode iterations under way with an unchanged batch."""

    curve: DecodeCurve
    context_tokens: float
    """Mean context at its first iteration."""
    iterations: int
    began_s: float
    ends_s: float
    sequences: int


class Engine:
    """One worker's engine. All methods take the time of the call; `advance` takes things to `wake_s`."""

    def __init__(self, costs: IterationCosts, limits: SimulatedEngineLimits, role: Role = Role.COLOCATED) -> None:
        self.limits = limits
        self.role = role
        self.kv = KvPool(limits.kv_tokens, keeps_left_paths=limits.keeps_left_paths)
        self.meter = EngineMeter()
        self._costs = costs
        self._waiting: deque[EngineRequest] = deque()
        self._prealloc: deque[EngineRequest] = deque()
        self._joining: list[EngineRequest] = []
        self._batch = DecodeBatch()
        self._prefill: _Prefill | None = None
        self._run: _Run | None = None
        self._blocked_until_s = 0.0
        self._in_hand: dict[EngineRequest, None] = {}
        self._decoded_last: bool | None = None

    # ---- reading ----------------------------------------------------------------------------------------------------

    @property
    def wake_s(self) -> float | None:
        """When something happens next by itself; None where nothing will."""
        prefill = self._prefill
        if prefill is not None:
            return prefill.last_s if prefill.further_s else prefill.ends_s
        return self._run.ends_s if self._run is not None else None

    @property
    def idle(self) -> bool:
        """Whether it holds no request."""
        return not self._in_hand

    @property
    def running(self) -> int:
        """Sequences in decode."""
        return len(self._batch)

    @property
    def waiting(self) -> int:
        """Requests without a token, those under prefill included."""
        return len(self._in_hand) - len(self._batch)

    def requests(self) -> list[EngineRequest]:
        """All requests in hand."""
        return list(self._in_hand)

    def holds(self, request: EngineRequest) -> bool:
        """Whether a request is in hand."""
        return request in self._in_hand

    def generated(self, request: EngineRequest) -> int:
        """Tokens that a request has, up to the last call of any method."""
        return self._batch.generated(request)

    # ---- requests come and go ---------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest, now_s: float) -> None:
        """Queue a prompt (colocated and prefill role). Raises `ValueError` where it can never fit."""
        self._check_fits(request)
        request.submitted_s = now_s
        self._in_hand[request] = None
        self._waiting.append(request)
        self._arrived(now_s)

    def reserve(self, request: EngineRequest, now_s: float) -> bool:
        """Decode role: take room for a context whose KV will come. False: it waits, `RESERVED` tells when."""
        self._check_fits(request)
        request.submitted_s = now_s
        self._in_hand[request] = None
        if not self._prealloc and self._has_room(request):
            self._take_room(request)
            return True
        self._prealloc.append(request)
        return False

    def join(self, request: EngineRequest, now_s: float) -> list[tuple[Outcome, EngineRequest]]:
        """Decode role: the KV of a reserved request came, with its first token; it decodes from a boundary on."""
        request.generated += 1
        request.token_s = now_s
        request.computed = request.prompt_tokens
        self.meter.generated_tokens += 1
        if request.generated >= request.new_tokens:
            self._end(request)
            return [(Outcome.FINISHED, request), *self._freed(now_s)]
        self._joining.append(request)
        self._arrived(now_s)
        return []

    def abort(self, request: EngineRequest, now_s: float) -> list[tuple[Outcome, EngineRequest]]:
        """Take a request out, with the tokens it has; what it computed is kept for its conversation.

        An iteration under way goes on to its end.
        """
        self._sync(now_s)
        self._leave(request)
        if self._run is not None:
            self._cut(now_s)
        elif self._prefill is not None:
            self._prefill.further_s.clear()
        return self._freed(now_s)

    def interrupt(self, now_s: float) -> list[EngineRequest]:
        """Take everything out at once; returns the requests, each with the tokens it has."""
        self._sync(now_s)
        taken = list(self._in_hand)
        for request in taken:
            self._leave(request)
        self._stop_iteration()
        return taken

    # ---- device state -----------------------------------------------------------------------------------------------

    def weights_changed(self, now_s: float, pause_s: float) -> None:
        """Newer weights: kept prefixes are void, and nothing advances for `pause_s`."""
        self._sync(now_s)
        self.kv.forget_all()
        if self._prefill is not None:
            self._prefill.ends_s += pause_s
            self._prefill.began_s += pause_s
        elif self._run is not None:
            self._run.ends_s += pause_s
            self._run.began_s += pause_s
        else:
            self._blocked_until_s = now_s + pause_s

    def clear(self) -> None:
        """Its device memory went, or its role changed: no prefix is kept. Only on an idle engine."""
        self.kv.forget_all()

    # ---- time -------------------------------------------------------------------------------------------------------

    def advance(self) -> list[tuple[Outcome, EngineRequest]]:
        """Take what is due at `wake_s` to its end and begin what follows."""
        if self._prefill is not None:
            while self._prefill.further_s:
                self._pass_chunk(self._prefill)
            now_s = self._prefill.ends_s
            outcomes = self._finish_prefill()
        elif self._run is not None:
            now_s = self._run.ends_s
            run, self._run = self._run, None
            self._settle(run, run.iterations, now_s)
            outcomes = self._finished()
        else:
            return []
        outcomes.extend(self._freed(now_s))
        return outcomes

    def pass_chunks(self, now_s: float) -> None:
        """Account for the chunks of a long prompt that are over by `now_s`, before anybody reads the meter."""
        prefill = self._prefill
        if prefill is not None:
            while prefill.further_s and prefill.ends_s <= now_s:
                self._pass_chunk(prefill)

    def _arrived(self, now_s: float) -> None:
        """Something waits: cut a run of decode iterations at its next boundary, or start."""
        if self._run is not None:
            self._cut(now_s)
        elif self._prefill is None:
            self._start(now_s)

    def _freed(self, now_s: float) -> list[tuple[Outcome, EngineRequest]]:
        """Room may have come free: let reserved ones in, and go on if nothing is under way."""
        outcomes: list[tuple[Outcome, EngineRequest]] = []
        while self._prealloc and self._has_room(self._prealloc[0]):
            request = self._prealloc.popleft()
            self._take_room(request)
            if request.generated:
                # Retracted before: its KV was kept in host memory and needs no prefill.
                self._batch.enter(request)
            else:
                outcomes.append((Outcome.RESERVED, request))
        if self._prefill is None and self._run is None:
            self._start(now_s)
        return outcomes

    def _start(self, now_s: float) -> None:
        """Begin the next iteration or run, if there is anything to do."""
        at_s = max(now_s, self._blocked_until_s)
        if self._joining:
            for request in self._joining:
                self._batch.enter(request)
            self._joining.clear()
        parts = self._admit() if self._waiting else None
        if parts:
            self._begin_prefill(parts, at_s)
        elif self._batch.members:
            self._begin_run(at_s)

    def _phase_change_s(self, *, decode: bool) -> float:
        """What it costs that the next iteration is a decode iteration, or one with prefill."""
        changes = self._decoded_last is not None and self._decoded_last is not decode
        self._decoded_last = decode
        if not changes or self.role is not Role.COLOCATED:
            return 0.0
        self.meter.switch_s += self.limits.phase_switch_s
        return self.limits.phase_switch_s

    # ---- prefill ----------------------------------------------------------------------------------------------------

    def _begin_prefill(self, parts: list[tuple[EngineRequest, int]], at_s: float) -> None:
        """Begin an iteration with these parts of prompts."""
        chunks, done = [], 0
        for request, tokens in parts:
            chunks.append((tokens, request.computed))
            done += request.computed + tokens >= request.prompt_tokens + request.generated
        decoding = self.running if self.limits.mixed and self.kv.attainable >= self.running else 0
        mean = self._batch.mean_context_tokens if decoding else 0.0
        seconds = self._costs.prefill_s(chunks, done, decoding, mean)
        at_s += self._phase_change_s(decode=False)
        for request, _ in parts:
            if math.isnan(request.prefill_s):
                request.prefill_s = at_s
        seconds += self.kv.loading_s()
        further_s: list[float] = []
        # A prompt on one of several attention ranks leaves the others to whoever comes.
        if not done and len(parts) == 1 and parts[0][1] >= self.limits.chunk_tokens and not self.limits.mixed:
            (request, tokens), past = parts[0], parts[0][0].computed
            # All of them but the last, which may leave room for others.
            later = range(past + tokens, request.context_tokens - tokens, tokens)
            further_s = [self._costs.prefill_s([(tokens, computed)], 0) for computed in later]
        self._prefill = _Prefill(parts, at_s, at_s + seconds, decoding > 0, further_s)

    def _pass_chunk(self, prefill: _Prefill) -> None:
        """Account for the iteration of a long prompt that is over, and go on to the next one."""
        request, tokens = prefill.parts[0]
        self.meter.prefilled(tokens, prefill.ends_s - prefill.began_s, 1, 0)
        request.computed += tokens
        prefill.began_s = prefill.ends_s
        prefill.ends_s += prefill.further_s.pop(0)

    def _admit(self) -> list[tuple[EngineRequest, int]]:
        """The chunks of the next iteration: first come, first served, as many as fit."""
        left, free = self.limits.chunk_tokens, self.limits.max_running - len(self._batch.members)
        most = self.limits.prompt_chunk_tokens or left
        parts: list[tuple[EngineRequest, int]] = []
        for request in self._waiting:
            if left <= 0 or len(parts) >= free:
                break
            if request.stage is Stage.WAITING:
                if not self._has_room(request):
                    break
                self._take_room(request)
                request.stage = Stage.PREFILL
            tokens = request.prompt_tokens + request.generated - request.computed
            tokens = min(tokens, left, most)
            parts.append((request, tokens))
            left -= tokens
        return parts

    def _finish_prefill(self) -> list[tuple[Outcome, EngineRequest]]:
        prefill, self._prefill = self._prefill, None
        assert prefill is not None
        outcomes: list[tuple[Outcome, EngineRequest]] = []
        tokens = 0
        for _, part in prefill.parts:
            tokens += part
        decoding = self.running if prefill.mixed else 0
        self.meter.prefilled(tokens, prefill.ends_s - prefill.began_s, len(prefill.parts), decoding)
        if decoding:
            self.kv.grow(self._batch.pass_iterations(1))
            outcomes.extend(self._finished())
        for request, part in prefill.parts:
            if request.stage is not Stage.PREFILL:
                continue
            request.computed += part
            if request.computed < request.prompt_tokens + request.generated:
                continue
            self._waiting.remove(request)
            outcomes.append((Outcome.PREFILLED, request))
            outcomes.extend(self._prefilled(request, prefill.ends_s))
        return outcomes

    def _prefilled(self, request: EngineRequest, now_s: float) -> list[tuple[Outcome, EngineRequest]]:
        """A prompt is computed and its first token drawn."""
        if math.isnan(request.token_s):
            request.token_s = now_s
        self.kv.computed(request.root, min(request.root_tokens, request.prompt_tokens))
        if self.role is Role.PREFILL:
            # The first token belongs to the decode side; the KV stays until it was handed over.
            request.stage = Stage.RESERVED
            return []
        request.generated += 1
        self.meter.generated_tokens += 1
        if request.generated >= request.new_tokens:
            self._end(request)
            return [(Outcome.FINISHED, request)]
        self._batch.enter(request)
        return []

    # ---- decode -----------------------------------------------------------------------------------------------------

    def _begin_run(self, at_s: float) -> None:
        batch = self._batch
        while (sequences := len(batch.members)) and (affordable := self.kv.attainable // sequences) < 1:
            self._retract()
        if not sequences:
            return
        iterations = min(batch.until_next_end(), affordable)
        curve = self._costs.decode_curve(sequences)
        mean = batch.mean_context_tokens
        at_s += self._phase_change_s(decode=True)
        self._run = _Run(curve, mean, iterations, at_s, at_s + curve.run_s(mean, iterations), sequences)

    def _retract(self) -> None:
        """Give the member with the fewest generated tokens back to the queue."""
        victim = min(self._batch.members, key=self.generated)
        self._batch.leave(victim)
        assert victim.hold is not None
        self.kv.drop(victim.hold)
        victim.hold = None
        victim.computed = 0
        victim.retractions += 1
        self.meter.retractions += 1
        victim.stage = Stage.WAITING
        (self._prealloc if self.role is Role.DECODE else self._waiting).append(victim)

    def _settle(self, run: _Run, iterations: int, now_s: float) -> None:
        """Account for finished iterations of a run."""
        if iterations == 0:
            return
        tokens = self._batch.pass_iterations(iterations)
        self.kv.grow(tokens)
        context = run.context_tokens + 0.5 * (iterations - 1)
        self.meter.decoded(run.sequences, iterations, now_s - run.began_s, tokens, context)

    def _finished(self) -> list[tuple[Outcome, EngineRequest]]:
        """Members that have all their tokens."""
        outcomes: list[tuple[Outcome, EngineRequest]] = []
        while (request := self._batch.ended()) is not None:
            self._end(request)
            outcomes.append((Outcome.FINISHED, request))
        return outcomes

    def _cut(self, now_s: float) -> None:
        """End the run under way at the first boundary of an iteration after `now_s`."""
        run = self._run
        assert run is not None
        elapsed = now_s - run.began_s
        done = run.curve.iterations_within(run.context_tokens, max(0.0, elapsed), run.iterations)
        if done + 1 < run.iterations:
            run.iterations = done + 1
            run.ends_s = run.began_s + run.curve.run_s(run.context_tokens, run.iterations)

    def _sync(self, now_s: float) -> None:
        """Settle the iterations that are over by `now_s`, so that counts are those of that moment."""
        self.pass_chunks(now_s)
        run = self._run
        if run is None:
            return
        done = run.curve.iterations_within(run.context_tokens, max(0.0, now_s - run.began_s), run.iterations)
        # The last one is left to `advance`, which also ends those that it completes.
        done = min(done, run.iterations - 1)
        if done <= 0:
            return
        at_s = run.began_s + run.curve.run_s(run.context_tokens, done)
        self._settle(run, done, at_s)
        run.began_s = at_s
        run.iterations -= done
        run.context_tokens += done

    # ---- bookkeeping ------------------------------------------------------------------------------------------------

    def _check_fits(self, request: EngineRequest) -> None:
        if request.new_tokens < 1 or request.prompt_tokens < 1:
            raise ValueError(f"{request.rid}: {request.prompt_tokens} prompt and {request.new_tokens} new tokens")
        needed = request.prompt_tokens + request.new_tokens
        if needed > self.limits.kv_tokens:
            raise ValueError(f"{request.rid}: {needed} tokens never fit a KV budget of {self.limits.kv_tokens} tokens")

    def _has_room(self, request: EngineRequest) -> bool:
        conversation, root = self._names(request)
        room = self.kv.room_for(conversation, root, request.root_tokens, request.context_tokens)
        others = len(self._batch)
        if self.role is Role.PREFILL or (others == 0 and self.kv.pinned == 0):
            return room >= 0
        return room >= self.limits.reserve_tokens * (others + 1)

    def _take_room(self, request: EngineRequest) -> None:
        context = request.context_tokens
        conversation, root = self._names(request)
        found = self.kv.match(conversation, root, context, request.reusable)
        request.hold = self.kv.take(conversation, root, request.root_tokens, context, found)
        if self.role is not Role.DECODE:
            found = self.kv.load(conversation, root, found, min(request.reusable, context - 1))
        request.cached_tokens = request.computed = found
        request.stage = Stage.RESERVED
        self.meter.cached_tokens += found

    def _names(self, request: EngineRequest) -> tuple[str, str]:
        """Under which names its conversation and its root are cached; empty where nothing is."""
        if self.role is Role.DECODE and not self.limits.decode_prefix_cache:
            return "", ""
        return request.conversation, request.root

    def _leave(self, request: EngineRequest) -> None:
        """Take a request out from wherever it is."""
        stage = request.stage
        if stage is Stage.RUNNING:
            self._batch.leave(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        elif request in self._prealloc:
            self._prealloc.remove(request)
        elif request in self._joining:
            self._joining.remove(request)
        self._end(request)
        if self._run is not None and not len(self._batch):
            self._run = None

    def _end(self, request: EngineRequest) -> None:
        """Free or keep what a request occupied, and forget it."""
        if request.hold is not None:
            # Of a decode side whose KV never came, only what was cached before is there.
            there = request.computed if request.stage in (Stage.PREFILL, Stage.RESERVED) else request.context_tokens
            self.kv.keep(self._names(request)[0], request.hold, there)
            request.hold = None
        request.stage = Stage.ENDED
        self._in_hand.pop(request, None)

    def _stop_iteration(self) -> None:
        self._prefill = None
        self._run = None
