"""A whole run in virtual time: real scheduler, planner, executors, router, pipeline; fake processes, provider, games.

`Machine` is what outlives the control plane: processes, GPU memory, training state. `play` runs a script on it.
"""

import asyncio
import hashlib
import tempfile
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dst.invariants import check_counts, check_following, check_state, check_table, check_tokens, require
from dst.script import Op, Script
from pearl_executor.calls import Action
from pearl_executor.execution import ElasticExecutor
from pearl_executor.limits import Limits
from pearl_executor.ports import GenerateRequest, GenerateResult, OnChunk, WeightSnapshot, WorkerError
from pearl_executor.testing import FakeTraining, FakeWeights, FakeWorkers, Fault, FaultScript
from pearl_executor.virtual_time import run_virtual
from pearl_planner.elastic import Borrowing, ElasticSettings, ElasticState, initial_state
from pearl_planner.in_step import pearl_prorsa, prorsa
from pearl_planner.policies import Policy, pearl
from pearl_planner.readiness import BatchInterval, ReadinessSettings
from pearl_planner.switching import SwitchCosts
from pearl_planner.task_batching import PriorityWeights
from pearl_rl.checkpoints import CheckpointWriter, find
from pearl_rl.control.forecasting import forecasting_for
from pearl_rl.control.liveness import StallProbe
from pearl_rl.control.scheduler import ElasticScheduler
from pearl_rl.encoding import encode_event, json_line
from pearl_rl.journal.journal import Journal
from pearl_rl.journal.run_journal import Recovered, RunJournal, recover
from pearl_rl.journal.storage import MemoryStorage
from pearl_rl.rollout.agent import AgentLimits, TextAgent
from pearl_rl.rollout.continuous import pipeline_class
from pearl_rl.rollout.environments.protocol import EnvironmentFailure, StepResult, Task, observe
from pearl_rl.rollout.evaluation import AnchoredEvaluation, EvaluationResult
from pearl_rl.rollout.ledger import RolloutLedger, RolloutResumed
from pearl_rl.rollout.pipeline_settings import Injection, PipelineOutcome, PipelineSettings
from pearl_rl.rollout.readiness import ReadinessMonitor
from pearl_rl.rollout.router import Router, RouterLimits
from pearl_rl.rollout.serving import ServingLimits
from pearl_rl.rollout.task_batcher import TaskBatchingSettings
from pearl_rl.rollout.task_gate import TaskGate, TaskGateLimits
from pearl_rl.rollout.testing import FakeTrainer
from pearl_rl.rollout.training_gate import TrainingGate
from pearl_rl.training.rank_group import TrainerLostError
from pearl_state.configuration import Configuration
from pearl_state.effects import Effect, RecordDecision
from pearl_state.events import (
    ConfigurationPinned,
    Event,
    GpusOffered,
    GpusReclaimed,
    LoadForecast,
    RunResumed,
    WorkerFailed,
    WorkersCordoned,
)
from pearl_state.lifecycle import Lifecycle
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.roles import Role, Tenure
from pearl_state.worker import GpuId, Worker, WorkerId

TURNS, NEW_TOKENS = 2, 4
GROUPS, GROUP_SIZE = 2, 2
EPISODES = 2
"""Of one evaluation."""
FRESH = (GpuId(90), GpuId(91))
"""Healthy GPUs that come once the script is over: from then on the run must be able to end."""
MOST_S = 100_000.0
KV_TOKENS = 60
"""Of one worker, where tasks keep theirs: two of them fit."""
HORIZON_S = 2.0
"""Of the forecasts that policies with Prorsa answer."""
LIMITS = Limits().scaled(0.2)

WORKLOAD = WorkloadProfile(batch=4, turns=TURNS, new_prompt_tokens=6, response_tokens=NEW_TOKENS)
PLATFORM = PlatformProfile(
    decode_fixed_s=0.03,
    decode_per_sequence_s=0.002,
    prefill_per_token_s=0.01,
    kv_bytes_per_token=1024,
    transfer_bytes_per_s=1e8,
    overhead_per_turn_s=0.05,
    kv_capacity_bytes=1024 * 1000,
)


