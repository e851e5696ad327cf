"""ScriptedEngine: an engine without a model, for tests of hosts and control planes with real processes but no torch.

The next token is a digest of all tokens before it, so a continuation shows whether the whole prefix arrived. Roles,
hand-overs, weight versions, memory reports, pace and samples behave as the embedded engine's.
"""

import json
import time
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pearl_executor.pacing import Pace
from pearl_executor.ports import (
    Finish,
    GenerateRequest,
    GenerateResult,
    MemoryReport,
    TokenChunk,
    TransferError,
    WorkerError,
)
from pearl_executor.runtimes.local.hosting import EngineRecipe, Hosted
from pearl_state.roles import Role
from pearl_state.samples import DecodeSample, EngineSamples, PrefillSample
from pearl_state.trajectory import WeightSpan, merge_spans

VOCABULARY = 1000
_HELD_BYTES = 1 << 20


def scripted_recipe(
    pace: Pace | None = None, *, weight_version: int | None = 0, kv_bytes_per_token: int = 16
) -> EngineRecipe:
    """Workers with the scripted engine."""
    settings = {
        "pace": asdict(pace or Pace()),
        "weight_version": weight_version,
        "kv_bytes_per_token": kv_bytes_per_token,
    }
    return EngineRecipe(
        factory="pearl_executor.runtimes.local.scripted:build",
        settings=settings,
        pace=pace or Pace(),
        preload=("pearl_executor.runtimes.local.worker", "pearl_executor.runtimes.local.scripted"),
    )


def build(settings: Mapping[str, Any], role: Role) -> Hosted:
    """The engine that `scripted_recipe` describes."""
    engine = ScriptedEngine(role, Pace(**settings["pace"]), settings["weight_version"], settings["kv_bytes_per_token"])
    return Hosted(engine, ScriptedBlob.from_bytes)


