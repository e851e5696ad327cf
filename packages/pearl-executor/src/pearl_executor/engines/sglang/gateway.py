"""SGLang's own gateway beside the run's router: its list of workers follows the worker table.

For those who run one already: other clients reach the serving workers through it. Rollout itself does not: the gateway
takes workers one by one and some time later, chooses the pair itself, and repeats requests unasked, while a group must
be admitted whole and an attempt have one owner. So what it lists is never ahead of the table, and may be a moment late.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Self

from pearl_executor.engines.sglang.client import SglangClient
from pearl_executor.ports import WorkerError
from pearl_state.roles import Role
from pearl_state.table import WorkerTable
from pearl_state.worker import Worker

_log = logging.getLogger(__name__)
_KINDS: Final = {Role.COLOCATED: "regular", Role.PREFILL: "prefill", Role.DECODE: "decode"}
_POLL_S: Final = 0.2


class GatewayError(WorkerError):
    """The gateway does not do what it was asked."""


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as a gateway knows it."""

    url: str
    role: Role
    bootstrap_port: int = 0
    """Of a prefill worker."""

    def body(self) -> dict[str, Any]:
        """`POST /workers`."""
        body: dict[str, Any] = {"url": self.url, "worker_type": _KINDS[self.role]}
        if self.role is Role.PREFILL:
            body["bootstrap_port"] = self.bootstrap_port
        return body


class GatewayMirror:
    """Keeps the list of the gateway at `url` in line with the table. Use as an async context manager.

    `locate` says where the server of a row listens; it raises `WorkerError` for one that is gone. A gateway that is not
    there, or does not take a worker, is tried again and holds nobody up; its list is looked at every `look_s` seconds.
    Workers that others entered stay; those of this run go at the end.
    """

    def __init__(
        self,
        url: str,
        locate: Callable[[Worker], Member],
        *,
        timeout_s: float = 10.0,
        settle_s: float = 15.0,
        look_s: float = 5.0,
    ) -> None:
        self._url = url.rstrip("/")
        self._locate = locate
        self._timeout_s = timeout_s
        self._settle_s = settle_s
        self._look_s = look_s
        # The workers' admin key is none of the gateway's business.
        self._client = SglangClient("")
        self._wanted: dict[str, Member] = {}
        self._entered: set[str] = set()
        """Addresses of this run's servers, past ones included: only these are ever removed."""
        self._changed = asyncio.Event()
        self._told = ""
        self._following: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        self._following = asyncio.get_running_loop().create_task(self._follow())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._following is not None
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        self._wanted = {}
        try:
            await self._bring()
        except WorkerError as error:
            _log.warning("%s still lists workers of this run: %s", self._url, error)
        await self._client.__aexit__(*exc)

    def apply(self, table: WorkerTable) -> None:
        """Have the gateway list those that serve in `table`, soon."""
        wanted: dict[str, Member] = {}
        for id_ in table.active():
            row = table.rows[id_]
            if row.role in _KINDS:
                try:
                    member = self._locate(row)
                except WorkerError:
                    # Its loss is on the way to the table.
                    continue
                wanted[member.url] = member
        if wanted != self._wanted:
            self._wanted = wanted
            self._changed.set()

    async def _follow(self) -> None:
        while True:
            # Also where nothing changed: a gateway that was started anew has forgotten everybody.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._look_s):
                    await self._changed.wait()
            self._changed.clear()
            try:
                await self._bring()
                self._told = ""
            except WorkerError as error:
                if str(error) != self._told:
                    self._told = str(error)
                    _log.warning("the gateway's list is not up to date: %s", error)

    async def _bring(self) -> None:
        """Bring the list in line with what is wanted now. Raises `WorkerError`."""
        wanted = self._wanted
        self._entered |= wanted.keys()
        listed = await self._listed()
        for url in sorted(self._entered & listed.keys()):
            entry = listed[url]
            if url not in wanted or entry.get("worker_type") != _KINDS[wanted[url].role]:
                await self._client.delete(f"{self._url}/workers/{entry['id']}", timeout_s=self._timeout_s)
        await self._until(lambda now: not _differing(wanted, now, self._entered & now.keys()), wanted)
        for url, member in wanted.items():
            if url not in await self._listed():
                await self._client.post(f"{self._url}/workers", member.body(), timeout_s=self._timeout_s)
        await self._until(lambda now: wanted.keys() <= now.keys(), wanted)
        self._entered &= wanted.keys()

    async def _until(self, holds: Callable[[Mapping[str, Any]], bool], wanted: Mapping[str, Member]) -> None:
        """Wait until the list is as it should be: changes are taken at once and made later."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._settle_s
        while not holds(now := await self._listed()):
            if loop.time() > until_s:
                missing = sorted(f"{m.url} as {_KINDS[m.role]}" for url, m in wanted.items() if url not in now)
                what = f"does not list {', '.join(missing)}; is it one for" if missing else "keeps workers that left"
                hint = " disaggregated workers, where these are?" if missing else ""
                raise GatewayError(f"{self._url} {what}{hint} (after {self._settle_s:g} s)")
            await asyncio.sleep(_POLL_S)

    async def _listed(self) -> dict[str, dict[str, Any]]:
        """Address → entry, of all workers that the gateway has."""
        answer = await self._client.get(f"{self._url}/workers", timeout_s=self._timeout_s)
        try:
            return {str(entry["url"]): dict(entry) for entry in answer["workers"]}
        except (KeyError, TypeError, ValueError) as error:
            raise GatewayError(f"{self._url}/workers cannot be understood ({error!r})") from None


def _differing(wanted: Mapping[str, Member], now: Mapping[str, Any], urls: "set[str]") -> bool:
    """Whether one of `urls` is listed in another role than is wanted, or not wanted at all."""
    return any(url not in wanted or now[url].get("worker_type") != _KINDS[wanted[url].role] for url in urls)