def policy(name: str) -> Policy:
    """The policy of a script; where forecasts move roles, switches are thought to cost little."""
    costs = SwitchCosts(flip_s=0.2, relaunch_s=0.3, new_worker_s=0.3)
    match name:
        case "prorsa":
            return prorsa(costs)
        case "pearl+prorsa":
            return pearl_prorsa(costs=costs)
        case _:
            return pearl()


class Words:
    """A tokenizer of as many tokens as there are words."""

    stop_token_ids = ()

    def prompt(self, observation, *, previous):
        return [1 + len(word) for word in observation.text.split()]

    def decode(self, tokens):
        return " ".join(str(token) for token in tokens)


class Games:
    """Games that fail, hang or dawdle as often as the script says, from then on."""

    size = None

    def __init__(self) -> None:
        self.faults: deque[str] = deque()

    def task(self, index):
        return Task(id=f"q{index}", seed=index, payload={})

    def environment(self) -> "Game":
        return Game(self.faults)


class Game:
    def __init__(self, faults: deque[str]) -> None:
        self._faults = faults
        self._turn = 0

    async def reset(self, task):
        self._name = task.id
        await self._act(0.1)
        return observe(f"the first question of {task.id}")

    async def step(self, action):
        self._turn += 1
        await self._act(0.3)
        return StepResult(observe(f"another question {self._turn}"), 1.0, self._turn >= TURNS, {})

    async def close(self):
        pass

    async def _act(self, seconds: float) -> None:
        fault = self._faults.popleft() if self._faults else ""
        if fault == "fail":
            raise EnvironmentFailure("the script says so")
        await asyncio.sleep({"hang": 1e6, "slow": 12.0}.get(fault, seconds))


class Trainer(FakeTrainer):
    """Must hold its GPUs alone while it updates, and gets each sample once."""

    def __init__(self, machine: "Machine") -> None:
        super().__init__(version=machine.version, update_s=2.0)
        self._machine = machine
        self._saving: list[asyncio.Task[None]] = []

    async def update(self, trajectories):
        machine = self._machine
        self._alone()
        fault = machine.trainer_faults.popleft() if machine.trainer_faults else ""
        if fault == "fail":
            raise WorkerError("a training rank died")
        for trajectory in trajectories:
            check_tokens(trajectory, TURNS, NEW_TOKENS)
            require(trajectory.id.startswith("t"), "trained_once", f"{trajectory.id} was played for an evaluation")
            seen = machine.trained.get(trajectory.id)
            require(seen is None, "trained_once", f"{trajectory.id} was trained on in version {seen} already")
        if fault == "slow":
            await asyncio.sleep(40.0)
        result = await super().update(trajectories)
        self._alone()
        machine.trained.update(dict.fromkeys((t.id for t in trajectories), result.version))
        machine.version = result.version
        return result

    async def end(self) -> None:
        """Nothing is written any more."""
        for task in self._saving:
            task.cancel()
        await asyncio.gather(*self._saving, return_exceptions=True)

    async def begin_checkpoint(self, path: Path) -> "asyncio.Task[None]":
        """Write one, unless a rank is lost meanwhile, or the control plane is killed."""
        machine = self._machine
        lost = machine.checkpoint_faults.popleft() if machine.checkpoint_faults else 0

        async def write() -> None:
            await asyncio.sleep(0.5)
            if machine.disk.dead:
                await asyncio.Future()
            if lost:
                raise TrainerLostError("a training rank died while it wrote a checkpoint")
            machine.disk.saved.add(str(path))

        if lost > 1:
            raise TrainerLostError("a training rank died before it wrote a checkpoint")
        self._saving.append(asyncio.ensure_future(write()))
        return self._saving[-1]

    def _alone(self) -> None:
        machine = self._machine
        require(machine.training.resident, "training_alone", "training runs without all of its memory")
        owners = machine.workers.ledger.owners()
        for gpu in machine.training.gpus:
            require(owners.get(gpu) == ("training",), "training_alone", f"GPU {gpu} is held by {owners.get(gpu)}")


