"""Decode admissions from prefill completions: Prorsa eqs. (13) and (14).

Each prefill instance serves its requests one after the other; instances work in parallel.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace

from pearl_planner.forecast.sources import Arrival
from pearl_state.worker import WorkerId

Waiting = tuple[int, float]
"""A request that waits: its whole prompt, and the tokens of it that must be computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceQueue:
    """What one prefill instance has to do at the snapshot."""

    in_flight: Sequence[tuple[float, int]] = ()
    """(estimated finish time b̂, whole prompt) of each request in Prefill: progress before now is in b̂."""
    queued: Sequence[Waiting] = ()
    """The requests that wait for it, in scheduling order."""


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
    arrivals: Sequence[float], services_s: Sequence[float], available_s: Sequence[float]
) -> tuple[list[float], list[float]]:
    """b̂ = max(u, v) + g, v ← b̂, over one instance's requests in scheduling order (eq. 13).

    `available_s` holds v of each of its ranks; a request goes to the one that is available first. Returns all b̂, and v
    of the ranks after the last, in no particular order.
    """
    free, finished = list(available_s), []
    heapify(free)
    for arrival_s, service_s in zip(arrivals, services_s, strict=True):
        finished.append(max(arrival_s, free[0]) + service_s)
        heapreplace(free, finished[-1])
    return finished, free


def decode_admissions(
    *,
    now_s: float,
    horizon_s: float,
    instances: Mapping[WorkerId, InstanceQueue],
    unassigned: Iterable[Waiting],
    arrivals: Iterable[Arrival],
    service_s: Callable[[float], float],
    kv_bytes: Callable[[float], float],
    latency_s: float = 0.0,
    ranks: int = 1,
) -> Admissions:
    """Â^D and K̂^D (eq. 14).

    An instance has `ranks` attention ranks, each of which serves one prompt after the other: eq. (13) holds for each
    rank, and the next prompt of the instance's queue goes to the rank that is available first. `unassigned` are ready
    requests that no instance was chosen for; they and the future `arrivals` go, in the order of their arrival, to the
    rank of all that is available first, as the router sends a prompt to the shortest queue. An arrival of weight q
    takes q of its service time and counts q of its tokens. `service_s` is g, of the tokens to compute; `kv_bytes` is
    κ^D. `latency_s` is what a prompt takes beyond its service, while its rank serves others already: the iteration
    that it is part of. Without an instance nothing is admitted.
    """
    over_s = now_s + horizon_s
    tokens = kv = 0.0
    free: list[tuple[float, WorkerId]] = []
    for id_, queue in instances.items():
        # Prompts in flight beyond the ranks share them: whoever is last on a rank says when it is available.
        ends_s = sorted(max(now_s, finish_s - latency_s) for finish_s, _ in queue.in_flight)
        until_s = [*ends_s[-ranks:], *[now_s] * ranks][:ranks]
        services_s = [service_s(new_tokens) for _, new_tokens in queue.queued]
        finished, until_s = completion_times([now_s] * len(services_s), services_s, until_s)
        prefilled = zip(finished, queue.queued, strict=True)
        admitted = [*queue.in_flight, *((end_s + latency_s, prompt) for end_s, (prompt, _) in prefilled)]
        for finish_s, prompt in admitted:
            if finish_s < over_s:
                tokens += prompt
                kv += kv_bytes(prompt)
        free += [(free_s, id_) for free_s in until_s]
    heapify(free)
    if not free:
        return Admissions(tokens=0.0, kv_bytes=0.0)
    waiting = [Arrival(now_s, prompt, new_tokens=new) for prompt, new in unassigned]
    for arrival in [*waiting, *sorted(arrivals, key=lambda arrival: arrival.at_s)]:
        free_s, id_ = free[0]
        free_s = max(arrival.at_s, free_s) + arrival.weight * service_s(arrival.computed_tokens)
        if free_s + latency_s < over_s:
            tokens += arrival.weight * arrival.tokens
            kv += arrival.weight * kv_bytes(arrival.tokens)
        heapreplace(free, (free_s, id_))
    available: dict[WorkerId, float] = {}
    for free_s, id_ in free:
        available[id_] = max(free_s, available.get(id_, now_s))
    return Admissions(tokens=tokens, kv_bytes=kv, available_s=available)
