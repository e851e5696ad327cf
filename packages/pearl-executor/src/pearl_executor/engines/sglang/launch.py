"""Starting SGLang servers: in the interpreter or container that the settings name, nothing secret on a command line.

Arguments go through the child's standard input, which stays open for its whole life: when it ends, because the control
plane stopped or died, the child ends itself and its process group. Its output goes to a log with the secrets taken out.
"""

import asyncio
import json
import os
import shutil
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Final, Protocol

from pearl_executor.engines.sglang.memory import used_bytes
from pearl_executor.engines.sglang.options import INSTALL, VERSION, MemoryProbe
from pearl_executor.ports import WeightSnapshot, WorkerError

SERVE: Final = """
import json, os, sys
order = json.loads(sys.stdin.readline())
os.environ.update(order["env"])
module = {"__name__": "pearl_served"}
exec(order["module"], module)
module["main"](order["args"], order["module"])
"""
"""Runs in SGLang's interpreter. Given as text, as is the module `served`, so that a container needs none of our files.
"""

ASK_VERSION: Final = "import importlib.metadata as m; print(m.version('sglang'))"
"""Prints which SGLang an interpreter has."""
ASK_TRANSFER: Final = "import mooncake.engine"
"""Fails where an interpreter cannot hand KV over."""
_VERSION_S: Final = 60.0
_KILL_COMMAND_S: Final = 10.0
_REDACTED: Final = b"<redacted>"


class LaunchError(WorkerError):
    """A server cannot be started as the settings say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOrder:
    """One server to start."""

    name: str
    """Unique and short: `w3-1`."""
    gpus: str
    args: Sequence[str]
    env: Mapping[str, str]
    log: Path
    secrets: Sequence[str] = ()
    """Texts that must not reach the log."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server will run."""

    host: str
    """Address that it listens on and is reached at."""
    ports: tuple[int, int, int]
    """Free ports there: HTTP, bootstrap, gate."""
    gpus: str
    """Its GPUs as CUDA names them on that machine."""


class ServerProcess(Protocol):
    """A started server."""

    @property
    def pid(self) -> int:
        """Of the process that leads the server's process group."""
        ...

    @property
    def exited(self) -> "asyncio.Future[str]":
        """Done once it is gone, with how it ended."""
        ...

    async def used_bytes(self, probe: MemoryProbe) -> int:
        """Device memory that it uses now, measured where it runs. Raises `WorkerError`."""
        ...

    async def fetch(self, snapshot: WeightSnapshot) -> str:
        """Have the snapshot where it runs; returns the folder there. Raises `WorkerError`."""
        ...

    async def end(self, grace_s: float) -> None:
        """End it: in order within `grace_s` seconds (0: at once), else by force. Returns when it is gone."""
        ...


class Launcher(Protocol):
    """Starts servers somewhere."""

    async def check(self) -> None:
        """Raise `LaunchError` unless the right SGLang is there."""
        ...

    async def place(self, name: str, gpus: str, host: str) -> Place:
        """Choose where server `name` will run on the run's `gpus`; `host` is from the settings. `launch` follows."""
        ...

    async def launch(self, order: LaunchOrder) -> ServerProcess:
        """Start a server; returns before it serves."""
        ...


