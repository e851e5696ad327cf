"""Dispatch, role changes, admission, weight sync and cancellation of the `ElasticExecutor`, in virtual time."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from pearl_executor.calls import BoundedCalls, CallError, FailureKind
from pearl_executor.limits import Limits
from pearl_executor.ports import WeightSnapshot, WorkerError, WorkerLostError
from pearl_executor.testing import FakeWorld, Fault, row
from pearl_executor.virtual_time import run_virtual
from pearl_state.effects import (
    ApplyStage,
    CancelGroup,
    CleanWorkers,
    GrantTraining,
    GroupKind,
    PrepareGroup,
    ReturnGpus,
    SyncWeights,
)
from pearl_state.events import GroupFailed, GroupPrepared, StageApplied, WeightsReported, WorkerFailed
from pearl_state.lifecycle import Lifecycle
from pearl_state.plan import PlanId
from pearl_state.roles import Role
from pearl_state.worker import GpuId, Worker, WorkerId

PLAN = PlanId(5)


def drained(world: FakeWorld, slot: int, before: Role, after: Role, version: int = 1) -> Worker:
    worker = row(slot, Lifecycle.DRAINING, before, version=version)
    world.workers.adopt(worker, version)
    return replace(worker, role=after)


# ---- stages ---------------------------------------------------------------------------------------------------------


def test_roles_flip_on_drained_engines_and_peers_are_told_when_all_have_flipped() -> None:
    async def main() -> None:
        world = FakeWorld(delays_s={"switch_role@2": 20.0})
        workers = (
            drained(world, 1, Role.DECODE, Role.PREFILL),
            drained(world, 2, Role.PREFILL, Role.DECODE),
            drained(world, 3, Role.DECODE, Role.COLOCATED),
        )
        switch = {w.id: w.role for w in workers}
        (event,) = await world.run(ApplyStage(plan_id=PLAN, stage=2, switch=switch, admit=workers, target_version=1))
        assert isinstance(event, StageApplied)
        assert event.reported == {1: 1, 2: 1, 3: 1}
        assert (event.plan_id, event.stage) == (PLAN, 2)
        assert {w.id: world.workers.processes[w.id].role for w in workers} == switch
        refreshed = [c for c in world.script.calls if c.method == "refresh_peers"]
        switched = [c.ended_s for c in world.script.calls if c.method == "switch_role"]
        assert {c.worker for c in refreshed} == {1, 2}
        assert min(c.began_s for c in refreshed) >= max(s for s in switched if s is not None)
        assert world.broken() == []

    run_virtual(main())


def test_a_role_never_changes_under_a_request_or_a_load() -> None:
    async def main() -> None:
        world = FakeWorld(version=2, delays_s={"switch_role": 0.5})
        worker = drained(world, 1, Role.COLOCATED, Role.DECODE)
        call = world.generate(replace(worker, role=Role.COLOCATED), 10_000)
        await asyncio.sleep(0.5)
        sync = asyncio.ensure_future(world.run(SyncWeights(workers=(worker,), version=2)))
        await asyncio.sleep(0.1)
        (event,) = await world.run(
            ApplyStage(plan_id=PLAN, stage=0, switch={worker.id: Role.DECODE}, admit=(worker,), target_version=2)
        )
        assert isinstance(event, StageApplied)
        assert event.reported == {1: 2}
        assert world.broken() == []
        assert call.kept()
        (reported,) = await sync
        assert isinstance(reported, WeightsReported)

    run_virtual(main())


def test_nobody_is_reported_with_weights_older_than_the_target() -> None:
    """radixark/miles#1724: admission is the last step and needs the target version."""

    async def main() -> None:
        world = FakeWorld(version=57)
        workers = tuple(row(i, Lifecycle.PENDING_WEIGHTS, version=v) for i, v in ((1, 0), (2, None), (3, 57)))
        for worker in workers:
            world.workers.adopt(worker, worker.weight_version)
        (event,) = await world.run(ApplyStage(plan_id=PLAN, stage=0, admit=workers, target_version=57))
        assert isinstance(event, StageApplied)
        assert event.reported == {1: 57, 2: 57, 3: 57}
        assert world.script.methods(3) == []

    run_virtual(main())


def test_a_worker_that_reports_another_version_than_it_loaded_is_not_admitted() -> None:
    async def main() -> None:
        world = FakeWorld(version=57)
        worker = row(1, Lifecycle.PENDING_WEIGHTS, version=0)
        world.workers.adopt(worker, 0)

        async def load_weights(worker: Worker, snapshot: WeightSnapshot) -> int:
            return 0

        world.workers.load_weights = load_weights  # type: ignore[method-assign]
        (event,) = await world.run(ApplyStage(plan_id=PLAN, stage=0, admit=(worker,), target_version=57))
        assert isinstance(event, StageApplied)
        assert event.reported == {}
        assert event.failed == {1: "worker 1: reports weight version 0 after loading 57"}

    run_virtual(main())


