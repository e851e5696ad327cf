"""Where a run's processes live, as `cluster.runtime` says: this machine, or a Ray cluster."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pearl_executor.runtimes.local.fleet import OnLost, Timeouts
from pearl_executor.runtimes.local.hosting import EngineRecipe
from pearl_executor.runtimes.local.processes import ForkServer, ProcessServer
from pearl_executor.runtimes.local.runtime import LocalRuntime
from pearl_rl.settings import Settings
from pearl_rl.settings.labels import parse_labels


@dataclass(frozen=True, slots=True)
class Processes:
    """What starts a run's processes, and on which node of a cluster each of the run's GPUs is."""

    server: ProcessServer
    nodes: dict[int, str] = field(default_factory=dict[int, str])
    """Filled by an availability source that follows nodes, read when a worker is placed."""


@asynccontextmanager
async def open_processes(settings: Settings, log_folder: Path, preload: Sequence[str]) -> AsyncIterator[Processes]:
    """The processes of `cluster.runtime`; all are gone afterwards. Raises `ProcessError`."""
    if settings.cluster.runtime == "local":
        async with ForkServer(log_folder, preload=preload) as forks:
            yield Processes(forks)
        return
    from pearl_executor.runtimes.ray.cluster import RayCluster
    from pearl_executor.runtimes.ray.placement import Layout
    from pearl_executor.runtimes.ray.processes import RayProcesses

    cluster = settings.cluster
    training = range(cluster.training_gpus)
    reserved = range(cluster.training_gpus, cluster.training_gpus + cluster.reserved_rollout_gpus)
    layout = Layout(
        training=training,
        kept=frozenset(reserved),
        gpus_per_worker=cluster.gpus_per_worker if cluster.borrowing != "off" else 1,
        labels={
            "training": parse_labels(cluster.ray.training_labels),
            "reserved": parse_labels(cluster.ray.reserved_labels),
            "preemptible": parse_labels(cluster.ray.preemptible_labels),
        },
    )
    async with (
        RayCluster(
            cluster.ray.address,
            namespace="pearl",
            gpus=len(training) + len(reserved) + cluster.max_preemptible_gpus,
        ) as connection,
        RayProcesses(
            connection, layout, start_s=cluster.ray.start_s, node_silence_s=cluster.ray.node_silence_s
        ) as actors,
    ):
        yield Processes(actors, layout.nodes)


def worker_runtime(
    recipe: EngineRecipe, processes: Processes, timeouts: Timeouts, on_lost: OnLost | None
) -> LocalRuntime:
    """Rollout workers over `processes`; not opened yet."""
    if isinstance(processes.server, ForkServer):
        return LocalRuntime(recipe, forks=processes.server, timeouts=timeouts, on_lost=on_lost)
    from pearl_executor.runtimes.ray.processes import RayProcesses
    from pearl_executor.runtimes.ray.runtime import RayRuntime

    assert isinstance(processes.server, RayProcesses)
    return RayRuntime(recipe, processes.server, timeouts=timeouts, on_lost=on_lost)
