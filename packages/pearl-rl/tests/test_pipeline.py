"""The Pipeline Scheduler: rollout and training side by side, within the staleness bound, with nothing lost."""

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl_executor.ports import TransferError, WeightSnapshot, WorkerLostError
from pearl_executor.virtual_time import run_virtual
from pearl_rl.observer import SilentObserver, StepRecord
from pearl_rl.rollout.agent import Episode, PromptTooLongError
from pearl_rl.rollout.batch_rollout import RefillLimits, UnplayableTasksError
from pearl_rl.rollout.buffer import RefillsExhaustedError, VersionRegressionError
from pearl_rl.rollout.calls import Generate, ModelCall
from pearl_rl.rollout.environments.protocol import EnvironmentFailure
from pearl_rl.rollout.ledger import Position
from pearl_rl.rollout.pipeline import PipelineScheduler
from pearl_rl.rollout.pipeline_settings import (
    EndReason,
    PipelineOutcome,
    PipelineSettings,
    RolloutTimeoutError,
    UpdateTimeoutError,
)
from pearl_rl.rollout.router import Router, RouterLimits
from pearl_rl.rollout.testing import (
    FakeGeneration,
    FakeRequest,
    FakeTrainer,
    NumberedTasks,
    continuation,
    serving_table,
)
from pearl_rl.rollout.training_gate import GrantTimeoutError, TrainingGate
from pearl_state.events import (
    Event,
    RolloutBegan,
    RolloutFinished,
    RolloutProgressed,
    TrainingFinished,
    TrainingRequested,
    WeightsPublished,
)
from pearl_state.roles import Role, Zone
from pearl_state.samples import TurnSample
from pearl_state.trajectory import Trajectory, TrajectoryId, Turn
from pearl_state.worker import WorkerId

C = Role.COLOCATED


@dataclass
class FakeAgent:
    """Plays `turns` turns with time in the environment between; `before_turn` may raise what an agent may raise."""

    turns: int = 2
    environment_s: float = 0.2
    before_turn: Callable[[Episode, int], None] = lambda _episode, _turn: None
    environment_of: Callable[[Episode], float] | None = None
    running: set[TrajectoryId] = field(default_factory=set)
    episodes: list[Episode] = field(default_factory=list)

    async def run(self, episode: Episode, generate: Generate) -> Trajectory:
        loop = asyncio.get_running_loop()
        self.running.add(episode.trajectory)
        self.episodes.append(episode)
        started_s = loop.time()
        try:
            context = [100 + episode.seed % 50]
            turns = []
            for number in range(self.turns):
                self.before_turn(episode, number)
                result = await generate(
                    ModelCall(trajectory=episode.trajectory, turn=number, prompt=tuple(context), max_new_tokens=5)
                )
                assert list(result.tokens) == continuation(context, 5)
                new = tuple(context) if number == 0 else (7,)
                turns.append(Turn(prompt=new, response=result.tokens, logprobs=result.logprobs, spans=result.spans))
                context += [*result.tokens, 7]
                await asyncio.sleep(self.environment_of(episode) if self.environment_of else self.environment_s)
            return Trajectory(
                id=episode.trajectory,
                group=episode.group,
                task=episode.task.id,
                turns=tuple(turns),
                reward=float(episode.seed % 2),
                dispatch_version=episode.dispatch_version,
                started_s=started_s,
                finished_s=loop.time(),
            )
        finally:
            self.running.discard(episode.trajectory)


class Recorder(SilentObserver):
    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def on_step(self, record: StepRecord) -> None:
        self.records.append(record)


class FakeTracker:
    def __init__(self) -> None:
        self.samples: list[TurnSample] = []
        self.steps: list[dict[str, Any]] = []

    def observe_turns(self, samples: Sequence[TurnSample]) -> None:
        self.samples.extend(samples)

    def finish_step(self, **measured: Any) -> None:
        self.steps.append(measured)


