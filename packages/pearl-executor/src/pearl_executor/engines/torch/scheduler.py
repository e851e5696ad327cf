"""Scheduler: which requests compute next, and who owns which KV slots.

Requests are admitted in order of arrival. Admission does not reserve what a response may grow to; where slots run out
in decode, the youngest running request moves its KV to host memory and waits (it loses no work). Kept prefixes are
evicted before anyone waits.
"""

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from pearl_executor.engines.torch.blob import KvBlob
from pearl_executor.engines.torch.contract import EngineLimits
from pearl_executor.engines.torch.pool import KvPool
from pearl_executor.engines.torch.prefix import PrefixCache
from pearl_executor.engines.torch.sequence import Sequence
from pearl_executor.ports import TransferError

_HEADROOM_TOKENS = 32
"""Room that admission leaves for each live request to grow, so that none is retracted right after."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens `begin` ≤ i < `end` of a sequence, to be computed now."""

    sequence: Sequence
    begin: int
    end: int

    @property
    def completes(self) -> bool:
        """Whether the prompt is done after it."""
        return self.end == len(self.sequence.tokens)


class Scheduler:
    """Queues and slots of one engine."""

    def __init__(self, pool: KvPool, limits: EngineLimits) -> None:
        self._pool = pool
        self._limits = limits
        self.prefix = PrefixCache(pool)
        self.epoch = 0
        """Counts weight loads: KV of an earlier epoch serves the requests that computed it, but no other."""
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []
        self.retractions = 0

    @property
    def idle(self) -> bool:
        """Whether no request is here."""
        return not (self.waiting or self.prefilling or self.running)

    def requests(self) -> list[Sequence]:
        """All requests, live ones first."""
        return [*self.running, *self.prefilling, *self.waiting]

    def new_epoch(self) -> None:
        """The weights changed: forget all kept prefixes."""
        self.epoch += 1
        self.prefix.clear()

    def admit(self, now_s: float) -> list[Sequence]:
        """Make waiting requests live, as far as rows and slots reach. Returns those that begin their prefill."""
        begun: list[Sequence] = []
        growth = sum(min(s.remaining, _HEADROOM_TOKENS) for s in (*self.running, *self.prefilling))
        while self.waiting and len(self.running) + len(self.prefilling) < self._limits.max_running:
            sequence = self.waiting[0]
            growth += min(sequence.remaining, _HEADROOM_TOKENS)
            fits = len(sequence.tokens) + growth <= self._pool.free + self.prefix.tokens
            if not fits and (self.running or self.prefilling):
                break
            self.waiting.popleft()
            sequence.start(now_s)
            if sequence.blob is None:
                self._begin_prefill(sequence)
                begun.append(sequence)
            else:
                self._begin_decode(sequence, sequence.blob)
        return begun

    def chunks(self) -> list[Chunk]:
        """The next prompt tokens to compute, in order of arrival, up to the limit of an iteration."""
        budget = self._limits.prefill_chunk_tokens
        chunks: list[Chunk] = []
        for sequence in self.prefilling:
            if budget == 0:
                break
            end = min(sequence.computed + budget, len(sequence.tokens))
            chunks.append(Chunk(sequence, sequence.computed, end))
            budget -= end - sequence.computed
        return chunks

    def computed(self, chunks: list[Chunk]) -> list[Sequence]:
        """Note that `chunks` are computed. Returns the sequences whose prompt is complete: they run from now on."""
        for chunk in chunks:
            chunk.sequence.computed = chunk.end
        complete = [chunk.sequence for chunk in chunks if chunk.completes]
        del self.prefilling[: len(complete)]
        self.running += complete
        return complete

    def grow(self) -> list[Sequence]:
        """Give each running request the slot of its next token. Returns those that run; the others were retracted."""
        while self._pool.free + self.prefix.tokens < len(self.running):
            self._retract(self.running[-1])
        for sequence, slot in zip(self.running, self._new_slots(len(self.running)), strict=True):
            sequence.slots.append(slot)
        return self.running

    def withdraw(self, sequence: Sequence) -> None:
        """Take a request out, wherever it is, and keep its KV for its trajectory's next request where that is valid."""
        if sequence.row < 0:
            self.waiting.remove(sequence)
            return
        (self.running if sequence in self.running else self.prefilling).remove(sequence)
        self._pool.give_row_back(sequence.row)
        count = sequence.computed
        self._pool.give_back(sequence.slots[count:])
        affinity = sequence.request.affinity if sequence.epoch == self.epoch else ""
        self.prefix.keep(affinity, sequence.tokens[:count], sequence.slots[:count])

    def export(self, sequence: Sequence, version: int) -> KvBlob:
        """Copy a running request's KV and progress to host memory."""
        keys, values = self._pool.read(sequence.slots[: sequence.computed])
        return KvBlob(
            rid=sequence.request.rid,
            version=version,
            mixed=sequence.epoch != self.epoch,
            tokens=tuple(sequence.tokens),
            logprobs=tuple(sequence.logprobs),
            spans=tuple(sequence.spans),
            dtype=self._pool.layout.dtype_name,
            keys=keys,
            values=values,
            cached_tokens=sequence.cached_tokens,
            queue_s=sequence.queue_s,
            prefill_s=sequence.prefill_s,
        )

    def completed(self, blob: KvBlob, affinity: str, version: int) -> KvBlob:
        """`blob` with the KV that it leaves out, which must be kept here, from the same weights; else `TransferError`.

        It is copied to host memory: a waiting request owns no slots, so that none can keep others from running.
        """
        if blob.start == 0:
            return blob
        held = self.prefix.match(affinity, blob.tokens)
        if held < blob.start or blob.version != version or blob.mixed:
            raise TransferError(
                f"KV of request {blob.rid} (weight version {blob.version}) starts at token {blob.start};"
                f" {held} tokens of weight version {version} are kept here; send it whole"
            )
        keys, values = self._pool.read(self.prefix.slots(affinity, blob.start))
        return replace(
            blob,
            start=0,
            keys=tuple(np.concatenate(pair) for pair in zip(keys, blob.keys, strict=True)),
            values=tuple(np.concatenate(pair) for pair in zip(values, blob.values, strict=True)),
        )

    def _begin_prefill(self, sequence: Sequence) -> None:
        sequence.epoch = self.epoch
        # The last token is computed in any case: its logits are needed.
        self._place(sequence, len(sequence.tokens) - 1, len(sequence.tokens))
        sequence.cached_tokens = sequence.computed
        self.prefilling.append(sequence)

    def _begin_decode(self, sequence: Sequence, blob: KvBlob) -> None:
        size = len(sequence.tokens) - 1
        self._place(sequence, size if sequence.epoch == self.epoch else 0, size)
        if sequence.computed < size:
            rest = slice(sequence.computed, None)
            self._pool.write(sequence.slots[rest], [k[rest] for k in blob.keys], [v[rest] for v in blob.values])
        sequence.computed = size
        sequence.blob = None
        self.running.append(sequence)

    def _place(self, sequence: Sequence, reusable: int, size: int) -> None:
        """Give the sequence a row and slots for `size` tokens: at most `reusable` kept ones, the others new."""
        if reusable:
            sequence.slots = self.prefix.take(sequence.request.affinity, sequence.tokens[:reusable])
        sequence.computed = len(sequence.slots)
        sequence.slots += self._new_slots(size - sequence.computed)
        sequence.row = self._pool.take_row()
        self._pool.set_row(sequence.row, sequence.slots)

    def _retract(self, sequence: Sequence) -> None:
        """Move a running request's KV to host memory and let it wait, first in line."""
        self.running.remove(sequence)
        sequence.blob = self.export(sequence, sequence.spans[-1].version)
        self._pool.give_back(sequence.slots)
        self._pool.give_row_back(sequence.row)
        sequence.slots, sequence.row, sequence.computed = [], -1, 0
        self.waiting.appendleft(sequence)
        self.retractions += 1

    def _new_slots(self, count: int) -> list[int]:
        self.prefix.evict(count - self._pool.free)
        return self._pool.take(count)
