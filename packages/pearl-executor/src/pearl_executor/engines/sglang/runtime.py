"""SglangRuntime: `WorkerPort` and `GenerationPort` over SGLang servers."""

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from pearl_executor.engines.sglang.canary import Canaries
from pearl_executor.engines.sglang.client import SglangClient
from pearl_executor.engines.sglang.flags import PD_ROLES
from pearl_executor.engines.sglang.fleet import OnLost, SglangFleet
from pearl_executor.engines.sglang.gateway import Member
from pearl_executor.engines.sglang.generation import Calls
from pearl_executor.engines.sglang.journal import Journal
from pearl_executor.engines.sglang.launch import InterpreterLauncher, Launcher
from pearl_executor.engines.sglang.options import SglangOptions, SglangTimeouts
from pearl_executor.engines.sglang.server import SglangServer
from pearl_executor.engines.sglang.sizes import ModelSize
from pearl_executor.engines.sglang.transports import make_transport
from pearl_executor.engines.sglang.weights import WeightLoader
from pearl_executor.ports import (
    GenerateRequest,
    GenerateResult,
    MemoryReport,
    OnChunk,
    ReleaseVerificationError,
    WeightSnapshot,
    WorkerError,
    WorkerLostError,
)
from pearl_state.roles import Role
from pearl_state.samples import EngineSamples
from pearl_state.worker import GpuId, Worker, WorkerId

_IDLE_POLL_S = 0.02
_RETAINED_FRACTION = 0.05
"""Part of weights and caches that a release may leave by measure: allocators round, pages are shared."""


