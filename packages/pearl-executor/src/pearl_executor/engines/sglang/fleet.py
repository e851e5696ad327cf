"""The SGLang servers that live, by slot and incarnation: starting, fencing, watching and ending them."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pearl_executor.engines.sglang.client import SglangClient
from pearl_executor.engines.sglang.flags import PD_ROLES, Ports, launch_environment, launch_flags
from pearl_executor.engines.sglang.journal import Journal
from pearl_executor.engines.sglang.launch import Launcher, LaunchOrder, ServerProcess
from pearl_executor.engines.sglang.options import SglangOptions, SglangTimeouts
from pearl_executor.engines.sglang.samples import Meter
from pearl_executor.engines.sglang.server import SglangServer
from pearl_executor.ports import WorkerError, WorkerLostError
from pearl_state.roles import Role
from pearl_state.worker import GpuId, Worker, WorkerId

_LOOKS = 3
"""So many looks in a row must fail, of which each waits for its part of the silence that is allowed."""
_AGAIN_S = 0.5
"""Pause before a look that follows one that failed."""

OnLost = Callable[[WorkerId, int, str], None]
"""Called with slot, incarnation and cause when a server is lost that nobody told to end."""


class SglangFleet:
    """Servers of this run. One process a slot; an incarnation that ended never comes back."""

    def __init__(
        self,
        options: SglangOptions,
        timeouts: SglangTimeouts,
        launcher: Launcher,
        client: SglangClient,
        journal: Journal,
        folder: Path,
        admin_key: str,
        kv_bytes_per_token: int,
    ) -> None:
        self.on_lost: OnLost | None = None
        self._options = options
        self._timeouts = timeouts
        self._launcher = launcher
        self._client = client
        self._journal = journal
        self._folder = folder
        self._admin_key = admin_key
        self._kv_bytes = kv_bytes_per_token
        self._servers: dict[WorkerId, SglangServer] = {}
        self._meters: dict[SglangServer, Meter] = {}
        self._fences: dict[WorkerId, int] = {}
        """Per slot the highest incarnation that was started or told to end."""
        self._spares: dict[str, tuple[SglangServer, asyncio.Task[None]]] = {}
        """Gated servers that hold at their gate, by their GPUs."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def aclose(self) -> None:
        """End every server, held ones included."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        spares = [server for server, _ in self._spares.values()]
        for _, holding in self._spares.values():
            holding.cancel()
        self._spares.clear()
        await asyncio.gather(*(self.end(server, 0.0) for server in [*self._servers.values(), *spares]))

    # ---- looking up -------------------------------------------------------------------------------------------------

    def server(self, worker: Worker) -> SglangServer:
        """The server of this row. Raises `WorkerLostError` where another incarnation, or none, lives."""
        server = self._servers.get(worker.id)
        if server is None:
            raise WorkerLostError(f"worker {worker.id} (incarnation {worker.incarnation}) has no server", worker.id)
        if server.incarnation != worker.incarnation:
            cause = f"worker {worker.id} runs incarnation {server.incarnation}, not {worker.incarnation}"
            raise WorkerLostError(cause, worker.id)
        if server.process.exited.done() or server.ending:
            raise server.lost()
        if not server.ready:
            raise WorkerError(f"{server} is still starting")
        return server

    def living(self) -> list[SglangServer]:
        """All servers that are up."""
        return [s for s in self._servers.values() if s.ready and not s.ending and not s.process.exited.done()]

    def meter(self, server: SglangServer) -> Meter:
        """What it measured. What comes in after its end counts for nobody."""
        if server.process.exited.done():
            return self._meters.get(server) or Meter(self._kv_bytes)
        return self._meters.setdefault(server, Meter(self._kv_bytes))

    # ---- life -------------------------------------------------------------------------------------------------------

    async def start(self, worker: Worker) -> SglangServer:
        """Launch the server of this incarnation and wait until it is up. A failed or cancelled start leaves nothing."""
        if worker.incarnation <= self._fences.get(worker.id, 0):
            cause = f"worker {worker.id} cannot start incarnation {worker.incarnation}: it had its life already"
            raise WorkerLostError(cause, worker.id)
        older = self._servers.get(worker.id)
        if older is not None:
            await self.end(older, 0.0)
        self._fences[worker.id] = worker.incarnation
        server = await self._take_spare(worker) or await self._launch(
            worker.id, worker.incarnation, worker.gpus, worker.role
        )
        gated = bool(server.ports.gate)
        self._servers[worker.id] = server
        try:
            self._check_wanted(server)
            await server.until_up(gated=gated)
            self._check_wanted(server)
            server.ready = True
            server.open.set()
            if worker.role is Role.PREFILL:
                await server.flip(Role.PREFILL)
        except BaseException:
            await asyncio.shield(self.end(server, 0.0))
            raise
        self._spawn(self._watch(server))
        self._journal.write("started", worker.id, worker.incarnation, role=worker.role.value, listens_on=server.url)
        return server

    async def _launch(
        self, id_: WorkerId, incarnation: int, gpus: frozenset[GpuId], role: Role, *, gated: bool = False
    ) -> SglangServer:
        if self._closed:
            raise WorkerError(f"worker {id_} cannot start: the runtime is closed")
        names = ",".join(str(gpu) for gpu in sorted(gpus))
        name = f"w{id_}-{incarnation}" if incarnation else f"held-{names.replace(',', '-')}"
        place = await self._launcher.place(name, names, self._options.host)
        http, bootstrap, gate = place.ports
        ports = Ports(http=http, bootstrap=bootstrap, gate=gate if gated else 0)
        options = replace(self._options, host=place.host)
        args = launch_flags(
            options,
            ports,
            disaggregated=role in PD_ROLES,
            weight_version=-1,
            admin_key=self._admin_key,
            gated=gated,
        )
        order = LaunchOrder(
            name=name,
            gpus=place.gpus,
            args=args,
            env=launch_environment(options, place.gpus),
            log=self._folder / f"{name}.log",
            secrets=(self._admin_key,),
        )
        process: ServerProcess = await self._launcher.launch(order)
        # Whatever role it shall have, a disaggregated server comes up as decode.
        came_up = Role.DECODE if role in PD_ROLES else Role.COLOCATED
        return SglangServer(
            id=id_,
            incarnation=incarnation,
            role=came_up,
            gpus=names,
            ports=ports,
            process=process,
            client=self._client,
            options=options,
            timeouts=self._timeouts,
        )

    def _check_wanted(self, server: SglangServer) -> None:
        if self._closed or self._fences.get(server.id, 0) > server.incarnation or server.ending:
            raise WorkerLostError(f"{server} was ended while it started", server.id)

    # ---- gated starts -----------------------------------------------------------------------------------------------

    async def hold(self, groups: Sequence[frozenset[GpuId]], role: Role) -> None:
        """Start servers on these GPUs and hold each before it takes device memory. A later `start` lets one go.

        A cold start costs minutes; so the first borrow of training GPUs pays only what comes after the gate.
        """
        for gpus in groups:
            server = await self._launch(WorkerId(0), 0, gpus, role, gated=True)
            self._spares[server.gpus] = (server, asyncio.create_task(server.until_gate()))

    async def _take_spare(self, worker: Worker) -> SglangServer | None:
        names = ",".join(str(gpu) for gpu in sorted(worker.gpus))
        held = self._spares.pop(names, None)
        if held is None:
            return None
        server, holding = held
        usable = server.disaggregated == (worker.role in PD_ROLES)
        try:
            if usable:
                await holding
        except WorkerError:
            usable = False
        if not usable:
            holding.cancel()
            await self.end(server, 0.0)
            return None
        server.id, server.incarnation = worker.id, worker.incarnation
        return server

    # ---- ending -----------------------------------------------------------------------------------------------------

    def fence(self, worker: Worker) -> SglangServer | None:
        """Rule this incarnation out for ever. Returns its server, if there is one."""
        self._fences[worker.id] = max(self._fences.get(worker.id, 0), worker.incarnation)
        server = self._servers.get(worker.id)
        if server is None or server.incarnation != worker.incarnation:
            return None
        server.ending = True
        return server

    async def end(self, server: SglangServer, grace_s: float) -> None:
        """End a server; returns when nothing of it is left."""
        server.ending = True
        server.open.clear()
        await server.process.end(grace_s)
        if self._servers.get(server.id) is server:
            del self._servers[server.id]
        meter = self._meters.pop(server, None)
        if meter is not None:
            self._journal.write(
                "ended",
                server.id,
                server.incarnation,
                role=server.role.value,
                cached_tokens=meter.cached_tokens,
                generated_tokens=meter.generated_tokens,
            )

    async def replace(self, server: SglangServer, role: Role) -> SglangServer:
        """End a server and launch another of the same incarnation in its place, for a change of mode.

        Raises `WorkerLostError` where the new one does not come up: nothing is left then.
        """
        async with server.closed():
            await self.end(server, self._timeouts.stop_s)
        gpus = frozenset(GpuId(int(gpu)) for gpu in server.gpus.split(",") if gpu)
        try:
            fresh = await self._launch(server.id, server.incarnation, gpus, role)
            fresh.epoch = server.epoch + 1
            self._servers[server.id] = fresh
            await fresh.until_up(gated=False)
            fresh.ready = True
            fresh.open.set()
            if role is Role.PREFILL:
                await fresh.flip(Role.PREFILL)
        except WorkerError as error:
            if (left := self._servers.get(server.id)) is not None and left is not server:
                await self.end(left, 0.0)
            raise server.lost(f"it did not come up again as {role} ({error})") from None
        self._spawn(self._watch(fresh))
        self._journal.write("relaunched", fresh.id, fresh.incarnation, role=role.value, listens_on=fresh.url)
        return fresh

    # ---- watching ---------------------------------------------------------------------------------------------------

    async def _watch(self, server: SglangServer) -> None:
        """Look at its load every moment; report its loss once."""
        cause = await self._until_lost(server)
        if server.ending:
            return
        await self.end(server, 0.0)
        self._journal.write("lost", server.id, server.incarnation, cause=cause)
        if self.on_lost is not None:
            self.on_lost(server.id, server.incarnation, cause)

    async def _until_lost(self, server: SglangServer) -> str:
        """Silence is counted in looks too, not in seconds alone: a pause of this process is no silence of a server."""
        loop = asyncio.get_running_loop()
        exited = server.process.exited
        silent, heard_s = 0, loop.time()
        while True:
            await asyncio.wait([exited], timeout=self._timeouts.poll_s if not silent else _AGAIN_S)
            if exited.done():
                return exited.result()
            if server.ending:
                return ""
            try:
                await self.look(server)
                silent, heard_s = 0, loop.time()
            except WorkerError as error:
                # In a control section a server may be silent; those calls have limits of their own.
                silent, heard_s = (silent + 1, heard_s) if server.open.is_set() else (0, loop.time())
                if silent >= _LOOKS and loop.time() - heard_s >= self._timeouts.silence_s:
                    return f"no sign of life for {self._timeouts.silence_s:g} s ({error})"

    async def look(self, server: SglangServer) -> None:
        """Read its counters. Raises `WorkerError`."""
        limit_s = self._timeouts.silence_s / _LOOKS
        answer = await server.ask("/v1/loads?include=core,disagg,queues", timeout_s=limit_s)
        meter = self.meter(server)
        try:
            meter.look(answer["loads"][0])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise WorkerError(f"{server}: its load cannot be understood ({error!r})") from None
        if server.role is Role.PREFILL:
            meter.look_at_transfers(str(await server.ask("/metrics/", timeout_s=limit_s)))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        with suppress(asyncio.CancelledError):
            task.result()
