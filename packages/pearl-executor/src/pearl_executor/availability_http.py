"""ControlServerSource: people offer and reclaim GPUs over loopback HTTP, with the commands of the control file.

curl -H "Authorization: Bearer $TOKEN" -d '{"offer": 2}' http://127.0.0.1:PORT/commands
curl -H "Authorization: Bearer $TOKEN" http://127.0.0.1:PORT/gpus
"""

import asyncio
import hmac
import ipaddress
import json
import secrets
from collections.abc import AsyncIterator, Iterable
from http import HTTPStatus
from typing import Any, Final

from pearl_executor.availability import AvailabilityEvent, CommandError, Commands
from pearl_state.events import GpusOffered
from pearl_state.worker import GpuId

_HEAD_LIMIT_BYTES: Final = 8 << 10
_BODY_LIMIT_BYTES: Final = 64 << 10
_REQUEST_TIMEOUT_S: Final = 5.0


class _RefusedError(Exception):
    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class ControlServerSource:
    """An `AvailabilitySource` that serves HTTP on loopback while its events are followed.

    `token` must come with each request; where none is given one is drawn (`self.token`). `port` 0 takes a free one;
    `url` says where it listens. Requests are answered one by one and end their connection.
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
        if not ipaddress.ip_address(host).is_loopback:
            raise ValueError(f"control server host is {host}; it may only listen on a loopback address (127.0.0.1)")
        if token is not None and len(token) < 8:
            raise ValueError("the control server's token is shorter than 8 characters; leave it out to have one drawn")
        self.token = token or secrets.token_urlsafe(16)
        self._host = host
        self._port = port
        self._commands = Commands(gpus, notice_s, node)
        self._queue: asyncio.Queue[AvailabilityEvent] = asyncio.Queue()
        self._url: asyncio.Future[str] | None = None

    async def url(self) -> str:
        """Where it listens; waits until `events` is followed."""
        return await asyncio.shield(self._announced())

    async def events(self) -> AsyncIterator[AvailabilityEvent]:
        """Serve until closed; gives what people ask for."""
        # Connections end by themselves within the request's time limit, so closing need not wait for them.
        server = await asyncio.start_server(self._connected, self._host, self._port, limit=_HEAD_LIMIT_BYTES)
        try:
            host, port = server.sockets[0].getsockname()[:2]
            self._announced().set_result(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
            while True:
                yield await self._queue.get()
        finally:
            server.close()

    def returned(self, gpus: frozenset[GpuId]) -> None:
        """Nothing of ours is left on `gpus`; those may be offered again."""
        self._commands.pool.returned(gpus)

    def _announced(self) -> "asyncio.Future[str]":
        if self._url is None:
            self._url = asyncio.get_running_loop().create_future()
        return self._url

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            try:
                async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                    status, answer = HTTPStatus.OK, await self._answer(reader)
            except _RefusedError as error:
                status, answer = error.status, {"error": str(error)}
            except TimeoutError:
                status, answer = HTTPStatus.REQUEST_TIMEOUT, {"error": f"no request within {_REQUEST_TIMEOUT_S:g} s"}
            body = json.dumps(answer).encode() + b"\n"
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                await writer.drain()
        except (OSError, TimeoutError):
            # The client is gone; what it asked for was done or refused all the same.
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> dict[str, Any]:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "no HTTP request, or its head is too long") from None
        request, *lines = head.split("\r\n")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        given = fields.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            raise _RefusedError(HTTPStatus.UNAUTHORIZED, "the header Authorization: Bearer TOKEN is missing or wrong")
        method, _, target = request.partition(" ")
        route = (method, target.partition(" ")[0].partition("?")[0])
        if route == ("GET", "/gpus"):
            return self._gpus()
        if route == ("POST", "/commands"):
            return self._carry_out(await _read_body(reader, fields))
        raise _RefusedError(HTTPStatus.NOT_FOUND, "there is GET /gpus and POST /commands")

    def _gpus(self) -> dict[str, Any]:
        pool = self._commands.pool
        return {"free": pool.free, "given": sorted(pool.given), "recalled": sorted(pool.recalled)}

    def _carry_out(self, body: bytes) -> dict[str, Any]:
        try:
            event = self._commands.event(json.loads(body), asyncio.get_running_loop().time())
        except CommandError as error:
            raise _RefusedError(HTTPStatus.CONFLICT, str(error)) from None
        except ValueError as error:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, f"the body is no JSON: {error}") from None
        self._queue.put_nowait(event)
        if isinstance(event, GpusOffered):
            return {"offered": sorted(event.gpus)}
        return {"reclaimed": sorted(event.gpus), "notice_s": event.deadline_s - event.now_s}


async def _read_body(reader: asyncio.StreamReader, fields: dict[str, str]) -> bytes:
    length = fields.get("content-length", "")
    if not length.isdecimal():
        raise _RefusedError(HTTPStatus.LENGTH_REQUIRED, "the header Content-Length is missing or no number")
    if int(length) > _BODY_LIMIT_BYTES:
        raise _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a command has at most {_BODY_LIMIT_BYTES} bytes")
    try:
        return await reader.readexactly(int(length))
    except asyncio.IncompleteReadError:
        raise _RefusedError(HTTPStatus.BAD_REQUEST, "the body is shorter than its Content-Length") from None
