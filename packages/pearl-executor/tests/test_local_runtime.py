import asyncio
import contextlib
import itertools
import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from pearl_executor.pacing import Pace
from pearl_executor.ports import (
    Finish,
    GenerateRequest,
    Sampling,
    WeightSnapshot,
    WorkerError,
    WorkerLostError,
)
from pearl_executor.runtimes.local.fleet import Timeouts
from pearl_executor.runtimes.local.hosting import EngineRecipe
from pearl_executor.runtimes.local.processes import ForkServer
from pearl_executor.runtimes.local.runtime import LocalRuntime
from pearl_executor.runtimes.local.scripted import continuation, scripted_recipe
from pearl_state.roles import Role, Zone
from pearl_state.trajectory import WeightSpan
from pearl_state.worker import GpuId, Worker, WorkerId

PROMPT = (5, 6, 7)
SLOW = Pace(decode_fixed_s=0.005)
ENDLESS = 10**6


def run(main):
    """Run an asyncio test with a bound on its whole duration."""
    asyncio.run(asyncio.wait_for(main, 60))


def worker(slot=0, role=Role.COLOCATED, incarnation=1):
    return Worker(
        id=WorkerId(slot), gpus=frozenset({GpuId(slot)}), role=role, zone=Zone.DEDICATED, incarnation=incarnation
    )


def request(rid="r", tokens=20, prompt=PROMPT, **options):
    return GenerateRequest(rid=rid, prompt=prompt, max_new_tokens=tokens, **options)


class Chunks:
    """Collects what `on_chunk` gets; `await seen(n)` waits for n tokens."""

    def __init__(self):
        self.tokens, self.versions, self.offsets = [], [], []
        self._more = asyncio.Event()

    def __call__(self, chunk):
        self.offsets.append(chunk.offset)
        self.tokens += chunk.tokens
        self.versions += [chunk.version] * len(chunk.tokens)
        self._more.set()

    async def seen(self, count):
        async with asyncio.timeout(20):
            while len(self.tokens) < count:
                self._more.clear()
                await self._more.wait()


@contextlib.asynccontextmanager
async def runtime(*workers, pace=SLOW, recipe=None, **options):
    async with LocalRuntime(recipe or scripted_recipe(pace), **options) as local:
        await asyncio.gather(*(local.start(w) for w in workers))
        yield local


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- generation -----------------------------------------------------------------------------------------------------


def test_all_tokens_are_streamed_once_and_in_order():
    async def main():
        async with runtime(worker()) as local:
            chunks = Chunks()
            result = await local.generate(worker(), request(), chunks)
            assert list(result.tokens) == continuation(PROMPT, 20) == chunks.tokens
            assert chunks.offsets == list(range(20))
            assert result.finish is Finish.LENGTH
            assert result.spans == (WeightSpan(0, 20),)
            assert len(result.logprobs) == 20

    run(main())


def test_a_stop_token_ends_a_call_and_belongs_to_it():
    async def main():
        expected = continuation(PROMPT, 6)
        async with runtime(worker()) as local:
            sampling = Sampling(stop_token_ids=(expected[3], expected[5]))
            result = await local.generate(worker(), request(sampling=sampling), Chunks())
            assert (list(result.tokens), result.finish) == (expected[:4], Finish.STOP)

    run(main())


def test_many_calls_share_a_worker_without_mixing():
    async def main():
        async with runtime(worker(0), worker(1)) as local:
            calls = [local.generate(worker(i % 2), request(f"r{i}", 10 + i, (i, i + 1)), Chunks()) for i in range(24)]
            for i, result in enumerate(await asyncio.gather(*calls)):
                assert list(result.tokens) == continuation((i, i + 1), 10 + i)

    run(main())


def test_a_pair_gives_what_a_colocated_worker_gives():
    async def main():
        prefill, decode = worker(1, Role.PREFILL), worker(2, Role.DECODE)
        async with runtime(worker(), prefill, decode) as local:
            chunks = Chunks()
            alone = await local.generate(worker(), request("alone"), Chunks())
            pair = await local.generate_pair(prefill, decode, request("pair"), chunks)
            assert pair.tokens == alone.tokens
            assert chunks.tokens == list(alone.tokens)
            assert (await local.samples(decode)).transfer[0].tokens == len(PROMPT) + 1
            assert (await local.generate_pair(prefill, decode, request("one", 1), Chunks())).tokens == alone.tokens[:1]
            await asyncio.gather(local.wait_idle(prefill), local.wait_idle(decode))

    run(main())


