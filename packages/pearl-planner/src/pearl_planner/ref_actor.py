"""How reference and actor share the trainer's GPUs: the two cost models of TideRL appendix A, and the choice.

*Decoupled*: the reference has a GPU of its own and streams; nothing is swapped, but the pipeline must fill.
*Colocated*: both share the same GPUs and are swapped; whatever is ready is taken together.

Two pairs of models stand side by side, as for the makespan. `decoupled_s` and `colocated_s` are the appendix as
printed: one colocated rank, and a decoupled pipeline whose actors count only in its fill. `decoupled_pipeline_s` and
`colocated_pipeline_s` follow every micro-batch over the same number of GPUs; these choose.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import ceil


class RefActorMode(StrEnum):
    """How a step runs reference and actor (TideRL section 5.1)."""

    DECOUPLED = "decoupled"
    COLOCATED = "colocated"


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchCosts:
    """Times of one micro-batch on one rank, seconds."""

    ref_forward_s: float
    actor_forward_s: float
    actor_backward_s: float
    swap_s: float
    """Taking one model off the GPU and the other one onto it."""
    hand_over_s: float = 0.0
    """Moving reference log-probabilities between GPUs; colocated they stay in place."""

    def __post_init__(self) -> None:
        for name in ("ref_forward_s", "actor_forward_s", "actor_backward_s", "swap_s", "hand_over_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} = {getattr(self, name)}: a duration is a number of at least 0")

    @property
    def actor_s(self) -> float:
        """t_act_f + t_act_b."""
        return self.actor_forward_s + self.actor_backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerShape:
    """The GPUs that reference and actor share."""

    ranks: int = 2
    """Colocated: all of them hold both. Decoupled: one runs the reference, the others the actor."""
    aggregate: int = 1 << 30
    """Most micro-batches a colocated rank takes at once: what its memory holds."""

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.aggregate < 1:
            raise ValueError(f"ranks = {self.ranks}, aggregate = {self.aggregate}: both must be at least 1")


def arrivals(micro_batches: int, *, ras: int, tprm_s: float) -> tuple[float, ...]:
    """Ready times relative to the step's start: `ras` (N0) are there, then one each `tprm_s` seconds."""
    if micro_batches < 1 or ras < 0 or not tprm_s >= 0:
        raise ValueError(f"micro_batches = {micro_batches}, ras = {ras}, tprm_s = {tprm_s}: out of range")
    ready = min(ras, micro_batches)
    return (0.0,) * ready + tuple((i + 1) * tprm_s for i in range(micro_batches - ready))


@dataclass(frozen=True, slots=True)
class ReadinessSignals:
    """RAS and TPRM of a step's ready times."""

    ras: int
    """N0 = |{i | a_i ≤ 0}|."""
    tprm_s: float
    """Mean gap Δ_i = a_i − a_{i−1} for i > N0 + 1; where there is none, the wait for the first."""


def signals(ready_s: Sequence[float]) -> ReadinessSignals:
    """Read RAS and TPRM off ordered ready times."""
    late = [a for a in ready_s if a > 0]
    if not late:
        return ReadinessSignals(len(ready_s), 0.0)
    gaps = [b - a for a, b in pairwise(late)]
    return ReadinessSignals(len(ready_s) - len(late), sum(gaps) / len(gaps) if gaps else late[0])


def decoupled_s(ready_s: Sequence[float], costs: MicroBatchCosts, actors: int) -> float:
    """C_dec ≈ Σ_{i<M} i·t_ref_f + Σ_{i≤N} max(δ_i, t_act_f + t_act_b), as printed. `ready_s` ascends."""
    _check(ready_s)
    fill = sum(i * costs.ref_forward_s for i in range(actors))
    total, before = fill, 0.0
    for at_s in ready_s:
        gap = max(0.0, at_s - before) if at_s > 0 else 0.0
        total += max(gap, costs.actor_s)
        before = max(at_s, 0.0)
    return total


def colocated_s(ready_s: Sequence[float], costs: MicroBatchCosts, aggregate: int = 1 << 30) -> float:
    """C_col by the appendix's five steps: wait, count what is ready, reference, actor, go on. `ready_s` ascends."""
    return colocated_pipeline_s(ready_s, costs, TrainerShape(ranks=1, aggregate=aggregate))


