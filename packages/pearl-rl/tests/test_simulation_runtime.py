"""The simulated runtime keeps the contract of the ports: partial tokens, versions, losses, memory, and times."""

import asyncio
from dataclasses import replace

import pytest

from pearl_executor.ports import Finish, GenerateRequest, WeightSnapshot, WorkerError, WorkerLostError
from pearl_executor.virtual_time import run_virtual
from pearl_planner.catalog import find_gpu, find_model
from pearl_rl.simulation.kernels import WorkerCosts
from pearl_rl.simulation.links import KvLinks
from pearl_rl.simulation.requests import SimulatedEngineLimits
from pearl_rl.simulation.runtime import Conversation, SimulatedRuntime
from pearl_rl.simulation.times import ReconfigurationTimes
from pearl_state.roles import Role, Zone
from pearl_state.worker import GpuId, Worker, WorkerId

COSTS = WorkerCosts(find_model("qwen3-8b"), find_gpu("h800"), 2)
KV_BYTES = 147_456.0
TIMES = ReconfigurationTimes(warm_s=0.0)


def worker(id_=0, role=Role.COLOCATED, incarnation=1, zone=Zone.DEDICATED) -> Worker:
    return Worker(id=WorkerId(id_), gpus=frozenset({GpuId(2 * id_)}), role=role, zone=zone, incarnation=incarnation)


def call(rid="t1.0.1", prompt=1000, new=100, affinity="t1", position=0) -> GenerateRequest:
    return GenerateRequest(rid=rid, prompt=range(prompt), max_new_tokens=new, affinity=affinity, position=position)


class Lab:
    """A runtime with workers that are up."""

    def __init__(self, **options) -> None:
        self.conversations: dict[str, Conversation] = {}
        self.runtime = SimulatedRuntime(
            costs=COSTS,
            limits=SimulatedEngineLimits(kv_tokens=200_000),
            times=options.get("times", TIMES),
            links=KvLinks(options.get("bytes_per_s", 100e9)),
            kv_bytes_per_token=KV_BYTES,
            conversations=self.conversations,
        )
        self.chunks = []

    async def up(self, *workers, version=1) -> None:
        await asyncio.gather(*(self.runtime.start(w) for w in workers))
        await asyncio.gather(*(self.runtime.load_weights(w, WeightSnapshot(version, "s")) for w in workers))

    def chunk(self, chunk) -> None:
        self.chunks.append(chunk)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_colocated_call_takes_prefill_and_decode_and_delivers_every_token_once() -> None:
    async def main():
        lab = Lab()
        await lab.up(worker())
        began_s = now()
        result = await lab.runtime.generate(worker(), call(prompt=2000, new=64), lab.chunk)
        took_s = now() - began_s
        prefill_s = COSTS.prefill_s([(2000, 0)], 1)
        assert took_s == pytest.approx(prefill_s + COSTS.decode_curve(1).run_s(2001, 63))
        assert result.prefill_s == pytest.approx(prefill_s)
        assert result.decode_s == pytest.approx(took_s - prefill_s)
        assert result.queue_s == 0
        assert result.finish is Finish.LENGTH
        assert result.tokens == range(2000, 2064)
        assert len(result.logprobs) == 64
        assert [s.tokens for s in result.spans] == [64]
        assert sum(len(c.tokens) for c in lab.chunks) == 64
        assert [c.offset for c in lab.chunks] == [0, 1]

    run_virtual(main())


def test_a_pair_adds_the_hand_over_and_sends_only_what_the_decode_side_lacks() -> None:
    async def main():
        lab = Lab(bytes_per_s=1e9)
        p, d = worker(0, Role.PREFILL), worker(1, Role.DECODE)
        await lab.up(p, d)
        result = await lab.runtime.generate_pair(p, d, call(prompt=4000, new=50), lab.chunk)
        assert result.transfer_s == pytest.approx(4000 * KV_BYTES / 1e9 + 2e-3)
        assert result.prefill_s == pytest.approx(COSTS.prefill_s([(4000, 0)], 1))
        assert result.decode_s == pytest.approx(COSTS.decode_curve(1).run_s(4001, 49))
        again = await lab.runtime.generate_pair(p, d, call("t1.1.1", prompt=4550, new=5), lab.chunk)
        assert again.cached_tokens == 4000, "the prefill side never saw the response"
        assert again.transfer_s == pytest.approx((4550 - 4049) * KV_BYTES / 1e9 + 2e-3)

    run_virtual(main())


