"""All training ranks of one run as child processes, and calls to all of them together. No torch in this process."""

import asyncio
import contextlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pearl_executor.ports import WorkerError, WorkerLostError
from pearl_executor.runtimes.local.channels import ChannelError, RemoteError
from pearl_executor.runtimes.local.frames import Frame
from pearl_executor.runtimes.local.processes import ChildProcess, ProcessError, ProcessServer

_STOP_TIMEOUT_S: Final = 5.0
_DEATH_NOTICE_S: Final = 2.0
"""When one rank dies, the others' collectives may fail first: so long the dead one is waited for, to be named."""

_INCARNATIONS = itertools.count(1)
"""Names of processes are unique within their fork server, whichever trainer they belong to."""

Message = tuple[Mapping[str, Any], bytes]
"""Arguments and body of a call to one rank."""


class TrainerError(WorkerError):
    """Training could not do what it was asked; the message names the rank. Ranks that may differ now were ended."""


class TrainerLostError(TrainerError, WorkerLostError):
    """A rank's process is gone, and with it the whole trainer: start anew from the newest checkpoint."""


class CheckpointLateError(TrainerError):
    """A checkpoint took longer than it may: the disk is slow, or a rank stands still, as the next update will say."""


class RankGroup:
    """N processes that only make sense together: one call at a time, to all; when one fails, all are ended.

    A failure inside a collective leaves the other ranks in unknown states, so nothing is kept of them.
    """

    def __init__(self, forks: ProcessServer, ranks: int) -> None:
        self.ranks = ranks
        self._forks = forks
        self._children: list[ChildProcess] = []
        self._lost: str | None = "it was not started"
        self._busy: str | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, by rank; empty where none lives."""
        return tuple(child.pid for child in self._children)

    @property
    def address(self) -> str:
        """Where a rank may listen for others; `tcp://` where ranks may be on several machines."""
        return self._forks.peer_address("train")

    @property
    def lost(self) -> str | None:
        """Why no rank lives; None where they do."""
        return self._lost

    async def spawn(self, target: str, arguments: Mapping[str, Any]) -> None:
        """Start all ranks afresh; each gets `rank` and `ranks` too. Raises `TrainerError`, leaving none."""
        await self.kill()
        incarnation = next(_INCARNATIONS)
        try:
            for rank in range(self.ranks):
                name = f"train{rank:03d}-{incarnation:03d}"
                own = {**arguments, "rank": rank, "ranks": self.ranks}
                self._children.append(await self._forks.spawn(name, target, own, gpus=(rank,)))
        except BaseException as error:
            await asyncio.shield(self.kill())
            if isinstance(error, ProcessError):
                raise TrainerError(f"cannot start training: {error}") from error
            raise
        self._lost = None

    async def call_all(self, op: str, arguments: Mapping[str, Any], timeout_s: float) -> list[Frame]:
        """The same call to every rank. Answers come by rank."""
        return await self.call_each(op, [(arguments, b"")] * self.ranks, timeout_s)

    async def call_each(self, op: str, messages: Sequence[Message], timeout_s: float) -> list[Frame]:
        """Call every rank with its own message. On any failure, cancellation included, all ranks are ended.

        Raises `TrainerLostError` naming a rank that died or did not answer within `timeout_s`, `TrainerError` naming
        one that failed, or where another call is running (which then goes on).
        """
        if self._lost is not None:
            raise TrainerLostError(f"{op}: the trainer is not running: {self._lost}")
        if self._busy is not None:
            raise TrainerError(f"{op}: the ranks are busy with {self._busy!r}; one call at a time")
        self._busy = op
        calls = [
            asyncio.ensure_future(child.channel.call(op, head, body, timeout_s=timeout_s))
            for child, (head, body) in zip(self._children, messages, strict=True)
        ]
        try:
            await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            await asyncio.sleep(0)
            if any(_error(call) is not None or not call.done() for call in calls):
                raise await self._explain(op, calls)
            return [call.result() for call in calls]
        except BaseException as error:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            self._lost = str(error) or f"{op!r} was cancelled"
            await asyncio.shield(self.kill())
            raise
        finally:
            self._busy = None

    async def stop(self) -> None:
        """End all ranks in order, or for certain where one does not answer. No effect where none lives."""
        living = [child for child in self._children if not child.exited.done()]
        with contextlib.suppress(ChannelError, TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await asyncio.gather(*(child.channel.call("stop", timeout_s=_STOP_TIMEOUT_S) for child in living))
                await asyncio.gather(*(asyncio.shield(child.exited) for child in living))
        await self.kill()

    async def kill(self) -> None:
        """End all ranks for certain; returns when they are gone."""
        if self._lost is None:
            self._lost = "it was stopped"
        children, self._children = self._children, []
        await asyncio.gather(*(self._forks.kill(child) for child in children))
        for child in children:
            child.channel.close()

    async def _explain(self, op: str, calls: "Sequence[asyncio.Future[Frame]]") -> TrainerError:
        """Who is at fault: a rank that died before one that failed, that before one that is silent."""
        errors = [_error(call) for call in calls]
        if any(isinstance(error, RemoteError) for error in errors):
            # If it failed because another rank died, that death is about to be seen.
            exits = [child.exited for child in self._children]
            await asyncio.wait(exits, timeout=_DEATH_NOTICE_S, return_when=asyncio.FIRST_COMPLETED)
        for rank, child in enumerate(self._children):
            if child.exited.done() or child.channel.closed:
                await asyncio.wait([child.exited], timeout=_DEATH_NOTICE_S)
                return TrainerLostError(f"{op}: rank {rank} of {self.ranks} is gone: {child.how_it_ended()}")
        for rank, error in enumerate(errors):
            if isinstance(error, RemoteError):
                return TrainerError(f"{op}: rank {rank} of {self.ranks}: {error.kind}: {error}")
        # One stuck rank keeps the others in their collective: all that are silent are named.
        silent = ", ".join(str(rank) for rank, error in enumerate(errors) if error is not None)
        return TrainerLostError(f"{op}: {next(filter(None, errors), 'no answer')} (rank {silent} of {self.ranks})")


def _error(call: "asyncio.Future[Frame]") -> BaseException | None:
    return call.exception() if call.done() and not call.cancelled() else None


def prepare_folder(folder: Path) -> Path:
    """The ranks' folder, without an earlier group's meeting point. Returns where they meet."""
    folder.mkdir(parents=True, exist_ok=True)
    rendezvous = folder / "rendezvous"
    rendezvous.unlink(missing_ok=True)
    return rendezvous
