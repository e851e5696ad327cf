"""ControlServerSource: people offer and reclaim GPUs over loopback HTTP, with the commands of the control file.

curl -H "Authorization: Bearer $TOKEN" -d '{"offer": 2}' http://127.0.0.1:PORT/commands
curl -H "Authorization: Bearer $TOKEN" http://127.0.0.1:PORT/gpus
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from http import HTTPStatus
from typing import Any

from pearl_executor.availability import AvailabilityEvent, CommandError, Commands
from pearl_executor.loopback_http import (
    LoopbackServer,
    RefusedError,
    Request,
    Response,
    as_json,
    is_loopback,
    new_token,
)
from pearl_state.events import GpusOffered
from pearl_state.worker import GpuId


class CommandSource:
    """An `AvailabilitySource` that people's commands feed, whoever brings them: `{"offer": 2}`, `{"reclaim": [4]}`."""

    def __init__(self, *, gpus: Iterable[int], notice_s: float = 30.0, node: str = "") -> None:
        self._commands = Commands(gpus, notice_s, node)
        self._queue: asyncio.Queue[AvailabilityEvent] = asyncio.Queue()

    async def events(self) -> AsyncIterator[AvailabilityEvent]:
        """What people ask for, until closed."""
        while True:
            yield await self._queue.get()

    def returned(self, gpus: frozenset[GpuId]) -> None:
        """Nothing of ours is left on `gpus`; those may be offered again."""
        self._commands.pool.returned(gpus)

    def gpus(self) -> dict[str, Any]:
        """The pool: which GPUs are free, given out, and asked back."""
        pool = self._commands.pool
        return {"free": pool.free, "given": sorted(pool.given), "recalled": sorted(pool.recalled)}

    def carry_out(self, command: Any) -> dict[str, Any]:
        """Do what a command asks for, and say what that was. Raises `CommandError`."""
        event = self._commands.event(command, asyncio.get_running_loop().time())
        self._queue.put_nowait(event)
        if isinstance(event, GpusOffered):
            return {"offered": sorted(event.gpus)}
        return {"reclaimed": sorted(event.gpus), "notice_s": event.deadline_s - event.now_s}


class ControlServerSource(CommandSource):
    """An `AvailabilitySource` that serves HTTP on loopback while its events are followed.

    `token` must come with each request; where none is given one is drawn (`self.token`). `port` 0 takes a free one;
    `url` says where it listens.
    """

    def __init__(
        self,
        *,
        gpus: Iterable[int],
        port: int = 0,
        host: str = "127.0.0.1",
        token: str | None = None,
        notice_s: float = 30.0,
        node: str = "",
    ) -> None:
        super().__init__(gpus=gpus, notice_s=notice_s, node=node)
        if not is_loopback(host):
            raise ValueError(f"control server host is {host}; it may only listen on a loopback address (127.0.0.1)")
        if token is not None and len(token) < 8:
            raise ValueError("the control server's token is shorter than 8 characters; leave it out to have one drawn")
        self.token = token or new_token()
        self._server = LoopbackServer(self._handle, host=host, port=port)
        self._url: asyncio.Future[str] | None = None

    async def url(self) -> str:
        """Where it listens; waits until `events` is followed."""
        return await asyncio.shield(self._announced())

    async def events(self) -> AsyncIterator[AvailabilityEvent]:
        """Serve until closed; gives what people ask for."""
        try:
            self._announced().set_result(await self._server.start())
            async for event in super().events():
                yield event
        finally:
            self._server.close()

    def _announced(self) -> "asyncio.Future[str]":
        if self._url is None:
            self._url = asyncio.get_running_loop().create_future()
        return self._url

    async def _handle(self, request: Request) -> Response:
        if not request.holds_token(self.token):
            raise RefusedError(HTTPStatus.UNAUTHORIZED, "the header Authorization: Bearer TOKEN is missing or wrong")
        if (request.method, request.path) == ("GET", "/gpus"):
            return as_json(self.gpus())
        if (request.method, request.path) == ("POST", "/commands"):
            return as_json(carried_out(self, await request.body()))
        raise RefusedError(HTTPStatus.NOT_FOUND, "there is GET /gpus and POST /commands")


def carried_out(source: CommandSource, body: bytes) -> dict[str, Any]:
    """Carry a command out that came as JSON. Raises `RefusedError`."""
    try:
        return source.carry_out(json.loads(body))
    except CommandError as error:
        raise RefusedError(HTTPStatus.CONFLICT, str(error)) from None
    except ValueError as error:
        raise RefusedError(HTTPStatus.BAD_REQUEST, f"the body is no JSON: {error}") from None