def test_transfers_of_one_sender_wait_for_each_other() -> None:
    async def main():
        lab = Lab(bytes_per_s=1e9)
        p, d, e = worker(0, Role.PREFILL), worker(1, Role.DECODE), worker(2, Role.DECODE)
        await lab.up(p, d, e)
        calls = [
            lab.runtime.generate_pair(p, to, call(f"t{i}.0.1", prompt=4000, new=2, affinity=f"t{i}"), lab.chunk)
            for i, to in enumerate((d, e))
        ]
        first, second = await asyncio.gather(*calls)
        # The second prompt is prefilled while the first one's KV is on its way.
        prefill_s = COSTS.prefill_s([(4000, 0)], 1)
        alone_s = 4000 * KV_BYTES / 1e9 + 2e-3
        assert first.transfer_s == pytest.approx(alone_s)
        assert second.transfer_s == pytest.approx(2 * alone_s - prefill_s, rel=0.02)

    run_virtual(main())


def test_an_interrupted_call_returns_its_tokens_and_goes_on_elsewhere() -> None:
    async def main():
        lab = Lab()
        await lab.up(worker(0), worker(1))
        running = asyncio.ensure_future(lab.runtime.generate(worker(0), call(new=1000), lab.chunk))
        await asyncio.sleep(2.0)
        assert await lab.runtime.interrupt(worker(0)) == 1
        partial = await running
        await lab.runtime.wait_idle(worker(0))
        count = len(partial.tokens)
        assert partial.finish is Finish.INTERRUPTED
        assert 200 < count < 600
        rest = await lab.runtime.generate(
            worker(1), call("t1.0.2", prompt=1000 + count, new=1000 - count, position=count), lab.chunk
        )
        assert rest.tokens.start == partial.tokens.stop
        assert count + len(rest.tokens) == 1000

    run_virtual(main())


@pytest.mark.parametrize("victim", [0, 1])
def test_either_side_of_a_pair_can_be_interrupted_at_any_time_and_both_are_free_then(victim) -> None:
    async def main(at_s):
        lab = Lab(bytes_per_s=2e9)
        p, d = worker(0, Role.PREFILL), worker(1, Role.DECODE)
        await lab.up(p, d)
        running = asyncio.ensure_future(lab.runtime.generate_pair(p, d, call(prompt=9000, new=300), lab.chunk))
        await asyncio.sleep(at_s)
        await lab.runtime.interrupt((p, d)[victim])
        for w in (p, d):
            await asyncio.wait_for(lab.runtime.wait_idle(w), 5.0)
        result = await asyncio.wait_for(running, 5.0)
        return result.finish, len(result.tokens), sum(len(c.tokens) for c in lab.chunks)

    for at_s in (0.01, 0.14, 0.3, 0.6, 0.9, 1.5):
        finish, tokens, delivered = run_virtual(main(at_s))
        assert tokens == delivered
        assert finish is Finish.INTERRUPTED or tokens == 300


def test_what_a_prefill_worker_was_sending_when_it_was_interrupted_never_arrives() -> None:
    async def main():
        lab = Lab(bytes_per_s=1e9)
        p, d = worker(0, Role.PREFILL), worker(1, Role.DECODE)
        await lab.up(p, d)
        running = asyncio.ensure_future(lab.runtime.generate_pair(p, d, call(prompt=4000, new=1), lab.chunk))
        await asyncio.sleep(COSTS.prefill_s([(4000, 0)], 1) + 0.01)
        await lab.runtime.interrupt(p)
        result = await running
        assert result.finish is Finish.INTERRUPTED
        assert len(result.tokens) == 0
        await asyncio.sleep(60.0)
        assert lab.chunks == []
        assert (await lab.runtime.samples(d)).generated_tokens == 0
        whole = await lab.runtime.generate_pair(p, d, call("t1.0.2", prompt=4000, new=5), lab.chunk)
        assert len(whole.tokens) == 5

    run_virtual(main())


def test_a_killed_worker_fails_its_calls_and_names_itself() -> None:
    async def main():
        lab = Lab()
        p, d = worker(0, Role.PREFILL), worker(1, Role.DECODE)
        await lab.up(p, d)
        running = asyncio.ensure_future(lab.runtime.generate_pair(p, d, call(prompt=9000, new=300), lab.chunk))
        await asyncio.sleep(0.01)
        await lab.runtime.kill(p)
        with pytest.raises(WorkerLostError) as lost:
            await running
        assert lost.value.worker == 0
        await asyncio.wait_for(lab.runtime.wait_idle(d), 1.0)
        with pytest.raises(WorkerLostError):
            await lab.runtime.generate_pair(p, d, call(), lab.chunk)
        await lab.runtime.kill(p)

    run_virtual(main())


def test_newer_weights_split_the_spans_where_they_came_and_pause_generation() -> None:
    async def main():
        lab = Lab()
        await lab.up(worker())
        running = asyncio.ensure_future(lab.runtime.generate(worker(), call(new=2000), lab.chunk))
        await asyncio.sleep(1.0)
        assert await lab.runtime.load_weights(worker(), WeightSnapshot(2, "s")) == 2
        result = await running
        assert [s.version for s in result.spans] == [1, 2]
        assert sum(s.tokens for s in result.spans) == 2000
        busy_s = COSTS.prefill_s([(1000, 0)], 1) + COSTS.decode_curve(1).run_s(1001, 1999)
        assert result.prefill_s + result.decode_s == pytest.approx(busy_s + TIMES.sync_pause_s)

    run_virtual(main())