def test_only_what_the_decode_worker_lacks_is_handed_over():
    async def main():
        prefill, decode = worker(1, Role.PREFILL), worker(2, Role.DECODE)
        async with runtime(prefill, decode) as local:
            first = await local.generate_pair(prefill, decode, request("t.0", affinity="t"), Chunks())
            longer = (*PROMPT, *first.tokens, 9, 9)
            second = await local.generate_pair(prefill, decode, request("t.1", prompt=longer, affinity="t"), Chunks())
            assert list(second.tokens) == continuation(longer, 20)
            moved = [sample.tokens for sample in (await local.samples(decode)).transfer]
            assert moved == [4, len(longer) + 1 - (len(PROMPT) + len(first.tokens))]

    run(main())


def test_interrupt_returns_partial_tokens_and_another_worker_continues_the_same_way():
    async def main():
        async with runtime(worker(0), worker(1)) as local:
            chunks = Chunks()
            call = asyncio.ensure_future(local.generate(worker(0), request("a", 40), chunks))
            await chunks.seen(7)
            assert await local.interrupt(worker(0)) == 1
            partial = await call
            assert partial.finish is Finish.INTERRUPTED
            assert 7 <= len(partial.tokens) < 40
            assert list(partial.tokens) == chunks.tokens
            left = 40 - len(partial.tokens)
            prompt = (*PROMPT, *partial.tokens)
            rest = await local.generate(worker(1), request("b", left, prompt, position=len(partial.tokens)), Chunks())
            assert [*partial.tokens, *rest.tokens] == continuation(PROMPT, 40)
            assert await local.interrupt(worker(0)) == 0

    run(main())


def test_abort_ends_one_call_only():
    async def main():
        async with runtime(worker()) as local:
            chunks = Chunks()
            victim = asyncio.ensure_future(local.generate(worker(), request("victim", ENDLESS), chunks))
            other = asyncio.ensure_future(local.generate(worker(), request("other", 30), Chunks()))
            await chunks.seen(3)
            await local.abort(worker(), "victim")
            await local.abort(worker(), "never heard of")
            assert (await victim).finish is Finish.INTERRUPTED
            assert list((await other).tokens) == continuation(PROMPT, 30)

    run(main())


def test_a_request_id_is_refused_while_it_is_in_flight():
    async def main():
        async with runtime(worker(0), worker(1)) as local:
            chunks = Chunks()
            first = asyncio.ensure_future(local.generate(worker(0), request("same", ENDLESS), chunks))
            await chunks.seen(1)
            for slot in (0, 1):
                with pytest.raises(WorkerError, match="same is in flight already"):
                    await local.generate(worker(slot), request("same"), Chunks())
            await local.abort(worker(0), "same")
            await first
            await local.generate(worker(0), request("same", 2), Chunks())

    run(main())


def test_an_error_of_the_caller_ends_its_own_call_only():
    async def main():
        async with runtime(worker()) as local:

            def explode(chunk):
                raise ZeroDivisionError("of the caller")

            other = asyncio.ensure_future(local.generate(worker(), request("other", 30), Chunks()))
            with pytest.raises(ZeroDivisionError, match="of the caller"):
                await local.generate(worker(), request("bad", ENDLESS), explode)
            assert list((await other).tokens) == continuation(PROMPT, 30)
            await local.wait_idle(worker())

    run(main())


def test_a_call_that_is_given_up_is_ended_in_the_worker():
    async def main():
        async with runtime(worker()) as local:
            chunks = Chunks()
            call = asyncio.ensure_future(local.generate(worker(), request("a", ENDLESS), chunks))
            await chunks.seen(2)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await local.wait_idle(worker())

    run(main())


def test_a_role_serves_only_what_it_is_for():
    async def main():
        prefill, decode = worker(1, Role.PREFILL), worker(2, Role.DECODE)
        async with runtime(worker(), prefill, decode) as local:
            for wrong in (
                local.generate(prefill, request(), Chunks()),
                local.generate_pair(decode, prefill, request(), Chunks()),
                local.generate_pair(prefill, worker(), request(), Chunks()),
            ):
                with pytest.raises(WorkerError, match=r"is for a \w+ worker, this one's role is"):
                    await wrong
            await local.wait_idle(prefill)

    run(main())


# ---- losses ---------------------------------------------------------------------------------------------------------


