"""What runs in the Ray actor of an SGLang worker: it starts the server beside itself, and ends it for certain.

The server is a process of another interpreter. Its standard input is a pipe of this process: when this one ends,
whatever ends it, the server ends itself and its group.
"""

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import IO, Any, Final

from pearl_executor.engines.sglang.launch import SERVE, Place, free_ports, order_line, redacted
from pearl_executor.engines.sglang.memory import gpu_bytes, group_bytes
from pearl_executor.ports import WorkerError
from pearl_executor.runtimes.local.frames import Frame, FrameSocket, tcp_address
from pearl_executor.runtimes.local.polling import Poller

_LOOK_S: Final = 0.1


class ServerHost:
    """One server of this node, as the control plane's calls ask for it."""

    def __init__(self, channel: FrameSocket, arguments: dict[str, Any]) -> None:
        self._channel = channel
        address = tcp_address(arguments["listen"])
        self._host = address[0] if address is not None else "127.0.0.1"
        self._interpreter: list[str] = arguments["interpreter"]
        self._kill_command: list[str] = arguments["kill_command"]
        self._gpus: list[str] = arguments["devices"]
        self._child: subprocess.Popen[bytes] | None = None
        self._kill: list[str] = []
        self._pump: threading.Thread | None = None
        self._stopped = False
        self._poller = Poller()
        self._poller.add(channel, lambda _, frame: self._serve(frame))

    def run(self) -> None:
        """Serve until told to stop or the connection ends; then no server is left."""
        try:
            while not self._stopped and not self._channel.closed:
                self._poller.wait(_LOOK_S)
                if self._child is not None and self._child.poll() is not None:
                    self._channel.send({"op": "ended", "how": _how(self._child.returncode)})
                    self._end(0.0)
        finally:
            self._end(0.0)

    def _serve(self, frame: Frame) -> None:
        head = frame.head
        calls = {"place": self._place, "launch": self._launch, "used": self._used, "end": self._stop}
        try:
            answer = calls[head["op"]](head)
        except (OSError, ValueError, WorkerError) as error:
            answer = {"error": "refused", "message": str(error)}
        self._channel.send({"re": head["call"], **answer})

    def _place(self, head: dict[str, Any]) -> dict[str, Any]:
        del head
        http, bootstrap, gate = free_ports(self._host, 3)
        return asdict(Place(self._host, (http, bootstrap, gate), ",".join(self._gpus)))

    def _launch(self, head: dict[str, Any]) -> dict[str, Any]:
        command = [self._filled(part, head["name"]) for part in self._interpreter]
        self._kill = [self._filled(part, head["name"]) for part in self._kill_command]
        self._child = subprocess.Popen(
            [*command, "-c", SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with suppress(BrokenPipeError):
            self._child.stdin.write(order_line(head["args"], head["env"]))
            self._child.stdin.flush()
        descriptor, log = tempfile.mkstemp(prefix=f"pearl-sglang-{head['name']}-", suffix=".log")
        pump = threading.Thread(target=_copy, args=(self._child.stdout, os.fdopen(descriptor, "wb"), head["secrets"]))
        pump.daemon = True
        pump.start()
        self._pump = pump
        return {"pid": self._child.pid, "log": log}

    def _filled(self, part: str, name: str) -> str:
        return part.replace("{name}", name).replace("{gpus}", ",".join(self._gpus))

    def _used(self, head: dict[str, Any]) -> dict[str, Any]:
        if head["probe"] == "process":
            return {"bytes": group_bytes(self._child.pid) if self._child is not None else 0}
        return {"bytes": gpu_bytes(",".join(self._gpus))}

    def _stop(self, head: dict[str, Any]) -> dict[str, Any]:
        self._end(float(head["grace_s"]))
        self._stopped = True
        return {}

    def _end(self, grace_s: float) -> None:
        """SIGTERM and up to `grace_s` seconds, then SIGKILL to the server's group."""
        child, self._child = self._child, None
        if child is None:
            return
        if grace_s > 0:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGTERM)
            deadline_s = time.monotonic() + grace_s
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline_s - time.monotonic()))
        # Also where the leader is gone: its schedulers may not be.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        if self._kill:
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(self._kill, capture_output=True, timeout=10.0, check=False)
        child.wait()
        assert child.stdin is not None
        with suppress(BrokenPipeError):
            child.stdin.close()
        if self._pump is not None:
            self._pump.join(1.0)


def _copy(output: IO[bytes], log: IO[bytes], secrets: Sequence[str]) -> None:
    """Copy a server's output with the secrets taken out."""
    hidden = [secret.encode() for secret in secrets if secret]
    with output, log:
        for line in output:
            log.write(redacted(line, hidden))
            log.flush()


def _how(code: int) -> str:
    return f"it ended with signal {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}"


def main(channel: FrameSocket, arguments: dict[str, Any]) -> None:
    """Target of the actor."""
    devices = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    ServerHost(channel, {**arguments, "devices": devices}).run()
