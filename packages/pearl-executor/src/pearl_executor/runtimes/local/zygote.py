"""The fork server's process: imports heavy modules once, then forks a child for each request.

Run as `python -m pearl_executor.runtimes.local.zygote SOCKET SECRET MODULE…`. It stays single-threaded, reaps its
children and reports how each ended. When its parent is gone it kills all children and ends; where it was stopped, the
kernel lets it go on for that (Linux). When it is gone itself, the kernel kills them (Linux). So no child outlives the
run, whatever happens to the parent.
"""

import ctypes
import gc
import importlib
import os
import random
import selectors
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from pearl_executor.runtimes.local.frames import Frame, FrameSocket

_PR_SET_PDEATHSIG: Final = 1
Target = Callable[[FrameSocket, dict[str, Any]], None]


class Zygote:
    """Forks children on request and watches them."""

    def __init__(self, path: str, secret: str) -> None:
        self._path = path
        self._control = FrameSocket.connect(path)
        self._control.send({"hello": secret})
        self._children: dict[str, int] = {}
        self._pid = os.getpid()
        self._libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        if self._libc is not None:
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)

    def preload(self, modules: list[str]) -> bool:
        """Import `modules`. Reports whether that worked."""
        try:
            for module in modules:
                importlib.import_module(module)
        except Exception as error:
            self._control.send({"op": "failed", "message": f"cannot import {module}: {error}"})
            self._control.drain(1.0)
            return False
        # Objects that exist now never die: keeping the collector off their pages keeps these shared with the children.
        gc.collect()
        gc.freeze()
        self._control.send({"op": "ready"})
        return True

    def run(self) -> None:
        """Serve until the parent hangs up; then no child is left."""
        wake_in, wake_out = os.pipe()
        os.set_blocking(wake_in, False)
        os.set_blocking(wake_out, False)
        signal.set_wakeup_fd(wake_out, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._control, selectors.EVENT_READ)
                selector.register(wake_in, selectors.EVENT_READ)
                while not self._control.closed:
                    selector.select()
                    with suppress(BlockingIOError):
                        os.read(wake_in, 4096)
                    self._reap()
                    for frame in self._control.receive():
                        self._serve(frame)
                    self._control.flush()
        finally:
            self._kill_all()

    def _serve(self, frame: Frame) -> None:
        head = frame.head
        if head["op"] == "spawn":
            pid = os.fork()
            if pid == 0:
                self._become_child(head)
            self._children[head["name"]] = pid
            self._control.send({"re": head["call"], "pid": pid})
        elif head["op"] == "kill":
            # Only a child that was not reaped yet is signalled: its pid cannot belong to another process.
            pid = self._children.get(head["name"], 0)
            if pid:
                os.kill(pid, head["signal"])
            self._control.send({"re": head["call"], "known": bool(pid)})

    def _reap(self) -> None:
        for name, pid in list(self._children.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self._children[name]
                self._control.send({"op": "exited", "name": name, "code": os.waitstatus_to_exitcode(status)})

    def _kill_all(self) -> None:
        for pid in self._children.values():
            os.kill(pid, signal.SIGKILL)
        for pid in self._children.values():
            os.waitpid(pid, 0)

    def _become_child(self, head: dict[str, Any]) -> None:
        code = 1
        try:
            self._detach(head["log"])
            os.environ.update(head["environment"])
            random.seed()
            channel = FrameSocket.connect(self._path)
            channel.send({"hello": head["secret"]})
            _resolve(head["target"])(channel, head["arguments"])
            channel.drain(1.0)
            code = 0
        except SystemExit as request:
            code = request.code if isinstance(request.code, int) else 1
        except BaseException:
            # Whatever it was: a child ends here, and never returns into the zygote's own loop.
            traceback.print_exc()
        finally:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            # No exit handlers: those that were registered belong to the zygote.
            os._exit(code)

    def _detach(self, log: str) -> None:
        """Let go of what is the zygote's, and die with it."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if self._libc is not None:
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._pid:
                os._exit(1)
        self._control.close()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)


def _resolve(target: str) -> Target:
    module, _, name = target.partition(":")
    function: Target = getattr(importlib.import_module(module), name)
    return function


def main(arguments: list[str]) -> int:
    """Entry point: socket path, secret, modules to import."""
    path, secret, *modules = arguments
    zygote = Zygote(path, secret)
    if not zygote.preload(modules):
        return 1
    zygote.run()
    # The parent removes the folder when it ends in order; when it was killed nobody else will.
    folder = Path(path).parent
    with suppress(OSError):
        for entry in folder.iterdir():
            entry.unlink()
        folder.rmdir()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