def test_a_killed_worker_fails_its_calls_at_once_and_nobody_elses():
    async def main():
        lost: asyncio.Queue[tuple[int, int, str]] = asyncio.Queue()
        async with runtime(worker(0), worker(1), on_lost=lambda *what: lost.put_nowait(what)) as local:
            chunks = [Chunks(), Chunks()]
            doomed = [
                asyncio.ensure_future(local.generate(worker(0), request(f"d{i}", ENDLESS), chunks[i])) for i in range(2)
            ]
            spared = asyncio.ensure_future(local.generate(worker(1), request("spared", 40), Chunks()))
            await asyncio.gather(*(c.seen(3) for c in chunks))
            os.kill(local.pids[0], signal.SIGKILL)
            for call, seen in zip(doomed, chunks, strict=True):
                with pytest.raises(WorkerLostError, match=r"worker 0 .* ended by SIGKILL") as error:
                    await call
                assert error.value.worker == 0
                assert seen.tokens == continuation(PROMPT, len(seen.tokens))
            assert list((await spared).tokens) == continuation(PROMPT, 40)
            assert await lost.get() == (0, 1, "ended by SIGKILL")
            with pytest.raises(WorkerLostError, match="has no process: ended by SIGKILL"):
                await local.generate(worker(0), request("late"), Chunks())
            await local.start(worker(0, incarnation=2))
            assert (await local.generate(worker(0, incarnation=2), request("new"), Chunks())).tokens
            assert lost.empty()

    run(main())


def test_a_hung_worker_is_noticed_and_killed():
    async def main():
        lost = []
        timeouts = Timeouts(heartbeat_s=0.05, silence_s=0.5)
        async with runtime(worker(0), worker(1), timeouts=timeouts, on_lost=lambda *w: lost.append(w)) as local:
            pid = local.pids[0]
            call = asyncio.ensure_future(local.generate(worker(0), request("a", ENDLESS), Chunks()))
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(WorkerLostError):
                await call
            assert not alive(pid)
            await asyncio.sleep(0)
            assert lost == [(0, 1, "no sign of life for 0.5 s")]
            assert list(local.pids) == [1]

    run(main())


@pytest.mark.parametrize("victim", [1, 2])
def test_a_pair_that_loses_a_worker_in_prefill_names_it(victim):
    async def main():
        prefill, decode = worker(1, Role.PREFILL), worker(2, Role.DECODE)
        async with runtime(prefill, decode, pace=Pace(prefill_per_token_s=5.0)) as local:
            call = asyncio.ensure_future(local.generate_pair(prefill, decode, request(), Chunks()))
            await asyncio.sleep(0.05)
            os.kill(local.pids[victim], signal.SIGKILL)
            with pytest.raises(WorkerLostError) as error:
                await call
            assert error.value.worker == victim

    run(main())


def test_a_pair_that_loses_its_decode_worker_keeps_the_tokens_and_frees_the_prefill_worker():
    async def main():
        prefill, decode = worker(1, Role.PREFILL), worker(2, Role.DECODE)
        async with runtime(prefill, decode) as local:
            chunks = Chunks()
            call = asyncio.ensure_future(local.generate_pair(prefill, decode, request("a", ENDLESS), chunks))
            await chunks.seen(5)
            os.kill(local.pids[2], signal.SIGKILL)
            with pytest.raises(WorkerLostError) as error:
                await call
            assert error.value.worker == 2
            assert chunks.tokens == continuation(PROMPT, len(chunks.tokens))
            await local.wait_idle(prefill)

    run(main())


BREAKING = """
from pearl_executor.runtimes.local import scripted
from pearl_executor.runtimes.local.hosting import Hosted

class Breaking(scripted.ScriptedEngine):
    def step(self):
        if any(len(entry.tokens) > 8 for entry in self._requests.values()):
            raise ArithmeticError("the engine broke")
        return super().step()

def build(settings, role):
    hosted = scripted.build(settings, role)
    engine = Breaking(role, hosted.engine._pace, 0, 16)
    return Hosted(engine, hosted.read_blob)
"""


def test_an_engine_that_breaks_is_lost_and_its_last_words_are_told(tmp_path):
    async def main():
        lost: asyncio.Queue[tuple[int, int, str]] = asyncio.Queue()
        (tmp_path / "breaking_engine.py").write_text(BREAKING)
        recipe = replace(scripted_recipe(SLOW), factory="breaking_engine:build")
        async with (
            ForkServer(tmp_path / "logs", environment={"PYTHONPATH": str(tmp_path)}) as forks,
            LocalRuntime(recipe, forks=forks, on_lost=lambda *what: lost.put_nowait(what)) as local,
        ):
            await local.start(worker())
            chunks = Chunks()
            with pytest.raises(WorkerLostError):
                await local.generate(worker(), request("a", ENDLESS), chunks)
            assert chunks.tokens == continuation(PROMPT, 6)
            assert await lost.get() == (0, 1, "exited with code 1: ArithmeticError: the engine broke")

    run(main())