class Bench:
    """A pipeline among stand-ins; training is granted `grant_s` after it was asked for."""

    def __init__(
        self, *, grant_s: float = 0.1, trainer: FakeTrainer | None = None, workers: int = 2, **of: Any
    ) -> None:
        self.port = FakeGeneration()
        self.router = Router(self.port, RouterLimits(no_worker_s=20.0))
        self.trainer = FakeTrainer() if trainer is None else trainer
        self.table = serving_table([C] * workers, version=self.trainer.version)
        self.port.versions = {WorkerId(i): self.trainer.version for i in range(workers)}
        self.agent = FakeAgent()
        self.gate = TrainingGate()
        self.tracker = FakeTracker()
        self.recorder = Recorder()
        self.events: list[Event] = []
        self.published: list[WeightSnapshot] = []
        self.trajectories: list[tuple[Trajectory, int]] = []
        self.checkpoints: list[tuple[int, int]] = []
        self.checkpoint_s = 0.0
        self.grant_s = grant_s
        self.settings = PipelineSettings(**{"steps": 4, "groups_per_step": 2, "group_size": 4, "seed": 3, **of})
        self.position: Position | None = None
        self.pipeline: PipelineScheduler

    def post(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, TrainingRequested) and self.grant_s < math.inf:
            asyncio.get_running_loop().call_later(self.grant_s, self.gate.grant)
        if isinstance(event, WeightsPublished):
            table = self.router.table.publish(event.version)
            for id_ in table.active():
                self.port.versions[id_] = event.version
                table = table.report(id_, event.version)
            self.router.apply(table)

    async def run(self) -> PipelineOutcome:
        self.router.apply(self.table)
        self.pipeline = PipelineScheduler(
            self.settings,
            router=self.router,
            agent=self.agent,
            tasks=NumberedTasks(),
            trainer=self.trainer,
            publish=self.published.append,
            gate=self.gate,
            post=self.post,
            tracker=self.tracker,
            observer=self.recorder,
            checkpoint=self.checkpoint,
            on_trajectory=lambda trajectory, step: self.trajectories.append((trajectory, step)),
            position=self.position,
        )
        return await self.pipeline.run()

    async def checkpoint(self, step: int) -> None:
        self.checkpoints.append((step, len(self.of(TrainingFinished))))
        await asyncio.sleep(self.checkpoint_s)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def assert_nothing_left(self) -> None:
        assert not self.agent.running
        assert not self.port.running
        assert not any(self.router.loads().values())
        assert self.router._meter.in_flight == 0
        assert not self.router._homes
        assert len(asyncio.all_tasks()) == 1


def test_every_step_trains_on_one_whole_batch() -> None:
    async def main() -> None:
        bench = Bench()
        outcome = await bench.run()
        assert (outcome.reason, outcome.steps, outcome.version) == (EndReason.STEPS, 4, 4)
        assert [len(batch) for batch in bench.trainer.batches] == [8] * 4
        for batch in bench.trainer.batches:
            sizes = [sum(t.group == group for t in batch) for group in {t.group for t in batch}]
            assert sizes == [4, 4]
            assert len({t.task for t in batch}) == 2
        assert outcome.counts.dispatched == outcome.counts.used == 32
        assert outcome.counts.lost == 0
        assert [snapshot.version for snapshot in bench.published] == [1, 2, 3, 4]
        assert len({t.id for t, _ in bench.trajectories}) == 32
        bench.assert_nothing_left()

    run_virtual(main())


def test_events_tell_the_elastic_scheduler_what_happens_in_order() -> None:
    """PEARL section 4.1.2: a batch is complete, training asks, runs, publishes, and is finished."""

    async def main() -> None:
        bench = Bench(steps=2)
        await bench.run()
        names = [type(event).__name__ for event in bench.events if not isinstance(event, RolloutProgressed)]
        assert names == [
            "RolloutBegan",
            "RolloutFinished",
            "TrainingRequested",
            "RolloutBegan",
            "WeightsPublished",
            "TrainingFinished",
            "RolloutFinished",
            "TrainingRequested",
            "WeightsPublished",
            "TrainingFinished",
        ] or names == [
            "RolloutBegan",
            "RolloutFinished",
            "TrainingRequested",
            "RolloutBegan",
            "RolloutFinished",
            "WeightsPublished",
            "TrainingFinished",
            "TrainingRequested",
            "WeightsPublished",
            "TrainingFinished",
        ]
        times = [event.now_s for event in bench.events]
        assert times == sorted(times)
        for step in (1, 2):
            left = [e.remaining for e in bench.of(RolloutProgressed) if e.step == step]
            assert left == list(range(7, -1, -1))
        assert [(e.step, e.batch) for e in bench.of(RolloutBegan)] == [(1, 8), (2, 8)]
        assert [e.weight_version for e in bench.of(TrainingFinished)] == [1, 2]
        finished = bench.of(RolloutFinished)[0]
        assert finished.makespan_s == pytest.approx(2 * (0.05 + 0.05 + 0.2))

    run_virtual(main())


