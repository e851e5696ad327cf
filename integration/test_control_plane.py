"""The whole control plane in virtual time: real scheduler, planner, executors, router and pipeline on fake processes.

Random scripts of offers, reclaims and crashes run against a training job; whatever happens, every step is trained on,
no trajectory is lost, no worker serves stale weights, and no GPU ever has two owners.
"""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pearl_executor.execution import ElasticExecutor
from pearl_executor.limits import Limits
from pearl_executor.testing import FakeTraining, FakeWeights, FakeWorkers
from pearl_executor.virtual_time import run_virtual
from pearl_planner.elastic import Borrowing, ElasticSettings, initial_state
from pearl_planner.policies import pearl
from pearl_rl.control.scheduler import ElasticScheduler
from pearl_rl.journal.frames import JournalError
from pearl_rl.rollout.agent import AgentLimits, TextAgent
from pearl_rl.rollout.environments.protocol import StepResult, observe
from pearl_rl.rollout.pipeline import PipelineScheduler
from pearl_rl.rollout.pipeline_settings import PipelineSettings
from pearl_rl.rollout.router import Router
from pearl_rl.rollout.testing import FakeTrainer, NumberedTasks
from pearl_rl.rollout.training_gate import TrainingGate
from pearl_state.configuration import Configuration
from pearl_state.events import ConfigurationPinned, GpusOffered, GpusReclaimed, WeightsPublished, WorkerFailed
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.roles import Role, Tenure
from pearl_state.worker import GpuId

WORKLOAD = WorkloadProfile(batch=8, turns=3, new_prompt_tokens=20, response_tokens=8, turn_environment_s=0.3)
PLATFORM = PlatformProfile(
    decode_fixed_s=0.03,
    decode_per_sequence_s=0.002,
    prefill_per_token_s=0.003,
    kv_bytes_per_token=1024,
    transfer_bytes_per_s=1e8,
    overhead_per_turn_s=0.05,
)


class Words:
    """A tokenizer of as many tokens as there are words."""

    stop_token_ids = (0,)

    def prompt(self, observation, *, previous):
        return [1 + len(word) for word in observation.text.split()]

    def decode(self, tokens):
        return " ".join(str(token) for token in tokens)


class Quiz:
    """Three turns, then a reward."""

    async def reset(self, task):
        self.turn = 0
        await asyncio.sleep(0.1)
        return observe("the first question of this task")

    async def step(self, action):
        self.turn += 1
        await asyncio.sleep(0.3)
        return StepResult(observe("and another question"), 1.0, self.turn >= 3, {})

    async def close(self):
        pass


class Trainer(FakeTrainer):
    """The pipeline's trainer, which must hold the training memory while it updates."""

    def __init__(self, memory: FakeTraining) -> None:
        super().__init__(update_s=2.0)
        self.memory = memory

    async def update(self, trajectories):
        assert self.memory.resident, "training runs without its memory"
        result = await super().update(trajectories)
        assert self.memory.resident, "training lost its memory in the middle of an update"
        return result


class Tracker:
    def observe_turns(self, samples):
        pass

    def finish_step(self, **_):
        pass


class Cluster:
    """Everything wired as in a real run, on fakes."""

    def __init__(self, borrowing: Borrowing, steps: int) -> None:
        self.workers = FakeWorkers()
        self.training = FakeTraining(
            frozenset({GpuId(0), GpuId(1)}), script=self.workers.script, ledger=self.workers.ledger
        )
        self.weights = FakeWeights()
        self.gate = TrainingGate()
        self.returned: set[GpuId] = set()
        self.router = Router(self.workers, on_fault=self.fault)
        state = initial_state(
            settings=ElasticSettings(policy=pearl(), borrowing=borrowing, return_s=20.0),
            workload=WORKLOAD,
            platform=PLATFORM,
            training_gpus=2,
        )
        self.scheduler = ElasticScheduler(
            replace(state, calibrated=True),
            executor=ElasticExecutor(self.workers, self.training, self.weights, Limits().scaled(0.2)),
            routing=self.router,
            training=self.gate,
            returned=self.returned.update,
            on_step=self.check,
        )
        self.pipeline = PipelineScheduler(
            PipelineSettings(steps=steps, groups_per_step=4, group_size=2, grant_s=200.0, batch_s=2000.0),
            router=self.router,
            agent=TextAgent(Quiz, Words(), AgentLimits(turns=3, new_tokens=8, context_tokens=500)),
            tasks=NumberedTasks(),
            trainer=Trainer(self.training),
            publish=lambda snapshot: self.weights.publish(snapshot.version),
            gate=self.gate,
            post=self.scheduler.post,
            tracker=Tracker(),
        )
        self.lent = 0

    def fault(self, worker, cause):
        now_s = asyncio.get_running_loop().time()
        self.scheduler.post(WorkerFailed(now_s=now_s, worker=worker.id, incarnation=worker.incarnation, cause=cause))

    def check(self, event, state, effects):
        prefill, decode, _ = state.table.active_roles
        assert (prefill == 0) == (decode == 0)
        self.lent += state.lent and bool(state.table.active())

    async def run(self, script):
        control = asyncio.create_task(self.scheduler.run())
        self.offer(2, 3, tenure=Tenure.RESERVED)
        events = asyncio.create_task(self.play(script))
        try:
            async with asyncio.timeout(20_000):
                outcome = await self.pipeline.run()
        finally:
            events.cancel()
            self.scheduler.stop()
            await asyncio.gather(control, events, return_exceptions=True)
            await self.router.aclose()
        control.result()
        return outcome

    def offer(self, *gpus, tenure=Tenure.PREEMPTIBLE):
        now_s = asyncio.get_running_loop().time()
        self.scheduler.post(GpusOffered(now_s=now_s, gpus=frozenset(map(GpuId, gpus)), tenure=tenure))

    async def play(self, script):
        for wait_s, action, gpu in script:
            await asyncio.sleep(wait_s)
            now_s = asyncio.get_running_loop().time()
            if action == "offer":
                self.offer(gpu)
            elif action == "reclaim":
                deadline_s = now_s + wait_s
                self.scheduler.post(GpusReclaimed(now_s=now_s, gpus=frozenset({GpuId(gpu)}), deadline_s=deadline_s))
            else:
                victims = [
                    row
                    for row in self.scheduler.state.table.rows.values()
                    if GpuId(gpu) in row.gpus and row.holds_gpu and row.role is not Role.TRAINING
                ]
                for row in victims:
                    self.workers.crash(row.id)
                    self.fault(row, "crash")


