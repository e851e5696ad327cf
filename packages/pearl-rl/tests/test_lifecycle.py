"""The lifecycle trace: every trajectory's phases, in a legal order, from what router, rollout and agent really do."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from pearl_executor.ports import Sampling
from pearl_executor.virtual_time import run_virtual
from pearl_planner.forecast import WorkloadPredictor
from pearl_rl.rollout.calls import ModelCall, TurnResult
from pearl_rl.rollout.lifecycle import LifecycleTrace, task_kind
from pearl_rl.rollout.router import Router
from pearl_rl.rollout.testing import FakeGeneration, FakeRequest, serving_table, withdraw
from pearl_state.phases import PhaseChange, StartupMode
from pearl_state.roles import Role
from pearl_state.trajectory import GroupId, TrajectoryId, TrajectoryPhase
from pearl_state.worker import WorkerId

P = TrajectoryPhase
ROLES = {0: Role.PREFILL, 1: Role.DECODE, 2: Role.DECODE}
T = TypeVar("T")


def trajectory(number: int) -> TrajectoryId:
    return TrajectoryId(f"t{number:08d}")


def call(number: int, turn: int = 0, prompt: int = 20, tokens: int = 10) -> ModelCall:
    ids = tuple(range(100, 100 + prompt))
    return ModelCall(trajectory=trajectory(number), turn=turn, prompt=ids, max_new_tokens=tokens, sampling=Sampling())


def traced(
    body: Callable[[LifecycleTrace, Router], Awaitable[T]], port: FakeGeneration | None = None
) -> tuple[list[PhaseChange], T]:
    changes: list[PhaseChange] = []

    async def main() -> T:
        # A predictor listens too: it accepts legal changes only.
        lifecycle = LifecycleTrace(changes.append, WorkloadPredictor().observe)
        router = Router(port or FakeGeneration(), lifecycle=lifecycle)
        router.apply(serving_table(ROLES))
        try:
            return await body(lifecycle, router)
        finally:
            await router.aclose()

    return changes, run_virtual(main())


def short(changes: list[PhaseChange]) -> list[tuple[str, int, int | None]]:
    return [(str(change.phase), change.prompt_tokens, change.instance) for change in changes]


def begin(lifecycle: LifecycleTrace, router: Router, number: int) -> None:
    lifecycle.sampled(trajectory(number), GroupId("g"), "bisect")
    router.begin(trajectory(number))


def test_a_turn_passes_every_phase_with_its_prompt_and_instance() -> None:
    async def body(lifecycle: LifecycleTrace, router: Router) -> None:
        begin(lifecycle, router, 0)
        lifecycle.starting(trajectory(0), StartupMode.COLD)
        await asyncio.sleep(1.0)
        await router.generate(call(0))
        await asyncio.sleep(2.0)
        await router.generate(call(0, turn=1, prompt=40))
        lifecycle.rewarding(trajectory(0))
        lifecycle.ended(trajectory(0), accepted=True)

    changes, _ = traced(body)
    assert short(changes) == [
        ("sampled", 0, None),
        ("environment_starting", 0, None),
        ("ready", 20, None),
        ("ready", 20, 0),
        ("prefill", 20, 0),
        ("decode", 20, 1),
        ("tool", 30, None),
        ("ready", 40, None),
        ("ready", 40, 0),
        ("prefill", 40, 0),
        ("decode", 40, 1),
        ("tool", 50, None),
        ("reward", 50, None),
        ("done", 50, None),
    ]
    assert changes[1].startup is StartupMode.COLD
    ready = [change for change in changes if change.phase is P.READY and change.instance is None]
    tool = next(change for change in changes if change.phase is P.TOOL)
    assert ready[0].at_s == pytest.approx(1.0)
    assert ready[1].at_s - tool.at_s == pytest.approx(2.0)
    assert [change.turn for change in ready] == [0, 1]
    assert changes[-1].accepted is True


def test_an_instance_serves_one_prompt_after_the_other() -> None:
    async def body(lifecycle: LifecycleTrace, router: Router) -> None:
        for number in range(3):
            begin(lifecycle, router, number)
        await asyncio.gather(*(router.generate(call(number)) for number in range(3)))
        for number in range(3):
            lifecycle.ended(trajectory(number), accepted=None)

    changes, _ = traced(body)
    serving: set[str] = set()
    order = []
    for change in changes:
        if change.phase is P.PREFILL:
            serving.add(change.trajectory)
            order.append(change.trajectory)
        elif change.phase is P.DECODE:
            serving.discard(change.trajectory)
        assert len(serving) <= 2  # the next one begins in the instant in which the one before ends
    assert order == [trajectory(0), trajectory(1), trajectory(2)]
    assert [change.phase for change in changes[-3:]] == [P.FAILED] * 3


def test_a_cancelled_request_is_ready_again_and_decoded_elsewhere() -> None:
    def body_with(port: FakeGeneration) -> Callable[[LifecycleTrace, Router], Awaitable[TurnResult]]:
        async def body(lifecycle: LifecycleTrace, router: Router) -> TurnResult:
            def leave(record: FakeRequest) -> None:
                if len(record.tokens) == 4 and record.workers[-1].id == 1:
                    router.apply(withdraw(router.table, [1]))
                    record.interrupted = True

            port.before_token = leave
            begin(lifecycle, router, 0)
            return await router.generate(call(0))

        return body

    port = FakeGeneration()
    changes, result = traced(body_with(port), port)
    assert len(result.tokens) == 10
    assert [(str(c.phase), c.instance) for c in changes if c.phase in (P.PREFILL, P.DECODE)] == [
        ("prefill", 0),
        ("decode", 1),
        ("prefill", 0),
        ("decode", WorkerId(2)),
    ]
    again = [change for change in changes if change.phase is P.READY][-1]
    assert again.prompt_tokens == 24, "the tokens that it has are part of what is sent again"


def test_calls_of_nobody_leave_no_trace() -> None:
    async def body(lifecycle: LifecycleTrace, router: Router) -> None:
        await router.generate(call(7))
        assert len(lifecycle.live) == 0

    assert traced(body)[0] == []


def test_tasks_of_one_source_are_one_kind() -> None:
    assert task_kind("bisect-000017") == "bisect"
    assert task_kind("17") == ""


def test_as_many_prompts_as_an_instance_has_ranks_are_in_service_with_the_weights_it_has() -> None:
    changes: list[PhaseChange] = []
    port = FakeGeneration(prefill_s=0.25)

    async def main() -> None:
        lifecycle = LifecycleTrace(changes.append, WorkloadPredictor().observe, ranks=2)
        router = Router(port, lifecycle=lifecycle)
        router.apply(serving_table(ROLES))
        for number in range(3):
            begin(lifecycle, router, number)
        await asyncio.gather(*(router.generate(call(number)) for number in range(3)))
        await router.aclose()

    run_virtual(main())
    served = [change for change in changes if change.phase is P.PREFILL]
    at_once = [change.trajectory for change in served if change.at_s == served[0].at_s]
    assert at_once == [trajectory(0), trajectory(1)]
    assert len(served) == 3, "the third one begins once one of them is done"
    versions = {row.weight_version for row in serving_table(ROLES).rows.values()}
    assert {change.weights for change in served} == versions
    answers = [change for change in changes if change.phase is P.TOOL]
    assert [change.prefill_s for change in answers] == [0.25] * 3
    assert all(change.prefill_s is None and change.weights is None for change in changes if change.phase is P.DECODE)
    assert answers[0].to_json()["prefill_s"] == 0.25
