"""Child processes of a run: a fork server, children that are up in a moment, and how each ended.

Independent of what the children do: rollout workers and training ranks are both hosted by it. A target is a function
`(channel: FrameSocket, arguments: dict) -> None`, named `module:function`; its process ends when it returns.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from pearl_executor.runtimes.local.channels import Channel, ChannelClosedError, ChannelError, Listener
from pearl_executor.runtimes.local.frames import Frame

_KILL_TIMEOUT_S: Final = 10.0
_LOG_TAIL_BYTES: Final = 4096
ONE_THREAD: Final[Mapping[str, str]] = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment under which the fork server stays single-threaded, as forking demands, and children share cores well."""


class ProcessError(Exception):
    """A process could not be started or ended."""


@dataclass(slots=True)
class ChildProcess:
    """One forked child."""

    name: str
    pid: int
    channel: Channel
    log: Path
    exited: "asyncio.Future[int]" = field(repr=False)
    """Becomes the exit code: negative where a signal ended it (minus the signal's number)."""
    cause: str = ""
    """How it ended, where whoever watches it knows better than the code says."""

    def how_it_ended(self) -> str:
        """One line on how the process ended, with the last line of its log where it failed by itself."""
        if not self.exited.done():
            return self.cause or "it hung up"
        if self.cause:
            return self.cause
        code = self.exited.result()
        if code < 0:
            return f"ended by {signal.Signals(-code).name}"
        last = _last_line(self.log)
        return f"exited with code {code}" + (f": {last}" if code and last else "")


class ProcessServer(Protocol):
    """What starts and ends a run's processes: a fork server on this machine, or a cluster's own means."""

    @property
    def peer_key(self) -> str:
        """What children show each other; empty where only this user reaches their sockets."""
        ...

    def peer_address(self, name: str) -> str:
        """Where child `name` listens for other children; a `tcp://` address may leave host and port to the child."""
        ...

    async def spawn(
        self,
        name: str,
        target: str,
        arguments: Mapping[str, Any],
        *,
        environment: Mapping[str, str] | None = None,
        gpus: Sequence[int] = (),
    ) -> ChildProcess:
        """Start a child that runs `target(channel, arguments)`; returns once it is connected. Raises `ProcessError`.

        `name` is unique among living children. `gpus` are the run's GPUs that the child computes on. Cancelling leaves
        no child.
        """
        ...

    async def kill(self, child: ChildProcess) -> None:
        """End `child` for certain. Raises `ProcessError` where that cannot be confirmed in time; it may be repeated."""
        ...


