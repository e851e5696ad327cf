"""Where an update's reference log-probabilities come from: Resource-Aware Ref-Actor Pipelining (TideRL section 5.1).

The actor asks for them only when its forward is over and the loss is due: the loss, KL term included, belongs to the
backward. So the reference may work at the same time on a rank of its own (`StreamedReference` and `serve_reference`),
or have done all ready micro-batches before under one swap of the models (`AggregatedReference`), or work in between
(`InlineReference`). The gradients are the same.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pearl_executor.ports import MemoryReport
from pearl_rl.training.device_memory import ParkedTensors, device_bytes
from pearl_rl.training.shards import MicroTensors
from pearl_rl.training.stopwatch import Stopwatch, timed_score

Score = Callable[[Tensor], Tensor]
"""Tokens [B, T] → the reference's log-probabilities [B, T−1], float32, without gradient."""


class ReferenceSource(Protocol):
    """Reference log-probabilities of the micro-batches of one optimizer step."""

    def open(self, micros: Sequence[MicroTensors]) -> None:
        """Announce the micro-batches that are ready, in the order in which they will be asked for."""
        ...

    def logprobs(self, number: int) -> Tensor | None:
        """Of the micro-batch with this number, [B, T−1]; None where the loss needs none. Waits for it."""
        ...


class NoReference:
    """The loss has no KL term."""

    def open(self, micros: Sequence[MicroTensors]) -> None:
        """Nothing to do."""

    def logprobs(self, number: int) -> Tensor | None:
        """None."""
        del number
        return None


class InlineReference:
    """Both models stay on the device; the reference works between an actor's forward and its backward."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self._micros: Sequence[MicroTensors] = ()

    def open(self, micros: Sequence[MicroTensors]) -> None:
        """See `ReferenceSource`."""
        self._micros = micros

    def logprobs(self, number: int) -> Tensor | None:
        """See `ReferenceSource`."""
        return self._score(self._micros[number].tokens)


class ModelSwap(Protocol):
    """Two models take turns on one device."""

    def to_reference(self) -> None:
        """The actor's tensors leave the device, the reference's come."""
        ...

    def to_actor(self) -> None:
        """The other way round."""
        ...


class AggregatedReference:
    """Colocated: all ready micro-batches are scored under one swap; the results stay where the actor reads them."""

    def __init__(self, score: Score, swap: ModelSwap) -> None:
        self._score = score
        self._swap = swap
        self._ready: list[Tensor] = []

    def open(self, micros: Sequence[MicroTensors]) -> None:
        """See `ReferenceSource`; the actor is on the device again when it returns."""
        self._swap.to_reference()
        try:
            self._ready = [self._score(micro.tokens) for micro in micros]
        finally:
            self._swap.to_actor()

    def logprobs(self, number: int) -> Tensor | None:
        """See `ReferenceSource`."""
        return self._ready[number]


class StreamedReference:
    """Decoupled, the actor's side: receives are posted at once, and waited for one by one."""

    def __init__(self, reference_rank: int) -> None:
        self._rank = reference_rank
        self._coming: list[tuple[dist.Work | None, Tensor]] = []

    def open(self, micros: Sequence[MicroTensors]) -> None:
        """See `ReferenceSource`."""
        self._coming = []
        for micro in micros:
            rows, width = micro.tokens.shape
            room = torch.empty(rows, width - 1, dtype=torch.float32, device=micro.tokens.device)
            self._coming.append((dist.irecv(room, src=self._rank), room))

    def logprobs(self, number: int) -> Tensor | None:
        """See `ReferenceSource`."""
        work, room = self._coming[number]
        if work is not None:
            work.wait()
        return room


def serve_reference(score: Score, shares: Sequence[Sequence[MicroTensors]]) -> int:
    """Decoupled, the reference's side: the actors' first micro-batches, then their second ones, … (Figure 6).

    `shares[rank]` are what actor `rank` asks for in this optimizer step. Returns how many were scored.
    """
    sent: list[tuple[dist.Work | None, Tensor]] = []
    for number in range(max((len(share) for share in shares), default=0)):
        for rank, share in enumerate(shares):
            if number < len(share):
                scored = score(share[number].tokens).contiguous()
                sent.append((dist.isend(scored, dst=rank), scored))
    for work, _ in sent:
        if work is not None:
            work.wait()
    return len(sent)


