"""A shelf: many stand-in servers in one process, so that one machine holds a thousand of them.

Each server has ports of its own and dies alone: its connections break off and its port closes, as those of a process
that ends. Only what is measured of a process (its memory) is not a server's own here.
"""

import asyncio
import json
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from pearl_executor.engines.sglang.launch import LaunchError, LaunchOrder, Place
from pearl_executor.engines.sglang.options import MemoryProbe
from pearl_executor.ports import WeightSnapshot, WorkerError
from pearl_executor.testing.sglang.__main__ import parse
from pearl_executor.testing.sglang.server import StandInServer

_START_S = 30.0
_ORDER_S = 60.0
_PORTS = 3


class DiedError(ConnectionResetError):
    """A server did what kills it; whoever talks to it sees its connection break."""


@dataclass(slots=True, eq=False)
class _Shelved:
    """A server on the shelf, or the ports that are kept for it."""

    ports: list[socket.socket]
    server: StandInServer | None = None
    task: "asyncio.Task[None] | None" = None
    how: str = ""


class Shelf:
    """The process's side: carries out orders, one JSON object a line, and reports which servers ended."""

    def __init__(self) -> None:
        self._servers: dict[str, _Shelved] = {}

    async def run(self) -> None:
        """Until standard input ends; then no server is left."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=1 << 24)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            order = json.loads(line)
            answer = getattr(self, order["op"])(order)
            self._say({"re": order["number"], **(answer or {})})

    def place(self, order: dict[str, Any]) -> dict[str, Any]:
        """Keep free ports for a server: nobody else is given them until it listens."""
        ports = []
        for _ in range(_PORTS):
            kept = socket.socket()
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            kept.bind((order["host"], 0))
            ports.append(kept)
        self._servers[order["name"]] = _Shelved(ports)
        return {"ports": [kept.getsockname()[1] for kept in ports]}

    def launch(self, order: dict[str, Any]) -> None:
        """Put a server on the shelf."""
        entry = self._servers[order["name"]]

        def die() -> NoReturn:
            self._fell(entry, "it died of what it was asked")
            raise DiedError

        entry.server = StandInServer(parse(order["args"], order["env"]), die)
        entry.task = asyncio.get_running_loop().create_task(self._serve(entry, entry.server))
        # Not at the end of what it does: one that is killed before it began does nothing.
        entry.task.add_done_callback(lambda _: self._gone(order["name"], entry))

    async def _serve(self, entry: _Shelved, server: StandInServer) -> None:
        try:
            await server.serve()
        except (asyncio.CancelledError, DiedError):
            pass
        except OSError as error:
            entry.how = f"it cannot serve: {error}"

    def _gone(self, name: str, entry: _Shelved) -> None:
        assert entry.server is not None
        entry.server.abort()
        for kept in entry.ports:
            kept.close()
        self._servers.pop(name, None)
        self._say({"ended": name, "how": entry.how})

    def end(self, order: dict[str, Any]) -> None:
        """Take a server off the shelf at once, whatever it does."""
        entry = self._servers.get(order["name"])
        if entry is not None:
            self._fell(entry, order["how"])

    def hang(self, order: dict[str, Any]) -> None:
        """Let a server answer nobody any more."""
        entry = self._servers.get(order["name"])
        if entry is not None and entry.server is not None:
            entry.server.hang()

    def _fell(self, entry: _Shelved, how: str) -> None:
        entry.how = entry.how or how
        if entry.server is not None:
            entry.server.abort()
        if entry.task is not None:
            entry.task.cancel()

    def _say(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), flush=True)


@dataclass(slots=True, eq=False)
class ShelvedServer:
    """A `ServerProcess` that is one of many on a shelf."""

    name: str
    shelf: "ShelfProcess"
    exited: "asyncio.Future[str]" = field(init=False)

    def __post_init__(self) -> None:
        self.exited = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        """The shelf's."""
        return self.shelf.pid

    async def used_bytes(self, probe: MemoryProbe) -> int:
        """Refused: many servers share a process."""
        raise WorkerError(f"{self.name}: the memory of one server on a shelf cannot be measured ({probe})")

    async def fetch(self, snapshot: WeightSnapshot) -> str:
        """It is here already."""
        return snapshot.uri

    async def end(self, grace_s: float) -> None:
        """Take it off the shelf; there is nothing to wait for."""
        del grace_s
        if not self.exited.done():
            await self.shelf.ask("end", name=self.name, how="it was ended")
            try:
                async with asyncio.timeout(_ORDER_S):
                    await asyncio.shield(self.exited)
            except TimeoutError:
                raise WorkerError(f"{self.name} is still on its shelf after {_ORDER_S:g} s") from None

    async def kill(self) -> None:
        """Let it be gone, as if somebody else had killed it."""
        await self.shelf.ask("end", name=self.name, how="it ended with signal SIGKILL")

    async def hang(self) -> None:
        """Let it answer nobody any more."""
        await self.shelf.ask("hang", name=self.name)