def test_a_borrowed_worker_gives_its_memory_back_and_takes_it_again() -> None:
    async def main():
        lab = Lab()
        overlap = worker(zone=Zone.OVERLAP)
        await lab.up(overlap)
        before_s = now()
        released = await lab.runtime.release(overlap)
        assert released.after_bytes < 0.05 * released.before_bytes
        with pytest.raises(WorkerError):
            await lab.runtime.release(overlap)
        with pytest.raises(WorkerError):
            await lab.runtime.generate(overlap, call(), lab.chunk)
        await lab.runtime.resume(overlap)
        assert await lab.runtime.load_weights(overlap, WeightSnapshot(1, "s")) == 1
        assert now() - before_s == pytest.approx(TIMES.release_s + TIMES.resume_s + TIMES.sync_s)
        with pytest.raises(WorkerError):
            await lab.runtime.resume(overlap)

    run_virtual(main())


@pytest.mark.parametrize("in_resume", [True, False])
def test_a_resumed_worker_takes_another_role_up_at_once_or_changes_it_as_any_other(in_resume) -> None:
    async def main():
        lab = Lab(times=replace(TIMES, resumes_in_any_role=in_resume))
        overlap = worker(zone=Zone.OVERLAP, role=Role.PREFILL)
        await lab.up(overlap)
        await lab.runtime.release(overlap)
        began_s = now()
        await lab.runtime.resume(overlap)
        await lab.runtime.switch_role(overlap, Role.DECODE)
        assert now() - began_s == pytest.approx(TIMES.resume_s + (0.0 if in_resume else TIMES.flip_s))
        assert (await lab.runtime.samples(overlap)).role is Role.DECODE

    run_virtual(main())


@pytest.mark.parametrize(
    ("before", "after", "seconds"),
    [(Role.PREFILL, Role.DECODE, TIMES.flip_s), (Role.COLOCATED, Role.DECODE, TIMES.relaunch_s)],
)
def test_a_role_changes_on_an_idle_engine_only_and_costs_what_it_costs(before, after, seconds) -> None:
    async def main():
        lab = Lab()
        await lab.up(worker(role=before))
        if before is Role.COLOCATED:
            running = asyncio.ensure_future(lab.runtime.generate(worker(), call(new=200), lab.chunk))
            await asyncio.sleep(0.1)
            with pytest.raises(WorkerError):
                await lab.runtime.switch_role(worker(), after)
            await running
        began_s = now()
        await lab.runtime.switch_role(worker(role=before), after)
        assert now() - began_s == pytest.approx(seconds)
        assert (await lab.runtime.samples(worker())).role is after

    run_virtual(main())


def test_a_shared_first_prompt_is_computed_once_and_a_rewritten_response_again() -> None:
    async def main():
        lab = Lab()
        await lab.up(worker())
        for name in ("t1", "t2"):
            lab.conversations[name] = Conversation(root="task", root_tokens=3000)
        first = await lab.runtime.generate(worker(), call("t1.0.1", 3000, 500, "t1"), lab.chunk)
        second = await lab.runtime.generate(worker(), call("t2.0.1", 3000, 500, "t2"), lab.chunk)
        assert (first.cached_tokens, second.cached_tokens) == (0, 2999)
        lab.conversations["t1"].stable_tokens = 3000
        third = await lab.runtime.generate(worker(), call("t1.1.1", 3600, 10, "t1"), lab.chunk)
        assert third.cached_tokens == 3000

    run_virtual(main())


def test_samples_name_what_was_measured_since_the_last_time() -> None:
    async def main():
        lab = Lab()
        await lab.up(worker())
        await lab.runtime.generate(worker(), call(prompt=2000, new=64), lab.chunk)
        samples = await lab.runtime.samples(worker())
        assert [(s.tokens, s.requests) for s in samples.prefill] == [(2000, 1)]
        assert sum(s.iterations for s in samples.decode) == 63
        assert samples.generated_tokens == 64
        assert (await lab.runtime.samples(worker())).decode == ()

    run_virtual(main())


def test_an_old_incarnation_is_refused() -> None:
    async def main():
        lab = Lab()
        await lab.up(worker(incarnation=2))
        with pytest.raises(WorkerLostError):
            await lab.runtime.generate(worker(incarnation=1), call(), lab.chunk)
        await lab.runtime.kill(worker(incarnation=1))
        await lab.runtime.samples(worker(incarnation=2))

    run_virtual(main())
