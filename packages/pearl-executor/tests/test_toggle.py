"""The Intra-Scale Toggle Manager through the executor, in virtual time."""

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest

from pearl_executor.limits import Limits
from pearl_executor.testing import FakeWorld, Fault, row
from pearl_executor.virtual_time import run_virtual
from pearl_state.effects import (
    ApplyStage,
    CancelGroup,
    GroupKind,
    PrepareGroup,
    ReleaseTraining,
    ResumeTraining,
    SyncWeights,
)
from pearl_state.events import GroupFailed, GroupPrepared, StageApplied, TrainingReleased, TrainingResumed
from pearl_state.lifecycle import Lifecycle
from pearl_state.plan import PlanId
from pearl_state.roles import Role, Zone
from pearl_state.worker import Worker

PLAN = PlanId(4)
RELEASE = ReleaseTraining(plan_id=PLAN, workers=())
RESUME = ResumeTraining(workers=())


def overlap(slot: int, lifecycle: Lifecycle, role: Role = Role.COLOCATED, version: int | None = None) -> Worker:
    return row(slot, lifecycle, role, zone=Zone.OVERLAP, version=version)


def borrow(*workers: Worker) -> PrepareGroup:
    return PrepareGroup(plan_id=PLAN, kind=GroupKind.BORROW, workers=workers)


def give_back(*workers: Worker, deadline_s: float | None = None) -> ApplyStage:
    return ApplyStage(plan_id=PLAN, stage=0, leave=workers, deadline_s=deadline_s, mandatory=deadline_s is not None)


def retained(world: FakeWorld, *workers: Worker) -> tuple[Worker, ...]:
    for worker in workers:
        world.workers.adopt(worker, None, resident=False)
    return workers


def serving(world: FakeWorld, *slots: int) -> tuple[Worker, ...]:
    workers = tuple(overlap(slot, Lifecycle.DRAINING, version=1) for slot in slots)
    for worker in workers:
        world.workers.adopt(worker, 1)
    return workers


# ---- borrowing ------------------------------------------------------------------------------------------------------


def test_memory_comes_before_weights_and_weights_before_kv_buffers() -> None:
    async def main() -> None:
        world = FakeWorld()
        (worker,) = retained(world, overlap(1, Lifecycle.RESUMING, Role.DECODE))
        (event,) = await world.run(borrow(worker))
        assert isinstance(event, GroupPrepared)
        assert world.script.methods(1) == ["resume", "samples", "load_weights", "refresh_peers", "samples"]

    run_virtual(main())


def test_a_retained_process_takes_the_role_that_its_row_has_now() -> None:
    async def main() -> None:
        world = FakeWorld()
        worker = overlap(1, Lifecycle.RESUMING, Role.PREFILL)
        retained(world, replace(worker, role=Role.COLOCATED))
        await world.run(borrow(worker))
        assert world.workers.processes[worker.id].role is Role.PREFILL
        assert world.script.methods(1)[:4] == ["resume", "samples", "switch_role", "load_weights"]

    run_virtual(main())


def test_the_whole_cycle_never_has_two_owners_of_a_gpu_and_starts_a_process_only_once() -> None:
    async def main() -> None:
        world = FakeWorld(training_gpus=frozenset({1, 2}))
        workers = (overlap(1, Lifecycle.STARTING), overlap(2, Lifecycle.STARTING))
        for cycle in range(4):
            (released,) = await world.run(RELEASE)
            assert isinstance(released, TrainingReleased)
            assert released.failed is None
            (prepared,) = await world.run(borrow(*workers))
            assert isinstance(prepared, GroupPrepared)
            calls = [world.generate(worker, 1000) for worker in workers]
            await asyncio.sleep(3.0)
            world.weights.publish(cycle + 2)
            deadline_s = asyncio.get_running_loop().time() + 30.0
            leavers = [replace(w, lifecycle=Lifecycle.DRAINING, weight_version=cycle + 1) for w in workers]
            (left,) = await world.run(give_back(*leavers, deadline_s=deadline_s))
            assert isinstance(left, StageApplied)
            assert left.left == {1, 2}
            assert all(call.kept() and call.seen for call in calls)
            (resumed,) = await world.run(RESUME)
            assert isinstance(resumed, TrainingResumed)
            assert resumed.failed is None
            workers = tuple(replace(w, lifecycle=Lifecycle.RESUMING) for w in workers)
        assert world.broken() == []
        assert world.script.methods().count("start") == 2
        assert world.script.methods().count("resume") == 2 * 3

    run_virtual(main())


