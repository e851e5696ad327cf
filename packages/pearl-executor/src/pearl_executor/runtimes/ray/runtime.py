"""RayRuntime: `WorkerPort` and `GenerationPort` over rollout workers that are Ray actors.

The worker processes, their protocol, heartbeat and incarnations are the local runtime's; what differs is who starts
and ends them (`RayProcesses`), that they may be on other machines, and that weights travel through the object store.
"""

from dataclasses import replace

from pearl_executor.ports import WeightSnapshot
from pearl_executor.runtimes.local.fleet import OnLost, Timeouts
from pearl_executor.runtimes.local.hosting import EngineRecipe
from pearl_executor.runtimes.local.runtime import LocalRuntime
from pearl_executor.runtimes.ray.processes import RayProcesses
from pearl_executor.runtimes.ray.snapshots import ObjectSnapshots
from pearl_state.worker import Worker


class RayRuntime(LocalRuntime):
    """Rollout workers on a Ray cluster. Use as an async context manager inside that of `processes`."""

    def __init__(
        self,
        recipe: EngineRecipe,
        processes: RayProcesses,
        *,
        timeouts: Timeouts | None = None,
        on_lost: OnLost | None = None,
    ) -> None:
        super().__init__(recipe, forks=processes, timeouts=timeouts, on_lost=on_lost)
        self._snapshots = ObjectSnapshots(processes)

    async def load_weights(self, worker: Worker, snapshot: WeightSnapshot) -> int:
        """Bring a snapshot to the worker's node, unless it is there, and load it."""
        folder = await self._snapshots.stage(self._fleet.member(worker).child, snapshot)
        return await super().load_weights(worker, replace(snapshot, uri=folder))
