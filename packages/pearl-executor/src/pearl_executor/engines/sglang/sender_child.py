"""The process that holds tensors for SGLang servers: `python -m pearl_executor.engines.sglang.sender_child`.

Apart from the control plane, because a broadcast whose other side is gone never returns: then this process is killed.
Orders come as JSON lines on standard input, answers go to standard output. Importing this imports torch.
"""

import base64
import io
import json
import sys
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

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

    def join(self, url: str, world: int, name: str, backend: str, timeout_s: float) -> None:
        """Be rank 0 of a group in which the server's ranks are the others. A group of a load that failed is left."""
        self.leave()
        limit = timedelta(seconds=timeout_s)
        store, rank, size = next(iter(rendezvous(url, 0, world, timeout=limit)))
        store.set_timeout(limit)
        # The server makes its side by the same steps; the public constructor would make a default group instead.
        self._group, _ = c10d._new_process_group_helper(
            size,
            rank,
            [],
            c10d.Backend(backend),
            c10d.PrefixStore(name, store),
            group_name=c10d.GroupName(name),
            timeout=limit,
        )
        c10d._world.pg_group_ranks[self._group] = {member: member for member in range(size)}

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
