"""What only a real cluster shows of placement and notices: who sees which GPU, a node that hears its provider."""

import asyncio
import contextlib
import json
import os
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pearl_executor.runtimes.ray.availability import look_at_cluster, watch_node
from pearl_executor.runtimes.ray.cluster import RayCluster
from pearl_executor.runtimes.ray.placement import Layout
from pearl_executor.runtimes.ray.processes import RayProcesses

pytestmark = [pytest.mark.ray, pytest.mark.slow]

HOST = "pearl_executor.runtimes.ray.sglang_host:main"


async def placed(processes, name, gpus):
    """Start a child on `gpus`; returns it and the GPUs that it sees."""
    arguments = {"interpreter": [], "kill_command": [], "listen": processes.peer_address(name)}
    child = await processes.spawn(name, HOST, arguments, gpus=gpus)
    answer = await child.channel.call("place", timeout_s=60)
    return child, answer.head["gpus"].split(",")


def test_overlap_workers_share_the_gpus_of_their_training_ranks(nodes):
    async def main():
        layout = Layout(
            training=range(2),
            kept=frozenset({2}),
            gpus_per_worker=2,
            labels={"training": {"pearl.zone": "base"}, "reserved": {"pearl.zone": "base"}},
        )
        async with RayCluster(nodes.address, namespace="pearl") as cluster, RayProcesses(cluster, layout) as processes:
            ranks = [await placed(processes, f"train{rank:03d}-001", [rank]) for rank in range(2)]
            overlap, seen = await placed(processes, "w2-1", [0, 1])
            _, other = await placed(processes, "w4-1", [2])
            assert [gpus for _, gpus in ranks] == [[seen[0]], [seen[1]]]
            assert len({*seen, *other}) == 3
            # Also a process that does not react is gone once the kill returns, and then its slot is free again.
            os.kill(overlap.pid, signal.SIGSTOP)
            await processes.kill(overlap)
            with pytest.raises(ProcessLookupError):
                os.kill(overlap.pid, 0)
            _, again = await placed(processes, "w2-2", [0, 1])
            assert again == seen

    asyncio.run(asyncio.wait_for(main(), 400))


@contextlib.contextmanager
def spot_service():
    """A provider's local service that takes the machine at noon."""

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self):
            self.answer(b"TOKEN==")

        def do_GET(self):
            self.answer(json.dumps({"action": "hibernate", "time": "2017-09-18T12:00:00Z"}).encode())

        def answer(self, body):
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_node_hears_its_provider(nodes):
    async def main(base):
        async with RayCluster(nodes.address, namespace="pearl"):
            node = nodes.join(1)
            before = await asyncio.to_thread(look_at_cluster, {"pearl.zone": "elastic"}, 30.0)
            state = next(one for one in before if one.id == node.node_id)
            assert (state.gpus, state.leaves_in_s) == (1, None)
            assert await watch_node(node.node_id, "aws", 30.0, base) == 0.0
            nodes.take_away(node)

    with spot_service() as base:
        asyncio.run(asyncio.wait_for(main(base), 400))
