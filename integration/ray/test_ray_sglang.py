"""SGLang workers on a cluster's nodes: stand-in servers beside Ray actors, with weights through the object store."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from pearl_executor.engines.sglang.options import SglangTimeouts
from pearl_executor.engines.sglang.runtime import SglangRuntime
from pearl_executor.ports import Finish, GenerateRequest, Sampling, WeightSnapshot, WorkerLostError
from pearl_executor.runtimes.ray.cluster import RayCluster
from pearl_executor.runtimes.ray.placement import Layout
from pearl_executor.runtimes.ray.processes import RayProcesses
from pearl_executor.runtimes.ray.sglang_launcher import RayLauncher
from pearl_state.roles import Role, Zone
from pearl_state.worker import GpuId, Worker, WorkerId

sys.path.insert(0, str(Path(__file__).parents[1] / "sglang_cpu"))
from support import cpu_options, tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.torch, pytest.mark.slow]

STAND_IN = (sys.executable, "-m", "pearl_executor.testing.sglang")
GREEDY = Sampling(temperature=0.0)


def row(slot, role):
    return Worker(id=WorkerId(slot), gpus=frozenset({GpuId(slot)}), role=role, zone=Zone.DEDICATED, incarnation=1)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_servers_on_the_clusters_nodes_serve_load_hand_over_and_end(nodes, tmp_path):
    model = tiny_model(tmp_path / "model", 0)

    async def main():
        lost = asyncio.Queue()
        layout = Layout(kept=frozenset(range(3)), labels={"reserved": {"pearl.zone": "base"}})
        async with (
            RayCluster(nodes.address, namespace="pearl") as cluster,
            RayProcesses(cluster, layout) as processes,
            SglangRuntime(
                cpu_options(STAND_IN, model),
                tmp_path / "servers",
                timeouts=SglangTimeouts(start_s=300.0, control_s=60.0, poll_s=0.3, silence_s=60.0, stop_s=5.0),
                launcher=RayLauncher(processes, STAND_IN),
                on_lost=lambda *loss: lost.put_nowait(loss),
            ) as runtime,
        ):
            rows = [row(0, Role.COLOCATED), row(1, Role.PREFILL), row(2, Role.DECODE)]
            await asyncio.gather(*(runtime.start(one) for one in rows))
            snapshot = WeightSnapshot(1, str(model))
            assert await asyncio.gather(*(runtime.load_weights(one, snapshot) for one in rows)) == [1, 1, 1]
            request = GenerateRequest(rid="a.0000.001", prompt=(5, 6, 7), max_new_tokens=8, sampling=GREEDY)
            whole = await runtime.generate(rows[0], request, lambda chunk: None)
            pair = await runtime.generate_pair(
                rows[1],
                rows[2],
                GenerateRequest(rid="b.0000.001", prompt=(5, 6, 7), max_new_tokens=8, sampling=GREEDY),
                lambda chunk: None,
            )
            assert whole.finish is Finish.LENGTH
            assert tuple(pair.tokens) == tuple(whole.tokens)
            report = await runtime.release(rows[0])
            assert report.before_bytes > report.after_bytes
            await runtime.resume(rows[0])
            pids = dict(runtime.pids)
            os.kill(pids[WorkerId(2)], signal.SIGKILL)
            worker, incarnation, cause = await asyncio.wait_for(lost.get(), 60)
            assert (worker, incarnation) == (2, 1)
            assert "SIGKILL" in cause
            with pytest.raises(WorkerLostError):
                await runtime.wait_idle(rows[2])
            await runtime.stop(rows[0])
        assert not any(alive(pid) for pid in pids.values())

    asyncio.run(asyncio.wait_for(main(), 500))
