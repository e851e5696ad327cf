"""The extended model against a replay of the devices that the local runtime paces: foreseen speed-ups come true.

The replay has what a closed form leaves out: iterations that a request must wait for, phase switches, one link for each
decode worker, a router that weighs queues against prefixes, and new weights early in each batch that void all prefixes.
"""

import heapq
import itertools
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pearl_planner.extended import ExtendedModel
from pearl_planner.fit import StepMeasurement, fit_overhead
from pearl_planner.workload_fit import fit_workload
from pearl_state.configuration import Configuration
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.samples import TurnSample

DECODE_FIXED_S, DECODE_PER_SEQUENCE_S, PREFILL_PER_TOKEN_S = 0.02, 0.001, 0.0005
PHASE_SWITCH_S, HANDOVER_S, BYTES_PER_S, BYTES_PER_TOKEN = 0.006, 0.004, 2e8, 512
CHUNK_TOKENS, NEW_WEIGHTS_S, LOAD_S = 512, 0.85, 0.05
BATCH = 64

PLATFORM = PlatformProfile(
    decode_fixed_s=DECODE_FIXED_S,
    decode_per_sequence_s=DECODE_PER_SEQUENCE_S,
    prefill_per_token_s=PREFILL_PER_TOKEN_S,
    kv_bytes_per_token=BYTES_PER_TOKEN,
    transfer_bytes_per_s=BYTES_PER_S,
    handover_s=HANDOVER_S,
)
PRIOR = WorkloadProfile(batch=1, turns=1, new_prompt_tokens=1, response_tokens=1)

Plan = list[tuple[int, int, float]]
"""Of one trajectory, for each turn: new prompt tokens, response tokens, pause after it."""


@dataclass(eq=False)
class Call:
    trajectory: int
    turn: int
    begun_s: float
    context: int
    left: int
    queued: int
    to_prefill: int = -1
    prefilled_s: float = 0.0


@dataclass(eq=False)
class Server:
    waiting: list[Call] = field(default_factory=list)
    running: list[Call] = field(default_factory=list)
    cache: dict[int, int] = field(default_factory=dict)
    held: int = 0
    queued: int = 0
    epoch: int = 0
    link_free_s: float = 0.0
    busy: bool = False
    renewing: bool = False
    last: str = ""


class PacedReplay:
    """One batch."""

    def __init__(self, configuration: Configuration, plans: list[Plan], step: int = 0) -> None:
        self.plans = plans
        self.step = step
        self.paired = configuration.prefill > 0
        self.prefillers = [Server() for _ in range(configuration.prefill or configuration.colocated)]
        self.decoders = [Server() for _ in range(configuration.decode)] if self.paired else self.prefillers
        self.homes: dict[int, tuple[Server, int, int]] = {}
        self.decode_homes: dict[int, Server] = {}
        self.contexts = [0] * len(plans)
        self.events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self.order = itertools.count()
        self.now_s = self.makespan_s = 0.0
        self.samples: list[list[TurnSample]] = [[] for _ in plans]
        self.kept = self.moved = self.renewed = 0

    def run(self) -> "PacedReplay":
        for i in range(len(self.plans)):
            self.submit(i, 0)
        self.after(NEW_WEIGHTS_S, self.renew)
        while self.events:
            self.now_s, _, act, arguments = heapq.heappop(self.events)
            act(*arguments)
        return self

    def after(self, seconds: float, act: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self.events, (self.now_s + seconds, next(self.order), act, arguments))

    def renew(self) -> None:
        for server in {id(s): s for s in (*self.prefillers, *self.decoders)}.values():
            server.renewing = True
            self.go_on(server)

    def submit(self, trajectory: int, turn: int) -> None:
        prompt, response, _ = self.plans[trajectory][turn]
        self.contexts[trajectory] += prompt
        context = self.contexts[trajectory]
        home, tokens, epoch = self.homes.get(trajectory, (self.prefillers[0], 0, 0))
        found = tokens if home.epoch == epoch else 0
        if self.paired:
            server = min(self.prefillers, key=lambda s: (s.queued + context - (found if s is home else 0), s.held))
        else:
            server = self.near(self.prefillers, home if trajectory in self.homes else None)
        self.kept += tokens
        self.moved += tokens if server is not home else 0
        self.renewed += tokens - found if server is home else 0
        self.homes[trajectory] = (server, context, server.epoch)
        call = Call(trajectory, turn, self.now_s, context, response, context - (found if server is home else 0))
        server.queued += call.queued
        server.held += 1
        server.waiting.append(call)
        self.go_on(server)

    @staticmethod
    def near(servers: list[Server], home: Server | None) -> Server:
        """Prefix affinity, unless that worker is busier than another."""
        least = min(servers, key=lambda s: (s.held, len(s.cache)))
        stays = home is not None and home.held <= least.held + max(2.0, 0.5 * least.held)
        return home if home is not None and stays else least

    def go_on(self, server: Server) -> None:
        if server.busy:
            return
        if server.renewing:
            server.renewing = False
            server.cache.clear()
            server.epoch += 1
            self.occupy(server, LOAD_S, self.free, server)
        elif server.waiting:
            self.prefill(server)
        elif server.running:
            switch_s = PHASE_SWITCH_S if server.last == "prefill" and not self.paired else 0.0
            server.last = "decode"
            seconds = DECODE_FIXED_S + DECODE_PER_SEQUENCE_S * len(server.running)
            self.occupy(server, switch_s + seconds, self.decoded, server, list(server.running))

    def occupy(self, server: Server, seconds: float, act: Callable[..., None], *arguments: object) -> None:
        server.busy = True
        self.after(seconds, act, *arguments)

    def free(self, server: Server) -> None:
        server.busy = False
        self.go_on(server)

    def prefill(self, server: Server) -> None:
        room, done = CHUNK_TOKENS, []
        for call in server.waiting:
            if not room:
                break
            if call.to_prefill < 0:
                call.to_prefill = call.context - min(server.cache.get(call.trajectory, 0), call.context - 1)
            taken = min(room, call.to_prefill)
            call.to_prefill -= taken
            room -= taken
            if not call.to_prefill:
                done.append(call)
        server.waiting = [call for call in server.waiting if call not in done]
        switch_s = PHASE_SWITCH_S if server.last == "decode" else 0.0
        server.last = "prefill"
        self.occupy(server, switch_s + (CHUNK_TOKENS - room) * PREFILL_PER_TOKEN_S, self.prefilled, server, done)

    def prefilled(self, server: Server, done: list[Call]) -> None:
        for call in done:
            call.prefilled_s = self.now_s
            call.left -= 1
            server.queued -= call.queued
            if self.paired:
                server.held -= 1
                server.cache[call.trajectory] = call.context
                self.hand_over(call)
            elif call.left:
                server.running.append(call)
            else:
                server.held -= 1
                self.finish(call)
        self.free(server)

    def hand_over(self, call: Call) -> None:
        if not call.left:
            self.finish(call)
            return
        decoder = self.near(self.decoders, self.decode_homes.get(call.trajectory))
        self.decode_homes[call.trajectory] = decoder
        decoder.held += 1
        tokens = call.context - min(decoder.cache.get(call.trajectory, 0), call.context)
        decoder.link_free_s = max(decoder.link_free_s, self.now_s) + tokens * BYTES_PER_TOKEN / BYTES_PER_S
        self.after(decoder.link_free_s + HANDOVER_S - self.now_s, self.joined, decoder, call)

    def joined(self, decoder: Server, call: Call) -> None:
        decoder.running.append(call)
        self.go_on(decoder)

    def decoded(self, server: Server, batch: list[Call]) -> None:
        for call in batch:
            call.left -= 1
            if not call.left:
                server.held -= 1
                server.running.remove(call)
                server.cache[call.trajectory] = call.context + self.plans[call.trajectory][call.turn][1] - 1
                self.finish(call)
        self.free(server)

    def finish(self, call: Call) -> None:
        plan = self.plans[call.trajectory]
        prompt, response, pause_s = plan[call.turn]
        last = call.turn == len(plan) - 1
        self.samples[call.trajectory].append(
            TurnSample(
                step=self.step,
                turn=call.turn,
                new_prompt_tokens=prompt,
                response_tokens=response,
                retained_tokens=0 if last else response,
                context_tokens=call.context,
                prefill_s=call.prefilled_s - call.begun_s,
                decode_s=self.now_s - call.prefilled_s,
                queue_s=0.0,
                environment_s=pause_s,
                last=last,
            )
        )
        self.contexts[call.trajectory] += response
        self.makespan_s = max(self.makespan_s, self.now_s + pause_s)
        if not last:
            self.after(pause_s, self.submit, call.trajectory, call.turn + 1)


