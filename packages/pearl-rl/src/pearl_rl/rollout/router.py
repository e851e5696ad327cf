"""The router of the Pipeline Scheduler: dispatches model calls to the workers that the table says are serving.

A call survives its workers. What an interrupted, lost or failed attempt generated is kept, and the next attempt goes
on from prompt + tokens on another worker (PEARL section 4.5). Each attempt is an epoch: a trajectory has exactly one
owner at a time, and what an old one still sends is void.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from pearl_executor.ports import (
    Finish,
    GenerateResult,
    GenerationPort,
    TransferError,
    WorkerError,
    WorkerLostError,
)
from pearl_rl.rollout.attempt import Attempt, ContractError, Ending, Progress
from pearl_rl.rollout.calls import FailureCause, GenerationFailedError, ModelCall, TurnResult
from pearl_rl.rollout.diagnosis import Observation
from pearl_rl.rollout.in_flight import InFlight, resolve
from pearl_rl.rollout.lifecycle import LifecycleTrace
from pearl_rl.rollout.serving import Home, Route, ServingLimits, ServingSet, Slot, WorkerLoad
from pearl_rl.rollout.statistics import Concurrency, ConcurrencyMeter, RouterStatistics
from pearl_state.lifecycle import Lifecycle
from pearl_state.roles import Role
from pearl_state.table import WorkerTable
from pearl_state.trajectory import TrajectoryId
from pearl_state.worker import Worker, WorkerId

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLimits:
    """Bounds of every wait and retry of the router."""

    serving: ServingLimits = field(default_factory=ServingLimits)
    no_worker_s: float = 600.0
    """How long a call may wait for somebody to serve it."""
    stall_s: float = 600.0
    """How long an attempt may bring no token before it is given up."""
    max_attempts: int = 8
    """Failing attempts in a row, without one new token, after which a call is given up."""
    retry_s: float = 0.1
    """First pause before the same worker is tried again; doubles up to `retry_max_s`. Another one is tried at once."""
    retry_max_s: float = 5.0
    lost_grace_s: float = 1.0
    """How long the answer of a worker that the table says is gone may still come in."""
    abort_s: float = 5.0
    """How long an abort may take."""
    keep_partial: bool = True
    """Whether a resumed call keeps the tokens it has; else it starts from its prompt again."""


class Router:
    """Dispatches model calls. One per run; everything happens in the run's event loop.

    `on_fault(worker, cause)` is told of a serving worker that is lost or broke the weight-version contract,
    `on_stall(worker, cause, failures)` of one on which an attempt stood still, with its failures in a row, and
    `on_transfer(ok)` of each KV hand-over and whether it succeeded.
    `lifecycle` is told of the phases of each call.
    """

    def __init__(
        self,
        generation: GenerationPort,
        limits: RouterLimits | None = None,
        on_fault: Callable[[Worker, str], None] | None = None,
        lifecycle: LifecycleTrace | None = None,
        on_stall: Callable[[Worker, str, int], None] = lambda _worker, _cause, _failures: None,
        on_transfer: Callable[[bool], None] = lambda _ok: None,
    ) -> None:
        self._lifecycle = lifecycle
        self._port = generation
        self._limits = RouterLimits() if limits is None else limits
        self._on_fault = on_fault
        self._on_stall = on_stall
        self._on_transfer = on_transfer
        self._serving = ServingSet(self._limits.serving)
        self._homes: dict[TrajectoryId, Home] = {}
        self._waiters: dict[asyncio.Future[None], None] = {}
        """In the order in which they came: who waits longest is served first, and a run can be repeated exactly."""
        self._aborts: set[asyncio.Task[None]] = set()
        self._gate_open = True
        self._ended = False
        self._meter = ConcurrencyMeter()
        self.statistics = RouterStatistics()
        """Counters since the run began."""
        self._in_flight = InFlight(self._limits.stall_s, self.statistics, self._meter, self._wake, lifecycle)

    # ---- the table --------------------------------------------------------------------------------------------------

    @property
    def table(self) -> WorkerTable:
        """The table in force."""
        return self._serving.table

    def apply(self, table: WorkerTable) -> None:
        """Make `table` the truth from now on: no request is dispatched by an older one. Wakes waiting calls."""
        if table is self._serving.table:
            return
        closed = self._serving.apply(table)
        if closed:
            loop = asyncio.get_running_loop()
            for slot in closed:
                loop.call_later(self._limits.lost_grace_s, self._in_flight.give_up, Ending.LOST, slot)
        self._wake()

    def loads(self) -> dict[WorkerId, float]:
        """Requests that each worker holds now, for the planner's choice of workers."""
        return self._serving.requests()

    def worker_loads(self) -> dict[WorkerId, WorkerLoad]:
        """What each worker has to do now, and which cached prefixes would be lost with it."""
        return self._serving.loads()

    def observe(self) -> Observation:
        """What a diagnosis needs of this moment."""
        table = self.table
        draining = table.where(Lifecycle.DRAINING)
        return Observation(
            serving=len(table.active()),
            draining=sum(table.rows[id_].role is not Role.TRAINING for id_ in draining),
            pending_weights=len(table.where(Lifecycle.STARTING, Lifecycle.PENDING_WEIGHTS)),
            in_flight=self._meter.in_flight,
            waiting=len(self._waiters),
            timeouts=self.statistics.given_up + self.statistics.stalled,
            running=len(self._in_flight),
            kv_used=self._serving.kv_used(),
        )

    def take_borrowed(self) -> bool:
        """Whether a worker on training GPUs served since the last call of this method."""
        return self._serving.take_borrowed()

    # ---- trajectories -----------------------------------------------------------------------------------------------

    def begin(self, trajectory: TrajectoryId, version: int = -1) -> None:
        """Count a trajectory as in flight. Only workers with weights of `version` or newer serve it."""
        self._meter.advance(asyncio.get_running_loop().time())
        self._homes[trajectory] = Home(trajectory, version=version)
        self._meter.in_flight += 1

    def end(self, trajectory: TrajectoryId) -> None:
        """Forget a trajectory and where its prefix is. No effect where it is not in flight."""
        home = self._homes.pop(trajectory, None)
        if home is None:
            return
        self._meter.advance(asyncio.get_running_loop().time())
        self._meter.in_flight -= 1
        for slot in (home.prefill, home.decode):
            if slot is not None:
                slot.disown(trajectory)

    def concurrency(self) -> Concurrency:
        """Time-weighted concurrency since the first trajectory began; θ of PEARL eq. (2) comes from it."""
        return self._meter.read(asyncio.get_running_loop().time())

    # ---- the gate ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Dispatch nothing more; calls are parked. What runs goes on."""
        self._gate_open = False

    def open(self) -> None:
        """Dispatch again."""
        self._gate_open = True
        self._wake()

    async def drain(self, timeout_s: float) -> int:
        """Close the gate and return once nothing runs: after `timeout_s` what still runs is cut off and parked with
        its tokens. Returns how many attempts were cut off.
        """
        self.close()
        if await self._in_flight.emptied(timeout_s):
            return 0
        cut = self._in_flight.give_up(Ending.DRAINED)
        await self._in_flight.emptied(self._limits.abort_s)
        return cut

    async def settle(self) -> None:
        """Return once no abort is under way: each ends within `abort_s`."""
        while self._aborts:
            await asyncio.wait(set(self._aborts))

    async def aclose(self) -> None:
        """Shut down: parked calls and those that come later fail with `closed`; aborts under way are awaited."""
        self._ended = True
        self._wake()
        self._in_flight.stop_watching()
        await self.settle()

    # ---- model calls ------------------------------------------------------------------------------------------------

    async def generate(self, call: ModelCall) -> TurnResult:
        """Run one model call to its end, over as many attempts as it takes. Raises `GenerationFailedError`."""
        home = self._homes.get(call.trajectory)
        if home is None:
            home = Home(call.trajectory)
        progress = Progress(call, home, asyncio.get_running_loop().time())
        lifecycle = self._lifecycle
        while True:
            if lifecycle is not None:
                lifecycle.ready(call.trajectory, call.turn, progress.context_tokens)
            route = self._choose(progress, self._now_s()) or await self._wait_for_route(progress)
            result = await self._attempt(progress, route)
            if result is None:
                continue
            if lifecycle is not None:
                context = len(call.prompt) + len(result.tokens)
                lifecycle.answered(call.trajectory, context, result.worker, result.prefill_s)
            self.statistics.calls += 1
            self.statistics.generated_tokens += len(result.tokens)
            return result

    def _choose(self, progress: Progress, now_s: float) -> Route | None:
        """The worker or pair for the next attempt; None where nobody may serve it now."""
        if self._ended:
            raise self._failure(FailureCause.CLOSED, progress, "the router is shut down")
        if not self._gate_open:
            return None
        return self._serving.choose(progress.home, progress.context_tokens, now_s, progress.avoid)

    async def _wait_for_route(self, progress: Progress) -> Route:
        """As `_choose`, once there is one; waits within limits."""
        loop = asyncio.get_running_loop()
        now_s = began_s = loop.time()
        deadline_s = began_s + self._limits.no_worker_s
        while True:
            if now_s >= deadline_s:
                raise self._failure(FailureCause.NO_WORKER, progress, self._why_nobody(progress, now_s - began_s))
            until_s = min(deadline_s, self._serving.next_probe_s(now_s))
            if progress.avoid:
                # Only workers that just failed this call are left: give them a moment, then try them again.
                pause_s = self._limits.retry_s * 2.0 ** max(0, progress.failures - 1)
                until_s = min(until_s, now_s + min(pause_s, self._limits.retry_max_s))
                progress.avoid = ()
            await self._changed(until_s)
            now_s = loop.time()
            route = self._choose(progress, now_s)
            if route is not None:
                self.statistics.waits += 1
                self.statistics.wait_s += now_s - began_s
                progress.queue_s += now_s - began_s
                return route

    async def _changed(self, until_s: float) -> None:
        """Return when something changed that may let a call be served, at the latest at `until_s`."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiters[waiter] = None
        timer = loop.call_at(until_s, resolve, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiters.pop(waiter, None)

    async def _attempt(self, progress: Progress, route: Route) -> TurnResult | None:
        """One attempt. The call's result, or None where it must go on elsewhere."""
        attempt = Attempt(progress, route, self.table.floor_version, self._in_flight)
        prefill, decode = route
        self._in_flight.enter(attempt, progress.home.trajectory in self._homes, self._serving.reuse.fraction)
        result: GenerateResult | None = None
        error: Exception | None = None
        try:
            if prefill is None:
                answer = self._port.generate(decode.worker, attempt.request, attempt.on_chunk)
            else:
                answer = self._port.generate_pair(prefill.worker, decode.worker, attempt.request, attempt.on_chunk)
            result = await attempt.run(answer)
            if result is not None:
                attempt.check(result)
        except (WorkerError, OSError, ContractError) as caught:
            error = caught
        except BaseException:
            self._abort(attempt)
            raise
        finally:
            self._in_flight.leave(attempt)
        if result is None or error is not None or attempt.ending in (Ending.STALE, Ending.REGRESSED):
            return self._ended_early(attempt, error)
        return self._answered(attempt, result)

    def _answered(self, attempt: Attempt, result: GenerateResult) -> TurnResult | None:
        """Settle an attempt that its worker answered in order."""
        progress, decode, statistics = attempt.progress, attempt.route.decode, self.statistics
        progress.add_times(result)
        statistics.cached_tokens += result.cached_tokens
        if result.tokens:
            # One that was interrupted before was not looked up, or may not have been.
            self._serving.reuse.observe(attempt.held_tokens, result.cached_tokens)
            statistics.prefixes.count(tokens=attempt.kept_tokens, there=attempt.stayed, found=result.cached_tokens)
        statistics.duplicate_tokens += max(0, attempt.received - len(result.tokens))
        for slot in attempt.slots:
            if slot.failures:
                slot.succeeded()
                self._wake()
        if attempt.route.prefill is not None:
            self._on_transfer(True)
        elif result.spans and result.spans[-1].version > decode.version:
            # It loaded newer weights than its row says yet; calls that need them may go there now.
            decode.renew(result.spans[-1].version)
            self._wake()
        if not attempt.received:
            self._meter.credit_decoding(result.decode_s)
        if result.finish is not Finish.INTERRUPTED:
            return progress.finish(result.finish, decode, self._now_s(), result)
        statistics.interrupted += 1
        kept = progress.add(result.tokens, result.logprobs, result.spans)
        withdrawn = not all(self._serving.serves(slot) for slot in attempt.slots)
        return self._resume(attempt, failing=kept == 0 and not withdrawn)

    def _ended_early(self, attempt: Attempt, error: Exception | None) -> TurnResult | None:
        """Settle an attempt without a usable answer: keep what arrived, and see who is at fault."""
        progress, statistics, now_s = attempt.progress, self.statistics, self._now_s()
        ending = error.ending if isinstance(error, ContractError) and error.ending else attempt.ending
        kept = progress.add(*attempt.collected())
        progress.last_error = str(ending) if error is None else f"{type(error).__name__}: {error}"
        if ending not in (None, Ending.LOST) or isinstance(error, OSError):
            self._abort(attempt)
        failing = True
        if ending is Ending.STALE:
            statistics.stale_served += 1
            self._accuse(attempt.slots, f"{attempt.request.rid}: token below weight version {attempt.floor}")
        elif ending is Ending.REGRESSED:
            statistics.version_regressions += 1
            progress.avoid = attempt.slots
            failing = kept == 0
        elif ending is Ending.DRAINED:
            statistics.interrupted += 1
            failing = False
        elif ending is Ending.LOST or isinstance(error, WorkerLostError):
            statistics.lost += 1
            self._lost(attempt, error, now_s)
        else:
            if ending is Ending.STALLED:
                statistics.stalled += 1
            elif isinstance(error, TransferError):
                statistics.transfer_retries += 1
                self._on_transfer(False)
            else:
                statistics.failed_attempts += 1
            for slot in attempt.slots:
                slot.failed(now_s, self._limits.serving)
                if ending is Ending.STALLED and not slot.closed and not slot.fenced:
                    cause = f"{attempt.request.rid}: no token for {self._limits.stall_s:g} s"
                    self._on_stall(slot.worker, cause, slot.failures)
        return self._resume(attempt, failing)

    def _lost(self, attempt: Attempt, error: Exception | None, now_s: float) -> None:
        """Fence the lost worker; of a pair where it is not known which, distrust both."""
        if not isinstance(error, WorkerLostError):
            return
        slots = attempt.slots
        named = tuple(slot for slot in slots if len(slots) == 1 or slot.worker.id == error.worker)
        self._accuse(named, f"lost: {error}")
        if named:
            return
        for slot in slots:
            slot.failed(now_s, self._limits.serving)

    def _resume(self, attempt: Attempt, failing: bool) -> TurnResult | None:
        """The result where the tokens so far are a whole response; None where another attempt must go on."""
        progress = attempt.progress
        progress.interruptions += 1
        if self._limits.keep_partial:
            finish = progress.ended()
            if finish is not None:
                return progress.finish(finish, attempt.route.decode, self._now_s())
        else:
            self.statistics.discarded_tokens += len(progress.tokens)
            progress.restart()
        if failing:
            progress.failures += 1
            progress.avoid = attempt.slots
            if progress.failures >= self._limits.max_attempts:
                message = f"{progress.failures} attempts in a row brought no token, the last: {progress.last_error}"
                raise self._failure(FailureCause.ATTEMPTS_FAILED, progress, message)
        return None

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    # ---- faults -----------------------------------------------------------------------------------------------------

    def _accuse(self, slots: tuple[Slot, ...], cause: str) -> None:
        """Give these processes nothing more, and say so where the table still counts on them."""
        for slot in slots:
            if slot.fenced:
                continue
            slot.fenced = True
            row = self.table.rows.get(slot.worker.id)
            if row is None or row.lifecycle is not Lifecycle.ACTIVE or row.incarnation != slot.worker.incarnation:
                continue
            _log.error("worker %d is given no more requests: %s", slot.worker.id, cause)
            if self._on_fault is not None:
                self._on_fault(row, cause)

    def _abort(self, attempt: Attempt) -> None:
        """Have the workers stop decoding for an attempt that nobody waits for any more."""
        for slot in attempt.slots:
            if not slot.closed:
                task = attempt.loop.create_task(self._abort_at(slot.worker, attempt.request.rid))
                self._aborts.add(task)
                task.add_done_callback(self._aborts.discard)

    async def _abort_at(self, worker: Worker, rid: str) -> None:
        try:
            async with asyncio.timeout(self._limits.abort_s):
                await self._port.abort(worker, rid)
        except WorkerLostError:
            return
        except (WorkerError, OSError) as error:
            self.statistics.abort_failures += 1
            _log.warning("worker %d did not abort %s: %r; it may decode on for nobody", worker.id, rid, error)

    def _failure(self, cause: FailureCause, progress: Progress, message: str) -> GenerationFailedError:
        self.statistics.given_up += 1
        call = progress.call
        return GenerationFailedError(cause, f"{call.trajectory} turn {call.turn}: {message}")

    def _why_nobody(self, progress: Progress, waited_s: float) -> str:
        """Name what kept a call waiting."""
        gate = "" if self._gate_open else "; the gate is closed"
        return f"nobody could serve it for {waited_s:.1f} s ({self._serving.describe(progress.home.version)}){gate}"

    def _wake(self) -> None:
        for waiter in self._waiters:
            resolve(waiter)
