"""Preemptible GPUs as Ray sees them: a node that joins is an offer, one that drains or is lost is a reclaim.

A drain is Ray's preemption notice (`ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION`), which autoscalers and
watchers of a provider's notices send. Ray keeps no deadline itself: whoever drains takes the node away.
https://docs.ray.io/en/releases-2.60.0/ray-core/fault_tolerance/nodes.html
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pearl_executor.availability import AvailabilityEvent, DevicePool
from pearl_executor.runtimes.local.processes import ProcessError
from pearl_executor.runtimes.ray.actors import NodeWatcher
from pearl_executor.runtimes.ray.cluster import require_ray
from pearl_executor.runtimes.ray.nodes import on_node
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
Watch = Callable[[str], Coroutine[Any, Any, float]]
"""Waits for a node's preemption notice; returns the seconds until the node goes."""


async def watch_node(node: str, kind: str, notice_s: float, base: str = "") -> float:
    """Have `node` listen to its provider (a `preemption` source by name) until it gives notice."""
    watcher = on_node(require_ray().remote(NodeWatcher), node)
    leaves_in_s, reason = await watcher.first.remote(kind, notice_s, base)
    _log.warning("node %s: %s", node[:12], reason)
    require_ray().kill(watcher, no_restart=True)
    left_s: float = leaves_in_s
    return left_s


def look_at_cluster(labels: Mapping[str, str], notice_s: float) -> list[NodeState]:
    """The living nodes that carry all of `labels`. A drain without a deadline counts as due in `notice_s`. Blocking.

    Raises `ProcessError` where the cluster does not answer.
    """
    ray = require_ray()
    try:
        draining, found = _draining(), ray.nodes()
    except ray.exceptions.RayError as error:
        raise ProcessError(str(error)) from error
    # Ray gives deadlines by the wall clock; they are turned into durations here, where they come in.
    wall_s = time.time()  # noqa: TID251
    nodes: list[NodeState] = []
    for node in found:
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
    notice: "asyncio.Task[float] | None" = None
    """Waits for the provider's own notice."""
    gone_at_s: float | None = None
    """When it goes, by that notice."""

    def hear(self, now_s: float) -> float | None:
        """Seconds until it goes by its provider's notice; None where there is none. A watcher that broke says none."""
        if self.gone_at_s is None and self.notice is not None and self.notice.done() and not self.notice.cancelled():
            error = self.notice.exception()
            if error is None:
                self.gone_at_s = now_s + self.notice.result()
            elif not self.left:
                _log.warning("nobody listens to the node's provider any more: %s", error)
                self.notice = None
        return None if self.gone_at_s is None else self.gone_at_s - now_s


class RayNodeSource:
    """Offers the GPUs of matching nodes under the run's numbers `gpus`, whole workers at a time; runs until closed.

    `nodes` (shared with placement) says on which node each number is. A node is looked for every `poll_s` seconds; one
    that Ray calls dead is reclaimed at once, with a deadline that is over. `watch` hears of a node's preemption where
    Ray does not: it runs for each node that is used.
    """

    def __init__(
        self,
        look: Look,
        *,
        gpus: Iterable[int],
        nodes: dict[int, str],
        gpus_per_worker: int = 1,
        poll_s: float = 0.5,
        watch: Watch | None = None,
    ) -> None:
        self._look = look
        self._pool = DevicePool(gpus)
        self._places = nodes
        self._size = gpus_per_worker
        self._poll_s = poll_s
        self._watch = watch
        self._nodes: dict[str, _Node] = {}

    async def events(self) -> AsyncIterator[AvailabilityEvent]:
        """Offers and reclaims as nodes come, drain and are lost."""
        try:
            async for event in self._follow():
                yield event
        finally:
            for node in self._nodes.values():
                if node.notice is not None:
                    node.notice.cancel()

    async def _follow(self) -> AsyncIterator[AvailabilityEvent]:
        while True:
            try:
                async with asyncio.timeout(_LOOK_TIMEOUT_S):
                    seen = {node.id: node for node in await asyncio.to_thread(self._look)}
            except (TimeoutError, ProcessError) as error:
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
            if node.left:
                continue
            state = seen.get(id_)
            told = [0.0] if state is None else [state.leaves_in_s, node.hear(now_s)]
            left = [leaves_in_s for leaves_in_s in told if leaves_in_s is not None]
            if not left:
                continue
            node.left = True
            deadline_s = now_s + min(left)
            held = self._pool.recall(node.gpus)
            if held:
                events.append(GpusReclaimed(now_s=now_s, gpus=held, deadline_s=deadline_s))
        for id_ in [id_ for id_, node in self._nodes.items() if node.left and id_ not in seen]:
            notice = self._nodes.pop(id_).notice
            if notice is not None:
                notice.cancel()
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
            watching = None if self._watch is None else asyncio.get_running_loop().create_task(self._watch(id_))
            self._nodes[id_] = _Node(gpus, notice=watching)
            self._places.update(dict.fromkeys(gpus, id_))
            events.append(GpusOffered(now_s=now_s, gpus=gpus, node=id_[:12]))
        return events

    def returned(self, gpus: frozenset[GpuId]) -> None:
        """Nothing of ours is left on `gpus`; their numbers may be another node's."""
        self._pool.returned(gpus)
        for gpu in gpus & self._pool.all:
            self._places.pop(gpu, None)