class Tracker:
    def observe_turns(self, samples):
        pass

    def finish_step(self, **_):
        pass


class Disk(MemoryStorage):
    """What survives everything: the journal and published weights. It stands still in the moment of a kill."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.checkpoints = folder / "checkpoints"
        self.saved: set[str] = set()
        """Checkpoints of the trainer that were written to their end."""
        self.published: tuple[int, int, dict[str, int]] = (0, 0, {})
        """Of the newest weights: step, version, and which sample was trained on in which version."""
        self.writes_left: int | None = None
        self.torn = False
        self.dead = False
        self.died = asyncio.Event()

    def append(self, segment: int, data: bytes) -> None:
        if self.dead:
            return
        if self.writes_left == 0:
            if self.torn:
                super().append(segment, data)
            self.dead = True
            self.died.set()
            return
        if self.writes_left is not None:
            self.writes_left -= 1
        super().append(segment, data)

    def sync(self, segment: int) -> None:
        if not self.dead:
            super().sync(segment)

    def publish(self, version: int, trained: dict[str, int]) -> None:
        if not self.dead:
            self.published = (version, version, dict(trained))

    def revive(self) -> None:
        """The next control plane finds what was durable, and of a torn write a part."""
        self.cut_power(kept_bytes=29)
        self.dead, self.writes_left = False, None
        self.died.clear()


class Machine:
    """What is there whatever becomes of the control plane."""

    def __init__(self, script: FaultScript, disk: Disk) -> None:
        self.script = script
        self.disk = disk
        self.workers = FakeWorkers(script=self.script, decode_token_s=0.4)
        self.training = FakeTraining(frozenset({GpuId(0), GpuId(1)}), script=self.script, ledger=self.workers.ledger)
        self.weights = FakeWeights()
        self.games = Games()
        self.trainer_faults: deque[str] = deque()
        self.checkpoint_faults: deque[int] = deque()
        self.step, self.version, self.trained = disk.published
        self.trained = dict(self.trained)
        self.held: dict[GpuId, Tenure] = {}
        """GPUs that the provider lets us use."""

    def rows_on(self, table, gpu: GpuId) -> list[Worker]:
        return [r for r in table.rows.values() if gpu in r.gpus and r.holds_gpu and r.role is not Role.TRAINING]

    def kill_on(self, gpus: frozenset[GpuId]) -> list[WorkerId]:
        """The provider takes GPUs away: whatever runs there is gone."""
        dead = [id_ for id_, process in self.workers.processes.items() if process.gpus & gpus]
        for id_ in dead:
            self.workers.crash(id_)
        return dead

    def reborn(self) -> "Machine":
        """The same machine after its control plane died, and all processes with it."""
        machine = Machine(self.script, self.disk)
        machine.held = self.held
        machine.games.faults, machine.trainer_faults = self.games.faults, self.trainer_faults
        machine.checkpoint_faults = self.checkpoint_faults
        return machine

    def heal(self) -> None:
        """No more faults from here on; what is broken or stands still stays so."""
        self.script.clear()
        self.workers.leak_bytes.clear()
        self.training.leak_bytes = 0
        self.workers.transfer_failures = 0
        self.games.faults.clear()
        self.trainer_faults.clear()
        self.checkpoint_faults.clear()


class Answers:
    """The executor; its answers come twice or late when the script says so."""

    def __init__(self, executor: ElasticExecutor) -> None:
        self._executor = executor
        self.repeat: deque[float] = deque()
        self.delay: deque[float] = deque()

    async def run(self, effect: Effect, post) -> None:
        loop = asyncio.get_running_loop()

        def unreliable(event: Event) -> None:
            if self.delay:
                loop.call_later(self.delay.popleft(), post, event)
            else:
                post(event)
            if self.repeat:
                loop.call_later(self.repeat.popleft(), post, event)

        await self._executor.run(effect, unreliable)


class Calls:
    """The generation port; a request may only reach a worker that the table in force calls active."""

    def __init__(self, workers: FakeWorkers) -> None:
        self._workers = workers
        self.table = lambda: None

    def _check(self, worker: Worker) -> None:
        row = self.table().rows.get(worker.id)
        require(
            row is not None and row.lifecycle is Lifecycle.ACTIVE and row.incarnation == worker.incarnation,
            "only_active_serves",
            f"a request goes to worker {worker.id}.{worker.incarnation}, which is {row and row.lifecycle}",
        )

    async def generate(self, worker: Worker, request: GenerateRequest, on_chunk: OnChunk) -> GenerateResult:
        self._check(worker)
        return await self._workers.generate(worker, request, on_chunk)

    async def generate_pair(self, prefill: Worker, decode: Worker, request: GenerateRequest, on_chunk: OnChunk):
        self._check(prefill)
        self._check(decode)
        return await self._workers.generate_pair(prefill, decode, request, on_chunk)

    async def abort(self, worker: Worker, rid: str) -> None:
        await self._workers.abort(worker, rid)


@dataclass
class Report:
    """What came of a script."""

    outcome: PipelineOutcome | None = None
    events: int = 0
    digest: str = ""
    """Of all events in order: the same script gives the same one."""
    ended_s: float = 0.0
    lives: int = 1
    """Control planes that it took."""
    seen: set[str] = field(default_factory=set)


class Life:
    """One control plane on a machine, from its start to its end."""

    def __init__(self, machine: Machine, script: Script) -> None:
        self.machine = machine
        self.script = script
        self.completed = machine.step
        self.events = 0
        self.seen: set[str] = set()
        self.broken = ""
        """What is wrong with an evaluation."""
        self._digest = hashlib.sha256()
        self.policy = policy(script.policy)
        self.forecasts = forecasting_for(self.policy, HORIZON_S)
        trace = None if self.forecasts is None else self.forecasts.trace
        self.gate = TrainingGate()
        calls = Calls(machine.workers)
        limits = RouterLimits(serving=ServingLimits(), no_worker_s=2000.0, stall_s=30.0, abort_s=2.0)
        self.stalls = StallProbe(machine.workers, lambda event: self.scheduler.post(event), probe_s=LIMITS.probe_s)
        self.router = Router(calls, limits, on_fault=self.fault, on_stall=self.stalls.suspect, lifecycle=trace)
        self.batching = task_gate(self.router) if script.batching else None
        calls.table = lambda: self.scheduler.state.table
        self.actions: list[Action] = []
        self.crashed: dict[tuple[WorkerId, int], float] = {}
        self.told: dict[tuple[WorkerId, int], int] = {}
        """Slot and incarnation → the version that it was last told to load while it serves."""
        self.executor = ElasticExecutor(
            machine.workers, machine.training, machine.weights, LIMITS, on_action=self.actions.append
        )
        self.answers = Answers(self.executor)
        self.recovered = self.recover()
        self.before = self.recovered.state
        rollout = self.recovered.rollout
        self.journal = RunJournal(machine.disk, self.before, rollout, snapshot_every=script.snapshot_every)
        self.resumed = not self.journal_is_new
        if self.resumed:
            self.journal.note(RolloutResumed(completed=machine.step))
        self.scheduler = ElasticScheduler(
            self.before,
            executor=self.answers,
            routing=self.batching or self.router,
            training=self.gate,
            returned=self.returned,
            on_step=self.check,
            journal=self.journal,
        )
        settings = PipelineSettings(
            steps=script.steps,
            groups_per_step=GROUPS,
            group_size=GROUP_SIZE,
            max_staleness=script.staleness,
            injection=Injection(script.injection),
            grant_s=2000.0,
            batch_s=20_000.0,
            update_s=500.0,
            max_refills_per_group=200,
            completed_steps=machine.step,
        )
        limits = AgentLimits(turns=TURNS, new_tokens=NEW_TOKENS, context_tokens=500, environment_s=20.0)
        agent = TextAgent(machine.games.environment, Words(), limits, lifecycle=trace)
        self.evaluation = self.evaluations(agent) if script.evaluate_every else None
        self.trainer = Trainer(machine)
        self.position = rollout.position
        self.checkpoints = CheckpointWriter(
            machine.disk.checkpoints, self.trainer, every=script.checkpoint_every, keep=2, last=script.steps
        )
        self.pipeline = pipeline_class(settings)(
            settings,
            router=self.router,
            agent=agent,
            tasks=machine.games,
            trainer=self.trainer,
            publish=self.publish if self.evaluation is None else self.evaluation.publishing(self.publish),
            gate=self.gate,
            post=self.scheduler.post,
            tracker=Tracker(),
            checkpoint=lambda step: self.checkpoints.completed(step, self.pipeline.position),
            position=rollout.position,
            note=self.journal.note,
            commit=self.journal.commit,
            restored=rollout if self.resumed else None,
            lifecycle=trace,
            batching=self.batching,
            readiness=self.readiness() if script.readiness else None,
        )

    def evaluations(self, agent: TextAgent) -> AnchoredEvaluation:
        """Each must be over before the next weights are published, with every episode told of."""

        def told(result: EvaluationResult) -> None:
            published, count = self.machine.disk.published[1], len(result.rewards) + result.failed
            if (result.version, count) != (published, EPISODES):
                # Whoever is told may be a task that nobody waits for.
                self.broken = f"{count} episodes of {EPISODES} on version {result.version}, {published} is published"
            self.scheduler.post(result.event(now()))

        return AnchoredEvaluation(
            router=self.router,
            agent=agent,
            tasks=self.machine.games,
            episodes=EPISODES,
            every=self.script.evaluate_every,
            seed=self.script.seed,
            on_result=told,
            gate=self.batching,
            limit_s=100.0,
        )

    def readiness(self) -> ReadinessMonitor:
        batch = GROUPS * GROUP_SIZE
        return ReadinessMonitor(
            ReadinessSettings(batch=BatchInterval(minimum=batch, ideal=batch)),
            group_size=GROUP_SIZE,
            post=self.scheduler.post,
            evaluates=lambda version: self.evaluation is not None and self.evaluation.due(version),
        )

    def recover(self) -> Recovered:
        """What the journal says; the first state where there is none."""
        script, machine = self.script, self.machine
        settings = self.settings = ElasticSettings(
            policy=self.policy,
            borrowing=Borrowing(script.borrowing),
            gpus_per_worker=script.gpus_per_worker,
            return_s=20.0,
            max_restarts=script.max_restarts,
            expansion_workers=script.expansion_workers,
        )
        self.journal_is_new = Journal(machine.disk).empty
        if self.journal_is_new:
            state = initial_state(settings=settings, workload=WORKLOAD, platform=PLATFORM, training_gpus=2)
            return Recovered(replace(state, calibrated=True), RolloutLedger())
        recovered = recover(machine.disk, settings)
        known = recovered.state.table.target_version
        require(known <= machine.version, "monotonic_versions", f"{known} was served, {machine.version} is published")
        if machine.version:
            machine.weights.publish(machine.version)
        return recovered

    async def publish(self, snapshot: WeightSnapshot) -> None:
        """Make weights durable, which takes its time, and then known."""
        machine = self.machine
        await asyncio.sleep(0.2)
        machine.disk.publish(snapshot.version, machine.trained)
        machine.weights.publish(snapshot.version)
        if self.script.told_after_s:
            # Whoever loads them meanwhile is ahead of what the planner knows.
            await asyncio.sleep(self.script.told_after_s)

    # ---- what the control plane tells ------------------------------------------------------------------------------

    def fault(self, worker: Worker, cause: str) -> None:
        self.scheduler.post(WorkerFailed(now_s=now(), worker=worker.id, incarnation=worker.incarnation, cause=cause))

    def returned(self, gpus: frozenset[GpuId]) -> None:
        owners = self.machine.workers.ledger.owners()
        held = {gpu: owners[gpu] for gpu in gpus if gpu in owners}
        require(not held, "returned_empty", f"GPUs are given back while held: {held}")

    def check(self, event: Event, state: ElasticState, effects: tuple[Effect, ...]) -> None:
        """After every event."""
        self.events += 1
        self.seen.add(type(event).__name__)
        self.seen.update(type(effect).__name__ for effect in effects)
        self.seen.update(effect.decision.reason for effect in effects if isinstance(effect, RecordDecision))
        self._digest.update(json_line(encode_event(event)).encode())
        check_table(self.before.table, state.table)
        check_state(state)
        check_following(state.table, effects, self.told)
        check_counts(self.pipeline.counts)
        for id_, row in state.table.rows.items():
            # By the time of the event: what was posted before the end was told is handled before it.
            since_s = self.crashed.get((id_, row.incarnation), event.now_s)
            serves = row.lifecycle is Lifecycle.ACTIVE and event.now_s > since_s
            require(not serves, "crashes_are_noticed", f"worker {id_} serves, though its end was told at {since_s} s")
        require(not self.machine.workers.violations, "no_misuse", "; ".join(self.machine.workers.violations))
        ledger = self.machine.workers.ledger
        require(not ledger.violations, "one_owner_per_gpu", "; ".join(ledger.violations))
        require(self.router.statistics.stale_served == 0, "no_stale_serving", "a stale token was served")
        require(not self.broken, "anchored", self.broken)
        self.before = state

    # ---- the script -------------------------------------------------------------------------------------------------

    async def run(self, ops: deque[Op]) -> PipelineOutcome:
        """Live until the pipeline has made its steps. Whatever fails first ends it."""
        if not self.resumed or self.completed >= self.script.steps:
            await self.checkpoints.write(self.completed, self.position)
        control = asyncio.create_task(self.scheduler.run(), name="control")
        happenings = asyncio.create_task(self.play(ops), name="script")
        pipeline = asyncio.create_task(self.pipeline.run(), name="pipeline")
        killed = asyncio.create_task(self.killed(), name="killed")
        forecasts = [] if self.forecasts is None else [self.forecasts.start(self.scheduler)]
        try:
            async with asyncio.timeout(MOST_S):
                first = {control, pipeline, killed, *forecasts}
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
                if self.machine.disk.dead:
                    raise ControllerKilledError
                for task in (control, *forecasts):
                    if task.done():
                        task.result()
                return await pipeline
        finally:
            killed.cancel()
            happenings.cancel()
            pipeline.cancel()
            for task in forecasts:
                task.cancel()
            self.executor.close()
            self.scheduler.stop()
            ended = await asyncio.gather(control, happenings, pipeline, *forecasts, return_exceptions=True)
            if self.evaluation is not None:
                await self.evaluation.aclose()
            await self.trainer.end()
            await self.router.aclose()
            await self.stalls.aclose()
            # What a control plane does after its death is nobody's concern; a script that breaks always is.
            for error in ended[1:2] if self.machine.disk.dead else ended[:2]:
                if isinstance(error, Exception):
                    raise error

    async def killed(self) -> None:
        await self.machine.disk.died.wait()

    async def play(self, ops: deque[Op]) -> None:
        if self.resumed:
            self.scheduler.post(RunResumed(now_s=now(), weight_version=self.machine.version))
            for gpu, tenure in list(self.machine.held.items()):
                self.offer((gpu,), tenure)
        else:
            self.offer((2, 3), Tenure.RESERVED)
        while ops:
            op = ops.popleft()
            await asyncio.sleep(op.wait_s)
            getattr(self, f"op_{op.name}")(*op.args)
        self.machine.heal()
        self.offer(FRESH, Tenure.RESERVED)

    def offer(self, gpus, tenure=Tenure.PREEMPTIBLE) -> None:
        ids = frozenset(map(GpuId, gpus))
        self.machine.held.update(dict.fromkeys(ids, tenure))
        self.scheduler.post(GpusOffered(now_s=now(), gpus=ids, tenure=tenure))

    def op_offer(self, gpus) -> None:
        self.offer(gpus)

    def op_reclaim(self, gpus, notice_s) -> None:
        ids = frozenset(map(GpuId, gpus))
        self.scheduler.post(GpusReclaimed(now_s=now(), gpus=ids, deadline_s=now() + notice_s))
        for gpu in ids:
            self.machine.held.pop(gpu, None)

    def op_vanish(self, gpus) -> None:
        ids = frozenset(map(GpuId, gpus))
        self.machine.kill_on(ids)
        self.scheduler.post(GpusReclaimed(now_s=now(), gpus=ids, deadline_s=now() - 1.0))
        for gpu in ids:
            self.machine.held.pop(gpu, None)

    def op_crash(self, gpu, noticed) -> None:
        for row in self.machine.rows_on(self.scheduler.state.table, GpuId(gpu)):
            self.machine.workers.crash(row.id)
            if noticed:
                self.fault(row, "the process ended")
                self.crashed[(row.id, row.incarnation)] = now()

    def op_freeze(self, gpu) -> None:
        for row in self.machine.rows_on(self.scheduler.state.table, GpuId(gpu)):
            self.machine.workers.freeze(row.id)

    def op_thaw(self) -> None:
        for id_ in list(self.machine.workers.processes):
            self.machine.workers.thaw(id_)

    def op_fault(self, method, fault) -> None:
        if method.startswith("training.") and fault == "lose":
            fault = "fail"
        self.machine.script.inject(Fault(fault), method=method)

    def op_slow(self, method, factor) -> None:
        self.machine.script.slow(method, factor)

    def op_leak(self, worker, on) -> None:
        self.machine.workers.leak_bytes[worker] = 40_000_000_000 if on else 0

    def op_leak_training(self, on) -> None:
        self.machine.training.leak_bytes = 40_000_000_000 if on else 0

    def op_repeat_answers(self, count, after_s) -> None:
        self.answers.repeat.extend([after_s] * count)

    def op_delay_answers(self, count, by_s) -> None:
        self.answers.delay.extend([by_s] * count)

    def op_transfer_failures(self, count) -> None:
        self.machine.workers.transfer_failures = count

    def op_environment(self, fault, count) -> None:
        self.machine.games.faults.extend([fault] * count)

    def op_trainer(self, fault) -> None:
        self.machine.trainer_faults.append(fault)

    def op_checkpoint(self, when) -> None:
        self.machine.checkpoint_faults.append(when)

    def op_forecast(self, prefill, decode, count) -> None:
        """The next windows ask for so many prefill and decode workers."""
        for _ in range(count):
            forecast = LoadForecast(
                now_s=now(),
                horizon_s=10.0,
                prefill_tokens=prefill * 10.0 / PLATFORM.prefill_per_token_s,
                admitted_tokens=10.0 * decode,
                decode_kv_bytes=decode * PLATFORM.kv_capacity_bytes,
                prefill_tokens_per_s=1.0 / PLATFORM.prefill_per_token_s,
                live=GROUPS * GROUP_SIZE,
            )
            self.scheduler.post(forecast)

    def op_jump(self, by_s) -> None:
        loop: Any = asyncio.get_running_loop()
        loop.jump(by_s)

    def op_cordon(self, worker, cordoned) -> None:
        workers = frozenset({WorkerId(worker)})
        self.scheduler.post(WorkersCordoned(now_s=now(), workers=workers, cordoned=cordoned))

    def op_pin(self, text) -> None:
        pinned = Configuration.parse(text) if text else None
        self.scheduler.post(ConfigurationPinned(now_s=now(), configuration=pinned))

    def op_kill(self, writes, torn) -> None:
        self.machine.disk.writes_left, self.machine.disk.torn = writes, torn

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()


def now() -> float:
    return asyncio.get_running_loop().time()


class ControllerKilledError(Exception):
    """The control plane was killed in the middle of whatever it did."""


async def _play(script: Script, folder: Path) -> Report:
    disk, ops, report = Disk(folder), deque(script.ops), Report()
    machine = Machine(FaultScript(), disk)
    faults = hashlib.sha256()
    while True:
        life = Life(machine, script)
        try:
            report.outcome = await life.run(ops)
        except ControllerKilledError:
            report.lives += 1
        except TrainerLostError as error:
            require("a training rank died" in str(error), "named_end", f"the run ended with {error!r}")
            report.lives += 1
        except WorkerError as error:
            require("a training rank died" in str(error), "named_end", f"the run ended with {error!r}")
            report.lives += 1
        report.events += life.events
        report.seen |= life.seen
        faults.update(life.digest.encode())
        if report.outcome is not None:
            check_end(machine, life, script, report.outcome)
            report.digest, report.ended_s = faults.hexdigest(), now()
            return report
        disk.revive()
        check_checkpoint(disk)
        machine = machine.reborn()


def task_gate(router: Router) -> TaskGate:
    """Turns wait for room for their contexts, of which a worker has little."""
    limits = TaskGateLimits(kv_tokens=KV_TOKENS, growth_tokens=NEW_TOKENS, wait_s=20_000.0)
    weights = PriorityWeights(context_scale_tokens=KV_TOKENS)
    return TaskGate(router, limits, TaskBatchingSettings(probe_tokens=30, group_size=GROUP_SIZE, weights=weights))


def check_checkpoint(disk: Disk) -> int:
    """Whoever goes on finds a complete checkpoint, of no later weights than were published. Returns its step."""
    found = find(disk.checkpoints.parent)
    published, version, _ = disk.published
    require(found.step <= published, "checkpoint_kept", f"of step {found.step}, and {published} is published")
    require(found.version <= version, "checkpoint_kept", f"of version {found.version}, and {version} is published")
    require(str(found.trainer) in disk.saved, "checkpoint_kept", f"of step {found.step}, which no rank has written")
    return found.step


def check_end(machine: Machine, life: Life, script: Script, outcome: PipelineOutcome) -> None:
    """What must hold once the run is over."""
    wanted = script.steps * GROUPS * GROUP_SIZE
    done = life.completed + outcome.steps
    require(done == script.steps, "all_steps", f"{done} of {script.steps}")
    require(outcome.counts.used == wanted, "all_steps", f"{outcome.counts.used} samples of {wanted}")
    require(len(machine.trained) == wanted, "trained_once", f"{len(machine.trained)} samples of {wanted}")
    require(outcome.version == script.steps, "all_steps", f"version {outcome.version} after {script.steps}")
    check_counts(outcome.counts)
    step = check_checkpoint(machine.disk)
    require(step == script.steps, "checkpoint_kept", f"the newest is of step {step} of {script.steps}")
    known = {(row.id, row.incarnation) for row in life.scheduler.state.table.rows.values()}
    stray = [p.owner for p in machine.workers.processes.values() if (p.worker, p.incarnation) not in known]
    require(not stray, "no_stray_process", f"{stray} belong to no row")
    if script.seed % 4:
        return
    settings = life.settings
    again = recover(machine.disk, settings, since=0)
    require(again.state == replace(life.before, last_decision=again.state.last_decision), "replay", "another state")


def play(script: Script) -> Report:
    """Run a script to its end. Raises what broke first: an invariant, a deadlock, or a bug's exception."""
    with tempfile.TemporaryDirectory(prefix="pearl-dst-") as folder:
        return run_virtual(_play(script, Path(folder)))