def test_the_fakes_notice_a_borrow_from_training_that_holds_its_gpus() -> None:
    async def main() -> None:
        world = FakeWorld(training_gpus=frozenset({1}))
        await world.run(borrow(overlap(1, Lifecycle.STARTING)))
        assert world.broken() == ["worker 1.1 takes memory of GPU 1, which training holds"]

    run_virtual(main())


def test_a_second_resume_or_release_never_reaches_the_engine() -> None:
    """A second resume, or a release of what is released, ends a real engine with all of its process tree."""

    async def main() -> None:
        world = FakeWorld()
        workers = retained(world, overlap(1, Lifecycle.RESUMING))
        for _ in range(2):
            (event,) = await world.run(borrow(*workers))
            assert isinstance(event, GroupPrepared)
        leaver = replace(workers[0], lifecycle=Lifecycle.DRAINING)
        for _ in range(2):
            (left,) = await world.run(give_back(leaver))
            assert isinstance(left, StageApplied)
            assert left.left == {1}
        assert world.script.methods().count("resume") == 1
        assert world.script.methods().count("release") == 1
        assert world.broken() == []

    run_virtual(main())


def test_a_failed_borrow_takes_the_others_back_and_keeps_their_processes() -> None:
    async def main() -> None:
        world = FakeWorld()
        workers = retained(world, *(overlap(i, Lifecycle.RESUMING) for i in (1, 2, 3)))
        world.script.inject(Fault.FAIL, method="load_weights", worker=2)
        (event,) = await world.run(borrow(*workers))
        assert isinstance(event, GroupFailed)
        assert event.failed.keys() == {2}
        assert world.workers.processes.keys() == {1, 3}
        assert world.ledger.owners() == {}
        again = (workers[0], workers[2])
        (event,) = await world.run(borrow(*again))
        assert isinstance(event, GroupPrepared)

    run_virtual(main())


def test_a_rollback_that_does_not_free_the_memory_ends_the_process_and_says_so() -> None:
    async def main() -> None:
        world = FakeWorld()
        workers = retained(world, overlap(1, Lifecycle.RESUMING), overlap(2, Lifecycle.RESUMING))
        world.workers.leak_bytes[1] = 60_000_000_000
        world.script.inject(Fault.FAIL, method="load_weights", worker=2)
        (event,) = await world.run(borrow(*workers))
        assert isinstance(event, GroupFailed)
        assert event.failed.keys() == {1, 2}
        assert "released 0 bytes of device memory" in event.failed[1]
        assert world.workers.processes == {}
        assert world.ledger.owners() == {}

    run_virtual(main())


def test_a_resume_under_way_when_the_borrow_is_cancelled_is_awaited_and_undone() -> None:
    async def main() -> None:
        world = FakeWorld()
        workers = retained(world, overlap(1, Lifecycle.RESUMING))
        task = asyncio.ensure_future(world.run(borrow(*workers)))
        await asyncio.sleep(1.0)
        await world.run(CancelGroup(plan_id=PLAN))
        (event,) = await task
        assert isinstance(event, GroupFailed)
        assert event.failed == {}
        assert world.script.methods() == ["resume", "release"]
        assert not world.workers.processes[workers[0].id].resident

    run_virtual(main())


