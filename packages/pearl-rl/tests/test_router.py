"""The router: dispatch by the table only, resume from tokens, one owner per trajectory, bounded waits."""

import asyncio
import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl_executor.ports import (
    Finish,
    GenerateRequest,
    GenerateResult,
    OnChunk,
    Sampling,
    TokenChunk,
    TransferError,
    WorkerError,
    WorkerLostError,
)
from pearl_executor.virtual_time import run_virtual
from pearl_rl.rollout.calls import FailureCause, GenerationFailedError, ModelCall, TurnResult
from pearl_rl.rollout.router import Router, RouterLimits
from pearl_rl.rollout.serving import Home, Reuse, ServingLimits, ServingSet, Slot
from pearl_rl.rollout.testing import (
    FakeGeneration,
    FakeRequest,
    admit,
    continuation,
    logprob,
    serving_table,
    withdraw,
)
from pearl_state.lifecycle import Lifecycle
from pearl_state.roles import Role, Zone
from pearl_state.trajectory import TrajectoryId, WeightSpan
from pearl_state.worker import Worker, WorkerId

C, P, D = Role.COLOCATED, Role.PREFILL, Role.DECODE
PROMPT = tuple(range(100, 120))


def call(number: int = 0, turn: int = 0, tokens: int = 10, prompt: tuple[int, ...] = PROMPT) -> ModelCall:
    return ModelCall(
        trajectory=TrajectoryId(f"t{number:08d}"), turn=turn, prompt=prompt, max_new_tokens=tokens, sampling=Sampling()
    )


def served(port: FakeGeneration) -> list[tuple[int, ...]]:
    return [tuple(worker.id for worker in record.workers) for record in port.requests]


def assert_whole(result: TurnResult, tokens: int, prompt: tuple[int, ...] = PROMPT) -> None:
    """The response is the one that an undisturbed generation gives."""
    expected = continuation(prompt, tokens)
    assert list(result.tokens) == expected
    assert list(result.logprobs) == [logprob(token) for token in expected]
    assert sum(span.tokens for span in result.spans) == tokens


def assert_idle(router: Router) -> None:
    """All permits and counters are back where they began."""
    assert all(load == 0 for load in router.loads().values())
    for load in router.worker_loads().values():
        assert (load.running, load.waiting, load.tokens, load.cached_tokens) == (0, 0, 0, 0)
    meter = router._meter
    assert (meter.in_flight, meter.generating, meter.decoding) == (0, 0, 0)
    assert len(router._in_flight) == 0
    assert not router._waiters


# ---- dispatch -------------------------------------------------------------------------------------------------------


def test_least_loaded_worker_takes_the_next_call() -> None:
    async def main() -> None:
        port = FakeGeneration()
        router = Router(port)
        router.apply(serving_table([C, C, C]))
        await asyncio.gather(*(router.generate(call(i)) for i in range(9)))
        assert sorted(served(port)) == [(0,)] * 3 + [(1,)] * 3 + [(2,)] * 3
        assert_idle(router)

    run_virtual(main())


def test_a_trajectory_returns_to_the_worker_that_holds_its_prefix() -> None:
    async def main() -> None:
        port = FakeGeneration()
        router = Router(port)
        router.apply(serving_table([C, C, C]))
        trajectory = TrajectoryId("t00000007")
        router.begin(trajectory)
        first = await router.generate(call(7))
        load = router.worker_loads()[first.worker]
        assert load.cached_tokens == len(PROMPT)
        for turn in range(1, 5):
            assert (await router.generate(call(7, turn))).worker == first.worker
        assert router.statistics.affinity_kept == 4
        router.end(trajectory)
        assert_idle(router)

    run_virtual(main())


def test_a_trajectory_leaves_its_worker_once_that_is_much_busier_than_another() -> None:
    async def main() -> None:
        port = FakeGeneration()
        router = Router(port, RouterLimits(serving=ServingLimits(affinity_slack=2.0, affinity_slack_ratio=0.0)))
        table = serving_table([C])
        router.apply(table)
        for i in range(6):
            router.begin(TrajectoryId(f"t{i:08d}"))
        await asyncio.gather(*(router.generate(call(i)) for i in range(6)))
        both = admit(table.bind(Worker(id=WorkerId(1), gpus=frozenset({1}), role=C, zone=table.rows[0].zone)), [1])
        router.apply(both)
        await asyncio.gather(*(router.generate(call(i, 1)) for i in range(6)))
        second = served(port)[6:]
        assert (second.count((0,)), second.count((1,))) == (4, 2)

    run_virtual(main())


def test_a_prefix_that_caches_are_found_not_to_hold_keeps_no_trajectory_at_a_busier_worker() -> None:
    async def main(cached: int) -> int:
        port = FakeGeneration()
        port.cached_tokens = cached
        router = Router(port, RouterLimits(serving=ServingLimits(affinity_slack=2.0, affinity_slack_ratio=0.0)))
        table = serving_table([C])
        router.apply(table)
        for i in range(2):
            router.begin(TrajectoryId(f"t{i:08d}"))
        for turn in range(12):
            await asyncio.gather(*(router.generate(call(i, turn)) for i in range(2)))
        router.apply(
            admit(table.bind(Worker(id=WorkerId(1), gpus=frozenset({1}), role=C, zone=table.rows[0].zone)), [1])
        )
        await asyncio.gather(*(router.generate(call(i, 12)) for i in range(2)))
        return served(port)[24:].count((1,))

    assert run_virtual(main(cached=1000)) == 0
    assert run_virtual(main(cached=0)) == 1


def test_a_call_interrupted_before_it_was_prefilled_says_nothing_of_caches() -> None:
    """A reclaim interrupts many at once: the others' prefixes are worth what they were."""

    async def main() -> None:
        port = FakeGeneration()

        def before_token(record: FakeRequest) -> None:
            # Each call's first attempt; nothing of a prompt was looked up, so nothing was found.
            record.interrupted = not record.tokens and len(port.requests) % 2 == 1
            port.cached_tokens = 0 if record.interrupted else 1000

        port.before_token = before_token
        router = Router(port)
        router.apply(serving_table([C]))
        router.begin(TrajectoryId("t00000000"))
        for turn in range(40):
            await router.generate(call(0, turn))
        assert router.statistics.interrupted == 40
        assert router._serving.reuse.fraction == 1.0

    run_virtual(main())


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 2000)), max_size=100))
def test_what_a_prefix_is_worth_is_a_fraction_and_all_until_calls_show_otherwise(calls: list[tuple[int, int]]) -> None:
    reuse, fixed = Reuse(), Reuse(0.3)
    for held, cached in calls:
        reuse.observe(held, cached)
        fixed.observe(held, cached)
        assert 0.0 <= reuse.fraction <= 1.0
    assert fixed.fraction == 0.3
    if sum(held > 0 for held, _ in calls) < 10:
        assert reuse.fraction == 1.0


