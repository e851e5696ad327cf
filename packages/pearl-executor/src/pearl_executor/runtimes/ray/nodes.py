"""One warden a node: it ends processes for certain, and cleans up after the run."""

import asyncio
import logging
from typing import Any, Final

from pearl_executor.runtimes.ray.actors import NodeWarden, Whereabouts, remove_folder
from pearl_executor.runtimes.ray.cluster import require_ray

_log = logging.getLogger(__name__)
_END_S: Final = 5.0
_CLEAN_S: Final = 10.0
_RETRY_S: Final = 0.5


class Wardens:
    """The wardens of the nodes that have children of `run`."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._wardens: dict[str, Any] = {}

    def watch(self, node: str) -> None:
        """Have a warden on `node`; it starts in the background."""
        if node not in self._wardens:
            self._wardens[node] = self._on_node(require_ray().remote(NodeWarden), node)

    async def end(self, where: Whereabouts) -> None:
        """End a process and return once it is gone, alone or with its node. May wait for ever: bound it."""
        while True:
            self.watch(where.node)
            try:
                if await self._wardens[where.node].end.remote(where.pid, where.started, _END_S):
                    return
                _log.warning("process %d is still there %g s after SIGKILL", where.pid, _END_S)
            except require_ray().exceptions.RayError:
                # Its node is gone, or only the warden: another one is asked then.
                self._wardens.pop(where.node, None)
                if where.node not in _alive():
                    return
                await asyncio.sleep(_RETRY_S)

    async def aclose(self) -> None:
        """Remove what the run kept on nodes, and the wardens. A node that is gone took it along."""
        ray = require_ray()
        removals = [self._on_node(ray.remote(remove_folder), node, self._run) for node in set(self._wardens) & _alive()]
        if removals:
            _, missing = await asyncio.to_thread(ray.wait, removals, num_returns=len(removals), timeout=_CLEAN_S)
            if missing:
                _log.warning("%d of %d nodes did not remove their copies of weights", len(missing), len(removals))
        for warden in self._wardens.values():
            ray.kill(warden, no_restart=True)
        self._wardens.clear()

    def _on_node(self, remote: Any, node: str, *arguments: Any) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        place = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        return remote.options(num_cpus=0, scheduling_strategy=place).remote(*arguments)


def _alive() -> set[str]:
    return {node["NodeID"] for node in require_ray().nodes() if node["Alive"]}
