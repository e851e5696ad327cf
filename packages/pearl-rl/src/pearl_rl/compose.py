"""The composition root of a training run: builds all parts from settings, runs them, and takes them down again."""

import asyncio
import json
import shutil
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from pearl_executor.execution import ElasticExecutor
from pearl_executor.ports import WeightSnapshot, WorkerError
from pearl_executor.runtimes.local.hosting import torch_recipe
from pearl_executor.runtimes.local.processes import ProcessError, ProcessServer
from pearl_executor.weights import WeightStore
from pearl_planner.elastic import ElasticState, initial_state
from pearl_rl import parts
from pearl_rl.checkpoints import CheckpointWriter, find
from pearl_rl.control.forecasting import forecasting_for
from pearl_rl.control.liveness import StallProbe
from pearl_rl.control.open_to_people import open_to_people
from pearl_rl.control.prediction import predicted_makespan_s
from pearl_rl.control.recorder import Recorder
from pearl_rl.control.refit import Refit
from pearl_rl.control.scheduler import ElasticScheduler
from pearl_rl.control.transfers import TransferWatch
from pearl_rl.engines import RolloutRuntime, gateway_mirror, rollout_runtime
from pearl_rl.errors import CommandError, ExitCode
from pearl_rl.journal.frames import JournalError
from pearl_rl.journal.run_journal import RunJournal, recover
from pearl_rl.journal.storage import FolderStorage
from pearl_rl.observer import Observer, SilentObserver, StepRecord
from pearl_rl.own_policy import PolicyError
from pearl_rl.rollout.agent import TextAgent
from pearl_rl.rollout.batch_rollout import UnplayableTasksError
from pearl_rl.rollout.buffer import RefillsExhaustedError
from pearl_rl.rollout.continuous import pipeline_class
from pearl_rl.rollout.environments.protocol import EnvironmentSuite
from pearl_rl.rollout.environments.suites import make_suite
from pearl_rl.rollout.evaluation import EvaluationResult
from pearl_rl.rollout.ledger import RolloutLedger, RolloutResumed
from pearl_rl.rollout.pipeline_settings import RolloutTimeoutError, UpdateTimeoutError
from pearl_rl.rollout.recorded_generation import RecordedGeneration
from pearl_rl.rollout.router import Router
from pearl_rl.rollout.tokenizer import TextTokenizer, build_word_tokenizer
from pearl_rl.rollout.training_gate import GrantTimeoutError, TrainingGate
from pearl_rl.run_folder import METRICS, RunFolder, read_lines
from pearl_rl.runtimes import open_processes
from pearl_rl.settings import Settings
from pearl_rl.summary import TrainSummary
from pearl_rl.telemetry import RunTelemetry
from pearl_rl.training.build import build_in_child
from pearl_rl.training.process import PRELOAD, LocalTrainer
from pearl_rl.training.ref_actor_auto import AutoRefActor
from pearl_rl.training.tiny_model import TinyShape, WarmUp, encode_demonstrations
from pearl_rl.training_port import RecoveringTrainer
from pearl_state.effects import Effect
from pearl_state.events import Event, GroupFailed, RunResumed, WorkerFailed
from pearl_state.lifecycle import Lifecycle
from pearl_state.trajectory import Trajectory
from pearl_state.worker import Worker, WorkerId

_FIRST_STEPS = 10


async def train(settings: Settings, folder: RunFolder, observer: Observer, *, resume: bool = False) -> TrainSummary:
    """Run the job that `settings` describe to its end; with `resume` go on with what `folder` holds of it.

    Cancelled, it stops in order and returns what it has. Nothing of it is left running, however it ends.
    """
    run = _Run(settings, folder, observer, resume=resume)
    try:
        async with AsyncExitStack() as stack:
            stack.callback(run.close)
            await run.build(stack)
            await run.run()
    except _EXPECTED as error:
        raise CommandError(f"the run ended early: {error}; see {folder.path}", ExitCode.PARTIAL) from error
    return run.summary()


class NoWorkersError(RuntimeError):
    """Every rollout worker slot failed too often: nobody will ever serve."""