def next_token(tokens: Sequence[int]) -> int:
    """The token that follows `tokens`."""
    return zlib.crc32(array("i", tokens).tobytes()) % VOCABULARY


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that follow `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass(frozen=True, slots=True)
class ScriptedBlob:
    """A hand-over: the tokens, and as many bytes as their KV would have."""

    tokens: tuple[int, ...]
    generated: int
    start: int
    kv: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of KV."""
        return len(self.kv)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV is here."""
        return len(self.tokens) - self.start

    def tail(self, start: int) -> "ScriptedBlob":
        """Without the KV of the first `start` tokens."""
        drop = max(0, start - self.start) * len(self.kv) // max(1, self.kv_tokens)
        return ScriptedBlob(self.tokens, self.generated, max(start, self.start), self.kv[drop:])

    def to_bytes(self) -> bytes:
        """A line of JSON, then the KV."""
        head = {"tokens": self.tokens, "generated": self.generated, "start": self.start}
        return json.dumps(head).encode() + b"\n" + self.kv

    @staticmethod
    def from_bytes(data: bytes) -> "ScriptedBlob":
        """Read what `to_bytes` wrote."""
        line, _, kv = data.partition(b"\n")
        try:
            head = json.loads(line)
            return ScriptedBlob(tuple(head["tokens"]), head["generated"], head["start"], kv)
        except (ValueError, KeyError) as error:
            raise TransferError(f"a hand-over of {len(data)} bytes is not readable: {error}") from None


@dataclass(slots=True)
class _Request:
    request: GenerateRequest
    tokens: list[int]
    spans: list[WeightSpan] = field(default_factory=list)
    generated: int = 0
    prefilled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedOutput:
    """What one iteration produced."""

    chunks: Mapping[str, TokenChunk]
    finished: Mapping[str, GenerateResult]
    exported: Mapping[str, ScriptedBlob]
    compute_s: float
    paced_s: float


class ScriptedEngine:
    """See the module. Weight snapshots may be any existing path; one whose name holds "broken" is refused."""

    def __init__(self, role: Role, pace: Pace, weight_version: int | None, kv_bytes_per_token: int) -> None:
        self.role = role
        self._pace = pace
        self._version = weight_version
        self._kv_bytes_per_token = kv_bytes_per_token
        self._requests: dict[str, _Request] = {}
        self._aborted: list[_Request] = []
        self._held: dict[str, list[int]] = {}
        self._released = False
        self._decode: list[DecodeSample] = []
        self._prefill: list[PrefillSample] = []

    @property
    def has_work(self) -> bool:
        """Whether a request is here."""
        return bool(self._requests or self._aborted)

    def add(self, request: GenerateRequest, *, kv: ScriptedBlob | None = None) -> None:
        """Queue a request, or continue it."""
        if self._version is None or self._released:
            raise WorkerError("no weights are loaded")
        entry = _Request(request, list(request.prompt))
        if kv is not None:
            if list(kv.tokens[: len(request.prompt)]) != entry.tokens:
                raise TransferError("the hand-over is another request's")
            if kv.start > self.held_tokens(entry.tokens, request.affinity):
                raise TransferError(f"the hand-over lacks its first {kv.start} tokens, which are not here")
            entry.tokens = list(kv.tokens)
            entry.generated = kv.generated
            entry.spans = [WeightSpan(self._version, kv.generated)]
            entry.prefilled = True
        self._requests[request.rid] = entry

    def abort(self, rid: str | None) -> None:
        """End one request or all."""
        for key in [k for k in self._requests if rid is None or k == rid]:
            self._aborted.append(self._requests.pop(key))

    def held_tokens(self, prompt: list[int], affinity: str) -> int:
        """Length of the common prefix with what this affinity left here."""
        held = self._held.get(affinity, []) if affinity else []
        count = 0
        while count < min(len(held), len(prompt) - 1) and held[count] == prompt[count]:
            count += 1
        return count

    def step(self) -> ScriptedOutput:
        """Prefill whatever waits, else decode one token of each request."""
        began_s = time.perf_counter()
        finished = {e.request.rid: _result(e, Finish.INTERRUPTED) for e in self._aborted}
        self._aborted.clear()
        waiting = [e for e in self._requests.values() if not e.prefilled]
        chosen = waiting or list(self._requests.values())
        tokens = sum(len(e.tokens) for e in waiting)
        if waiting:
            least_s = self._pace.prefill_s(tokens)
            self._prefill.append(PrefillSample(tokens, least_s, len(waiting)))
        else:
            least_s = self._pace.decode_s(len(chosen)) if chosen else 0.0
            if chosen:
                self._decode.append(DecodeSample(len(chosen), 1, least_s))
        chunks = {e.request.rid: self._extend(e) for e in chosen}
        exported: dict[str, ScriptedBlob] = {}
        for entry in chosen:
            rid = entry.request.rid
            if entry.generated >= entry.request.max_new_tokens:
                finished[rid] = _result(entry, Finish.LENGTH)
            elif entry.tokens[-1] in entry.request.sampling.stop_token_ids:
                finished[rid] = _result(entry, Finish.STOP)
            elif self.role is Role.PREFILL:
                kv = bytes(self._kv_bytes_per_token * len(entry.tokens))
                exported[rid] = ScriptedBlob(tuple(entry.tokens), entry.generated, 0, kv)
            else:
                continue
            self._held[entry.request.affinity] = entry.tokens
            del self._requests[rid]
        compute_s = time.perf_counter() - began_s
        return ScriptedOutput(
            chunks=chunks,
            finished=finished,
            exported=exported,
            compute_s=compute_s,
            paced_s=max(0.0, least_s - compute_s),
        )

    def _extend(self, entry: _Request) -> TokenChunk:
        assert self._version is not None
        token = next_token(entry.tokens)
        entry.tokens.append(token)
        entry.generated += 1
        entry.prefilled = True
        entry.spans[-1:] = merge_spans([*entry.spans[-1:], WeightSpan(self._version, 1)])
        return TokenChunk((token,), (-token / VOCABULARY,), self._version)

    def load_weights(self, path: str, version: int, checksum: str) -> int:
        """Take the version of a snapshot."""
        del checksum
        if not Path(path).exists() or "broken" in Path(path).name:
            raise WorkerError(f"no weights at {path}")
        self._version = version
        self._held.clear()
        return version

    def release(self) -> MemoryReport:
        """Say that memory was given back."""
        self._released = True
        self._version = None
        self._held.clear()
        return MemoryReport(_HELD_BYTES, 0)

    def resume(self) -> MemoryReport:
        """Say that memory was taken."""
        self._released = False
        return MemoryReport(0, _HELD_BYTES)

    def set_role(self, role: Role) -> None:
        """Change the role."""
        self.role = role
        self._held.clear()

    def take_samples(self) -> EngineSamples:
        """Iterations since the last call."""
        samples = EngineSamples(
            role=self.role, decode=tuple(self._decode), prefill=tuple(self._prefill), running=len(self._requests)
        )
        self._decode.clear()
        self._prefill.clear()
        return samples


def _result(entry: _Request, finish: Finish) -> GenerateResult:
    new = entry.tokens[len(entry.request.prompt) :]
    return GenerateResult(finish=finish, tokens=new, logprobs=[0.0] * len(new), spans=tuple(entry.spans))