@pytest.mark.parametrize(("seeding_s", "early"), [(0.1, True), (1.0, False), (math.inf, False)])
def test_training_asks_for_its_gpus_at_the_end_of_the_seeding_window_and_once(seeding_s: float, early: bool) -> None:
    """A batch takes 0.6 s. Training that holds its GPUs already waits for nothing when it comes."""

    async def main() -> None:
        bench = Bench(seeding_s=seeding_s, steps=3, trainer=FakeTrainer(update_s=0.1))
        outcome = await bench.run()
        asked = [e.now_s for e in bench.of(TrainingRequested)]
        complete = [e.now_s for e in bench.of(RolloutFinished)]
        waits = [0.0, *(e.now_s for e in bench.of(TrainingFinished))]
        assert len(asked) == len(complete) == outcome.steps == 3
        due = [wait + seeding_s for wait in waits[:3]] if early else complete
        assert asked == pytest.approx(due)
        assert outcome.wait_grant_s == pytest.approx(0.0 if early else 3 * 0.1)
        bench.assert_nothing_left()

    run_virtual(main())


def test_rollout_goes_on_while_training_runs() -> None:
    """PEARL section 4.1: the next batch is rolled out during the update on the one before."""

    async def main() -> None:
        bench = Bench(trainer=FakeTrainer(update_s=0.3), steps=6)
        outcome = await bench.run()
        began = [e.now_s for e in bench.of(RolloutBegan)]
        finished = [e.now_s for e in bench.of(RolloutFinished)]
        assert began[1:] == finished[:-1]
        assert outcome.wait_bound_s == 0
        makespan_s = finished[0]
        assert outcome.wall_s == pytest.approx(6 * makespan_s + 0.1 + 0.3)
        for start_s, end_s in bench.trainer.busy[:-1]:
            assert any(b < end_s and f > start_s for b, f in zip(began, finished, strict=True))

    run_virtual(main())


def test_rollout_waits_for_training_only_at_the_bound_and_the_wait_is_counted() -> None:
    async def main() -> None:
        bench = Bench(trainer=FakeTrainer(update_s=10.0), steps=4)
        outcome = await bench.run()
        began = [e.now_s for e in bench.of(RolloutBegan)]
        done = [e.now_s for e in bench.of(TrainingFinished)]
        # Batch k needs the update on batch k - 2.
        assert began[1] < done[0]
        assert began[2:] == done[:2]
        assert outcome.wait_bound_s == pytest.approx(sum(r.wait_bound_s for r in bench.recorder.records)) != 0

    run_virtual(main())


def test_without_staleness_rollout_waits_for_every_update() -> None:
    async def main() -> None:
        bench = Bench(max_staleness=0)
        outcome = await bench.run()
        began = [e.now_s for e in bench.of(RolloutBegan)]
        assert began[1:] == [e.now_s for e in bench.of(TrainingFinished)][:-1]
        assert all(record.staleness_max == 0 for record in bench.recorder.records)
        assert [t.dispatch_version for t in bench.trainer.batches[2]] == [2] * 8
        assert all(span.version == 2 for t in bench.trainer.batches[2] for span in t.spans)
        assert outcome.wait_bound_s > 3.0

    run_virtual(main())


