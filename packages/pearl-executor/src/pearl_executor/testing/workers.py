"""Fake rollout workers: the worker and the generation port in virtual time, lethal on misuse like a real engine."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from pearl_executor.ports import (
    Finish,
    GenerateRequest,
    GenerateResult,
    MemoryReport,
    OnChunk,
    TokenChunk,
    TransferError,
    WeightSnapshot,
    WorkerError,
    WorkerLostError,
)
from pearl_executor.testing.faults import FaultScript
from pearl_executor.testing.memory import GpuLedger
from pearl_state.roles import Role
from pearl_state.samples import EngineSamples
from pearl_state.trajectory import WeightSpan, merge_spans
from pearl_state.worker import GpuId, Worker, WorkerId

T = TypeVar("T")

VOCABULARY = 1000


def next_token(last: int, context_tokens: int) -> int:
    """The token that every fake engine generates after a context: resuming from a prefix continues the same way."""
    return (last * 48271 + context_tokens * 16807 + 11) % VOCABULARY


@dataclass(slots=True)
class _Request:
    """A generation that runs on a worker."""

    ended: asyncio.Future[Finish]


@dataclass(slots=True)
class FakeProcess:
    """One process, as the machine sees it."""

    worker: WorkerId
    incarnation: int
    gpus: frozenset[GpuId]
    role: Role
    ready: bool = False
    """Whether its start has returned."""
    resident: bool = True
    version: int | None = None
    loading: bool = False
    running: dict[str, _Request] = field(default_factory=dict)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    decoding: int = 0
    """Requests in decode; between two tokens they are not `running` and the engine is not idle either."""
    frozen: "asyncio.Future[None] | None" = None
    """Set while the process is stopped: done once it runs on, or is gone."""
    generated_tokens: int = 0
    prefill_tokens: int = 0

    def rest(self) -> None:
        """Be idle, if nothing is left to do."""
        if not self.running and not self.decoding:
            self.idle.set()

    @property
    def owner(self) -> str:
        """Its name in the ledger."""
        return f"worker {self.worker}.{self.incarnation}"


class FakeWorkers:
    """A `WorkerPort` and `GenerationPort`.

    Misuse that would kill or corrupt a real engine (a release while busy, a second resume, a load beside a load, a
    request to an engine without weights, two processes in a slot) is recorded in `violations` and kills the process.
    """

    def __init__(
        self,
        *,
        script: FaultScript | None = None,
        ledger: GpuLedger | None = None,
        bytes_per_gpu: int = 60_000_000_000,
        context_bytes: int = 500_000_000,
        prefill_token_s: float = 0.0001,
        decode_token_s: float = 0.02,
    ) -> None:
        """`context_bytes` is what a released process keeps of each GPU and the ledger does not count."""
        self.script = FaultScript() if script is None else script
        self.ledger = GpuLedger() if ledger is None else ledger
        self.processes: dict[WorkerId, FakeProcess] = {}
        self.violations: list[str] = []
        self.transfer_failures = 0
        """How many of the next KV hand-overs fail."""
        self.leak_bytes: dict[int, int] = {}
        """Worker → how much of each GPU its release keeps, against its contract."""
        self._bytes = bytes_per_gpu
        self._context_bytes = context_bytes
        self._prefill_token_s = prefill_token_s
        self._decode_token_s = decode_token_s

    # ---- set-up -----------------------------------------------------------------------------------------------------

    def adopt(self, worker: Worker, version: int | None, *, resident: bool = True) -> None:
        """Have a process run already, as `worker`'s row says; for tests that begin in the middle."""
        process = FakeProcess(worker.id, worker.incarnation, worker.gpus, worker.role, ready=True, resident=resident)
        process.version = version if resident else None
        process.idle.set()
        self.processes[worker.id] = process
        if resident:
            self.ledger.take(worker.gpus, process.owner, self._bytes)

    def crash(self, worker: int) -> None:
        """Let the process of a slot die now."""
        process = self.processes.get(WorkerId(worker))
        if process is not None:
            self._end(process)

    def freeze(self, worker: int) -> None:
        """Let the process of a slot stand still, as SIGSTOP does: until `thaw` it answers and generates nothing.

        A kill still ends it.
        """
        process = self.processes.get(WorkerId(worker))
        if process is not None and process.frozen is None:
            process.frozen = asyncio.get_running_loop().create_future()

    def thaw(self, worker: int) -> None:
        """Let a frozen process run on."""
        process = self.processes.get(WorkerId(worker))
        if process is not None:
            _melt(process)

    # ---- WorkerPort -------------------------------------------------------------------------------------------------

    async def start(self, worker: Worker) -> None:
        """See `WorkerPort`. The process exists and holds memory from the first moment on."""
        if (old := self.processes.get(worker.id)) is not None:
            self._misuse(old, f"incarnation {worker.incarnation} starts beside {old.incarnation}")
        process = FakeProcess(worker.id, worker.incarnation, worker.gpus, worker.role)
        process.idle.set()
        self.processes[worker.id] = process
        self.ledger.take(worker.gpus, process.owner, self._bytes)

        def act() -> None:
            self._alive(worker)
            process.ready = True

        try:
            await self.script.perform("start", worker.id, act, lambda: self._end(process))
        except WorkerError:
            # A failed start leaves no process, by contract; one that merely never answers does.
            self._end(process)
            raise

    async def stop(self, worker: Worker) -> None:
        """See `WorkerPort`."""
        await self._perform("stop", worker, lambda process: self._end(process), must_live=False)

    async def kill(self, worker: Worker) -> None:
        """See `WorkerPort`."""
        await self._perform("kill", worker, lambda process: self._end(process), must_live=False)

    async def interrupt(self, worker: Worker) -> int:
        """See `WorkerPort`."""

        def act(process: FakeProcess) -> int:
            for request in process.running.values():
                _finish(request, Finish.INTERRUPTED)
            return len(process.running)

        return await self._perform("interrupt", worker, act)

    async def wait_idle(self, worker: Worker) -> None:
        """See `WorkerPort`."""
        await self._perform("wait_idle", worker, _nothing)
        process = self._alive(worker)
        await process.idle.wait()
        self._alive(worker)

    async def release(self, worker: Worker) -> MemoryReport:
        """See `WorkerPort`."""

        def act(process: FakeProcess) -> MemoryReport:
            if process.running:
                self._misuse(process, f"released with {len(process.running)} requests running")
            if process.loading:
                self._misuse(process, "released while it loads weights")
            if not process.resident:
                self._misuse(process, "released twice")
            before = self.ledger.held(process.gpus, process.owner)
            self.ledger.give(process.gpus, process.owner, self._bytes - self.leak_bytes.get(worker.id, 0))
            process.resident, process.version = False, None
            return self._report(process, before)

        return await self._perform("release", worker, act)

    async def resume(self, worker: Worker) -> MemoryReport:
        """See `WorkerPort`."""

        def act(process: FakeProcess) -> MemoryReport:
            if process.resident:
                self._misuse(process, "resumed twice")
            before = self.ledger.held(process.gpus, process.owner)
            self.ledger.take(process.gpus, process.owner, self._bytes)
            process.resident, process.version = True, None
            return self._report(process, before)

        return await self._perform("resume", worker, act)

    async def switch_role(self, worker: Worker, role: Role) -> None:
        """See `WorkerPort`."""

        def act(process: FakeProcess) -> None:
            if process.running:
                self._misuse(process, f"changes its role with {len(process.running)} requests running")
            if process.loading:
                self._misuse(process, "changes its role while it loads weights")
            process.role = role

        await self._perform("switch_role", worker, act)

    async def load_weights(self, worker: Worker, snapshot: WeightSnapshot) -> int:
        """See `WorkerPort`."""
        process = self._alive(worker)
        if process.loading:
            self._misuse(process, "loads weights while it loads weights")
        if not process.resident:
            self._misuse(process, "loads weights without device memory")

        def act(process: FakeProcess) -> int:
            process.version = snapshot.version
            return snapshot.version

        process.loading = True
        try:
            return await self._perform("load_weights", worker, act)
        finally:
            process.loading = False

    async def refresh_peers(self, worker: Worker) -> None:
        """See `WorkerPort`."""
        await self._perform("refresh_peers", worker, _nothing)

    async def samples(self, worker: Worker) -> EngineSamples:
        """See `WorkerPort`. Counters only."""

        def act(process: FakeProcess) -> EngineSamples:
            return EngineSamples(
                role=process.role,
                prefill_tokens=process.prefill_tokens,
                generated_tokens=process.generated_tokens,
                running=len(process.running),
            )

        return await self._perform("samples", worker, act)

    # ---- GenerationPort ---------------------------------------------------------------------------------------------

    async def generate(self, worker: Worker, request: GenerateRequest, on_chunk: OnChunk) -> GenerateResult:
        """See `GenerationPort`."""
        process = self._serving(worker, Role.COLOCATED)
        prefill_s = self._prefill_token_s * len(request.prompt)
        return await self._decode(process, request, on_chunk, delay_s=prefill_s, prefill_s=prefill_s)

    async def generate_pair(
        self, prefill: Worker, decode: Worker, request: GenerateRequest, on_chunk: OnChunk
    ) -> GenerateResult:
        """See `GenerationPort`."""
        first = self._serving(prefill, Role.PREFILL)
        second = self._serving(decode, Role.DECODE)
        prefill_s = self._prefill_token_s * len(request.prompt)
        finish = await self._hold(first, request.rid, prefill_s)
        if finish is Finish.INTERRUPTED:
            return GenerateResult(finish=finish, tokens=(), logprobs=(), spans=(), prefill_s=prefill_s)
        if self.transfer_failures:
            self.transfer_failures -= 1
            raise TransferError(f"injected failure of a hand-over from {first.owner} to {second.owner}")
        return await self._decode(second, request, on_chunk, delay_s=0.0, prefill_s=prefill_s)

    async def abort(self, worker: Worker, rid: str) -> None:
        """See `GenerationPort`."""
        running = self._alive(worker).running.get(rid)
        if running is not None:
            _finish(running, Finish.INTERRUPTED)

    # ---- inside -----------------------------------------------------------------------------------------------------

    async def _decode(
        self, process: FakeProcess, request: GenerateRequest, on_chunk: OnChunk, *, delay_s: float, prefill_s: float
    ) -> GenerateResult:
        """Emit tokens one by one until the length, a stop token, or an interruption."""
        began_s = asyncio.get_running_loop().time()
        process.prefill_tokens += len(request.prompt)
        last, tokens, spans = (request.prompt[-1] if request.prompt else 0), list[int](), list[WeightSpan]()
        finish = Finish.LENGTH
        process.decoding += 1
        try:
            while len(tokens) < request.max_new_tokens:
                if await self._hold(process, request.rid, delay_s + self._decode_token_s) is Finish.INTERRUPTED:
                    finish = Finish.INTERRUPTED
                    break
                delay_s = 0.0
                last = next_token(last, len(request.prompt) + len(tokens))
                version = process.version or 0
                tokens.append(last)
                spans.append(WeightSpan(version, 1))
                process.generated_tokens += 1
                on_chunk(TokenChunk((last,), (-1.0,), version, len(tokens) - 1))
                if last in request.sampling.stop_token_ids:
                    finish = Finish.STOP
                    break
        finally:
            process.decoding -= 1
            process.rest()
        return GenerateResult(
            finish=finish,
            tokens=tuple(tokens),
            logprobs=(-1.0,) * len(tokens),
            spans=merge_spans(spans),
            prefill_s=prefill_s,
            decode_s=asyncio.get_running_loop().time() - began_s,
        )

    async def _hold(self, process: FakeProcess, rid: str, duration_s: float) -> Finish | None:
        """Let a request run on a process for a while. Raises `WorkerLostError` where the process dies meanwhile."""
        if self.processes.get(process.worker) is not process:
            raise WorkerLostError(f"{process.owner} is gone", process.worker)
        request = _Request(asyncio.get_running_loop().create_future())
        process.running[rid] = request
        process.idle.clear()
        try:
            done, _ = await asyncio.wait({request.ended}, timeout=duration_s)
            while process.frozen is not None:
                await asyncio.wait({process.frozen})
                done = {request.ended} if request.ended.done() else set()
            return request.ended.result() if done else None
        finally:
            if not request.ended.cancel():
                request.ended.exception()  # nobody may be left to be told
            del process.running[rid]
            process.rest()

    async def _perform(
        self, method: str, worker: Worker, act: Callable[[FakeProcess], T], *, must_live: bool = True
    ) -> T:
        def do() -> T:
            if not must_live and not self._is_alive(worker):
                return None  # type: ignore[return-value]  # stop and kill return nothing
            return act(self._alive(worker))

        def lose() -> None:
            if self._is_alive(worker):
                self._end(self.processes[worker.id])

        if must_live:
            self._alive(worker)
        if method != "kill" and self._is_alive(worker):
            process = self.processes[worker.id]
            while process.frozen is not None:
                await asyncio.wait({process.frozen})
        return await self.script.perform(method, worker.id, do, lose)

    def _is_alive(self, worker: Worker) -> bool:
        process = self.processes.get(worker.id)
        return process is not None and process.incarnation == worker.incarnation

    def _alive(self, worker: Worker) -> FakeProcess:
        if not self._is_alive(worker):
            raise WorkerLostError(f"no process of worker {worker.id}.{worker.incarnation}", worker.id)
        return self.processes[worker.id]

    def _serving(self, worker: Worker, role: Role) -> FakeProcess:
        process = self._alive(worker)
        if not process.ready or not process.resident or process.version is None:
            self._misuse(process, "gets a request without weights")
        if process.role is not role:
            self._misuse(process, f"gets a request for {role} as {process.role}")
        return process

    def _misuse(self, process: FakeProcess, what: str) -> None:
        self.violations.append(f"{process.owner} {what}")
        self._end(process)
        raise WorkerLostError(f"{process.owner} died: {what}", process.worker)

    def _end(self, process: FakeProcess) -> None:
        """The process is gone: its memory is free and its requests are lost."""
        if self.processes.get(process.worker) is process:
            del self.processes[process.worker]
        self.ledger.give(process.gpus, process.owner)
        _melt(process)
        for request in process.running.values():
            if not request.ended.done():
                request.ended.set_exception(WorkerLostError(f"{process.owner} is gone", process.worker))
        process.idle.set()

    def _report(self, process: FakeProcess, before_bytes: int) -> MemoryReport:
        context = self._context_bytes * len(process.gpus)
        return MemoryReport(before_bytes + context, self.ledger.held(process.gpus, process.owner) + context)


def _nothing(process: FakeProcess) -> None:
    """An answer is all that is asked for."""


def _melt(process: FakeProcess) -> None:
    if process.frozen is not None:
        frozen, process.frozen = process.frozen, None
        frozen.set_result(None)


def _finish(request: _Request, finish: Finish) -> None:
    if not request.ended.done():
        request.ended.set_result(finish)
