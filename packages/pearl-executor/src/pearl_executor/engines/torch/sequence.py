"""Sequence: one request inside the engine."""

import zlib
from dataclasses import dataclass, field
from typing import Self

from pearl_executor.engines.torch.blob import KvBlob
from pearl_executor.engines.torch.sampling import uniform
from pearl_executor.ports import Finish, GenerateRequest, GenerateResult
from pearl_state.trajectory import WeightSpan


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's tokens, where their KV is, and its times.

    Waiting: no row. Live: a row and slots; prefill is over once the KV of all tokens but the last is computed and
    that last one was sampled.
    """

    request: GenerateRequest
    tokens: list[int]
    """Prompt and generated tokens."""
    seed: int
    added_s: float
    epoch: int = -1
    """The scheduler's epoch that all its KV comes from; -1 where it comes from several, or from elsewhere."""
    logprobs: list[float] = field(default_factory=list)
    spans: list[WeightSpan] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    """Slots of its first tokens; in prefill, of the whole prompt."""
    computed: int = 0
    """Tokens whose KV is there."""
    row: int = -1
    blob: KvBlob | None = None
    """KV in host memory, to be put into slots when the request becomes live."""
    cached_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    started_s: float | None = None
    """When its first iteration began."""
    decoding_s: float | None = None
    """When decode began: with the first token, or with the hand-over."""

    @classmethod
    def of(cls, request: GenerateRequest, engine_seed: int, added_s: float) -> Self:
        """A new request. Without a seed of its own it draws from the engine's, by its id."""
        seed = request.sampling.seed
        if seed is None:
            seed = (engine_seed << 32) | zlib.crc32(request.rid.encode())
        return cls(request=request, tokens=list(request.prompt), seed=seed, added_s=added_s)

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.logprobs)

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.request.max_new_tokens - self.generated

    def next_uniform(self) -> float:
        """The random number of the next token: by its absolute position, so that a resumed request draws the same."""
        return uniform(self.seed, len(self.tokens))

    def append(self, token: int, logprob: float, version: int) -> Finish | None:
        """Add a generated token. Returns why the request is over, if it is."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = WeightSpan(version, self.spans[-1].tokens + 1)
        else:
            self.spans.append(WeightSpan(version, 1))
        if token in self.request.sampling.stop_token_ids:
            return Finish.STOP
        return Finish.LENGTH if self.remaining == 0 else None

    def take_in(self, blob: KvBlob, epoch: int) -> None:
        """Continue where the exporting engine stopped."""
        self.tokens = list(blob.tokens)
        self.logprobs = list(blob.logprobs)
        self.spans = list(blob.spans)
        self.cached_tokens, self.queue_s, self.prefill_s = blob.cached_tokens, blob.queue_s, blob.prefill_s
        self.blob = blob
        self.epoch = epoch

    def start(self, now_s: float) -> None:
        """It becomes live. Only the first time counts: a retracted request keeps its times."""
        if self.started_s is not None:
            return
        self.started_s = now_s
        self.queue_s += now_s - self.added_s
        if self.blob is not None:
            self.decoding_s = now_s

    def prefill_done(self, now_s: float) -> None:
        """Its first token is there."""
        assert self.started_s is not None
        self.prefill_s = now_s - self.started_s
        self.decoding_s = now_s

    def result(self, finish: Finish, now_s: float) -> GenerateResult:
        """What the caller gets."""
        new = self.generated
        return GenerateResult(
            finish=finish,
            tokens=tuple(self.tokens[len(self.tokens) - new :]),
            logprobs=tuple(self.logprobs),
            spans=tuple(self.spans),
            cached_tokens=self.cached_tokens,
            queue_s=self.queue_s if self.started_s is not None else self.queue_s + now_s - self.added_s,
            prefill_s=self.prefill_s,
            decode_s=now_s - self.decoding_s if self.decoding_s is not None else 0.0,
        )