@settings(max_examples=40, deadline=None)
@given(
    staleness=st.integers(0, 3),
    update_s=st.sampled_from([0.01, 0.3, 0.7, 2.0, 10.0]),
    grant_s=st.sampled_from([0.0, 0.5]),
    start=st.sampled_from([0, 57]),
    spread_s=st.sampled_from([0.0, 0.3, 3.0]),
)
def test_no_trajectory_is_used_older_than_the_bound(
    staleness: int, update_s: float, grant_s: float, start: int, spread_s: float
) -> None:
    async def main() -> None:
        trainer = FakeTrainer(version=start, update_s=update_s)
        bench = Bench(trainer=trainer, max_staleness=staleness, steps=6, grant_s=grant_s)
        bench.agent.environment_of = lambda episode: 0.1 + spread_s * (episode.seed % 7) / 7
        outcome = await bench.run()
        assert outcome.steps == 6
        for batch, used_at in zip(trainer.batches, trainer.used_at, strict=True):
            assert all(0 <= used_at - t.dispatch_version <= staleness for t in batch)
        for record in bench.recorder.records:
            assert record.staleness_max <= staleness
            assert sum(record.staleness_histogram.values()) == 8
            split = record.staleness_in_flight_mean + record.staleness_in_queue_mean
            assert record.staleness_mean == pytest.approx(split)
        assert (outcome.counts.lost, outcome.counts.rejected) == (0, 0)
        bench.assert_nothing_left()

    run_virtual(main())


def test_samples_that_a_jump_of_versions_made_too_old_are_played_again() -> None:
    """rllm#622: what is too old at use is rejected, counted, and dispatched again."""

    async def main() -> None:
        bench = Bench(trainer=FakeTrainer(update_s=2.0, stride=2), steps=4)
        outcome = await bench.run()
        assert outcome.steps == 4
        assert outcome.counts.rejected > 0
        assert outcome.counts.lost == 0
        for batch, used_at in zip(bench.trainer.batches, bench.trainer.used_at, strict=True):
            assert all(0 <= used_at - t.dispatch_version <= 1 for t in batch)
        # A refill of an older batch is no progress of the current one.
        for step in range(1, 5):
            left = [e.remaining for e in bench.of(RolloutProgressed) if e.step == step]
            assert left == list(range(7, -1, -1))

    run_virtual(main())


def test_a_trainer_whose_version_goes_back_ends_the_run() -> None:
    """radixark/miles#2244."""

    async def main() -> None:
        bench = Bench(trainer=FakeTrainer(version=55, stride=-54))
        with pytest.raises(VersionRegressionError, match="version 1, not newer than 55"):
            await bench.run()
        bench.assert_nothing_left()

    run_virtual(main())


def test_a_resumed_run_goes_on_with_its_steps_versions_and_tasks() -> None:
    """AReaL#1388: at version 100 the bound admits what it admits at version 0."""

    async def main() -> None:
        bench = Bench(trainer=FakeTrainer(version=100), steps=12, completed_steps=10)
        bench.position = Position(next_group=20, next_trajectory=83)
        outcome = await bench.run()
        assert (outcome.steps, outcome.version) == (2, 102)
        assert [record.step for record in bench.recorder.records] == [11, 12]
        assert bench.agent.episodes[0].task.id == "task-20"
        assert bench.agent.episodes[0].trajectory == "t00000083"
        assert bench.pipeline.position == Position(next_group=24, next_trajectory=99)

    run_virtual(main())


# ---- failures -------------------------------------------------------------------------------------------------------


def test_a_failed_generation_is_refilled_and_never_a_reward() -> None:
    """NeMo-RL#3589: 3 of 8 requests raise ConnectionError; no sample of reward 0 comes of it, permits are back."""

    async def main() -> None:
        failing = {"t00000001", "t00000004", "t00000006"}

        def refuse(record: FakeRequest) -> None:
            if record.request.affinity in failing:
                raise ConnectionError("refused")

        bench = Bench(steps=1)
        bench.port.before_token = refuse
        outcome = await bench.run()
        batch = bench.trainer.batches[0]
        assert not failing & {t.id for t in batch}
        assert len(batch) == 8
        assert all(len(turn.response) == 5 for t in batch for turn in t.turns)
        assert (outcome.counts.dispatched, outcome.counts.failed, outcome.counts.used) == (11, 3, 8)
        assert outcome.failures == {"attempts_failed": 3}
        bench.assert_nothing_left()

    run_virtual(main())


def test_a_broken_environment_costs_one_sample_not_its_group() -> None:
    """radixark/miles#2800."""

    async def main() -> None:
        def break_down(episode: Episode, turn: int) -> None:
            if episode.trajectory == "t00000002" and turn == 1:
                raise EnvironmentFailure("the sandbox died")

        bench = Bench(steps=2)
        bench.agent.before_turn = break_down
        outcome = await bench.run()
        assert (outcome.counts.dispatched, outcome.counts.failed, outcome.counts.lost) == (17, 1, 0)
        assert outcome.failures == {"environment": 1}
        sizes = {t.group: 0 for t in bench.trainer.batches[0]}
        assert len(sizes) == 2

    run_virtual(main())


