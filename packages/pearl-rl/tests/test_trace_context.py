"""Trace context across real process boundaries: what workers and environment servers write hangs below the turn."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pearl_executor.pacing import Pace
from pearl_executor.ports import Finish, GenerateRequest
from pearl_executor.runtimes.local.runtime import LocalRuntime
from pearl_executor.runtimes.local.scripted import scripted_recipe
from pearl_executor.tracing import TRACEPARENT, trace_headers
from pearl_rl.rollout.agent import Agent, Episode
from pearl_rl.rollout.calls import Generate, ModelCall, TurnResult
from pearl_rl.rollout.environments.bisect_environment import BisectSuite
from pearl_rl.rollout.environments.http_environment import HttpEnvironment
from pearl_rl.settings import load_settings
from pearl_rl.telemetry import RunTelemetry
from pearl_state.effects import GroupKind, PrepareGroup
from pearl_state.events import GpusOffered, GroupPrepared
from pearl_state.plan import PlanId
from pearl_state.roles import Role, Zone
from pearl_state.trajectory import GroupId, Trajectory, TrajectoryId, Turn
from pearl_state.worker import GpuId, Worker, WorkerId

SERVER = """
import asyncio, sys
from pathlib import Path
from opentelemetry import trace
from pearl_rl.rollout.environments.bisect_environment import BisectSuite
from pearl_rl.rollout.environments.sessions import EnvironmentServer
from pearl_telemetry.sdk import TelemetryOptions, open_telemetry