def test_what_a_prefix_is_worth_follows_a_change() -> None:
    reuse = Reuse()
    for _ in range(1000):
        reuse.observe(100, 100)
    assert reuse.fraction == pytest.approx(1.0)
    for _ in range(2000):
        reuse.observe(100, 20)
    assert reuse.fraction == pytest.approx(0.2, abs=0.01)


def test_a_full_worker_comes_last_even_where_the_prefix_is() -> None:
    async def main() -> None:
        port = FakeGeneration()
        router = Router(port, RouterLimits(serving=ServingLimits(capacity_tokens=50, affinity_slack=100.0)))
        router.apply(serving_table([C, C]))
        for i in range(3):
            router.begin(TrajectoryId(f"t{i:08d}"))
        await router.generate(call(0))
        home = served(port)[0]
        others = [asyncio.create_task(router.generate(call(i, prompt=(5,) * 40))) for i in (1, 2)]
        await asyncio.sleep(0.001)
        # Both hold 40 of 50 tokens now; nobody has room for 20 more: then the prefix decides.
        assert (await router.generate(call(0, 1))).worker == home[0]
        await asyncio.gather(*others)
        big = asyncio.create_task(router.generate(call(0, 2, prompt=(5,) * 40)))
        await asyncio.sleep(0.001)
        assert (await router.generate(call(0, 3))).worker != home[0]
        await big

    run_virtual(main())


def test_an_observation_says_how_much_of_the_kv_memory_is_in_use() -> None:
    async def main() -> None:
        router = Router(FakeGeneration(), RouterLimits(serving=ServingLimits(capacity_tokens=50)))
        assert router.observe().kv_used is None
        router.apply(serving_table([C, C]))
        assert router.observe().kv_used == 0.0
        router.begin(TrajectoryId(f"t{0:08d}"))
        task = asyncio.create_task(router.generate(call(0, prompt=(5,) * 40)))
        await asyncio.sleep(0.001)
        assert router.observe().kv_used == 40 / 100
        await task
        assert router.observe().kv_used == 0.0

    run_virtual(main())


def test_a_worker_of_two_gpus_carries_twice_the_load() -> None:
    async def main() -> None:
        port = FakeGeneration()
        router = Router(port)
        table = serving_table([C])
        wide = Worker(id=WorkerId(1), gpus=frozenset({1, 2}), role=C, zone=table.rows[0].zone)
        router.apply(admit(table.bind(wide), [1]))
        await asyncio.gather(*(router.generate(call(i)) for i in range(9)))
        assert (served(port).count((0,)), served(port).count((1,))) == (3, 6)

    run_virtual(main())


def test_pairs_need_both_workers_up() -> None:
    """sglang#31206: with P0 down, ten requests all go to (P1, D0); P0 is used again once it is back."""

    async def main() -> None:
        port = FakeGeneration()
        router = Router(port)
        up = serving_table([P, P, D])
        down = withdraw(up, [0], Lifecycle.FAILED)
        router.apply(down)
        await asyncio.gather(*(router.generate(call(i)) for i in range(10)))
        assert served(port) == [(1, 2)] * 10
        router.apply(admit(down.move([WorkerId(0)], Lifecycle.VACANT), [0]))
        await asyncio.gather(*(router.generate(call(i)) for i in range(10, 14)))
        assert (0, 2) in served(port)[10:]
        assert_idle(router)

    run_virtual(main())


def test_a_worker_that_fails_is_left_alone_and_one_success_brings_it_back() -> None:
    """sglang#31206: half-open closes on one success; a worker that recovers is used within one probe interval."""

    async def main() -> None:
        broken = True

        def fails(record: FakeRequest) -> None:
            if broken and record.workers[0].id == 0:
                raise WorkerError("no")

        port = FakeGeneration(before_token=fails)
        limits = RouterLimits(serving=ServingLimits(failures_to_block=3, probe_s=5.0))
        router = Router(port, limits)
        router.apply(serving_table([C, C]))
        for i in range(20):
            assert_whole(await router.generate(call(i)), 10)
        tried = served(port).count((0,))
        assert tried == 3
        await asyncio.sleep(5.0)
        # Half-open: of many calls at once, one probes.
        await asyncio.gather(*(router.generate(call(i)) for i in range(20, 28)))
        assert served(port).count((0,)) == tried + 1
        broken = False
        await asyncio.sleep(5.0)
        await router.generate(call(30))
        await asyncio.gather(*(router.generate(call(i)) for i in range(31, 39)))
        assert served(port)[-8:].count((0,)) == 4
        assert_idle(router)

    run_virtual(main())


def test_calls_wait_for_a_blocked_worker_no_longer_than_one_probe_interval() -> None:
    async def main() -> None:
        def fails(record: FakeRequest) -> None:
            if asyncio.get_running_loop().time() < 2.0:
                raise TransferError("link down")

        port = FakeGeneration(before_token=fails)
        router = Router(port, RouterLimits(serving=ServingLimits(failures_to_block=1, probe_s=5.0)))
        router.apply(serving_table([P, D]))
        result = await router.generate(call())
        assert_whole(result, 10)
        assert result.finished_s < 2.0 + 5.0
        assert router.statistics.transfer_retries == router.statistics.dispatched - 1 > 0

    run_virtual(main())


def test_a_probe_that_is_cancelled_hands_on_to_the_next_call() -> None:
    async def main() -> None:
        def fails(record: FakeRequest) -> None:
            if len(port.requests) == 1:
                raise TransferError("link down")

        port = FakeGeneration(before_token=fails, prefill_s=1.0)
        router = Router(port, RouterLimits(serving=ServingLimits(failures_to_block=1, probe_s=5.0)))
        router.apply(serving_table([C]))
        first = asyncio.create_task(router.generate(call(0)))
        await asyncio.sleep(2.0)
        second = asyncio.create_task(router.generate(call(1)))
        await asyncio.sleep(4.5)
        assert len(port.running) == 1
        prober, other = (first, second) if port.running[0].request.affinity == "t00000000" else (second, first)
        prober.cancel()
        result = await other
        assert result.finished_s == pytest.approx(6.5 + 1.0 + 0.1)
        await router.settle()
        assert_idle(router)

    run_virtual(main())


def test_the_prefill_worker_with_the_fewest_tokens_to_compute_takes_the_call() -> None:
    async def main() -> None:
        port = FakeGeneration()
        router = Router(port)
        router.apply(serving_table([P, P, D]))
        router.begin(TrajectoryId("t00000000"))
        await router.generate(call(0, prompt=(5,) * 50))
        assert served(port)[-1] == (0, 2)
        long = asyncio.create_task(router.generate(call(1, prompt=(5,) * 30)))
        await asyncio.sleep(0.001)
        assert served(port)[-1] == (1, 2)
        # 10 new tokens behind nothing on P0 (50 are cached) beat 60 behind 30 on P1.
        again = asyncio.create_task(router.generate(call(0, 1, prompt=(5,) * 60)))
        await asyncio.sleep(0.001)
        assert served(port)[-1] == (0, 2)
        # P0 has 10 queued, P1 has 30.
        third = asyncio.create_task(router.generate(call(2, prompt=(5,) * 30)))
        await asyncio.sleep(0.001)
        assert served(port)[-1] == (0, 2)
        await asyncio.gather(long, again, third)

    run_virtual(main())


