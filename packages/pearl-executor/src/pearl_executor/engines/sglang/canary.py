"""Canaries: before a (prefill, decode) pair serves, one tiny request must get through it.

A pair can look healthy and hang: after a prefill worker's role or memory changed, a surviving decode server may still
send to a port that nobody reads.
"""

import asyncio
import secrets
from dataclasses import dataclass, field

from pearl_executor.engines.sglang.generation import Calls
from pearl_executor.engines.sglang.journal import Journal
from pearl_executor.engines.sglang.server import SglangServer
from pearl_executor.ports import GenerateRequest, Sampling, TransferError, WorkerError
from pearl_state.roles import Role
from pearl_state.worker import WorkerId

_PROMPT_TOKENS = 8
_VOCABULARY = 128
"""Token ids that every model has."""

Slots = tuple[WorkerId, WorkerId]
Lives = tuple[int, int, int, int]
"""Incarnation and epoch of the prefill and of the decode server."""


@dataclass(slots=True)
class Canaries:
    """Which pairs were seen to work, and the check of those that were not."""

    calls: Calls
    journal: Journal
    _proven: dict[Slots, Lives] = field(default_factory=dict[Slots, Lives])
    """Of two slots only the newest lives that were seen to work together: older ones never come back."""
    _trying: dict[tuple[Slots, Lives], asyncio.Task[None]] = field(
        default_factory=dict[tuple[Slots, Lives], "asyncio.Task[None]"]
    )

    async def check(self, server: SglangServer, living: list[SglangServer]) -> int:
        """Try every pair of `server` with a living counterpart. Returns how many were tried.

        Raises `TransferError` for the first pair that does not hand over.
        """
        other = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}.get(server.role)
        peers = [s for s in living if s.role is other and not s.released and s is not server]
        pairs = [(server, p) if server.role is Role.PREFILL else (p, server) for p in peers]
        # One that is just being brought to other weights is tried when the pair is first used.
        fresh = [(p, d) for p, d in pairs if not self._is_proven(p, d) and p.version == d.version]
        await asyncio.gather(*(self.prove(*pair) for pair in fresh))
        return len(fresh)

    async def prove(self, prefill: SglangServer, decode: SglangServer) -> None:
        """Return once this pair was seen to work. Raises `TransferError` where it does not."""
        if self._is_proven(prefill, decode):
            return
        key = _slots(prefill, decode), _lives(prefill, decode)
        trying = self._trying.get(key)
        if trying is None:
            trying = self._trying[key] = asyncio.create_task(self._try(prefill, decode))
            trying.add_done_callback(lambda task: self._tried(key, task))
        # Whoever gives up waiting leaves the canary to the others.
        await asyncio.shield(trying)

    def _is_proven(self, prefill: SglangServer, decode: SglangServer) -> bool:
        return self._proven.get(_slots(prefill, decode)) == _lives(prefill, decode)

    def _tried(self, key: tuple[Slots, Lives], task: "asyncio.Task[None]") -> None:
        del self._trying[key]
        if not task.cancelled() and task.exception() is None:
            slots, lives = key
            self._proven[slots] = lives

    async def _try(self, prefill: SglangServer, decode: SglangServer) -> None:
        prompt = [secrets.randbelow(_VOCABULARY) for _ in range(_PROMPT_TOKENS)]
        request = GenerateRequest(
            rid=f"canary-{secrets.token_hex(8)}", prompt=prompt, max_new_tokens=2, sampling=Sampling(temperature=0.0)
        )
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            result, _ = await self.calls.pair(prefill, decode, request, lambda _: None)
        except WorkerError as error:
            raise TransferError(f"canary from {prefill} to {decode}: {error}") from error
        if len(result.tokens) != 2:
            raise TransferError(f"canary from {prefill} to {decode} brought {len(result.tokens)} of 2 tokens")
        self.journal.write(
            "canary", prefill.id, prefill.incarnation, decode=decode.id, duration_s=loop.time() - began_s
        )


def _slots(prefill: SglangServer, decode: SglangServer) -> Slots:
    return prefill.id, decode.id


def _lives(prefill: SglangServer, decode: SglangServer) -> Lives:
    return prefill.incarnation, prefill.epoch, decode.incarnation, decode.epoch
