"""Ways of new weights to a server beside its own reading of a folder: shared memory in two ways, a collective group.

All go through a sender process, one load at a time. A load that exceeds its limit ends the sender, and with it every
wait on the collective; the next load gets a new one.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pearl_executor.engines.sglang import bodies
from pearl_executor.engines.sglang.launch import free_ports
from pearl_executor.engines.sglang.options import SglangOptions, SglangTimeouts, WeightTransport
from pearl_executor.engines.sglang.server import SglangServer
from pearl_executor.engines.sglang.weights import DiskTransport, NotBegunError, Transport
from pearl_executor.ports import WeightSnapshot, WorkerError


class SenderError(WorkerError):
    """The sender process failed or took too long; it is gone."""


class SenderProcess:
    """The child that holds the tensors. Its imports take a while: `started` in good time."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._child: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()

    async def ask(self, op: str, limit_s: float, **arguments: Any) -> Any:
        """Have it carry out one order. Raises `SenderError`."""
        child = await self.started()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            async with asyncio.timeout(limit_s):
                child.stdin.write(json.dumps({"op": op, "arguments": arguments}).encode() + b"\n")
                await child.stdin.drain()
                line = await child.stdout.readline()
        except (TimeoutError, ConnectionError, ValueError) as error:
            await self.end()
            raise SenderError(f"sending weights: {op} did not end within {limit_s:g} s ({error!r})") from None
        except asyncio.CancelledError:
            # Half an answer would be taken for the next order's.
            await self.end()
            raise
        if not line:
            await self.end()
            raise SenderError(f"sending weights: the sender ended during {op}")
        answer = json.loads(line)
        if "error" in answer:
            raise SenderError(f"sending weights: {op} failed: {answer['error']}")
        return answer["result"]

    async def started(self) -> asyncio.subprocess.Process:
        """The process, ready for orders; a new one where there is none. Raises `SenderError`."""
        async with self._starting:
            if self._child is None or self._child.returncode is not None:
                self._child = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "pearl_executor.engines.sglang.sender_child"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                    # A payload is one line: handles of shared memory on one machine, but of every tensor.
                    limit=1 << 30,
                )
                await self._until_ready(self._child)
            return self._child

    async def _until_ready(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None
        try:
            async with asyncio.timeout(self._start_s):
                ready = await child.stdout.readline()
        except TimeoutError:
            ready = b""
        except asyncio.CancelledError:
            await self.end()
            raise
        if not ready:
            await self.end()
            raise SenderError(f"sending weights: the sender did not start within {self._start_s:g} s")

    async def end(self) -> None:
        """End the process, whatever it waits for."""
        child, self._child = self._child, None
        if child is not None:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()
            assert child.stdin is not None
            child.stdin.close()


class TensorTransport:
    """Tensors in shared memory, inside a weight-update session. The server must be on the sender's machine."""

    keeps_old = False

    def __init__(self, sender: SenderProcess, options: SglangOptions, limit_s: float) -> None:
        self._sender = sender
        self._options = options
        self._limit_s = limit_s
        self._turn = asyncio.Lock()

    async def send(self, server: SglangServer, snapshot: WeightSnapshot) -> None:
        """Hand the server every bucket; the version goes with the last one."""
        devices = _devices(self._options, server)
        async with self._turn:
            buckets = await _before(self._sender.ask("names", self._limit_s, folder=snapshot.uri))
            await server.tell("/begin_weight_update", {})
            for bucket in range(len(buckets)):
                payloads = await self._sender.ask(
                    "payloads", self._limit_s, folder=snapshot.uri, bucket=bucket, devices=devices
                )
                version = snapshot.version if bucket == len(buckets) - 1 else None
                await server.tell("/update_weights_from_tensor", bodies.weights_from_tensor(payloads, version))
            await server.tell("/end_weight_update", {})


class IpcTransport:
    """Tensors in one buffer a GPU that both processes map, filled bucket by bucket; SGLang needs checkpoint-engine.

    Where SGLang runs in a container, it must see this machine's shared memory and the folder of the sockets.
    """

    keeps_old = False

    def __init__(self, sender: SenderProcess, options: SglangOptions, limit_s: float, folder: Path) -> None:
        self._sender = sender
        self._options = options
        self._limit_s = limit_s
        self._folder = folder
        self._turn = asyncio.Lock()
        self._loads = count(1)

    async def send(self, server: SglangServer, snapshot: WeightSnapshot) -> None:
        """Share every bucket; the server takes the version with the whole."""
        limit_s = self._limit_s
        devices = _devices(self._options, server)
        async with self._turn:
            load = next(self._loads)
            addresses = [f"ipc://{self._folder}/{load}-{rank}" for rank in range(len(devices))]
            handles = await _before(
                self._sender.ask("offer", limit_s, folder=snapshot.uri, devices=devices, addresses=addresses)
            )
            body = bodies.weights_from_ipc(handles, snapshot.version)
            await _both(
                server.tell("/update_weights_from_ipc", body, timeout_s=limit_s),
                self._sender.ask("share", limit_s, answer_s=limit_s),
            )


class GroupTransport:
    """A broadcast over a group of the sender and one server's ranks, inside a weight-update session.

    A group is made for one load and named after the server's slot, incarnation and a count: a lost member can wedge
    only its own group, and nobody ever joins an older one.
    """

    keeps_old = False

    def __init__(self, sender: SenderProcess, options: SglangOptions, limit_s: float) -> None:
        self._sender = sender
        self._options = options
        self._limit_s = limit_s
        self._turn = asyncio.Lock()
        self._epochs = count(1)

    async def send(self, server: SglangServer, snapshot: WeightSnapshot) -> None:
        """Form the group, broadcast every bucket, and dissolve it."""
        options, limit_s = self._options, self._limit_s
        async with self._turn:
            buckets = await _before(self._sender.ask("names", limit_s, folder=snapshot.uri))
            group = f"pearl-{server.id}-{server.incarnation}-{next(self._epochs)}"
            await self._join(server, group)
            await server.tell("/begin_weight_update", {})
            for bucket, entries in enumerate(buckets):
                names, dtypes, shapes = zip(*entries, strict=True)
                version = snapshot.version if bucket == len(buckets) - 1 else None
                body = bodies.weights_from_group(names, dtypes, shapes, group, version)
                await _both(
                    server.tell("/update_weights_from_distributed", body, timeout_s=limit_s),
                    self._sender.ask("broadcast", limit_s, bucket=bucket, device=_sender_device(options, server)),
                )
            await server.tell("/end_weight_update", {})
            await server.tell("/destroy_weights_update_group", bodies.leave_group(group))
            await self._sender.ask("leave", limit_s)

    async def _join(self, server: SglangServer, group: str) -> None:
        options = self._options
        (port,) = free_ports(options.host, 1)
        world = 1 + options.gpus_per_worker
        body = bodies.weights_group(options.host, port, 1, world, group, options.weight_backend)
        await _both(
            server.tell("/init_weights_update_group", body, timeout_s=self._limit_s),
            self._sender.ask(
                "join",
                self._limit_s,
                url=f"tcp://{options.host}:{port}",
                world=world,
                name=group,
                backend=options.weight_backend,
                timeout_s=self._limit_s,
            ),
        )


async def _both(told: Any, sent: Any) -> None:
    """Both sides of a hand-over. Where one fails the other would wait for ever: the sender is ended then."""
    tasks = [asyncio.ensure_future(told), asyncio.ensure_future(sent)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _before(asked: Any) -> Any:
    """What must work before a server is touched."""
    try:
        return await asked
    except SenderError as error:
        raise NotBegunError(str(error)) from error


def _devices(options: SglangOptions, server: SglangServer) -> list[str]:
    """The server's own devices, rank by rank, as this machine numbers them."""
    if options.device == "cpu":
        return ["cpu"] * options.gpus_per_worker
    return [f"cuda:{gpu}" for gpu in server.gpus.split(",")]


def _sender_device(options: SglangOptions, server: SglangServer) -> str:
    """A device for the sender's side of a group: none of the server's, since two ranks cannot share one."""
    taken = _devices(options, server)
    if options.device == "cpu":
        return taken[0]
    return next(device for device in (f"cuda:{number}" for number in count()) if device not in taken)


@asynccontextmanager
async def make_transport(options: SglangOptions, timeouts: SglangTimeouts) -> AsyncIterator[Transport]:
    """The transport that the options name; what it started ends with the `with` block."""
    if options.weights is WeightTransport.DISK:
        yield DiskTransport()
        return
    sender = SenderProcess(timeouts.start_s)
    warming = asyncio.ensure_future(sender.started())
    limit_s = timeouts.control_s
    try:
        with TemporaryDirectory(prefix="pearl-ipc-") as folder:
            if options.weights is WeightTransport.TENSOR:
                yield TensorTransport(sender, options, limit_s)
            elif options.weights is WeightTransport.IPC:
                yield IpcTransport(sender, options, limit_s, Path(folder))
            else:
                yield GroupTransport(sender, options, limit_s)
    finally:
        warming.cancel()
        await asyncio.gather(warming, return_exceptions=True)
        await sender.end()