def test_a_resume_that_hangs_when_the_borrow_is_cancelled_costs_the_process_and_is_named() -> None:
    async def main() -> None:
        world = FakeWorld()
        workers = retained(world, overlap(1, Lifecycle.RESUMING), overlap(2, Lifecycle.RESUMING))
        world.script.inject(Fault.HANG, method="resume", worker=1)
        task = asyncio.ensure_future(world.run(borrow(*workers)))
        await asyncio.sleep(4.0)
        await world.run(CancelGroup(plan_id=PLAN))
        (event,) = await task
        assert isinstance(event, GroupFailed)
        assert event.failed.keys() == {1}
        assert world.workers.processes.keys() == {2}
        assert event.now_s < 4.0 + Limits().settle_s + Limits().release_s

    run_virtual(main())


# ---- returning ------------------------------------------------------------------------------------------------------


def test_a_release_that_frees_nothing_is_a_failure_that_names_both_numbers() -> None:
    """slime#579, sglang#4566: a release that answers well and frees nothing must not hand the GPU over."""

    async def main() -> None:
        world = FakeWorld()
        workers = serving(world, 1, 2)
        world.workers.leak_bytes[1] = 60_000_000_000
        (event,) = await world.run(give_back(*workers, deadline_s=30.0))
        assert isinstance(event, StageApplied)
        assert event.left == {2}
        assert event.failed == {
            1: "worker 1: release failed: worker 1 released 0 bytes of device memory, expected 57475000000"
        }
        assert set(world.ledger.owners()) == {1}

    run_virtual(main())


def test_a_release_is_held_against_what_the_resume_took() -> None:
    async def main() -> None:
        world = FakeWorld()
        (worker,) = retained(world, overlap(1, Lifecycle.RESUMING))
        await world.run(borrow(worker))
        world.workers.leak_bytes[1] = 4_000_000_000
        (event,) = await world.run(give_back(replace(worker, lifecycle=Lifecycle.DRAINING)))
        assert isinstance(event, StageApplied)
        assert "released 56000000000 bytes of device memory, expected 57000000000" in event.failed[worker.id]

    run_virtual(main())


def test_a_release_whose_outcome_is_not_known_is_not_asked_for_again() -> None:
    async def main() -> None:
        world = FakeWorld()
        workers = serving(world, 1)
        world.script.inject(Fault.HANG_AFTER, method="release")
        (event,) = await world.run(give_back(*workers))
        assert isinstance(event, StageApplied)
        assert event.failed == {1: "worker 1: release exceeded 30 s"}
        (event,) = await world.run(give_back(*workers))
        assert isinstance(event, StageApplied)
        assert "not known" in event.failed[workers[0].id]
        assert world.script.methods().count("release") == 1
        assert world.broken() == []

    run_virtual(main())


def test_a_refused_release_may_be_asked_for_again() -> None:
    async def main() -> None:
        world = FakeWorld()
        workers = serving(world, 1)
        world.script.inject(Fault.FAIL, method="release")
        (event,) = await world.run(give_back(*workers))
        assert isinstance(event, StageApplied)
        assert event.failed.keys() == {1}
        (event,) = await world.run(give_back(*workers))
        assert isinstance(event, StageApplied)
        assert event.left == {1}

    run_virtual(main())


def test_a_return_is_over_by_its_deadline_without_the_process_where_it_must_be() -> None:
    async def main() -> None:
        world = FakeWorld()
        workers = serving(world, 1, 2)
        world.script.inject(Fault.HANG, method="release", worker=1)
        (event,) = await world.run(give_back(*workers, deadline_s=20.0))
        assert isinstance(event, StageApplied)
        assert event.left == {2}
        assert event.now_s <= 20.0
        assert event.failed[workers[0].id].endswith("; killed, since its GPUs are due")
        assert "release exceeded" in event.failed[workers[0].id]
        assert world.ledger.owners() == {}

    run_virtual(main())


