"""A pool of sandbox processes: persistent, prewarmed, limited, replaced when they fail (`sandbox_child` runs inside).

What a model wrote reaches a tool only as a JSON string on the process's standard input: no shell, no command line, no
file name. Limits and the audit hook are defence in depth around *trusted* tool code; they are no prison for hostile
native code.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pearl_rl.rollout.environments.protocol import EnvironmentFailure, EnvironmentSettingsError
from pearl_rl.rollout.environments.sandbox_folder import SandboxFolder
from pearl_rl.rollout.environments.tool_runner import ToolFault, ToolReply

_END_S = 0.5
"""Time between the end of a process's output and its end."""

CHILD = Path(__file__).with_name("sandbox_child.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What one call may use, and how long anything may take."""

    call_s: float = 10.0
    """Longest run beyond its own latency, seconds of wall time."""
    cpu_s: int = 2
    """CPU time of one call, seconds; the kernel counts to half a second here."""
    memory_bytes: int = 256 * 2**20
    """Address space of a process."""
    output_bytes: int = 16 * 2**10
    """Longest answer of a tool."""
    start_s: float = 30.0
    """Longest start of a process, seconds."""
    free_s: float = 60.0
    """Longest wait for a free process, seconds."""

    def __post_init__(self) -> None:
        for key in ("call_s", "cpu_s", "memory_bytes", "output_bytes", "start_s", "free_s"):
            if not getattr(self, key) > 0:
                raise EnvironmentSettingsError(f"sandbox: {key} = {getattr(self, key)} must be above 0")


class _ProcessEnded(Exception):
    """The process is gone or no longer speaks the protocol."""


class _Process:
    """One sandbox process, for one call at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._calls = 0
        self._ended = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        # The loop learns of a killed process a little later than whoever killed it.
        return not self._ended and self._process.returncode is None

    async def line(self) -> bytes:
        """The next line it writes. Raises `_ProcessEnded` at the end, or where a line is too long."""
        assert self._process.stdout is not None
        try:
            line = await self._process.stdout.readline()
        except ValueError as error:
            raise _ProcessEnded("wrote a line above the output limit") from error
        if not line.endswith(b"\n"):
            raise _ProcessEnded("ended")
        return line

    async def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request and its answer."""
        assert self._process.stdin is not None
        self._calls += 1
        try:
            self._process.stdin.write(json.dumps({"id": self._calls, **request}).encode() + b"\n")
            await self._process.stdin.drain()
        except ConnectionError as error:
            raise _ProcessEnded("ended") from error
        try:
            reply = json.loads(await self.line())
        except (ValueError, RecursionError) as error:
            raise _ProcessEnded("wrote what is no JSON") from error
        if not isinstance(reply, dict) or reply.get("id") != self._calls or not reply.keys() & {"value", "error"}:
            raise _ProcessEnded("answered another request")
        return reply

    def kill(self) -> None:
        """End it now; no effect where it is gone."""
        self._ended = True
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def exit_code(self) -> int | None:
        """How it ended, where it closes its output by ending; it is killed where it goes on. None if not known yet."""
        self._ended = True
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    await self._process.wait()
        finally:
            self.kill()
        return self._process.returncode

    async def wait_gone(self, limit_s: float) -> None:
        """Return once it is gone and its pipes are closed. Only after `kill` or its own end. Raises
        `EnvironmentFailure` where the kernel does not end it within `limit_s`.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(limit_s):
                with contextlib.suppress(ConnectionError):
                    await self._process.stdin.wait_closed()
                # asyncio counts a process as ended once its output was read to the end.
                while await self._process.stdout.read(65536):
                    pass
                await self._process.wait()
        except TimeoutError:
            raise EnvironmentFailure(f"sandbox process {self.pid} did not end within {limit_s:g} s") from None


@dataclass(slots=True)
class _Slot:
    """A place for one process; empty before its first start."""

    process: _Process | None = None
    busy: bool = False


class SandboxPool:
    """A `ToolRunner` over `processes` sandbox processes. A process serves one call at a time, its latency included.

    A process that dies, times out, or whose call is cancelled is killed; its slot starts a new one on next use. A call
    whose process was lost is tried once more on a new one, since tools keep no state between calls.
    """

    def __init__(self, tools: Mapping[str, Path], processes: int = 16, limits: SandboxLimits | None = None) -> None:
        if processes < 1:
            raise EnvironmentSettingsError(f"sandbox: processes = {processes} must be at least 1")
        for name, file in tools.items():
            if not file.is_file():
                raise EnvironmentSettingsError(f"sandbox: tool {name!r} has no file {file}")
        self._tools = {name: file.resolve() for name, file in tools.items()}
        self._limits = limits or SandboxLimits()
        self._slots = [_Slot() for _ in range(processes)]
        self._free: asyncio.LifoQueue[_Slot] = asyncio.LifoQueue()
        for slot in self._slots:
            self._free.put_nowait(slot)
        self._folder: SandboxFolder | None = None
        self._closed = False
        self.started = 0
        """Processes started so far, replacements included."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes that live now."""
        return tuple(slot.process.pid for slot in self._slots if slot.process is not None and slot.process.alive)

    @property
    def prewarmed(self) -> bool:
        """Whether a process is up and free: what is called now need not start one."""
        return any(not slot.busy and slot.process is not None and slot.process.alive for slot in self._slots)

    async def start(self) -> None:
        """Start every process, a few at a time. Raises `EnvironmentFailure`."""
        width = asyncio.Semaphore(4)

        async def fill(slot: _Slot) -> None:
            async with width:
                await self._ready(slot)

        slots = [self._free.get_nowait() for _ in range(self._free.qsize())]
        try:
            results = await asyncio.gather(*(fill(slot) for slot in slots), return_exceptions=True)
        finally:
            for slot in slots:
                self._free.put_nowait(slot)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def call(self, tool: str, argument: Mapping[str, Any], latency_s: float = 0.0) -> ToolReply:
        """Run a tool, as `ToolRunner.call` says."""
        if tool not in self._tools:
            raise KeyError(f"no tool {tool!r} in this sandbox; it has {', '.join(sorted(self._tools))}")
        request = {"tool": tool, "argument": dict(argument), "latency_s": latency_s}
        reply = await self._attempt(request)
        return await self._attempt(request, fresh=True) if reply.fault is ToolFault.LOST else reply

    async def close(self) -> None:
        """Kill every process and remove the folder they ran in."""
        self._closed = True
        living = [slot.process for slot in self._slots if slot.process is not None]
        for process in living:
            process.kill()
        await asyncio.gather(*(process.wait_gone(self._limits.start_s) for process in living))
        for slot in self._slots:
            slot.process = None
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    async def _attempt(self, request: dict[str, Any], *, fresh: bool = False) -> ToolReply:
        slot = await self._acquire()
        slot.busy = True
        process: _Process | None = None
        if fresh:
            _kill(slot.process)
        try:
            process = await self._ready(slot)
            async with asyncio.timeout(self._limits.call_s + request["latency_s"]):
                reply = await process.call(request)
        except TimeoutError:
            _kill(process)
            return ToolReply(fault=ToolFault.TIMEOUT, detail=f"took longer than {self._limits.call_s:g} s")
        except _ProcessEnded as ended:
            assert process is not None
            if await process.exit_code() == -signal.SIGXCPU:
                return ToolReply(fault=ToolFault.TIMEOUT, detail=f"used more than {self._limits.cpu_s} s of CPU time")
            return ToolReply(fault=ToolFault.LOST, detail=f"the sandbox process {ended}")
        except asyncio.CancelledError:
            # It still works on a call that nobody waits for: its answer must not meet the next request.
            _kill(process)
            raise
        finally:
            slot.busy = False
            self._free.put_nowait(slot)
        if "error" in reply:
            return ToolReply(fault=ToolFault.RAISED, detail=str(reply["error"]))
        return ToolReply(reply["value"])

    async def _acquire(self) -> _Slot:
        try:
            async with asyncio.timeout(self._limits.free_s):
                return await self._free.get()
        except TimeoutError:
            raise EnvironmentFailure(
                f"none of {len(self._slots)} sandbox processes was free within {self._limits.free_s:g} s; "
                "raise the environment's `processes`"
            ) from None

    async def _ready(self, slot: _Slot) -> _Process:
        """The slot's process, started anew where it is gone. Raises `EnvironmentFailure`."""
        if self._closed:
            raise EnvironmentFailure("the sandbox is closed")
        if slot.process is not None and slot.process.alive:
            return slot.process
        if slot.process is not None:
            await slot.process.wait_gone(self._limits.start_s)
        slot.process = process = await self._spawn()
        try:
            async with asyncio.timeout(self._limits.start_s):
                line = await process.line()
        except (_ProcessEnded, TimeoutError) as error:
            process.kill()
            raise EnvironmentFailure(f"a sandbox process did not start: {str(error) or 'too slow'}") from error
        except asyncio.CancelledError:
            process.kill()
            raise
        if line != b"ready\n":
            process.kill()
            raise EnvironmentFailure(f"a sandbox process said {line[:80]!r} instead of ready")
        return process

    async def _spawn(self) -> _Process:
        limits = {
            "parent": os.getpid(),
            "memory_bytes": self._limits.memory_bytes,
            "cpu_s": self._limits.cpu_s,
            "output_bytes": self._limits.output_bytes,
        }
        tools = [f"{name}={file}" for name, file in self._tools.items()]
        try:
            if self._folder is None:
                self._folder = SandboxFolder()
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-S", str(CHILD), json.dumps(limits), *tools),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                cwd=self._folder.path,
                env={"LC_ALL": "C.UTF-8"},
                limit=self._limits.output_bytes + 4096,
                # Ctrl-C is for the run, which ends its processes itself.
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentFailure(f"a sandbox process could not be started: {error}") from error
        self.started += 1
        return _Process(process)


def _kill(process: _Process | None) -> None:
    if process is not None:
        process.kill()
