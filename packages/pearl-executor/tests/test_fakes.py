"""The fakes behave like engines: deterministic continuation, spans, pairs, and death on misuse."""

import asyncio

import pytest

from pearl_executor.ports import Finish, GenerateRequest, TokenChunk, WeightSnapshot, WorkerError, WorkerLostError
from pearl_executor.testing import FakeWorld, Fault, row
from pearl_executor.virtual_time import SimulationDeadlockError, run_virtual
from pearl_state.lifecycle import Lifecycle
from pearl_state.roles import Role
from pearl_state.worker import Worker


def serving(world: FakeWorld, slot: int = 1, role: Role = Role.COLOCATED, version: int = 1) -> Worker:
    worker = row(slot, role=role, version=version)
    world.workers.adopt(worker, version)
    return worker


def test_resuming_an_interrupted_call_from_its_prefix_continues_the_same_way() -> None:
    async def main() -> None:
        world = FakeWorld()
        worker, other = serving(world), serving(world, 2)
        call = world.generate(worker, 40)
        await asyncio.sleep(0.3)
        assert await world.workers.interrupt(worker) == 1
        partial = await call.task
        assert partial.finish is Finish.INTERRUPTED
        assert 0 < len(partial.tokens) < 40
        rest = world.generate(other, 40 - len(partial.tokens), prompt=(1, 2, 3, *partial.tokens))
        assert [*partial.tokens, *(await rest.task).tokens] == call.expected

    run_virtual(main())


def test_a_pair_generates_what_a_colocated_worker_does() -> None:
    async def main() -> None:
        world = FakeWorld()
        chunks: list[TokenChunk] = []
        result = await world.workers.generate_pair(
            serving(world, 1, Role.PREFILL),
            serving(world, 2, Role.DECODE),
            GenerateRequest(rid="r", prompt=(1, 2, 3), max_new_tokens=20),
            chunks.append,
        )
        alone = world.generate(serving(world, 3), 20)
        assert result.tokens == (await alone.task).tokens
        assert [chunk.offset for chunk in chunks] == list(range(20))

    run_virtual(main())


def test_a_request_on_a_process_that_dies_is_lost_at_once() -> None:
    async def main() -> None:
        world = FakeWorld()
        call = world.generate(serving(world), 1000)
        await asyncio.sleep(1.0)
        world.workers.crash(1)
        with pytest.raises(WorkerLostError):
            await call.task
        assert call.kept()
        assert len(call.seen) > 10

    run_virtual(main())


MISUSES = ("release busy", "release twice", "resume twice", "load beside load", "start twice", "wrong role")


async def misuse(world: FakeWorld, name: str) -> None:
    worker, port = serving(world), world.workers
    match name:
        case "release busy":
            world.generate(worker, 1000)
            await asyncio.sleep(0.1)
            await port.release(worker)
        case "release twice":
            await port.release(worker)
            await port.release(worker)
        case "resume twice":
            await port.resume(worker)
        case "load beside load":
            loads = [port.load_weights(worker, WeightSnapshot(version, "fake")) for version in (2, 3)]
            _, second = await asyncio.gather(*loads, return_exceptions=True)
            assert isinstance(second, WorkerError)
            raise second
        case "start twice":
            await port.start(worker)
        case _:
            request = GenerateRequest(rid="r", prompt=(1,), max_new_tokens=1)
            await port.generate_pair(worker, worker, request, lambda chunk: None)


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_that_a_real_engine_does_not_survive_is_recorded_and_fatal(name: str) -> None:
    async def main() -> None:
        world = FakeWorld()
        with pytest.raises(WorkerLostError):
            await misuse(world, name)
        assert len(world.broken()) == 1
        assert world.workers.processes == {}
        for call in world.calls:
            await asyncio.wait({call.task})
            assert call.kept()

    run_virtual(main())


def test_an_older_incarnation_is_not_served() -> None:
    async def main() -> None:
        world = FakeWorld()
        world.workers.adopt(row(1, incarnation=2), 1)
        with pytest.raises(WorkerLostError):
            await world.workers.interrupt(row(1, incarnation=1))

    run_virtual(main())


def test_a_fault_hits_only_the_call_that_it_names() -> None:
    async def main() -> None:
        world = FakeWorld()
        first, second = serving(world, 1), serving(world, 2)
        world.script.inject(Fault.FAIL, method="refresh_peers", worker=2)
        world.script.inject(Fault.CRASH, call=4)
        await world.workers.refresh_peers(first)
        with pytest.raises(WorkerError, match="injected failure in refresh_peers of 2"):
            await world.workers.refresh_peers(second)
        await world.workers.refresh_peers(second)
        with pytest.raises(RuntimeError, match="injected crash"):
            await world.workers.samples(first)
        assert [call.outcome for call in world.script.calls][::2] == ["done", "done"]

    run_virtual(main())


def test_an_unbounded_hang_is_a_deadlock_of_virtual_time() -> None:
    async def main() -> None:
        world = FakeWorld()
        worker = serving(world)
        world.script.inject(Fault.HANG, method="stop")
        await world.workers.stop(worker)

    with pytest.raises(SimulationDeadlockError, match=r"waits in .*\(faults.py"):
        run_virtual(main())


def test_a_start_that_fails_leaves_no_process_and_one_that_hangs_does() -> None:
    async def main() -> None:
        world = FakeWorld()
        world.script.inject(Fault.FAIL, method="start", worker=1)
        world.script.inject(Fault.HANG, method="start", worker=2)
        with pytest.raises(WorkerError):
            await world.workers.start(row(1, Lifecycle.STARTING))
        hanging = asyncio.ensure_future(world.workers.start(row(2, Lifecycle.STARTING)))
        await asyncio.sleep(100.0)
        assert world.workers.processes.keys() == {2}
        assert set(world.ledger.owners()) == {2}
        hanging.cancel()

    run_virtual(main())
