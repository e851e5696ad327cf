"""Which engine a run's rollout workers are, as `engine.kind` says: the embedded torch engine, or SGLang servers."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol

from pearl_executor.engines.sglang.options import MemoryProbe, SglangOptions, SglangTimeouts, WeightTransport
from pearl_executor.ports import GenerationPort, WorkerPort
from pearl_executor.runtimes.local.fleet import OnLost
from pearl_executor.runtimes.local.hosting import EngineRecipe
from pearl_rl import parts
from pearl_rl.runtimes import Processes, worker_runtime
from pearl_rl.settings import Settings
from pearl_state.roles import Role
from pearl_state.table import WorkerTable
from pearl_state.worker import GpuId


class RolloutRuntime(WorkerPort, GenerationPort, Protocol):
    """What control, rollout and refit need of the workers."""


def rollout_runtime(
    settings: Settings,
    recipe: EngineRecipe,
    processes: Processes,
    model_dir: Path,
    folder: Path,
    on_lost: OnLost,
) -> AbstractAsyncContextManager[RolloutRuntime]:
    """The run's workers; entering it makes them ready to start. `folder` takes logs."""
    if settings.engine.kind == "torch":
        return worker_runtime(recipe, processes, parts.timeouts(settings), on_lost)
    from pearl_executor.engines.sglang.runtime import SglangRuntime

    options = sglang_options(settings, model_dir)
    launcher = None
    if settings.cluster.runtime == "ray":
        from pearl_executor.runtimes.ray.processes import RayProcesses
        from pearl_executor.runtimes.ray.sglang_launcher import RayLauncher

        assert isinstance(processes.server, RayProcesses)
        launcher = RayLauncher(processes.server, options.interpreter, options.kill_command)
    return SglangRuntime(options, folder, timeouts=sglang_timeouts(settings), launcher=launcher, on_lost=on_lost)


@asynccontextmanager
async def gateway_mirror(settings: Settings, runtime: RolloutRuntime) -> AsyncIterator[Callable[[WorkerTable], None]]:
    """What shows each new table to the gateway that the settings name; without one it does nothing."""
    url = settings.engine.sglang.gateway
    if settings.engine.kind != "sglang" or not url:
        yield lambda _table: None
        return
    from pearl_executor.engines.sglang.gateway import GatewayMirror
    from pearl_executor.engines.sglang.runtime import SglangRuntime

    assert isinstance(runtime, SglangRuntime)
    async with GatewayMirror(url, runtime.member) as mirror:
        yield mirror.apply


def sglang_options(settings: Settings, model_dir: Path) -> SglangOptions:
    """How SGLang workers are started. Raises `ValueError` for what none could be started with."""
    engine, chosen = settings.engine, settings.engine.sglang
    return SglangOptions(
        interpreter=tuple(chosen.interpreter),
        model_dir=model_dir,
        host=chosen.host,
        device=engine.device,
        dtype=settings.model.dtype,
        kv_tokens=engine.kv_tokens,
        memory_fraction=chosen.memory_fraction,
        max_running=engine.max_running,
        prefill_chunk_tokens=engine.prefill_chunk_tokens,
        transfer_backend=chosen.transfer_backend,
        load_format=chosen.load_format,
        weights=WeightTransport(chosen.weights),
        weight_backend="nccl" if engine.device == "cuda" else "gloo",
        memory_probe=MemoryProbe.NVIDIA_SMI if engine.device == "cuda" else MemoryProbe.PROCESS,
        held=_training_groups(settings) if chosen.gated else (),
        held_role=Role.DECODE if "P" in settings.planner.configuration else Role.COLOCATED,
        # A CPU captures no graphs, and a first flip to decode wants to be told so.
        decode_graph_gb=None if engine.device == "cuda" else 0.0,
        gpus_per_worker=settings.cluster.gpus_per_worker,
        extra_args=tuple(chosen.extra_args),
        env=dict(entry.split("=", 1) for entry in chosen.variables),
        kill_command=tuple(chosen.kill_command),
        open_ports=chosen.open_ports,
        seed=settings.run.seed,
    )


def _training_groups(settings: Settings) -> tuple[frozenset[GpuId], ...]:
    """The GPUs of each overlap worker, as the control plane binds them."""
    cluster = settings.cluster
    if cluster.borrowing == "off":
        return ()
    size = cluster.gpus_per_worker
    starts = range(0, cluster.training_gpus - size + 1, size)
    return tuple(frozenset(GpuId(gpu) for gpu in range(start, start + size)) for start in starts)


def sglang_timeouts(settings: Settings) -> SglangTimeouts:
    """Bounds of its waits, from those of the executors, which bound each call again."""
    bounds = settings.limits.executor
    return SglangTimeouts(
        start_s=bounds.start_s,
        control_s=max(bounds.load_s, bounds.sync_s, bounds.release_s, bounds.resume_s, bounds.switch_s),
        stop_s=bounds.stop_s,
        silence_s=settings.engine.sglang.silence_s,
        # Together they fit in one interruption.
        handover_s=0.4 * bounds.interrupt_s,
        grace_s=0.3 * bounds.interrupt_s,
        versions_s=bounds.sync_s,
    )