@pytest.mark.parametrize("load_s", [0.0, 0.3, 5.0])
def test_no_token_is_older_than_the_version_that_its_trajectory_was_dispatched_at(load_s: float) -> None:
    """Else staleness, which is counted from there, would be more than it says where workers load for long."""

    async def main() -> None:
        bench = Bench(steps=6)
        post = bench.post

        def later(event: Event) -> None:
            if isinstance(event, WeightsPublished):
                asyncio.get_running_loop().call_later(load_s, post, event)
            else:
                post(event)

        bench.post = later  # type: ignore[method-assign]
        outcome = await bench.run()
        assert outcome.steps == 6
        assert outcome.counts.failed == 0
        for trajectory, _ in bench.trajectories:
            assert trajectory.turns[0].spans[0].version >= trajectory.dispatch_version
        bench.assert_nothing_left()

    run_virtual(main())


@pytest.mark.parametrize("refills", [3, 1100])
def test_refills_end_with_the_cause_named(refills: int) -> None:
    """However many they are: pauses double, but no number grows without end."""

    async def main() -> None:
        def break_down(episode: Episode, turn: int) -> None:
            raise EnvironmentFailure("no sandbox can be started")

        bench = Bench(max_refills_per_group=refills)
        bench.agent.before_turn = break_down
        with pytest.raises(RefillsExhaustedError, match="no sandbox can be started"):
            await bench.run()
        bench.assert_nothing_left()

    run_virtual(main())


def test_refills_of_a_group_pause_longer_and_longer() -> None:
    async def main() -> None:
        failing = {"t00000000", "t00000008", "t00000009", "t00000010"}

        def break_down(episode: Episode, turn: int) -> None:
            if episode.trajectory in failing:
                raise EnvironmentFailure("no sandbox can be started")

        bench = Bench(steps=1, refill=RefillLimits(pause_s=1.0, max_pause_s=3.0))
        bench.agent.before_turn = break_down
        outcome = await bench.run()
        assert outcome.counts.failed == 4
        assert bench.recorder.records[0].rollout_s == pytest.approx(1.0 + 2.0 + 3.0 + 3.0 + 0.6)

    run_virtual(main())


def test_a_task_that_cannot_be_played_is_replaced_with_its_group() -> None:
    async def main() -> None:
        def too_long(episode: Episode, turn: int) -> None:
            if episode.trajectory == "t00000003" and turn == 1:
                raise PromptTooLongError("task-0 is too long")

        bench = Bench(steps=1)
        bench.agent.before_turn = too_long
        # Three samples of its group are complete by then.
        bench.agent.environment_of = lambda episode: 3.0 if episode.trajectory == "t00000003" else 0.2
        outcome = await bench.run()
        assert {t.task for t in bench.trainer.batches[0]} == {"task-1", "task-2"}
        assert (outcome.counts.dropped, outcome.counts.cancelled, outcome.counts.dispatched) == (3, 1, 12)
        assert outcome.counts.lost == 0
        left = [e.remaining for e in bench.of(RolloutProgressed)]
        assert left == [7, 6, 5, 4, 3, 2, 1, 3, 2, 1, 0]
        bench.assert_nothing_left()

    run_virtual(main())


def test_tasks_that_cannot_be_played_end_the_run_after_a_few() -> None:
    async def main() -> None:
        def too_long(episode: Episode, turn: int) -> None:
            raise PromptTooLongError("too long")

        bench = Bench(refill=RefillLimits(max_dropped_groups=2))
        bench.agent.before_turn = too_long
        with pytest.raises(UnplayableTasksError, match="3 tasks in a row cannot be played; the last: too long"):
            await bench.run()
        bench.assert_nothing_left()

    run_virtual(main())


