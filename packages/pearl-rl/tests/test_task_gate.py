"""The gate before the router: turns wait for room, the table moves budgets, and a wait that is too long is named."""

import asyncio

import pytest

from pearl_executor.virtual_time import run_virtual
from pearl_rl.rollout.calls import GenerationFailedError, ModelCall
from pearl_rl.rollout.lifecycle import LifecycleTrace
from pearl_rl.rollout.router import Router
from pearl_rl.rollout.task_batcher import TaskBatchingSettings, TaskState
from pearl_rl.rollout.task_gate import TaskGate, TaskGateLimits
from pearl_rl.rollout.testing import FakeGeneration, serving_table, withdraw
from pearl_state.phases import PhaseChange
from pearl_state.roles import Role
from pearl_state.trajectory import GroupId, TrajectoryId, TrajectoryPhase


def gate(kv_tokens: int, wait_s: float = 100.0) -> tuple[TaskGate, Router]:
    router = Router(FakeGeneration())
    limits = TaskGateLimits(kv_tokens=kv_tokens, budget_fraction=1.0, growth_tokens=5, wait_s=wait_s)
    return TaskGate(router, limits, TaskBatchingSettings(probe_tokens=20)), router


async def play(gate_: TaskGate, router: Router, name: str, turns: int, environment_s: float) -> float:
    task = TrajectoryId(name)
    router.begin(task)
    gate_.begin(task, GroupId(name))
    context = [7] * 15
    for turn in range(turns):
        result = await gate_.generate(ModelCall(trajectory=task, turn=turn, prompt=tuple(context), max_new_tokens=5))
        assert gate_.batcher.usage_tokens[result.worker] <= 50
        context += [*result.tokens, 9, 9]
        await asyncio.sleep(environment_s)
    router.end(task)
    gate_.end(task, finished=True)
    return asyncio.get_running_loop().time()


def test_tasks_take_turns_within_the_budget_and_all_end() -> None:
    async def main() -> None:
        gate_, router = gate(50)
        gate_.apply(serving_table([Role.COLOCATED]))
        ends = await asyncio.gather(*(play(gate_, router, f"t{n}", 3, 1.0) for n in range(6)))
        assert len(ends) == 6
        assert gate_.batcher.counts.admitted == 6
        assert gate_.batcher.active == gate_.batcher.waiting == 0
        await router.aclose()

    run_virtual(main())


def test_a_turn_that_waits_for_room_is_in_the_ready_queue_for_whoever_forecasts() -> None:
    async def main() -> list[tuple[TrajectoryPhase, float]]:
        changes: list[PhaseChange] = []
        trace = LifecycleTrace(changes.append)
        router = Router(FakeGeneration(), lifecycle=trace)
        limits = TaskGateLimits(kv_tokens=30, budget_fraction=1.0, growth_tokens=5)
        gate_ = TaskGate(router, limits, TaskBatchingSettings(probe_tokens=20), lifecycle=trace)
        gate_.apply(serving_table([Role.COLOCATED]))
        for name in ("t0", "t1"):
            trace.sampled(TrajectoryId(name), GroupId(name))
        await asyncio.gather(*(play(gate_, router, f"t{n}", 1, 5.0) for n in range(2)))
        await router.aclose()
        return [(change.phase, change.at_s) for change in changes if change.trajectory == "t1"]

    phases = run_virtual(main())
    ready = next(at_s for phase, at_s in phases if phase is TrajectoryPhase.READY)
    served = next(at_s for phase, at_s in phases if phase is TrajectoryPhase.PREFILL)
    # Only one of them has room: the other one waits until it is over, and is ready for so long.
    assert ready == 0.0
    assert served > 5.0


def test_a_task_moves_when_its_worker_leaves() -> None:
    async def main() -> None:
        gate_, router = gate(50)
        table = serving_table([Role.COLOCATED, Role.COLOCATED])
        gate_.apply(table)
        playing = asyncio.create_task(play(gate_, router, "t0", 4, 10.0))
        await asyncio.sleep(12.0)
        assert gate_.batcher.state(TrajectoryId("t0")) is TaskState.ACTIVE
        gone = next(w for w, tokens in gate_.batcher.usage_tokens.items() if tokens)
        gate_.apply(withdraw(table, [gone]))
        await playing
        assert gate_.batcher.counts.moved == 1
        await router.aclose()

    run_virtual(main())


def test_a_turn_that_gets_no_room_in_time_says_who_has_it() -> None:
    async def main() -> None:
        gate_, router = gate(20, wait_s=5.0)
        gate_.apply(serving_table([Role.COLOCATED]))
        first = asyncio.create_task(play(gate_, router, "t0", 1, 60.0))
        await asyncio.sleep(1.0)
        with pytest.raises(
            GenerationFailedError, match=r"no room for 15 tokens within 5 s .*worker 0: 20, 1 tasks wait"
        ):
            await play(gate_, router, "t1", 1, 0.0)
        gate_.end(TrajectoryId("t1"), finished=False)
        assert gate_.batcher.waiting == 0
        await first
        await router.aclose()

    run_virtual(main())


def test_a_task_that_no_worker_could_ever_hold_is_refused_at_once_and_named() -> None:
    async def main() -> None:
        gate_, router = gate(30, wait_s=1000.0)
        gate_.apply(serving_table([Role.COLOCATED, Role.COLOCATED]))
        with pytest.raises(GenerationFailedError, match=r"t0 needs 34 tokens of KV, more than the 100% of 30 .* bound"):
            # It grows by seven tokens a turn, from 20 on.
            await play(gate_, router, "t0", 9, 1.0)
        assert asyncio.get_running_loop().time() < 100.0
        gate_.end(TrajectoryId("t0"), finished=False)
        assert gate_.batcher.active == gate_.batcher.waiting == 0
        await router.aclose()

    run_virtual(main())
