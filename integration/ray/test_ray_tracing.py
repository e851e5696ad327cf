"""A worker that is a Ray actor writes its spans below the turn and the reconfiguration that it works for."""

import asyncio
import json
import os
from dataclasses import replace

import pytest

from pearl_executor.pacing import Pace
from pearl_executor.ports import GenerateRequest
from pearl_executor.runtimes.local.scripted import scripted_recipe
from pearl_executor.runtimes.ray.cluster import RayCluster
from pearl_executor.runtimes.ray.placement import Layout
from pearl_executor.runtimes.ray.processes import RayProcesses
from pearl_executor.runtimes.ray.runtime import RayRuntime
from pearl_executor.tracing import TRACEPARENT, TracingRecipe
from pearl_state.roles import Role, Zone
from pearl_state.worker import GpuId, Worker, WorkerId
from pearl_telemetry.context import TraceKeys

pytestmark = [pytest.mark.ray, pytest.mark.slow]

BASE = {"pearl.zone": "base"}
LAYOUT = Layout(training=range(2), kept=frozenset({2}), gpus_per_worker=1, labels={"training": BASE, "reserved": BASE})
WORKER = Worker(
    id=WorkerId(4), gpus=frozenset({GpuId(2)}), role=Role.COLOCATED, zone=Zone.DEDICATED, incarnation=1
)  # fmt: skip


def test_actors_get_the_context_with_their_start_and_with_each_call(nodes, tmp_path):
    start, turn = TraceKeys.fresh(), TraceKeys("run").turn("t1", 0)
    settings = {"jsonl": str(tmp_path), "otlp_endpoint": "", "run": "run"}
    tracing = TracingRecipe(opener="pearl_telemetry.remote:open_worker_spans", settings=settings)
    recipe = replace(scripted_recipe(Pace()), tracing=tracing)

    async def main():
        async with (
            RayCluster(nodes.address, namespace="pearl") as cluster,
            RayProcesses(cluster, LAYOUT) as processes,
            RayRuntime(recipe, processes) as runtime,
        ):
            TRACEPARENT.set(start.traceparent)
            await runtime.start(WORKER)
            TRACEPARENT.set(turn.traceparent)
            request = GenerateRequest(rid="t1.0000.001", prompt=(5, 6, 7), max_new_tokens=3)
            await runtime.generate(WORKER, request, lambda _chunk: None)
            TRACEPARENT.set("")
            await runtime.stop(WORKER)

    asyncio.run(asyncio.wait_for(main(), 400))
    spans = [json.loads(line) for line in (tmp_path / "spans.jsonl").read_text().splitlines()]
    found = {span["attributes"]["pearl.op"]: (span["name"], span["trace"], span["parent"]) for span in spans}
    of_start = (f"{start.trace:032x}", f"{start.span:016x}")
    assert found["start"] == found["describe"] == ("pearl.worker.command", *of_start)
    assert found["generate"] == ("pearl.worker.request", f"{turn.trace:032x}", f"{turn.span:016x}")
    assert os.getpid() not in {span["attributes"]["process.pid"] for span in spans}