def test_a_bug_in_an_agent_ends_the_run_as_itself() -> None:
    async def main() -> None:
        def bug(episode: Episode, turn: int) -> None:
            if episode.trajectory == "t00000009":
                raise KeyError("a bug")

        bench = Bench()
        bench.agent.before_turn = bug
        with pytest.raises(KeyError, match="a bug"):
            await bench.run()
        bench.assert_nothing_left()

    run_virtual(main())


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_trajectory_is_lost_in_any_mixture_of_failures(seed: int) -> None:
    async def main() -> None:
        chance = random.Random(seed)
        bench = Bench(workers=8, steps=3, refill=RefillLimits(pause_s=0.01, max_pause_s=0.05))

        def fault(record: FakeRequest) -> None:
            draw = chance.random()
            if draw < 0.002 and record.workers[-1].id > 1:
                raise WorkerLostError("gone", record.workers[-1].id)
            if draw < 0.02:
                raise TransferError("link")
            if draw < 0.04:
                record.interrupted = True

        def break_down(episode: Episode, turn: int) -> None:
            if chance.random() < 0.05:
                raise EnvironmentFailure("sandbox")

        bench.port.before_token = fault
        bench.agent.before_turn = break_down
        outcome = await bench.run()
        assert outcome.steps == 3
        assert outcome.counts.lost == 0
        assert outcome.counts.used == 24
        assert outcome.counts.dispatched == 24 + outcome.counts.failed
        assert bench.router.statistics.stale_served == 0
        bench.assert_nothing_left()

    run_virtual(main())


# ---- bounded waits --------------------------------------------------------------------------------------------------


def test_a_grant_that_never_comes_is_named_with_who_holds_the_gpus() -> None:
    async def main() -> None:
        bench = Bench(grant_s=math.inf)
        bench.settings = replace(bench.settings, grant_s=30.0)
        bench.table = serving_table([C, C], zone=Zone.OVERLAP)
        with pytest.raises(GrantTimeoutError, match=r"step 1: .* within 30 s; held by: worker 0 \(colocated, active\)"):
            await bench.run()
        bench.assert_nothing_left()

    run_virtual(main())


def test_an_update_that_hangs_is_named() -> None:
    async def main() -> None:
        bench = Bench(trainer=FakeTrainer(update_s=1e9), update_s=60.0)
        with pytest.raises(UpdateTimeoutError, match="step 1: the update took longer than 60 s"):
            await bench.run()
        bench.assert_nothing_left()

    run_virtual(main())


def test_a_batch_that_hangs_is_named() -> None:
    async def main() -> None:
        bench = Bench(batch_s=100.0)
        bench.agent.environment_of = lambda episode: 1e9 if episode.trajectory == "t00000005" else 0.1
        with pytest.raises(RolloutTimeoutError, match=r"1 of 8 .* after 100 s: environment_bound, for the env"):
            await bench.run()
        bench.assert_nothing_left()

    run_virtual(main())


def test_a_grant_that_nobody_asked_for_opens_nothing() -> None:
    async def main() -> None:
        gate = TrainingGate()
        gate.grant()
        gate.request()
        with pytest.raises(TimeoutError):
            await gate.wait_grant(1.0)
        gate.request()
        gate.grant()
        gate.grant()
        await gate.wait_grant(1.0)
        with pytest.raises(RuntimeError, match="did not request"):
            await gate.wait_grant(1.0)

    run_virtual(main())


def test_the_wait_for_the_training_gpus_is_counted() -> None:
    async def main() -> None:
        bench = Bench(grant_s=0.25, steps=3)
        outcome = await bench.run()
        assert [record.wait_grant_s for record in bench.recorder.records] == [pytest.approx(0.25)] * 3
        assert outcome.wait_grant_s == pytest.approx(0.75)

    run_virtual(main())


# ---- ending ---------------------------------------------------------------------------------------------------------


def test_at_the_wall_limit_the_step_under_way_is_finished() -> None:
    async def main() -> None:
        bench = Bench(wall_limit_s=2.0, steps=1000)
        outcome = await bench.run()
        assert outcome.reason is EndReason.WALL_LIMIT
        assert 1 < outcome.steps < 6
        assert outcome.counts.used == outcome.counts.dispatched == 8 * outcome.steps
        assert len(bench.of(RolloutBegan)) == len(bench.of(TrainingFinished)) == outcome.steps
        assert all(e.now_s < 2.0 for e in bench.of(RolloutBegan))
        bench.assert_nothing_left()

    run_virtual(main())


