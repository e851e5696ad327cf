"""Chrome trace events (which Perfetto opens), and where spans go that overlap."""

import heapq
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

TraceEvent = dict[str, Any]


class Timed(Protocol):
    """Something with a beginning and an end, seconds."""

    @property
    def start_s(self) -> float:
        """When it began."""
        ...

    @property
    def end_s(self) -> float:
        """When it was over."""
        ...


T = TypeVar("T", bound=Timed)


def micros(seconds: float) -> float:
    """Seconds in the unit of a trace, microseconds, to the nanosecond."""
    return round(seconds * 1e6, 3)


def name_process(pid: int, name: str, order: int) -> Iterator[TraceEvent]:
    """Name a group of tracks and say where it goes."""
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": order}}


def name_thread(pid: int, tid: int, name: str) -> Iterator[TraceEvent]:
    """Name a track; tracks stand in the order of their number."""
    yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


def span(
    pid: int, tid: int, name: str, start_s: float, end_s: float, args: Mapping[str, Any] | None = None, **extra: Any
) -> TraceEvent:
    """A span on a track. Spans of one track must lie inside or beside each other."""
    start = micros(start_s)
    event = {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start, "dur": round(micros(end_s) - start, 3)}
    return {**event, **({"args": args} if args else {}), **extra}


def instant(pid: int, tid: int, name: str, at_s: float, args: Mapping[str, Any]) -> TraceEvent:
    """A moment on a track."""
    return {"ph": "i", "s": "t", "pid": pid, "tid": tid, "name": name, "ts": micros(at_s), "args": args}


def counter(pid: int, name: str, at_s: float, values: Mapping[str, float]) -> TraceEvent:
    """Values that hold from now on."""
    return {"ph": "C", "pid": pid, "name": name, "ts": micros(at_s), "args": dict(values)}


def arrow(
    number: int, name: str, source: tuple[int, int, float], target: tuple[int, int, float]
) -> Iterator[TraceEvent]:
    """An arrow from a span to a later one, each given by track and a time inside it: (pid, tid, seconds)."""
    for phase, (pid, tid, at_s), extra in (("s", source, {}), ("f", target, {"bp": "e"})):
        yield {
            "ph": phase,
            "id": number,
            "cat": name,
            "name": name,
            "pid": pid,
            "tid": tid,
            "ts": micros(at_s),
            **extra,
        }


def side_by_side(items: Iterable[T]) -> Iterator[tuple[int, T]]:
    """Each item with the lowest lane, from 0 on, that is free for all of its time. In the order of their beginnings."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    lanes = 0
    for item in sorted(items, key=lambda item: (item.start_s, -item.end_s)):
        while busy and micros(busy[0][0]) <= micros(item.start_s):
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, lanes = lanes, lanes + 1
        heapq.heappush(busy, (item.end_s, lane))
        yield lane, item
