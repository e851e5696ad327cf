"""What a worker process hosts: an engine behind a protocol, and how it is built there from plain JSON values.

The types mirror `pearl_executor.engines.torch.contract` structurally, so that neither the host nor a pure-Python engine
needs torch or numpy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pearl_executor.pacing import Pace
from pearl_executor.ports import GenerateRequest, GenerateResult, MemoryReport, TokenChunk
from pearl_executor.tracing import TracingRecipe
from pearl_state.roles import Role
from pearl_state.samples import EngineSamples

if TYPE_CHECKING:
    from os import PathLike

    from pearl_executor.engines.torch.contract import EngineLimits


class Blob(Protocol):
    """KV of one request in host memory."""

    @property
    def nbytes(self) -> int:
        """Bytes that a hand-over moves."""
        ...

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV is here."""
        ...

    def tail(self, start: int) -> "Blob":
        """The same without the KV of the first `start` tokens."""
        ...

    def to_bytes(self) -> bytes:
        """Self-describing bytes."""
        ...


class Output(Protocol):
    """What one iteration produced, by request id."""

    @property
    def chunks(self) -> Mapping[str, TokenChunk]:
        """New tokens."""
        ...

    @property
    def finished(self) -> Mapping[str, GenerateResult]:
        """Requests that ended."""
        ...

    @property
    def exported(self) -> Mapping[str, Blob]:
        """Requests to hand over."""
        ...

    @property
    def compute_s(self) -> float:
        """What the iteration took here, seconds."""
        ...

    @property
    def paced_s(self) -> float:
        """What is missing until the emulated device would be done, seconds."""
        ...


class HostedEngine(Protocol):
    """An engine as the host drives it: synchronous, one iteration at a time. Refusals are `WorkerError`s."""

    @property
    def role(self) -> Role:
        """The phase it runs."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to report."""
        ...

    def add(self, request: GenerateRequest, *, kv: Any = None) -> None:
        """Queue a request, or continue it from a hand-over."""
        ...

    def abort(self, rid: str | None) -> None:
        """End one request or all; the next `step` reports them."""
        ...

    def held_tokens(self, prompt: list[int], affinity: str) -> int:
        """First tokens of `prompt` whose KV is here already."""
        ...

    def step(self) -> Output:
        """One iteration."""
        ...

    def load_weights(self, path: str, version: int, checksum: str) -> int:
        """Load a snapshot; returns the version it holds now."""
        ...

    def release(self) -> MemoryReport:
        """Give device memory back."""
        ...

    def resume(self) -> MemoryReport:
        """Take device memory again."""
        ...

    def set_role(self, role: Role) -> None:
        """Change the role."""
        ...

    def take_samples(self) -> EngineSamples:
        """What was measured since the last call."""
        ...


class BlobReader(Protocol):
    """Reads a hand-over. Raises `TransferError` for damaged bytes."""

    def __call__(self, data: bytes) -> Blob:
        """The blob that `to_bytes` wrote."""
        ...


@dataclass(frozen=True, slots=True)
class Hosted:
    """What an engine factory returns."""

    engine: HostedEngine
    read_blob: BlobReader


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecipe:
    """How a worker process builds its engine."""

    factory: str
    """`module:function`, called in the worker as `function(settings, role) -> Hosted`."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """JSON values."""
    pace: Pace = field(default_factory=Pace)
    """Least durations of what the host does (start, hand-over, loading, …); the engine has its own copy."""
    preload: Sequence[str] = ()
    """Modules that the fork server imports once for all workers."""
    tracing: TracingRecipe | None = None
    """Who writes spans in the worker process; None for nobody."""


def torch_recipe(
    model_dir: "str | PathLike[str]",
    limits: "EngineLimits",
    pace: Pace | None = None,
    *,
    device: str = "cpu",
    threads: int = 1,
    seed: int = 0,
    weight_version: int | None = None,
) -> EngineRecipe:
    """Workers with the embedded torch engine. The arguments are those of `engines.torch.engine.Engine`."""
    settings = {
        "model_dir": str(model_dir),
        "limits": asdict(limits),
        "pace": asdict(pace or Pace()),
        "device": device,
        "threads": threads,
        "seed": seed,
        "weight_version": weight_version,
    }
    return EngineRecipe(
        factory="pearl_executor.runtimes.local.torch_engine:build",
        settings=settings,
        pace=pace or Pace(),
        preload=(
            "pearl_executor.runtimes.local.worker",
            "pearl_executor.runtimes.local.torch_engine",
            "transformers.models.qwen3.modeling_qwen3",
        ),
    )