# ---- the table is the only truth ------------------------------------------------------------------------------------


def test_no_request_reaches_a_worker_before_it_reported_the_target_version() -> None:
    """radixark/miles#1724: a new worker at version 0 gets none of 100 requests until it reports 57."""

    async def main() -> None:
        port = FakeGeneration()
        router = Router(port)
        old = serving_table([C], version=57)
        port.versions = {WorkerId(0): 57}
        table = old.bind(Worker(id=WorkerId(1), gpus=frozenset({1}), role=C, zone=old.rows[0].zone))
        table = table.move([WorkerId(1)], Lifecycle.STARTING).move([WorkerId(1)], Lifecycle.PENDING_WEIGHTS)
        router.apply(table.report(WorkerId(1), 0))
        await asyncio.gather(*(router.generate(call(i)) for i in range(100)))
        assert set(served(port)) == {(0,)}
        port.versions[WorkerId(1)] = 57
        router.apply(table.report(WorkerId(1), 57).move([WorkerId(1)], Lifecycle.ACTIVE))
        await asyncio.gather(*(router.generate(call(i)) for i in range(100)))
        assert served(port)[100:].count((1,)) == 50

    run_virtual(main())


def test_tokens_of_a_version_below_the_floor_are_rejected_loudly(caplog: pytest.LogCaptureFixture) -> None:
    """radixark/miles#1724: a sample that says "default" after a publication never becomes training data."""
    faults: list[tuple[int, str]] = []

    async def main() -> None:
        port = FakeGeneration()
        router = Router(port, on_fault=lambda worker, cause: faults.append((worker.id, cause)))
        table = serving_table([C, C], version=57).raise_floor(57)
        router.apply(table)
        port.versions = {WorkerId(0): 0, WorkerId(1): 57}
        results = await asyncio.gather(*(router.generate(call(i)) for i in range(4)))
        assert all(result.spans == (WeightSpan(57, 10),) for result in results)
        assert router.statistics.stale_served == 2
        assert {worker for worker, _ in faults} == {0}
        assert (WorkerId(0), "t00000000.0000.001") in port.aborted
        await router.generate(call(9))
        assert served(port)[-1] == (1,)
        assert_idle(router)

    run_virtual(main())
    assert "below weight version 57" in caplog.text


def test_a_stale_result_without_streaming_is_rejected_too() -> None:
    """radixark/miles#1724."""

    async def main() -> None:
        port = FakeGeneration()
        port.stream = False
        router = Router(port)
        router.apply(serving_table([C, C], version=57).raise_floor(57))
        port.versions = {WorkerId(0): 56, WorkerId(1): 57}
        assert (await router.generate(call())).spans == (WeightSpan(57, 10),)
        assert router.statistics.stale_served == 1

    run_virtual(main())


def test_a_worker_below_the_floor_is_not_dispatched_to_even_if_a_table_says_active() -> None:
    async def main() -> None:
        port = FakeGeneration()
        router = Router(port)
        table = serving_table([C, C], version=3)
        port.versions = {WorkerId(0): 3, WorkerId(1): 5}
        newer = table.publish(5).report(WorkerId(1), 5)
        # No update of the table lets the floor pass an active worker; the router does not count on it.
        router.apply(dataclasses.replace(newer, floor_version=5))
        await asyncio.gather(*(router.generate(call(i)) for i in range(4)))
        assert set(served(port)) == {(1,)}

    run_virtual(main())


def test_a_pair_decodes_with_weights_at_least_as_new_as_it_prefilled_with() -> None:
    """The prefill worker draws the first token: with newer weights than the decode worker, versions would go back."""

    async def main() -> None:
        port = FakeGeneration()
        router = Router(port)
        table = serving_table([P, D, D], version=4).publish(5).report(WorkerId(0), 5)
        port.versions = dict.fromkeys(map(WorkerId, range(3)), 5)
        router.apply(table)
        waiting = asyncio.create_task(router.generate(call()))
        await asyncio.sleep(3.0)
        assert served(port) == []
        router.apply(table.report(WorkerId(2), 5))
        assert_whole(await waiting, 10)
        await asyncio.gather(*(router.generate(call(i)) for i in range(1, 5)))
        assert set(served(port)) == {(0, 2)}

    run_virtual(main())


def test_a_prefill_worker_that_is_ahead_does_not_hold_calls_up_while_another_fits() -> None:
    async def main() -> None:
        port = FakeGeneration()
        router = Router(port)
        port.versions = dict.fromkeys(map(WorkerId, range(3)), 4)
        router.apply(serving_table([P, P, D], version=4).publish(5).report(WorkerId(0), 5))
        await asyncio.gather(*(router.generate(call(i)) for i in range(3)))
        assert set(served(port)) == {(1, 2)}

    run_virtual(main())


def test_the_newest_table_is_in_force_at_once() -> None:
    """ROLL#253: first out of routing, then drained; nothing is dispatched to a worker that drains."""

    async def main() -> None:
        port = FakeGeneration()
        router = Router(port)
        table = serving_table([C, C])
        router.apply(table)
        running = asyncio.create_task(router.generate(call(0)))
        await asyncio.sleep(0.06)
        assert served(port) == [(0,)]
        router.apply(withdraw(table, [0]))
        await asyncio.gather(*(router.generate(call(i)) for i in range(1, 6)))
        assert set(served(port)[1:]) == {(1,)}
        assert_whole(await running, 10)
        assert router.statistics.interrupted == 0

    run_virtual(main())


ROLES = st.sampled_from([C, P, D])


@st.composite
def changes(draw: st.DrawFn) -> list[tuple[float, int, bool]]:
    """(when, worker, leaves or comes back)."""
    times = draw(st.lists(st.floats(0.0, 1.0, allow_nan=False), min_size=1, max_size=12))
    return [(t, draw(st.integers(0, 4)), draw(st.booleans())) for t in sorted(times)]


