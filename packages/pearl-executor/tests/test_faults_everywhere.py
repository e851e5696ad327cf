"""Every scenario of the executors, with every fault at every call, and cancelled at every moment."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import pytest

from pearl_executor.calls import Action
from pearl_executor.limits import Limits
from pearl_executor.testing import FakeCall, FakeWorld, Fault, row
from pearl_executor.virtual_time import run_virtual
from pearl_state.effects import (
    ApplyStage,
    CleanWorkers,
    Effect,
    GroupKind,
    PrepareGroup,
    ReleaseTraining,
    ResumeTraining,
    SyncWeights,
)
from pearl_state.events import (
    Event,
    GroupFailed,
    GroupPrepared,
    StageApplied,
    TrainingReleased,
    TrainingResumed,
    WeightsReported,
    WorkerFailed,
    WorkersCleaned,
)
from pearl_state.lifecycle import Lifecycle
from pearl_state.plan import PlanId
from pearl_state.roles import Role, Zone
from pearl_state.worker import Worker, WorkerId

PLAN = PlanId(7)
DEADLINE_S = 12.0
LIMITS = Limits(start_s=60.0, load_s=20.0, sync_s=20.0, switch_s=20.0, training_release_s=20.0, training_resume_s=20.0)
BOUND_S = 400.0
"""More than the longest chain of limits; an answer that took longer would be one that waits for nothing."""


@dataclass(frozen=True)
class Scenario:
    """A world, an effect in it, and how the answer is judged against the world."""

    effect: Effect
    build: Callable[[], FakeWorld]
    judge: Callable[["Run"], None]


@dataclass
class Run:
    """What came of a scenario."""

    world: FakeWorld
    effect: Effect
    posted: list[Event]
    duration_s: float
    faulty: WorkerId | None
    """Whose call the fault hit; None without a fault or for training."""
    fault: Fault | None
    cancelled: bool = False


# ---- scenarios ------------------------------------------------------------------------------------------------------

EXPANSION = (
    row(1, Lifecycle.STARTING),
    row(2, Lifecycle.STARTING, Role.PREFILL),
    row(3, Lifecycle.STARTING, Role.DECODE),
)
BORROW = (
    row(1, Lifecycle.RESUMING, Role.COLOCATED, zone=Zone.OVERLAP),
    row(2, Lifecycle.RESUMING, Role.PREFILL, zone=Zone.OVERLAP),
    row(3, Lifecycle.STARTING, Role.DECODE, zone=Zone.OVERLAP),
)
LEAVING = tuple(row(i, Lifecycle.DRAINING, version=1) for i in (1, 2))
RETURNING = tuple(row(i, Lifecycle.DRAINING, version=1, zone=Zone.OVERLAP) for i in (1, 2))
SWITCHED = (
    row(3, Lifecycle.DRAINING, Role.PREFILL, version=1),
    row(4, Lifecycle.DRAINING, Role.DECODE, version=None),
)
JOINING = (row(5, Lifecycle.PENDING_WEIGHTS, version=0), row(6, Lifecycle.PENDING_WEIGHTS, version=1))
SERVING = tuple(row(i, version=0) for i in (1, 2, 3))
TRAINING = tuple(row(i, Lifecycle.DRAINING, Role.TRAINING, zone=Zone.OVERLAP) for i in (8, 9))


def expansion_world() -> FakeWorld:
    world = FakeWorld(limits=LIMITS, delays_s={"start@3": 30.0})
    world.weights.publish_at(2, 20.0)  # while the slowest still starts
    return world


def borrow_world() -> FakeWorld:
    world = FakeWorld(limits=LIMITS, delays_s={"start@3": 8.0})
    for worker in BORROW[:2]:
        world.workers.adopt(replace(worker, role=Role.COLOCATED), None, resident=False)
    return world


def busy_world(*workers: Worker) -> Callable[[], FakeWorld]:
    def build() -> FakeWorld:
        world = FakeWorld(limits=LIMITS, decode_token_s=0.3)
        for worker in workers:
            world.workers.adopt(replace(worker, role=Role.COLOCATED), worker.weight_version or 0)
            for _ in range(2):
                world.generate(worker, 200)
        return world

    return build


def training_world() -> FakeWorld:
    return FakeWorld(limits=LIMITS, training_gpus=frozenset({8, 9}))


def judge_group(run: Run) -> None:
    assert isinstance(run.effect, PrepareGroup)
    (event,) = run.posted
    workers = run.effect.workers
    processes = run.world.workers.processes
    if isinstance(event, GroupPrepared):
        assert event.reported.keys() == {w.id for w in workers}
        for worker in workers:
            process = processes[worker.id]
            assert process.resident
            assert process.version == event.reported[worker.id] == run.world.weights.version
            assert process.role is worker.role
        return
    assert isinstance(event, GroupFailed)
    assert set(event.failed) == ({run.faulty} if run.fault else set()), "a group blames others than who is at fault"
    judge_blame(run, event.failed)
    for worker in workers:
        kept = worker.lifecycle is Lifecycle.RESUMING and worker.id not in event.failed
        if kept:
            assert not processes[worker.id].resident
        else:
            assert worker.id not in processes
    assert run.world.ledger.owners() == {}, "a group that failed holds memory"


def judge_blame(run: Run, failed: object) -> None:
    assert isinstance(failed, dict)
    assert set(failed) <= {run.faulty}, "somebody pays for another's failure"
    for worker, cause in failed.items():
        assert cause.startswith(f"worker {worker}: ")


def judge_stage(run: Run) -> None:
    assert isinstance(run.effect, ApplyStage)
    (event,) = run.posted
    assert isinstance(event, StageApplied)
    processes, ledger = run.world.workers.processes, run.world.ledger
    judge_blame(run, event.failed)
    for worker in run.effect.leave:
        assert (worker.id in event.left) is not (worker.id in event.failed)
        if worker.id in event.left and worker.zone is Zone.DEDICATED:
            assert worker.id not in processes
        elif worker.id in event.left:
            assert not processes[worker.id].resident
        if worker.id in event.left:
            assert not worker.gpus & ledger.owners().keys()
    for worker in run.effect.admit:
        assert (worker.id in event.reported) is not (worker.id in event.failed)
        if worker.id in event.reported:
            process = processes[worker.id]
            assert process.resident
            assert process.version == event.reported[worker.id] >= run.effect.target_version
            if worker.id in run.effect.switch:
                assert process.role is run.effect.switch[worker.id]
    if run.effect.deadline_s is not None and not run.effect.admit:
        assert event.now_s <= run.effect.deadline_s, "the deadline passed"
        if event.now_s > run.effect.deadline_s - LIMITS.kill_s - LIMITS.cancel_s:
            killed = [c.worker for c in run.world.script.calls if c.method == "kill"]
            assert event.failed.keys() <= set(killed), "a process outlives its deadline"


def judge_sync(run: Run) -> None:
    assert isinstance(run.effect, SyncWeights)
    reported = {e.worker: e.version for e in run.posted if isinstance(e, WeightsReported)}
    failed = {e.worker: e.cause for e in run.posted if isinstance(e, WorkerFailed)}
    assert len(run.posted) == len(run.effect.workers) == len({*reported, *failed})
    judge_blame(run, failed)
    for worker, version in reported.items():
        assert run.world.workers.processes[worker].version == version == 1


def judge_clean(run: Run) -> None:
    assert isinstance(run.effect, CleanWorkers)
    if run.cancelled:
        return
    cleaned = {w: i for e in run.posted if isinstance(e, WorkersCleaned) for w, i in e.workers.items()}
    assert cleaned == {w.id: w.incarnation for w in run.effect.workers}
    assert run.world.workers.processes == {}
    assert run.world.ledger.owners() == {}


def judge_release(run: Run) -> None:
    (event,) = run.posted
    assert isinstance(event, TrainingReleased)
    training = run.world.training
    assert training is not None
    if event.failed is None:
        assert run.world.ledger.owners() == {}
    else:
        assert training.resident, "training was told to hold its GPUs but does not"


def judge_resume(run: Run) -> None:
    (event,) = run.posted
    assert isinstance(event, TrainingResumed)
    training = run.world.training
    assert training is not None
    assert training.resident or event.failed is not None


SCENARIOS = {
    "expansion": Scenario(
        PrepareGroup(plan_id=PLAN, kind=GroupKind.EXPANSION, workers=EXPANSION), expansion_world, judge_group
    ),
    "borrow": Scenario(PrepareGroup(plan_id=PLAN, kind=GroupKind.BORROW, workers=BORROW), borrow_world, judge_group),
    "shrink": Scenario(
        ApplyStage(plan_id=PLAN, stage=0, leave=LEAVING, target_version=1, deadline_s=DEADLINE_S, mandatory=True),
        busy_world(*LEAVING),
        judge_stage,
    ),
    "return": Scenario(
        ApplyStage(plan_id=PLAN, stage=0, leave=RETURNING, target_version=1, deadline_s=DEADLINE_S, mandatory=True),
        busy_world(*RETURNING),
        judge_stage,
    ),
    "stage": Scenario(
        ApplyStage(
            plan_id=PLAN,
            stage=1,
            leave=(LEAVING[0], RETURNING[1]),
            switch={WorkerId(3): Role.PREFILL, WorkerId(4): Role.DECODE},
            admit=(*SWITCHED, *JOINING),
            target_version=1,
        ),
        busy_world(LEAVING[0], RETURNING[1], *SWITCHED, *JOINING),
        judge_stage,
    ),
    "sync": Scenario(SyncWeights(workers=SERVING, version=1), busy_world(*SERVING), judge_sync),
    "clean": Scenario(CleanWorkers(workers=LEAVING), busy_world(*LEAVING), judge_clean),
    "release": Scenario(ReleaseTraining(plan_id=PLAN, workers=TRAINING), training_world, judge_release),
    "resume": Scenario(ResumeTraining(workers=TRAINING), training_world, judge_resume),
}


def play(
    scenario: Scenario, *, fault: Fault | None = None, call: int | None = None, cancel_at_s: float | None = None
) -> Run:
    """Run a scenario to its end, its leftovers included, and check what must always hold."""

    async def main() -> Run:
        loop = asyncio.get_running_loop()
        world = scenario.build()
        await asyncio.sleep(0.1)
        if isinstance(scenario.effect, ResumeTraining):
            await world.run(ReleaseTraining(plan_id=PLAN, workers=TRAINING))
            world.script.calls.clear()
            world.posted.clear()
        if fault is not None:
            world.script.inject(fault, call=call)
        before = asyncio.all_tasks()
        began_s = loop.time()
        task = asyncio.ensure_future(world.run(scenario.effect))
        if cancel_at_s is not None:
            loop.call_at(cancel_at_s, task.cancel)
        await asyncio.wait({task}, timeout=BOUND_S)
        assert task.done(), "no answer within the bound"
        run = Run(world, scenario.effect, world.posted, loop.time() - began_s, None, fault, task.cancelled())
        if not task.cancelled():
            task.result()
        if call is not None:
            run.faulty = world.script.calls[call - 1].worker
        if fault is not Fault.DEAF:
            assert asyncio.all_tasks() - before == set(), "tasks are left over"
            assert all(c.ended_s is not None for c in world.script.calls)
        scenario.judge(run)
        assert world.broken() == []
        for worker in list(world.workers.processes):
            world.workers.crash(worker)
        await asyncio.sleep(1.0)
        assert all(c.kept() for c in world.calls), "a caller lost tokens that it had seen"
        return run

    return run_virtual(main())


@cache
def undisturbed(name: str) -> Run:
    return play(SCENARIOS[name])


@pytest.mark.parametrize("name", SCENARIOS)
def test_without_a_fault_everything_succeeds(name: str) -> None:
    run = undisturbed(name)
    for event in run.posted:
        assert not isinstance(event, GroupFailed | WorkerFailed)
        assert not getattr(event, "failed", None)
    assert all(action.failed is None for action in run.world.actions)


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("name", SCENARIOS)
def test_any_fault_at_any_call_is_answered_and_leaves_nothing_half(name: str, fault: Fault) -> None:
    calls = len(undisturbed(name).world.script.calls)
    assert calls > 0
    for call in range(1, calls + 1):
        run = play(SCENARIOS[name], fault=fault, call=call)
        hit = run.world.script.calls[call - 1]
        outcomes = {"cancelled", "under way"} if fault in (Fault.HANG, Fault.HANG_AFTER, Fault.DEAF) else None
        assert hit.outcome != "done", "the fault was not injected"
        assert outcomes is None or hit.outcome in outcomes


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.HANG, Fault.LOSE])
@pytest.mark.parametrize("name", ["shrink", "return", "stage", "sync", "clean"])
def test_two_faults_are_no_worse_than_one(name: str, fault: Fault) -> None:
    """The second fault hits the call that the first one led to: the kill after the hang."""
    calls = len(undisturbed(name).world.script.calls)
    for call in range(1, calls + 1):
        scenario = SCENARIOS[name]

        def build(scenario: Scenario = scenario) -> FakeWorld:
            world = scenario.build()
            world.script.inject(fault, method="kill")
            return world

        def judge(run: Run, scenario: Scenario = scenario) -> None:
            kills = [c for c in run.world.script.calls if c.method == "kill" and c.outcome != "done"]
            if name in ("sync", "clean") or not kills:
                scenario.judge(run)
                return
            (event,) = run.posted
            assert isinstance(event, StageApplied)
            for killed in kills:
                assert killed.worker in event.failed or killed.worker not in run.world.workers.processes

        play(replace(scenario, build=build, judge=judge), fault=Fault.HANG, call=call)


@pytest.mark.parametrize("name", SCENARIOS)
def test_cancelled_at_any_moment_it_answers_and_leaves_nothing_half(name: str) -> None:
    calls = undisturbed(name).world.script.calls
    moments = sorted({t for c in calls for t in (c.began_s, c.ended_s or 0.0)})
    between = [0.5 * (a + b) for a, b in pairwise(moments)]
    cancelled = 0
    for moment in (0.1, *moments, *between):
        run = play(SCENARIOS[name], cancel_at_s=moment)
        cancelled += run.cancelled
        if name != "clean":
            assert run.posted, "a cancelled effect was not answered"
        if isinstance(run.effect, PrepareGroup):
            assert isinstance(run.posted[0], GroupFailed) is run.cancelled, "a cancelled group was not given up"
    assert cancelled > len(between) // 2


@pytest.mark.parametrize("name", ["expansion", "borrow"])
def test_cancelled_while_it_cleans_up_it_cleans_all_the_same(name: str) -> None:
    calls = undisturbed(name).world.script.calls
    for call in range(1, len(calls) + 1):
        failed = play(SCENARIOS[name], fault=Fault.FAIL, call=call)
        (answer,) = failed.posted
        cleaning = [c.began_s for c in failed.world.script.calls if c.method in ("stop", "kill", "release")]
        assert cleaning
        for moment in {0.5 * (min(cleaning) + answer.now_s), answer.now_s}:
            play(SCENARIOS[name], fault=Fault.FAIL, call=call, cancel_at_s=moment)


@pytest.mark.parametrize("name", ["expansion", "borrow"])
def test_a_cancelled_group_is_gone_soon(name: str) -> None:
    calls = undisturbed(name).world.script.calls
    for moment in sorted({c.began_s for c in calls}):
        run = play(SCENARIOS[name], cancel_at_s=moment)
        assert run.posted[0].now_s - moment < LIMITS.settle_s + LIMITS.release_s


def test_actions_tell_what_was_done_to_whom_and_why_it_failed() -> None:
    run = play(SCENARIOS["borrow"], fault=Fault.FAIL, call=1)
    failed = [action for action in run.world.actions if action.failed is not None]
    assert (
        Action(
            name="resume",
            worker=WorkerId(1),
            incarnation=1,
            started_s=0.1,
            duration_s=pytest.approx(3.0),
            failed="worker 1: resume failed: injected failure in resume of 1 (call 1)",
        )
        in failed
    )
    assert all(isinstance(call, FakeCall) for call in run.world.calls)
