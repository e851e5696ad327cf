"""Poller: one place where a single-threaded process waits for its sockets."""

import selectors
import socket
from collections.abc import Callable

from pearl_executor.runtimes.local.frames import Frame, FrameSocket

OnFrame = Callable[[FrameSocket, Frame], None]


class Poller:
    """Waits for frame sockets and at most one listening socket; sends what they could not send before."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._sockets: dict[FrameSocket, tuple[OnFrame, int]] = {}
        self._accept: OnFrame | None = None

    def add(self, sock: FrameSocket, on_frame: OnFrame) -> None:
        """Watch `sock` until it is closed."""
        self._sweep()
        self._selector.register(sock, selectors.EVENT_READ)
        self._sockets[sock] = (on_frame, selectors.EVENT_READ)

    def listen(self, listener: socket.socket, on_frame: OnFrame) -> None:
        """Accept connections from `listener` and watch each with `on_frame`."""
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._accept = on_frame

    def wait(self, timeout_s: float) -> None:
        """Give every frame that arrives to its `on_frame`, waiting at most `timeout_s` for the first."""
        self._sweep()
        for sock, (on_frame, events) in self._sockets.items():
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if sock.has_unsent else 0)
            if wanted != events:
                self._selector.modify(sock, wanted)
                self._sockets[sock] = (on_frame, wanted)
        for key, mask in self._selector.select(max(0.0, timeout_s)):
            source = key.fileobj
            if isinstance(source, FrameSocket):
                self._attend(source, mask)
            elif isinstance(source, socket.socket):
                self._greet(source)

    def _attend(self, sock: FrameSocket, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            sock.flush()
        # An earlier frame of this round may have had the socket closed.
        if mask & selectors.EVENT_READ and sock in self._sockets:
            on_frame, _ = self._sockets[sock]
            for frame in sock.receive():
                on_frame(sock, frame)

    def _greet(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            # The peer gave up between its request and our accept.
            return
        assert self._accept is not None
        self.add(FrameSocket(connection), self._accept)

    def _sweep(self) -> None:
        for sock in [s for s in self._sockets if s.closed]:
            self._selector.unregister(sock)
            del self._sockets[sock]
