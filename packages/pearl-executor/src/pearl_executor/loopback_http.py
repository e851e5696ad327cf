"""A small HTTP/1.1 server for people on this machine: requests are answered one by one and end their connection.

It guards what it serves: a token where one is wanted, and a `Host` that is this machine's, so that no page of the web
can reach it through a browser.
"""

import asyncio
import hmac
import ipaddress
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

_HEAD_LIMIT_BYTES: Final = 8 << 10
_BODY_LIMIT_BYTES: Final = 64 << 10
_REQUEST_TIMEOUT_S: Final = 5.0
_SAFE_HEADERS: Final = "".join(
    f"{line}\r\n"
    for line in (
        "Connection: close",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Referrer-Policy: no-referrer",
    )
)


class RefusedError(Exception):
    """A request that is not carried out: the status and one line that says why."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    """A request's head; its body is read when somebody asks for it."""

    method: str
    path: str
    """Without the query."""
    query: Mapping[str, str]
    fields: Mapping[str, str]
    """Header fields by their name in lower case."""
    reader: asyncio.StreamReader

    def holds_token(self, token: str) -> bool:
        """Whether it carries the token, in `Authorization: Bearer` or as the query's `token`."""
        given = self.fields.get("authorization", "").removeprefix("Bearer ") or self.query.get("token", "")
        return hmac.compare_digest(given.encode(), token.encode())

    async def body(self) -> bytes:
        """The whole body. Raises `RefusedError` where its length is not said, too long, or not kept."""
        length = self.fields.get("content-length", "")
        if not length.isdecimal():
            raise RefusedError(HTTPStatus.LENGTH_REQUIRED, "the header Content-Length is missing or no number")
        if int(length) > _BODY_LIMIT_BYTES:
            raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a command has at most {_BODY_LIMIT_BYTES} bytes")
        try:
            return await self.reader.readexactly(int(length))
        except asyncio.IncompleteReadError:
            raise RefusedError(HTTPStatus.BAD_REQUEST, "the body is shorter than its Content-Length") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A whole answer."""

    body: bytes
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class EventStream:
    """Server-sent events, one for each text of `messages` (without a line end), until they or the reader end."""

    messages: AsyncIterator[str]


Handle = Callable[[Request], Awaitable[Response | EventStream]]
"""Answers a request. Raises `RefusedError`."""


def as_json(value: Any) -> Response:
    """An answer in JSON."""
    return Response(body=json.dumps(value).encode() + b"\n")


def new_token() -> str:
    """A token that nobody guesses."""
    return secrets.token_urlsafe(16)


def is_loopback(host: str) -> bool:
    """Whether `host` is an address or the name of this machine's loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class LoopbackServer:
    """Serves `handle` on `host` and `port` (0: a free one) between `start` and `close`."""

    def __init__(self, handle: Handle, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._handle = handle
        self._host = host
        self._port = port
        self._server: asyncio.Server | None = None
        self._closing = asyncio.Event()
        self._open: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Begin to listen; returns the address. Raises `OSError` where the port is taken."""
        # Connections end by themselves within the request's time limit, so closing need not wait for them.
        self._server = await asyncio.start_server(self._connected, self._host, self._port, limit=_HEAD_LIMIT_BYTES)
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def close(self) -> None:
        """Listen no more, and let streams end. May be called twice."""
        self._closing.set()
        if self._server is not None:
            self._server.close()

    async def aclose(self) -> None:
        """Close, and wait until every connection has ended, which takes no longer than a request may."""
        self.close()
        if self._open:
            await asyncio.wait(self._open, timeout=2 * _REQUEST_TIMEOUT_S)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        try:
            status, answer = HTTPStatus.OK, await self._answer(reader)
        except RefusedError as error:
            status, answer = error.status, as_json({"error": str(error)})
        except TimeoutError:
            status, answer = (
                HTTPStatus.REQUEST_TIMEOUT,
                as_json({"error": f"no request within {_REQUEST_TIMEOUT_S:g} s"}),
            )
        except OSError:
            writer.close()
            return
        try:
            if isinstance(answer, Response):
                await _send(writer, status, answer)
            else:
                await _stream(reader, writer, answer, self._closing)
        except (OSError, TimeoutError):
            # The client is gone; what it asked for was done or refused all the same.
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> Response | EventStream:
        async with asyncio.timeout(_REQUEST_TIMEOUT_S):
            request = await _read_head(reader)
            if is_loopback(self._host):
                _check_origin(request)
            return await self._handle(request)


def _check_origin(request: Request) -> None:
    """Refuse what a page of another site made a browser send: DNS rebinding and cross-site requests."""
    host = urlsplit(f"//{request.fields.get('host', 'localhost')}").hostname or ""
    origin = request.fields.get("origin")
    foreign = origin is not None and not is_loopback(urlsplit(origin).hostname or "")
    if ("." in host and not is_loopback(host)) or foreign:
        raise RefusedError(HTTPStatus.FORBIDDEN, "this server answers only this machine's own pages and tools")


async def _read_head(reader: asyncio.StreamReader) -> Request:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        raise RefusedError(HTTPStatus.BAD_REQUEST, "no HTTP request, or its head is too long") from None
    first, *lines = head.split("\r\n")
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    method, _, rest = first.partition(" ")
    path, _, query = rest.partition(" ")[0].partition("?")
    return Request(method, path, {key: values[-1] for key, values in parse_qs(query).items()}, fields, reader)


async def _send(writer: asyncio.StreamWriter, status: HTTPStatus, answer: Response) -> None:
    extra = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\n{extra}{_SAFE_HEADERS}\r\n"
    )
    writer.write(head.encode() + answer.body)
    async with asyncio.timeout(_REQUEST_TIMEOUT_S):
        await writer.drain()


async def _stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: EventStream, closing: asyncio.Event
) -> None:
    """Send messages until they end, the listener goes away, or the server closes."""
    writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{_SAFE_HEADERS}\r\n".encode())
    # Whoever listens sends nothing more: reading ends when it goes away.
    endings = {asyncio.ensure_future(reader.read()), asyncio.ensure_future(closing.wait())}
    following: asyncio.Future[str | None] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(answer.messages, None))
            await asyncio.wait({*endings, following}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done() or (text := following.result()) is None:
                return
            writer.write(f"data: {text}\n\n".encode())
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                await writer.drain()
            if any(ending.done() for ending in endings):
                return
    finally:
        left = [task for task in (*endings, following) if task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
