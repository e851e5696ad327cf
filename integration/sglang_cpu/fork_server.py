"""Imports SGLang once, then forks a process for each request on a Unix socket: `python fork_server.py SOCKET`.

A request is an interpreter's: `-c CODE`, environment, working directory, process group, and its three standard streams.
The child joins that process group, so that whoever started the interpreter can signal and measure it as its own. The
connection brings back how the child ended. Ends when its standard input ends; its children then end with their streams.
"""

import array
import contextlib
import gc
import json
import multiprocessing
import os
import random
import selectors
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

_FDS = 3


def preload() -> None:
    """Import all that servers need, and make multiprocessing fork instead of starting new interpreters."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.llama
    import sglang.srt.models.qwen3
    import sglang.srt.models.registry  # noqa: F401 - walks every model module

    # Objects that exist now never die: keeping the collector off their pages keeps these shared.
    gc.collect()
    gc.freeze()


def receive(connection: socket.socket) -> tuple[dict, list[int]]:
    """A request and the file descriptors that came with it."""
    fds = array.array("i")
    data, ancillary, _, _ = connection.recvmsg(1 << 20, socket.CMSG_LEN(_FDS * fds.itemsize))
    for level, kind, value in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(value[: len(value) - len(value) % fds.itemsize])
    while not data.endswith(b"\n"):
        data += connection.recv(1 << 20)
    return json.loads(data), list(fds)


def become(request: dict, fds: list[int]) -> None:
    """Be the interpreter that was asked for; never returns."""
    code = 1
    try:
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
            os.close(fd)
        os.setpgid(0, request["group"])
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        sys.argv = ["-c"]
        random.seed(os.getpid())
        exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class ForkServer:
    """Serves requests, one connection each."""

    def __init__(self, path: str) -> None:
        self._children: dict[int, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(sys.stdin, selectors.EVENT_READ, self._stop)
        self._running = True

    def run(self) -> None:
        """Until standard input ends."""
        while self._running:
            for key, _ in self._selector.select(0.05):
                key.data()
            self._reap()
        for pid in self._children:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        request, fds = receive(connection)
        pid = os.fork()
        if pid == 0:
            for mine in (self._listener, connection, *self._children.values()):
                mine.close()
            become(request, fds)
        for fd in fds:
            os.close(fd)
        self._children[pid] = connection

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection = self._children.pop(pid, None)
            if connection is not None:
                # Whoever asked may be gone.
                with contextlib.suppress(OSError):
                    connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
                connection.close()

    def _stop(self) -> None:
        if not os.read(0, 4096):
            self._running = False


def main() -> None:
    """Preload, say so, and serve."""
    began = time.monotonic()
    preload()
    server = ForkServer(sys.argv[1])
    print(f"ready after {time.monotonic() - began:.1f} s", flush=True)
    try:
        server.run()
    finally:
        Path(sys.argv[1]).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
