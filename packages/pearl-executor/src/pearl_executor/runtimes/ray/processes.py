"""The run's processes as Ray actors: a `ProcessServer` over a cluster.

An actor never restarts by itself (`max_restarts=0`): a silent successor would serve stale weights. Its end is known
from its connection at once, from the fleet's heartbeat where its node is cut off, and is confirmed by Ray; only then
its GPUs may be given to others.
"""

import asyncio
import contextlib
import itertools
import logging
import secrets
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from pearl_executor.runtimes.local.channels import Channel, Listener
from pearl_executor.runtimes.local.processes import ONE_THREAD, ChildProcess, ProcessError
from pearl_executor.runtimes.ray.actors import (
    NODE_ADDRESS,
    ChildActor,
    Whereabouts,
)
from pearl_executor.runtimes.ray.cluster import RayCluster, require_ray
from pearl_executor.runtimes.ray.nodes import Wardens
from pearl_executor.runtimes.ray.placement import RANK_SHARE, WORKER_SHARE, Bundles, Layout, Seat, strategy

_log = logging.getLogger(__name__)
_CONFIRM_S: Final = 10.0


class _Living:
    """A child and what Ray knows of it."""

    def __init__(self, child: ChildProcess, actor: Any, seat: Seat | None) -> None:
        self.child = child
        self.actor = actor
        self.seat = seat
        self.where: Whereabouts | None = None
        self.watching: list[asyncio.Future[Any]] = []


