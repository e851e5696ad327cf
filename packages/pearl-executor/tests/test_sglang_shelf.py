"""Stand-in servers on a shelf: their ends are told, whenever they come."""

import asyncio
import json
import struct

from pearl_executor.testing.sglang.shelf import Shelf


def test_a_server_that_is_killed_before_it_began_is_told_as_gone_and_its_place_is_free(tmp_path, capsys):
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))

    async def play():
        shelf = Shelf()
        ports = shelf.place({"name": "w1-1", "host": "127.0.0.1"})["ports"]
        args = ["--model-path", str(tmp_path), "--host", "127.0.0.1", "--port", str(ports[0])]
        # Both orders are carried out before the server has its first turn.
        shelf.launch({"name": "w1-1", "args": args, "env": {}})
        shelf.end({"name": "w1-1", "how": "it was killed"})
        await asyncio.sleep(0.01)
        assert json.loads(capsys.readouterr().out) == {"ended": "w1-1", "how": "it was killed"}
        listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", ports[0])
        listener.close()
        await listener.wait_closed()

    asyncio.run(play())
