"""One rollout batch under one fixed configuration, without a control plane: what a configuration is worth.

The same engines, links and scripts as in a whole simulation, driven by one heap of events instead of asyncio, several
times faster. Trajectories stay where their prefix is unless that worker is much busier than the least loaded one.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pearl_rl.rollout.serving import ServingLimits
from pearl_rl.rollout.statistics import PrefixUse
from pearl_rl.simulation.engine import Engine, IterationCosts
from pearl_rl.simulation.links import KvLinks
from pearl_rl.simulation.meter import COUNTERS
from pearl_rl.simulation.requests import EngineRequest, Outcome, SimulatedEngineLimits
from pearl_rl.simulation.workload import Script
from pearl_state.configuration import Configuration
from pearl_state.roles import Role
from pearl_state.samples import EngineSamples
from pearl_state.worker import WorkerId

RIGID_SLACK: Final = 2.0
RIGID_RATIO: Final = 0.25
"""Requests, and part of them, by which ROLL's workers may differ before a trajectory moves, where it is not bound."""
_LIMITS: Final = ServingLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerModel:
    """What all workers of a batch run have in common."""

    costs: IterationCosts
    limits: SimulatedEngineLimits
    kv_bytes_per_token: float
    link_bytes_per_s: float
    link_latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOutcome:
    """How a batch went."""

    makespan_s: float
    durations_s: tuple[float, ...]
    """Of each trajectory."""
    prefill_s: float
    """Engine time in iterations with prefill, all workers, seconds."""
    decode_s: float
    switch_s: float
    """Between the two, on colocated workers."""
    prefill_tokens: int
    cached_tokens: int
    generated_tokens: int
    transferred_bytes: int
    retractions: int
    decode_by_batch: Mapping[int, tuple[int, float]]
    """Running sequences of a worker → decode iterations with so many, and their seconds, over all workers."""
    cached_by_turn: tuple[tuple[int, ...], ...]
    """Of each trajectory, for each turn: prompt tokens that the prefix cache of who computed it held."""
    kept_tokens: int
    """Context of all turns but the first ones at the turn before: what caches hold at best."""
    moved_tokens: int
    """Part of `kept_tokens` that was found no more because a trajectory left it behind on another worker."""
    samples: tuple[EngineSamples, ...]
    """What each worker's engine measured."""


@dataclass(slots=True, eq=False)
class _Play:
    """A trajectory on its way."""

    number: int
    script: Script
    turn: int = 0
    context: int = 0
    stable: int = 1 << 60
    prefill: int = -1
    decode: int = -1
    on_prefill: EngineRequest | None = None
    on_decode: EngineRequest | None = None
    finished_s: float = 0.0
    asked: int = 0
    """Context of the turn before."""
    kept: int = 0
    """That of the turn before this one; 0 at the first."""
    stayed: bool = True
    """Whether this turn is computed where the one before was."""
    found: list[int] = field(default_factory=list[int])


@dataclass(slots=True)
class _Worker:
    engine: Engine
    load: int = 0
    queued_tokens: int = 0
    armed_s: float = -1.0
    cached: dict[int, int] = field(default_factory=dict)


