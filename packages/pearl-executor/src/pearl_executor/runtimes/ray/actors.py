"""What runs inside a Ray actor: one target of the run's processes, connected to the run as a forked child would be."""

import asyncio
import importlib
import os
import random
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pearl_executor.preemption.notice import NoticeSource
from pearl_executor.preemption.sources import notice_source
from pearl_executor.runtimes.local.frames import FrameSocket

if TYPE_CHECKING:
    import numpy as np

NODE_ADDRESS: Final = "tcp://node:0"
"""In arguments: a free port at the address of the node that the child turns out to be on."""
_KEPT_SNAPSHOTS: Final = 3


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where an actor's process is."""

    pid: int
    started: str
    """When the process started, in the kernel's ticks: its id may be another's later, both together are not."""
    node: str
    host: str
    """The node's address in the cluster."""
    gpus: tuple[str, ...]
    """Ids of the node's GPUs that Ray lets this process see."""


class TargetFailedError(Exception):
    """The target raised; the text is its error in one line."""


class ChildActor:
    """One child of the run. Calls other than `run` and `hold` answer beside it, in threads of their own."""

    def describe(self) -> Whereabouts:
        """Where this process is."""
        import ray

        context = ray.get_runtime_context()
        gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        pid = os.getpid()
        return Whereabouts(pid, _started(pid), context.get_node_id(), ray.util.get_node_ip_address(), gpus)

    def hold(self) -> None:
        """Never returns: whoever waits for it learns of this process's end."""
        threading.Event().wait()

    def run(
        self,
        target: str,
        parent: str,
        secret: str,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        host: str = "",
    ) -> None:
        """Connect to `parent` and run `target` until it ends; `host` is where it may listen, empty for its node's.

        Raises `TargetFailedError`.
        """
        os.environ.update(environment)
        random.seed()
        host = host or self.describe().host
        own = {key: f"tcp://{host}:0" if value == NODE_ADDRESS else value for key, value in arguments.items()}
        channel = FrameSocket.connect(parent)
        try:
            channel.send({"hello": secret})
            module, _, name = target.partition(":")
            getattr(importlib.import_module(module), name)(channel, own)
            channel.drain(1.0)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            line = next(iter(str(error).strip().splitlines()), "")
            raise TargetFailedError(f"{type(error).__name__}: {line}") from None
        finally:
            channel.close()

    def stage(self, run: str, snapshot: str, names: Sequence[str], *contents: "np.ndarray[Any, Any]") -> str:
        """Put files that came through the object store on this node's disk, once a node. Returns their folder."""
        return str(store_files(node_folder(run), snapshot, names, contents))


def node_folder(run: str) -> Path:
    """Where a run keeps weights on each node."""
    return Path(tempfile.gettempdir()) / f"pearl-{run}"


def store_files(folder: Path, snapshot: str, names: Sequence[str], contents: "Sequence[np.ndarray[Any, Any]]") -> Path:
    """Write `contents` as `folder/snapshot/names`, whole or not at all; older snapshots than the newest few go.

    Several processes of a node may do it at the same time: the first one's files stay.
    """
    final = folder / snapshot
    if final.is_dir():
        return final
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".partial-{snapshot}-", dir=folder))
    try:
        for name, content in zip(names, contents, strict=True):
            file = partial / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.data)
        partial.rename(final)
    except OSError:
        if not final.is_dir():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    kept = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for old in kept[:-_KEPT_SNAPSHOTS]:
        shutil.rmtree(old, ignore_errors=True)
    return final


class NodeWatcher:
    """Hears of its node's preemption where the provider tells only the node itself."""

    def first(self, kind: str, notice_s: float, base: str) -> tuple[float, str]:
        """Wait for the first notice of source `kind`: seconds until the node goes, and the provider's words."""
        return asyncio.run(_first_notice(notice_source(kind, notice_s=notice_s, base=base)))


async def _first_notice(source: NoticeSource) -> tuple[float, str]:
    async with aclosing(source.notices()) as notices:
        async for notice in notices:
            if notice.leaves_in_s is not None:
                return notice.leaves_in_s, notice.reason
    raise RuntimeError("the source of notices ended without one")


class NodeWarden:
    """Stands for its node: answers the heartbeat, and ends processes for certain.

    Ray calls an actor dead as soon as it asked for its end; a process that is stopped or stuck may live on.
    """

    def beat(self) -> None:
        """Say that the node is there: an answer is all."""

    def clean(self, run: str) -> None:
        """Remove what a run kept on this node."""
        shutil.rmtree(node_folder(run), ignore_errors=True)

    def end(self, pid: int, started: str, limit_s: float) -> bool:
        """SIGKILL for the process, unless it is gone. Returns whether it is gone within `limit_s`, in seconds."""
        deadline_s = time.monotonic() + limit_s
        pause = threading.Event()
        while _started(pid) == started:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                return True
            if time.monotonic() >= deadline_s:
                return False
            pause.wait(0.01)
        return True


def _started(pid: int) -> str:
    """The kernel's ticks at which a process started; empty where it is gone, or dead and not yet reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
