"""Engines whose attention runs in data-parallel ranks over shared experts, as mixture-of-experts models are served.

All ranks enter each expert layer together. While one rank computes a prompt, the others wait for it: an iteration takes
as long as its busiest rank, and a prompt that comes alone leaves the rest of the GPUs idle (Prorsa section 3.2). A
prefill worker has prompts for all ranks at once; a colocated one makes its whole decode batch wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace

from pearl_rl.simulation.engine import IterationCosts
from pearl_rl.simulation.kernels import DecodeCurve


@dataclass(frozen=True, slots=True)
class DataParallelCosts:
    """`IterationCosts` of `ranks` attention ranks that share what `whole` has. Decode is spread evenly over them."""

    whole: IterationCosts
    ranks: int

    def prefill_s(
        self, chunks: Sequence[tuple[int, int]], finished: int, sequences: int = 0, context_tokens: float = 0.0
    ) -> float:
        """See `IterationCosts`: as long as if every rank had as many tokens as the busiest one, so that evenly loaded
        ranks take as long as the whole worker with the same tokens. Each chunk goes to the rank with the fewest so far.
        """
        if self.ranks == 1 or not chunks:
            return self.whole.prefill_s(chunks, finished, sequences, context_tokens)
        loads: list[list[tuple[int, int]]] = [[] for _ in range(self.ranks)]
        fewest = [(0, rank) for rank in range(self.ranks)]
        for chunk in sorted(chunks, reverse=True):
            tokens, rank = fewest[0]
            loads[rank].append(chunk)
            heapreplace(fewest, (tokens + chunk[0], rank))
        busiest = loads[max(fewest)[1]]
        alone_s = self.whole.prefill_s(busiest * self.ranks, min(finished, len(busiest)) * self.ranks)
        if not sequences:
            return alone_s
        # The running sequences decode along on every rank.
        mixed_s = self.whole.prefill_s(chunks, finished, sequences, context_tokens)
        return alone_s + max(0.0, mixed_s - self.whole.prefill_s(chunks, finished))

    def decode_curve(self, sequences: int) -> DecodeCurve:
        """See `IterationCosts`."""
        return self.whole.decode_curve(sequences)