async def main():
    telemetry = open_telemetry(TelemetryOptions(jsonl=Path(sys.argv[1]), process="environments", spans_only=True))
    trace.set_tracer_provider(telemetry.tracer_provider)
    server = EnvironmentServer(BisectSuite.build({}).environment)
    await server.start()
    print(server.url, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.close()
    telemetry.close()

asyncio.run(main())
"""


def worker(slot: int, role: Role) -> Worker:
    return Worker(
        id=WorkerId(slot), gpus=frozenset({GpuId(slot)}), role=role, zone=Zone.DEDICATED, incarnation=1
    )  # fmt: skip


PREFILL, DECODE, COLOCATED = worker(0, Role.PREFILL), worker(1, Role.DECODE), worker(2, Role.COLOCATED)


class TwoTurns:
    """An agent whose environment is on a server: a colocated turn and a disaggregated one."""

    def __init__(self, url: str) -> None:
        self._environment = HttpEnvironment(url)

    async def run(self, episode: Episode, generate: Generate) -> Trajectory:
        environment, turns = self._environment, []
        await environment.reset(episode.task)
        for number in range(2):
            call = ModelCall(trajectory=episode.trajectory, turn=number, prompt=(5, 6, 7), max_new_tokens=3)
            result = await generate(call)
            await environment.step("run 1")
            turn = Turn(prompt=(5, 6, 7), response=tuple(result.tokens), logprobs=tuple(result.logprobs),
                        spans=result.spans, started_s=result.started_s, finished_s=result.finished_s)  # fmt: skip
            turns.append(turn)
        await environment.close()
        return Trajectory(
            id=episode.trajectory, group=episode.group, task=episode.task.id, turns=tuple(turns), reward=1.0,
            dispatch_version=0, started_s=turns[0].started_s, finished_s=turns[-1].finished_s,
        )  # fmt: skip


async def play(folder: Path, url: str, *, traced: bool) -> None:
    """One trajectory on real workers, which a reconfiguration started."""
    settings = load_settings(None, [f"telemetry.jsonl={str(traced).lower()}"]).settings
    telemetry = RunTelemetry(settings.telemetry, folder, "scripted", asyncio.get_running_loop().time())
    try:
        recipe = telemetry.recipe(scripted_recipe(Pace()))
        async with LocalRuntime(recipe, folder) as runtime:
            await prepare(telemetry, runtime)

            async def generate(call: ModelCall) -> TurnResult:
                now_s = asyncio.get_running_loop().time
                request = GenerateRequest(
                    rid=f"{call.trajectory}.{call.turn}", prompt=call.prompt, max_new_tokens=call.max_new_tokens
                )
                began_s = now_s()
                if call.turn == 0:
                    found = await runtime.generate(COLOCATED, request, lambda _chunk: None)
                else:
                    found = await runtime.generate_pair(PREFILL, DECODE, request, lambda _chunk: None)
                assert found.finish is Finish.LENGTH
                return TurnResult(
                    finish=found.finish, tokens=found.tokens, logprobs=found.logprobs, spans=found.spans,
                    cached_tokens=0, queue_s=0.0, prefill_s=0.0, decode_s=0.0, transfer_s=0.0, started_s=began_s,
                    finished_s=now_s(), interruptions=0, worker=WorkerId(2),
                )  # fmt: skip

            agent: Agent = telemetry.agent(TwoTurns(url))
            episode = Episode(
                trajectory=TrajectoryId("t1"), group=GroupId("g1"), task=BisectSuite.build({}).tasks(0).task(0),
                dispatch_version=0, seed=1,
            )  # fmt: skip
            telemetry.on_trajectory(await agent.run(episode, generate), 1)
            assert TRACEPARENT.get() == ""
            # In order, so that their last spans are not cut off.
            await asyncio.gather(*(runtime.stop(one) for one in (PREFILL, DECODE, COLOCATED)))
    finally:
        telemetry.close()


async def prepare(telemetry: RunTelemetry, runtime: LocalRuntime) -> None:
    """Start the workers as an effect of the control plane would."""
    workers = (PREFILL, DECODE, COLOCATED)
    effect = PrepareGroup(plan_id=PlanId(4), kind=GroupKind.EXPANSION, workers=workers)

    class Starts:
        async def run(self, _effect: Any, _post: Any) -> None:
            await asyncio.gather(*(runtime.start(one) for one in workers))

    now_s = asyncio.get_running_loop().time
    telemetry.on_control(GpusOffered(now_s=now_s(), gpus=frozenset({GpuId(0)})), (effect,))
    await telemetry.executor(Starts()).run(effect, lambda _event: None)
    telemetry.on_control(GroupPrepared(now_s=now_s(), plan_id=PlanId(4), reported={}), ())


@pytest.fixture
def environments(tmp_path: Path):
    """An environment server in a process of its own; its spans go where the run's go."""
    pytest.importorskip("opentelemetry.sdk")
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


def test_what_other_processes_do_for_a_trajectory_is_part_of_its_trace(tmp_path: Path, environments: Any) -> None:
    url, process = environments
    asyncio.run(asyncio.wait_for(play(tmp_path, url, traced=True), 60))
    process.stdin.close()
    assert process.wait(30) == 0
    spans = [json.loads(line) for line in (tmp_path / "spans.jsonl").read_text().splitlines()]
    by_name: dict[str, list[dict[str, Any]]] = {}
    for span in spans:
        by_name.setdefault(span["name"], []).append(span)
    (root,) = by_name["pearl.trajectory"]
    turns = {span["span"]: span["attributes"]["pearl.turn"] for span in by_name["pearl.turn"]}
    assert sorted(turns.values()) == [0, 1]

    served = [(turns[span["parent"]], span["attributes"]["pearl.op"]) for span in by_name["pearl.worker.request"]]
    assert sorted(served) == [(0, "generate"), (1, "decode"), (1, "prefill")]
    answered = [(turns.get(span["parent"]), span["attributes"]["pearl.op"]) for span in
                by_name["pearl.environment.request"]]  # fmt: skip
    assert sorted(answered, key=str) == [(0, "/observation"), (1, "/end"), (1, "/observation"), (None, "/start")]
    (start,) = [s for s in by_name["pearl.environment.request"] if s["attributes"]["pearl.op"] == "/start"]
    assert start["parent"] == root["span"]
    of_trajectory = [root, *by_name["pearl.turn"], *by_name["pearl.worker.request"],
                     *by_name["pearl.environment.request"]]  # fmt: skip
    assert {span["trace"] for span in of_trajectory} == {root["trace"]}
    workers = {span["attributes"]["process.pid"] for span in by_name["pearl.worker.request"]}
    assert len(workers) == 3
    assert os.getpid() not in workers


def test_what_workers_do_for_a_reconfiguration_is_part_of_its_trace(tmp_path: Path, environments: Any) -> None:
    asyncio.run(asyncio.wait_for(play(tmp_path, environments[0], traced=True), 60))
    spans = [json.loads(line) for line in (tmp_path / "spans.jsonl").read_text().splitlines()]
    (root,) = [span for span in spans if span["name"] == "pearl.reconfiguration"]
    commands = [span for span in spans if span["name"] == "pearl.worker.command" and span["parent"] == root["span"]]
    operations = sorted(span["attributes"]["pearl.op"] for span in commands)
    assert operations == ["describe"] * 3 + ["start"] * 3
    assert {span["trace"] for span in commands} == {root["trace"]}


def test_without_telemetry_nothing_is_carried_wrapped_or_written(tmp_path: Path) -> None:
    telemetry = RunTelemetry(load_settings(None, []).settings.telemetry, tmp_path, "tiny", 0.0)
    agent, recipe = TwoTurns("http://127.0.0.1:9"), scripted_recipe(Pace())
    assert telemetry.agent(agent) is agent
    assert telemetry.recipe(recipe) is recipe
    assert trace_headers() == {}
    telemetry.close()
    assert list(tmp_path.iterdir()) == []
