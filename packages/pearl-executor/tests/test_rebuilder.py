"""The Inter-Scale Cluster Rebuilder through the executor, in virtual time."""

import asyncio
from dataclasses import replace

import pytest

from pearl_executor.limits import Limits
from pearl_executor.ports import Finish
from pearl_executor.testing import FakeWorld, Fault, row
from pearl_executor.virtual_time import run_virtual
from pearl_state.effects import ApplyStage, CleanWorkers, GroupKind, PrepareGroup
from pearl_state.events import GroupFailed, GroupPrepared, StageApplied, WorkersCleaned
from pearl_state.lifecycle import Lifecycle
from pearl_state.plan import PlanId
from pearl_state.roles import Role
from pearl_state.worker import Worker

PLAN = PlanId(3)
STARTING = tuple(row(i, Lifecycle.STARTING) for i in (1, 2, 3))


def expansion(*workers: Worker) -> PrepareGroup:
    return PrepareGroup(plan_id=PLAN, kind=GroupKind.EXPANSION, workers=workers)


def shrink(*workers: Worker, deadline_s: float | None) -> ApplyStage:
    return ApplyStage(plan_id=PLAN, stage=0, leave=workers, deadline_s=deadline_s, mandatory=True)


def leaving(world: FakeWorld, *slots: int, version: int = 1) -> tuple[Worker, ...]:
    workers = tuple(row(slot, Lifecycle.DRAINING, version=version) for slot in slots)
    for worker in workers:
        world.workers.adopt(worker, version)
    return workers


# ---- expansion ------------------------------------------------------------------------------------------------------


def test_weights_are_fetched_only_after_the_start_and_are_the_newest_then() -> None:
    """Lazy weight propagation, PEARL section 4.5."""

    async def main() -> None:
        world = FakeWorld()
        for version, at_s in ((2, 3.0), (3, 9.0)):
            world.weights.publish_at(version, at_s)
        (event,) = await world.run(expansion(STARTING[0]))
        assert isinstance(event, GroupPrepared)
        assert event.reported == {1: 3}
        assert world.script.methods(1) == ["start", "load_weights", "samples"]
        assert event.duration_s == pytest.approx(14.01)

    run_virtual(main())


def test_who_is_up_early_is_brought_to_what_was_published_while_the_slowest_started() -> None:
    async def main() -> None:
        world = FakeWorld(delays_s={"start@2": 100.0})
        world.weights.publish_at(2, 50.0)
        (event,) = await world.run(expansion(*STARTING[:2]))
        assert isinstance(event, GroupPrepared)
        assert event.reported == {1: 2, 2: 2}
        assert world.script.methods(1).count("load_weights") == 2
        assert world.script.methods(2).count("load_weights") == 1

    run_virtual(main())


def test_a_publisher_that_never_rests_cannot_keep_a_group_from_being_ready() -> None:
    async def main() -> None:
        world = FakeWorld()

        async def publish() -> None:
            for version in range(2, 1000):
                await asyncio.sleep(1.0)
                world.weights.publish(version)

        publisher = asyncio.create_task(publish())
        (event,) = await world.run(expansion(*STARTING))
        publisher.cancel()
        assert isinstance(event, GroupPrepared)
        # A start, and three loads.
        assert event.now_s < 23.0
        assert all(version > 10 for version in event.reported.values())

    run_virtual(main())


def test_a_snapshot_that_was_withdrawn_meanwhile_is_replaced_by_the_next() -> None:
    async def main() -> None:
        world = FakeWorld()
        world.script.inject(Fault.FAIL, method="load_weights", worker=1)
        world.weights.publish_at(2, 12.0)  # while version 1 is fetched
        (event,) = await world.run(expansion(STARTING[0]))
        assert isinstance(event, GroupPrepared)
        assert event.reported == {1: 2}

    run_virtual(main())


def test_one_that_does_not_start_in_time_gives_the_whole_group_up_and_is_named() -> None:
    async def main() -> None:
        world = FakeWorld(limits=Limits(start_s=60.0))
        world.script.inject(Fault.HANG, method="start", worker=2)
        (event,) = await world.run(expansion(*STARTING))
        assert isinstance(event, GroupFailed)
        assert event.failed == {2: "worker 2: start exceeded 60 s"}
        assert world.workers.processes == {}
        assert world.ledger.owners() == {}
        assert event.now_s < 65.0

    run_virtual(main())


