"""Ports: what executors, rollout and training need of a runtime. Local processes, Ray and simulation implement them.

A port never decides. Expected failures are `WorkerError`s; whoever calls puts a time limit around each call.
Workers are named by their table row, so that every call carries (slot, incarnation, role, GPUs); a runtime refuses
a row of an incarnation that is not the one it runs with `WorkerLostError`.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from pearl_state.events import GpusOffered, GpusReclaimed
from pearl_state.roles import Role
from pearl_state.samples import EngineSamples
from pearl_state.trajectory import WeightSpan
from pearl_state.worker import GpuId, Worker, WorkerId


class WorkerError(Exception):
    """A worker did not do what it was asked; it is otherwise as it was."""


class WorkerLostError(WorkerError):
    """The worker's process is gone, or is another incarnation than the one addressed."""

    def __init__(self, message: str = "", worker: WorkerId | None = None) -> None:
        super().__init__(message)
        self.worker = worker
        """Which one, where the call named two (`generate_pair`) and it is known."""


class TransferError(WorkerError):
    """A KV hand-over between prefill and decode worker failed; both live on."""


class ReleaseVerificationError(WorkerError):
    """A release gave back less memory than it must. The GPU is not handed over."""

    def __init__(self, worker: int, expected_bytes: int, released_bytes: int) -> None:
        super().__init__(f"worker {worker} released {released_bytes} bytes of device memory, expected {expected_bytes}")
        self.expected_bytes = expected_bytes
        self.released_bytes = released_bytes


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Device memory of one worker around a release or resume, measured, bytes."""

    before_bytes: int
    after_bytes: int


@dataclass(frozen=True, slots=True)
class WeightSnapshot:
    """A complete set of weights, by reference (PEARL section 5): the control plane holds no tensors."""

    version: int
    uri: str
    """Where a worker fetches it: a path for the local runtime, an object reference elsewhere."""
    bytes: int = 0
    checksum: str = ""
    """Digest of names, shapes and values; a worker that loaded the snapshot must report the same."""


class WorkerPort(Protocol):
    """Life and device state of rollout workers."""

    async def start(self, worker: Worker) -> None:
        """Start the process of this incarnation and build its engine for `worker.role`. Returns when it could serve."""
        ...

    async def stop(self, worker: Worker) -> None:
        """End the process in order; it holds nothing of the GPU afterwards. No effect where it is gone."""
        ...

    async def kill(self, worker: Worker) -> None:
        """End the process for certain, whatever it does; never raises for a process that is gone."""
        ...

    async def interrupt(self, worker: Worker) -> int:
        """End all its requests now: each returns its partial tokens with `Finish.INTERRUPTED`. Returns how many."""
        ...

    async def wait_idle(self, worker: Worker) -> None:
        """Return once the engine holds no request."""
        ...

    async def release(self, worker: Worker) -> MemoryReport:
        """Give weights and KV memory back, keep the process. Only on an idle engine; not repeatable."""
        ...

    async def resume(self, worker: Worker) -> MemoryReport:
        """Take device memory again after `release`. Weights are unusable until `load_weights`."""
        ...

    async def switch_role(self, worker: Worker, role: Role) -> None:
        """Change the role of an idle engine in place; its weights stay, its cache may go."""
        ...

    async def load_weights(self, worker: Worker, snapshot: WeightSnapshot) -> int:
        """Load a snapshot; generation in flight goes on with it. Returns the version the engine now reports."""
        ...

    async def refresh_peers(self, worker: Worker) -> None:
        """Renew what other workers know of this one's KV buffers (after resume or start under disaggregation)."""
        ...

    async def samples(self, worker: Worker) -> EngineSamples:
        """What the engine measured since the last call."""
        ...


class Finish(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    INTERRUPTED = "interrupted"
    """Aborted with partial tokens; resume it from its prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    """Seed of this request's own generator; a resumed request continues the sequence at its token position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One model call. `prompt` is the whole context, generated prefix of an interrupted call included."""

    rid: str
    """Unique per attempt, fixed width: `trajectory.turn.attempt`."""
    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    affinity: str = ""
    """Whose prefix this is (the trajectory's id), for prefix reuse."""
    position: int = 0
    """How many tokens of `prompt`'s end were generated by earlier attempts of this same call."""


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Newly generated tokens of one request, all from one weight version."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    version: int
    offset: int = -1
    """How many tokens this request generated before these, so that a delivery can be repeated safely; -1 where the
    runtime delivers in order and once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateResult:
    """The end of a model call. All tokens were also handed to `on_chunk` before."""

    finish: Finish
    tokens: Sequence[int]
    logprobs: Sequence[float]
    spans: tuple[WeightSpan, ...]
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache held."""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    transfer_s: float = 0.0


OnChunk = Callable[[TokenChunk], None]


class GenerationPort(Protocol):
    """Model calls. Raises `WorkerLostError` (resume elsewhere) or `TransferError` (retry); tokens seen stay valid."""

    async def generate(self, worker: Worker, request: GenerateRequest, on_chunk: OnChunk) -> GenerateResult:
        """Run the whole call on a colocated worker."""
        ...

    async def generate_pair(
        self, prefill: Worker, decode: Worker, request: GenerateRequest, on_chunk: OnChunk
    ) -> GenerateResult:
        """Prefill on one worker, hand the KV over, decode on the other."""
        ...

    async def abort(self, worker: Worker, rid: str) -> None:
        """End one request now; its call returns with `Finish.INTERRUPTED`."""
        ...


class TrainingPort(Protocol):
    """Device state of the training workers, all of them together."""

    async def release(self) -> MemoryReport:
        """Move model, gradients and optimizer state off the device, keep the processes. Measured over all ranks."""
        ...

    async def resume(self) -> MemoryReport:
        """Take the device memory again."""
        ...


class WeightSource(Protocol):
    """The newest complete weights."""

    def newest(self) -> WeightSnapshot:
        """The newest published snapshot."""
        ...


class AvailabilitySource(Protocol):
    """Says when rollout GPUs come and go. Ends when nothing will change any more."""

    def events(self) -> AsyncIterator[GpusOffered | GpusReclaimed]:
        """Offers and reclaims in order of time, each given when it happens."""
        ...

    def returned(self, gpus: frozenset[GpuId]) -> None:
        """Nothing of ours is left on `gpus`."""
        ...
