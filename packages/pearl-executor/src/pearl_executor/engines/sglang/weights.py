"""Bringing a server to new weights, and proving that it holds them.

Requests are held meanwhile: a colocated server puts its running requests back in its queue and computes their KV anew;
under disaggregation they are aborted and resumed from their prefix, since their KV cannot come again from a prefill
server that has other weights by then. The prefix cache never outlives its weights.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pearl_executor.engines.sglang import bodies
from pearl_executor.engines.sglang.checksums import compare, expected_checksums, snapshot_checksum
from pearl_executor.engines.sglang.client import RefusedError
from pearl_executor.engines.sglang.journal import Journal
from pearl_executor.engines.sglang.options import SglangOptions
from pearl_executor.engines.sglang.server import CACHES, WEIGHTS, SglangServer
from pearl_executor.ports import WeightSnapshot, WorkerError, WorkerLostError

_KEPT_VERSIONS = 8
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class NotBegunError(WorkerError):
    """An update failed before the server was touched."""


class Transport(Protocol):
    """A way for weights to reach a server."""

    @property
    def keeps_old(self) -> bool:
        """Whether a refused update leaves the server with its old weights."""
        ...

    async def send(self, server: SglangServer, snapshot: WeightSnapshot) -> None:
        """Replace the weights of a paused server. Raises `WorkerError`."""
        ...


class DiskTransport:
    """The server reads the snapshot's folder, or a copy of it where it runs."""

    keeps_old = True

    async def send(self, server: SglangServer, snapshot: WeightSnapshot) -> None:
        """Have the server load the folder."""
        folder = await server.process.fetch(snapshot)
        await server.tell("/update_weights_from_disk", bodies.weights_from_disk(folder, snapshot.version))


@dataclass(slots=True)
class WeightLoader:
    """Loads snapshots into servers through one transport."""

    options: SglangOptions
    transport: Transport
    journal: Journal
    interrupt: Callable[[SglangServer], Awaitable[int]]
    """Ends the requests of a server, which return with their tokens."""
    _expected: dict[int, asyncio.Task[dict[str, str]]] = field(
        default_factory=dict[int, "asyncio.Task[dict[str, str]]"]
    )
    """Version → what SGLang must report for each parameter; of the newest versions."""
    _engines: dict[int, str] = field(default_factory=dict[int, str])
    """Version → the checksum that the first server reported for all its ranks."""

    async def load(self, server: SglangServer, snapshot: WeightSnapshot) -> int:
        """Load and verify. Returns the version that the server reports.

        Raises `WorkerError` where the server serves on with its old weights, `WorkerLostError` where it had to go.
        """
        expected = await self._expectation(snapshot)
        async with server.closed():
            parked = bool(server.released)
            await server.resume_memory(WEIGHTS)
            if not parked:
                await self._hold(server)
            await self._send(server, snapshot, parked=parked)
            digest = await self._verify(server, snapshot, expected)
            await server.resume_memory(*CACHES)
            await server.flush(server.timeouts.control_s)
            await server.carry_on()
            server.version = snapshot.version
        self.journal.write(
            "weights", server.id, server.incarnation, version=snapshot.version, role=server.role.value,
            checksum=digest, verified_against="snapshot" if expected else "other servers",
        )  # fmt: skip
        return snapshot.version

    async def _hold(self, server: SglangServer) -> None:
        if server.disaggregated:
            await self.interrupt(server)
            await server.pause("abort")
        else:
            await server.pause("retract")

    async def _send(self, server: SglangServer, snapshot: WeightSnapshot, *, parked: bool) -> None:
        try:
            await self.transport.send(server, snapshot)
        except WorkerLostError:
            raise
        except asyncio.CancelledError:
            if not self.transport.keeps_old:
                # Half of it may be new, and the session is still open: nothing may be sent there any more.
                server.ending = True
            raise
        except NotBegunError as error:
            # A parked server has no weights to go on with, but it is as it was: its load can be tried again.
            if not parked:
                await server.carry_on()
            raise WorkerError(f"{server}: kept its weights, {error}") from None
        except RefusedError as error:
            if parked or not self.transport.keeps_old:
                raise await server.give_up(f"its weights are in doubt ({error})") from None
            await server.carry_on()
            raise WorkerError(f"{server}: kept its weights, {error.message}") from None
        except WorkerError as error:
            raise await server.give_up(f"its weights are in doubt ({error})") from None

    async def _verify(self, server: SglangServer, snapshot: WeightSnapshot, expected: dict[str, str]) -> str:
        """Ask the server what it holds. Returns its checksum over all ranks."""
        reported = (await server.ask("/model_info")).get("weight_version")
        if reported != str(snapshot.version):
            raise await server.give_up(f"it reports weights {reported!r} after loading {snapshot.version}")
        if not self.options.verify_checksum:
            return ""
        answer = await server.tell("/weights_checker", bodies.checksum())
        digest = str(answer["per_engine_checksum"])
        problem = compare(answer["ranks"][0]["checksums"], expected) if expected else None
        first = self._engines.setdefault(snapshot.version, digest)
        if problem is None and digest != first:
            problem = f"checksum {digest}, another server's is {first}"
        if problem is not None:
            raise await server.give_up(f"it does not hold weights {snapshot.version}: {problem}")
        return digest

    async def _expectation(self, snapshot: WeightSnapshot) -> dict[str, str]:
        """What servers must report of a snapshot. Computed once, however many servers load it at the same time."""
        examined = self._expected.get(snapshot.version)
        if examined is None:
            examined = self._expected[snapshot.version] = asyncio.ensure_future(self._examine(snapshot))
            # Seen, also where every load that waits for it is given up.
            examined.add_done_callback(lambda task: task.cancelled() or task.exception())
            for kept in (self._expected, self._engines):
                for old in sorted(kept)[:-_KEPT_VERSIONS]:
                    del kept[old]
        try:
            return await asyncio.shield(examined)
        except WorkerError:
            self._expected.pop(snapshot.version, None)
            raise

    async def _examine(self, snapshot: WeightSnapshot) -> dict[str, str]:
        """Check the snapshot's own files, and compute what follows from them. Raises `WorkerError`."""
        folder = Path(snapshot.uri)
        whole = self.options.device == "cpu" and self.options.gpus_per_worker == 1
        dtype = _DTYPES.get(self.options.dtype)
        try:
            found = await asyncio.to_thread(snapshot_checksum, folder) if snapshot.checksum else ""
            expected = await asyncio.to_thread(expected_checksums, folder, dtype) if whole and dtype else {}
        except OSError as error:
            raise WorkerError(f"weights in {folder} cannot be read: {error}") from error
        if found != snapshot.checksum:
            raise WorkerError(f"weights in {folder} have checksum {found}, announced was {snapshot.checksum}")
        return expected