@settings(max_examples=120, deadline=None)
@given(
    roles=st.sampled_from([(C, C, C, C, C), (P, P, D, D, D), (P, D, C, C, C)]),
    plan=changes(),
    arrivals=st.lists(st.floats(0.0, 1.0, allow_nan=False), min_size=1, max_size=20),
    interrupting=st.booleans(),
)
def test_no_interleaving_lets_a_request_reach_a_worker_that_is_not_active(
    roles: tuple[Role, ...], plan: list[tuple[float, int, bool]], arrivals: list[float], interrupting: bool
) -> None:
    """ROLL#253: the engine sleeps while the scheduler still thinks that it serves."""

    async def main() -> None:
        port = FakeGeneration()
        router = Router(port, RouterLimits(no_worker_s=30.0))
        everybody = serving_table(roles)
        router.apply(everybody)

        def check(record: FakeRequest) -> None:
            for worker in record.workers:
                row = router.table.rows[worker.id]
                assert row.lifecycle is Lifecycle.ACTIVE
                assert (row.incarnation, row.role) == (worker.incarnation, worker.role)
            assert [w.role for w in record.workers] in ([C], [P, D])

        port.on_dispatch = check

        async def change() -> None:
            for at_s, slot, leaves in plan:
                await asyncio.sleep(max(0.0, at_s - asyncio.get_running_loop().time()))
                table, id_ = router.table, WorkerId(slot)
                active = table.rows[id_].lifecycle is Lifecycle.ACTIVE
                partners = {i for i, row in table.rows.items() if row.role in (P, D)} if roles[slot] is not C else {id_}
                if leaves and active:
                    router.apply(withdraw(table, sorted(partners)))
                    if interrupting:
                        for partner in partners:
                            port.interrupt(partner)
                elif not leaves and not active:
                    back = table.move(sorted(partners), Lifecycle.PENDING_WEIGHTS)
                    router.apply(back.move(sorted(partners), Lifecycle.ACTIVE))
            await asyncio.sleep(max(0.0, 2.0 - asyncio.get_running_loop().time()))
            gone = [i for i, row in router.table.rows.items() if row.lifecycle is Lifecycle.DRAINING]
            router.apply(router.table.move(gone, Lifecycle.PENDING_WEIGHTS).move(gone, Lifecycle.ACTIVE))

        async def arrive(number: int, at_s: float) -> TurnResult:
            await asyncio.sleep(at_s)
            return await router.generate(call(number))

        results, _ = await asyncio.gather(
            asyncio.gather(*(arrive(i, at_s) for i, at_s in enumerate(arrivals))), change()
        )
        for result in results:
            assert_whole(result, 10)
        assert_idle(router)

    run_virtual(main())


# ---- resuming -------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 12), max_size=4),
    how=st.sampled_from(["interrupt", "lost", "transfer", "refused"]),
    paired=st.booleans(),
)
def test_tokens_are_conserved_wherever_a_call_is_cut(cuts: list[int], how: str, paired: bool) -> None:
    """PEARL section 4.5: execution resumes from the partial trajectory."""

    async def main() -> None:
        left = list(cuts)
        error = {
            "lost": WorkerLostError("gone"),
            "transfer": TransferError("link"),
            "refused": ConnectionError("refused"),
        }.get(how)

        def cut(record: FakeRequest) -> None:
            if left and len(record.tokens) >= left[0]:
                left.pop(0)
                if error is not None:
                    raise error
                record.interrupted = True

        port = FakeGeneration(before_token=cut)
        router = Router(port, RouterLimits(retry_s=0.01, serving=ServingLimits(probe_s=0.1)))
        router.apply(serving_table([P, D] * 8 if paired else [C] * 8))
        router.begin(TrajectoryId("t00000000"))
        result = await router.generate(call(tokens=12))
        assert_whole(result, 12)
        assert result.finish is Finish.LENGTH
        sent = [record.request for record in port.requests]
        assert len({request.rid for request in sent}) == len(sent)
        assert len({len(request.rid) for request in sent}) == 1
        for request in sent:
            assert list(request.prompt) == [*PROMPT, *continuation(PROMPT, request.position)]
            assert request.position + request.max_new_tokens == 12
        router.end(TrajectoryId("t00000000"))
        await router.settle()
        assert_idle(router)

    run_virtual(main())


def test_what_is_left_to_generate_does_not_depend_on_the_prompt() -> None:
    """verl#7207: 3000 of 4096 tokens generated after a prompt of 1200 leave 1096."""

    async def main() -> None:
        def cut(record: FakeRequest) -> None:
            record.interrupted = len(port.requests) == 1 and len(record.tokens) == 3000

        port = FakeGeneration(before_token=cut, token_s=0.0001)
        router = Router(port)
        router.apply(serving_table([C, C]))
        await router.generate(call(tokens=4096, prompt=(7,) * 1200))
        assert [record.request.max_new_tokens for record in port.requests] == [4096, 1096]
        assert len(port.requests[1].request.prompt) == 4200

    run_virtual(main())


@pytest.mark.parametrize(
    ("keep", "spans"),
    [(True, (WeightSpan(2, 2), WeightSpan(4, 2), WeightSpan(6, 8))), (False, (WeightSpan(6, 12),))],
)
def test_spans_name_the_version_of_every_token(keep: bool, spans: tuple[WeightSpan, ...]) -> None:
    """slime#2092: 2 + 2 + 8 tokens of versions 2, 4 and 6; without partial responses, 12 of version 6."""

    async def main() -> None:
        def advance(record: FakeRequest) -> None:
            if len(record.tokens) == 2 and port.versions[WorkerId(0)] < 6:
                record.interrupted = True
                port.versions[WorkerId(0)] += 2

        port = FakeGeneration(before_token=advance)
        port.versions = {WorkerId(0): 2}
        router = Router(port, RouterLimits(keep_partial=keep))
        router.apply(serving_table([C], version=2))
        result = await router.generate(call(tokens=12))
        assert_whole(result, 12)
        assert result.spans == spans
        assert result.interruptions == router.statistics.interrupted == 2
        assert router.statistics.discarded_tokens == (0 if keep else 4)

    run_virtual(main())


def test_a_version_never_goes_back_within_a_trajectory() -> None:
    """A worker with older weights, above the floor, takes no trajectory that has newer tokens already."""

    async def main() -> None:
        port = FakeGeneration()
        router = Router(port)
        table = serving_table([C, C], version=5).publish(6)
        router.apply(table.report(WorkerId(0), 6))
        port.versions = {WorkerId(0): 6, WorkerId(1): 5}
        trajectory = TrajectoryId("t00000000")
        router.begin(trajectory)
        assert (await router.generate(call(0))).spans == (WeightSpan(6, 10),)
        # Worker 0 leaves; worker 1 reports version 6 two seconds later.
        router.apply(withdraw(router.table, [0]))

        async def renew() -> None:
            await asyncio.sleep(2.0)
            port.versions[WorkerId(1)] = 6
            router.apply(router.table.report(WorkerId(1), 6))

        result, _ = await asyncio.gather(router.generate(call(0, 1)), renew())
        assert result.spans == (WeightSpan(6, 10),)
        assert result.queue_s == pytest.approx(2.0)
        assert router.statistics.waits == 1
        assert router.statistics.version_regressions == 0

    run_virtual(main())


def test_a_response_is_cut_where_its_version_would_go_back() -> None:
    async def main() -> None:
        port = FakeGeneration()
        router = Router(port)
        router.apply(serving_table([C, C], version=6))
        port.versions = {WorkerId(0): 6, WorkerId(1): 6}

        def regress(record: FakeRequest) -> None:
            if len(port.requests) == 1:
                port.versions[WorkerId(0)] = 6 if len(record.tokens) < 4 else 5

        port.before_token = regress
        result = await router.generate(call())
        assert_whole(result, 10)
        assert result.spans == (WeightSpan(6, 10),)
        assert router.statistics.version_regressions == 1
        assert port.requests[1].request.position == 4
        await router.settle()
        assert port.aborted == [(WorkerId(0), "t00000000.0000.001")]

    run_virtual(main())


