"""LocalRuntime: `WorkerPort` and `GenerationPort` over real worker processes on one machine."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any, Self

from pearl_executor.ports import (
    Finish,
    GenerateRequest,
    GenerateResult,
    MemoryReport,
    OnChunk,
    TransferError,
    WeightSnapshot,
    WorkerError,
    WorkerLostError,
)
from pearl_executor.runtimes.local.fleet import Fleet, Member, OnLost, Timeouts
from pearl_executor.runtimes.local.frames import Frame
from pearl_executor.runtimes.local.generation import ModelCall, ModelCalls
from pearl_executor.runtimes.local.hosting import EngineRecipe
from pearl_executor.runtimes.local.processes import ForkServer, ProcessServer
from pearl_executor.runtimes.local.wire import Head, memory_from_wire, request_to_wire, samples_from_wire
from pearl_state.roles import Role
from pearl_state.samples import EngineSamples
from pearl_state.worker import Worker, WorkerId


class LocalRuntime:
    """Rollout workers as processes of this machine. Use as an async context manager, or `open` and `aclose`.

    `recipe` says what engine they host (`hosting.torch_recipe`). Their output goes to `run_dir / "workers"`. `forks`
    is an open fork server to share with other processes of the run; its owner closes it after this runtime, and it
    should preload `recipe.preload`. `on_lost` is called inside the event loop when a worker is lost that nobody told
    to end; it may be set later.
    """

    def __init__(
        self,
        recipe: EngineRecipe,
        run_dir: Path | None = None,
        *,
        forks: ProcessServer | None = None,
        timeouts: Timeouts | None = None,
        on_lost: OnLost | None = None,
    ) -> None:
        self._timeouts = timeouts or Timeouts()
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        if forks is None and run_dir is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="pearl-logs-")
            run_dir = Path(self._scratch.name)
        self._own_forks = None
        if forks is None and run_dir is not None:
            forks = self._own_forks = ForkServer(run_dir / "workers", preload=recipe.preload)
        assert forks is not None
        self._calls = ModelCalls()
        self._fleet = Fleet(recipe, forks, self._timeouts, self._noticed, on_lost)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def open(self) -> None:
        """Start the fork server. Its imports go on in the background; the first `start` waits for them."""
        if self._own_forks is not None:
            await self._own_forks.open()
        self._fleet.open()

    async def aclose(self) -> None:
        """End every process; returns when none is left."""
        await self._fleet.aclose()
        if self._own_forks is not None:
            await self._own_forks.aclose()
        if self._scratch is not None:
            self._scratch.cleanup()

    @property
    def on_lost(self) -> OnLost | None:
        """What is called with (slot, incarnation, cause) when a worker is lost."""
        return self._fleet.on_lost

    @on_lost.setter
    def on_lost(self, callback: OnLost | None) -> None:
        self._fleet.on_lost = callback

    @property
    def pids(self) -> dict[WorkerId, int]:
        """Process ids of the living workers."""
        return self._fleet.pids

    # ---- WorkerPort -------------------------------------------------------------------------------------------------

    async def start(self, worker: Worker) -> None:
        """Fork the process of this incarnation and build its engine; lasts at least the pace's `start_s`."""
        await self._fleet.start(worker)

    async def stop(self, worker: Worker) -> None:
        """End the process in order; requests it still holds raise `WorkerLostError`."""
        await self._fleet.stop(worker)

    async def kill(self, worker: Worker) -> None:
        """End the process by SIGKILL and reap it."""
        await self._fleet.kill(worker)

    async def interrupt(self, worker: Worker) -> int:
        """End all requests of this worker, also those whose prefill is under way elsewhere."""
        member = self._fleet.member(worker)
        coming = self._calls.on_the_way_to(worker.id)
        for call in coming:
            self._interrupt(call)
        answer = await self._fleet.ask(member, "interrupt")
        return int(answer["count"]) + len(coming)

    async def wait_idle(self, worker: Worker) -> None:
        """Return once the engine holds no request and none is on its way to it."""
        member = self._fleet.member(worker)
        while True:
            coming = self._calls.on_the_way_to(worker.id)
            if coming:
                await self._until_passed(member, coming)
            await self._fleet.ask(member, "wait_idle", timeout_s=self._timeouts.generate_s)
            if not coming:
                return

    async def _until_passed(self, member: Member, calls: list[ModelCall]) -> None:
        """Wait until one of `calls` is over, or the worker gone."""
        limit_s = self._timeouts.generate_s
        waiting = [call.over for call in calls]
        done, _ = await asyncio.wait([*waiting, member.gone], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise WorkerError(f"{member}: {len(calls)} requests are still in prefill elsewhere after {limit_s:g} s")

    async def release(self, worker: Worker) -> MemoryReport:
        """Give device memory back. Refused unless idle, and refused the second time."""
        answer = await self._fleet.ask(self._fleet.member(worker), "release")
        return memory_from_wire(answer)

    async def resume(self, worker: Worker) -> MemoryReport:
        """Take device memory again. Refused unless released."""
        answer = await self._fleet.ask(self._fleet.member(worker), "resume")
        return memory_from_wire(answer)

    async def switch_role(self, worker: Worker, role: Role) -> None:
        """Change the role of an idle engine in place."""
        await self._fleet.ask(self._fleet.member(worker), "switch_role", {"role": role})

    async def load_weights(self, worker: Worker, snapshot: WeightSnapshot) -> int:
        """Load a snapshot between two iterations. Returns the version the engine now reports."""
        arguments = {"uri": snapshot.uri, "version": snapshot.version, "checksum": snapshot.checksum}
        answer = await self._fleet.ask(self._fleet.member(worker), "load_weights", arguments)
        return int(answer["version"])

    async def refresh_peers(self, worker: Worker) -> None:
        """Have all other workers connect to this one anew."""
        member = self._fleet.member(worker)
        others = self._fleet.others(member)
        answers = [self._fleet.ask(other, "forget", {"peer": member.socket}) for other in others]
        for answer in await asyncio.gather(*answers, return_exceptions=True):
            # A peer that is lost has nothing to renew; its loss is reported elsewhere.
            if isinstance(answer, BaseException) and not isinstance(answer, WorkerLostError):
                raise answer

    async def samples(self, worker: Worker) -> EngineSamples:
        """What the engine and its hand-overs measured since the last call."""
        answer = await self._fleet.ask(self._fleet.member(worker), "samples")
        return samples_from_wire(answer["samples"])

    # ---- GenerationPort ---------------------------------------------------------------------------------------------

    async def generate(self, worker: Worker, request: GenerateRequest, on_chunk: OnChunk) -> GenerateResult:
        """Run the whole call on a colocated worker."""
        member = await self._fleet.working(worker)
        with self._calls.entry(request.rid, on_chunk, worker.id) as call:
            return call.result(await self._run(call, member, "generate", *request_to_wire(request)))

    async def generate_pair(
        self, prefill: Worker, decode: Worker, request: GenerateRequest, on_chunk: OnChunk
    ) -> GenerateResult:
        """Prefill on one worker; the decode worker then pulls the KV from it and decodes.

        Where a worker is lost, `WorkerLostError.worker` names it; `TransferError` means that both live on.
        """
        source, target = await self._fleet.working(prefill), await self._fleet.working(decode)
        head, body = request_to_wire(request)
        with self._calls.entry(request.rid, on_chunk, prefill.id, decode.id) as call:
            try:
                answer = await self._run(call, source, "prefill", head, body, watched=target)
                if "finish" in answer:
                    return call.result(answer)
                if call.interrupted:
                    return call.result(_ended(answer))
                call.decoding = True
                answer = await self._run(call, target, "decode", {**head, "peer": source.socket}, body)
                return call.result(answer)
            except TransferError as error:
                if source.gone.done():
                    raise await self._fleet.lost(source) from error
                raise
            finally:
                # However the call ended, also in the middle of its prefill: nobody will claim its KV any more.
                self._fleet.tell(source, {"op": "drop", "room": request.rid})

    async def abort(self, worker: Worker, rid: str) -> None:
        """End one request; no effect where it has just ended."""
        self._fleet.member(worker)
        call = self._calls.get(rid)
        if call is not None:
            self._interrupt(call)

    def _interrupt(self, call: ModelCall) -> None:
        """End a call wherever it is: in one of its workers, or between the two."""
        call.interrupted = True
        for id_ in call.workers:
            member = self._fleet.living(id_)
            if member is not None:
                self._fleet.tell(member, {"op": "abort", "call": 0, "rid": call.rid})

    async def _run(
        self, call: ModelCall, member: Member, op: str, head: Head, body: bytes, watched: Member | None = None
    ) -> Head:
        """One stage of a model call. Whatever ends it early also ends the request in the worker."""
        answer = asyncio.ensure_future(self._fleet.ask(member, op, head, body, timeout_s=self._timeouts.generate_s))
        waiting: list[asyncio.Future[Any]] = [answer, call.broken]
        if watched is not None:
            waiting.append(watched.gone)
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if call.broken.done():
                raise call.broken.result()
            if not answer.done() and watched is not None:
                raise await self._fleet.lost(watched)
            return answer.result()
        finally:
            if not answer.done():
                answer.cancel()
                self._fleet.tell(member, {"op": "abort", "call": 0, "rid": call.rid})
            elif not answer.cancelled():
                # Seen, also where something else ends the call.
                answer.exception()

    def _noticed(self, frame: Frame) -> None:
        if frame.head["op"] == "tokens":
            self._calls.deliver(frame)


def _ended(answer: Head) -> Head:
    """The end of a call that was interrupted after its prefill."""
    zeros = dict.fromkeys(("cached_tokens", "queue_s", "prefill_s", "decode_s", "transfer_s"), 0)
    return {**zeros, **answer, "finish": Finish.INTERRUPTED}
