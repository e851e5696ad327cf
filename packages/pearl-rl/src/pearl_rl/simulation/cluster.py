"""A whole cluster in virtual time: the production control plane, composed over simulated ports."""

import asyncio
import gc
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pearl_executor.availability import FixedSource, TraceRow, TraceSource, bundled_trace, merge_sources, read_trace
from pearl_executor.execution import ElasticExecutor
from pearl_executor.limits import Limits
from pearl_executor.ports import AvailabilitySource
from pearl_executor.trace_kinds import synthetic_steps
from pearl_executor.virtual_time import run_virtual
from pearl_planner.catalog import CatalogError, GpuSpec, ModelSpec, find_gpu, find_model
from pearl_planner.elastic import ElasticSettings, ElasticState, initial_state
from pearl_planner.forecast import ForecastError
from pearl_planner.gate import ToggleCosts
from pearl_planner.in_step import InStepPolicy
from pearl_planner.policies import Policy
from pearl_planner.roofline import check_tensor_parallel
from pearl_planner.switching import SwitchCosts
from pearl_rl.control.forecasting import forecasting_for
from pearl_rl.control.prediction import predicted_makespan_s
from pearl_rl.control.refit import Refit
from pearl_rl.control.scheduler import ElasticScheduler
from pearl_rl.errors import ExitCode, SettingsError
from pearl_rl.observer import Observer, Observers
from pearl_rl.prediction_error import overlapping_batches
from pearl_rl.rollout.buffer import RefillsExhaustedError
from pearl_rl.rollout.continuous import pipeline_class
from pearl_rl.rollout.pipeline_settings import PipelineSettings, RolloutTimeoutError
from pearl_rl.rollout.recorded_generation import RecordedGeneration
from pearl_rl.rollout.router import Router, RouterLimits
from pearl_rl.rollout.training_gate import TrainingGate
from pearl_rl.run_folder import RunFolder
from pearl_rl.simulation.agent import SimulatedAgent
from pearl_rl.simulation.batch_run import WorkerModel
from pearl_rl.simulation.data_parallel import DataParallelCosts
from pearl_rl.simulation.engine import IterationCosts
from pearl_rl.simulation.kernels import WorkerCosts
from pearl_rl.simulation.kv_store import KvStore
from pearl_rl.simulation.links import KvLinks
from pearl_rl.simulation.meter import COUNTERS
from pearl_rl.simulation.oracle import MOST_WORKERS, OraclePolicy, first_batches
from pearl_rl.simulation.outcome import EngineTotals, SimulationCounts, SimulationResult
from pearl_rl.simulation.parameters import Parameters, load_parameters
from pearl_rl.simulation.policies import (
    injection,
    policy_setup,
    readiness,
    seeding_s,
    serving_limits,
    straggler_patience,
    task_gate,
)
from pearl_rl.simulation.prior import platform_prior, workload_prior
from pearl_rl.simulation.progress import SimulationProgress
from pearl_rl.simulation.recording import SimulationRecording
from pearl_rl.simulation.requests import SimulatedEngineLimits
from pearl_rl.simulation.runtime import Conversation, SimulatedRuntime
from pearl_rl.simulation.scenario import Scenario
from pearl_rl.simulation.sources import make_workload
from pearl_rl.simulation.training import SimulatedTrainer, SimulatedWeights
from pearl_rl.simulation.watch import Watch
from pearl_rl.simulation.workload import SimulatedTasks, Workload
from pearl_state.effects import Effect
from pearl_state.events import Event, WorkerFailed
from pearl_state.roles import Tenure
from pearl_state.worker import Worker

_ENDLESS = 10**7
_EMA_WEIGHT = 0.3