class ParkingSwap:
    """Swaps by emptying storages: what is off the device waits in host memory (CUDA) or in a file (CPU)."""

    def __init__(
        self,
        reference: Callable[[], Iterable[Tensor]],
        actor: Callable[[], Iterable[Tensor]],
        settle: Callable[[], None],
        spill: Path,
    ) -> None:
        """`reference` and `actor` list what each must have on the device; `settle` makes both movable (reshards)."""
        self._tensors = {"reference": reference, "actor": actor}
        self._settle = settle
        self._spill = spill
        self._parked: dict[str, ParkedTensors] = {}
        self.swaps = 0
        """How often a model came onto the device."""

    def to_reference(self) -> None:
        """See `ModelSwap`."""
        self._swap(out="actor", into="reference")

    def to_actor(self) -> None:
        """See `ModelSwap`."""
        self._swap(out="reference", into="actor")

    def restore(self) -> None:
        """Bring everything onto the device, for calls that need both."""
        while self._parked:
            self._parked.popitem()[1].restore()

    def _swap(self, *, out: str, into: str) -> None:
        self._settle()
        if out not in self._parked:
            self._parked[out] = ParkedTensors(self._tensors[out](), self._spill.with_name(f"{self._spill.name}-{out}"))
        parked = self._parked.pop(into, None)
        if parked is not None:
            parked.restore()
            self.swaps += 1


class ReferenceRank:
    """The process that holds the reference alone: it answers the calls of a training rank, without the collectives
    over the actors' mesh.
    """

    def __init__(self, model: nn.Module, temperature: float, spill: Path) -> None:
        self._model = model
        self._score = reference_score(model, temperature)
        self._spill = spill
        self._parked: ParkedTensors | None = None

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    def serve(
        self, shares: Sequence[Sequence[Sequence[MicroTensors]]], epochs: int, watch: Stopwatch | None = None
    ) -> int:
        """Score what the actors ask for: `shares[actor][optimizer step]` are micro-batches. Returns how many.

        `watch` times the scoring alone.
        """
        score = self._score if watch is None else timed_score(self._score, watch)
        scored = 0
        for _ in range(epochs):
            for step in range(max((len(steps) for steps in shares), default=0)):
                scored += serve_reference(score, [steps[step] for steps in shares if step < len(steps)])
        return scored

    def release(self) -> MemoryReport:
        """Give the model's memory away."""
        device = next(self._model.parameters()).device
        before = device_bytes(device)
        self._parked = ParkedTensors([*self._model.parameters(), *self._model.buffers()], self._spill)
        return MemoryReport(before, device_bytes(device))

    def resume(self) -> MemoryReport:
        """Take it back."""
        device = next(self._model.parameters()).device
        before = device_bytes(device)
        if self._parked is not None:
            self._parked.restore()
            self._parked = None
        return MemoryReport(before, device_bytes(device))


class TimedReference:
    """Another source, and what the actor's rank spends in it: it scores, swaps or waits."""

    def __init__(self, source: ReferenceSource, watch: Stopwatch) -> None:
        self._source = source
        self._watch = watch

    def open(self, micros: Sequence[MicroTensors]) -> None:
        """See `ReferenceSource`."""
        with self._watch:
            self._source.open(micros)

    def logprobs(self, number: int) -> Tensor | None:
        """See `ReferenceSource`."""
        with self._watch:
            return self._source.logprobs(number)


def reference_score(model: nn.Module, temperature: float) -> Score:
    """Scores by a model that never trains."""
    from pearl_rl.training.grpo import score_tokens

    def score(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            logits = model(input_ids=tokens, use_cache=False).logits
            return score_tokens(logits, tokens, temperature).logprobs

    return score
