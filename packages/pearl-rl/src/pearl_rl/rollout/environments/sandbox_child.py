"""The program inside a sandbox process: `python -I -S sandbox_child.py LIMITS_JSON NAME=FILE...`.

Loads the named tool files, shuts the doors (resource limits, an audit hook that refuses network, new processes and
writing), says it is ready, then answers one request a line:

    {"id": 1, "tool": "run_tests", "argument": {...}, "latency_s": 0.2}
    {"id": 1, "value": {...}}  |  {"id": 1, "error": "ValueError: ..."}

Arguments are data and stay data: no shell is started, nothing of them is executed unless a tool does. Standard
library only; nothing of this project can be imported here. The end of standard input ends the process; where it cannot
read it, because it works or was stopped, the kernel ends it with its parent (Linux).
"""

import contextlib
import json
import os
import resource
import runpy
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

Tool = Callable[[dict[str, Any]], Any]

FORBIDDEN = (
    "socket.",
    "subprocess.",
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "os.kill",
    "os.putenv",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.chmod",
    "os.chown",
    "os.link",
    "os.symlink",
    "os.truncate",
    "shutil.",
    "ctypes.",
    "import",
)
"""Audit events (prefixes) that no tool needs. `import`: what a tool uses it has imported when it was loaded."""


_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent `parent` ends, also while it is stopped. Linux only."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # It ended before.
        os._exit(1)
    # Nobody needs it any more, and whoever imports it shall meet the audit hook.
    for name in ("ctypes", "ctypes._endian", "_ctypes"):
        sys.modules.pop(name, None)


def limit(limits: dict[str, int]) -> None:
    """Cap memory, files and processes; CPU time is capped anew for each request."""
    for name, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 16),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        # Not every system knows every limit (macOS refuses RLIMIT_AS); the others still hold.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(name, (value, value))


def allow_cpu(seconds: int) -> None:
    """Let the process use `seconds` more of CPU time; beyond that the kernel ends it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used_s = usage.ru_utime + usage.ru_stime
    resource.setrlimit(resource.RLIMIT_CPU, (round(used_s + seconds), resource.RLIM_INFINITY))


def close_doors() -> None:
    """Refuse what no tool needs, for good: an audit hook cannot be taken off."""

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and not _reads(arguments)
        if writes or event.startswith(FORBIDDEN):
            raise PermissionError(f"the sandbox refuses {event}")

    sys.addaudithook(refuse)


def _reads(arguments: tuple[Any, ...]) -> bool:
    mode, flags = arguments[1], arguments[2]
    if isinstance(mode, str):
        return not set(mode) & set("wax+")
    return not int(flags) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)


def answer(tools: dict[str, Tool], request: dict[str, Any], cpu_s: int, output_bytes: int) -> str:
    """One request's answer as a line. A tool runs at least `latency_s`: the test run's time."""
    end_s = time.monotonic() + float(request["latency_s"])
    allow_cpu(cpu_s)
    try:
        reply = json.dumps({"id": request["id"], "value": tools[request["tool"]](request["argument"])})
        if len(reply) > output_bytes:
            raise OverflowError(f"output of {len(reply)} bytes is above the limit of {output_bytes}")
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        reply = json.dumps({"id": request["id"], "error": text[:500]})
    # The process is the test machine: it is busy until the run ends.
    time.sleep(max(0.0, end_s - time.monotonic()))  # noqa: TID251
    return reply


def main() -> None:
    """Serve until standard input ends."""
    limits = json.loads(sys.argv[1])
    die_with(limits["parent"])
    files = dict(entry.split("=", 1) for entry in sys.argv[2:])
    tools: dict[str, Tool] = {name: runpy.run_path(file)["run"] for name, file in files.items()}
    requests, replies = sys.stdin, sys.stdout
    # A tool that prints must not break the protocol.
    sys.stdout = sys.stderr
    limit(limits)
    close_doors()
    print("ready", file=replies, flush=True)
    for line in requests:
        reply = answer(tools, json.loads(line), limits["cpu_s"], limits["output_bytes"])
        print(reply, file=replies, flush=True)


if __name__ == "__main__":
    main()