def test_a_response_whose_end_was_lost_with_its_worker_is_not_continued() -> None:
    """The last token arrived, the answer did not: nothing may be generated after a stop token."""

    async def main(stop: tuple[int, ...], tokens: int) -> tuple[TurnResult, int]:
        class LosesAnswers(FakeGeneration):
            async def generate(self, worker: Worker, request: GenerateRequest, on_chunk: OnChunk) -> GenerateResult:
                await super().generate(worker, request, on_chunk)
                raise WorkerLostError("gone", worker.id)

        port = LosesAnswers()
        router = Router(port)
        router.apply(serving_table([C, C]))
        result = await router.generate(
            ModelCall(
                trajectory=TrajectoryId("t00000000"),
                turn=0,
                prompt=PROMPT,
                max_new_tokens=tokens,
                sampling=Sampling(stop_token_ids=stop),
            )
        )
        return result, len(port.requests)

    stop = continuation(PROMPT, 5)[-1]
    result, requests = run_virtual(main((stop,), 10))
    assert (result.finish, requests) == (Finish.STOP, 1)
    assert_whole(result, 5)
    result, requests = run_virtual(main((), 7))
    assert (result.finish, requests) == (Finish.LENGTH, 1)
    assert_whole(result, 7)


# ---- one owner ------------------------------------------------------------------------------------------------------


class Scripted:
    """A port whose answers a test writes by hand."""

    def __init__(self) -> None:
        self.calls: list[tuple[Worker, GenerateRequest, OnChunk, asyncio.Future[GenerateResult]]] = []
        self.aborted: list[str] = []
        self.abort_error: Exception | None = None

    async def generate(self, worker: Worker, request: GenerateRequest, on_chunk: OnChunk) -> GenerateResult:
        answer: asyncio.Future[GenerateResult] = asyncio.get_running_loop().create_future()
        self.calls.append((worker, request, on_chunk, answer))
        return await answer

    async def generate_pair(
        self, prefill: Worker, decode: Worker, request: GenerateRequest, on_chunk: OnChunk
    ) -> GenerateResult:
        return await self.generate(decode, request, on_chunk)

    async def abort(self, worker: Worker, rid: str) -> None:
        self.aborted.append(rid)
        if self.abort_error is not None:
            raise self.abort_error


def chunk(tokens: list[int], offset: int = -1, version: int = 0) -> TokenChunk:
    return TokenChunk(tokens, [logprob(token) for token in tokens], version, offset)


def whole(tokens: list[int], finish: Finish = Finish.LENGTH) -> GenerateResult:
    return GenerateResult(
        finish=finish,
        tokens=tokens,
        logprobs=[logprob(token) for token in tokens],
        spans=(WeightSpan(0, len(tokens)),),
    )


def test_a_late_answer_of_the_old_owner_is_discarded() -> None:
    """slime#2340: the abort was ignored, the old request decodes on, a duplicate starts."""

    async def main() -> None:
        port = Scripted()
        router = Router(port, RouterLimits(lost_grace_s=1.0))
        table = serving_table([C, C])
        router.apply(table)
        expected = continuation(PROMPT, 10)
        running = asyncio.create_task(router.generate(call()))
        await asyncio.sleep(0)
        _, _, old_chunk, old_answer = port.calls[0]
        old_chunk(chunk(expected[:3]))
        router.apply(withdraw(table, [0], Lifecycle.FAILED))
        await asyncio.sleep(1.5)
        # The hung call was given up and goes on elsewhere from three tokens.
        worker, request, new_chunk, new_answer = port.calls[1]
        assert (worker.id, request.position) == (1, 3)
        old_chunk(chunk([4242, 4243]))
        assert old_answer.cancelled()
        new_chunk(chunk(expected[3:]))
        new_answer.set_result(whole(expected[3:]))
        assert_whole(await running, 10)
        assert router.statistics.late_tokens == 2
        assert router.statistics.lost == 1
        assert_idle(router)

    run_virtual(main())


def test_an_answer_that_comes_within_the_grace_is_kept() -> None:
    async def main() -> None:
        port = Scripted()
        router = Router(port, RouterLimits(lost_grace_s=1.0))
        table = serving_table([C, C])
        router.apply(table)
        running = asyncio.create_task(router.generate(call()))
        await asyncio.sleep(0)
        router.apply(withdraw(table, [0], Lifecycle.FAILED))
        await asyncio.sleep(0.5)
        port.calls[0][3].set_result(whole(continuation(PROMPT, 10)))
        assert_whole(await running, 10)
        await asyncio.sleep(5)
        assert (len(port.calls), router.statistics.lost) == (1, 0)

    run_virtual(main())