_EXPECTED = (
    NoWorkersError,
    JournalError,
    GrantTimeoutError,
    RefillsExhaustedError,
    RolloutTimeoutError,
    UnplayableTasksError,
    UpdateTimeoutError,
    WorkerError,
    ProcessError,
    PolicyError,
    OSError,
)
"""What may end a run though nothing in PEARL is wrong, a full disk among them; each message names the cause."""


class _Figures(SilentObserver):
    """Keeps each step's figures in the run folder, and sums them up."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._rewards: dict[int, float] = {}
        self.tokens = 0

    def recall(self, completed: int) -> None:
        """Take in the steps that earlier control planes of this run completed."""
        lines = read_lines(self._folder.path / METRICS)
        self._rewards = {int(line["step"]): float(line["reward_mean"]) for line in lines if line["step"] <= completed}

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each step of this run, in order."""
        return [self._rewards[step] for step in sorted(self._rewards)]

    def on_step(self, record: StepRecord) -> None:
        self._folder.record_step(record)
        self._rewards[record.step] = record.reward_mean
        self.tokens += record.generated_tokens + record.trained_tokens


class _Run:
    """One run's parts."""

    def __init__(self, settings: Settings, folder: RunFolder, observer: Observer, *, resume: bool = False) -> None:
        self._settings = settings
        self._storage = FolderStorage(folder.path / "journal")
        self._recovered = recover(self._storage, parts.elastic_settings(settings)) if resume else None
        self._folder = folder
        self._figures = _Figures(folder)
        now_s = asyncio.get_running_loop().time()
        self._telemetry = RunTelemetry(settings.telemetry, folder.path, settings.model.path, now_s)
        self._observer: Observer = self._telemetry.observing(observer, self._figures)

    def close(self) -> None:
        """Flush telemetry, within a bounded time."""
        self._telemetry.close()

    async def build(self, stack: AsyncExitStack) -> None:
        """Start the processes and wire the parts. What was started is stopped by `stack`, in reverse order."""
        settings, folder = self._settings, self._folder
        loop = asyncio.get_running_loop()
        self._began_s = loop.time()
        suite = make_suite(settings.environment.name, settings.environment.args)
        source = settings.run.resume_from
        self._resumed = find(Path(source)) if source else None
        if self._recovered is not None:
            self._resumed = find(folder.path)
        model_dir = folder.path / "model" if settings.model.path == "tiny" else Path(settings.model.path)
        recipe = torch_recipe(
            model_dir,
            parts.engine_limits(settings),
            parts.pace(settings),
            device=settings.engine.device,
            threads=settings.engine.threads,
            seed=settings.run.seed,
            weight_version=0,
        )
        recipe = self._telemetry.recipe(recipe)
        processes = await stack.enter_async_context(
            open_processes(settings, folder.path / "workers", (*recipe.preload, *PRELOAD))
        )
        forks = processes.server
        await suite.start()
        stack.push_async_callback(suite.close)
        tokenizer = await self._model(forks, suite, model_dir)
        self._trainer = LocalTrainer(
            forks,
            model_dir,
            folder.path / "trainer",
            parts.trainer_options(settings),
            ranks=settings.cluster.training_gpus,
            update_s=settings.device.training_update_s if settings.device.paced else 0.0,
            limits=parts.trainer_limits(settings),
            threads=settings.train.threads,
        )
        stack.push_async_callback(self._trainer.stop)
        self._weights = WeightStore(folder.weights)
        self._completed = await self._begin_training()
        runtime = await stack.enter_async_context(
            rollout_runtime(settings, recipe, processes, model_dir, folder.path / "workers", self._on_lost)
        )
        self._show_gateway = await stack.enter_async_context(gateway_mirror(settings, runtime))
        self._wire(runtime, suite, tokenizer, model_dir)
        people = parts.people_gpus(settings)
        elapsed_s = 0.0 if self._recovered is None else self._recovered.clock.elapsed_s
        self._source = parts.availability(settings, processes.nodes, people, elapsed_s=elapsed_s)
        loads, say = self._router.worker_loads, self._observer.on_message
        opened = open_to_people(settings, folder, self._scheduler, loads, gpus=people, say=say)
        await stack.enter_async_context(opened)

    async def _begin_training(self) -> int:
        """Start the trainer, and publish its weights where they are new. Returns how many steps are made already."""
        resumed, say = self._resumed, self._observer.on_message
        if resumed is None:
            await self._trainer.start()
            await self._publish(self._trainer.newest)
            return 0
        if self._recovered is None:
            await self._trainer.start()
            await self._trainer.load_checkpoint(resumed.trainer)
            say(f"goes on after step {resumed.step} of {resumed.folder}")
            await self._publish(self._trainer.newest)
            return resumed.step
        newest, known = self._weights.newest_version, max(resumed.version, self._recovered.state.table.target_version)
        if newest is None or newest < known:
            raise CommandError(
                f"{self._weights.directory}: holds no weights of version {known}, which this run published; put them "
                f'back, or begin another run with run.resume_from = "{self._folder.path}"'
            )
        await self._trainer.go_on(self._weights.newest(), resumed.trainer)
        completed = resumed.step + newest - resumed.version
        self._figures.recall(completed)
        say(f"goes on after step {completed}, with the optimizer's state after step {resumed.step}")
        return completed

    async def _model(self, forks: ProcessServer, suite: EnvironmentSuite, model_dir: Path) -> TextTokenizer:
        """The tokenizer of the model; a tiny model is built first, from scratch."""
        settings = self._settings
        if settings.model.path != "tiny":
            return TextTokenizer(model_dir)
        if self._resumed is not None:
            if self._resumed.model != model_dir:
                shutil.copytree(self._resumed.model, model_dir)
            return TextTokenizer(model_dir)
        tokenizer = build_word_tokenizer(suite.vocabulary(), model_dir)
        tiny = settings.model.tiny
        shape = TinyShape(
            vocabulary_size=tokenizer.vocabulary_size,
            hidden_size=tiny.hidden_size,
            layers=tiny.layers,
            heads=tiny.heads,
            kv_heads=tiny.kv_heads,
            head_dim=tiny.head_dim,
            intermediate_size=tiny.intermediate_size,
            max_context_tokens=settings.model.max_context_tokens,
            stop_token_id=tokenizer.stop_token_ids[0],
            pad_token_id=tokenizer.pad_token_id,
        )
        seed = settings.run.seed
        warm_up = None
        if tiny.warm_up_steps:
            shown = suite.demonstrations(seed, tiny.warm_up_demonstrations)
            warm_up = WarmUp(
                examples=encode_demonstrations(tokenizer, shown),
                steps=tiny.warm_up_steps,
                batch=tiny.warm_up_batch,
                learning_rate=tiny.warm_up_learning_rate,
                observation_weight=tiny.warm_up_observation_weight,
            )
        self._observer.on_message("builds the model and teaches it the commands: 20 s on two idle cores")
        parameters = await build_in_child(forks, model_dir, shape, seed, warm_up)
        self._observer.on_message(f"built a Qwen3 model of {parameters:,} parameters from scratch")
        return tokenizer

    def _wire(
        self, runtime: RolloutRuntime, suite: EnvironmentSuite, tokenizer: TextTokenizer, model_dir: Path
    ) -> None:
        """Connect control loop, executors, rollout and training."""
        settings = self._settings
        loop = asyncio.get_running_loop()
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        generation = RecordedGeneration(runtime, self._telemetry.requests(self._folder.record_request))
        self._stalls = StallProbe(runtime, self._post, probe_s=settings.limits.executor.probe_s)
        limits = parts.router_limits(settings)
        elastic = parts.elastic_settings(settings)
        self._forecasts = forecasting_for(elastic.policy, settings.planner.horizon_s)
        trace = None if self._forecasts is None else self._forecasts.trace
        if trace is not None:
            trace.listeners.append(self._folder.record_phase)
        self._router = Router(
            generation,
            limits,
            on_fault=self._on_fault,
            on_stall=self._stalls.suspect,
            on_transfer=TransferWatch(self._post, self._observer.on_message).ended,
            lifecycle=trace,
        )
        gate, batching = TrainingGate(), parts.task_gate(settings, self._router, trace)
        prior = parts.prior_platform(settings, config)
        state = initial_state(
            settings=elastic,
            workload=parts.prior_workload(settings),
            platform=prior,
            training_gpus=settings.cluster.training_gpus,
            weight_version=self._trainer.version,
            toggle_costs=parts.toggle_costs(settings),
        )
        rollout = self._open_journal(state)
        if self._recovered is not None:
            state = self._recovered.state
        self._recorder = Recorder(self._folder, self._observer, predicted_makespan_s, loop.time, self._router.loads)
        auto = None
        if settings.train.ref_actor == "auto":
            auto = AutoRefActor(self._trainer, self._recorder.on_update_mode)
        training = RecoveringTrainer(
            self._trainer,
            max_staleness=settings.train.max_staleness_versions,
            restarts=settings.cluster.max_restarts,
            checkpoint=lambda: self._checkpoints.newest,
            on_message=self._observer.on_message,
            update=None if auto is None else auto.update,
        )
        executor = self._executor = ElasticExecutor(
            runtime, training, self._weights, parts.limits(settings), on_action=self._telemetry.on_action
        )
        self._scheduler = ElasticScheduler(
            state,
            executor=self._telemetry.executor(executor),
            routing=batching or self._router,
            training=gate,
            returned=lambda gpus: self._source.returned(gpus),
            on_step=self._on_step,
            journal=self._journal,
        )
        self._refit = Refit(
            workers=runtime,
            table=lambda: self._scheduler.state.table,
            post=self._scheduler.post,
            prior=prior,
            weight=settings.planner.ema_weight,
        )
        self._checkpoints = CheckpointWriter(
            self._folder.checkpoints,
            self._trainer,
            every=settings.train.checkpoint_every_steps,
            keep=settings.train.keep_checkpoints,
            last=settings.run.steps,
        )
        agent = TextAgent(suite.environment, tokenizer, parts.agent_limits(settings), parts.sampling(settings), trace)
        self._evaluation = parts.evaluation(settings, self._router, agent, suite, self._on_evaluated, batching)
        chosen = replace(parts.pipeline_settings(settings), completed_steps=self._completed)
        self._pipeline = pipeline_class(chosen)(
            chosen,
            router=self._router,
            agent=self._telemetry.agent(agent),
            tasks=suite.tasks(settings.run.seed),
            trainer=training,
            publish=self._publish if self._evaluation is None else self._evaluation.publishing(self._publish),
            gate=gate,
            post=self._scheduler.post,
            tracker=self._refit,
            observer=self._observer,
            checkpoint=lambda step: self._checkpoints.completed(step, self._pipeline.position),
            position=rollout.position,
            note=self._journal.note,
            commit=self._journal.commit,
            restored=None if self._recovered is None else rollout,
            on_trajectory=self._on_trajectory,
            predicted_s=self._recorder.predicted_step_s,
            lifecycle=trace,
            batching=batching,
            readiness=parts.readiness(settings, self._scheduler.post, self._evaluation),
        )

    def _open_journal(self, state: ElasticState) -> RolloutLedger:
        """Begin the journal with `state`, or go on with it. Returns what the rollout goes on with."""
        recovered = self._recovered
        if recovered is not None:
            self._journal = RunJournal(self._storage, recovered.state, recovered.rollout, recovered.clock)
            self._journal.note(RolloutResumed(completed=self._completed))
            return recovered.rollout
        rollout = RolloutLedger()
        if self._resumed is not None:
            rollout.position = replace(self._resumed.position)
        self._journal = RunJournal(self._storage, state, rollout)
        return rollout

    async def run(self) -> None:
        """Run until the pipeline made its steps. A cancellation stops everything in order."""
        self._hopeless: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Whoever goes on has a checkpoint; at the end of a run, it must be of the last step.
        if self._recovered is None or self._completed >= self._settings.run.steps:
            await self._checkpoints.write(self._completed, self._pipeline.position)
        if self._recovered is not None:
            now_s = asyncio.get_running_loop().time()
            self._scheduler.post(RunResumed(now_s=now_s, weight_version=self._trainer.version))
        tasks = [
            asyncio.create_task(self._scheduler.run(), name="elastic scheduler"),
            asyncio.create_task(self._follow_availability(), name="availability"),
            asyncio.create_task(self._refit.run(), name="refit"),
        ]
        forecasts = [] if self._forecasts is None else [self._forecasts.start(self._scheduler)]
        pipeline = asyncio.create_task(self._pipeline.run(), name="pipeline")
        try:
            waiting: set[asyncio.Future[Any]] = {pipeline, *tasks[::2], *forecasts, self._hopeless}
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await pipeline
        except asyncio.CancelledError:
            pass  # Asked to stop: what follows does so in order, and the caller sums up.
        finally:
            for task in (pipeline, tasks[1], tasks[2], *forecasts):
                task.cancel()
            self._executor.close()
            self._scheduler.stop()
            await asyncio.gather(pipeline, *tasks, *forecasts, return_exceptions=True)
            if self._evaluation is not None:
                await self._evaluation.aclose()
            await self._router.aclose()
            await self._checkpoints.aclose()
            await self._stalls.aclose()
            self._storage.close()

    def _on_step(self, event: Event, state: ElasticState, effects: tuple[Effect, ...]) -> None:
        self._recorder.on_step(event, state, effects)
        self._telemetry.on_control(event, effects)
        self._refit.follow(event, state.table)
        self._show_gateway(state.table)
        if isinstance(event, GroupFailed) and event.failed and not self._hopeless.done():
            rows = [state.table.rows[id_] for id_ in state.available]
            if not state.groups and rows and all(row.lifecycle is Lifecycle.RETIRED for row in rows):
                cause = next(iter(event.failed.values()))
                self._hopeless.set_exception(NoWorkersError(f"no rollout worker can start ({cause})"))

    async def _follow_availability(self) -> None:
        """Post what the source tells. One that has told all ends nothing; one that fails ends the run."""
        try:
            async for event in self._source.events():
                self._scheduler.post(event)
        except Exception as error:
            if not self._hopeless.done():
                self._hopeless.set_exception(error)

    async def _publish(self, snapshot: WeightSnapshot) -> None:
        # In a thread: it copies and flushes whole weights.
        await asyncio.to_thread(self._weights.publish, snapshot.version, snapshot.uri, snapshot.checksum)

    def _on_trajectory(self, trajectory: Trajectory, step: int) -> None:
        self._folder.record_trajectory(trajectory, step=step)
        self._telemetry.on_trajectory(trajectory, step)

    def _on_evaluated(self, result: EvaluationResult) -> None:
        finished = result.event(asyncio.get_running_loop().time())
        self._observer.on_message(
            f"evaluated version {result.version}: reward {finished.reward_mean:.3f} over {finished.episodes} episodes "
            f"in {result.duration_s:.1f} s, {result.failed} failed"
        )
        self._post(finished)

    def _on_lost(self, worker: WorkerId, incarnation: int, cause: str) -> None:
        now_s = asyncio.get_running_loop().time()
        self._scheduler.post(WorkerFailed(now_s=now_s, worker=worker, incarnation=incarnation, cause=cause))

    def _post(self, event: Event) -> None:
        self._scheduler.post(event)

    def _on_fault(self, worker: Worker, cause: str) -> None:
        self._on_lost(worker.id, worker.incarnation, cause)

    def summary(self) -> TrainSummary:
        """What the run amounts to so far."""
        counts, rewards = self._recorder.counts, self._figures.rewards
        wall_s = asyncio.get_running_loop().time() - self._began_s
        buffered = self._pipeline.counts
        return TrainSummary(
            steps=self._completed + self._pipeline.made,
            reward_first10=_mean(rewards[:_FIRST_STEPS]),
            reward_last10=_mean(rewards[-_FIRST_STEPS:]),
            trajectories=buffered.used,
            lost_trajectories=buffered.lost,
            stale_served=self._router.statistics.stale_served,
            expansions=counts.expansions,
            reclaims=counts.reclaims,
            borrows=counts.borrows,
            returns=counts.returns,
            mode_switches=counts.mode_switches,
            ratio_switches=counts.ratio_switches,
            tokens_per_s=self._figures.tokens / wall_s if wall_s > 0 else 0.0,
            wall_s=wall_s,
            run_dir=str(self._folder.path),
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
