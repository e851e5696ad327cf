"""The simulated runtime: `WorkerPort` and `GenerationPort` over simulated engines, in virtual time.

Misuse that would kill or corrupt a real engine is an error of the caller and raises `WorkerError`, never passes.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from pearl_executor.ports import (
    GenerateRequest,
    GenerateResult,
    MemoryReport,
    OnChunk,
    WeightSnapshot,
    WorkerError,
    WorkerLostError,
)
from pearl_rl.simulation.call import SimulatedCall
from pearl_rl.simulation.engine import Engine, IterationCosts
from pearl_rl.simulation.kv_store import KvStore, StoredKvPool
from pearl_rl.simulation.links import KvLinks
from pearl_rl.simulation.meter import EngineMeter
from pearl_rl.simulation.process import SimulatedProcess
from pearl_rl.simulation.requests import EngineRequest, SimulatedEngineLimits
from pearl_rl.simulation.times import ReconfigurationTimes
from pearl_state.roles import Role, Zone
from pearl_state.samples import EngineSamples
from pearl_state.worker import Worker, WorkerId

_CONTEXT_BYTES = 500_000_000
"""What a released process keeps of each GPU."""


@dataclass(slots=True)
class Conversation:
    """What is known of the prompts of one trajectory beyond their length."""

    root: str = ""
    """Name of the first prompt that it shares with others; empty where it shares none."""
    root_tokens: int = 0
    stable_tokens: int = 1 << 60
    """How much of the next prompt is the prompt before it, unchanged."""


class SimulatedRuntime:
    """All rollout processes of a cluster of equal workers."""

    def __init__(
        self,
        *,
        costs: IterationCosts,
        limits: SimulatedEngineLimits,
        times: ReconfigurationTimes,
        links: KvLinks,
        kv_bytes_per_token: float,
        gpu_bytes: int = 80 * 2**30,
        conversations: Mapping[str, Conversation] | None = None,
        store: KvStore | None = None,
    ) -> None:
        """`store` is the KV storage that all workers share, if there is one."""
        self._costs = costs
        self._limits = limits
        self._times = times
        self._links = links
        self._kv_bytes = kv_bytes_per_token
        self._gpu_bytes = gpu_bytes
        self._conversations: Mapping[str, Conversation] = {} if conversations is None else conversations
        self._processes: dict[WorkerId, SimulatedProcess] = {}
        self._gone = EngineMeter()
        self._store = store
        self._nobody = Conversation()

    # ---- what was measured ------------------------------------------------------------------------------------------

    def meters(self) -> list[EngineMeter]:
        """The meters of all processes that live, and one for all that are gone."""
        for process in self._processes.values():
            process.engine.pass_chunks(process.now_s())
        return [self._gone, *(process.engine.meter for process in self._processes.values())]

    # ---- WorkerPort -------------------------------------------------------------------------------------------------

    async def start(self, worker: Worker) -> None:
        """See `WorkerPort`. A retained process of the overlap zone is there since the job began: it only resumes."""
        if worker.id in self._processes:
            raise WorkerError(f"worker {worker.id} has a process already")
        process = SimulatedProcess(worker, self._engine(worker.role))
        self._processes[worker.id] = process
        loop = asyncio.get_running_loop()
        if loop.time() >= self._times.warm_s:
            await asyncio.sleep(self._times.resume_s if worker.zone is Zone.OVERLAP else self._times.start_s)
        if process.lost:
            raise WorkerLostError(f"worker {worker.id} was killed while it started", worker.id)
        process.ready = True

    async def stop(self, worker: Worker) -> None:
        """See `WorkerPort`."""
        if self._known(worker) is not None:
            await asyncio.sleep(self._times.stop_s)
            self._end(worker)

    async def kill(self, worker: Worker) -> None:
        """See `WorkerPort`."""
        self._end(worker)

    async def interrupt(self, worker: Worker) -> int:
        """See `WorkerPort`."""
        return self._process(worker).interrupt()

    async def wait_idle(self, worker: Worker) -> None:
        """See `WorkerPort`."""
        await self._process(worker).idle()

    async def release(self, worker: Worker) -> MemoryReport:
        """See `WorkerPort`."""
        process = self._process(worker)
        if not process.engine.idle or process.loading or not process.resident:
            raise WorkerError(f"worker {worker.id} is released while busy, loading, or released already")
        await asyncio.sleep(self._times.release_s)
        self._process(worker)
        process.engine.clear()
        process.resident, process.version = False, None
        return self._memory(worker, held_before=True, held_after=False)

    async def resume(self, worker: Worker) -> MemoryReport:
        """See `WorkerPort`."""
        process = self._process(worker)
        if process.resident:
            raise WorkerError(f"worker {worker.id} is resumed twice")
        process.resident = True
        await asyncio.sleep(self._times.resume_s)
        self._process(worker)
        return self._memory(worker, held_before=False, held_after=True)

    async def switch_role(self, worker: Worker, role: Role) -> None:
        """See `WorkerPort`. Its cache goes.

        A process without weights, as one that was just resumed, takes any role up where `resumes_in_any_role` says so.
        """
        process = self._process(worker)
        if not process.engine.idle or process.loading:
            raise WorkerError(f"worker {worker.id} changes its role while busy or loading")
        if process.role is role:
            return
        if process.version is not None or not self._times.resumes_in_any_role:
            flip = Role.COLOCATED not in (process.role, role)
            await asyncio.sleep(self._times.flip_s if flip else self._times.relaunch_s)
        self._process(worker)
        process.engine.clear()
        process.engine.role = role

    async def load_weights(self, worker: Worker, snapshot: WeightSnapshot) -> int:
        """See `WorkerPort`."""
        process = self._process(worker)
        if process.loading or not process.resident:
            raise WorkerError(f"worker {worker.id} loads weights while loading, or without device memory")
        process.loading = True
        try:
            early = asyncio.get_running_loop().time() < self._times.warm_s
            first = process.version is None and worker.zone is Zone.DEDICATED
            await asyncio.sleep(0.0 if early else self._times.first_load_s if first else self._times.sync_s)
            self._process(worker)
            serving = process.version is not None
            process.take_weights(snapshot.version, self._times.sync_pause_s if serving else 0.0)
        finally:
            process.loading = False
        return snapshot.version

    async def refresh_peers(self, worker: Worker) -> None:
        """See `WorkerPort`."""
        self._process(worker)
        if asyncio.get_running_loop().time() >= self._times.warm_s:
            await asyncio.sleep(self._times.refresh_s)

    async def samples(self, worker: Worker) -> EngineSamples:
        """See `WorkerPort`."""
        process = self._process(worker)
        engine = process.engine
        engine.pass_chunks(process.now_s())
        return engine.meter.take(
            process.role,
            running=engine.running,
            waiting=engine.waiting,
            kv_used=engine.kv.used,
            kv_capacity=engine.kv.capacity,
        )

    # ---- GenerationPort ---------------------------------------------------------------------------------------------

    async def generate(self, worker: Worker, request: GenerateRequest, on_chunk: OnChunk) -> GenerateResult:
        """See `GenerationPort`. A simulated model generates `max_new_tokens` tokens."""
        call = self._begin(request, on_chunk, self._serving(worker, Role.COLOCATED), None)
        try:
            return await call.future
        finally:
            call.close()

    async def generate_pair(
        self, prefill: Worker, decode: Worker, request: GenerateRequest, on_chunk: OnChunk
    ) -> GenerateResult:
        """See `GenerationPort`."""
        first = self._serving(prefill, Role.PREFILL)
        call = self._begin(request, on_chunk, self._serving(decode, Role.DECODE), first)
        try:
            return await call.future
        finally:
            call.close()

    async def abort(self, worker: Worker, rid: str) -> None:
        """See `GenerationPort`. Nothing is left to do for a call whose caller was cancelled."""
        process = self._process(worker)
        for request in process.engine.requests():
            if request.rid == rid:
                process.cut(request)

    def _begin(
        self, request: GenerateRequest, on_chunk: OnChunk, decode: SimulatedProcess, prefill: SimulatedProcess | None
    ) -> SimulatedCall:
        known = self._conversations.get(request.affinity, self._nobody)

        def new_request() -> EngineRequest:
            return EngineRequest(
                rid=request.rid,
                prompt_tokens=len(request.prompt),
                new_tokens=request.max_new_tokens,
                conversation=request.affinity,
                root=known.root,
                root_tokens=known.root_tokens,
                # An interrupted call goes on from its own tokens, whatever a template does between turns.
                reusable=known.stable_tokens if not request.position else 1 << 60,
            )

        call = SimulatedCall(request, on_chunk, new_request, decode, prefill, self._send)
        call.begin()
        return call

    def _send(
        self, source: SimulatedProcess, target: SimulatedProcess, tokens: int, now_s: float
    ) -> tuple[float, float]:
        amount = tokens * self._kv_bytes
        begins_s, over_s = self._links.send(source.worker.id, target.worker.id, amount, now_s)
        target.engine.meter.transferred(tokens, int(amount), over_s - begins_s)
        return begins_s, over_s

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _engine(self, role: Role) -> Engine:
        limits, engine = self._limits, Engine(self._costs, self._limits, role)
        if self._store is not None:
            engine.kv = StoredKvPool(limits.kv_tokens, self._store, keeps_left_paths=limits.keeps_left_paths)
        return engine

    def _known(self, worker: Worker) -> SimulatedProcess | None:
        process = self._processes.get(worker.id)
        return process if process is not None and process.worker.incarnation == worker.incarnation else None

    def _process(self, worker: Worker) -> SimulatedProcess:
        process = self._known(worker)
        if process is None:
            raise WorkerLostError(f"no process of worker {worker.id}.{worker.incarnation}", worker.id)
        return process

    def _serving(self, worker: Worker, role: Role) -> SimulatedProcess:
        process = self._process(worker)
        if not process.ready or not process.resident or process.version is None:
            raise WorkerError(f"worker {worker.id} is asked to generate without weights")
        if process.role is not role:
            raise WorkerError(f"worker {worker.id} is asked to serve as {role}; it is {process.role}")
        return process

    def _end(self, worker: Worker) -> None:
        process = self._known(worker)
        if process is None:
            return
        process.lose()
        del self._processes[worker.id]
        self._links.forget(worker.id)
        self._gone.add(process.engine.meter)

    def _memory(self, worker: Worker, *, held_before: bool, held_after: bool) -> MemoryReport:
        context, full = _CONTEXT_BYTES * len(worker.gpus), int(0.88 * self._gpu_bytes) * len(worker.gpus)
        return MemoryReport(full if held_before else context, full if held_after else context)
