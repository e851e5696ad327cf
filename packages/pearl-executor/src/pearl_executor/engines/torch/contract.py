"""What the engine takes and gives, beside the ports' own types. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum

from pearl_executor.engines.torch.blob import KvBlob
from pearl_executor.ports import GenerateResult, TokenChunk, WorkerError


class EngineError(WorkerError):
    """The engine refuses what it was asked, and is as it was before."""


class RequestRefusedError(EngineError):
    """A request that this engine could never serve as it is."""


class NotIdleError(EngineError):
    """An operation that only an idle engine allows, while requests are in it."""


class WeightsRefusedError(EngineError):
    """A snapshot that does not fit, is older than what is loaded, or does not match its checksum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Sizes that one engine never exceeds."""

    max_running: int
    """Requests in prefill or decode at a time; more wait."""
    kv_tokens: int
    """Tokens whose KV the engine can hold: of live requests and of kept prefixes together."""
    prefill_chunk_tokens: int
    """Prompt tokens computed in one prefill iteration, over all its requests."""
    max_context_tokens: int
    """Longest prompt + response of one request."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a size below 1."""
        for item in fields(self):
            if getattr(self, item.name) < 1:
                raise ValueError(f"EngineLimits.{item.name} = {getattr(self, item.name)}: must be at least 1")


class Phase(StrEnum):
    """What an iteration computed."""

    PREFILL = "prefill"
    DECODE = "decode"
    IDLE = "idle"
    """Nothing: at most aborted requests were reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What one iteration produced, by request id. A request is in at most one of `finished` and `exported`."""

    phase: Phase
    chunks: Mapping[str, TokenChunk] = field(default_factory=dict)
    """New tokens. A finished request's last token is here too."""
    finished: Mapping[str, GenerateResult] = field(default_factory=dict)
    """Requests that ended. `transfer_s` is 0: whoever moved the KV knows it."""
    exported: Mapping[str, KvBlob] = field(default_factory=dict)
    """On a prefill worker: requests to hand over to a decode worker. Their first token is in `chunks`."""
    compute_s: float = 0.0
    """What the iteration took here, seconds."""
    paced_s: float = 0.0
    """What is missing until the emulated device would be done, seconds. The host waits that long."""