def colocated_pipeline_s(ready_s: Sequence[float], costs: MicroBatchCosts, shape: TrainerShape) -> float:
    """The colocated step over `shape.ranks` ranks that swap together, each taking its part of what is ready."""
    _check(ready_s)
    clock, done, count = 0.0, 0, len(ready_s)
    most = shape.aggregate * shape.ranks
    while done < count:
        clock = max(clock, ready_s[done])
        taken = done
        while taken < count and ready_s[taken] <= clock and taken - done < most:
            taken += 1
        turns = ceil((taken - done) / shape.ranks)
        clock += costs.swap_s + turns * costs.ref_forward_s
        clock += costs.swap_s + turns * costs.actor_s
        done = taken
    return clock


def decoupled_pipeline_s(ready_s: Sequence[float], costs: MicroBatchCosts, shape: TrainerShape) -> float:
    """The decoupled step micro-batch by micro-batch: one reference rank in order, each actor when it is free.

    Needs at least two ranks. The backward begins when both the actor's forward and the reference are over.
    """
    _check(ready_s)
    if shape.ranks < 2:
        raise ValueError("decoupled mode needs at least two ranks: one for the reference, one for the actor")
    free = [0.0] * (shape.ranks - 1)
    reference = end = 0.0
    for at_s in ready_s:
        at_s = max(0.0, at_s)
        reference = max(reference, at_s) + costs.ref_forward_s
        forward = max(heapq.heappop(free), at_s) + costs.actor_forward_s
        backward = max(forward, reference + costs.hand_over_s) + costs.actor_backward_s
        heapq.heappush(free, backward)
        end = max(end, backward)
    return end


def backlog_s(micro_batches: float, costs: MicroBatchCosts, *, actors: int, references: int = 0) -> float:
    """What a trainer takes for micro-batches that are all ready, its pipeline filled.

    With reference ranks of its own the slower of both sets the pace (decoupled); without, all ranks hold both models
    and swap them once each.
    """
    if references:
        return micro_batches * max(costs.ref_forward_s / references, costs.actor_s / actors)
    return 2 * costs.swap_s + micro_batches * (costs.ref_forward_s + costs.actor_s) / actors


def fastest_references(micro_batches: float, costs: MicroBatchCosts, ranks: int) -> int:
    """Reference ranks with which `ranks` are through a backlog first; 0: colocated. Of equals the fewest."""
    return min(
        range(ranks),
        key=lambda references: backlog_s(micro_batches, costs, actors=ranks - references, references=references),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RefActorChoice:
    """The mode of a step, with what each is expected to take, seconds."""

    mode: RefActorMode
    decoupled_s: float
    """Infinity where there is only one rank."""
    colocated_s: float
    printed_decoupled_s: float
    printed_colocated_s: float


def choose_mode(
    ready_s: Sequence[float], costs: MicroBatchCosts, shape: TrainerShape, *, margin: float = 0.0
) -> RefActorChoice:
    """The faster mode for micro-batches that become ready at `ready_s` (ascending).

    Decoupled must be faster by the fraction `margin`: it keeps a GPU that rollout could use.
    """
    together = colocated_pipeline_s(ready_s, costs, shape)
    apart = decoupled_pipeline_s(ready_s, costs, shape) if shape.ranks > 1 else float("inf")
    return RefActorChoice(
        mode=RefActorMode.DECOUPLED if apart < together * (1.0 - margin) else RefActorMode.COLOCATED,
        decoupled_s=apart,
        colocated_s=together,
        printed_decoupled_s=decoupled_s(ready_s, costs, max(1, shape.ranks - 1)),
        printed_colocated_s=colocated_s(ready_s, costs, shape.aggregate),
    )


def break_even_ras(
    micro_batches: int, tprm_s: float, costs: MicroBatchCosts, shape: TrainerShape, *, margin: float = 0.0
) -> int | None:
    """The smallest RAS from which on decoupled mode is chosen at this TPRM up to a full backlog; None where never."""
    found: int | None = None
    for ras in range(micro_batches, -1, -1):
        choice = choose_mode(arrivals(micro_batches, ras=ras, tprm_s=tprm_s), costs, shape, margin=margin)
        if choice.mode is not RefActorMode.DECOUPLED:
            break
        found = ras
    return found


def _check(ready_s: Sequence[float]) -> None:
    if any(b < a for a, b in pairwise(ready_s)):
        raise ValueError("ready times must ascend")
