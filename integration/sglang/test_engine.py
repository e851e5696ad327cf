"""The ports over SGLang servers, on the stand-in and on the real one: equal tokens whatever happens to the workers."""

import asyncio
import json
import secrets
import urllib.request
from pathlib import Path

import pytest

from pearl_executor.engines.sglang.checksums import snapshot_checksum
from pearl_executor.ports import Finish, GenerateRequest, Sampling, WeightSnapshot, WorkerError, WorkerLostError
from pearl_executor.tracing import TRACEPARENT
from pearl_state.roles import Role
from pearl_state.trajectory import WeightSpan

PROMPT = list(range(20, 60))


def request(tokens=8, prompt=PROMPT, **sampling):
    return GenerateRequest(
        rid=secrets.token_hex(6),
        prompt=prompt,
        max_new_tokens=tokens,
        sampling=Sampling(**{"temperature": 0.0, **sampling}),
    )


class Seen(list):
    """Chunks, and when the first one came."""

    def __init__(self):
        super().__init__()
        self.first = asyncio.Event()

    def append(self, chunk):
        super().append(chunk)
        self.first.set()


class Game:
    """The shared servers with their calls, on their own loop."""

    def __init__(self, servers, rows):
        self.servers, self.runtime, self.run = servers, servers.runtime, servers.run
        self.colocated, self.prefill, self.decode = rows
        self.snapshot = WeightSnapshot(1, str(servers.model))

    async def alone(self, asked, chunks=None):
        return await self.runtime.generate(self.colocated, asked, (chunks if chunks is not None else []).append)

    async def pair(self, asked, chunks=None, prefill=None, decode=None):
        return await self.runtime.generate_pair(
            prefill or self.prefill, decode or self.decode, asked, (chunks if chunks is not None else []).append
        )

    async def drain(self, row):
        while True:
            found = await self.runtime.interrupt(row)
            await self.runtime.wait_idle(row)
            if not found:
                return

    def contexts(self, row):
        """What a stand-in was sent: request → trace context."""
        with urllib.request.urlopen(f"{self.runtime.server(row).url}/standin/contexts", timeout=10) as answer:
            return json.load(answer)

    def journal(self, action):
        lines = (self.servers.folder / "sglang.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["action"] == action]


@pytest.fixture(scope="module")
def game(servers, trio):
    return Game(servers, trio)


def test_chunks_are_the_result_in_order_and_once(game):
    for call in (game.alone, game.pair):
        chunks = Seen()
        result = game.run(call(request(20), chunks))
        assert tuple(t for chunk in chunks for t in chunk.tokens) == result.tokens
        assert tuple(lp for chunk in chunks for lp in chunk.logprobs) == result.logprobs
        assert [chunk.offset for chunk in chunks] == [
            sum(len(c.tokens) for c in chunks[:n]) for n in range(len(chunks))
        ]
        assert result.finish is Finish.LENGTH
        assert sum(span.tokens for span in result.spans) == 20


def test_a_call_carries_the_trace_context_of_its_task_to_each_of_its_servers(game):
    context = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"
    asked, apart, bare = request(2), request(2), request(2)

    async def traced(call, asked):
        token = TRACEPARENT.set(context)
        try:
            await call(asked)
        finally:
            TRACEPARENT.reset(token)

    game.run(traced(game.alone, asked))
    game.run(traced(game.pair, apart))
    game.run(game.alone(bare))
    if game.servers.kind == "stand-in":
        # Another process than this one, which says what it was sent.
        told = [game.contexts(row) for row in (game.colocated, game.prefill, game.decode)]
        assert [found.get(asked.rid) for found in told] == [context, None, None]
        assert [found.get(apart.rid) for found in told] == [None, context, context]
        assert all(bare.rid not in found for found in told)


def test_a_pair_gives_the_tokens_of_one_server_and_both_sides_reuse_prefixes_over_turns(game):
    """The decode side holds the response too; the prefill side prefills it again."""
    context = [9, *PROMPT]
    held = []

    async def play():
        nonlocal context
        await game.drain(game.prefill)
        await game.drain(game.decode)
        for turn in range(3):
            result = await game.pair(request(12, context))
            assert result.tokens == (await game.alone(request(12, context))).tokens
            held.append(((await game.runtime.samples(game.decode)).cached_tokens, result.cached_tokens))
            context = [*context, *result.tokens, *range(100 + 10 * turn, 110 + 10 * turn)]

    game.run(play())
    assert held[0][1] == 0
    assert held[2][1] > held[1][1] >= len(PROMPT)
    assert held[2][0] > held[1][0] > held[0][0]


@pytest.mark.parametrize("kind", ["alone", "pair"])
def test_an_interrupted_call_gives_its_tokens_and_goes_on_alike(game, kind):
    call = getattr(game, kind)

    async def interrupt():
        whole = await call(request(300))
        chunks = Seen()
        task = asyncio.create_task(call(request(300), chunks))
        await chunks.first.wait()
        assert await game.runtime.interrupt(game.colocated if kind == "alone" else game.decode) == 1
        part = await task
        assert part.finish is Finish.INTERRUPTED
        assert 0 < len(part.tokens) < 300
        assert part.tokens == whole.tokens[: len(part.tokens)]
        rest = await call(request(300 - len(part.tokens), [*PROMPT, *part.tokens]))
        assert part.tokens + rest.tokens == whole.tokens

    game.run(interrupt())


def test_one_call_is_aborted_and_others_go_on(game):
    async def abort():
        first, second = request(1500), request(60)
        chunks = Seen()
        one, other = asyncio.create_task(game.pair(first, chunks)), asyncio.create_task(game.pair(second))
        await chunks.first.wait()
        await game.runtime.abort(game.decode, first.rid)
        await game.runtime.abort(game.decode, "nobody")
        assert (await one).finish is Finish.INTERRUPTED
        assert (await other).finish is Finish.LENGTH

    game.run(abort())


def test_an_id_in_flight_is_refused(game):
    async def twice():
        asked = request(400)
        first = asyncio.create_task(game.alone(asked))
        await asyncio.sleep(0.05)
        with pytest.raises(WorkerError, match="in flight already"):
            await game.alone(asked)
        await game.drain(game.colocated)
        await first

    game.run(twice())


def test_new_weights_reach_all_servers_while_they_serve_and_each_token_names_its_version(game):
    """A colocated server goes on with the same request; a pair's request comes back with its tokens."""
    servers = game.servers

    async def update(version, folder):
        snapshot = WeightSnapshot(version, str(folder), 0, snapshot_checksum(Path(folder)))
        chunks, others = Seen(), Seen()
        alone = asyncio.create_task(game.alone(request(400), chunks))
        pair = asyncio.create_task(game.pair(request(400), others))
        await asyncio.gather(chunks.first.wait(), others.first.wait())
        rows = (game.colocated, game.prefill, game.decode)
        assert await asyncio.gather(*(game.runtime.load_weights(row, snapshot) for row in rows)) == [version] * 3
        return await alone, await pair

    alone, pair = game.run(update(2, servers.later))
    assert alone.finish is Finish.LENGTH
    assert [span.version for span in alone.spans] == [1, 2]
    assert pair.finish is Finish.INTERRUPTED
    assert pair.spans == (WeightSpan(1, len(pair.tokens)),)
    new = game.run(game.alone(request(10)))
    assert new.tokens == game.run(game.pair(request(10))).tokens
    assert new.spans == (WeightSpan(2, 10),)
    # And back, under a higher version: other weights, other tokens.
    game.run(update(3, servers.model))
    assert game.run(game.alone(request(10))).tokens != new.tokens
    assert {line["verified_against"] for line in game.journal("weights")} == {"snapshot"}
    game.snapshot = WeightSnapshot(3, str(servers.model))


def test_weights_that_are_not_what_was_announced_are_refused_and_the_server_serves_on(game):
    async def load():
        before = await game.alone(request(5))
        wrong = WeightSnapshot(9, str(game.servers.later), 0, "0" * 32)
        with pytest.raises(WorkerError, match="announced was"):
            await game.runtime.load_weights(game.colocated, wrong)
        missing = WeightSnapshot(9, "/no/such/folder")
        with pytest.raises(WorkerError, match="no weights in"):
            await game.runtime.load_weights(game.colocated, missing)
        assert (await game.alone(request(5))).tokens == before.tokens

    game.run(load())


def test_a_borrowed_worker_is_released_and_resumed_under_disaggregation(game):
    """Released by measure, resumed weights first; a second release or resume, which would kill it, is refused here."""

    async def borrow():
        runtime = game.runtime
        tokens = (await game.pair(request(10))).tokens
        for row in (game.prefill, game.decode):
            await game.drain(row)
            report = await runtime.release(row)
            assert report.before_bytes - report.after_bytes >= 0.95 * report.before_bytes > 0
            with pytest.raises(WorkerError, match="released already"):
                await runtime.release(row)
            report = await runtime.resume(row)
            assert report.after_bytes > 0
            await runtime.load_weights(row, game.snapshot)
            with pytest.raises(WorkerError, match="not released"):
                await runtime.resume(row)
            await runtime.refresh_peers(row)
            assert (await game.pair(request(10))).tokens == tokens

    game.run(borrow())


def test_a_call_for_a_worker_that_is_being_changed_waits_until_it_serves_again(game):
    async def change():
        await game.drain(game.colocated)
        await game.runtime.release(game.colocated)
        waiting = asyncio.create_task(game.alone(request(5)))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await game.runtime.resume(game.colocated)
        await game.runtime.load_weights(game.colocated, game.snapshot)
        assert len((await waiting).tokens) == 5

    game.run(change())


def test_roles_flip_in_place_and_back(game):
    """P→D→P on the same pair; each new pair passes a canary before it serves."""

    async def flip():
        tokens = (await game.alone(request(10))).tokens
        one, two = game.prefill, game.decode
        for prefill, decode in ((two, one), (one, two)):
            await game.drain(one)
            await game.drain(two)
            await asyncio.gather(
                game.runtime.switch_role(prefill, Role.PREFILL), game.runtime.switch_role(decode, Role.DECODE)
            )
            canaries = len(game.journal("canary"))
            await game.runtime.refresh_peers(prefill)
            assert len(game.journal("canary")) == canaries + 1
            assert (await game.pair(request(10), prefill=prefill, decode=decode)).tokens == tokens
            assert (await game.runtime.samples(prefill)).role is Role.PREFILL

    game.run(flip())


def test_a_change_of_mode_is_another_process_with_the_same_weights(game):
    async def change():
        tokens = (await game.alone(request(10))).tokens
        before = game.runtime.pids[game.colocated.id]
        await game.drain(game.colocated)
        await game.runtime.switch_role(game.colocated, Role.DECODE)
        assert game.runtime.pids[game.colocated.id] != before
        assert (await game.pair(request(10), decode=game.colocated)).tokens == tokens
        await game.drain(game.colocated)
        await game.runtime.switch_role(game.colocated, Role.COLOCATED)
        assert (await game.alone(request(10))).tokens == tokens

    game.run(change())
    assert game.servers.lost == []


def test_samples_count_what_was_computed(game):
    async def count():
        await game.runtime.samples(game.colocated)
        await game.drain(game.colocated)
        before = await game.runtime.samples(game.colocated)
        await asyncio.gather(*(game.alone(request(40, [n, *PROMPT])) for n in range(4)))
        await asyncio.sleep(0.1)
        after = await game.runtime.samples(game.colocated)
        assert after.generated_tokens - before.generated_tokens == 160
        assert after.prefill_tokens > before.prefill_tokens
        assert sum(sample.iterations for sample in after.decode) >= 20
        assert all(sample.duration_s > 0 for sample in (*after.decode, *after.prefill))
        assert after.kv_capacity_tokens == 65536

    game.run(count())


def test_a_killed_server_is_lost_to_its_calls_and_reported_once(game):
    (row,) = game.servers.start(Role.COLOCATED)

    async def kill():
        await game.runtime.load_weights(row, game.snapshot)
        server = game.runtime.server(row)
        chunks = Seen()
        call = asyncio.create_task(game.runtime.generate(row, request(1500), chunks.append))
        await chunks.first.wait()
        await server.process.end(0.0)
        with pytest.raises(WorkerLostError):
            await call
        for _ in range(100):
            if game.servers.lost:
                break
            await asyncio.sleep(0.05)
        with pytest.raises(WorkerLostError):
            await game.runtime.generate(row, request(3), chunks.append)

    game.run(kill())
    assert [loss[:2] for loss in game.servers.lost] == [(row.id, row.incarnation)]
    game.servers.lost.clear()


def test_an_incarnation_has_one_life(game):
    (row,) = game.servers.start(Role.COLOCATED)
    game.run(game.runtime.stop(row))
    game.run(game.runtime.kill(row))
    with pytest.raises(WorkerLostError, match="had its life already"):
        game.run(game.runtime.start(row))
    assert game.servers.lost == []


def test_a_held_server_takes_no_memory_before_its_worker_starts(game):
    row = game.servers.row(Role.COLOCATED)

    async def gated():
        await game.runtime.hold([row.gpus], Role.COLOCATED)
        await asyncio.sleep(0.5)
        await game.runtime.start(row)
        await game.runtime.load_weights(row, game.snapshot)
        result = await game.runtime.generate(row, request(5), lambda _: None)
        assert result.tokens == (await game.alone(request(5))).tokens
        await game.runtime.stop(row)

    game.run(gated())
    assert (game.servers.folder / f"held-{row.id}.log").exists()


def test_no_key_is_in_a_log_a_command_line_or_the_journal(game):
    key = game.runtime._fleet._admin_key
    for file in game.servers.folder.iterdir():
        assert key not in file.read_text(errors="replace")
    logs = [file.read_text(errors="replace") for file in game.servers.folder.glob("w*.log")]
    assert any("<redacted>" in log for log in logs)
    for pid in game.runtime.pids.values():
        assert key.encode() not in Path("/proc", str(pid), "cmdline").read_bytes()
    assert all(line["listens_on"].startswith("http://127.0.0.1:") for line in game.journal("started"))
