"""Engines whose attention runs in data-parallel ranks over shared experts, as mixture-of-experts models are served.

All ranks enter each expert layer together. While one rank computes a prompt, the others wait for it: an iteration takes
as long as its busiest rank, and a prompt that comes alone leaves the rest of the GPUs idle (Prorsa section 3.2). A
prefill worker has prompts for all ranks at once; a colocated one makes its whole decode batch wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
        """See `IterationCosts`: the time of the busiest rank, each chunk on the rank with the fewest tokens so far.

        A rank has one part in `ranks` of the GPUs, so what depends on its tokens takes `ranks` times as long; what an
        iteration costs however small it is stays.
        """
        if self.ranks == 1 or not chunks:
            return self.whole.prefill_s(chunks, finished, sequences, context_tokens)
        least_s = self.whole.prefill_s([(1, 0)], 1)
        loads: list[list[tuple[int, int]]] = [[] for _ in range(self.ranks)]
        for chunk in sorted(chunks, reverse=True):
            min(loads, key=lambda load: sum(tokens for tokens, _ in load)).append(chunk)
        busiest_s = max(self.whole.prefill_s(load, min(finished, len(load))) for load in loads if load)
        alone_s = least_s + self.ranks * max(0.0, busiest_s - least_s)
        if not sequences:
            return alone_s
        # The running sequences decode along on every rank.
        mixed_s = self.whole.prefill_s(chunks, finished, sequences, context_tokens)
        return alone_s + max(0.0, mixed_s - self.whole.prefill_s(chunks, finished))

    def decode_curve(self, sequences: int) -> DecodeCurve:
        """See `IterationCosts`."""
        return self.whole.decode_curve(sequences)
