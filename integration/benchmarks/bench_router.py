"""How many routing decisions a second the router makes in one process: `python integration/benchmarks/bench_router.py`.

A decision is the choice of worker or pair and all bookkeeping of its request: loads, prefixes and counters at dispatch,
at the first token, and at the end. A call is a whole `Router.generate` over a port that answers at once. Seconds are of
one core's time in this process, so that other work on the machine does not count; the best of some rounds is printed.
"""

import argparse
import asyncio
import gc
import json
import time
from collections import deque

from pearl_executor.ports import Finish, GenerateResult, Sampling, TokenChunk
from pearl_rl.rollout.attempt import Attempt, Progress
from pearl_rl.rollout.calls import ModelCall
from pearl_rl.rollout.in_flight import InFlight
from pearl_rl.rollout.router import Router, RouterLimits
from pearl_rl.rollout.serving import Home, ServingLimits, ServingSet
from pearl_rl.rollout.statistics import ConcurrencyMeter, RouterStatistics
from pearl_rl.rollout.testing import serving_table
from pearl_state.roles import Role
from pearl_state.trajectory import TrajectoryId, WeightSpan

# As `pearl-rl train` sets them.
LIMITS = ServingLimits(capacity_sequences=64, affinity_slack=1.0, affinity_slack_ratio=0.1)
PROMPT = tuple(range(2_000))
CLUSTERS = {
    "8C": [Role.COLOCATED] * 8,
    "5P3D": [Role.PREFILL] * 5 + [Role.DECODE] * 3,
    "16C": [Role.COLOCATED] * 16,
    "1000C": [Role.COLOCATED] * 1000,
}
IN_FLIGHT = 256
RESULT = GenerateResult(finish=Finish.STOP, tokens=(1,), logprobs=(-0.5,), spans=(WeightSpan(0, 1),))


class InstantWorkers:
    """A generation port that answers every request at once with one token."""

    async def generate(self, worker, request, on_chunk):
        del worker, request
        on_chunk(TokenChunk((1,), (-0.5,), 0, 0))
        return RESULT

    async def generate_pair(self, prefill, decode, request, on_chunk):
        del prefill
        return await self.generate(decode, request, on_chunk)

    async def abort(self, worker, rid):
        del worker, rid


def model_call(number):
    trajectory = TrajectoryId(f"t{number % IN_FLIGHT:08d}")
    return ModelCall(trajectory=trajectory, turn=number, prompt=PROMPT, max_new_tokens=8, sampling=Sampling())


async def decisions_per_s(roles, count):
    """Choices with their bookkeeping, `IN_FLIGHT` requests at a time."""
    serving = ServingSet(LIMITS)
    serving.apply(serving_table(roles))
    in_flight = InFlight(60.0, RouterStatistics(), ConcurrencyMeter(), lambda: None)
    homes = {call.trajectory: Home(call.trajectory) for call in map(model_call, range(IN_FLIGHT))}
    calls = [model_call(number) for number in range(count)]
    chunk = TokenChunk((1,), (-0.5,), 0, 0)
    running = deque()
    loop = asyncio.get_running_loop()
    began_s = time.process_time()
    for call in calls:
        progress = Progress(call, homes[call.trajectory], loop.time())
        route = serving.choose(progress.home, progress.context_tokens, loop.time())
        attempt = Attempt(progress, route, 0, in_flight)
        in_flight.enter(attempt, homed=True, reuse=1.0)
        attempt.on_chunk(chunk)
        running.append(attempt)
        if len(running) >= IN_FLIGHT:
            in_flight.leave(running.popleft())
    took_s = time.process_time() - began_s
    in_flight.stop_watching()
    return count / took_s


async def calls_per_s(roles, count):
    """Whole calls, `IN_FLIGHT` tasks at a time."""
    router = Router(InstantWorkers(), RouterLimits(serving=LIMITS))
    router.apply(serving_table(roles))
    calls = iter([model_call(number) for number in range(count)])

    async def play():
        for call in calls:
            await router.generate(call)

    for call in map(model_call, range(IN_FLIGHT)):
        router.begin(call.trajectory)
    began_s = time.process_time()
    await asyncio.gather(*(play() for _ in range(IN_FLIGHT)))
    took_s = time.process_time() - began_s
    await router.aclose()
    return count / took_s


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000, help="decisions of one round")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    figures = {}
    for name, roles in CLUSTERS.items():
        best = {}
        for measure in (decisions_per_s, calls_per_s):
            gc.collect()
            best[measure.__name__] = round(max(asyncio.run(measure(roles, given.count)) for _ in range(given.rounds)))
        figures[name] = best
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
