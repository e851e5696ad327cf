"""What each node of a cluster has, asked on the node itself: for `pearl-rl doctor --cluster`."""

import asyncio
import platform
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from pearl_executor.engines.sglang.launch import ASK_TRANSFER, ASK_VERSION
from pearl_executor.runtimes.ray.cluster import require_ray
from pearl_executor.runtimes.ray.nodes import on_node

_INTERPRETER_S: Final = 60.0
_REACH_S: Final = 5.0
_ANSWER_S: Final = 2 * _INTERPRETER_S + _REACH_S + 30.0
"""All questions, of which any may take its whole limit, and Ray's part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What to look for on every node."""

    paths: tuple[str, ...] = ()
    """Folders and files that should be there."""
    interpreter: tuple[str, ...] = ()
    """Command of a Python that should have SGLang; empty where none is needed."""
    listener: tuple[str, int] | None = None
    """Host and port of the driver that should be reachable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a node answered."""

    id: str
    host: str
    labels: Mapping[str, str]
    gpus: int
    error: str = ""
    """Why it did not answer; the fields below are then empty."""
    python: str = ""
    ray: str = ""
    pearl: str = ""
    """Version of pearl-executor."""
    missing: tuple[str, ...] = ()
    """Paths of the questions that are not there."""
    sglang: str = ""
    """Version of SGLang, or what is wrong with the interpreter."""
    transfer: str = ""
    """Why Mooncake cannot be used there; empty where it can."""
    reaches_driver: bool = True


async def survey(questions: Questions) -> list[NodeFacts]:
    """Ask every living node of the cluster that this process is connected to."""
    nodes = [node for node in await asyncio.to_thread(require_ray().nodes) if node["Alive"]]
    return list(await asyncio.gather(*(_ask(node, questions) for node in nodes)))


async def _ask(node: Mapping[str, Any], questions: Questions) -> NodeFacts:
    known: dict[str, Any] = {
        "id": node["NodeID"],
        "host": node["NodeManagerAddress"],
        "labels": node.get("Labels", {}),
        "gpus": int(node["Resources"].get("GPU", 0)),
    }
    ray = require_ray()
    try:
        async with asyncio.timeout(_ANSWER_S):
            answer = await on_node(ray.remote(look), node["NodeID"], questions)
    except TimeoutError:
        return NodeFacts(**known, error=f"no answer within {_ANSWER_S:g} s")
    except ray.exceptions.RayError as error:
        line = next(iter(reversed(str(error).strip().splitlines())), type(error).__name__)
        return NodeFacts(**known, error=line)
    return NodeFacts(**known, **answer)


def look(questions: Questions) -> dict[str, Any]:
    """Answer on the node that this runs on."""
    return {
        "python": platform.python_version(),
        "ray": metadata.version("ray"),
        "pearl": metadata.version("pearl-executor"),
        "missing": tuple(path for path in questions.paths if not Path(path).exists()),
        "sglang": (sglang := _sglang(questions.interpreter)),
        # What is wrong with the interpreter is said of its SGLang.
        "transfer": _transfer(questions.interpreter) if sglang[:1].isdigit() else "",
        "reaches_driver": _reaches(questions.listener),
    }


def _sglang(interpreter: Sequence[str]) -> str:
    if not interpreter:
        return ""
    try:
        done = _run(interpreter, ASK_VERSION)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{interpreter[0]} cannot be run ({type(error).__name__})"
    return done.stdout.strip() if done.returncode == 0 else f"{interpreter[0]} has no SGLang"


def _transfer(interpreter: Sequence[str]) -> str:
    try:
        done = _run(interpreter, ASK_TRANSFER)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{ASK_TRANSFER} does not end ({type(error).__name__})"
    if done.returncode == 0:
        return ""
    return next(iter(reversed(done.stderr.strip().splitlines())), "it cannot be imported")


def _run(interpreter: Sequence[str], code: str, limit_s: float = _INTERPRETER_S) -> "subprocess.CompletedProcess[str]":
    command = [part.replace("{name}", "doctor").replace("{gpus}", "") for part in interpreter]
    return subprocess.run([*command, "-c", code], capture_output=True, text=True, timeout=limit_s, check=False)


def _reaches(listener: tuple[str, int] | None) -> bool:
    if listener is None:
        return True
    try:
        socket.create_connection(listener, timeout=_REACH_S).close()
    except OSError:
        return False
    return True
