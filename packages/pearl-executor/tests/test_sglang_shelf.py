"""Stand-in servers on a shelf: their ends are told, whenever they come."""

import asyncio
import json
import struct
import sys

import pytest

from pearl_executor.engines.sglang.launch import LaunchOrder
from pearl_executor.testing.sglang.shelf import ShelfLauncher


@pytest.mark.skipif(sys.platform != "linux", reason="the shelf keeps ports as Linux does")
def test_a_server_that_is_killed_before_it_began_is_told_as_gone_and_its_place_is_free(tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))

    async def play():
        async with ShelfLauncher(1) as launcher:
            place = await launcher.place("w1-1", "0", "127.0.0.1")
            args = ["--model-path", str(tmp_path), "--host", "127.0.0.1", "--port", str(place.ports[0])]
            order = LaunchOrder(name="w1-1", gpus="0", args=args, env={}, log=tmp_path / "log")
            launching = asyncio.create_task(launcher.launch(order))
            await asyncio.sleep(0)
            # Both orders are read before the server has its first turn.
            await asyncio.gather(launching, launcher.servers[0].kill())
            how = await asyncio.wait_for(launching.result().exited, 10.0)
            assert how == "it ended with signal SIGKILL"
            assert not launcher.servers
            await launching.result().end(0.0)

    asyncio.run(play())