def games(rng: random.Random) -> list[Plan]:
    """A batch of debugging games as an untrained model plays them: half of them use all six tries."""

    def turn(number: int) -> tuple[int, int, float]:
        pause_s = min(2.0, 0.15 * rng.lognormvariate(0.0, 0.5))
        return (25 if number == 0 else 31), rng.choices([6, 7, 9], weights=(12, 3, 1))[0], pause_s

    lengths = rng.choices(range(1, 7), weights=(12, 11, 9, 9, 8, 51), k=BATCH)
    return [[turn(number) for number in range(length)] for length in lengths]


def profile(replays: list[PacedReplay], configuration: Configuration) -> WorkloadProfile:
    """What telemetry says after these batches under `configuration`."""
    trajectories = [samples for replay in replays for samples in replay.samples]
    fitted = fit_workload(trajectories, batch=BATCH, prior=PRIOR).profile
    kept = sum(replay.kept for replay in replays)
    choice = 1 - 1 / (configuration.prefill or configuration.colocated)
    moved = sum(replay.moved for replay in replays) / kept / choice
    return replace(
        fitted,
        retained_tokens=statistics.mean(sample.retained_tokens for turns in trajectories for sample in turns),
        moved_fraction=moved,
        pair_moved_fraction=moved,
        renewed_fraction=sum(replay.renewed for replay in replays) / kept,
    )


def test_speed_ups_foreseen_in_the_run_of_one_configuration_come_true_in_the_others():
    """Within a tenth, from a colocated run and from a disaggregated one; what their steps leave over is fitted."""
    rng = random.Random(3)
    batches = [games(rng) for _ in range(12)]
    configurations = [Configuration(colocated=6), *(Configuration(p, 6 - p) for p in (1, 2, 3, 4))]
    replays = {c: [PacedReplay(c, plans, step).run() for step, plans in enumerate(batches)] for c in configurations}
    measured = {c: statistics.median(r.makespan_s for r in found) for c, found in replays.items()}
    for chosen in (Configuration(colocated=6), Configuration(4, 2)):
        workload = profile(replays[chosen], chosen)
        steps = [StepMeasurement(segments=((chosen, replay.makespan_s),)) for replay in replays[chosen]]
        platform = fit_overhead(steps, workload=workload, platform=PLATFORM).profile
        model = ExtendedModel(workload, platform)
        predicted = {
            c: model.total_s(c.prefill, c.decode) if c.prefill else model.colocated(c.colocated).total_s
            for c in configurations
        }
        for other in configurations:
            foreseen, true = predicted[other] / predicted[chosen], measured[other] / measured[chosen]
            assert abs(foreseen / true - 1) < 0.10, f"{chosen} against {other}: {foreseen:.2f}, {true:.2f}"
