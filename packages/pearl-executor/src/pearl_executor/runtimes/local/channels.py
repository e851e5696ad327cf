"""The asyncio side of a frame connection: calls with a deadline, notices, and a listener that children connect to."""

import asyncio
import itertools
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from pearl_executor.runtimes.local.frames import Frame, FrameDecoder, FrameError, encode_frame, tcp_text
from pearl_executor.tracing import trace_headers

_HELLO_TIMEOUT_S: Final = 10.0
_SOCKET_PATH_LIMIT: Final = 90
"""A Unix socket's path may have 107 bytes; some are left for names in the folder."""


class ChannelError(Exception):
    """A call over a channel did not get its answer."""


class ChannelClosedError(ChannelError):
    """The other process is gone."""


class CallTimeoutError(ChannelError):
    """The other process lives but did not answer in time."""


class RemoteError(ChannelError):
    """The other process refused or failed. `kind` is its word for why."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Channel(asyncio.Protocol):
    """One frame connection. Frames with `re` answer a call; all others are notices, kept until `attach`."""

    def __init__(self) -> None:
        self._on_notice: Callable[[Frame], None] | None = None
        self._on_closed: Callable[[], None] | None = None
        self._backlog: list[Frame] = []
        self.heard_s = 0.0
        """Loop time at which bytes last arrived."""
        self._transport: asyncio.Transport | None = None
        self._decoder = FrameDecoder()
        self._calls: dict[int, asyncio.Future[Frame]] = {}
        self._numbers = itertools.count(1)
        self._closed = False
        self._loop = asyncio.get_running_loop()

    @property
    def closed(self) -> bool:
        """Whether the other process is gone."""
        return self._closed

    def attach(self, on_notice: Callable[[Frame], None], on_closed: Callable[[], None]) -> None:
        """Give every notice, also those that came before, to `on_notice`, and the end of the connection to `on_closed`.

        Both are called inside the event loop and must not block; `on_closed` is called once, now if it is over already.
        Attaching again replaces them.
        """
        self._on_notice, self._on_closed = on_notice, on_closed
        backlog, self._backlog = self._backlog, []
        for frame in backlog:
            on_notice(frame)
        if self._closed:
            on_closed()

    def detach(self) -> None:
        """Keep notices again until the next `attach`."""
        self._on_notice = self._on_closed = None

    def notify(self, head: Mapping[str, Any], body: bytes | bytearray = b"") -> None:
        """Send a frame that gets no answer. Raises `ChannelClosedError`."""
        if self._closed or self._transport is None:
            raise ChannelClosedError("the connection is closed")
        self._transport.write(encode_frame(dict(head), body))

    async def call(
        self, op: str, arguments: Mapping[str, Any] | None = None, body: bytes = b"", *, timeout_s: float
    ) -> Frame:
        """Ask for `op` and return the answer. Raises a `ChannelError`; a late answer is dropped."""
        number = next(self._numbers)
        future: asyncio.Future[Frame] = self._loop.create_future()
        self.notify({"op": op, "call": number, **(arguments or {}), **trace_headers()}, body)
        self._calls[number] = future
        try:
            async with asyncio.timeout(timeout_s):
                answer = await future
        except TimeoutError:
            raise CallTimeoutError(f"no answer to {op!r} within {timeout_s:g} s") from None
        finally:
            self._calls.pop(number, None)
        error = answer.head.get("error")
        if error is not None:
            raise RemoteError(str(error), str(answer.head.get("message", "")))
        return answer

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()
        self._lose()

    # ---- asyncio.Protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is up."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.heard_s = self._loop.time()

    def data_received(self, data: bytes) -> None:
        """Bytes arrived."""
        self.heard_s = self._loop.time()
        try:
            frames = self._decoder.feed(data)
        except FrameError:
            # After a bad frame nothing can be made of the stream: the process counts as lost.
            self.close()
            return
        for frame in frames:
            number = frame.head.get("re")
            if number is None and self._on_notice is not None:
                self._on_notice(frame)
            elif number is None:
                self._backlog.append(frame)
            else:
                future = self._calls.get(number)
                if future is not None and not future.done():
                    future.set_result(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        del exc
        self._lose()

    def _lose(self) -> None:
        if self._closed:
            return
        self._closed = True
        for future in self._calls.values():
            if not future.done():
                future.set_exception(ChannelClosedError("the process hung up"))
        if self._on_closed is not None:
            self._on_closed()


class Listener:
    """A Unix socket in a private folder. Each child connects and names itself by a secret it was given.

    With `host` it listens on TCP at that address of this machine instead, for children elsewhere.
    """

    def __init__(self, host: str | None = None) -> None:
        self.folder = _private_folder()
        self.path = self.folder / "parent"
        self.address = str(self.path)
        """Where children connect to; known after `open`."""
        self._host = host
        self._server: asyncio.Server | None = None
        self._expected: dict[str, asyncio.Future[Channel]] = {}
        self._unnamed: set[Channel] = set()

    async def open(self) -> None:
        """Start to listen."""
        loop = asyncio.get_running_loop()
        if self._host is None:
            self._server = await loop.create_unix_server(self._accept, str(self.path))
            return
        self._server = await loop.create_server(self._accept, self._host, 0)
        self.address = tcp_text(self._host, self._server.sockets[0].getsockname()[1])

    def expect(self) -> tuple[str, asyncio.Future[Channel]]:
        """A new secret for one child, and the future that becomes its channel. Cancel the future to withdraw it."""
        secret = secrets.token_hex(16)
        future: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        self._expected[secret] = future
        future.add_done_callback(lambda _: self._expected.pop(secret, None))
        return secret, future

    async def aclose(self) -> None:
        """Stop listening and remove the folder."""
        for future in list(self._expected.values()):
            future.cancel()
        for channel in list(self._unnamed):
            channel.close()
        if self._server is not None:
            self._server.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _accept(self) -> Channel:
        channel = Channel()
        self._unnamed.add(channel)
        loop = asyncio.get_running_loop()
        deadline = loop.call_later(_HELLO_TIMEOUT_S, channel.close)

        def named(frame: Frame) -> None:
            deadline.cancel()
            self._unnamed.discard(channel)
            channel.detach()
            future = self._expected.get(str(frame.head.get("hello")))
            if future is None or future.done():
                channel.close()
            else:
                future.set_result(channel)

        def closed() -> None:
            deadline.cancel()
            self._unnamed.discard(channel)

        channel.attach(named, closed)
        return channel


def _private_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="pearl-"))
    if len(os.fsencode(folder)) <= _SOCKET_PATH_LIMIT:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="pearl-", dir="/tmp"))
