"""A process that has imported torch already, and of which the fork servers of jobs begin as forks.

To start a job costs six seconds of processor time of which all but one are imports. A job that is killed hundreds of
times gets `executable` as its Python: where its fork server would be started, a fork of this process takes its place,
runs the same code, and ends like it when the job's control plane hangs up.
"""

import gc
import importlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

ZYGOTE = "pearl_executor.runtimes.local.zygote"
PRELOAD = (
    "pearl_executor.runtimes.local.torch_engine",
    "pearl_executor.runtimes.local.worker",
    "pearl_rl.training.rank",
)

_CLIENT = """
import json, os, socket, sys
path, _, _, *arguments = sys.argv[1:]
incubator = socket.socket(socket.AF_UNIX)
incubator.connect(path)
request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
socket.send_fds(incubator, [json.dumps(request).encode() + b"\\n"], [1, 2])
incubator.recv(1)
"""
"""What stands for a fork server in the process table of its control plane, as long as that lives."""


class Incubator:
    """The process, as a context manager. `folder` is its own, with a short path."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.executable = folder / "python"
        """A Python that starts fork servers as forks of this process, and everything else as usual."""

    def __enter__(self) -> "Incubator":
        self._folder.mkdir(parents=True, exist_ok=True)
        path, client, real = self._folder / "s", self._folder / "client.py", shlex.quote(sys.executable)
        client.write_text(_CLIENT)
        self.executable.write_text(
            f'#!/bin/sh\nif [ "$2" = {ZYGOTE} ]; then exec {real} -I -S {client} {path} "$@"; fi\nexec {real} "$@"\n'
        )
        self.executable.chmod(0o755)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dst.incubator", str(path)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid


def serve(path: str) -> None:
    """Fork for whoever asks, until killed."""
    for module in (ZYGOTE, *PRELOAD):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _become(connection)
            connection.close()


def _become(connection: socket.socket) -> None:
    """Be the fork server that was asked for; the connection ends with it."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        data, output, _, _ = socket.recv_fds(connection, 1 << 16, 2)
        while not data.endswith(b"\n"):
            data += connection.recv(1 << 16)
        request = json.loads(data)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        for number, file in enumerate(output, 1):
            os.dup2(file, number)
            os.close(file)
        code = importlib.import_module(ZYGOTE).main(request["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
