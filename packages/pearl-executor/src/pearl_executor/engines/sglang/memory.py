"""Measures the device memory of a server: what a release really gave back."""

import asyncio
import subprocess
from pathlib import Path

from pearl_executor.engines.sglang.options import MemoryProbe
from pearl_executor.ports import WorkerError

_SMI_S = 10.0


async def used_bytes(probe: MemoryProbe, pid: int, gpus: str) -> int:
    """Bytes that the server uses now. Raises `WorkerError` where that cannot be measured."""
    if probe is MemoryProbe.PROCESS:
        return group_bytes(pid)
    return await asyncio.to_thread(gpu_bytes, gpus)


def group_bytes(pid: int) -> int:
    """Anonymous resident memory of all processes in the group that `pid` leads (Linux)."""
    total = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            group = int((entry / "stat").read_text().rpartition(")")[2].split()[2])
            if group == pid:
                total += _anonymous((entry / "status").read_text())
        except (OSError, ValueError, IndexError):
            # It ended while we looked.
            continue
    return total


def _anonymous(status: str) -> int:
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def gpu_bytes(gpus: str) -> int:
    """Memory in use on GPUs, comma-separated as nvidia-smi names them. Raises `WorkerError` where it does not say."""
    command = ("nvidia-smi", f"--id={gpus}", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_S, check=True)
        return sum(int(line) for line in done.stdout.split()) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise WorkerError(f"nvidia-smi does not say how much memory GPUs {gpus} use: {error}") from None
