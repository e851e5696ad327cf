"""A long run of the real control plane over very many stand-in workers that fail all the time.

`python integration/soak/soak.py --minutes 10`: scheduler, planner's step, executors, SGLang runtime and client, router
and journal are the product's; the workers are stand-in servers (`pearl_executor.testing.sglang`), each with an address
of its own, in a few processes. Workers are killed or hang at the given rate, also while all of them start; streams of
turns run all the time, and every token is checked against what an undisturbed worker would have said.

Prints a line every so often and a JSON report at the end; exits with 1 where something did not hold.
"""

import argparse
import asyncio
import gc
import json
import random
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "sglang_cpu"))
from support import tiny_model

from pearl_executor.engines.sglang.checksums import snapshot_checksum
from pearl_executor.engines.sglang.options import MemoryProbe, SglangOptions, SglangTimeouts
from pearl_executor.engines.sglang.runtime import SglangRuntime
from pearl_executor.execution import ElasticExecutor
from pearl_executor.ports import Sampling, WeightSnapshot
from pearl_executor.testing.sglang.model import Weights, draw, extend, vocabulary
from pearl_executor.testing.sglang.shelf import ShelfLauncher, ShelvedServer
from pearl_planner.elastic import Borrowing, ElasticSettings, initial_state
from pearl_planner.policies import colocated_elastic
from pearl_rl.control.scheduler import ElasticScheduler
from pearl_rl.journal.run_journal import RunJournal
from pearl_rl.journal.storage import FolderStorage
from pearl_rl.rollout.calls import GenerationFailedError, ModelCall
from pearl_rl.rollout.ledger import RolloutLedger
from pearl_rl.rollout.router import Router, RouterLimits
from pearl_rl.rollout.serving import ServingLimits
from pearl_rl.rollout.training_gate import TrainingGate
from pearl_state.events import GpusOffered, WorkerFailed
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.roles import Tenure
from pearl_state.trajectory import TrajectoryId
from pearl_state.worker import GpuId

TURNS, NEW_TOKENS, PROMPT_TOKENS = 3, 8, 24
TIMEOUTS = SglangTimeouts(control_s=60.0, generate_s=120.0, poll_s=10.0, silence_s=24.0, stop_s=1.0)
WORKLOAD = WorkloadProfile(batch=256, turns=TURNS, new_prompt_tokens=PROMPT_TOKENS, response_tokens=NEW_TOKENS)
PLATFORM = PlatformProfile(
    decode_fixed_s=0.03,
    decode_per_sequence_s=0.002,
    prefill_per_token_s=0.0001,
    kv_bytes_per_token=512,
    transfer_bytes_per_s=1e9,
)
REPORT_S = 10.0
SETTLE_S = 60.0
MOST_SERVE = 0.9
"""Part of the workers that must come to serve while workers fail."""
KINDS = (("killed", 0.8), ("hung", 0.2))


@dataclass
class Plan:
    """What a soak does."""

    minutes: float = 10.0
    workers: int = 1000
    failing_per_minute: float = 0.05
    """Of all workers."""
    streams: int = 100
    """Trajectories that run at the same time."""
    shelves: int = 2
    step_s: float = 0.25
    """Between two tokens of a request."""
    start_s: float = 240.0
    """A worker that is not up by then is given up, and its group with it."""
    seed: int = 0
    folder: Path = field(default_factory=Path)


@dataclass
class Sample:
    """How it was at one moment of the soak."""

    at_s: float
    active: int
    control_bytes: int
    tasks: int
    calls: int
    longest_s: float