def test_a_repeated_delivery_is_dropped() -> None:
    async def main() -> None:
        port = Scripted()
        router = Router(port)
        router.apply(serving_table([C, C]))
        expected = continuation(PROMPT, 10)
        running = asyncio.create_task(router.generate(call()))
        await asyncio.sleep(0)
        _, _, on_chunk, answer = port.calls[0]
        on_chunk(chunk(expected[:4], 0))
        on_chunk(chunk(expected[:4], 0))
        on_chunk(chunk(expected[2:6], 2))
        on_chunk(chunk(expected[8:9], 8))
        answer.set_exception(WorkerLostError("gone"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        # Six tokens arrived; the ninth came after a gap and is not believed.
        assert port.calls[1][1].position == 6
        port.calls[1][3].set_result(whole(expected[6:]))
        assert_whole(await running, 10)
        assert router.statistics.duplicate_tokens == 6

    run_virtual(main())


def test_tokens_delivered_twice_without_offsets_are_counted_once_by_the_answer() -> None:
    async def main() -> None:
        port = Scripted()
        router = Router(port)
        router.apply(serving_table([C]))
        expected = continuation(PROMPT, 10)
        running = asyncio.create_task(router.generate(call()))
        await asyncio.sleep(0)
        _, _, on_chunk, answer = port.calls[0]
        on_chunk(chunk(expected))
        on_chunk(chunk(expected[-2:]))
        answer.set_result(whole(expected))
        assert_whole(await running, 10)
        assert router.statistics.duplicate_tokens == 2

    run_virtual(main())


def test_a_stale_token_spoils_an_answer_that_says_nothing_of_it() -> None:
    async def main() -> None:
        port = Scripted()
        router = Router(port)
        router.apply(serving_table([C, C], version=57).raise_floor(57))
        expected = continuation(PROMPT, 10)
        running = asyncio.create_task(router.generate(call()))
        await asyncio.sleep(0)
        port.calls[0][3].set_result(dataclasses.replace(whole(expected), spans=(WeightSpan(57, 10),)))
        port.calls[0][2](chunk(expected, version=56))
        await asyncio.sleep(0.1)
        assert port.calls[1][0].id == 1
        assert port.calls[1][1].position == 0
        port.calls[1][3].set_result(dataclasses.replace(whole(expected), spans=(WeightSpan(57, 10),)))
        assert_whole(await running, 10)
        assert router.statistics.stale_served == 1

    run_virtual(main())


def test_an_abort_that_fails_is_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    """slime#2340: an abort answered with 404 is a failure, not silence."""

    async def main() -> None:
        port = Scripted()
        port.abort_error = WorkerError("404")
        router = Router(port)
        router.apply(serving_table([C]))
        running = asyncio.create_task(router.generate(call()))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await router.settle()
        assert port.aborted == ["t00000000.0000.001"]
        assert router.statistics.abort_failures == 1
        assert_idle(router)

    run_virtual(main())
    assert "did not abort" in caplog.text


def test_a_malformed_answer_never_becomes_data() -> None:
    async def main() -> None:
        port = Scripted()
        router = Router(port, RouterLimits(max_attempts=2, retry_s=0.01))
        router.apply(serving_table([C]))
        running = asyncio.create_task(router.generate(call()))
        await asyncio.sleep(0)
        port.calls[0][3].set_result(
            GenerateResult(finish=Finish.STOP, tokens=[1, 2], logprobs=[0.0], spans=(WeightSpan(0, 2),))
        )
        await asyncio.sleep(0.1)
        port.calls[1][3].set_result(whole(continuation(PROMPT, 11)))
        with pytest.raises(GenerationFailedError, match="11 tokens, asked for 10"):
            await running
        assert_idle(router)

    run_virtual(main())


# ---- bounded waits and retries --------------------------------------------------------------------------------------


def test_a_failed_attempt_goes_to_another_worker_at_once() -> None:
    """NeMo-RL#3613: a dead worker that holds the prefix is not tried five times first."""

    async def main() -> None:
        port = FakeGeneration()
        router = Router(port)
        router.apply(serving_table([C, C]))
        router.begin(TrajectoryId("t00000000"))
        home = (await router.generate(call())).worker

        def dead(record: FakeRequest) -> None:
            if record.workers[0].id == home:
                raise WorkerError("dead")

        port.before_token = dead
        began_s = asyncio.get_running_loop().time()
        result = await router.generate(call(0, 1))
        assert result.worker != home
        assert result.finished_s - began_s == pytest.approx(2 * 0.05 + 10 * 0.01)
        assert router.statistics.dispatched == 3

    run_virtual(main())


def test_a_lost_worker_gets_nothing_more_and_is_reported_once() -> None:
    faults: list[int] = []

    async def main() -> None:
        port = FakeGeneration()
        router = Router(port, on_fault=lambda worker, cause: faults.append(worker.id))
        router.apply(serving_table([C, C]))
        running = [asyncio.create_task(router.generate(call(i))) for i in range(4)]
        await asyncio.sleep(0.1)
        assert port.lose(0, WorkerLostError("gone")) == 2
        for result in await asyncio.gather(*running):
            assert_whole(result, 10)
        await router.generate(call(8))
        assert served(port)[4:] == [(1,)] * 3
        assert router.statistics.lost == 2

    run_virtual(main())
    assert faults == [0]


def test_of_a_pair_only_the_lost_worker_is_fenced() -> None:
    faults: list[int] = []

    async def main() -> None:
        port = FakeGeneration()
        router = Router(port, on_fault=lambda worker, cause: faults.append(worker.id))
        router.apply(serving_table([P, D, D]))
        running = asyncio.create_task(router.generate(call()))
        await asyncio.sleep(0.1)
        port.lose(1, WorkerLostError("gone", WorkerId(1)))
        assert_whole(await running, 10)
        await router.generate(call(1))
        assert served(port) == [(0, 1), (0, 2), (0, 2)]

    run_virtual(main())
    assert faults == [1]


def test_a_planned_departure_is_no_fault() -> None:
    faults: list[int] = []

    async def main() -> None:
        port = FakeGeneration()
        router = Router(port, on_fault=lambda worker, cause: faults.append(worker.id))
        table = serving_table([C, C])
        router.apply(table)
        running = asyncio.create_task(router.generate(call()))
        await asyncio.sleep(0.1)
        router.apply(withdraw(table, [0]))
        port.lose(0, WorkerLostError("killed at its deadline"))
        assert_whole(await running, 10)

    run_virtual(main())
    assert faults == []


def test_attempts_are_bounded_and_the_last_cause_is_named() -> None:
    async def main() -> None:
        def refuse(record: FakeRequest) -> None:
            raise ConnectionError("refused")

        port = FakeGeneration(before_token=refuse)
        router = Router(port, RouterLimits(max_attempts=5))
        router.apply(serving_table([C, C]))
        with pytest.raises(GenerationFailedError, match=r"5 attempts in a row .* ConnectionError: refused") as failed:
            await router.generate(call())
        assert failed.value.cause is FailureCause.ATTEMPTS_FAILED
        assert router.statistics.dispatched == 5
        await router.settle()
        assert_idle(router)

    run_virtual(main())


def test_progress_resets_the_count_of_failures() -> None:
    async def main() -> None:
        def one_token_each(record: FakeRequest) -> None:
            if record.tokens:
                raise TransferError("link")

        port = FakeGeneration(before_token=one_token_each)
        router = Router(port, RouterLimits(max_attempts=2, serving=ServingLimits(failures_to_block=1000)))
        router.apply(serving_table([C, C]))
        assert_whole(await router.generate(call()), 10)
        assert router.statistics.transfer_retries == 9

    run_virtual(main())


def test_a_worker_that_interrupts_everything_does_not_spin_for_ever() -> None:
    async def main() -> None:
        def interrupt(record: FakeRequest) -> None:
            record.interrupted = True

        port = FakeGeneration(before_token=interrupt, prefill_s=0.0)
        router = Router(port, RouterLimits(max_attempts=4))
        router.apply(serving_table([C]))
        with pytest.raises(GenerationFailedError):
            await router.generate(call())
        assert router.statistics.interrupted == 4

    run_virtual(main())


def test_nobody_serving_is_waited_for_within_a_limit_and_named() -> None:
    """verl#4896: every wait has a deadline."""

    async def main() -> None:
        port = FakeGeneration()
        router = Router(port, RouterLimits(no_worker_s=30.0))
        table = serving_table([C])
        router.apply(withdraw(table, [0]))
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(GenerationFailedError, match="1 colocated draining") as failed:
            await router.generate(call())
        assert failed.value.cause is FailureCause.NO_WORKER
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(30.0)
        assert router.statistics.given_up == 1
        assert_idle(router)

    run_virtual(main())


def test_waiting_calls_go_on_as_soon_as_the_table_lets_them() -> None:
    async def main() -> None:
        port = FakeGeneration()
        router = Router(port)
        waiting = [asyncio.create_task(router.generate(call(i))) for i in range(5)]
        await asyncio.sleep(10)
        router.apply(serving_table([P, D]))
        for task in waiting:
            result = await task
            assert_whole(result, 10)
            assert result.queue_s == pytest.approx(10)
        assert (router.statistics.waits, router.statistics.wait_s) == (5, pytest.approx(50))

    run_virtual(main())


def test_an_attempt_without_tokens_for_too_long_is_given_up_and_resumed() -> None:
    """prime-rl#3211: a client never waits for ever for an engine that idles."""

    async def main() -> None:
        port = FakeGeneration()
        router = Router(port, RouterLimits(stall_s=20.0))
        router.apply(serving_table([C, C]))

        def stall(record: FakeRequest) -> None:
            port.token_s = 1e6 if len(port.requests) == 1 and len(record.tokens) == 3 else 0.01

        port.before_token = stall
        result = await router.generate(call())
        assert_whole(result, 10)
        assert result.finished_s == pytest.approx(20.0, abs=1.0)
        assert router.statistics.stalled == 1
        assert port.requests[1].request.position == 4
        await router.settle()
        assert port.aborted == [(WorkerId(0), "t00000000.0000.001")]
        assert_idle(router)

    run_virtual(main())


def test_a_slow_but_moving_attempt_is_left_alone() -> None:
    async def main() -> None:
        port = FakeGeneration(token_s=15.0)
        router = Router(port, RouterLimits(stall_s=20.0))
        router.apply(serving_table([C]))
        assert_whole(await router.generate(call()), 10)
        assert (router.statistics.stalled, router.statistics.dispatched) == (0, 1)

    run_virtual(main())


# ---- the gate -------------------------------------------------------------------------------------------------------


def test_draining_ends_in_time_while_calls_keep_coming() -> None:
    """verl#7511: one call a second during a drain of at most 5 s; late calls are parked, not lost."""

    async def main() -> None:
        port = FakeGeneration(token_s=3.0)
        router = Router(port)
        router.apply(serving_table([C, C]))

        async def submit(number: int) -> TurnResult:
            await asyncio.sleep(number)
            return await router.generate(call(number))

        submitted = [asyncio.create_task(submit(i)) for i in range(10)]
        await asyncio.sleep(3.5)
        began_s = asyncio.get_running_loop().time()
        cut = await router.drain(5.0)
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(5.0)
        assert cut == 4
        assert not any(router.loads().values())
        dispatched = router.statistics.dispatched
        await asyncio.sleep(10)
        assert router.statistics.dispatched == dispatched
        router.open()
        for task in submitted:
            assert_whole(await task, 10)
        await router.settle()
        assert_idle(router)

    run_virtual(main())


def test_draining_an_idle_router_returns_at_once() -> None:
    async def main() -> None:
        router = Router(FakeGeneration())
        assert await router.drain(5.0) == 0
        assert asyncio.get_running_loop().time() == 0

    run_virtual(main())


def test_a_closed_router_fails_what_is_parked() -> None:
    async def main() -> None:
        router = Router(FakeGeneration())
        waiting = asyncio.create_task(router.generate(call()))
        await asyncio.sleep(1)
        await router.aclose()
        with pytest.raises(GenerationFailedError) as failed:
            await waiting
        assert failed.value.cause is FailureCause.CLOSED

    run_virtual(main())


# ---- accounting -----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), paired=st.booleans())
def test_permits_are_back_after_any_mixture_of_failures(seed: int, paired: bool) -> None:
    """NeMo-RL#3589: parked rollouts held their permits for ever."""

    async def main() -> None:
        chance = random.Random(seed)

        def fault(record: FakeRequest) -> None:
            draw = chance.random()
            if draw < 0.02:
                raise WorkerLostError("gone", record.workers[-1].id)
            if draw < 0.04:
                raise TransferError("link")
            if draw < 0.06:
                raise ConnectionError("refused")
            if draw < 0.08:
                record.interrupted = True

        port = FakeGeneration(before_token=fault)
        router = Router(port, RouterLimits(no_worker_s=5.0))
        router.apply(serving_table([P, D] * 4 if paired else [C] * 8))
        tasks = []
        for i in range(20):
            router.begin(TrajectoryId(f"t{i:08d}"))
            tasks.append(asyncio.create_task(router.generate(call(i))))
        await asyncio.sleep(0.08)
        for task in tasks[::5]:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, TurnResult):
                assert_whole(result, 10)
            else:
                assert isinstance(result, GenerationFailedError | asyncio.CancelledError)
        for i in range(20):
            router.end(TrajectoryId(f"t{i:08d}"))
        await router.settle()
        assert_idle(router)

    run_virtual(main())


def test_cancelling_a_call_cancels_only_that_call() -> None:
    async def main() -> None:
        port = FakeGeneration()
        router = Router(port)
        router.apply(serving_table([C]))
        first, second = (asyncio.create_task(router.generate(call(i))) for i in range(2))
        await asyncio.sleep(0.1)
        first.cancel()
        assert_whole(await second, 10)
        assert first.cancelled()
        await router.settle()
        assert port.aborted == [(WorkerId(0), "t00000000.0000.001")]
        assert_idle(router)

    run_virtual(main())


def test_a_cancellation_is_not_lost_in_an_attempt_that_is_given_up_at_the_same_moment() -> None:
    async def main() -> None:
        port = Scripted()
        router = Router(port, RouterLimits(lost_grace_s=0.0))
        table = serving_table([C, C])
        router.apply(table)
        running = asyncio.create_task(router.generate(call()))
        await asyncio.sleep(0)
        router.apply(withdraw(table, [0], Lifecycle.FAILED))
        asyncio.get_running_loop().call_later(0.0, running.cancel)
        with pytest.raises(asyncio.CancelledError):
            await running
        await router.settle()
        assert_idle(router)

    run_virtual(main())


def test_a_timeout_around_a_call_still_works() -> None:
    async def main() -> None:
        port = FakeGeneration(token_s=100.0)
        router = Router(port, RouterLimits(stall_s=30.0))
        router.apply(serving_table([C]))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(45.0):
                await router.generate(call())
        assert router.statistics.stalled == 1
        await router.settle()
        assert_idle(router)

    run_virtual(main())


def test_concurrency_gives_the_bubble_ratio() -> None:
    """PEARL eq. (2): θ = (1 − f)/f with f the mean fraction of trajectories that decode."""

    async def main() -> None:
        port = FakeGeneration(prefill_s=0.5, token_s=0.1)
        router = Router(port)
        router.apply(serving_table([C, C]))

        async def play(number: int) -> None:
            trajectory = TrajectoryId(f"t{number:08d}")
            router.begin(trajectory)
            await router.generate(call(number))
            await asyncio.sleep(0.5)
            router.end(trajectory)

        before = router.concurrency()
        await asyncio.gather(*(play(i) for i in range(4)))
        seen = router.concurrency() - before
        # Each: 0.5 s prefill, 1.0 s decode, 0.5 s environment.
        assert seen.elapsed_s == pytest.approx(2.0)
        assert seen.in_flight_s == pytest.approx(8.0)
        assert seen.generating_s == pytest.approx(6.0)
        assert seen.decoding_s == pytest.approx(4.0)
        assert seen.bubble_ratio == pytest.approx(1.0)

    run_virtual(main())


def test_decode_time_counts_also_where_tokens_come_only_with_the_answer() -> None:
    async def main() -> None:
        port = FakeGeneration(prefill_s=0.5, token_s=0.1)
        port.stream = False
        router = Router(port)
        router.apply(serving_table([C]))
        await router.generate(call())
        assert router.concurrency().decoding_s == pytest.approx(1.0)

    run_virtual(main())


def test_loads_tell_what_each_worker_holds() -> None:
    async def main() -> None:
        port = FakeGeneration(prefill_s=1.0)
        router = Router(port)
        router.apply(serving_table([P, D]))
        router.begin(TrajectoryId("t00000000"))
        running = asyncio.create_task(router.generate(call()))
        await asyncio.sleep(0.5)
        prefill, decode = router.worker_loads()[WorkerId(0)], router.worker_loads()[WorkerId(1)]
        assert (prefill.running, prefill.waiting, prefill.tokens) == (0, 1, 20)
        assert (decode.running, decode.waiting, decode.tokens) == (0, 1, 20)
        await asyncio.sleep(0.55)
        prefill, decode = router.worker_loads()[WorkerId(0)], router.worker_loads()[WorkerId(1)]
        assert (prefill.running, prefill.waiting, prefill.tokens) == (0, 0, 0)
        assert (decode.running, decode.waiting, decode.tokens) == (1, 0, 20)
        assert router.loads() == {0: 0.0, 1: 1.0}
        await running

    run_virtual(main())


def test_a_parked_worker_keeps_its_prefixes_and_a_restarted_one_does_not() -> None:
    async def main(restart: bool) -> int:
        port = FakeGeneration()
        router = Router(port)
        table = serving_table([C, C])
        router.apply(table)
        router.begin(TrajectoryId("t00000000"))
        assert (await router.generate(call())).worker == 0
        if restart:
            table = withdraw(withdraw(table, [0]), [0], Lifecycle.VACANT)
            router.apply(table)
            router.apply(admit(table, [0]))
        else:
            table = withdraw(table, [0])
            router.apply(table)
            router.apply(table.move([WorkerId(0)], Lifecycle.PENDING_WEIGHTS).move([WorkerId(0)], Lifecycle.ACTIVE))
        return router.worker_loads()[WorkerId(0)].cached_tokens

    assert run_virtual(main(False)) == len(PROMPT)
    assert run_virtual(main(True)) == 0


def test_new_weights_and_a_new_role_void_the_cached_prefixes() -> None:
    """radixark/miles#2782: the prefix cache served KV of weights that were 17 updates old."""

    async def main() -> None:
        router = Router(FakeGeneration())
        table = serving_table([C, C, C])
        router.apply(table)
        router.begin(TrajectoryId("t00000000"))
        home = (await router.generate(call())).worker
        assert router.worker_loads()[home].cached_tokens == len(PROMPT)
        table = table.publish(1).report(home, 1)
        router.apply(table)
        assert router.worker_loads()[home].cached_tokens == 0
        await router.generate(call(0, 1))
        assert router.worker_loads()[home].cached_tokens == len(PROMPT)
        table = withdraw(table, [home])
        router.apply(table)
        table = table.move([home], Lifecycle.SWITCHING).set_roles({home: D})
        router.apply(table)
        assert home not in router.worker_loads()

    run_virtual(main())


def test_a_restarted_worker_is_another_one_than_the_one_that_was_lost() -> None:
    """radixark/miles#692: the same address, registered again, stayed among the dead."""

    async def main() -> None:
        port = FakeGeneration()
        router = Router(port)
        table = serving_table([C, C])
        router.apply(table)
        running = asyncio.create_task(router.generate(call()))
        await asyncio.sleep(0.1)
        port.lose(0, WorkerLostError("gone"))
        await running
        # Still active by the table, and yet it gets nothing.
        await asyncio.gather(*(router.generate(call(i)) for i in range(4)))
        assert set(served(port)[1:]) == {(1,)}
        table = withdraw(withdraw(table, [0], Lifecycle.FAILED), [0], Lifecycle.VACANT)
        router.apply(table)
        router.apply(admit(table, [0]))
        assert router.table.rows[WorkerId(0)].incarnation == 2
        await asyncio.gather(*(router.generate(call(i)) for i in range(4)))
        assert served(port)[-4:].count((0,)) == 2

    run_virtual(main())


def test_a_thousand_calls_at_once_never_stall_in_the_router() -> None:
    """prime-rl#3211: 768 + 500 calls over 4 replicas timed out in the router while the engines idled."""

    async def main() -> None:
        port = FakeGeneration(prefill_s=1.0, token_s=1.0)
        router = Router(port, RouterLimits(stall_s=30.0))
        router.apply(serving_table([C] * 4))
        await asyncio.gather(*(router.generate(call(i, tokens=3)) for i in range(1268)))
        assert all(record.at_s == 0.0 for record in port.requests)
        assert {served(port).count((i,)) for i in range(4)} == {317}
        assert asyncio.get_running_loop().time() == pytest.approx(4.0)
        assert (router.statistics.stalled, router.statistics.waits) == (0, 0)

    run_virtual(main())


def test_borrowed_workers_are_noticed_over_an_interval() -> None:
    async def main() -> None:
        router = Router(FakeGeneration())
        table = serving_table([C], zone=Zone.OVERLAP)
        router.apply(table)
        assert router.take_borrowed()
        assert router.take_borrowed()
        router.apply(withdraw(table, [0]))
        assert router.take_borrowed()
        assert not router.take_borrowed()

    run_virtual(main())


# --- many workers ----------------------------------------------------------------------------------------------------


def test_beyond_64_workers_calls_spread_evenly_stay_at_home_and_find_the_only_one_left() -> None:
    serving = ServingSet(ServingLimits())
    slots = [
        Slot(worker=Worker(id=WorkerId(i), gpus=frozenset({i}), role=C, zone=Zone.DEDICATED), share=1.0, version=0)
        for i in range(200)
    ]
    serving.colocated, serving._members = slots, frozenset(slots)
    for number in range(2000):
        home = Home(f"t{number}")
        route = serving.choose(home, 100, 0.0)
        assert route is not None
        route.decode.running += 1
        home.move(route, 100)
        assert serving.choose(home, 100, 0.0) == route
    assert max(slot.running for slot in slots) <= 13
    assert min(slot.running for slot in slots) >= 7
    for slot in slots[:150] + slots[151:]:
        slot.fenced = True
    assert serving.choose(Home("last"), 100, 0.0).decode is slots[150]
