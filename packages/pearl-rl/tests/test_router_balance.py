"""Load after an expansion: trajectories stay with their prefixes, but no worker keeps more than its share."""

import random
from collections import Counter, deque

import pytest

from pearl_executor.ports import Sampling, TokenChunk
from pearl_executor.virtual_time import run_virtual
from pearl_rl import parts
from pearl_rl.rollout.attempt import Attempt, Progress
from pearl_rl.rollout.calls import ModelCall
from pearl_rl.rollout.in_flight import InFlight
from pearl_rl.rollout.serving import Home, ServingSet
from pearl_rl.rollout.statistics import ConcurrencyMeter, RouterStatistics
from pearl_rl.rollout.testing import serving_table
from pearl_rl.settings import load_settings
from pearl_state.roles import Role
from pearl_state.trajectory import TrajectoryId

C, P, D = Role.COLOCATED, Role.PREFILL, Role.DECODE
TRAJECTORIES = 300
LIMITS = parts.router_limits(load_settings(None, ["engine.max_running=256"]).settings).serving


class Rollout:
    """Trajectories that ask again as soon as they are answered, in a random order."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.serving = ServingSet(LIMITS)
        self.statistics = RouterStatistics()
        self.in_flight = InFlight(1e6, self.statistics, ConcurrencyMeter(), lambda: None)
        self.homes = [Home(TrajectoryId(f"t{number:08d}")) for number in range(TRAJECTORIES)]
        self.turns = [0] * TRAJECTORIES
        self.running = {}
        self.prefilling = deque()
        self.computed = Counter()

    def ask(self, number):
        turn = self.turns[number] = self.turns[number] + 1
        call = ModelCall(
            trajectory=self.homes[number].trajectory,
            turn=turn,
            prompt=range(50 * turn),
            max_new_tokens=8,
            sampling=Sampling(),
        )
        progress = Progress(call, self.homes[number], 0.0)
        route = self.serving.choose(progress.home, progress.context_tokens, 0.0)
        attempt = self.running[number] = Attempt(progress, route, 0, self.in_flight)
        self.in_flight.enter(attempt, homed=True, reuse=1.0)
        self.prefilling.append(attempt)
        # What prefill has to compute, by worker: its load is this, and not how many requests it comes in.
        if route.prefill is not None:
            self.computed[route.prefill.worker.id] += attempt.queued_tokens
        while len(self.prefilling) > 8:
            self.prefilling.popleft().on_chunk(TokenChunk((5,), (-0.5,), 0, 0))

    def answer(self):
        number = self.draw.choice([number for number, attempt in self.running.items() if attempt.received])
        attempt = self.running.pop(number)
        tokens, there = attempt.kept_tokens, attempt.stayed
        self.statistics.prefixes.count(tokens=tokens, there=there, found=tokens * there)
        self.in_flight.leave(attempt)
        self.ask(number)

    def loads(self, ids):
        loads = self.serving.requests()
        return [loads[id_] for id_ in ids]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([C] * 4, [C] * 8),
        ([C] * 2, [C] * 12),
        ([P, D], [P, P, D, D, D, D]),
        ([P] * 5 + [D] * 3, [P] * 5 + [D] * 3 + [P] * 3 + [D] * 5),
    ],
)
def test_no_worker_has_a_fifth_more_than_the_mean_after_an_expansion(before, after):
    async def main():
        rollout = Rollout(7)
        rollout.serving.apply(serving_table(before))
        for number in range(TRAJECTORIES):
            rollout.ask(number)
        for _ in range(2 * TRAJECTORIES):
            rollout.answer()
        prefixes = rollout.statistics.prefixes
        assert prefixes.kept > prefixes.moved, "prefixes are followed while nothing changes"
        rollout.serving.apply(serving_table(after))
        # Everybody is answered once or so: the next turn is the first one that can go to a newcomer.
        for _ in range(2 * TRAJECTORIES):
            rollout.answer()
        rollout.computed.clear()
        serving = [id_ for id_, role in enumerate(after) if role is not P]
        for _ in range(2 * TRAJECTORIES):
            rollout.answer()
            held = rollout.loads(serving)
            assert max(held) <= 1.2 * sum(held) / len(held)
        computed = [rollout.computed[id_] for id_, role in enumerate(after) if role is P] or [0]
        assert max(computed) <= 1.2 * sum(computed) / len(computed)
        rollout.in_flight.stop_watching()

    run_virtual(main())
