"""Frames: how processes of a run talk. A JSON head with a binary body, length-prefixed, over a Unix socket or TCP.

An address is the path of a Unix socket, or `tcp://host:port` where processes live on several machines.

Nothing that comes from a socket is ever unpickled. A frame is two big-endian lengths (head, body), the head as UTF-8
JSON object, then the body. `FrameSocket` is for a process with a loop of its own, `channels.Channel` for asyncio.
"""

import json
import socket
import struct
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_LENGTHS: Final = struct.Struct("!II")
HEAD_LIMIT_BYTES: Final = 16 << 20
BODY_LIMIT_BYTES: Final = 1 << 30
_READ_BYTES: Final = 1 << 18
_TCP: Final = "tcp://"


class FrameError(ValueError):
    """Bytes that are no frame: too long, or a head that is no JSON object."""


def tcp_address(address: str | Path) -> tuple[str, int] | None:
    """Host and port of a `tcp://` address; None for the path of a Unix socket."""
    text = str(address)
    if not text.startswith(_TCP):
        return None
    host, _, port = text.removeprefix(_TCP).rpartition(":")
    return host.strip("[]"), int(port)


def tcp_text(host: str, port: int) -> str:
    """The address of `host` and `port`."""
    return f"{_TCP}[{host}]:{port}" if ":" in host else f"{_TCP}{host}:{port}"


def listen(address: str) -> tuple[socket.socket, str]:
    """A listening socket, and the address under which it is reached (port 0 becomes a free one). Raises `OSError`."""
    tcp = tcp_address(address)
    if tcp is not None:
        family = socket.AF_INET6 if ":" in tcp[0] else socket.AF_INET
        listener = socket.create_server(tcp, family=family)
        return listener, tcp_text(tcp[0], listener.getsockname()[1])
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener, address


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    head: dict[str, Any]
    body: bytes = b""


def encode_frame(head: dict[str, Any], body: bytes | bytearray | memoryview = b"") -> bytes:
    """The bytes of one frame. Raises `FrameError` where a part is over its limit."""
    text = json.dumps(head, separators=(",", ":")).encode()
    _check_lengths(len(text), len(body))
    return b"".join((_LENGTHS.pack(len(text), len(body)), text, body))


class FrameDecoder:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Add bytes; returns the frames that are complete now. Raises `FrameError`, after which the stream is lost."""
        buffer = self._buffer
        buffer += data
        frames: list[Frame] = []
        start = 0
        while len(buffer) - start >= _LENGTHS.size:
            head_bytes, body_bytes = _LENGTHS.unpack_from(buffer, start)
            _check_lengths(head_bytes, body_bytes)
            head_start = start + _LENGTHS.size
            body_start = head_start + head_bytes
            end = body_start + body_bytes
            if len(buffer) < end:
                break
            frames.append(Frame(_parse_head(bytes(buffer[head_start:body_start])), bytes(buffer[body_start:end])))
            start = end
        if start:
            del buffer[:start]
        return frames


def _check_lengths(head_bytes: int, body_bytes: int) -> None:
    if head_bytes > HEAD_LIMIT_BYTES or body_bytes > BODY_LIMIT_BYTES:
        raise FrameError(
            f"a frame of {head_bytes} + {body_bytes} bytes is over the limit of {HEAD_LIMIT_BYTES} + {BODY_LIMIT_BYTES}"
        )


def _parse_head(text: bytes) -> dict[str, Any]:
    try:
        head = json.loads(text)
    except ValueError as error:
        raise FrameError(f"a frame's head is no JSON: {error}") from None
    if not isinstance(head, dict):
        raise FrameError("a frame's head is no JSON object")
    return head


class FrameSocket:
    """A non-blocking socket that sends and receives frames; for use with a selector.

    What the kernel does not take at once is kept and sent by later `flush` calls, so that no peer can block the caller.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._decoder = FrameDecoder()
        self._unsent: deque[memoryview] = deque()
        self.closed = False
        """The peer hung up, sent garbage, or `close` was called. What was received before is still valid."""

    @classmethod
    def connect(cls, address: str | Path, timeout_s: float = 10.0) -> "FrameSocket":
        """Connect to whoever listens at `address`. Raises `OSError`."""
        tcp = tcp_address(address)
        if tcp is not None:
            connection = socket.create_connection(tcp, timeout=timeout_s)
            # Frames are small and answer each other: none may wait for the next.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return cls(connection)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(str(address))
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something to do."""
        return bool(self._unsent)

    def send(self, head: dict[str, Any], body: bytes | bytearray | memoryview = b"") -> None:
        """Send a frame, or keep what the kernel does not take. Nothing happens on a closed socket."""
        if self.closed:
            return
        self._unsent.append(memoryview(encode_frame(head, body)))
        self.flush()

    def flush(self) -> None:
        """Send what is kept, as far as the kernel takes it."""
        while self._unsent and not self.closed:
            data = self._unsent[0]
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                return
            except OSError:
                self.close()
                return
            if sent < len(data):
                self._unsent[0] = data[sent:]
            else:
                self._unsent.popleft()

    def receive(self) -> list[Frame]:
        """The frames that have arrived; `closed` is set where the peer is gone."""
        frames: list[Frame] = []
        while not self.closed:
            try:
                data = self._socket.recv(_READ_BYTES)
                frames += self._decoder.feed(data)
            except BlockingIOError:
                return frames
            except (OSError, FrameError):
                self.close()
                return frames
            if not data:
                self.close()
            elif len(data) < _READ_BYTES:
                return frames
        return frames

    def drain(self, timeout_s: float) -> None:
        """Send all that is kept, blocking, for at most about `timeout_s`; for a process about to exit."""
        if self.closed:
            return
        self._socket.settimeout(timeout_s)
        try:
            while self._unsent:
                self._socket.sendall(self._unsent.popleft())
        except OSError:
            self.close()
        else:
            self._socket.setblocking(False)

    def close(self) -> None:
        """Close the socket; unsent frames are dropped."""
        self.closed = True
        self._unsent.clear()
        self._socket.close()
