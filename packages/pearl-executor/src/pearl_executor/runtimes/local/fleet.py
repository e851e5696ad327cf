"""The fleet: the worker processes that live, by slot and incarnation, and how the parent talks to them.

Notices every loss: a connection that ends, a process that is reaped, and a process that gives no sign of life.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from pearl_executor.ports import TransferError, WorkerError, WorkerLostError
from pearl_executor.runtimes.local.channels import (
    CallTimeoutError,
    Channel,
    ChannelClosedError,
    ChannelError,
    RemoteError,
)
from pearl_executor.runtimes.local.frames import Frame, tcp_address
from pearl_executor.runtimes.local.hosting import EngineRecipe
from pearl_executor.runtimes.local.processes import ChildProcess, ProcessError, ProcessServer
from pearl_executor.runtimes.local.wire import Head
from pearl_state.worker import Worker, WorkerId

_log = logging.getLogger(__name__)
_EXIT_REPORT_S: Final = 1.0
"""How long the report of how a process ended may follow the end of its connection."""

OnLost = Callable[[WorkerId, int, str], None]
"""Called with slot, incarnation and cause when a worker is lost that nobody told to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Bounds on every wait of the local runtime, seconds. Each names its cause when it expires."""

    start_s: float = 120.0
    """Building an engine, beyond the fork server's imports."""
    command_s: float = 60.0
    generate_s: float = 1800.0
    """A whole model call, and a drain."""
    stop_s: float = 10.0
    """An orderly end; then the process is killed."""
    heartbeat_s: float = 1.0
    silence_s: float = 20.0
    """Without a sign of life for so long a worker counts as hung and is killed."""
    room_ttl_s: float = 60.0
    """How long a prefill worker keeps KV that nobody claims."""
    pull_s: float = 10.0
    """How long a decode worker waits for the prefill worker's answer."""


@dataclass(slots=True, eq=False)
class Member:
    """A living worker process."""

    id: WorkerId
    incarnation: int
    child: ChildProcess
    socket: str
    """Address at which decode workers pull KV from it; final once it is ready."""
    gone: "asyncio.Future[None]"
    ready: bool = False
    ending: bool = False
    """Told to end: its end is no loss."""
    silent: int = 0
    """Heartbeats since its last sign of life."""
    heard_s: float = field(default=0.0)

    @property
    def channel(self) -> Channel:
        """Frames to and from the process."""
        return self.child.channel

    def __str__(self) -> str:
        return f"worker {self.id} (incarnation {self.incarnation})"