class _BatchRun:
    def __init__(
        self,
        scripts: Sequence[Script],
        stable_fraction: float,
        configuration: Configuration,
        model: WorkerModel,
        slack: float,
        slack_ratio: float,
        reuse: float,
    ) -> None:
        self._model = model
        self._slack, self._slack_ratio, self._reuse = slack, slack_ratio, reuse
        self._stable = stable_fraction
        self._links = KvLinks(model.link_bytes_per_s, model.link_latency_s)
        roles = [Role.PREFILL] * configuration.prefill + [Role.DECODE] * configuration.decode
        roles += [Role.COLOCATED] * configuration.colocated
        self.workers = [_Worker(Engine(model.costs, model.limits, role)) for role in roles]
        self._first = range(configuration.prefill)
        self._second = range(configuration.prefill, len(roles))
        self.plays = [_Play(number, script) for number, script in enumerate(scripts)]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = 0
        self._prefixes = PrefixUse()

    def run(self) -> BatchOutcome:
        for play in self.plays:
            self._at(play.script.reset_s, lambda now_s, p=play: self._next_turn(p, now_s))  # type: ignore[misc]
        while self._events:
            now_s, _, act = heapq.heappop(self._events)
            act(now_s)
        meters = [worker.engine.meter for worker in self.workers]
        totals = {name: sum(getattr(meter, name) for meter in meters) for name in COUNTERS}
        by_batch: dict[int, tuple[int, float]] = {}
        for meter in meters:
            for size, (iterations, seconds) in meter.by_batch.items():
                before = by_batch.get(size, (0, 0.0))
                by_batch[size] = (before[0] + iterations, before[1] + seconds)
        return BatchOutcome(
            makespan_s=max(play.finished_s for play in self.plays),
            durations_s=tuple(play.finished_s for play in self.plays),
            prefill_s=totals["prefill_s"],
            decode_s=totals["decode_s"],
            switch_s=totals["switch_s"],
            prefill_tokens=totals["prefill_tokens"],
            cached_tokens=totals["cached_tokens"],
            generated_tokens=totals["generated_tokens"],
            transferred_bytes=totals["transferred_bytes"],
            retractions=totals["retractions"],
            decode_by_batch=by_batch,
            cached_by_turn=tuple(tuple(play.found) for play in self.plays),
            kept_tokens=self._prefixes.kept,
            moved_tokens=round(self._prefixes.lost()),
            samples=tuple(self._samples(worker.engine) for worker in self.workers),
        )

    @staticmethod
    def _samples(engine: Engine) -> EngineSamples:
        return engine.meter.take(
            engine.role,
            running=engine.running,
            waiting=engine.waiting,
            kv_used=engine.kv.used,
            kv_capacity=engine.kv.capacity,
        )

    # ---- time -------------------------------------------------------------------------------------------------------

    def _at(self, at_s: float, act: Callable[[float], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (at_s, self._order, act))

    def _follow(self, index: int) -> None:
        worker = self.workers[index]
        wake_s = worker.engine.wake_s
        if wake_s is None or wake_s == worker.armed_s:
            return
        worker.armed_s = wake_s
        self._at(wake_s, lambda now_s: self._tick(index, now_s))

    def _tick(self, index: int, now_s: float) -> None:
        worker = self.workers[index]
        if worker.engine.wake_s != now_s:
            return  # superseded: the run was cut, and another event is armed
        worker.armed_s = -1.0
        self._handle(index, worker.engine.advance(), now_s)

    # ---- turns ------------------------------------------------------------------------------------------------------

    def _next_turn(self, play: _Play, now_s: float) -> None:
        if play.turn == len(play.script.turns):
            play.finished_s = now_s
            return
        scripted = play.script.turns[play.turn]
        play.context += scripted.prompt_tokens
        before, play.decode = play.decode, self._choose_decode(play)
        if not self._first:
            self._count(play, before, play.decode)
        decode = self.workers[play.decode]
        decode.load += 1
        play.on_decode = self._request(play, scripted.response_tokens)
        if not self._first:
            play.on_prefill = play.on_decode
            decode.engine.submit(play.on_decode, now_s)
            self._follow(play.decode)
        elif decode.engine.reserve(play.on_decode, now_s):
            self._prefill(play, now_s)

    def _request(self, play: _Play, new_tokens: int) -> EngineRequest:
        first = play.script.turns[0].prompt_tokens
        return EngineRequest(
            rid=f"{play.number}.{play.turn}",
            prompt_tokens=play.context,
            new_tokens=new_tokens,
            conversation=str(play.number),
            root=play.script.root,
            root_tokens=first if play.script.root else 0,
            reusable=play.stable,
            payload=play,
        )

    def _choose_decode(self, play: _Play) -> int:
        best = min(self._second, key=lambda i: (self.workers[i].load, len(self.workers[i].cached)))
        home = play.decode
        if home >= 0:
            least = self.workers[best].load
            if self.workers[home].load <= least + max(self._slack, self._slack_ratio * least):
                return home
            self.workers[home].cached.pop(play.number, None)
        self.workers[best].cached[play.number] = play.context
        return best

    def _count(self, play: _Play, before: int, chosen: int) -> None:
        """A turn's prompt goes to a worker: is that where the prefix of the turn before is?"""
        play.kept, play.stayed = play.asked, before in (-1, chosen)
        play.asked = play.context

    def _prefill(self, play: _Play, now_s: float) -> None:
        def wait(index: int) -> tuple[int, int]:
            worker = self.workers[index]
            return worker.queued_tokens + play.context - worker.cached.get(play.number, 0), worker.load

        chosen = min(self._first, key=wait)
        self._count(play, play.prefill, chosen)
        if play.prefill not in (-1, chosen):
            self.workers[play.prefill].cached.pop(play.number, None)
        play.prefill = chosen
        worker = self.workers[chosen]
        worker.load += 1
        worker.queued_tokens += play.context
        play.on_prefill = self._request(play, 1)
        worker.engine.submit(play.on_prefill, now_s)
        self._follow(chosen)

    # ---- outcomes ---------------------------------------------------------------------------------------------------

    def _handle(self, index: int, outcomes: list[tuple[Outcome, EngineRequest]], now_s: float) -> None:
        for outcome, request in outcomes:
            play: _Play = request.payload  # type: ignore[assignment]
            if outcome is Outcome.RESERVED:
                self._prefill(play, now_s)
            elif outcome is Outcome.PREFILLED and self._first:
                self._hand_over(play, now_s)
            elif outcome is Outcome.FINISHED:
                self._turn_over(play, now_s)
        self._follow(index)

    def _hand_over(self, play: _Play, now_s: float) -> None:
        assert play.on_decode is not None
        worker = self.workers[play.prefill]
        worker.load -= 1
        worker.queued_tokens -= play.context
        worker.cached[play.number] = min(play.context, int(self._stable * play.context))
        tokens = play.on_decode.prompt_tokens - play.on_decode.cached_tokens
        amount = tokens * self._model.kv_bytes_per_token
        begins_s, over_s = self._links.send(WorkerId(play.prefill), WorkerId(play.decode), amount, now_s)
        self.workers[play.decode].engine.meter.transferred(tokens, int(amount), over_s - begins_s)
        self._at(over_s, lambda at_s: self._arrived(play, at_s))

    def _arrived(self, play: _Play, now_s: float) -> None:
        assert play.on_prefill is not None
        assert play.on_decode is not None
        self._handle(play.prefill, self.workers[play.prefill].engine.abort(play.on_prefill, now_s), now_s)
        self._handle(play.decode, self.workers[play.decode].engine.join(play.on_decode, now_s), now_s)

    def _turn_over(self, play: _Play, now_s: float) -> None:
        assert play.on_prefill is not None
        play.found.append(play.on_prefill.cached_tokens)
        self._prefixes.count(tokens=play.kept, there=play.stayed, found=play.on_prefill.cached_tokens)
        scripted = play.script.turns[play.turn]
        self.workers[play.decode].load -= 1
        dropped = scripted.retained_tokens < scripted.response_tokens
        before = play.context if dropped else play.context + scripted.response_tokens
        play.context += scripted.retained_tokens
        play.stable = max(play.script.turns[0].prompt_tokens, int(self._stable * before))
        play.turn += 1
        self._at(now_s + scripted.tool_s, lambda at_s: self._next_turn(play, at_s))


def run_batch(
    scripts: Sequence[Script],
    configuration: Configuration,
    model: WorkerModel,
    *,
    stable_fraction: float = 1.0,
    rigid: float | None = None,
) -> BatchOutcome:
    """Play `scripts` from an empty cluster of `configuration` until the last one ends.

    A trajectory moves between workers as in production. With `rigid` it stays whatever its prefix is worth, until its
    worker has so many more requests than the least loaded one (or a quarter more); infinity binds it for good, as ROLL.

    Raises `ValueError` for a configuration without workers, or a trajectory that no engine can hold.
    """
    if not configuration.workers:
        raise ValueError("a batch needs at least one worker")
    if not scripts:
        raise ValueError("a batch needs at least one trajectory")
    slack, ratio, reuse = _LIMITS.affinity_slack, _LIMITS.affinity_slack_ratio, stable_fraction
    if rigid is not None:
        slack, ratio, reuse = rigid, RIGID_RATIO, 1.0
    return _BatchRun(scripts, stable_fraction, configuration, model, reuse * slack, reuse * ratio, reuse).run()