def test_a_target_that_nobody_published_is_a_failure_not_a_wait() -> None:
    async def main() -> None:
        world = FakeWorld(version=3)
        worker = row(1, Lifecycle.PENDING_WEIGHTS, version=3)
        world.workers.adopt(worker, 3)
        (event,) = await world.run(ApplyStage(plan_id=PLAN, stage=0, admit=(worker,), target_version=4))
        assert isinstance(event, StageApplied)
        assert event.failed == {1: "worker 1: weight version 4 is wanted, but the newest published is 3"}

    run_virtual(main())


def test_one_failure_in_a_stage_touches_nobody_else() -> None:
    async def main() -> None:
        world = FakeWorld()
        leaver = row(1, Lifecycle.DRAINING, version=1)
        world.workers.adopt(leaver, 1)
        flipper = drained(world, 2, Role.DECODE, Role.PREFILL)
        stuck = drained(world, 3, Role.PREFILL, Role.DECODE)
        world.script.inject(Fault.HANG, method="switch_role", worker=3)
        (event,) = await world.run(
            ApplyStage(
                plan_id=PLAN,
                stage=0,
                leave=(leaver,),
                switch={flipper.id: Role.PREFILL, stuck.id: Role.DECODE},
                admit=(flipper, stuck),
                target_version=1,
            )
        )
        assert isinstance(event, StageApplied)
        assert event.left == {1}
        assert event.reported == {2: 1}
        assert event.failed == {3: "worker 3: switch_role exceeded 120 s"}

    run_virtual(main())


def test_a_wait_that_expires_names_worker_step_and_limit() -> None:
    async def main() -> None:
        world = FakeWorld(limits=Limits(idle_s=5.0))
        worker = drained(world, 3, Role.COLOCATED, Role.DECODE)

        async def wait_idle(worker: Worker) -> None:
            await asyncio.sleep(1e9)

        world.workers.wait_idle = wait_idle  # type: ignore[method-assign]
        (event,) = await world.run(
            ApplyStage(plan_id=PLAN, stage=0, switch={worker.id: Role.DECODE}, admit=(worker,), target_version=1)
        )
        assert isinstance(event, StageApplied)
        assert event.failed == {3: "worker 3: wait_idle exceeded 5 s"}
        assert event.now_s < 6.5

    run_virtual(main())


def test_a_role_for_a_worker_that_is_not_to_serve_is_refused() -> None:
    async def main() -> None:
        world = FakeWorld()
        (event,) = await world.run(ApplyStage(plan_id=PLAN, stage=0, switch={WorkerId(8): Role.DECODE}))
        assert isinstance(event, StageApplied)
        assert event.failed.keys() == {8}

    run_virtual(main())


# ---- weights --------------------------------------------------------------------------------------------------------


def test_a_fast_publisher_cannot_pile_loads_up_on_a_worker() -> None:
    async def main() -> None:
        world = FakeWorld()
        workers = tuple(row(i, version=1) for i in (1, 2))
        for worker in workers:
            world.workers.adopt(worker, 1)
        syncs = []
        for version in range(2, 12):
            world.weights.publish(version)
            syncs.append(asyncio.ensure_future(world.run(SyncWeights(workers=workers, version=version))))
            await asyncio.sleep(1.0)
        events = [event for posted in await asyncio.gather(*syncs) for event in posted]
        assert all(isinstance(event, WeightsReported) for event in events)
        assert len(events) == 20
        assert world.broken() == []
        assert world.script.methods(1).count("load_weights") <= 4
        assert {p.version for p in world.workers.processes.values()} == {11}

    run_virtual(main())


def test_a_failed_load_is_reported_and_who_waited_for_it_tries_on_its_own() -> None:
    async def main() -> None:
        world = FakeWorld()
        worker = row(1, version=1)
        world.workers.adopt(worker, 1)
        world.script.inject(Fault.FAIL, method="load_weights")
        world.weights.publish(2)
        first = asyncio.ensure_future(world.run(SyncWeights(workers=(worker,), version=2)))
        second = asyncio.ensure_future(world.run(SyncWeights(workers=(worker,), version=2)))
        ((failed,), (reported,)) = await asyncio.gather(first, second)
        assert isinstance(failed, WorkerFailed)
        assert failed.cause.startswith("worker 1: load_weights failed")
        assert isinstance(reported, WeightsReported)

    run_virtual(main())


def test_generation_goes_on_while_weights_are_loaded_and_its_spans_tell() -> None:
    async def main() -> None:
        world = FakeWorld()
        worker = row(1, version=1)
        world.workers.adopt(worker, 1)
        call = world.generate(worker, 500)
        await asyncio.sleep(1.0)
        world.weights.publish(2)
        await world.run(SyncWeights(workers=(worker,), version=2))
        result = await call.task
        assert [span.version for span in result.spans] == [1, 2]
        assert sum(span.tokens for span in result.spans) == 500
        assert list(result.tokens) == call.expected

    run_virtual(main())


# ---- cancellation and dispatch --------------------------------------------------------------------------------------