class RayProcesses:
    """Starts and ends children on a cluster. Use as an async context manager, inside the cluster's.

    `start_s` bounds a start: placement, and the actor's process. A node that gives no sign of life for
    `node_silence_s` seconds takes its children along.
    """

    def __init__(
        self, cluster: RayCluster, layout: Layout, *, start_s: float = 180.0, node_silence_s: float = 8.0
    ) -> None:
        self.run = secrets.token_hex(4)
        """Names this run's actors and its folder on each node."""
        self.peer_key = secrets.token_hex(16)
        self._cluster = cluster
        self._layout = layout
        self._start_s = start_s
        self._bundles = Bundles(layout, timeout_s=start_s)
        self._listener: Listener | None = None
        self._living: dict[str, _Living] = {}
        self._numbers = itertools.count(1)
        self._wardens = Wardens(self.run, node_silence_s, self._node_lost)

    async def __aenter__(self) -> Self:
        self._listener = Listener(self._cluster.host)
        await self._listener.open()
        _log.info("children on the cluster connect to %s", self._listener.address)
        return self

    async def __aexit__(self, *exc: object) -> None:
        living = list(self._living.values())
        await asyncio.gather(*(self.kill(entry.child) for entry in living), return_exceptions=True)
        for entry in living:
            entry.child.channel.close()
            for task in entry.watching:
                task.cancel()
        self._bundles.close()
        await self._wardens.aclose()
        if self._listener is not None:
            await self._listener.aclose()

    def peer_address(self, name: str) -> str:
        """A free TCP port at the address of whatever node the child comes to."""
        del name
        return NODE_ADDRESS

    async def spawn(
        self,
        name: str,
        target: str,
        arguments: Mapping[str, Any],
        *,
        environment: Mapping[str, str] | None = None,
        gpus: Sequence[int] = (),
    ) -> ChildProcess:
        """Start an actor on the bundle of `gpus`, or on this process's node without; returns once it is connected."""
        if self._listener is None:
            raise ProcessError(f"cannot start {name}: the cluster's processes are not open")
        if name in self._living:
            raise ProcessError(f"cannot start {name}: a process of that name lives")
        seat = await self._bundles.seat(gpus) if gpus else None
        secret, connected = self._listener.expect()
        exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        child = ChildProcess(name, 0, Channel(), Path(), exited)
        entry = self._living[name] = _Living(child, self._create(name, seat), seat)
        try:
            async with asyncio.timeout(self._start_s):
                await self._launch(entry, target, secret, arguments, environment or {})
                waiting: set[asyncio.Future[Any]] = {connected, exited}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not connected.done():
                raise ProcessError(f"cannot start {name}: {child.how_it_ended()}")
            child.channel = connected.result()
        except BaseException as error:
            connected.cancel()
            with contextlib.suppress(ProcessError):
                await asyncio.shield(asyncio.ensure_future(self.kill(child)))
            if isinstance(error, TimeoutError):
                raise ProcessError(f"cannot start {name}: no actor came up within {self._start_s:g} s") from None
            if isinstance(error, require_ray().exceptions.RayError):
                raise ProcessError(f"cannot start {name}: {_reason(error)}") from error
            raise
        return child

    def _create(self, name: str, seat: Seat | None) -> Any:
        if seat is None:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            share = 0.0
            place: Any = NodeAffinitySchedulingStrategy(node_id=self._cluster.node, soft=False)
        else:
            share = RANK_SHARE if name.startswith("train") else WORKER_SHARE
            place = strategy(seat.group, seat.index)
        options = {
            # A number too: Ray may not have forgotten an earlier one of the same name yet.
            "name": f"{self.run}-{name}-{next(self._numbers)}",
            "num_cpus": 0,
            "num_gpus": share,
            "max_restarts": 0,
            "max_task_retries": 0,
            # `run` and `hold` last; some threads are left for what is asked beside them.
            "max_concurrency": 5,
            "scheduling_strategy": place,
        }
        return require_ray().remote(ChildActor).options(**options).remote()

    async def _launch(
        self,
        entry: _Living,
        target: str,
        secret: str,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
    ) -> None:
        assert self._listener is not None
        entry.where = await entry.actor.describe.remote()
        assert entry.where is not None
        entry.child.pid = entry.where.pid
        self._wardens.watch(entry.where.node)
        variables = {**ONE_THREAD, **environment}
        if entry.seat is not None and entry.seat.devices:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self._devices(entry))
        done = entry.actor.run.remote(
            target, self._listener.address, secret, dict(arguments), variables, self._cluster.loopback
        )
        gone = entry.actor.hold.remote()
        entry.watching = [
            asyncio.ensure_future(self._watch_target(entry, done)),
            asyncio.ensure_future(self._watch_process(entry, gone)),
        ]

    def _devices(self, entry: _Living) -> tuple[str, ...]:
        """The devices of a child on a bundle of several GPUs: a rank has one of them, an overlap worker all."""
        assert entry.seat is not None
        devices, name = entry.seat.devices, entry.child.name
        if not name.startswith("train"):
            return devices
        rank = int(name.removeprefix("train").partition("-")[0])
        return (devices[rank % len(devices)],)

    async def _watch_target(self, entry: _Living, done: Any) -> None:
        """A target that ended by itself takes its process with it."""
        exceptions = require_ray().exceptions
        cause = "exited with code 0"
        try:
            await done
        except exceptions.RayTaskError as error:
            cause = f"exited with code 1: {_reason(error)}"
        except exceptions.RayError:
            return
        entry.child.cause = entry.child.cause or cause
        require_ray().kill(entry.actor, no_restart=True)

    async def _watch_process(self, entry: _Living, gone: Any) -> None:
        try:
            await gone
        except require_ray().exceptions.RayError as error:
            entry.child.cause = entry.child.cause or _reason(error)
            if not entry.child.exited.done():
                entry.child.exited.set_result(-signal.SIGKILL)

    def _node_lost(self, node: str, cause: str) -> None:
        """Hang up on the children of a node that is silent: whoever talks to them learns of it now."""
        for entry in list(self._living.values()):
            if entry.where is not None and entry.where.node == node:
                entry.child.cause = entry.child.cause or cause
                entry.child.channel.close()

    async def kill(self, child: ChildProcess) -> None:
        """End a child for certain; returns when its node confirms it, or Ray that the node is gone.

        Raises `ProcessError` where neither happens in time; it may be asked again.
        """
        entry = self._living.get(child.name)
        if entry is None or entry.child is not child:
            return
        require_ray().kill(entry.actor, no_restart=True)
        if not entry.watching:
            entry.watching = [asyncio.ensure_future(self._watch_process(entry, entry.actor.hold.remote()))]
        try:
            async with asyncio.timeout(_CONFIRM_S):
                await asyncio.shield(child.exited)
                if entry.where is not None:
                    await self._wardens.end(entry.where)
        except TimeoutError:
            raise ProcessError(
                f"{child.name} (process {child.pid}) is not confirmed to be gone; its node may be cut off"
            ) from None
        self._living.pop(child.name, None)
        if entry.seat is not None:
            self._bundles.leave(entry.seat)

    async def stage(self, child: ChildProcess, snapshot: str, names: Sequence[str], contents: Sequence[Any]) -> str:
        """Bring files of the object store (`contents`: references) to the child's node. Raises `ProcessError`."""
        entry = self._living.get(child.name)
        if entry is None:
            raise ProcessError(f"{child.name} is gone: {child.how_it_ended()}")
        try:
            folder: str = await entry.actor.stage.remote(self.run, snapshot, list(names), *contents)
        except require_ray().exceptions.RayError as error:
            raise ProcessError(f"{child.name} got no weights: {_reason(error)}") from error
        return folder


def _reason(error: BaseException) -> str:
    """Why Ray says that something ended, in one line."""
    text = str(error)
    if getattr(error, "preempted", False):
        return "its node was preempted"
    if "node has died" in text or "node is dead" in text or "node failure" in text:
        return "its node is gone"
    if "ray.kill" in text:
        return "ended by SIGKILL"
    if "worker process has died" in text:
        return "its process was ended from outside or crashed"
    cause = getattr(error, "cause", None)
    lines = str(cause or text).strip().splitlines() or [type(error).__name__]
    return lines[-1] if cause is None else lines[0]