def test_a_stopped_pipeline_finishes_its_step() -> None:
    async def main() -> None:
        bench = Bench(steps=1000, trainer=FakeTrainer(update_s=5.0))
        running = asyncio.create_task(bench.run())
        await asyncio.sleep(3.0)
        bench.pipeline.stop()
        outcome = await running
        assert outcome.reason is EndReason.STOPPED
        assert outcome.steps == 2
        assert outcome.counts.used == outcome.counts.dispatched == 16
        bench.assert_nothing_left()

    run_virtual(main())


@settings(max_examples=40, deadline=None)
@given(at_s=st.floats(0.0, 6.0, allow_nan=False))
def test_cancellation_at_any_time_leaves_nothing_running(at_s: float) -> None:
    async def main() -> None:
        bench = Bench(steps=1000)
        bench.port.abort_s = 0.5
        running = asyncio.create_task(bench.run())
        await asyncio.sleep(at_s)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        bench.assert_nothing_left()
        counts = bench.pipeline.counts
        assert (counts.in_flight, counts.lost) == (0, 0)

    run_virtual(main())


def test_checkpoints_are_written_while_training_holds_its_gpus_and_rollout_goes_on() -> None:
    async def main() -> None:
        bench = Bench(steps=3, max_staleness=0)
        bench.checkpoint_s = 5.0
        await bench.run()
        assert bench.checkpoints == [(1, 0), (2, 1), (3, 2)]
        published = [e.now_s for e in bench.of(WeightsPublished)]
        assert [e.now_s for e in bench.of(TrainingFinished)] == [pytest.approx(t + 5.0) for t in published]
        assert [e.now_s for e in bench.of(RolloutBegan)][1:] == published[:-1]

    run_virtual(main())


# ---- records --------------------------------------------------------------------------------------------------------


def test_records_say_what_each_step_was() -> None:
    async def main() -> None:
        bench = Bench(steps=3)
        outcome = await bench.run()
        records = bench.recorder.records
        for number, record in enumerate(records, start=1):
            batch = bench.trainer.batches[number - 1]
            assert (record.step, record.steps, record.weight_version) == (number, 3, number)
            assert record.reward_mean == pytest.approx(sum(t.reward for t in batch) / 8)
            assert record.generated_tokens == 8 * 10
            assert record.trained_tokens == 8 * 12
            assert record.rollout_s == pytest.approx(0.6)
            assert record.training_s == pytest.approx(1.0)
            assert (record.configuration, record.borrowed, record.lost_trajectories) == ("2C", False, 0)
            assert record.loss == 0.5
        assert sum(record.duration_s for record in records) == pytest.approx(outcome.wall_s)
        assert outcome.rewards == tuple(record.reward_mean for record in records)
        assert (outcome.generated_tokens, outcome.trained_tokens) == (240, 288)

    run_virtual(main())


def test_telemetry_hears_of_every_turn_and_of_every_step() -> None:
    """PEARL section 5, Runtime statistics."""

    async def main() -> None:
        bench = Bench(steps=3)
        await bench.run()
        assert len(bench.tracker.samples) == 3 * 8 * 2
        assert sum(sample.last for sample in bench.tracker.samples) == 24
        assert [step["step"] for step in bench.tracker.steps] == [1, 2, 3]
        for step in bench.tracker.steps:
            assert (step["batch"], step["borrowed"]) == (8, False)
            # 0.05 s of decode in each turn of 0.3 s.
            assert step["decoding_fraction"] == pytest.approx(1 / 6)

    run_virtual(main())


def test_a_step_during_which_borrowed_workers_served_says_so() -> None:
    async def main() -> None:
        bench = Bench(steps=1)
        bench.table = serving_table([C, C], zone=Zone.OVERLAP)
        await bench.run()
        assert bench.of(RolloutFinished)[0].borrowed
        assert bench.recorder.records[0].borrowed

    run_virtual(main())


def test_seeds_differ_within_a_group_and_repeat_over_runs() -> None:
    async def main() -> list[int]:
        bench = Bench(steps=1)
        await bench.run()
        return [episode.seed for episode in bench.agent.episodes]

    seeds = run_virtual(main())
    assert len(set(seeds)) == 8
    assert run_virtual(main()) == seeds
