"""What a person chooses about SGLang workers. No I/O here."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from pearl_state.roles import Role
from pearl_state.worker import GpuId

VERSION: Final = "0.5.23"
"""The SGLang whose HTTP contract this package speaks. Others differ in what they answer, and in what kills them."""

INSTALL: Final = f"install it into an environment of its own: `uv pip install sglang=={VERSION}`"


class WeightTransport(StrEnum):
    """How new weights reach a server."""

    DISK = "disk"
    """The server reads the snapshot's folder; it keeps its old weights where that fails."""
    TENSOR = "tensor"
    """Tensors in shared memory (CUDA IPC on GPUs), inside a weight-update session."""
    IPC = "ipc"
    """One shared buffer a GPU, filled bucket by bucket: SGLang's side of checkpoint-engine."""
    DISTRIBUTED = "distributed"
    """A broadcast over a collective group of this version, inside a weight-update session."""


class MemoryProbe(StrEnum):
    """How released bytes are measured."""

    PROCESS = "process"
    """Anonymous resident memory of the server's processes: for engines on the CPU."""
    NVIDIA_SMI = "nvidia-smi"
    """Used memory of the worker's GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangOptions:
    """How SGLang workers are started and served."""

    interpreter: tuple[str, ...]
    """A Python that has SGLang, as a command: `("/opt/sglang/bin/python",)`, or a container's. `{name}` stands for the
    worker's name, `{gpus}` for its GPUs."""
    model_dir: Path
    host: str = "127.0.0.1"
    """Address that servers bind and are reached at. PD over several nodes needs a routable one."""
    device: str = "cuda"
    dtype: str = "auto"
    kv_tokens: int = 0
    """Tokens whose KV one worker holds; 0 lets SGLang fill the memory fraction."""
    memory_fraction: float = 0.0
    """Of a GPU's memory, for weights and KV; 0 leaves it to SGLang."""
    max_running: int = 256
    prefill_chunk_tokens: int = 0
    """0 leaves it to SGLang."""
    transfer_backend: str = "mooncake"
    """KV hand-over; only mooncake and mooncake_tcp know role switches and memory release."""
    load_format: str = "auto"
    """"dummy" skips the first reading of weights, which every worker replaces before it serves."""
    weights: WeightTransport = WeightTransport.DISK
    weight_backend: str = "nccl"
    """Of the collective group: "nccl", or "gloo" on CPUs."""
    memory_probe: MemoryProbe = MemoryProbe.NVIDIA_SMI
    held: tuple[frozenset[GpuId], ...] = ()
    """GPUs of the workers whose servers are started at once and held before they take device memory: training lends
    these GPUs later, and a first borrow shall not wait for a cold start."""
    held_role: Role = Role.COLOCATED
    """What held servers are launched for; prefill and decode servers are launched alike."""
    decode_graph_gb: float | None = None
    """Memory for decode graphs that a first flip to decode may capture; None where decode launches captured them."""
    gpus_per_worker: int = 1
    extra_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    kill_command: tuple[str, ...] = ()
    """Ends a container whose client process is gone: `("docker", "kill", "{name}")`."""
    open_ports: bool = False
    """Whether a server may listen on addresses other than loopback and `host`; otherwise it is ended for it."""
    verify_checksum: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `ValueError` for what no worker could be started with."""
        if not self.interpreter:
            raise ValueError("engine.sglang.interpreter is empty: name the Python that has SGLang; " + INSTALL)
        if not is_address(self.host):
            raise ValueError(
                f'engine.sglang.host = "{self.host}": is no IP address, and what listens elsewhere is found by that; '
                'use one like "127.0.0.1"'
            )
        if self.transfer_backend not in ("mooncake", "mooncake_tcp"):
            raise ValueError(
                f'engine.sglang.transfer_backend = "{self.transfer_backend}": cannot change roles in place nor release '
                'memory under disaggregation; use "mooncake" or "mooncake_tcp"'
            )


def is_address(host: str) -> bool:
    """Whether `host` is an IP address as the kernel's tables name it, so that listeners can be compared with it."""
    try:
        return str(ipaddress.ip_address(host)) == host
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangTimeouts:
    """Bounds on every wait, seconds. Each names its cause when it expires."""

    start_s: float = 600.0
    control_s: float = 120.0
    """One control call: pause, flush, role change, weight update, release, resume."""
    generate_s: float = 1800.0
    stop_s: float = 10.0
    poll_s: float = 1.0
    """Between two looks at a server's load."""
    silence_s: float = 30.0
    """Without an answer for so long a server counts as hung and is killed."""
    handover_s: float = 2.0
    """How long an interruption lets a hand-over go on."""
    grace_s: float = 1.0
    """Between an abort and the moment its stream is closed from this side."""
    versions_s: float = 20.0
    """How long a pair waits for both sides to hold the same weights."""