def test_a_cancellation_right_behind_its_group_is_answered() -> None:
    async def main() -> None:
        world = FakeWorld()
        workers = (row(1, Lifecycle.STARTING),)
        effect = PrepareGroup(plan_id=PLAN, kind=GroupKind.EXPANSION, workers=workers)
        prepare = asyncio.ensure_future(world.run(effect))
        cancel = asyncio.ensure_future(world.run(CancelGroup(plan_id=PLAN)))
        (event,) = await prepare
        await cancel
        assert isinstance(event, GroupFailed)
        assert event.failed == {}
        assert world.workers.processes == {}

    run_virtual(main())


def test_cancelling_a_group_that_is_ready_changes_nothing() -> None:
    async def main() -> None:
        world = FakeWorld()
        effect = PrepareGroup(plan_id=PLAN, kind=GroupKind.EXPANSION, workers=(row(1, Lifecycle.STARTING),))
        (event,) = await world.run(effect)
        assert isinstance(event, GroupPrepared)
        assert await world.run(CancelGroup(plan_id=PLAN)) == []
        assert world.workers.processes.keys() == {1}

    run_virtual(main())


def test_a_stage_that_is_cancelled_is_finished_and_answered_first() -> None:
    async def main() -> None:
        world = FakeWorld()
        leaver = row(1, Lifecycle.DRAINING, version=1)
        world.workers.adopt(leaver, 1)
        task = asyncio.ensure_future(world.run(ApplyStage(plan_id=PLAN, stage=0, leave=(leaver,))))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        (event,) = world.posted
        assert isinstance(event, StageApplied)
        assert event.left == {1}

    run_virtual(main())


def test_a_cleaning_that_cannot_succeed_ends_when_it_is_cancelled() -> None:
    async def main() -> None:
        world = FakeWorld()
        worker = row(1, Lifecycle.FAILED, version=1)
        world.workers.adopt(worker, 1)
        for _ in range(1000):
            world.script.inject(Fault.FAIL, method="kill")
        task = asyncio.ensure_future(world.run(CleanWorkers(workers=(worker,))))
        await asyncio.sleep(1000.0)
        kills = world.script.methods().count("kill")
        assert 10 < kills < 50, "kills are tried ever more rarely, but for ever"
        task.cancel()
        await asyncio.wait({task})
        assert world.posted == []

    run_virtual(main())


def test_effects_that_concern_no_worker_are_left_to_others() -> None:
    async def main() -> None:
        world = FakeWorld()
        assert await world.run(GrantTraining()) == []
        assert await world.run(ReturnGpus(gpus=frozenset({GpuId(1)}))) == []

    run_virtual(main())


def test_a_bug_in_a_source_is_not_an_answer() -> None:
    async def main() -> None:
        world = FakeWorld(version=2)
        worker = row(1, version=1)
        world.workers.adopt(worker, 1)

        def newest() -> WeightSnapshot:
            raise TypeError("a bug")

        world.weights.newest = newest  # type: ignore[method-assign]
        await world.run(SyncWeights(workers=(worker,), version=2))

    with pytest.raises(TypeError, match="a bug"):
        run_virtual(main())


def test_before_the_first_publication_the_cause_says_so() -> None:
    async def main() -> None:
        world = FakeWorld(version=2)
        worker = row(1, version=1)
        world.workers.adopt(worker, 1)

        def newest() -> WeightSnapshot:
            raise ValueError("no weights were published yet")

        world.weights.newest = newest  # type: ignore[method-assign]
        (event,) = await world.run(SyncWeights(workers=(worker,), version=2))
        assert isinstance(event, WorkerFailed)
        assert event.cause == "no weights to load: no weights were published yet"

    run_virtual(main())


# ---- calls and limits -----------------------------------------------------------------------------------------------


def test_each_kind_of_failure_says_what_is_known_of_the_worker() -> None:
    async def main() -> None:
        calls = BoundedCalls(lambda _action: None, cancel_s=1.0)

        async def raising(error: Exception) -> None:
            raise error

        for error, kind in (
            (WorkerError("busy"), FailureKind.REFUSED),
            (WorkerLostError("gone"), FailureKind.LOST),
            (ZeroDivisionError("bug"), FailureKind.BROKEN),
        ):
            with pytest.raises(CallError) as caught:
                await calls.call(row(3), "stop", raising(error), 5.0)
            assert caught.value.kind is kind
            assert str(caught.value).startswith("worker 3: ")
        with pytest.raises(CallError, match=r"^worker 3: stop exceeded 5 s$") as caught:
            await calls.call(row(3), "stop", asyncio.sleep(6.0), 5.0)
        assert caught.value.kind is FailureKind.EXPIRED
        with pytest.raises(CallError, match=r"^training: release exceeded 0.5 s$"):
            await calls.call(None, "release", asyncio.sleep(6.0), 0.5)

    run_virtual(main())


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), True, "5"])
def test_a_limit_is_a_positive_number_of_seconds(value: float) -> None:
    with pytest.raises(ValueError, match=r"limit idle_s = .*: must be a positive number of seconds"):
        Limits(idle_s=value)


def test_scaling_touches_every_limit() -> None:
    tenth = Limits().scaled(0.1)
    names: tuple[str, ...] = Limits.__slots__
    value: Callable[[Limits, str], float] = getattr
    assert all(value(tenth, name) == pytest.approx(0.1 * value(Limits(), name)) for name in names)