def test_one_that_dies_after_it_was_up_is_noticed_before_the_group_is_ready() -> None:
    async def main() -> None:
        world = FakeWorld(delays_s={"start@2": 100.0})
        asyncio.get_running_loop().call_at(50.0, world.workers.crash, 1)
        (event,) = await world.run(expansion(*STARTING[:2]))
        assert isinstance(event, GroupFailed)
        assert event.failed.keys() == {1}
        assert "lost" in event.failed[1]
        assert world.workers.processes == {}

    run_virtual(main())


def test_expansion_leaves_those_who_serve_alone() -> None:
    async def main() -> None:
        world = FakeWorld()
        serving = row(9, version=1)
        world.workers.adopt(serving, 1)
        call = world.generate(serving, 100)
        await world.run(expansion(*STARTING))
        result = await call.task
        assert list(result.tokens) == call.expected
        assert world.script.methods(9) == []

    run_virtual(main())


def test_cancelling_an_expansion_leaves_nothing_of_it() -> None:
    """radixark/miles#693: preparation runs in the background, and a withdrawn arrival leaves nothing."""

    async def main() -> None:
        world = FakeWorld(delays_s={"start": 300.0})
        task = asyncio.ensure_future(world.run(expansion(*STARTING)))
        await asyncio.sleep(200.0)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        (event,) = world.posted
        assert isinstance(event, GroupFailed)
        assert event.failed == {}
        assert event.now_s < 201.0
        assert world.workers.processes == {}
        assert world.ledger.owners() == {}

    run_virtual(main())


def test_a_group_is_not_answered_before_the_kill_of_its_last_process_is_certain() -> None:
    async def main() -> None:
        world = FakeWorld()
        world.script.inject(Fault.FAIL, method="load_weights", worker=1)
        world.script.inject(Fault.HANG, method="kill", worker=1)
        world.script.inject(Fault.FAIL, method="kill", worker=1)
        (event,) = await world.run(expansion(STARTING[0]))
        assert isinstance(event, GroupFailed)
        assert world.workers.processes == {}
        assert world.script.methods(1).count("kill") == 3

    run_virtual(main())


# ---- shrinking ------------------------------------------------------------------------------------------------------


def test_partial_tokens_return_to_their_callers_before_the_process_ends() -> None:
    async def main() -> None:
        world = FakeWorld()
        workers = leaving(world, 1, 2)
        calls = [world.generate(worker, 10_000) for worker in workers for _ in range(3)]
        await asyncio.sleep(5.0)
        (event,) = await world.run(shrink(*workers, deadline_s=35.0))
        assert isinstance(event, StageApplied)
        assert event.left == {1, 2}
        for call in calls:
            result = await call.task
            assert len(result.tokens) > 200
            assert call.kept()

    run_virtual(main())


def test_a_notice_that_is_longer_than_needed_is_not_used_up() -> None:
    """verl#7757: a notice has a deadline and the drain fits in it; the longest request does not matter."""

    async def main() -> None:
        world = FakeWorld()
        workers = leaving(world, 1)
        world.generate(workers[0], 1_000_000)
        await asyncio.sleep(1.0)
        (event,) = await world.run(shrink(*workers, deadline_s=31.0))
        assert event.now_s == pytest.approx(2.1)

    run_virtual(main())


def test_requests_finish_where_the_notice_leaves_time_for_them() -> None:
    async def main() -> None:
        world = FakeWorld()
        workers = leaving(world, 1)
        call = world.generate(workers[0], 500)  # ten seconds
        await asyncio.sleep(1.0)
        (event,) = await world.run(shrink(*workers, deadline_s=120.0))
        assert event.now_s < 12.0
        assert list((await call.task).tokens) == call.expected
        assert call.task.result().finish is Finish.LENGTH

    run_virtual(main())