class ShelfProcess:
    """This side of one shelf."""

    def __init__(self) -> None:
        self.servers: dict[str, ShelvedServer] = {}
        self._child: asyncio.subprocess.Process | None = None
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._child.pid if self._child is not None else 0

    async def open(self) -> None:
        """Start it."""
        self._child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pearl_executor.testing.sglang.shelf"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self._reading = asyncio.get_running_loop().create_task(self._read(self._child))

    async def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Have an order carried out. Raises `WorkerError`."""
        child = self._child
        if child is None or child.returncode is not None:
            raise WorkerError(f"the shelf (process {self.pid}) is gone")
        assert child.stdin is not None
        self._number += 1
        number = self._number
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            child.stdin.write(json.dumps({"op": op, "number": number, **arguments}).encode() + b"\n")
            async with asyncio.timeout(_ORDER_S):
                return await answer
        except (TimeoutError, ConnectionError) as error:
            raise WorkerError(f"the shelf (process {self.pid}) did not {op} within {_ORDER_S:g} s") from error
        finally:
            self._answers.pop(number, None)

    async def _read(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None
        while line := await child.stdout.readline():
            message = json.loads(line)
            if "re" in message:
                answer = self._answers.get(message["re"])
                if answer is not None and not answer.done():
                    answer.set_result(message)
                continue
            self._ended(message["ended"], message["how"])
        for name in list(self.servers):
            self._ended(name, "its shelf is gone")

    def _ended(self, name: str, how: str) -> None:
        server = self.servers.pop(name, None)
        if server is not None and not server.exited.done():
            server.exited.set_result(how)

    async def aclose(self) -> None:
        """End it and all its servers."""
        if self._child is None:
            return
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            async with asyncio.timeout(_START_S):
                await self._child.wait()
        except TimeoutError:
            self._child.kill()
            await self._child.wait()
        if self._reading is not None:
            with suppress(asyncio.CancelledError):
                await self._reading


class ShelfLauncher:
    """A `Launcher` whose servers stand on a few shelves. Use as an async context manager around the runtime's."""

    def __init__(self, shelves: int) -> None:
        self._shelves = [ShelfProcess() for _ in range(shelves)]
        self._placed: dict[str, ShelfProcess] = {}
        self._next = 0

    async def __aenter__(self) -> "ShelfLauncher":
        for shelf in self._shelves:
            await shelf.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        for shelf in self._shelves:
            await shelf.aclose()

    @property
    def pids(self) -> list[int]:
        """Of the shelves."""
        return [shelf.pid for shelf in self._shelves]

    @property
    def servers(self) -> Sequence[ShelvedServer]:
        """All that stand now."""
        return [server for shelf in self._shelves for server in shelf.servers.values()]

    async def check(self) -> None:
        """Nothing can be wrong with the stand-in's version."""

    async def place(self, name: str, gpus: str, host: str) -> Place:
        """On the next shelf in turn."""
        shelf = self._shelves[self._next % len(self._shelves)]
        self._next += 1
        try:
            answer = await shelf.ask("place", name=name, host=host)
        except WorkerError as error:
            raise LaunchError(str(error)) from error
        self._placed[name] = shelf
        http, bootstrap, gate = answer["ports"]
        return Place(host, (http, bootstrap, gate), gpus)

    async def launch(self, order: LaunchOrder) -> ShelvedServer:
        """Start the server where it was placed."""
        shelf = self._placed.pop(order.name)
        server = shelf.servers[order.name] = ShelvedServer(order.name, shelf)
        try:
            await shelf.ask("launch", name=order.name, args=list(order.args), env=dict(order.env))
        except WorkerError as error:
            del shelf.servers[order.name]
            raise LaunchError(str(error)) from error
        return server


if __name__ == "__main__":
    asyncio.run(Shelf().run())
