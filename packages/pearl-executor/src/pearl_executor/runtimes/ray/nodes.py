"""One warden a node: it answers the heartbeat, ends processes for certain, and cleans up after the run.

Ray notices that a node is gone after some sixteen seconds; routing cannot wait for that. A worker's own silence does
not tell either, since loading weights keeps it busy for long; its node's warden is never busy.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from pearl_executor.runtimes.ray.actors import NodeWarden, Whereabouts
from pearl_executor.runtimes.ray.cluster import require_ray

_log = logging.getLogger(__name__)
_START_S: Final = 60.0
_BEAT_S: Final = 1.0
_END_S: Final = 5.0
_CLEAN_S: Final = 10.0
_RETRY_S: Final = 0.5


class Wardens:
    """The wardens of the nodes that have children of `run`.

    `on_silent` is called with a node and the cause when nothing was heard of it for `silence_s` seconds.
    """

    def __init__(self, run: str, silence_s: float, on_silent: Callable[[str, str], None]) -> None:
        self._run = run
        self._silence_s = silence_s
        self._on_silent = on_silent
        self._wardens: dict[str, Any] = {}
        self._beats: dict[str, asyncio.Task[None]] = {}

    def watch(self, node: str) -> None:
        """Have a warden on `node` and listen to its heart; it starts in the background."""
        if node not in self._wardens:
            self._wardens[node] = self._new(node)
        if node not in self._beats or self._beats[node].done():
            self._beats[node] = asyncio.get_running_loop().create_task(self._listen(node))

    async def _listen(self, node: str) -> None:
        """Ask for one beat after the other until one does not come."""
        limit_s = _START_S
        while node in self._wardens:
            try:
                async with asyncio.timeout(limit_s):
                    await self._wardens[node].beat.remote()
            except TimeoutError:
                return self._lost(node, f"no sign of life of its node for {limit_s:g} s")
            except require_ray().exceptions.RayError:
                self._wardens.pop(node, None)
                if node not in await asyncio.to_thread(_alive):
                    return self._lost(node, "its node is gone")
                self._wardens[node] = self._new(node)
            limit_s = self._silence_s
            await asyncio.sleep(_BEAT_S)
        return None

    def _lost(self, node: str, cause: str) -> None:
        _log.warning("node %s: %s", node[:12], cause)
        self._on_silent(node, cause)

    async def end(self, where: Whereabouts) -> None:
        """End a process and return once it is gone, alone or with its node. May wait for ever: bound it."""
        while True:
            warden = self._wardens.get(where.node)
            if warden is None:
                warden = self._wardens[where.node] = self._new(where.node)
            try:
                if await warden.end.remote(where.pid, where.started, _END_S):
                    return
                _log.warning("process %d is still there %g s after SIGKILL", where.pid, _END_S)
            except require_ray().exceptions.RayError:
                # Its node is gone, or only the warden: another one is asked then.
                self._wardens.pop(where.node, None)
                if where.node not in await asyncio.to_thread(_alive):
                    return
                await asyncio.sleep(_RETRY_S)

    async def aclose(self) -> None:
        """Remove what the run kept on nodes, and the wardens. A node that is gone took it along."""
        ray = require_ray()
        for task in self._beats.values():
            task.cancel()
        await asyncio.gather(*self._beats.values(), return_exceptions=True)
        alive = await asyncio.to_thread(_alive)
        removals = [warden.clean.remote(self._run) for node, warden in self._wardens.items() if node in alive]
        if removals:
            _, missing = await asyncio.to_thread(ray.wait, removals, num_returns=len(removals), timeout=_CLEAN_S)
            if missing:
                _log.warning("%d of %d nodes did not remove their copies of weights", len(missing), len(removals))
        for warden in self._wardens.values():
            ray.kill(warden, no_restart=True)
        self._wardens.clear()

    def _new(self, node: str) -> Any:
        # A beat is answered beside the end of a process that takes its time.
        return on_node(require_ray().remote(max_concurrency=8)(NodeWarden), node)


def on_node(remote: Any, node: str, *arguments: Any) -> Any:
    """Start a remote function or class on `node`, and nowhere else; it claims nothing of the node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    place = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return remote.options(num_cpus=0, scheduling_strategy=place).remote(*arguments)


def _alive() -> set[str]:
    return {node["NodeID"] for node in require_ray().nodes() if node["Alive"]}