class Fleet:
    """Starts, addresses and ends worker processes."""

    def __init__(
        self,
        recipe: EngineRecipe,
        forks: ProcessServer,
        timeouts: Timeouts,
        on_notice: Callable[[Frame], None],
        on_lost: OnLost | None,
    ) -> None:
        self._recipe = recipe
        self._timeouts = timeouts
        self._on_notice = on_notice
        self.on_lost = on_lost
        self._forks = forks
        self._members: dict[WorkerId, Member] = {}
        self._starting: dict[WorkerId, asyncio.Future[None]] = {}
        self._fences: dict[WorkerId, int] = {}
        """Per slot the highest incarnation that was started or told to end: no older or equal one may start."""
        self._revoked: set[WorkerId] = set()
        """Slots whose process was told to end while it was being forked."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._last: dict[WorkerId, Member] = {}
        """Per slot the process that ended last: who comes too late is told how it ended."""
        self._dying: list[Member] = []
        """Told to end, and not confirmed to be gone: their GPUs are nobody else's yet."""
        self._closed = False

    def open(self) -> None:
        """Start the heartbeat."""
        self._spawn_task(self._watch())

    async def aclose(self) -> None:
        """End every process, and those that are being forked as soon as they are there."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._end(member) for member in list(self._members.values())))

    @property
    def pids(self) -> dict[WorkerId, int]:
        """Process ids of the living workers."""
        return {member.id: member.child.pid for member in self._members.values()}

    def living(self, id_: WorkerId) -> Member | None:
        """The process in a slot, if one lives."""
        return self._members.get(id_)

    def others(self, member: Member) -> list[Member]:
        """All ready members but one."""
        return [m for m in self._members.values() if m is not member and m.ready]

    def member(self, worker: Worker) -> Member:
        """The process of this row. Raises `WorkerLostError` where another incarnation, or none, lives."""
        member = self._members.get(worker.id)
        if member is None:
            last = self._last.get(worker.id)
            ended = "" if last is None or last.incarnation != worker.incarnation else f": {last.child.how_it_ended()}"
            message = f"worker {worker.id} (incarnation {worker.incarnation}) has no process{ended}"
            raise WorkerLostError(message, worker.id)
        if member.incarnation != worker.incarnation:
            message = f"worker {worker.id} runs incarnation {member.incarnation}, not {worker.incarnation}"
            raise WorkerLostError(message, worker.id)
        if not member.ready:
            raise WorkerError(f"{member} is still starting")
        return member

    async def working(self, worker: Worker) -> Member:
        """`member` for a model call: where its process has just ended, the error waits for the report of how."""
        last = self._last.get(worker.id)
        if last is not None and last.incarnation == worker.incarnation and worker.id not in self._members:
            await self._ended(last)
        return self.member(worker)

    # ---- life -------------------------------------------------------------------------------------------------------

    async def start(self, worker: Worker) -> None:
        """Fork the process of this incarnation and wait for its engine. A cancelled or failed start leaves nothing."""
        if worker.incarnation <= self._fences.get(worker.id, 0):
            message = f"worker {worker.id} cannot start incarnation {worker.incarnation}: it had its life already"
            raise WorkerLostError(message, worker.id)
        if self._closed:
            raise WorkerError(f"worker {worker.id} cannot start: the runtime is closed")
        older = self._members.get(worker.id)
        if older is not None:
            await self._end(older)
        await self._end_dying(worker)
        self._fences[worker.id] = worker.incarnation
        starting = self._starting[worker.id] = asyncio.get_running_loop().create_future()
        try:
            await self._start(worker)
        finally:
            self._starting.pop(worker.id, None)
            self._revoked.discard(worker.id)
            starting.set_result(None)

    async def _start(self, worker: Worker) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        name = f"w{worker.id}-{worker.incarnation}"
        socket = self._forks.peer_address(name)
        try:
            child = await self._forks.spawn(
                name,
                "pearl_executor.runtimes.local.worker:main",
                self._arguments(worker, socket),
                gpus=sorted(worker.gpus),
            )
        except ProcessError as error:
            raise WorkerError(f"worker {worker.id} did not start: {error}") from error
        member = Member(worker.id, worker.incarnation, child, socket, loop.create_future())
        self._members[worker.id] = member
        child.channel.attach(self._on_notice, lambda: self._hung_up(member))
        try:
            self._check_wanted(member)
            described = await child.channel.call("describe", timeout_s=self._timeouts.start_s)
            member.socket = described.head["peer"]
            await asyncio.wait([member.gone], timeout=max(0.0, began_s + self._recipe.pace.start_s - loop.time()))
            self._check_wanted(member)
            member.ready = True
        except ChannelError as error:
            cause = await self._cause(member) if isinstance(error, ChannelClosedError) else str(error)
            raise WorkerError(f"worker {worker.id} did not start: {cause}") from error
        finally:
            if not member.ready:
                await self._end(member)

    def _check_wanted(self, member: Member) -> None:
        """Raise where a process that starts was told to end, or is gone."""
        if self._closed or member.ending or member.id in self._revoked:
            raise WorkerLostError(f"{member} was ended while it started", member.id)
        if member.channel.closed:
            raise ChannelClosedError("it hung up")

    def _arguments(self, worker: Worker, socket: str) -> dict[str, Any]:
        tracing = self._recipe.tracing
        return {
            "factory": self._recipe.factory,
            "settings": dict(self._recipe.settings),
            "pace": asdict(self._recipe.pace),
            "role": worker.role,
            "listen": socket,
            "key": self._forks.peer_key,
            "room_ttl_s": self._timeouts.room_ttl_s,
            "pull_timeout_s": self._timeouts.pull_s,
            "tracing": None if tracing is None else tracing.arguments(f"w{worker.id}-{worker.incarnation}"),
        }

    async def stop(self, worker: Worker) -> None:
        """End the process in order, or by force where it takes too long."""
        member = await self._ending(worker)
        if member is None:
            await self._end_dying(worker)
            return
        with suppress(ChannelError):
            await member.channel.call("stop", timeout_s=self._timeouts.stop_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeouts.stop_s):
                await asyncio.shield(member.child.exited)
        await self._end(member)

    async def kill(self, worker: Worker) -> None:
        """End the process by force and reap it."""
        member = await self._ending(worker)
        if member is not None:
            await self._end(member)
        await self._end_dying(worker)

    async def _ending(self, worker: Worker) -> Member | None:
        """Fence this incarnation off and return its process, if it lives."""
        self._fences[worker.id] = max(self._fences.get(worker.id, 0), worker.incarnation)
        member = self._members.get(worker.id)
        if member is None and worker.id in self._starting:
            # Its process is being forked this moment; `_start` ends it.
            self._revoked.add(worker.id)
            await asyncio.shield(self._starting[worker.id])
            return None
        if member is None or member.incarnation != worker.incarnation:
            return None
        member.ending = True
        return member

    async def _end(self, member: Member) -> None:
        member.ending = True
        if member not in self._dying:
            self._dying.append(member)
        try:
            await self._forks.kill(member.child)
            self._dying = [other for other in self._dying if other is not member]
        except ProcessError as error:
            raise WorkerError(f"{member} does not end: {error}") from error
        finally:
            member.channel.close()
            self._forget(member)

    async def _end_dying(self, worker: Worker) -> None:
        """Ask again for the end of what a kill of this slot that expired or failed may have left."""
        for member in [m for m in self._dying if m.id == worker.id and m.incarnation <= worker.incarnation]:
            await self._end(member)

    def _forget(self, member: Member) -> None:
        if self._members.get(member.id) is member:
            del self._members[member.id]
            self._last[member.id] = member
        if tcp_address(member.socket) is None:
            Path(member.socket).unlink(missing_ok=True)
        if not member.gone.done():
            member.gone.set_result(None)

    # ---- losses -----------------------------------------------------------------------------------------------------

    def _hung_up(self, member: Member) -> None:
        self._forget(member)
        if not member.ending and member.ready:
            self._spawn_task(self._report_loss(member))

    async def _report_loss(self, member: Member, cause: str = "") -> None:
        member.ending = True
        cause = cause or await self._cause(member)
        try:
            await self._end(member)
        except WorkerError as error:
            cause = f"{cause}; {error}"
        _log.warning("%s is lost: %s", member, cause)
        if self.on_lost is not None:
            self.on_lost(member.id, member.incarnation, cause)

    async def _cause(self, member: Member) -> str:
        """How the process ended; waits a moment for its exit to be reported."""
        await self._ended(member)
        return member.child.how_it_ended()

    async def _ended(self, member: Member) -> None:
        await asyncio.wait([member.child.exited], timeout=_EXIT_REPORT_S)

    async def _watch(self) -> None:
        """Ping every worker; one that stays silent is lost.

        Silence is counted in heartbeats, not in seconds: a pause of this process is no silence of the workers.
        """
        allowed = math.ceil(self._timeouts.silence_s / self._timeouts.heartbeat_s)
        while True:
            await asyncio.sleep(self._timeouts.heartbeat_s)
            for member in [m for m in self._members.values() if m.ready and not m.ending]:
                heard_s = member.channel.heard_s
                member.silent = 0 if heard_s > member.heard_s else member.silent + 1
                member.heard_s = heard_s
                if member.silent >= allowed:
                    cause = f"no sign of life for {self._timeouts.silence_s:g} s"
                    self._spawn_task(self._report_loss(member, cause))
                    member.ending = True
                else:
                    with suppress(ChannelClosedError):
                        member.channel.notify({"op": "ping"})

    def _spawn_task(self, coroutine: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- calls ------------------------------------------------------------------------------------------------------

    async def ask(
        self,
        member: Member,
        op: str,
        arguments: Mapping[str, Any] | None = None,
        body: bytes = b"",
        *,
        timeout_s: float | None = None,
    ) -> Head:
        """Ask a worker and return the head of its answer. Raises the port's errors."""
        try:
            answer = await member.channel.call(op, arguments, body, timeout_s=timeout_s or self._timeouts.command_s)
        except ChannelClosedError:
            raise await self.lost(member) from None
        except CallTimeoutError as error:
            raise WorkerError(f"{member}: {error}") from None
        except RemoteError as error:
            kind = TransferError if error.kind == "transfer" else WorkerError
            raise kind(f"{member}: {error}") from None
        return answer.head

    def tell(self, member: Member, head: Head) -> None:
        """Send what needs no answer; nothing happens where the worker is gone."""
        with suppress(ChannelClosedError):
            member.channel.notify(head)

    async def lost(self, member: Member) -> WorkerLostError:
        """The error for a worker that is gone, as soon as it can say how it ended."""
        return WorkerLostError(f"{member} is gone: {await self._cause(member)}", member.id)