def simulate(
    scenario: Scenario,
    parameters: Parameters | None = None,
    folder: RunFolder | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> SimulationResult:
    """Run a scenario to its end in virtual time.

    `folder` gets the records of a run, `on_progress` again and again which part is done, from 0 to 1.
    Raises `SettingsError` for a scenario that cannot run or never finishes, `SimulationDeadlockError` where the
    control plane hangs.
    """
    cluster = SimulatedCluster(scenario, parameters, folder)
    if on_progress is not None:
        cluster.on_control.append(SimulationProgress(scenario, on_progress))
    return run_to_end(cluster)


def run_to_end(cluster: "SimulatedCluster") -> SimulationResult:
    """Run a cluster in virtual time. Raises as `simulate`."""

    async def main() -> SimulationResult:
        return await cluster.run()

    scenario, policy = cluster.scenario, cluster.scenario.policy.name
    try:
        with _rare_collections(), _quiet():
            return run_virtual(main())
    except RefillsExhaustedError as error:
        # Its cause alone: how often what was tried again is nothing that a person could set.
        words = error.cause.split(": ", 1)[-1]
        raise SettingsError(
            f"{scenario.name}: never finishes under policy {policy}: {words}; try another policy, more "
            "cluster.reserved_rollout_gpus, or a trace that has GPUs",
            ExitCode.INFEASIBLE,
        ) from None
    except RolloutTimeoutError as error:
        raise SettingsError(
            f"{scenario.name}: never finishes under policy {policy}: {error}", ExitCode.INFEASIBLE
        ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the control plane's warnings off stderr where nobody asked for a log: what counts is in the result."""
    logs, silent = [logging.getLogger(name) for name in ("pearl_rl", "pearl_executor")], logging.NullHandler()
    for log in logs:
        log.addHandler(silent)
    try:
        yield
    finally:
        for log in logs:
            log.removeHandler(silent)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Look for garbage in cycles rarely: a simulation makes many small objects and few cycles."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class SimulatedCluster:
    """One scenario's parts. Built outside the loop, run inside it, once."""

    def __init__(
        self, scenario: Scenario, parameters: Parameters | None = None, folder: RunFolder | None = None
    ) -> None:
        self.scenario = scenario
        self.folder = folder
        self.on_control: list[Callable[[Event, ElasticState, tuple[Effect, ...]], None]] = []
        """Who else wants to see each step of the core."""
        self.parameters = parameters or load_parameters(scenario.parameters, scenario.model)
        try:
            self.model: ModelSpec = find_model(scenario.model)
            self.gpu: GpuSpec = find_gpu(scenario.gpu)
            check_tensor_parallel(self.model, scenario.tp)
        except CatalogError as error:
            raise SettingsError(str(error)) from None
        self.costs: IterationCosts = WorkerCosts(self.model, self.gpu, scenario.tp, self.parameters.overheads)
        if self.parameters.engine.attention_ranks > 1:
            self.costs = DataParallelCosts(self.costs, self.parameters.engine.attention_ranks)
        self.kv_bytes = kv_bytes_per_token(self.model, scenario.tp // self.parameters.engine.attention_ranks)
        self.limits = engine_limits(scenario, self.parameters, self.model, self.gpu)
        self.workload: Workload = make_workload(scenario, self.parameters)
        self.trace = _trace(scenario)
        times = self.parameters.times
        self.switch_costs = SwitchCosts(
            flip_s=times.flip_s, relaunch_s=times.relaunch_s, new_worker_s=times.first_load_s, weight=_EMA_WEIGHT
        )
        self.setup = policy_setup(scenario, self.switch_costs, self.trace)
        if isinstance(self.setup.policy, InStepPolicy):
            keeps = self.parameters.engine.kv_store
            self.setup = replace(self.setup, policy=replace(self.setup.policy, keeps_prefixes=keeps))
        if scenario.policy.name == "oracle":
            self.setup = replace(self.setup, policy=self._oracle(self.setup.policy))
        if self.setup.reserved_gpus + self.setup.preemptible_gpus < scenario.tp:
            raise SettingsError(
                f"{scenario.name}: {self.setup.reserved_gpus} reserved and {self.setup.preemptible_gpus} preemptible "
                f"rollout GPUs hold no worker of tp = {scenario.tp}",
                ExitCode.INFEASIBLE,
            )

    def _oracle(self, base: Policy) -> OraclePolicy:
        """The policy that simulates. Raises `SettingsError` for a cluster of too many configurations."""
        cluster, rollout = self.scenario.cluster, self.scenario.rollout
        gpus = cluster.training_gpus + cluster.reserved_rollout_gpus + cluster.max_preemptible_gpus
        workers = gpus // self.scenario.tp
        if workers > MOST_WORKERS:
            raise SettingsError(
                f"policy oracle simulates every configuration: {workers} workers, at most {MOST_WORKERS}"
            )
        batches = first_batches(self.workload, rollout.batch, rollout.group_size)
        return OraclePolicy(base, batches, self.worker_model(), self.workload.stable_fraction, self.switch_costs)

    def worker_model(self) -> WorkerModel:
        """One worker, for runs of a single batch."""
        links = self.parameters.links
        return WorkerModel(
            costs=self.costs,
            limits=self.limits,
            kv_bytes_per_token=self.kv_bytes,
            link_bytes_per_s=links.bytes_per_s_per_gpu * self.scenario.tp,
            link_latency_s=links.latency_s,
        )

    def _kv_store(self) -> KvStore | None:
        """The storage of KV that workers share, where the parameters have one."""
        if not self.parameters.engine.kv_store:
            return None
        return KvStore(self.kv_bytes / (self.parameters.links.bytes_per_s_per_gpu * self.scenario.tp))

    async def run(self) -> SimulationResult:
        """Compose the control plane, run it until the scenario is over, and say what it came to."""
        loop = asyncio.get_running_loop()
        scenario, parameters = self.scenario, self.parameters
        conversations: dict[str, Conversation] = {}
        links = parameters.links
        runtime = SimulatedRuntime(
            costs=self.costs,
            limits=self.limits,
            times=parameters.times,
            links=KvLinks(links.bytes_per_s_per_gpu * scenario.tp, links.latency_s),
            kv_bytes_per_token=self.kv_bytes,
            gpu_bytes=int(self.gpu.hbm_bytes),
            conversations=conversations,
            store=self._kv_store(),
        )
        trainer = SimulatedTrainer(parameters.training, parameters.times, scenario.cluster.training_gpus)
        weights = SimulatedWeights()
        gate = TrainingGate()
        source = self._availability()

        def on_fault(worker: Worker, cause: str) -> None:
            scheduler.post(
                WorkerFailed(now_s=loop.time(), worker=worker.id, incarnation=worker.incarnation, cause=cause)
            )

        ranks = self.parameters.engine.attention_ranks
        folder, forecasts = self.folder, forecasting_for(self.setup.policy, ranks=ranks)
        trace = None if forecasts is None else forecasts.trace
        router = Router(
            runtime if folder is None else RecordedGeneration(runtime, folder.record_request),
            RouterLimits(
                serving=serving_limits(scenario, binds=parameters.routing.roll_binds),
                no_worker_s=86_400.0,
                stall_s=7200.0,
            ),
            on_fault=on_fault,
            lifecycle=trace,
        )
        batching = task_gate(scenario, router, self.limits.kv_tokens, trace)
        watch = Watch(predicted_makespan_s, loop.time)
        watch.recorders += self.on_control
        observer: Observer = watch
        keep: dict[str, Any] = {"on_trajectory": watch.on_trajectory}
        if folder is not None:
            recording = SimulationRecording(folder, predicted_makespan_s, loop.time, router.loads, trace)
            watch.recorders.append(recording.on_control)
            observer = Observers(watch, recording)
            watch.on_trajectories.append(recording.on_trajectory)
        state = self._initial_state()
        scheduler = ElasticScheduler(
            state,
            executor=ElasticExecutor(runtime, trainer, weights, Limits(), watch.on_action),
            routing=batching or router,
            training=gate,
            returned=source.returned,
            on_step=watch.on_control,
        )
        refit = Refit(
            workers=runtime,
            table=lambda: scheduler.state.table,
            post=scheduler.post,
            prior=state.platform,
            weight=_EMA_WEIGHT,
        )

        watch.followers.append(refit.follow)

        async def publish(snapshot: object) -> None:
            await asyncio.sleep(parameters.training.publish_s)
            weights.publish(snapshot)  # type: ignore[arg-type]

        settings = self._pipeline_settings()
        pipeline = pipeline_class(settings)(
            settings,
            router=router,
            agent=SimulatedAgent(self.workload, conversations, trace),
            tasks=SimulatedTasks(),
            trainer=trainer,
            publish=publish,
            gate=gate,
            post=scheduler.post,
            tracker=refit,
            observer=observer,
            predicted_s=watch.predicted_step_s,
            lifecycle=trace,
            batching=batching,
            readiness=readiness(scenario, scheduler.post),
            **keep,
        )

        async def follow() -> None:
            async for event in source.events():
                scheduler.post(event)

        control = [
            asyncio.create_task(scheduler.run(), name="elastic scheduler"),
            asyncio.create_task(follow(), name="availability"),
            asyncio.create_task(refit.run(), name="refit"),
        ]
        control += [] if forecasts is None else [forecasts.start(scheduler)]
        work = asyncio.create_task(pipeline.run(), name="pipeline")
        try:
            await asyncio.wait({work, control[0]}, return_when=asyncio.FIRST_COMPLETED)
            if control[0].done():
                control[0].result()
            outcome = await work
        finally:
            for task in (work, *control[1:]):
                task.cancel()
            scheduler.stop()
            await asyncio.gather(work, *control, return_exceptions=True)
            await router.aclose()
        statistics = router.statistics
        totals = dict.fromkeys(COUNTERS, 0.0)
        for meter in runtime.meters():
            for name in COUNTERS:
                totals[name] += getattr(meter, name)
        return SimulationResult(
            scenario=scenario.name,
            policy=scenario.policy.name,
            seed=scenario.run.seed,
            model=self.model.name,
            steps=watch.steps,
            elapsed_s=loop.time(),
            trajectory_s=watch.trajectory_s,
            counts=SimulationCounts(
                expansions=watch.expansions,
                reclaims=watch.reclaims,
                borrows=watch.borrows,
                returns=watch.returns,
                mode_switches=watch.mode_switches,
                ratio_switches=watch.ratio_switches,
                turns=statistics.calls,
                interruptions=statistics.interrupted,
                failed_calls=statistics.failed_attempts + statistics.lost + statistics.given_up,
                lost_trajectories=outcome.counts.lost,
                stale_served=statistics.stale_served,
                rejected_stale=outcome.counts.rejected,
                dropped_trajectories=outcome.counts.dropped,
            ),
            engines=EngineTotals(**totals),  # type: ignore[arg-type]
            timeline=watch.timeline,
            decisions=watch.decisions,
            rollout_gpu_s=watch.gpu_s,
            training_busy_s=trainer.busy_s,
            reconfiguration_s=watch.took,
            origin=parameters.origin,
            overlap=self._overlap(),
            prefill_forecasts=ForecastError() if forecasts is None else forecasts.prefill_error,
            admission_forecasts=ForecastError() if forecasts is None else forecasts.admission_error,
        )

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _overlap(self) -> int:
        """Batches that are under way at a time."""
        rollout = self.scenario.rollout
        return overlapping_batches(rollout.injection, self.scenario.policy.name, rollout.max_staleness)

    def _initial_state(self) -> ElasticState:
        scenario, times = self.scenario, self.parameters.times
        workload = workload_prior(self.workload, scenario.rollout.batch, scenario.rollout.group_size)
        platform = platform_prior(self, workload)
        if isinstance(self.setup.policy, InStepPolicy) and self.setup.policy.keeps_ratio:
            # The ratio that it begins with stays until forecasts move it: it is for all that will be under way.
            workload = replace(workload, batch=workload.batch * self._overlap())
        state = initial_state(
            settings=ElasticSettings(
                policy=self.setup.policy,
                gpus_per_worker=scenario.tp,
                borrowing=self.setup.borrowing,
                return_s=60.0,
            ),
            workload=workload,
            platform=platform,
            training_gpus=scenario.cluster.training_gpus,
            toggle_costs=ToggleCosts(
                prior_activation_s=times.activation_s, prior_deactivation_s=times.deactivation_s, weight=_EMA_WEIGHT
            ),
        )
        # A segment is a window of a longer run: its profile is known from the steps before.
        return replace(state, calibrated=True)

    def _availability(self) -> AvailabilitySource:
        scenario, setup = self.scenario, self.setup
        first = scenario.cluster.training_gpus
        sources: list[AvailabilitySource] = []
        if setup.reserved_gpus:
            sources.append(FixedSource(range(first, first + setup.reserved_gpus)))
        preemptible = range(first + setup.reserved_gpus, first + setup.reserved_gpus + setup.preemptible_gpus)
        if setup.preemptible_gpus and scenario.availability.trace == "none":
            sources.append(FixedSource(preemptible, tenure=Tenure.PREEMPTIBLE))
        elif setup.preemptible_gpus:
            sources.append(
                TraceSource(
                    [(row.t_s, row.count) for row in self.trace],
                    gpus=preemptible,
                    time_scale=scenario.availability.time_scale,
                    notice_s=scenario.availability.notice_s,
                    seed=scenario.run.seed,
                )
            )
        return merge_sources(*sources)

    def _pipeline_settings(self) -> PipelineSettings:
        rollout, run = self.scenario.rollout, self.scenario.run
        return PipelineSettings(
            steps=run.steps or _ENDLESS,
            groups_per_step=rollout.batch // rollout.group_size,
            group_size=rollout.group_size,
            max_staleness=rollout.max_staleness,
            injection=injection(self.scenario),
            straggler_patience=straggler_patience(self.scenario),
            seeding_s=seeding_s(self.scenario),
            seed=run.seed,
            wall_limit_s=math.inf if run.steps else run.duration_s,
            batch_s=30 * 86_400.0,
            grant_s=3600.0,
            update_s=30 * 86_400.0,
        )


def kv_bytes_per_token(model: ModelSpec, tp: int) -> float:
    """KV bytes of one token over the `tp` GPUs that share its attention; heads are held twice where there are fewer."""
    if model.shared_latent_kv:
        return model.kv_bytes_per_token * tp
    return model.kv_bytes_per_token * max(1.0, tp / model.kv_heads)


def engine_limits(scenario: Scenario, parameters: Parameters, model: ModelSpec, gpu: GpuSpec) -> SimulatedEngineLimits:
    """Sizes of one worker's engine. Raises `SettingsError` where the weights, or one trajectory, do not fit."""
    engine = parameters.engine
    room = scenario.tp * (gpu.hbm_bytes * engine.memory_fraction - engine.reserve_bytes) - model.weight_bytes
    tokens = int(room / kv_bytes_per_token(model, scenario.tp // engine.attention_ranks))
    wanted = scenario.workload.max_context_tokens
    if tokens < wanted:
        raise SettingsError(
            f"{scenario.name}: {model.name} on {scenario.tp} x {gpu.name} leaves room for {max(0, tokens)} tokens of "
            f"KV, a trajectory may have {wanted}; use more GPUs a worker",
            ExitCode.INFEASIBLE,
        )
    return SimulatedEngineLimits(
        kv_tokens=tokens,
        chunk_tokens=engine.chunk_tokens,
        prompt_chunk_tokens=max(1, engine.chunk_tokens // engine.attention_ranks),
        max_running=engine.max_running,
        reserve_tokens=engine.reserve_tokens,
        mixed=engine.mixed,
        phase_switch_s=engine.phase_switch_s,
        keeps_left_paths=engine.keeps_left_paths,
        decode_prefix_cache=engine.decode_prefix_cache,
    )


def _trace(scenario: Scenario) -> tuple[TraceRow, ...]:
    """The steps of preemptible GPUs; empty for a fixed pool. A file that a scenario names must be one in any case."""
    availability, pool = scenario.availability, scenario.cluster.max_preemptible_gpus
    if availability.trace == "none" or not (pool or availability.trace):
        return ()
    try:
        if availability.trace == "synthetic":
            steps = synthetic_steps(
                gpus=pool,
                present_s=availability.present_s,
                absent_s=availability.absent_s,
                until_s=scenario.run.duration_s * availability.time_scale,
                seed=scenario.run.seed,
            )
            return tuple(TraceRow(t_s, count) for t_s, count in steps)
        rows = read_trace(availability.trace or bundled_trace(), availability.segment or None)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    return rows if pool else ()