def test_what_does_not_finish_within_the_notice_is_interrupted_and_keeps_its_prefix() -> None:
    """ray#63968: a notice of 30 s, 4.4 s to stop, and a longest request of 90 s end in an interruption, not a loss."""

    async def main() -> None:
        world = FakeWorld(limits=Limits(stop_s=4.4, interrupt_s=2.0, kill_s=2.0, drain_s=60.0))
        workers = leaving(world, 1)
        long, short = world.generate(workers[0], 4_500), world.generate(workers[0], 200)
        await asyncio.sleep(1.0)
        (event,) = await world.run(shrink(*workers, deadline_s=31.0))
        assert 18.0 < event.now_s <= 26.0
        assert list((await short.task).tokens) == short.expected
        assert (await long.task).finish is Finish.INTERRUPTED
        assert len(long.task.result().tokens) > 900
        assert long.kept()

    run_virtual(main())


@pytest.mark.parametrize("notice_s", [0.5, 3.0, 8.0, 30.0, 120.0])
@pytest.mark.parametrize("fault", [Fault.HANG, Fault.DEAF])
def test_gpus_are_empty_by_the_deadline_even_where_nothing_answers(notice_s: float, fault: Fault) -> None:
    async def main() -> None:
        world = FakeWorld()
        workers = leaving(world, 1, 2)
        for method in ("interrupt", "stop"):
            world.script.inject(fault, method=method, worker=1)
        (event,) = await world.run(shrink(*workers, deadline_s=notice_s))
        assert isinstance(event, StageApplied)
        assert event.left == {1, 2}
        assert event.now_s <= notice_s
        assert world.ledger.owners() == {}

    run_virtual(main())


def test_a_deadline_in_the_past_kills_at_once() -> None:
    async def main() -> None:
        world = FakeWorld()
        await asyncio.sleep(10.0)
        (event,) = await world.run(shrink(*leaving(world, 1), deadline_s=5.0))
        assert isinstance(event, StageApplied)
        assert event.left == {1}
        assert world.script.methods(1) == ["kill"]

    run_virtual(main())


def test_a_process_that_is_gone_already_has_left() -> None:
    async def main() -> None:
        world = FakeWorld()
        workers = leaving(world, 1)
        world.workers.crash(1)
        (event,) = await world.run(shrink(*workers, deadline_s=30.0))
        assert isinstance(event, StageApplied)
        assert event.left == {1}
        assert event.failed == {}

    run_virtual(main())


def test_a_kill_that_is_not_confirmed_is_a_failure_and_cleaning_goes_on_until_it_is() -> None:
    async def main() -> None:
        world = FakeWorld()
        workers = leaving(world, 1)
        world.script.inject(Fault.FAIL, method="stop")
        for _ in range(4):
            world.script.inject(Fault.HANG, method="kill")
        (event,) = await world.run(shrink(*workers, deadline_s=30.0))
        assert isinstance(event, StageApplied)
        assert event.left == frozenset()
        assert event.failed == {1: "worker 1: kill exceeded 5 s"}
        (cleaned,) = await world.run(CleanWorkers(workers=workers))
        assert isinstance(cleaned, WorkersCleaned)
        assert cleaned.workers == {1: 1}
        assert world.ledger.owners() == {}

    run_virtual(main())


def test_a_load_under_way_does_not_keep_a_worker_from_leaving() -> None:
    async def main() -> None:
        world = FakeWorld(delays_s={"load_weights": 200.0}, version=2)
        workers = leaving(world, 1)
        stage = ApplyStage(plan_id=PLAN, stage=0, admit=workers, target_version=2)
        admission = asyncio.ensure_future(world.run(stage))
        await asyncio.sleep(1.0)
        (event,) = await world.run(shrink(*workers, deadline_s=61.0))
        assert isinstance(event, StageApplied)
        assert event.left == {1}
        assert event.now_s < 5.0
        (refused,) = await admission
        assert isinstance(refused, StageApplied)
        assert refused.failed.keys() == {1}

    run_virtual(main())


def test_a_later_incarnation_is_not_ended_for_an_older_one() -> None:
    async def main() -> None:
        world = FakeWorld()
        (old,) = leaving(world, 1)
        world.workers.crash(1)
        world.workers.adopt(replace(old, incarnation=2, lifecycle=Lifecycle.ACTIVE, role=Role.COLOCATED), 1)
        await world.run(CleanWorkers(workers=(old,)))
        assert world.workers.processes[old.id].incarnation == 2

    run_virtual(main())
