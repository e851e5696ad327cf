"""How sequences become micro-batches, and which rank takes which: TideRL section 5.1 and appendix B.3. Pure.

All functions speak of sequences by index into `lengths` (tokens).
"""

from collections.abc import Sequence
from math import ceil

Shares = tuple[tuple[int, ...], ...]
"""For each rank the sequences it takes, in the order in which it takes them."""


def form_micro_batches(
    lengths: Sequence[int], *, saturating_tokens: int, ranks: int = 1
) -> tuple[tuple[int, ...], ...]:
    """Micro-batches in the order in which they run: the first ones fill all ranks, the last one is small.

    A micro-batch takes sequences until it has `saturating_tokens` for each of `ranks`; the longest come first, so that
    what is left for the last one is the smallest. A last one above the others' size cannot arise: it holds what did
    not fill another.
    """
    if saturating_tokens < 1 or ranks < 1:
        raise ValueError(f"saturating_tokens = {saturating_tokens}, ranks = {ranks}: both must be at least 1")
    full = saturating_tokens * ranks
    batches: list[list[int]] = []
    current: list[int] = []
    tokens = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        current.append(index)
        tokens += lengths[index]
        if tokens >= full:
            batches.append(current)
            current, tokens = [], 0
    if current:
        batches.append(current)
    elif len(batches) > 1 or (batches and len(batches[0]) > 1):
        # Everything came out even: the last sequence alone makes the smallest last micro-batch.
        batches.append([batches[-1].pop()])
        if not batches[-2]:
            del batches[-2]
    return tuple(tuple(batch) for batch in batches)


def ready_micro_batch(lengths: Sequence[int], *, saturating_tokens: int, ranks: int, last: bool) -> int:
    """How many of the sequences that became ready so far (in their order) make the next micro-batch; 0: wait.

    While more sequences are to come, a micro-batch waits until it fills the ranks. `last` says that none follow.
    """
    tokens = 0
    for count, length in enumerate(lengths, 1):
        tokens += length
        if tokens >= saturating_tokens * ranks:
            return count
    return len(lengths) if last else 0


def zig_zag(lengths: Sequence[int], ranks: int) -> Shares:
    """Colocated mode: longest first, dealt to the ranks to and fro, so that their sums are nearly the same."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for place, index in enumerate(sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))):
        lap, seat = divmod(place, ranks)
        shares[seat if lap % 2 == 0 else ranks - 1 - seat].append(index)
    return tuple(tuple(share) for share in shares)


def smallest_last(lengths: Sequence[int], ranks: int) -> Shares:
    """Decoupled mode: longest first to whichever rank is free first; the very smallest is fed last."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    busy = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(ranks), key=lambda r: (busy[r], r))
        shares[rank].append(index)
        busy[rank] += lengths[index]
    return tuple(tuple(share) for share in shares)


def logical_groups(lengths: Sequence[int], ranks: int, group_size: int) -> tuple[Shares, ...]:
    """FSDP: physical ranks form logical ones of `group_size`, whose members take sequences of like lengths.

    Members of a logical rank meet in collectives at every micro-batch, so those of one round should last the same.
    Returns, for each logical rank, one round after another, what each of its members takes (one sequence, or none in
    the last round). Sequences of neighbouring lengths make a round; rounds are dealt to the logical ranks to and fro.
    """
    if ranks % group_size:
        raise ValueError(f"{ranks} ranks do not divide into logical groups of {group_size}")
    groups = ranks // group_size
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    rounds = [order[at : at + group_size] for at in range(0, len(order), group_size)]
    dealt: list[list[tuple[int, ...]]] = [[] for _ in range(groups)]
    for place, members in enumerate(rounds):
        lap, seat = divmod(place, groups)
        dealt[seat if lap % 2 == 0 else groups - 1 - seat].append(tuple(members))
    return tuple(tuple(rounds_of_one) for rounds_of_one in dealt)


def straggling(lengths: Sequence[int], rounds: Shares) -> int:
    """Tokens for which members of a logical rank wait for the longest of their round."""
    return sum(
        max(lengths[i] for i in members) * len(members) - sum(lengths[i] for i in members)
        for members in rounds
        if members
    )


def least_rounds(sequences: int, ranks: int) -> int:
    """Rounds that `ranks` ranks need at the least."""
    return ceil(sequences / ranks)