SCRIPTS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.2, 1.0, 5.0, 20.0]),
        st.sampled_from(["offer", "offer", "reclaim", "crash"]),
        st.integers(10, 14),
    ),
    max_size=14,
)


@pytest.mark.parametrize("borrowing", [Borrowing.OFF, Borrowing.UNGATED, Borrowing.GATED])
@given(script=SCRIPTS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_comes_and_goes_every_step_is_trained_and_nothing_is_lost(borrowing, script) -> None:
    async def main():
        cluster = Cluster(borrowing, steps=3)
        return cluster, await cluster.run(script)

    cluster, outcome = run_virtual(main())
    assert outcome.steps == 3
    assert outcome.counts.lost == 0
    assert cluster.router.statistics.stale_served == 0
    assert cluster.workers.violations == []
    assert cluster.workers.ledger.violations == []
    assert all(len(owners) == 1 for owners in cluster.workers.ledger.owners().values())


def test_idle_training_gpus_are_lent_and_come_back_before_each_update() -> None:
    async def main():
        cluster = Cluster(Borrowing.UNGATED, steps=3)
        await cluster.run([])
        return cluster

    assert run_virtual(main()).lent > 0


PINNED = {20: Configuration.parse("2P2D"), 40: Configuration.parse("1P3D")}
"""Version → what a person asks for then: another mode, and another ratio."""


@pytest.mark.parametrize("load", [0.5, 1.0, 1.5, 3.5], ids="{}_of_a_step".format)
def test_workers_join_and_change_roles_however_long_a_load_takes_beside_a_training_step(load: float) -> None:
    """Nobody is starved because weights are published faster than they are loaded, and the floor follows."""
    step_s, steps = 8.0, 60

    async def main():
        cluster = Cluster(Borrowing.OFF, steps=1)
        cluster.workers.script.slow("load_weights", load * step_s / 4.0)
        control = asyncio.create_task(cluster.scheduler.run())
        cluster.offer(2, 3, tenure=Tenure.RESERVED)
        await asyncio.sleep(10 * step_s)
        for version in range(1, steps + 1):
            cluster.weights.publish(version)
            now_s = asyncio.get_running_loop().time()
            cluster.scheduler.post(WeightsPublished(now_s=now_s, version=version))
            if version == 2:
                cluster.offer(10, 11)
            if version in PINNED:
                cluster.scheduler.post(ConfigurationPinned(now_s=now_s, configuration=PINNED[version]))
            await asyncio.sleep(step_s)
        table = cluster.scheduler.state.table
        cluster.scheduler.stop()
        await control
        await cluster.router.aclose()
        return table

    table = run_virtual(main())
    served = [table.rows[id_] for id_ in table.active()]
    assert {gpu for row in served for gpu in row.gpus} == {2, 3, 10, 11}
    assert table.configuration == PINNED[max(PINNED)]
    oldest = min(row.weight_version for row in served)
    assert steps - oldest <= 1 + 2 * load
    assert table.floor_version == oldest


@pytest.mark.parametrize("at", ["commit", "applied", "on_step"])
def test_a_disk_that_refuses_ends_the_control_plane_with_its_own_error(at: str) -> None:
    """Not with a group of errors around it, which nobody would take for what it is."""

    class Full:
        def append(self, event, loads):
            pass

        async def commit(self):
            if at == "commit":
                raise JournalError("no space left")

        def applied(self, state):
            if at == "applied":
                raise JournalError("no space left")

    async def main():
        cluster = Cluster(Borrowing.OFF, steps=1)
        cluster.scheduler._journal = Full()
        if at == "on_step":

            def refuse(*_):
                raise JournalError("no space left")

            cluster.scheduler._on_step = refuse
        control = asyncio.create_task(cluster.scheduler.run())
        cluster.offer(2, 3, tenure=Tenure.RESERVED)
        await control

    with pytest.raises(JournalError, match="no space left"):
        run_virtual(main())
