"""One SGLang server: what it holds, and the recipes that change it without killing it.

SGLang dies of a release while busy and of a second resume, and says of some failed updates nothing about what was
changed. So each change is made once, in a state that was verified before, and where its outcome is not known the
server is ended: a restarted worker is cheaper than a wrong one.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pearl_executor.engines.sglang import bodies
from pearl_executor.engines.sglang.client import RefusedError, SglangClient, UnreachableError
from pearl_executor.engines.sglang.flags import PD_ROLES, Ports
from pearl_executor.engines.sglang.launch import ServerProcess
from pearl_executor.engines.sglang.options import SglangOptions, SglangTimeouts
from pearl_executor.ports import MemoryReport, WorkerError, WorkerLostError
from pearl_state.roles import Role
from pearl_state.worker import WorkerId

PauseMode = Literal["abort", "retract", "in_place"]
WEIGHTS: Final = "weights"
CACHES: Final = ("kv_cache", "cuda_graph")
_POLL_S: Final = 0.05
_MODES: Final = {Role.COLOCATED: "null", Role.PREFILL: "prefill", Role.DECODE: "decode"}


@dataclass(slots=True, eq=False)
class SglangServer:
    """A server process as this side knows it. Every method raises `WorkerError`s only."""

    id: WorkerId
    incarnation: int
    role: Role
    gpus: str
    ports: Ports
    process: ServerProcess
    client: SglangClient
    options: SglangOptions
    timeouts: SglangTimeouts
    version: int | None = None
    """Weight version that it reported last; None before the first load and while its weights are released."""
    released: set[str] = field(default_factory=set[str])
    """Memory tags that are given back now."""
    ready: bool = False
    ending: bool = False
    """Told to end: its end is no loss."""
    epoch: int = 0
    """Grows whenever what peers know of its KV buffers is void: a flip, a resume."""
    open: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while requests may be sent to it."""
    _control: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __str__(self) -> str:
        return f"worker {self.id} (incarnation {self.incarnation})"

    @property
    def url(self) -> str:
        """Where it is spoken to."""
        host = f"[{self.options.host}]" if ":" in self.options.host else self.options.host
        return f"http://{host}:{self.ports.http}"

    @property
    def disaggregated(self) -> bool:
        """Whether it was launched for prefill or decode, between which it can change in place."""
        return self.role in PD_ROLES

    def lost(self, cause: str = "") -> WorkerLostError:
        """The error for a server that is gone or must go."""
        if not cause:
            cause = self.process.exited.result() if self.process.exited.done() else "it does not answer"
        return WorkerLostError(f"{self} is gone: {cause}", self.id)

    # ---- calls ------------------------------------------------------------------------------------------------------

    async def ask(self, path: str, *, timeout_s: float | None = None) -> Any:
        """`GET path`."""
        return await self.client.get(self.url + path, timeout_s=timeout_s or self.timeouts.control_s)

    async def tell(self, path: str, body: Mapping[str, Any], *, timeout_s: float | None = None) -> Any:
        """`POST path`."""
        return await self.client.post(self.url + path, body, timeout_s=timeout_s or self.timeouts.control_s)

    async def _lethal(self, path: str, body: Mapping[str, Any]) -> Any:
        """A call that must not be repeated: where no answer came, the server is given up."""
        try:
            return await self.tell(path, body)
        except UnreachableError as error:
            raise await self.give_up(f"the outcome of {path} is not known ({error})") from None
        except asyncio.CancelledError:
            # The caller cannot wait; the outcome will never be known.
            self.ending = True
            raise

    async def give_up(self, cause: str) -> WorkerLostError:
        """End the server now, and return the error to raise."""
        self.ending = True
        self.open.clear()
        await self.process.end(0.0)
        return self.lost(cause)

    # ---- life -------------------------------------------------------------------------------------------------------

    async def until_up(self, *, gated: bool) -> None:
        """Wait until a launched server could serve; open its gate first where it has one."""
        if gated:
            gate = self.url.rpartition(":")[0] + f":{self.ports.gate}"
            await self._until_answer(f"{gate}/health", "holding at its gate")
            await self.client.post(f"{gate}/gate/activate", {}, timeout_s=self.timeouts.control_s)
        await self._until_answer(f"{self.url}/ping", "up")
        facts = await self.ask("/model_info")
        if facts.get("disaggregation_mode") != ("decode" if self.disaggregated else "null"):
            raise WorkerError(f"{self} came up in mode {facts.get('disaggregation_mode')!r}")

    async def until_gate(self) -> None:
        """Wait until a gated server holds at its gate: imported, connected, and with nothing on the device."""
        gate = self.url.rpartition(":")[0] + f":{self.ports.gate}"
        await self._until_answer(f"{gate}/health", "holding at its gate")

    async def _until_answer(self, url: str, what: str) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self.timeouts.start_s
        while True:
            if self.process.exited.done():
                raise WorkerError(f"{self} did not start: {self.process.exited.result()}")
            try:
                await self.client.get(url, timeout_s=min(5.0, self.timeouts.start_s))
            except WorkerError:
                if loop.time() > until_s:
                    raise WorkerError(f"{self} is not {what} after {self.timeouts.start_s:g} s") from None
                await asyncio.wait([self.process.exited], timeout=2 * _POLL_S)
            else:
                return

    # ---- control sections -------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """One control section at a time; nobody sends requests meanwhile, nor while memory is released."""
        try:
            async with asyncio.timeout(self.timeouts.control_s):
                await self._control.acquire()
        except TimeoutError:
            raise WorkerError(f"{self}: another control call lasts longer than {self.timeouts.control_s:g} s") from None
        self.open.clear()
        try:
            yield
        finally:
            if self.ready and not self.released and not self.ending:
                self.open.set()
            self._control.release()

    async def pause(self, mode: PauseMode) -> None:
        """Hold the server's ingress."""
        await self.tell("/pause_generation", bodies.pause(mode))

    async def carry_on(self) -> None:
        """Undo a pause."""
        await self.tell("/continue_generation", {})

    async def flush(self, limit_s: float) -> None:
        """Empty the prefix cache, which also proves the server idle: it refuses while it holds a request anywhere."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + limit_s
        while True:
            try:
                await self.tell("/flush_cache", {})
            except RefusedError as error:
                if loop.time() >= until_s:
                    raise WorkerError(f"{self} is not idle after {limit_s:g} s: {error.message}") from None
                await asyncio.sleep(_POLL_S)
            except UnreachableError as error:
                raise self._lost_or(error) from None
            else:
                return

    def _lost_or(self, error: WorkerError) -> WorkerError:
        return self.lost() if self.process.exited.done() else error

    # ---- memory -----------------------------------------------------------------------------------------------------

    async def release(self, expected_bytes: int) -> MemoryReport:
        """Give weights, KV and graphs back. The report says how much of `expected_bytes` was measured to be free."""
        async with self.closed():
            if self.released:
                raise WorkerError(f"{self}: its memory is released already")
            await self.pause("in_place")
            try:
                await self.flush(self.timeouts.control_s)
                before = await self._used()
            except WorkerError:
                # As it was before; a release of a busy server would kill it.
                await self.carry_on()
                raise
            await self._lethal("/release_memory_occupation", bodies.tags(*CACHES, WEIGHTS))
            self.released = {*CACHES, WEIGHTS}
            self.version = None
            freed = before - await self._used_below(before - expected_bytes)
        return MemoryReport(expected_bytes, max(0, expected_bytes - freed))

    async def resume(self, expected_bytes: int) -> MemoryReport:
        """Take the memory of the weights again; caches follow with the weights themselves, to keep the peak low."""
        async with self.closed():
            if not self.released:
                raise WorkerError(f"{self}: its memory is not released")
            before = await self._used()
            await self.resume_memory(WEIGHTS)
            self.epoch += 1
            after = await self._used()
        held = min(expected_bytes, max(0, after - before))
        return MemoryReport(0, held)

    async def resume_memory(self, *tags: str) -> None:
        """Take the memory of those `tags` again that are released; a second time would kill the server."""
        wanted = [tag for tag in tags if tag in self.released]
        if wanted:
            await self._lethal("/resume_memory_occupation", bodies.tags(*wanted))
            self.released.difference_update(wanted)

    async def _used(self) -> int:
        return await self.process.used_bytes(self.options.memory_probe)

    async def _used_below(self, target: int) -> int:
        """Memory in use once it fell to `target`, or after a moment: an answered release may still be under way."""
        used = await self._used()
        for _ in range(10):
            if used <= target:
                break
            await asyncio.sleep(_POLL_S)
            used = await self._used()
        return used

    # ---- role -------------------------------------------------------------------------------------------------------

    async def flip(self, role: Role) -> None:
        """Change between prefill and decode in place. The prefix cache is empty afterwards."""
        async with self.closed():
            await self.resume_memory(*CACHES)
            await self.flush(self.timeouts.control_s)
            graph_gb = self.options.decode_graph_gb
            for prepare_only in (True, False):
                body = bodies.role_switch(role, graph_gb, prepare_only=prepare_only)
                await self._switch(body, role)
            mode = (await self.ask("/model_info")).get("disaggregation_mode")
            if mode != _MODES[role]:
                raise await self.give_up(f"it says {mode!r} after a change to {role}")
            self.role = role
            self.epoch += 1

    async def _switch(self, body: Mapping[str, Any], role: Role) -> None:
        try:
            await self._lethal("/pd_role_switch", body)
        except RefusedError as error:
            if error.answer.get("safe_to_restore"):
                raise WorkerError(f"{self}: cannot become {role}: {error.message}") from None
            raise await self.give_up(f"its change to {role} failed half-way ({error.message})") from None
