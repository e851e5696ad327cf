"""Preemptible GPUs as Ray sees them: a node that joins is an offer, one that drains or is lost is a reclaim.

A drain is Ray's preemption notice (`ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION`), which autoscalers and
watchers of a provider's notices send. Ray keeps no deadline itself: whoever drains takes the node away.
https://docs.ray.io/en/releases-2.60.0/ray-core/fault_tolerance/nodes.html
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pearl_executor.availability import AvailabilityEvent, DevicePool
from pearl_executor.runtimes.ray.cluster import require_ray
from pearl_state.events import GpusOffered, GpusReclaimed
from pearl_state.worker import GpuId

_log = logging.getLogger(__name__)
_LOOK_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class NodeState:
    """A living node that matches."""

    id: str
    gpus: int
    leaves_in_s: float | None = None
    """Seconds until it is taken away, where it drains."""


Look = Callable[[], Sequence[NodeState]]


def look_at_cluster(labels: Mapping[str, str], notice_s: float) -> list[NodeState]:
    """The living nodes that carry all of `labels`. A drain without a deadline counts as due in `notice_s`. Blocking."""
    draining = _draining()
    # Ray gives deadlines by the wall clock; they are turned into durations here, where they come in.
    wall_s = time.time()  # noqa: TID251
    nodes: list[NodeState] = []
    for node in require_ray().nodes():
        if not node["Alive"] or any(node.get("Labels", {}).get(key) != value for key, value in labels.items()):
            continue
        deadline_ms = draining.get(node["NodeID"])
        leaves_in_s = None if deadline_ms is None else deadline_ms / 1000 - wall_s if deadline_ms > 0 else notice_s
        nodes.append(NodeState(node["NodeID"], int(node["Resources"].get("GPU", 0)), leaves_in_s))
    return nodes


def _draining() -> dict[str, int]:
    """Draining nodes and their deadlines, milliseconds of the wall clock. Ray has no public call for it."""
    try:
        from ray._private.state import state

        draining: dict[str, int] = state.get_draining_nodes()
    except (ImportError, AttributeError) as error:
        _log.warning("this Ray does not say which nodes drain (%s); only lost nodes are noticed", error)
        return {}
    return draining


@dataclass(slots=True)
class _Node:
    gpus: frozenset[GpuId]
    left: bool = False
    """Reclaimed; never offered again."""


class RayNodeSource:
    """Offers the GPUs of matching nodes under the run's numbers `gpus`, whole workers at a time; runs until closed.

    `nodes` (shared with placement) says on which node each number is. A node is looked for every `poll_s` seconds; one
    that Ray calls dead is reclaimed at once, with a deadline that is over.
    """

    def __init__(
        self,
        look: Look,
        *,
        gpus: Iterable[int],
        nodes: dict[int, str],
        gpus_per_worker: int = 1,
        poll_s: float = 0.5,
    ) -> None:
        self._look = look
        self._pool = DevicePool(gpus)
        self._places = nodes
        self._size = gpus_per_worker
        self._poll_s = poll_s
        self._nodes: dict[str, _Node] = {}

    async def events(self) -> AsyncIterator[AvailabilityEvent]:
        """Offers and reclaims as nodes come, drain and are lost."""
        while True:
            try:
                async with asyncio.timeout(_LOOK_TIMEOUT_S):
                    seen = {node.id: node for node in await asyncio.to_thread(self._look)}
            except (TimeoutError, require_ray().exceptions.RayError) as error:
                _log.warning("the cluster's nodes cannot be seen: %s", error or f"no answer in {_LOOK_TIMEOUT_S:g} s")
            else:
                for reclaim in self._reclaims(seen):
                    yield reclaim
                for offer in self._offers(seen):
                    yield offer
            await asyncio.sleep(self._poll_s)

    def _reclaims(self, seen: Mapping[str, NodeState]) -> list[GpusReclaimed]:
        now_s = asyncio.get_running_loop().time()
        events = []
        for id_, node in self._nodes.items():
            state = seen.get(id_)
            if node.left or (state is not None and state.leaves_in_s is None):
                continue
            node.left = True
            deadline_s = now_s + (0.0 if state is None or state.leaves_in_s is None else state.leaves_in_s)
            held = self._pool.recall(node.gpus)
            if held:
                events.append(GpusReclaimed(now_s=now_s, gpus=held, deadline_s=deadline_s))
        for id_ in [id_ for id_, node in self._nodes.items() if node.left and id_ not in seen]:
            del self._nodes[id_]
        return events

    def _offers(self, seen: Mapping[str, NodeState]) -> list[GpusOffered]:
        now_s = asyncio.get_running_loop().time()
        events = []
        for id_, state in seen.items():
            free = self._pool.free
            count = min(state.gpus, len(free)) // self._size * self._size
            if id_ in self._nodes or state.leaves_in_s is not None or count == 0:
                continue
            gpus = self._pool.give(free[:count])
            self._nodes[id_] = _Node(gpus)
            self._places.update(dict.fromkeys(gpus, id_))
            events.append(GpusOffered(now_s=now_s, gpus=gpus, node=id_[:12]))
        return events

    def returned(self, gpus: frozenset[GpuId]) -> None:
        """Nothing of ours is left on `gpus`; their numbers may be another node's."""
        self._pool.returned(gpus)
        for gpu in gpus & self._pool.all:
            self._places.pop(gpu, None)