class ForkServer:
    """Starts a process that imports `preload` once and forks children from it. Use as an async context manager.

    `log_folder` receives one file per child with its output. Children end with this process, whatever ends it.
    """

    def __init__(
        self,
        log_folder: Path,
        *,
        preload: Sequence[str] = (),
        environment: Mapping[str, str] = ONE_THREAD,
        preload_timeout_s: float = 180.0,
    ) -> None:
        self._log_folder = log_folder
        self._preload = tuple(preload)
        self._environment = dict(environment)
        self._preload_timeout_s = preload_timeout_s
        self._children: dict[str, ChildProcess] = {}
        self._listener: Listener | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._control: Channel | None = None
        self._ready: asyncio.Future[None] | None = None
        self._relaunching: asyncio.Task[None] | None = None
        self._closed = False

    async def __aenter__(self) -> "ForkServer":
        await self.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    @property
    def folder(self) -> Path:
        """A private folder with a short path, for the children's own sockets; removed at the end."""
        if self._listener is None:
            raise ProcessError("the fork server is not open")
        return self._listener.folder

    @property
    def peer_key(self) -> str:
        """Empty: the folder's permissions keep others out."""
        return ""

    def peer_address(self, name: str) -> str:
        """A Unix socket of the child's own in the private folder."""
        return str(self.folder / name)

    async def open(self) -> None:
        """Start the server's process. Its imports go on in the background; the first spawn waits for them."""
        if self._control is not None:
            return
        self._log_folder.mkdir(parents=True, exist_ok=True)
        self._listener = Listener()
        await self._listener.open()
        await self._launch(self._listener)

    async def _relaunch(self, listener: Listener) -> None:
        """Start a new server in the place of one that ended: one, however many want it."""
        if self._relaunching is None or self._relaunching.done():
            self._relaunching = asyncio.ensure_future(self._launch(listener))
        await asyncio.shield(self._relaunching)

    async def _launch(self, listener: Listener) -> None:
        secret, connected = listener.expect()
        with (self._log_folder / "fork_server.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "pearl_executor.runtimes.local.zygote",
                str(listener.path),
                secret,
                *self._preload,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environment},
                # Own session: Ctrl-C at a terminal reaches the run, which then ends its children in order.
                start_new_session=True,
            )
        self._control = await self._await_hello(connected, "the fork server", self._log_folder / "fork_server.log")
        self._ready = asyncio.get_running_loop().create_future()
        self._control.attach(self._noticed, self._server_lost)

    async def spawn(
        self,
        name: str,
        target: str,
        arguments: Mapping[str, Any],
        *,
        environment: Mapping[str, str] | None = None,
        gpus: Sequence[int] = (),
    ) -> ChildProcess:
        """Fork a child that runs `target(channel, arguments)`; returns once it is connected.

        `name` is unique among living children and names its log. `gpus` are emulated
        here and need no device. Raises `ProcessError`. Cancelling leaves no child.
        """
        del gpus
        if self._closed or self._listener is None:
            raise ProcessError(f"cannot start {name}: the fork server is not open")
        if name in self._children:
            raise ProcessError(f"cannot start {name}: a process of that name lives")
        if self._control is None or self._control.closed:
            await self._relaunch(self._listener)
        control = self._control
        assert control is not None
        assert self._ready is not None
        await self._await_ready(self._ready)
        secret, connected = self._listener.expect()
        log = self._log_folder / f"{name}.log"
        exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        child = ChildProcess(name, 0, Channel(), log, exited)
        self._children[name] = child
        request = {
            "name": name,
            "target": target,
            "arguments": dict(arguments),
            "environment": dict(environment or {}),
            "secret": secret,
            "log": str(log),
        }
        try:
            answer = await control.call("spawn", request, timeout_s=_KILL_TIMEOUT_S)
            child.pid = answer.head["pid"]
            child.channel = await self._await_hello(connected, name, log, exited)
        except BaseException as error:
            connected.cancel()
            await self._discard(child)
            if isinstance(error, ChannelError):
                raise ProcessError(f"cannot start {name}: {error}") from error
            raise
        return child

    async def kill(self, child: ChildProcess) -> None:
        """End `child` for certain and wait until it is reaped. No effect where it is gone.

        Raises `ProcessError` where the kernel does not end it in time.
        """
        await self.signal(child, signal.SIGKILL)
        done, _ = await asyncio.wait([child.exited], timeout=_KILL_TIMEOUT_S)
        if not done:
            raise ProcessError(f"{child.name} (process {child.pid}) is still there {_KILL_TIMEOUT_S:g} s after SIGKILL")

    async def signal(self, child: ChildProcess, number: signal.Signals) -> None:
        """Send a signal to `child`. No effect where it is gone."""
        if child.exited.done() or self._control is None:
            return
        try:
            await self._control.call("kill", {"name": child.name, "signal": int(number)}, timeout_s=_KILL_TIMEOUT_S)
        except ChannelClosedError:
            # The server is gone, and the kernel has ended its children with it.
            return
        except ChannelError as error:
            raise ProcessError(f"{child.name} cannot be signalled: the fork server gave {error}") from error

    async def aclose(self) -> None:
        """End all children and the server; returns when none is left."""
        if self._closed:
            return
        self._closed = True
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            try:
                async with asyncio.timeout(_KILL_TIMEOUT_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        for child in list(self._children.values()):
            child.channel.close()
        if self._listener is not None:
            await self._listener.aclose()

    async def _await_ready(self, ready: "asyncio.Future[None]") -> None:
        try:
            async with asyncio.timeout(self._preload_timeout_s):
                await asyncio.shield(ready)
        except TimeoutError:
            modules = ", ".join(self._preload)
            raise ProcessError(f"importing {modules} took longer than {self._preload_timeout_s:g} s") from None

    async def _await_hello(
        self,
        connected: "asyncio.Future[Channel]",
        name: str,
        log: Path,
        exited: "asyncio.Future[int] | None" = None,
    ) -> Channel:
        waiting: set[asyncio.Future[Any]] = {connected}
        if exited is not None:
            waiting.add(exited)
        await asyncio.wait(waiting, timeout=_KILL_TIMEOUT_S * 3, return_when=asyncio.FIRST_COMPLETED)
        if connected.done() and not connected.cancelled():
            return connected.result()
        connected.cancel()
        reason = _last_line(log) or "it never connected"
        raise ProcessError(f"cannot start {name}: {reason} (log: {log})")

    async def _discard(self, child: ChildProcess) -> None:
        """Kill a child whose start was given up, also while the caller is being cancelled."""
        killing = asyncio.ensure_future(self.kill(child))
        with contextlib.suppress(ProcessError):
            await asyncio.shield(killing)
        self._children.pop(child.name, None)

    def _noticed(self, frame: Frame) -> None:
        head = frame.head
        assert self._ready is not None
        if head["op"] == "ready":
            if not self._ready.done():
                self._ready.set_result(None)
        elif head["op"] == "failed":
            self._fail_ready(head["message"])
        elif head["op"] == "exited":
            self._reaped(head["name"], head["code"])

    def _reaped(self, name: str, code: int) -> None:
        child = self._children.pop(name, None)
        if child is not None and not child.exited.done():
            child.exited.set_result(code)

    def _server_lost(self) -> None:
        self._fail_ready(f"the fork server ended: {_last_line(self._log_folder / 'fork_server.log')}")
        # The kernel ends its children with it.
        for name in list(self._children):
            self._reaped(name, -signal.SIGKILL)

    def _fail_ready(self, message: str) -> None:
        assert self._ready is not None
        if not self._ready.done():
            self._ready.set_exception(ProcessError(message))
            # A spawn may come later or never: the failure is then no forgotten exception.
            self._ready.exception()


def _last_line(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""
