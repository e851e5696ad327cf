"""Which bundle of which placement group a process sits on: the GPUs of a slot, or the training GPUs that it shares.

Ray gives all actors of one bundle the same GPUs, which pins a training rank and the overlap workers that borrow its
GPU to one device; who of them holds its memory is for the table alone to say.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pearl_executor.runtimes.local.processes import ProcessError
from pearl_executor.runtimes.ray.cluster import require_ray

RANK_SHARE: Final = 0.4
"""Part of a bundle's GPU that a training rank claims of Ray, so that overlap workers fit beside it."""
WORKER_SHARE: Final = 0.2
"""Part that a rollout worker claims; a successor fits in while its predecessor is still ending."""
_NODE_LABEL: Final = "ray.io/node-id"


@dataclass(frozen=True, slots=True)
class Seat:
    """A bundle."""

    group: Any
    """Ray's placement group."""
    index: int
    gpus: frozenset[int]
    """The run's GPUs that the bundle holds."""
    devices: tuple[str, ...] = ()
    """Ids of the node's GPUs; empty where Ray itself shows a process the right one."""


@dataclass(slots=True, kw_only=True)
class Layout:
    """What runs where. GPUs are the run's own numbers."""

    training: Sequence[int] = ()
    """GPUs of the training pool."""
    kept: frozenset[int] = frozenset()
    """GPUs whose bundles stay for the whole run; those of other slots are given back when their process ends."""
    gpus_per_worker: int = 1
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    """Node labels that `training`, `reserved` and `preemptible` bundles ask for."""
    nodes: dict[int, str] = field(default_factory=dict[int, str])
    """Ray's id of the node that a GPU is on, where its source knows."""


class Bundles:
    """Placement groups of a run."""

    def __init__(self, layout: Layout, *, timeout_s: float) -> None:
        self._layout = layout
        self._timeout_s = timeout_s
        self._seats: dict[frozenset[int], asyncio.Future[Seat]] = {}

    async def seat(self, gpus: Iterable[int]) -> Seat:
        """The bundle that holds `gpus`; it is made where there is none. Raises `ProcessError`."""
        wanted = self._bundle_of(frozenset(gpus))
        pending = self._seats.get(wanted)
        if pending is None:
            pending = self._seats[wanted] = asyncio.ensure_future(self._make(wanted))
        try:
            return await asyncio.shield(pending)
        except ProcessError:
            self._seats.pop(wanted, None)
            raise

    def leave(self, seat: Seat) -> None:
        """Nobody sits there any more: a bundle that is not kept goes back to the cluster."""
        if seat.gpus & (self._layout.kept | set(self._layout.training)):
            return
        self._seats.pop(seat.gpus, None)
        require_ray().util.remove_placement_group(seat.group)

    def close(self) -> None:
        """Give all bundles back."""
        for pending in self._seats.values():
            if pending.done() and not pending.cancelled() and pending.exception() is None:
                require_ray().util.remove_placement_group(pending.result().group)
            pending.cancel()
        self._seats.clear()

    def _bundle_of(self, gpus: frozenset[int]) -> frozenset[int]:
        """A training GPU's bundle holds the GPUs of one overlap worker, which spans as many ranks."""
        training = self._layout.training
        if not gpus <= set(training):
            return gpus
        size = self._layout.gpus_per_worker if len(training) % self._layout.gpus_per_worker == 0 else 1
        first = min(gpus) - min(training)
        start = min(training) + first - first % size
        return frozenset(range(start, start + size))

    async def _make(self, gpus: frozenset[int]) -> Seat:
        ray = require_ray()
        layout = self._layout
        zone = "reserved" if gpus <= layout.kept else "preemptible"
        zone = "training" if gpus <= set(layout.training) else zone
        selector = dict(layout.labels.get(zone, {}))
        nodes = {layout.nodes[gpu] for gpu in gpus if gpu in layout.nodes}
        if len(nodes) == 1:
            selector[_NODE_LABEL] = nodes.pop()
        group = ray.util.placement_group(
            [{"GPU": float(len(gpus))}],
            strategy="STRICT_PACK",
            bundle_label_selector=[selector] if selector else None,
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                await group.ready()
                devices = await self._devices(group, len(gpus))
        except (TimeoutError, ray.exceptions.RayError) as error:
            ray.util.remove_placement_group(group)
            asked = f" with labels {selector}" if selector else ""
            raise ProcessError(
                f"no node{asked} has {len(gpus)} free GPUs together for {sorted(gpus)} within {self._timeout_s:g} s"
                f" ({type(error).__name__})"
            ) from error
        return Seat(group, 0, gpus, devices)

    async def _devices(self, group: Any, count: int) -> tuple[str, ...]:
        """Which of its node's GPUs a bundle of several has; only who claims them all is told."""
        if count == 1:
            return ()
        ray = require_ray()
        look = ray.remote(_visible).options(num_cpus=0, num_gpus=count, scheduling_strategy=strategy(group, 0))
        devices: tuple[str, ...] = await look.remote()
        return devices


def strategy(group: Any, index: int) -> Any:
    """Ray's scheduling strategy for a bundle."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)


def _visible() -> tuple[str, ...]:
    return tuple(str(gpu) for gpu in require_ray().get_gpu_ids())
