"""Decode admissions from prefill completions: Prorsa eqs. (13) and (14).

Each prefill instance serves its requests one after the other; instances work in parallel.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace

from pearl_planner.forecast.sources import Arrival
from pearl_state.worker import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceQueue:
    """What one prefill instance has to do at the snapshot."""

    in_flight: Sequence[tuple[float, int]] = ()
    """(estimated finish time b̂, whole prompt) of each request in Prefill: progress before now is in b̂."""
    queued: Sequence[int] = ()
    """Whole prompts of the requests that wait for it, in scheduling order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admissions:
    """Decode admissions before t + S."""

    tokens: float
    """Â^D: prompt tokens."""
    kv_bytes: float
    """K̂^D: their KV at admission."""
    available_s: Mapping[WorkerId, float] = field(default_factory=dict[WorkerId, float])
    """v of each instance after everything in the forecast."""


def completion_times(
    arrivals: Sequence[float], services_s: Sequence[float], available_s: float
) -> tuple[list[float], float]:
    """b̂ = max(u, v) + g, v ← b̂, over one instance's requests in scheduling order (eq. 13).

    Returns all b̂, and v after the last.
    """
    finished = []
    for arrival_s, service_s in zip(arrivals, services_s, strict=True):
        available_s = max(arrival_s, available_s) + service_s
        finished.append(available_s)
    return finished, available_s


def decode_admissions(
    *,
    now_s: float,
    horizon_s: float,
    instances: Mapping[WorkerId, InstanceQueue],
    unassigned: Iterable[int],
    arrivals: Iterable[Arrival],
    service_s: Callable[[float], float],
    kv_bytes: Callable[[float], float],
) -> Admissions:
    """Â^D and K̂^D (eq. 14).

    `unassigned` are ready requests that no instance was chosen for; they and the future `arrivals` go, in the order of
    their arrival, to the instance that is available first, as the router sends a prompt to the shortest queue. An
    arrival of weight q takes q of its service time and counts q of its tokens. `service_s` is g, `kv_bytes` is κ^D.
    Without an instance nothing is admitted.
    """
    end_s = now_s + horizon_s
    tokens = kv = 0.0
    available: dict[WorkerId, float] = {}
    for id_, queue in instances.items():
        free_s = now_s
        for finish_s, prompt in queue.in_flight:
            free_s = max(free_s, finish_s)
            if finish_s < end_s:
                tokens += prompt
                kv += kv_bytes(prompt)
        finished, free_s = completion_times(
            [now_s] * len(queue.queued), [service_s(prompt) for prompt in queue.queued], free_s
        )
        for finish_s, prompt in zip(finished, queue.queued, strict=True):
            if finish_s < end_s:
                tokens += prompt
                kv += kv_bytes(prompt)
        available[id_] = free_s
    heap = [(free_s, id_) for id_, free_s in available.items()]
    heapify(heap)
    if not heap:
        return Admissions(tokens=0.0, kv_bytes=0.0)
    waiting = [Arrival(now_s, prompt) for prompt in unassigned]
    for arrival in [*waiting, *sorted(arrivals, key=lambda arrival: arrival.at_s)]:
        free_s, id_ = heap[0]
        finish_s = max(arrival.at_s, free_s) + arrival.weight * service_s(arrival.tokens)
        if finish_s < end_s:
            tokens += arrival.weight * arrival.tokens
            kv += arrival.weight * kv_bytes(arrival.tokens)
        heapreplace(heap, (finish_s, id_))
    return Admissions(tokens=tokens, kv_bytes=kv, available_s={id_: free_s for free_s, id_ in heap})