def test_calls_survive_any_worker_dying_at_any_time():
    """Workers are killed at random and replaced; every call goes on elsewhere from the tokens it has."""
    roles = (Role.COLOCATED, Role.COLOCATED, Role.PREFILL, Role.DECODE)
    rng = random.Random(11)

    async def main():
        async with runtime(pace=Pace(decode_fixed_s=0.004)) as local:
            rows = [worker(slot, role) for slot, role in enumerate(roles)]
            await asyncio.gather(*(local.start(row) for row in rows))
            kills = 0

            async def attempt(rid, tokens, number):
                prompt = (*number, *tokens)
                call = request(rid, 120 - len(tokens), prompt, affinity=str(number), position=len(tokens))
                collect = lambda chunk: tokens.extend(chunk.tokens)  # noqa: E731
                if rng.random() < 0.5:
                    return await local.generate(rows[rng.randrange(2)], call, collect)
                return await local.generate_pair(rows[2], rows[3], call, collect)

            async def finish(number):
                tokens: list[int] = []
                attempts = itertools.count()
                while len(tokens) < 120:
                    try:
                        await attempt(f"{number}.{next(attempts)}", tokens, number)
                    except WorkerError:
                        await asyncio.sleep(0.01)
                return tokens

            async def wreck():
                nonlocal kills
                while True:
                    await asyncio.sleep(0.06)
                    slot = rng.randrange(4)
                    old = rows[slot]
                    os.kill(local.pids[old.id], signal.SIGKILL)
                    rows[slot] = replace(old, incarnation=old.incarnation + 1)
                    await local.start(rows[slot])
                    kills += 1

            wrecking = asyncio.ensure_future(wreck())
            numbers = [(i, i + 1) for i in range(24)]
            results = await asyncio.gather(*(finish(number) for number in numbers))
            wrecking.cancel()
            await asyncio.gather(wrecking, return_exceptions=True)
            assert results == [continuation(number, 120) for number in numbers]
            assert kills >= 2
            living = [row for row in rows if row.id in local.pids]
            await asyncio.gather(*(local.wait_idle(row) for row in living))

    run(main())


# ---- drain ----------------------------------------------------------------------------------------------------------


def test_a_hand_over_that_is_called_off_during_its_prefill_does_not_keep_the_prefill_worker_busy():
    async def main():
        p, d = worker(0, Role.PREFILL), worker(1, Role.DECODE)
        # One paced prefill iteration of 0.6 s, in the middle of which the decode worker goes.
        async with runtime(p, d, pace=Pace(prefill_per_token_s=0.2)) as local:
            call = asyncio.create_task(local.generate_pair(p, d, request(tokens=50), Chunks()))
            await asyncio.sleep(0.2)
            await local.kill(d)
            with pytest.raises(WorkerLostError):
                await call
            async with asyncio.timeout(5):
                await local.wait_idle(p)
            await local.switch_role(p, Role.COLOCATED)

    run(main())


def test_interrupting_a_decode_worker_also_ends_calls_that_are_still_in_prefill():
    async def main():
        prefill, decode = worker(1, Role.PREFILL), worker(2, Role.DECODE)
        async with runtime(prefill, decode, pace=Pace(prefill_per_token_s=0.05)) as local:
            call = asyncio.ensure_future(local.generate_pair(prefill, decode, request("a", ENDLESS), Chunks()))
            await asyncio.sleep(0.05)
            assert await local.interrupt(decode) == 1
            await local.wait_idle(decode)
            result = await call
            assert result.finish is Finish.INTERRUPTED
            assert list(result.tokens) == continuation(PROMPT, len(result.tokens))
            await local.release(decode)

    run(main())


def test_a_drain_waits_for_calls_that_are_still_in_prefill():
    async def main():
        prefill, decode = worker(1, Role.PREFILL), worker(2, Role.DECODE)
        async with runtime(prefill, decode, pace=Pace(prefill_per_token_s=0.05)) as local:
            call = asyncio.ensure_future(local.generate_pair(prefill, decode, request("a", 9), Chunks()))
            await asyncio.sleep(0.02)
            await local.wait_idle(decode)
            assert call.done()
            assert list((await call).tokens) == continuation(PROMPT, 9)

    run(main())


