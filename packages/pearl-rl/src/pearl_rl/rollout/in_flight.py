"""The attempts that run now: what they weigh on their workers, for how long they may stand still, when all are over."""

import asyncio
import math
from collections.abc import Callable

from pearl_rl.rollout.attempt import Attempt, Ending
from pearl_rl.rollout.lifecycle import LifecycleTrace
from pearl_rl.rollout.serving import Slot
from pearl_rl.rollout.statistics import ConcurrencyMeter, RouterStatistics


class InFlight:
    """Accounts for every attempt from its dispatch to its end, however it ends."""

    def __init__(
        self,
        stall_s: float,
        statistics: RouterStatistics,
        meter: ConcurrencyMeter,
        on_probed: Callable[[], None],
        lifecycle: LifecycleTrace | None = None,
    ) -> None:
        self._stall_s = stall_s
        self.statistics = statistics
        self._meter = meter
        self._on_probed = on_probed
        self._lifecycle = lifecycle
        self._attempts: dict[Attempt, None] = {}
        self._emptied: asyncio.Future[None] | None = None
        self._watchdog: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._attempts)

    def enter(self, attempt: Attempt, homed: bool, reuse: float) -> None:
        """Account for a request from its dispatch on; `homed`: remember that its prefix will be there.

        `reuse`: part of what its worker should hold of its prompt that need not be computed again.
        """
        progress, statistics, context_tokens = attempt.progress, self.statistics, attempt.context_tokens
        prefill, decode = attempt.route
        first = decode if prefill is None else prefill
        home = progress.home
        attempt.held_tokens = min(context_tokens, first.homes.get(home.trajectory, 0))
        attempt.queued_tokens = context_tokens - int(reuse * attempt.held_tokens)
        first.queued_tokens += attempt.queued_tokens
        for slot in attempt.slots:
            slot.waiting += 1
            slot.tokens += context_tokens
            slot.probing = slot.blocked_until_s > 0.0
        statistics.dispatched += 1
        statistics.prompt_tokens += context_tokens
        if attempt.request.position:
            statistics.resumed += 1
        if home.decode is not None:
            if home.decode is decode and home.prefill is prefill:
                statistics.affinity_kept += 1
            else:
                statistics.affinity_moved += 1
        if homed:
            attempt.kept_tokens = home.tokens
            attempt.stayed = home.decode is decode if prefill is None else home.prefill is prefill
            home.move(attempt.route, context_tokens)
        self._meter.advance(attempt.last_at_s)
        self._meter.generating += 1
        self._attempts[attempt] = None
        if self._lifecycle is not None:
            self._lifecycle.assigned(home.trajectory, first.worker.id, first.version if first.version >= 0 else None)
        if self._watchdog is None:
            self._watchdog = attempt.loop.call_at(attempt.last_at_s + self._stall_s, self._watch)

    def first_token(self, attempt: Attempt) -> None:
        """Account for a request that is decoded from now on."""
        prefill, decode = attempt.route
        first = decode if prefill is None else prefill
        first.queued_tokens -= attempt.queued_tokens
        if prefill is not None:
            prefill.waiting -= 1
            prefill.tokens -= attempt.context_tokens
        decode.waiting -= 1
        decode.running += 1
        self._meter.advance(attempt.last_at_s)
        self._meter.decoding += 1
        if self._lifecycle is not None:
            self._lifecycle.admitted(attempt.progress.home.trajectory, decode.worker.id)

    def leave(self, attempt: Attempt) -> None:
        """Undo all accounting of a request that ended."""
        prefill, decode = attempt.route
        self._meter.advance(attempt.loop.time())
        self._meter.generating -= 1
        if attempt.received:
            self._meter.decoding -= 1
            decode.running -= 1
        else:
            (decode if prefill is None else prefill).queued_tokens -= attempt.queued_tokens
            decode.waiting -= 1
            if prefill is not None:
                prefill.waiting -= 1
                prefill.tokens -= attempt.context_tokens
        decode.tokens -= attempt.context_tokens
        del self._attempts[attempt]
        for slot in attempt.slots:
            if slot.probing:
                slot.probing = False
                self._on_probed()
        if self._emptied is not None and not self._attempts:
            resolve(self._emptied)

    def give_up(self, ending: Ending, slot: Slot | None = None) -> int:
        """End attempts, all or those on `slot`. Returns how many there are; they leave when the loop gets to them."""
        chosen = [attempt for attempt in self._attempts if slot is None or slot in attempt.slots]
        for attempt in chosen:
            attempt.give_up(ending)
        return len(chosen)

    async def emptied(self, timeout_s: float) -> bool:
        """Wait until nothing runs. False where `timeout_s` passed before."""
        if not self._attempts:
            return True
        loop = asyncio.get_running_loop()
        emptied = self._emptied = loop.create_future()
        timer = loop.call_later(timeout_s, resolve, emptied)
        try:
            await emptied
        finally:
            timer.cancel()
            self._emptied = None
        return not self._attempts

    def stop_watching(self) -> None:
        """Disarm the timer."""
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    def _watch(self) -> None:
        """Give up attempts that stand still; one timer serves them all."""
        loop = asyncio.get_running_loop()
        now_s, next_s = loop.time(), math.inf
        for attempt in self._attempts:
            due_s = attempt.last_at_s + self._stall_s
            if due_s <= now_s:
                attempt.give_up(Ending.STALLED)
            else:
                next_s = min(next_s, due_s)
        self._watchdog = loop.call_at(next_s, self._watch) if next_s < math.inf else None


def resolve(waiter: "asyncio.Future[None]") -> None:
    """Let whoever waits go on; once is enough."""
    if not waiter.done():
        waiter.set_result(None)