class SglangRuntime:
    """Rollout workers as SGLang servers. Use as an async context manager.

    Logs and a journal (`sglang.jsonl`) go to `folder`. `on_lost` is called inside the event loop when a server is lost
    that nobody told to end. `launcher` starts them; by default as children of this process.
    """

    def __init__(
        self,
        options: SglangOptions,
        folder: Path,
        *,
        timeouts: SglangTimeouts | None = None,
        launcher: Launcher | None = None,
        on_lost: OnLost | None = None,
    ) -> None:
        self.options = options
        self._timeouts = timeouts or SglangTimeouts()
        self._launcher = launcher or InterpreterLauncher(options.interpreter, options.kill_command)
        self._folder = folder
        self._on_lost = on_lost
        self._snapshots: dict[WorkerId, WeightSnapshot] = {}
        """What each worker loaded last: a change of mode loads it again."""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Check which SGLang the interpreter has, then be ready to start servers. Raises `WorkerError`."""
        await self._launcher.check()
        self._size = await asyncio.to_thread(ModelSize.of, self.options.model_dir, self.options.dtype)
        loop = asyncio.get_running_loop()
        # Hexadecimal: a key that begins with a dash would be taken for another argument.
        admin_key = secrets.token_hex(24)
        self._journal = Journal(self._folder / "sglang.jsonl", loop.time)
        self._stack.callback(self._journal.close)
        client = await self._stack.enter_async_context(SglangClient(admin_key))
        self._fleet = SglangFleet(
            self.options,
            self._timeouts,
            self._launcher,
            client,
            self._journal,
            self._folder,
            admin_key,
            self._size.kv_bytes_per_token,
        )
        self._fleet.on_lost = self._on_lost
        self._calls = Calls(client, self._timeouts)
        transport = await self._stack.enter_async_context(make_transport(self.options, self._timeouts))
        self._loader = WeightLoader(self.options, transport, self._journal, self._calls.interrupt)
        self._canaries = Canaries(self._calls, self._journal)
        self._stack.push_async_callback(self._calls.aclose)
        self._stack.push_async_callback(self._fleet.aclose)
        await self._fleet.hold(self.options.held, self.options.held_role)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    @property
    def on_lost(self) -> OnLost | None:
        """What is called with (slot, incarnation, cause) when a server is lost."""
        return self._on_lost

    @on_lost.setter
    def on_lost(self, callback: OnLost | None) -> None:
        self._on_lost = self._fleet.on_lost = callback

    @property
    def pids(self) -> dict[WorkerId, int]:
        """Leaders of the living servers' process groups."""
        return {server.id: server.process.pid for server in self._fleet.living()}

    def server(self, worker: Worker) -> SglangServer:
        """The server behind a row. Raises `WorkerLostError`."""
        return self._fleet.server(worker)

    def member(self, worker: Worker) -> Member:
        """Where a gateway finds the server behind a row. Raises `WorkerLostError`."""
        server = self._fleet.server(worker)
        return Member(server.url, server.role, server.ports.bootstrap)

    async def hold(self, groups: Sequence[frozenset[GpuId]], role: Role) -> None:
        """Start servers on these GPUs early and hold each before it takes device memory; a later `start` lets it go."""
        await self._fleet.hold(groups, role)

    # ---- WorkerPort -------------------------------------------------------------------------------------------------

    async def start(self, worker: Worker) -> None:
        """Launch the server of this incarnation in its role."""
        self._snapshots.pop(worker.id, None)
        await self._fleet.start(worker)

    async def stop(self, worker: Worker) -> None:
        """End it: abort what it runs, then SIGTERM, then SIGKILL; SGLang waits for its requests without limit."""
        server = self._fleet.fence(worker)
        if server is not None:
            try:
                await self._calls.interrupt(server)
            finally:
                await self._fleet.end(server, self._timeouts.stop_s)

    async def kill(self, worker: Worker) -> None:
        """End its whole process group at once."""
        server = self._fleet.fence(worker)
        if server is not None:
            await self._fleet.end(server, 0.0)

    async def interrupt(self, worker: Worker) -> int:
        """Abort its requests at the server; each call returns with its tokens so far."""
        return await self._calls.interrupt(self._fleet.server(worker))

    async def wait_idle(self, worker: Worker) -> None:
        """Return once no call has a part in it and it proves idle by flushing its cache."""
        server = self._fleet.server(worker)
        while self._calls.of(server):
            if server.process.exited.done():
                raise server.lost()
            await asyncio.sleep(_IDLE_POLL_S)
        if not server.released:
            await server.flush(self._timeouts.control_s)

    async def release(self, worker: Worker) -> MemoryReport:
        """Give weights, KV and graphs back, and verify by measure that they are."""
        server = self._fleet.server(worker)
        expected = self._held_bytes(server)
        report = await server.release(expected)
        self._journal.write(
            "released", server.id, server.incarnation, role=server.role.value, expected_bytes=expected,
            released_bytes=report.before_bytes - report.after_bytes,
        )  # fmt: skip
        if report.after_bytes > _RETAINED_FRACTION * expected:
            raise ReleaseVerificationError(worker.id, expected, report.before_bytes - report.after_bytes)
        return report

    async def resume(self, worker: Worker) -> MemoryReport:
        """Take the weights' memory again. The caches follow once the weights are loaded."""
        server = self._fleet.server(worker)
        report = await server.resume(self._size.weight_bytes)
        self._journal.write(
            "resumed", server.id, server.incarnation, role=server.role.value, taken_bytes=report.after_bytes
        )
        return report

    async def switch_role(self, worker: Worker, role: Role) -> None:
        """Flip between prefill and decode in place; a change of mode is another process with the same weights."""
        server = self._fleet.server(worker)
        if server.role is role:
            return
        if server.disaggregated and role in PD_ROLES:
            await server.flip(role)
            self._journal.write("flipped", server.id, server.incarnation, role=role.value)
            return
        had_weights = server.version is not None
        fresh = await self._fleet.replace(server, role)
        # A worker that was just resumed has no weights to keep; its load comes next.
        if had_weights:
            try:
                self._snapshots[worker.id] = snapshot = self._kept_snapshot(worker)
                await self._loader.load(fresh, snapshot)
            except WorkerError as error:
                # Relaunched without its weights it is nothing that could serve in either role.
                await self._fleet.end(fresh, 0.0)
                raise WorkerLostError(f"{fresh} did not get its weights back as {role}: {error}", worker.id) from None

    def _kept_snapshot(self, worker: Worker) -> WeightSnapshot:
        """What the worker held, or where that is not kept any more the newest that any worker loaded."""
        own = self._snapshots[worker.id]
        known = [own, *sorted(self._snapshots.values(), key=lambda snapshot: -snapshot.version)]
        for snapshot in known:
            if snapshot.version >= own.version and Path(snapshot.uri).is_dir():
                return snapshot
        raise WorkerError(f"weights {own.version} are not kept any more, nor any newer")

    async def load_weights(self, worker: Worker, snapshot: WeightSnapshot) -> int:
        """Load a snapshot and verify what the server then holds. Returns the version that it reports."""
        server = self._fleet.server(worker)
        version = await self._loader.load(server, snapshot)
        self._snapshots[worker.id] = snapshot
        return version

    async def refresh_peers(self, worker: Worker) -> None:
        """Prove every pair of this server: a canary request through each."""
        await self._canaries.check(self._fleet.server(worker), self._fleet.living())

    async def samples(self, worker: Worker) -> EngineSamples:
        """What the server measured since the last call."""
        server = self._fleet.server(worker)
        await self._fleet.look(server)
        return self._fleet.meter(server).take(server.role)

    def _held_bytes(self, server: SglangServer) -> int:
        """What weights and KV pool take, over all ranks."""
        tokens = self._fleet.meter(server).capacity_tokens or self.options.kv_tokens
        return self._size.weight_bytes + tokens * self._size.kv_bytes_per_token

    # ---- GenerationPort ---------------------------------------------------------------------------------------------

    async def generate(self, worker: Worker, request: GenerateRequest, on_chunk: OnChunk) -> GenerateResult:
        """Run the whole call on a colocated server."""
        server = self._fleet.server(worker)
        result = await self._calls.colocated(server, request, on_chunk)
        self._count(server, result, result.cached_tokens)
        return result

    async def generate_pair(
        self, prefill: Worker, decode: Worker, request: GenerateRequest, on_chunk: OnChunk
    ) -> GenerateResult:
        """Prefill on one server, decode on the other; SGLang moves the KV itself."""
        source, target = self._fleet.server(prefill), self._fleet.server(decode)
        await self._canaries.prove(source, target)
        result, held = await self._calls.pair(source, target, request, on_chunk)
        self._fleet.meter(source).cached_tokens += result.cached_tokens
        self._count(target, result, held)
        return result

    def _count(self, server: SglangServer, result: GenerateResult, cached_tokens: int) -> None:
        meter = self._fleet.meter(server)
        meter.generated_tokens += len(result.tokens)
        meter.cached_tokens += cached_tokens

    async def abort(self, worker: Worker, rid: str) -> None:
        """End one request; no effect where it has just ended."""
        self._fleet.server(worker)
        await self._calls.abort(rid)