def test_a_busy_worker_is_neither_released_nor_switched():
    async def main():
        async with runtime(worker()) as local:
            chunks = Chunks()
            call = asyncio.ensure_future(local.generate(worker(), request("a", ENDLESS), chunks))
            await chunks.seen(2)
            with pytest.raises(WorkerError, match="cannot release its memory while it holds work"):
                await local.release(worker())
            with pytest.raises(WorkerError, match="cannot switch its role while it holds work"):
                await local.switch_role(worker(), Role.DECODE)
            await local.interrupt(worker())
            await local.wait_idle(worker())
            await local.switch_role(worker(), Role.DECODE)
            assert (await call).finish is Finish.INTERRUPTED

    run(main())


def test_release_and_resume_are_measured_and_not_repeatable():
    async def main():
        async with runtime(worker()) as local:
            with pytest.raises(WorkerError, match="cannot resume"):
                await local.resume(worker())
            report = await local.release(worker())
            assert report.before_bytes > report.after_bytes == 0
            with pytest.raises(WorkerError, match="released already"):
                await local.release(worker())
            with pytest.raises(WorkerError, match="device memory is released"):
                await local.generate(worker(), request(), Chunks())
            report = await local.resume(worker())
            assert report.after_bytes > report.before_bytes
            with pytest.raises(WorkerError, match="no weights"):
                await local.generate(worker(), request(), Chunks())

    run(main())


# ---- weights --------------------------------------------------------------------------------------------------------


def test_weights_are_loaded_under_a_running_generation(tmp_path):
    async def main():
        async with runtime(worker()) as local:
            chunks = Chunks()
            call = asyncio.ensure_future(local.generate(worker(), request("a", 200), chunks))
            await chunks.seen(4)
            assert await local.load_weights(worker(), WeightSnapshot(3, str(tmp_path))) == 3
            with pytest.raises(WorkerError, match="no weights at"):
                await local.load_weights(worker(), WeightSnapshot(4, str(tmp_path / "missing")))
            result = await call
            assert list(result.tokens) == continuation(PROMPT, 200)
            assert [span.version for span in result.spans] == [0, 3]
            assert sum(span.tokens for span in result.spans) == 200
            assert chunks.versions == [0] * result.spans[0].tokens + [3] * result.spans[1].tokens

    run(main())


# ---- life -----------------------------------------------------------------------------------------------------------


def test_every_call_checks_the_incarnation():
    async def main():
        async with runtime(worker(0, incarnation=2)) as local:
            for stale in (worker(0, incarnation=1), worker(0, incarnation=3), worker(9)):
                for call in (
                    local.interrupt(stale),
                    local.wait_idle(stale),
                    local.release(stale),
                    local.resume(stale),
                    local.switch_role(stale, Role.DECODE),
                    local.load_weights(stale, WeightSnapshot(1, "x")),
                    local.refresh_peers(stale),
                    local.samples(stale),
                    local.generate(stale, request(), Chunks()),
                    local.abort(stale, "r"),
                ):
                    with pytest.raises(WorkerLostError):
                        await call
            await local.kill(worker(0, incarnation=1))
            await local.stop(worker(0, incarnation=1))
            assert (await local.generate(worker(0, incarnation=2), request(), Chunks())).tokens

    run(main())


def test_a_newer_incarnation_replaces_the_older_process_and_an_older_one_never_starts():
    async def main():
        lost = []
        async with runtime(worker(0), on_lost=lambda *w: lost.append(w)) as local:
            old = local.pids[0]
            await local.start(worker(0, incarnation=2))
            assert not alive(old)
            for stale in (1, 2):
                with pytest.raises(WorkerLostError, match="had its life already"):
                    await local.start(worker(0, incarnation=stale))
            await local.kill(worker(0, incarnation=5))
            with pytest.raises(WorkerLostError):
                await local.start(worker(0, incarnation=4))
            assert lost == []

    run(main())


def test_stop_and_kill_leave_no_process_are_repeatable_and_no_loss():
    async def main():
        lost = []
        async with runtime(worker(0), worker(1), on_lost=lambda *w: lost.append(w)) as local:
            pids = dict(local.pids)
            call = asyncio.ensure_future(local.generate(worker(0), request("a", ENDLESS), Chunks()))
            await asyncio.sleep(0.02)
            for _ in range(2):
                await local.stop(worker(0))
                await local.kill(worker(1))
            assert not any(alive(pid) for pid in pids.values())
            assert local.pids == {}
            with pytest.raises(WorkerLostError):
                await call
            assert lost == []

    run(main())


