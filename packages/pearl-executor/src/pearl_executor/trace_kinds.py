"""Availability traces that are no list of counts: of nodes that came and went, and synthetic ones."""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

Row = Mapping[str, str | None]
_MOST_CHANGES: Final = 1_000_000


def is_of_events(row: Row) -> bool:
    """Whether a row belongs to a trace of events: columns `t_ms`, `event`, `node`, as Bamboo's have."""
    return {"t_ms", "event", "node"} <= row.keys()


def counted_events(path: Path, rows: Sequence[tuple[int, Row]]) -> Iterator[tuple[int, Row]]:
    """(line, row) of an event trace as those of a step trace: `instances` there from `t_s` on.

    Raises `ValueError` with file and line for time that goes back, another event than `add` and `remove`, and a node
    that comes or goes twice.
    """
    there: set[str] = set()
    before_ms = -math.inf
    for line, row in rows:
        where, event, node = f"{path}:{line}", row["event"], row["node"] or ""
        if event not in ("add", "remove"):
            raise ValueError(f"{where}: event {event!r} is neither add nor remove")
        if (event == "add") == (node in there):
            now = "there already" if event == "add" else "not there"
            raise ValueError(f"{where}: {event} of node {node!r}, which is {now}")
        at_ms = _milliseconds(where, row["t_ms"])
        if at_ms < before_ms:
            raise ValueError(f"{where}: time goes back, t_ms {at_ms:g} after {before_ms:g}; sort the trace")
        before_ms = at_ms
        (there.add if event == "add" else there.remove)(node)
        yield line, {"t_s": repr(at_ms / 1000.0), "instances": str(len(there))}


def last_of_each_time(rows: Iterator[tuple[int, Row]]) -> list[tuple[int, Row]]:
    """Of rows of one time the last: what is there once all of them happened."""
    return [list(same)[-1] for _, same in groupby(rows, key=lambda numbered: numbered[1]["t_s"])]


def _milliseconds(where: str, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        raise ValueError(f"{where}: t_ms {text!r} is not a number") from None
    if not 0.0 <= value < math.inf:
        raise ValueError(f"{where}: t_ms {text} is not a finite number >= 0")
    return value


def synthetic_steps(
    *, gpus: int, present_s: float, absent_s: float, until_s: float, seed: int
) -> tuple[tuple[float, int], ...]:
    """(time, GPUs that are there from then on) of `gpus` that come and go independently of each other, from 0 on.

    Each is there for `present_s` and away for `absent_s` on average, both exponentially distributed, and at time 0 as
    likely as at any other. Raises `ValueError` where that is more than a million changes until `until_s`.
    """
    changes = 2.0 * gpus * until_s / (present_s + absent_s)
    if not changes <= _MOST_CHANGES:
        raise ValueError(
            f"a synthetic trace of {gpus} GPUs that are there for {present_s:g} s and away for {absent_s:g} s has "
            f"{changes:.2g} changes in {until_s:g} s; at most {_MOST_CHANGES:,} are drawn"
        )
    numbers = random.Random(f"availability/{seed}")
    steps: list[tuple[float, int]] = []
    first = 0
    for _ in range(gpus):
        there = numbers.random() < present_s / (present_s + absent_s)
        first += there
        at_s = numbers.expovariate(1.0 / (present_s if there else absent_s))
        while at_s < until_s:
            steps.append((at_s, -1 if there else 1))
            there = not there
            at_s += numbers.expovariate(1.0 / (present_s if there else absent_s))
    counts = [(0.0, first)]
    for at_s, change in sorted(steps):
        count = counts[-1][1] + change
        if at_s == counts[-1][0]:
            counts.pop()
        counts.append((at_s, count))
    return tuple(counts)