@dataclass(frozen=True, slots=True)
class InterpreterLauncher:
    """Servers as children of this process, through a command that behaves like Python."""

    interpreter: Sequence[str]
    kill_command: Sequence[str] = ()
    """Run after a kill where the interpreter is a client whose container lives on."""

    async def check(self) -> None:
        """Ask the interpreter which SGLang it has. Raises `LaunchError` naming what to install."""
        command = _filled(self.interpreter, "version", "")
        if shutil.which(command[0]) is None:
            raise LaunchError(f"engine.sglang.interpreter: {command[0]} is no program; {INSTALL}")
        try:
            child = await asyncio.create_subprocess_exec(
                *command, "-c", ASK_VERSION, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as error:
            raise LaunchError(f"engine.sglang.interpreter: {command[0]} cannot be run: {error}") from None
        try:
            out, _ = await asyncio.wait_for(child.communicate(), _VERSION_S)
        except TimeoutError:
            child.kill()
            await child.wait()
            raise LaunchError(f"{command[0]} did not say within {_VERSION_S:g} s which SGLang it has") from None
        found = out.decode(errors="replace").strip()
        if child.returncode != 0 or not found:
            raise LaunchError(f"engine.sglang.interpreter: {command[0]} has no SGLang; {INSTALL}")
        if found != VERSION:
            raise LaunchError(f"engine.sglang.interpreter: {command[0]} has SGLang {found}, not {VERSION}; {INSTALL}")

    async def place(self, name: str, gpus: str, host: str) -> Place:
        """On this machine."""
        del name
        http, bootstrap, gate = free_ports(host, 3)
        return Place(host, (http, bootstrap, gate), gpus)

    async def launch(self, order: LaunchOrder) -> "ChildServer":
        """Start a server. Raises `LaunchError` where the command cannot be run."""
        command = _filled(self.interpreter, order.name, order.gpus)
        order.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            child = await asyncio.create_subprocess_exec(
                *command, "-c", SERVE, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT, process_group=0,
            )  # fmt: skip
        except OSError as error:
            raise LaunchError(f"{order.name}: {command[0]} cannot be run: {error}") from None
        assert child.stdin is not None
        child.stdin.write(order_line(order.args, order.env))
        with suppress(ConnectionError):
            await child.stdin.drain()
        return ChildServer(child, order, _filled(self.kill_command, order.name, order.gpus))


@dataclass(slots=True, eq=False)
class ChildServer:
    """A server as child of this process, in a process group of its own."""

    child: asyncio.subprocess.Process
    order: LaunchOrder
    kill_command: Sequence[str]
    exited: "asyncio.Future[str]" = field(init=False)
    _tasks: "list[asyncio.Task[None]]" = field(init=False)

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.exited = loop.create_future()
        self._tasks = [loop.create_task(self._log()), loop.create_task(self._reap())]

    @property
    def pid(self) -> int:
        """Leader of the server's process group."""
        return self.child.pid

    async def used_bytes(self, probe: MemoryProbe) -> int:
        """Measured on this machine."""
        return await used_bytes(probe, self.child.pid, self.order.gpus)

    async def fetch(self, snapshot: WeightSnapshot) -> str:
        """It is here already."""
        return snapshot.uri

    async def end(self, grace_s: float) -> None:
        """SIGTERM and up to `grace_s`, then SIGKILL to the group; then the pipes are closed."""
        if grace_s > 0 and not self.exited.done():
            self._signal(signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await asyncio.shield(self.exited)
        # Also where the leader is gone: its schedulers may not be.
        self._signal(signal.SIGKILL)
        if self.kill_command:
            await _run(self.kill_command)
        await asyncio.shield(self.exited)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.child.pid, number)

    async def _reap(self) -> None:
        code = await self.child.wait()
        assert self.child.stdin is not None
        self.child.stdin.close()
        if not self.exited.done():
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
            self.exited.set_result(f"it ended with {how}; see {self.order.log}")

    async def _log(self) -> None:
        """Copy its output, line by line, with the secrets taken out."""
        assert self.child.stdout is not None
        secrets = [secret.encode() for secret in self.order.secrets if secret]
        with self.order.log.open("ab") as log:
            rest = b""
            while data := await self.child.stdout.read(1 << 16):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    log.write(redacted(line, secrets) + b"\n")
                log.flush()
            log.write(redacted(rest, secrets))


def order_line(args: Sequence[str], env: Mapping[str, str]) -> bytes:
    """What `SERVE` reads first."""
    module = resources.files("pearl_executor.engines.sglang").joinpath("served.py").read_text()
    return json.dumps({"args": list(args), "env": dict(env), "module": module}).encode() + b"\n"


def free_ports(host: str, count: int) -> tuple[int, ...]:
    """TCP ports on `host` that nobody listens on now, all distinct."""
    sockets = [socket.socket(_family(host), socket.SOCK_STREAM) for _ in range(count)]
    try:
        for one in sockets:
            one.bind((host, 0))
        return tuple(int(one.getsockname()[1]) for one in sockets)
    finally:
        for one in sockets:
            one.close()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _filled(command: Sequence[str], name: str, gpus: str) -> list[str]:
    return [part.replace("{name}", name).replace("{gpus}", gpus) for part in command]


def redacted(line: bytes, secrets: Sequence[bytes]) -> bytes:
    """`line` with the secrets taken out."""
    for secret in secrets:
        line = line.replace(secret, _REDACTED)
    return line


async def _run(command: Sequence[str]) -> None:
    """Run a command to its end, for at most a while. What it says does not matter."""
    with suppress(OSError):
        child = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            async with asyncio.timeout(_KILL_COMMAND_S):
                await child.wait()
        except TimeoutError:
            child.kill()
            await child.wait()