class Soak:
    """One soak, from the first start to the last end."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.draw = random.Random(plan.seed)
        self.counts: Counter[str] = Counter()
        self.samples: list[Sample] = []
        self.problems: list[str] = []
        self.latencies_s: list[float] = []
        self.longest_s = 0.0
        self.broken: dict[str, ShelvedServer] = {}
        self.broken_starting = 0
        self.least_active = plan.workers
        self.active = 0
        self.most_active = asyncio.Event()
        self.all_active = asyncio.Event()
        self.ending = asyncio.Event()

    async def run(self) -> dict[str, object]:
        """Returns the report. `problems` in it is empty where everything held."""
        model = tiny_model(self.plan.folder / "model", seed=self.plan.seed)
        self.weights, self.vocabulary = Weights.read(model), vocabulary(model)
        snapshot = WeightSnapshot(1, str(model), checksum=snapshot_checksum(model))
        before = len(asyncio.all_tasks())
        async with AsyncExitStack() as stack:
            await self._open(stack, model, snapshot)
            start_s = await self._start()
            self.quiet_tasks = len(asyncio.all_tasks())
            await self._soak()
            await self._until_broken_are_gone()
            await self._until_all_active(self.plan.start_s + SETTLE_S)
            await self._check_quiet()
        for _ in range(50):
            if len(asyncio.all_tasks()) <= before:
                break
            await asyncio.sleep(0.1)
        else:
            self._problem(f"{len(asyncio.all_tasks()) - before} tasks are left after the end")
        return self._report(start_s)

    async def _open(self, stack: AsyncExitStack, model: Path, snapshot: WeightSnapshot) -> None:
        plan = self.plan
        options = SglangOptions(
            interpreter=("stand-in",),
            model_dir=model,
            device="cpu",
            dtype="float32",
            kv_tokens=512,
            memory_probe=MemoryProbe.PROCESS,
            env={"PEARL_STANDIN_STEP_S": str(plan.step_s)},
        )
        timeouts = replace(TIMEOUTS, start_s=plan.start_s)
        self.launcher = await stack.enter_async_context(ShelfLauncher(plan.shelves))
        runtime = SglangRuntime(options, plan.folder / "workers", timeouts=timeouts, launcher=self.launcher)
        self.runtime = await stack.enter_async_context(runtime)
        settings = ElasticSettings(policy=colocated_elastic(), borrowing=Borrowing.OFF, max_restarts=1_000_000)
        state = initial_state(
            settings=settings, workload=WORKLOAD, platform=PLATFORM, training_gpus=1, weight_version=1
        )
        self.journal = RunJournal(FolderStorage(plan.folder / "journal"), state, RolloutLedger())
        limits = RouterLimits(serving=ServingLimits(capacity_sequences=64), no_worker_s=60.0, stall_s=30.0)
        self.router = Router(runtime, limits, on_fault=lambda row, cause: self._lost(row.id, row.incarnation, cause))
        executor = ElasticExecutor(runtime, None, _Weights(snapshot))
        self.scheduler = ElasticScheduler(
            state,
            executor=executor,
            routing=self.router,
            training=TrainingGate(),
            on_step=self._stepped,
            journal=self.journal,
        )
        runtime.on_lost = self._lost
        control = asyncio.create_task(self.scheduler.run(), name="control")

        async def close() -> None:
            await self.router.aclose()
            executor.close()
            self.scheduler.stop()
            await control

        stack.push_async_callback(close)
        gpus = frozenset(GpuId(1 + number) for number in range(plan.workers))
        self.scheduler.post(GpusOffered(now_s=_now_s(), gpus=gpus, tenure=Tenure.RESERVED))

    def _lost(self, id_, incarnation, cause) -> None:
        self.scheduler.post(WorkerFailed(now_s=_now_s(), worker=id_, incarnation=incarnation, cause=cause))

    def _stepped(self, event, state, effects) -> None:
        self.counts[type(event).__name__] += 1
        self.active = len(state.table.active())
        if self.active >= MOST_SERVE * self.plan.workers:
            self.most_active.set()
        if self.active == self.plan.workers:
            self.all_active.set()
        else:
            self.all_active.clear()

    async def _start(self) -> float:
        """Have most workers come to serve while workers fail at the plan's rate, then all. Returns the time of most."""
        began_s = time.monotonic()
        failing = asyncio.create_task(self._fail(self.plan.start_s))
        with suppress(TimeoutError):
            async with asyncio.timeout(self.plan.start_s):
                await self.most_active.wait()
        start_s = time.monotonic() - began_s
        failing.cancel()
        await asyncio.gather(failing, return_exceptions=True)
        self.broken_starting, self.counts["killed"], self.counts["hung"] = self._broken, 0, 0
        groups = f"{self.counts['GroupPrepared']} groups came up, {self.counts['GroupFailed']} failed"
        print(
            f"{self.active} workers serve after {start_s:.1f} s, {self.broken_starting} broken meanwhile, {groups}",
            flush=True,
        )
        if not self.most_active.is_set():
            self._problem(f"only {self.active} of {self.plan.workers} workers came to serve in {start_s:.0f} s")
        await self._until_all_active(self.plan.start_s + SETTLE_S)
        return start_s

    async def _until_broken_are_gone(self) -> None:
        """Whoever hangs is ended by the control plane once it was silent for long enough."""
        try:
            async with asyncio.timeout(self.plan.start_s + SETTLE_S):
                for server in self.broken.values():
                    await asyncio.shield(server.exited)
        except TimeoutError:
            left = [name for name, server in self.broken.items() if not server.exited.done()]
            self._problem(f"{len(left)} broken workers are still there: {left[:5]}")
        # What follows from their ends is under way.
        await asyncio.sleep(1.0)

    async def _until_all_active(self, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await self.all_active.wait()
        except TimeoutError:
            self._problem(f"only {self.active} of {self.plan.workers} workers serve after {limit_s:g} s")

    # ---- the soak itself --------------------------------------------------------------------------------------------

    async def _soak(self) -> None:
        streams = [asyncio.create_task(self._stream(number)) for number in range(self.plan.streams)]
        watching = asyncio.create_task(self._watch())
        await self._fail(60.0 * self.plan.minutes)
        self.ending.set()
        await asyncio.gather(*streams)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    async def _stream(self, number: int) -> None:
        """One trajectory after the other, until the end; a turn that fails or is wrong is a problem."""
        play = random.Random(self.plan.seed * 100_003 + number)
        count = 0
        while not self.ending.is_set():
            trajectory = TrajectoryId(f"s{number:04d}-{count:05d}")
            count += 1
            self.router.begin(trajectory)
            context: list[int] = []
            for turn in range(TURNS):
                context += [play.randrange(500) for _ in range(PROMPT_TOKENS)]
                began_s = _now_s()
                call = ModelCall(
                    trajectory=trajectory,
                    turn=turn,
                    prompt=tuple(context),
                    max_new_tokens=NEW_TOKENS,
                    sampling=Sampling(temperature=0.0),
                )
                try:
                    result = await self.router.generate(call)
                except GenerationFailedError as error:
                    self._problem(f"a call was given up: {error}")
                    break
                expected = self._continuation(context)
                if list(result.tokens) != expected:
                    self._problem(f"{trajectory} turn {turn}: {list(result.tokens)}, expected {expected}")
                self.counts["calls"] += 1
                self.counts["interrupted"] += bool(result.interruptions)
                self.latencies_s.append(_now_s() - began_s)
                self.longest_s = max(self.longest_s, self.latencies_s[-1])
                context += result.tokens
            self.router.end(trajectory)

    def _continuation(self, context: list[int]) -> list[int]:
        state = extend(self.weights.seed, context)
        tokens = []
        for _ in range(NEW_TOKENS):
            token, _ = draw(state, self.vocabulary)
            tokens.append(token)
            state = extend(state, [token])
        return tokens

    async def _fail(self, seconds: float) -> None:
        """Break as many workers as the plan says, at moments drawn evenly over `seconds`.

        By the clock, however long a victim takes: what a busy machine was late with is made up at once.
        """
        began_s = _now_s()
        count = round(self.plan.workers * self.plan.failing_per_minute * seconds / 60.0)
        due = deque(sorted(self.draw.uniform(0.0, seconds) for _ in range(count)))
        async with asyncio.TaskGroup() as tasks:
            while due:
                await asyncio.sleep(max(0.05, began_s + due[0] - _now_s()))
                sound = [s for s in self.launcher.servers if not s.exited.done() and s.name not in self.broken]
                self.draw.shuffle(sound)
                while due and sound and began_s + due[0] <= _now_s():
                    due.popleft()
                    tasks.create_task(self._break(sound.pop()))
            await asyncio.sleep(max(0.0, began_s + seconds - _now_s()))

    def _break(self, victim: ShelvedServer) -> Coroutine[Any, Any, None]:
        names, weights = zip(*KINDS, strict=True)
        kind = self.draw.choices(names, weights)[0]
        self.counts[kind] += 1
        self.broken[victim.name] = victim
        return victim.kill() if kind == "killed" else victim.hang()

    async def _watch(self) -> None:
        began_s = _now_s()
        while True:
            until_s = _now_s() + REPORT_S
            while _now_s() < until_s:
                await asyncio.sleep(0.5)
                self.least_active = min(self.least_active, self.active)
            gc.collect()
            sample = Sample(
                round(_now_s() - began_s, 1), self.active, _own_bytes(), len(asyncio.all_tasks()),
                self.counts["calls"], round(self.longest_s, 2),
            )  # fmt: skip
            self.samples.append(sample)
            print(
                f"{sample.at_s:6.0f} s  {sample.active} serve  {sample.calls} turns  {self._broken} broken"
                f"  {sample.control_bytes / 2**20:.1f} MiB  {sample.tasks} tasks  longest turn {sample.longest_s} s",
                flush=True,
            )

    # ---- what must hold ---------------------------------------------------------------------------------------------

    async def _check_quiet(self) -> None:
        """With all workers back and no streams, nothing but what watches the workers may be left."""
        for _ in range(300):
            tasks = len(asyncio.all_tasks())
            if tasks <= self.quiet_tasks:
                break
            await asyncio.sleep(0.1)
        else:
            self._problem(f"{tasks - self.quiet_tasks} tasks more than before the streams began")
        self.quiet_after = tasks
        holding = sum(load > 0 for load in self.router.loads().values())
        if holding:
            self._problem(f"{holding} workers hold requests that nobody waits for")

    @property
    def _broken(self) -> int:
        return self.counts["killed"] + self.counts["hung"]

    def _problem(self, what: str) -> None:
        self.problems.append(what)
        print(f"PROBLEM {what}", flush=True)

    def _report(self, start_s: float) -> dict[str, object]:
        plan = self.plan
        # The first minute (or third) warms pools and caches up; from then on memory may not grow.
        flat = [s for s in self.samples if s.at_s >= min(60.0, 20.0 * plan.minutes)]
        growth = _growth(flat)
        if growth is not None and growth > 0.05:
            self._problem(f"memory of the control process grows by {growth:.1%} between first and last third")
        if self.least_active < 0.8 * plan.workers:
            self._problem(f"only {self.least_active} workers served at one moment")
        latencies = sorted(self.latencies_s) or [0.0]
        statistics = self.router.statistics
        return {
            "workers": plan.workers,
            "minutes": plan.minutes,
            "streams": plan.streams,
            "start_s": round(start_s, 1),
            "broken_starting": self.broken_starting,
            "killed": self.counts["killed"],
            "hung": self.counts["hung"],
            "failing_per_minute": round(self._broken / plan.workers / plan.minutes, 4),
            "failures_noticed": self.counts["WorkerFailed"],
            "groups_prepared": self.counts["GroupPrepared"],
            "groups_failed": self.counts["GroupFailed"],
            "least_serving": self.least_active,
            "turns": self.counts["calls"],
            "turns_resumed": self.counts["interrupted"],
            "turns_given_up": statistics.given_up,
            "stale_served": statistics.stale_served,
            "turn_p50_s": round(latencies[len(latencies) // 2], 2),
            "turn_p99_s": round(latencies[int(0.99 * (len(latencies) - 1))], 2),
            "turn_longest_s": round(latencies[-1], 2),
            "control_mib_first": round(flat[0].control_bytes / 2**20, 1) if flat else None,
            "control_mib_last": round(flat[-1].control_bytes / 2**20, 1) if flat else None,
            "memory_growth": None if growth is None else round(growth, 4),
            "tasks_before": self.quiet_tasks,
            "tasks_after": self.quiet_after,
            "problems": self.problems,
        }


class _Weights:
    """One snapshot for ever."""

    def __init__(self, snapshot: WeightSnapshot) -> None:
        self._snapshot = snapshot

    def newest(self) -> WeightSnapshot:
        return self._snapshot


def _growth(samples: list[Sample]) -> float | None:
    """Mean memory of the last third over that of the first third, minus 1; None where there are too few."""
    third = len(samples) // 3
    if not third:
        return None
    first, last = samples[:third], samples[-third:]
    return sum(s.control_bytes for s in last) / sum(s.control_bytes for s in first) - 1.0


def _own_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=Plan.minutes)
    parser.add_argument("--workers", type=int, default=Plan.workers)
    parser.add_argument("--failing-per-minute", type=float, default=Plan.failing_per_minute, help="part of the workers")
    parser.add_argument("--streams", type=int, default=Plan.streams, help="trajectories at the same time")
    parser.add_argument("--shelves", type=int, default=Plan.shelves, help="processes that hold the workers")
    parser.add_argument("--start-s", type=float, default=Plan.start_s, help="a worker not up by then is given up")
    parser.add_argument("--seed", type=int, default=Plan.seed)
    given = vars(parser.parse_args())
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        report = asyncio.run(Soak(Plan(**given, folder=Path(folder))).run())
    print(json.dumps(report, indent=1))
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