def test_requests_that_were_under_way_to_a_leaving_worker_do_not_keep_it_busy() -> None:
    """verl#7511: submits during a pause keep a drain from finishing."""

    async def main() -> None:
        world = FakeWorld()
        (worker,) = serving(world, 1)

        for at_s in (0.0, 0.15, 0.25, 0.35):
            asyncio.get_running_loop().call_at(at_s, world.generate, worker, 100_000)
        await asyncio.sleep(0.1)
        (event,) = await world.run(give_back(worker, deadline_s=30.0))
        assert isinstance(event, StageApplied)
        assert event.left == {1}
        assert event.now_s < 5.0
        assert world.script.methods(1).count("interrupt") == 4
        assert world.broken() == []
        assert len(world.calls) == 4
        assert all(call.kept() for call in world.calls)

    run_virtual(main())


def test_memory_is_not_released_beneath_a_load() -> None:
    async def main() -> None:
        world = FakeWorld(version=2, delays_s={"load_weights": 60.0})
        (worker,) = serving(world, 1)
        sync = asyncio.ensure_future(world.run(SyncWeights(workers=(worker,), version=2)))
        await asyncio.sleep(1.0)
        (event,) = await world.run(give_back(worker, deadline_s=31.0))
        assert isinstance(event, StageApplied)
        assert event.left == {1}
        assert world.broken() == []
        assert await sync == [], "a worker that left is not to blame for weights that it did not load"

    run_virtual(main())


# ---- training -------------------------------------------------------------------------------------------------------


def test_training_that_frees_too_little_takes_all_of_it_back() -> None:
    async def main() -> None:
        world = FakeWorld(training_gpus=frozenset({1, 2}))
        assert world.training is not None
        world.training.leak_bytes = 30_000_000_000
        (event,) = await world.run(RELEASE)
        assert isinstance(event, TrainingReleased)
        assert event.failed == (
            "training: release failed: training released 60000000000 bytes of device memory, expected 114000000000"
        )
        assert world.training.resident

    run_virtual(main())


def test_training_releases_and_resumes_only_once() -> None:
    async def main() -> None:
        world = FakeWorld(training_gpus=frozenset({1}))
        for effect in (RESUME, RELEASE, RELEASE, RESUME, RESUME):
            (event,) = await world.run(effect)
            assert isinstance(event, TrainingReleased | TrainingResumed)
            assert event.failed is None
        assert world.script.methods() == ["training.release", "training.resume"]

    run_virtual(main())


def test_a_resume_of_training_that_fails_again_and_again_is_tried_ever_more_rarely() -> None:
    async def main() -> None:
        world = FakeWorld(training_gpus=frozenset({1}))
        await world.run(RELEASE)
        for _ in range(4):
            world.script.inject(Fault.FAIL, method="training.resume")
        answers = []
        for _ in range(5):
            (event,) = await world.run(RESUME)
            assert isinstance(event, TrainingResumed)
            answers.append(event)
        assert [event.failed is None for event in answers] == [False] * 4 + [True]
        pauses = [b.now_s - a.now_s - 3.0 for a, b in pairwise(answers)]
        assert pauses == pytest.approx([1.0, 2.0, 4.0, 8.0])

    run_virtual(main())


def test_a_run_without_training_lends_nothing() -> None:
    async def main() -> None:
        (event,) = await FakeWorld().run(RELEASE)
        assert isinstance(event, TrainingReleased)
        assert event.failed is not None
        assert "no training" in event.failed

    run_virtual(main())


def test_memory_that_training_cannot_take_again_is_a_failed_resume() -> None:
    async def main() -> None:
        world = FakeWorld(training_gpus=frozenset({1}))
        await world.run(RELEASE)
        world.script.inject(Fault.HANG, method="training.resume")
        (event,) = await world.run(RESUME)
        assert isinstance(event, TrainingResumed)
        assert event.failed == "training: resume exceeded 120 s"
        (refused,) = await world.run(RELEASE)
        assert isinstance(refused, TrainingReleased)
        assert refused.failed is not None
        assert "not known" in refused.failed
        (event,) = await world.run(RESUME)
        assert isinstance(event, TrainingResumed)
        assert event.failed is None

    run_virtual(main())
