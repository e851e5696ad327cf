"""The process that holds tensors for SGLang servers: `python -m pearl_executor.engines.sglang.sender_child`.

Apart from the control plane, because a broadcast whose other side is gone never returns: then this process is killed.
Orders come as JSON lines on standard input, answers go to standard output. Importing this imports torch.
"""

import base64
import io
import json
import platform
import socket
import sys
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import torch.multiprocessing
import zmq
from safetensors.torch import load_file
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d as c10d
from torch.multiprocessing.reductions import reduce_tensor

_ALIGNMENT = 256
"""Of tensors in a shared buffer, bytes."""
BUCKET_BYTES = 1 << 29
"""Most bytes of tensors in one update."""


class Sender:
    """The newest snapshot's tensors, and the group that is open."""

    def __init__(self) -> None:
        self._folder = ""
        self._tensors: dict[str, Tensor] = {}
        self._group: dist.ProcessGroup | None = None
        self._sent: list[Tensor] = []
        """What servers read from here until the next order."""
        self._context = zmq.Context()
        self._shared: list[zmq.Socket[bytes]] = []
        """One connection a device that waits for its tensors."""
        self._devices: list[str] = []

    def names(self, folder: str) -> list[list[Any]]:
        """Buckets of (name, dtype, shape), in the order in which they are sent."""
        self._load(folder)
        return [[(n, _dtype(t), list(t.shape)) for n, t in bucket] for bucket in self._buckets()]

    def payloads(self, folder: str, bucket: int, devices: list[str]) -> list[str]:
        """One serialized bucket a device. Tensors stay here until the next order, while the server reads them."""
        self._load(folder)
        found = []
        self._sent = []
        for device in devices:
            named = [(name, tensor.to(device)) for name, tensor in self._buckets()[bucket]]
            buffer = io.BytesIO()
            ForkingPickler(buffer).dump(named)
            self._sent += [tensor for _, tensor in named]
            found.append(base64.b64encode(buffer.getvalue()).decode())
        return found

    def offer(self, folder: str, devices: list[str], addresses: list[str]) -> dict[str, str]:
        """Listen at `addresses`, one a device. Returns which address is for which device, as SGLang names devices."""
        self._load(folder)
        self._hang_up()
        for address in addresses:
            connection = self._context.socket(zmq.REQ)
            connection.linger = 0
            connection.bind(address)
            self._shared.append(connection)
        self._devices = devices
        return {_uuid(device): address for device, address in zip(devices, addresses, strict=True)}

    def share(self, answer_s: float) -> None:
        """Give each device's server the buffer, then bucket after bucket in it. Raises `RuntimeError` where one fails.

        The protocol is checkpoint-engine's: a handle, lists of what lies where, None to let go, None once more to end.
        `answer_s` bounds the wait for each answer, seconds.
        """
        for connection in self._shared:
            connection.rcvtimeo = int(1e3 * answer_s)
        try:
            places = [_places(bucket) for bucket in self._buckets()]
            size = max(last["offset"] + tensor.nbytes for (last, tensor) in (bucket[-1] for bucket in places))
            buffers = [_shared_buffer(size, device) for device in self._devices]
            handles = [reduce_tensor(buffer) for buffer in buffers]  # type: ignore[no-untyped-call]
            self._exchange(handles, b"")
            for bucket in places:
                for buffer in buffers:
                    for entry, tensor in bucket:
                        flat = tensor.contiguous().view(-1).view(torch.uint8)
                        buffer[entry["offset"] : entry["offset"] + tensor.nbytes].copy_(flat)
                    if buffer.is_cuda:
                        torch.cuda.synchronize(buffer.device)
                self._exchange([[entry for entry, _ in bucket]] * len(buffers), _dumps(RuntimeError("the load failed")))
            self._exchange([None] * len(buffers), b"")
            self._exchange([None] * len(buffers), b"")
        finally:
            self._hang_up()

    def _exchange(self, messages: list[Any], give_up: bytes) -> None:
        """Send each device its message and wait for all answers; an answer that says anything is a failure."""
        for connection, message in zip(self._shared, messages, strict=True):
            connection.send(_dumps(message))
        failures = [answer.decode(errors="replace") for connection in self._shared if (answer := connection.recv())]
        if failures:
            for connection in self._shared:
                connection.send(give_up)
            raise RuntimeError(failures[0].strip().splitlines()[-1])

    def _hang_up(self) -> None:
        for connection in self._shared:
            connection.close()
        self._shared = []

    def join(self, url: str, world: int, name: str, backend: str, timeout_s: float) -> None:
        """Be rank 0 of a group in which the server's ranks are the others. A group of a load that failed is left."""
        self.leave()
        limit = timedelta(seconds=timeout_s)
        where = urlsplit(url)
        assert where.hostname is not None
        # Bound here, for torch itself would listen on every address.
        listener = socket.create_server(
            (where.hostname, where.port or 0), family=socket.AF_INET6 if ":" in where.hostname else socket.AF_INET
        )
        store = TCPStore(
            where.hostname,
            listener.getsockname()[1],
            world,
            True,
            limit,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        # The server makes its side by the same steps; the public constructor would make a default group instead.
        self._group, _ = c10d._new_process_group_helper(
            world,
            0,
            [],
            c10d.Backend(backend),
            c10d.PrefixStore(name, store),
            group_name=c10d.GroupName(name),
            timeout=limit,
        )
        c10d._world.pg_group_ranks[self._group] = {member: member for member in range(world)}

    def broadcast(self, bucket: int, device: str) -> None:
        """Send one bucket to all ranks, tensor by tensor."""
        assert self._group is not None
        for _, tensor in self._buckets()[bucket]:
            dist.broadcast(tensor.to(device), src=0, group=self._group)

    def leave(self) -> None:
        """Forget the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _load(self, folder: str) -> None:
        if folder != self._folder:
            self._tensors = {}
            for file in sorted(Path(folder).glob("*.safetensors")):
                self._tensors |= load_file(file)
            self._folder = folder

    def _buckets(self) -> list[list[tuple[str, Tensor]]]:
        buckets: list[list[tuple[str, Tensor]]] = [[]]
        size = 0
        for name, tensor in self._tensors.items():
            if buckets[-1] and size + tensor.nbytes > BUCKET_BYTES:
                buckets.append([])
                size = 0
            buckets[-1].append((name, tensor))
            size += tensor.nbytes
        return buckets


def _places(bucket: list[tuple[str, Tensor]]) -> list[tuple[dict[str, Any], Tensor]]:
    """What lies where in the shared buffer, and the tensors to put there."""
    found = []
    offset = 0
    for name, tensor in bucket:
        found.append(({"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "offset": offset}, tensor))
        offset += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return found


def _shared_buffer(size: int, device: str) -> Tensor:
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    return buffer if buffer.is_cuda else buffer.share_memory_()  # type: ignore[no-untyped-call]


def _uuid(device: str) -> str:
    """As SGLang names its device; a CPU by its kind."""
    chosen = torch.device(device)
    name = torch.cuda.get_device_properties(chosen).uuid if chosen.type == "cuda" else platform.machine()
    return f"GPU-{name}"


def _dumps(message: Any) -> bytes:
    """Pickled, with tensors as handles to their memory."""
    return bytes(ForkingPickler.dumps(message))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def main() -> None:
    """Carry orders out until standard input ends."""
    # Servers are no children of this process: they open shared memory by its file name.
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    sender = Sender()
    print(json.dumps({"result": "ready"}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = {"result": getattr(sender, order["op"])(**order["arguments"])}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
