"""`pearl-rl doctor`: what this machine can run, what is missing, and how to get it. Imports nothing heavy."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from pearl_rl.errors import ExitCode

_GIB = 2**30
_NVIDIA_SMI_LIMIT_S = 10.0
_NEEDED_MEMORY_BYTES = 4 * _GIB
_NEEDED_DISK_BYTES = 1 * _GIB


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    ok: bool
    detail: str
    needed: bool = False
    """Whether the default job needs it."""
    remedy: str = ""
    """The command or the change that mends it; empty where it is ok."""


@dataclass(frozen=True, slots=True)
class _Package:
    module: str
    distribution: str
    purpose: str
    remedy: str
    needed: bool = False


_SYNC = "uv sync"
_PACKAGES = (
    _Package("torch", "torch", "embedded engine and training", _SYNC, needed=True),
    _Package("transformers", "transformers", "model code and weights", _SYNC, needed=True),
    _Package("tokenizers", "tokenizers", "tokenizer of the tiny model", _SYNC, needed=True),
    _Package("ray", "ray", "several machines", "uv sync --package pearl-rl --extra ray"),
    _Package("sglang", "sglang", "large models on GPUs", "in an environment of its own: docs/sglang.md"),
    _Package("gymnasium", "gymnasium", "Gymnasium-style environments", "uv sync --package pearl-rl --extra envs"),
    _Package("verifiers", "verifiers", "verifiers environments", "uv pip install verifiers"),
    _Package("opentelemetry.sdk", "opentelemetry-sdk", "exporting metrics and spans", _SYNC),
)


def examine(*, as_json: bool) -> ExitCode:
    """Print the findings. The exit code says whether the default job can run here."""
    return tell([*_machine(), *_packages(), *_gpus()], "pearl-rl train", as_json=as_json)


def tell(findings: Sequence[Finding], job: str, *, as_json: bool) -> ExitCode:
    """Print findings, and whether `job` can run with them; the exit code says so too."""
    missing = [finding.name for finding in findings if finding.needed and not finding.ok]
    if as_json:
        print(json.dumps({"train": not missing, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            mark = "ok" if finding.ok else ("MISSING" if finding.needed else "absent")
            remedy = f"  → {finding.remedy}" if finding.remedy else ""
            print(f"{mark:<7}  {finding.name:<{width}}  {finding.detail}{remedy}")
        print(f"\n{job} {'cannot run, for ' + ', '.join(missing) if missing else 'can run'}")
    return ExitCode.CONFIG if missing else ExitCode.OK


def _machine() -> Iterator[Finding]:
    yield Finding("python", sys.version_info >= (3, 11), f"{platform.python_version()}, {platform.platform()}", True)
    cores = usable_cores()
    yield Finding("cores", True, f"{cores:g} usable of {os.cpu_count()}")
    total, available = memory_bytes()
    enough = available >= _NEEDED_MEMORY_BYTES
    yield Finding(
        "memory",
        enough,
        f"{available / _GIB:.1f} GiB available of {total / _GIB:.1f} GiB" if total else "unknown",
        remedy="" if enough else f"free at least {_NEEDED_MEMORY_BYTES / _GIB:.0f} GiB for the default job",
    )
    free = shutil.disk_usage(Path.cwd()).free
    roomy = free >= _NEEDED_DISK_BYTES
    yield Finding("disk", roomy, f"{free / _GIB:.1f} GiB free here", remedy="" if roomy else "set run.dir elsewhere")


def _packages() -> Iterator[Finding]:
    for package in _PACKAGES:
        found = _present(package.module)
        number = ""
        with suppress(PackageNotFoundError):
            number = version(package.distribution) if found else ""
        detail = f"{number}, for {package.purpose}" if number else f"for {package.purpose}"
        yield Finding(package.module, found, detail, package.needed, "" if found else package.remedy)


def _present(module: str) -> bool:
    """Whether a module can be found, without importing it (its parents are, where it has any)."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _gpus() -> Iterator[Finding]:
    """The NVIDIA GPUs that the driver names."""
    tool = shutil.which("nvidia-smi")
    absent = "none; GPUs are emulated on the CPU"
    if tool is None:
        yield Finding("gpu", False, absent)
        return
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_NVIDIA_SMI_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding("gpu", False, f"nvidia-smi does not answer ({type(error).__name__})", remedy="check the driver")
        return
    names = [line.strip() for line in answer.stdout.splitlines() if line.strip()] if answer.returncode == 0 else []
    yield Finding("gpu", bool(names), f"{len(names)} × {names[0]}" if names else absent)


def usable_cores() -> float:
    """Cores that this process may use: its affinity, and the quota of its control group."""
    cores = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else float(os.cpu_count() or 1)
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        cores = min(cores, int(quota) / int(period))
    return cores


def memory_bytes() -> tuple[int, int]:
    """Memory of the machine or the control group, whichever is less: (total, available), bytes; zeros if unknown."""
    total = available = 0
    with suppress(OSError, ValueError, KeyError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        values = {key: int(rest.split()[0]) * 1024 for key, rest in (line.split(":", 1) for line in lines)}
        total, available = values["MemTotal"], values["MemAvailable"]
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
        total, available = min(total, limit), min(available, limit - used)
    return total, available