def test_a_stopped_process_that_does_not_obey_is_killed():
    async def main():
        async with runtime(worker(), timeouts=Timeouts(stop_s=0.1)) as local:
            pid = local.pids[0]
            os.kill(pid, signal.SIGSTOP)
            await local.stop(worker())
            assert not alive(pid)

    run(main())


def test_an_engine_that_cannot_be_built_says_why_and_leaves_nothing():
    async def main():
        recipe = replace(scripted_recipe(), factory="pearl_executor.runtimes.local.scripted:no_such_function")
        lost = []
        async with LocalRuntime(recipe, on_lost=lambda *w: lost.append(w)) as local:
            with pytest.raises(WorkerError, match=r"worker 0 did not start: .*no_such_function"):
                await local.start(worker())
            assert (local.pids, lost) == ({}, [])

    run(main())


def test_a_start_that_is_cancelled_or_killed_leaves_nothing():
    async def main():
        async with LocalRuntime(scripted_recipe(Pace(start_s=30.0))) as local:
            for delay_s in (0.0, 0.001, 0.3):
                slot = int(delay_s * 1000)
                starting = asyncio.ensure_future(local.start(worker(slot)))
                await asyncio.sleep(delay_s)
                starting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await starting
                assert local.pids == {}
            for delay_s in (0.0, 0.001, 0.3):
                slot = int(delay_s * 1000)
                starting = asyncio.ensure_future(local.start(worker(slot, incarnation=2)))
                await asyncio.sleep(delay_s)
                await local.kill(worker(slot, incarnation=2))
                assert local.pids == {}
                with pytest.raises(WorkerError):
                    await starting

    run(main())


def test_paced_operations_last_at_least_as_long_as_the_pace_says(tmp_path):
    async def main():
        pace = Pace(start_s=0.3, load_s=0.1, release_s=0.11, resume_s=0.12, switch_s=0.13, decode_fixed_s=0.02)
        async with runtime(pace=pace) as local:
            loop = asyncio.get_running_loop()
            for least_s, operation in (
                (0.3, local.start(worker())),
                (0.1, local.load_weights(worker(), WeightSnapshot(1, str(tmp_path)))),
                (19 * 0.02 - 0.02, local.generate(worker(), request(), Chunks())),
                (0.11, local.release(worker())),
                (0.12, local.resume(worker())),
                (0.13, local.switch_role(worker(), Role.PREFILL)),
            ):
                began_s = loop.time()
                await operation
                assert loop.time() - began_s >= least_s

    run(main())


def test_a_restarted_prefill_worker_is_pulled_from_again():
    """NIXL#795, sglang#10365: a restarted prefill instance could not be reached again from a stale peer cache."""

    async def main():
        prefill, decode = worker(1, Role.PREFILL), worker(2, Role.DECODE)
        async with runtime(prefill, decode) as local:
            await local.generate_pair(prefill, decode, request("a"), Chunks())
            await local.kill(prefill)
            again = worker(1, Role.PREFILL, incarnation=2)
            await local.start(again)
            await local.refresh_peers(again)
            result = await local.generate_pair(again, decode, request("b"), Chunks())
            assert list(result.tokens) == continuation(PROMPT, 20)

    run(main())


def test_closing_leaves_no_process_and_fails_what_is_in_flight(tmp_path):
    async def main():
        async with runtime(worker(0), worker(1), run_dir=tmp_path) as local:
            pids = dict(local.pids)
            call = asyncio.ensure_future(local.generate(worker(0), request("a", ENDLESS), Chunks()))
            await asyncio.sleep(0.02)
        assert not any(alive(pid) for pid in pids.values())
        with pytest.raises(WorkerLostError):
            await call
        with pytest.raises(WorkerError):
            await local.start(worker(5))
        assert sorted(p.name for p in (tmp_path / "workers").iterdir()) == ["fork_server.log", "w0-1.log", "w1-1.log"]

    run(main())


def test_a_shared_fork_server_outlives_the_runtime(tmp_path):
    async def main():
        recipe: EngineRecipe = scripted_recipe()
        async with ForkServer(tmp_path, preload=recipe.preload) as forks:
            for incarnation in (1, 2):
                async with LocalRuntime(recipe, forks=forks) as local:
                    await local.start(worker(incarnation=incarnation))
                    pid = local.pids[0]
                assert not alive(pid)

    run(main())
