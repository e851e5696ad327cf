"""A small HTTP/1.1 server that can break off at any byte. Standard library only."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True, slots=True)
class Request:
    """One request."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        """The body as a JSON object. Raises `ValueError`."""
        value = json.loads(self.body)
        if not isinstance(value, dict):
            raise ValueError("the body must be a JSON object")
        return value


@dataclass(slots=True)
class Response:
    """One answer; with `events`, a stream of server-sent events."""

    status: int = 200
    body: bytes = b""
    kind: str = "application/json"
    events: AsyncIterator[bytes] | None = None


def json_response(value: object, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(status, json.dumps(value).encode())


def error_response(message: str, status: int = 400) -> Response:
    """An error as SGLang's control endpoints give it."""
    return json_response({"object": "error", "message": message, "code": status}, status)


Handler = Callable[[Request], Awaitable[Response]]


@dataclass(slots=True)
class Faults:
    """What goes wrong on the next answers to a path."""

    drop_after_bytes: dict[str, int] = field(default_factory=dict[str, int])
    """Path → bytes of the next answer that still arrive; then the connection is gone. Once."""
    die_after_bytes: dict[str, int] = field(default_factory=dict[str, int])
    """Path → bytes of the next answer after which the whole process is gone."""
    hang: set[str] = field(default_factory=set[str])
    """Paths that do not answer any more."""


class HttpServer:
    """Serves one port until it is closed."""

    def __init__(self, handler: Handler, faults: Faults, die: Callable[[], None]) -> None:
        self._handler = handler
        self._faults = faults
        self._die = die
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def open(self, host: str, port: int) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=1 << 26)

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    def abort(self) -> None:
        """Stop listening and break every connection off, as the end of a process does."""
        self.close()
        for task, writer in list(self._connections.items()):
            writer.transport.abort()
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        # Cancelled is a connection only where the whole server ends; nobody waits for it.
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            while (request := await _read(reader)) is not None:
                if request.path in self._faults.hang:
                    await asyncio.Event().wait()
                response = await self._handler(request)
                await self._answer(request, response, reader, writer)
        del self._connections[task]
        writer.close()

    async def _answer(
        self, request: Request, response: Response, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        out = _Cutter(writer, self._faults, self._die, request.path)
        head = f"HTTP/1.1 {response.status} X\r\nContent-Type: {response.kind}\r\n"
        if response.events is None:
            await out.write(f"{head}Content-Length: {len(response.body)}\r\n\r\n".encode() + response.body)
            return
        await out.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        events = response.events
        hung_up = asyncio.ensure_future(reader.read(1))
        try:
            async for event in events:
                if hung_up.done():
                    raise ConnectionResetError
                await out.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
            await out.write(b"0\r\n\r\n")
        finally:
            hung_up.cancel()
            await asyncio.gather(hung_up, return_exceptions=True)
            # Closing the iterator tells the engine that nobody listens any more.
            await events.aclose()  # type: ignore[attr-defined]


class _Cutter:
    """Writes to a connection, and breaks it off where a fault says so."""

    def __init__(self, writer: asyncio.StreamWriter, faults: Faults, die: Callable[[], None], path: str) -> None:
        self._writer = writer
        self._die = die if path in faults.die_after_bytes else None
        left = faults.die_after_bytes.pop(path, None)
        self._left = faults.drop_after_bytes.pop(path, None) if left is None else left

    async def write(self, data: bytes) -> None:
        if self._left is None:
            self._writer.write(data)
            await self._writer.drain()
            return
        self._writer.write(data[: self._left])
        self._left -= len(data)
        if self._left <= 0:
            with suppress(ConnectionError):
                await self._writer.drain()
            if self._die is not None:
                self._die()
            self._writer.transport.abort()
            raise ConnectionResetError
        await self._writer.drain()


async def _read(reader: asyncio.StreamReader) -> Request | None:
    """The next request; None where the client is done."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    method, _, rest = first.partition(" ")
    target, _, protocol = rest.partition(" ")
    if not protocol.startswith("HTTP/1"):
        # A client that tries HTTP/2 first.
        return None
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)
    }
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    url = urlsplit(target)
    return Request(method, url.path, parse_qs(url.query), headers, body)
