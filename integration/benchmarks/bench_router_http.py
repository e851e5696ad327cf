"""What the router adds to a model call, with many streams at once over HTTP, and how evenly it spreads them.

`python integration/benchmarks/bench_router_http.py`: SGLang runtime and client against stand-in servers in processes of
their own. Added latency of a call is the time between its arrival at the router and its request to the port, plus the
time between the port's answer and the router's; waiting for the event loop included. `hold_ms` says how late a timer of
the same loop fires, so that a machine that is busy with other work can be told from a slow router. Half-way the cluster
doubles; `imbalance` is how far the busiest worker is above the mean from then on.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "sglang_cpu"))
from support import tiny_model

from pearl_executor.engines.sglang.options import SglangOptions, SglangTimeouts
from pearl_executor.engines.sglang.runtime import SglangRuntime
from pearl_executor.ports import Sampling, WeightSnapshot
from pearl_executor.testing.sglang.shelf import ShelfLauncher
from pearl_rl.rollout.calls import ModelCall
from pearl_rl.rollout.router import Router, RouterLimits
from pearl_rl.rollout.serving import ServingLimits
from pearl_rl.rollout.testing import serving_table
from pearl_state.roles import Role
from pearl_state.trajectory import TrajectoryId

# As `pearl-rl train` sets them.
LIMITS = RouterLimits(serving=ServingLimits(capacity_sequences=64, affinity_slack=1.0, affinity_slack_ratio=0.1))
TIMEOUTS = SglangTimeouts(start_s=60.0, control_s=30.0, poll_s=5.0, silence_s=30.0)
TOKENS, PROMPT_TOKENS = 12, 32
HOLD_S = 0.01


class TimedPort:
    """The generation port, with a note of when each request came and when its answer went."""

    def __init__(self, runtime) -> None:
        self._runtime = runtime
        self.came_s: dict[str, float] = {}
        self.went_s: dict[str, float] = {}

    async def generate(self, worker, request, on_chunk):
        loop = asyncio.get_running_loop()
        self.came_s[request.affinity] = loop.time()
        try:
            return await self._runtime.generate(worker, request, on_chunk)
        finally:
            self.went_s[request.affinity] = loop.time()

    async def abort(self, worker, rid):
        await self._runtime.abort(worker, rid)


class Bench:
    def __init__(self, given) -> None:
        self.given = given
        self.added_s: list[float] = []
        self.late_s: list[float] = []
        self.imbalance: list[float] = []
        self.calls = 0
        self.ending = False

    async def run(self, folder: Path) -> dict[str, object]:
        given = self.given
        model = tiny_model(folder / "model", seed=0)
        options = SglangOptions(
            interpreter=("stand-in",), model_dir=model, device="cpu", dtype="float32", kv_tokens=512,
            env={"PEARL_STANDIN_STEP_S": str(given.step_s)},
        )  # fmt: skip
        async with AsyncExitStack() as stack:
            launcher = await stack.enter_async_context(ShelfLauncher(given.processes))
            runtime = SglangRuntime(options, folder / "workers", timeouts=TIMEOUTS, launcher=launcher)
            await stack.enter_async_context(runtime)
            half, whole = (serving_table([Role.COLOCATED] * count) for count in (given.workers // 2, given.workers))
            rows = list(whole.rows.values())
            await asyncio.gather(*(runtime.start(row) for row in rows))
            await asyncio.gather(*(runtime.load_weights(row, WeightSnapshot(0, str(model))) for row in rows))
            self.port = TimedPort(runtime)
            self.router = Router(self.port, LIMITS)
            self.router.apply(half)
            streams = [asyncio.create_task(self._stream(number)) for number in range(given.streams)]
            holds = asyncio.create_task(self._hold())
            await asyncio.sleep(given.seconds / 2)
            self.router.apply(whole)
            # The turns under way end where they are; from then on every one was placed among all workers.
            await asyncio.sleep(3 * TOKENS * given.step_s)
            watching = asyncio.create_task(self._watch())
            await asyncio.sleep(given.seconds / 2)
            self.ending = True
            for task in (holds, watching):
                task.cancel()
            await asyncio.gather(holds, watching, return_exceptions=True)
            await asyncio.gather(*streams)
            await self.router.aclose()
        return {
            "streams": given.streams,
            "workers": f"{given.workers // 2} -> {given.workers}",
            "calls": self.calls,
            "added_ms": _quantiles(self.added_s),
            "hold_ms": _quantiles(self.late_s),
            "imbalance": {"mean": round(sum(self.imbalance) / len(self.imbalance), 3), "most": max(self.imbalance)},
        }

    async def _stream(self, number: int) -> None:
        """One trajectory: turn after turn, each from all tokens before it; a new one after some."""
        loop = asyncio.get_running_loop()
        turn = count = 0
        trajectory, context = TrajectoryId(f"t{number:04d}-{count:04d}"), list(range(PROMPT_TOKENS))
        self.router.begin(trajectory)
        # Streams do not begin in step.
        await asyncio.sleep(number / self.given.streams * TOKENS * self.given.step_s)
        while not self.ending:
            began_s = loop.time()
            call = ModelCall(
                trajectory=trajectory, turn=turn, prompt=tuple(context), max_new_tokens=TOKENS,
                sampling=Sampling(temperature=0.0),
            )  # fmt: skip
            result = await self.router.generate(call)
            done_s = loop.time()
            port = self.port
            self.added_s.append(port.came_s.pop(trajectory) - began_s + done_s - port.went_s.pop(trajectory))
            self.calls += 1
            context += result.tokens
            turn += 1
            if turn == 4:
                self.router.end(trajectory)
                turn, count = 0, count + 1
                trajectory, context = TrajectoryId(f"t{number:04d}-{count:04d}"), list(range(PROMPT_TOKENS))
                self.router.begin(trajectory)
        self.router.end(trajectory)

    async def _hold(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + HOLD_S
            await asyncio.sleep(HOLD_S)
            self.late_s.append(loop.time() - due_s)

    async def _watch(self) -> None:
        while True:
            loads = list(self.router.loads().values())
            self.imbalance.append(round(max(loads) * len(loads) / sum(loads) - 1.0, 3))
            await asyncio.sleep(0.1)


def _quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {name: round(1e3 * ordered[int(at * (len(ordered) - 1))], 3) for name, at in
            (("p50", 0.5), ("p99", 0.99), ("p999", 0.999))}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--workers", type=int, default=8, help="half of them from the beginning")
    parser.add_argument("--processes", type=int, default=2, help="that hold the workers")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--step-s", type=float, default=0.2, help="between two tokens of a stream")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="router-") as folder:
        print(json.dumps(asyncio.run(Bench(given).run(Path(folder))), indent=1))


if __name__ == "__main__":
    main()
