"""The local runtime with the embedded torch engine: one fork server for all tests of this file."""

import asyncio
import itertools
import os
import signal
from concurrent.futures import Future

import pytest

from pearl_executor.ports import Finish, GenerateRequest, Sampling, WeightSnapshot, WorkerError, WorkerLostError
from pearl_executor.runtimes.local.hosting import torch_recipe
from pearl_executor.runtimes.local.runtime import LocalRuntime
from pearl_executor.weights import WeightStore
from pearl_state.roles import Role, Zone
from pearl_state.worker import GpuId, Worker, WorkerId

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROMPT = (3, 14, 15, 92, 65, 35, 89, 79)
TOKENS = 24
GREEDY = Sampling(temperature=0.0)
rids = itertools.count()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    torch.manual_seed(7)
    config = transformers.Qwen3Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.5,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("model")
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(model_dir):
    """What transformers itself generates greedily."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir)
    output = model.generate(torch.tensor([PROMPT]), max_new_tokens=TOKENS, do_sample=False, use_cache=True)
    return output[0, len(PROMPT) :].tolist()


@pytest.fixture(scope="module")
def run():
    """Runs coroutines in one event loop that lives as long as the file's tests."""
    with asyncio.Runner() as runner:
        yield lambda coroutine: runner.run(asyncio.wait_for(coroutine, 120))


@pytest.fixture(scope="module")
def local(run, model_dir, tmp_path_factory):
    from pearl_executor.engines.torch.contract import EngineLimits

    limits = EngineLimits(max_running=16, kv_tokens=4096, prefill_chunk_tokens=128, max_context_tokens=256)
    runtime = LocalRuntime(torch_recipe(model_dir, limits, weight_version=0), tmp_path_factory.mktemp("run"))
    run(runtime.open())
    yield runtime
    run(runtime.aclose())


@pytest.fixture(scope="module")
def workers(run, local):
    """Two colocated workers, a prefill worker, a decode worker."""
    roles = (Role.COLOCATED, Role.COLOCATED, Role.PREFILL, Role.DECODE)
    rows = [row(slot, role) for slot, role in enumerate(roles)]

    async def start():
        await asyncio.gather(*(local.start(r) for r in rows))

    run(start())
    return rows


def row(slot, role, incarnation=1):
    return Worker(
        id=WorkerId(slot), gpus=frozenset({GpuId(slot)}), role=role, zone=Zone.DEDICATED, incarnation=incarnation
    )


def request(prompt=PROMPT, tokens=TOKENS, **options):
    options.setdefault("sampling", GREEDY)
    return GenerateRequest(rid=f"r{next(rids):06d}", prompt=prompt, max_new_tokens=tokens, **options)


def nothing(chunk):
    pass


def test_a_colocated_worker_generates_what_transformers_does(run, local, workers, expected):
    result = run(local.generate(workers[0], request(), nothing))
    assert list(result.tokens) == expected
    assert len(set(expected)) > 4


def test_a_pair_generates_what_transformers_does(run, local, workers, expected):
    result = run(local.generate_pair(workers[2], workers[3], request(), nothing))
    assert list(result.tokens) == expected
    assert result.transfer_s > 0


def test_a_pair_draws_what_a_colocated_worker_draws(run, local, workers):
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=5)
    alone = run(local.generate(workers[0], request(sampling=sampling), nothing))
    pair = run(local.generate_pair(workers[2], workers[3], request(sampling=sampling), nothing))
    assert pair.tokens == alone.tokens
    assert pair.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_a_second_turn_reuses_the_prefix_on_both_sides(run, local, workers):
    first = run(local.generate_pair(workers[2], workers[3], request(affinity="t1"), nothing))
    longer = (*PROMPT, *first.tokens, 1, 2, 3)
    run(local.samples(workers[3]))
    alone = run(local.generate(workers[0], request(longer), nothing))
    pair = run(local.generate_pair(workers[2], workers[3], request(longer, affinity="t1"), nothing))
    assert pair.tokens == alone.tokens
    assert pair.cached_tokens >= len(PROMPT)
    (transfer,) = run(local.samples(workers[3])).transfer
    assert transfer.tokens < len(longer) - len(PROMPT)


@pytest.mark.parametrize("cut", [1, 2, 11, TOKENS - 1])
def test_an_interrupted_call_continues_elsewhere_as_if_nothing_had_happened(run, local, workers, expected, cut):
    async def scenario():
        seen: Future[None] = Future()
        tokens = []

        def until_cut(chunk):
            tokens.extend(chunk.tokens)
            if len(tokens) >= cut and not seen.done():
                seen.set_result(None)

        call = asyncio.ensure_future(local.generate(workers[0], request(), until_cut))
        await asyncio.wrap_future(seen)
        await local.interrupt(workers[0])
        partial = await call
        assert list(partial.tokens) == tokens
        got = len(tokens)
        if partial.finish is not Finish.INTERRUPTED:
            assert got == TOKENS
            return tokens
        rest = await local.generate_pair(
            workers[2], workers[3], request((*PROMPT, *tokens), TOKENS - got, position=got), nothing
        )
        return [*tokens, *rest.tokens]

    assert run(scenario()) == expected


def test_a_killed_worker_s_call_continues_from_its_last_token_on_another(run, local, workers, expected):
    async def scenario():
        victim = row(7, Role.COLOCATED)
        await local.start(victim)
        tokens = []

        def kill_at_nine(chunk):
            tokens.extend(chunk.tokens)
            if len(tokens) == 9:
                os.kill(local.pids[victim.id], signal.SIGKILL)

        with pytest.raises(WorkerLostError):
            await local.generate(victim, request(tokens=200), kill_at_nine)
        assert len(tokens) >= 9
        del tokens[TOKENS - 1 :]
        left = TOKENS - len(tokens)
        rest = await local.generate(workers[1], request((*PROMPT, *tokens), left, position=len(tokens)), nothing)
        return [*tokens, *rest.tokens]

    assert run(scenario()) == expected


def test_release_resume_and_load_give_the_same_tokens_again(run, local, workers, expected, model_dir, tmp_path):
    from safetensors.torch import load_file

    from pearl_executor.engines.torch.weights import weights_checksum

    store = WeightStore(tmp_path)
    file = model_dir / "model.safetensors"
    snapshot = store.publish(1, file, weights_checksum(load_file(file)))

    async def scenario():
        released = await local.release(workers[1])
        assert released.after_bytes < released.before_bytes
        resumed = await local.resume(workers[1])
        assert resumed.after_bytes > resumed.before_bytes
        assert await local.load_weights(workers[1], snapshot) == 1
        return await local.generate(workers[1], request(), nothing)

    result = run(scenario())
    assert list(result.tokens) == expected
    assert [span.version for span in result.spans] == [1]


def test_a_switched_pair_serves_in_its_new_roles(run, local, workers, expected):
    async def scenario():
        await asyncio.gather(local.wait_idle(workers[2]), local.wait_idle(workers[3]))
        await local.switch_role(workers[2], Role.DECODE)
        await local.switch_role(workers[3], Role.PREFILL)
        try:
            return await local.generate_pair(workers[3], workers[2], request(), nothing)
        finally:
            await asyncio.gather(local.wait_idle(workers[2]), local.wait_idle(workers[3]))
            await local.switch_role(workers[2], Role.PREFILL)
            await local.switch_role(workers[3], Role.DECODE)

    assert list(run(scenario()).tokens) == expected


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve_on(run, local, workers, expected, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"no weights at all")
    with pytest.raises(WorkerError):
        run(local.load_weights(workers[0], WeightSnapshot(9, str(tmp_path))))
    assert list(run(local.generate(workers[0], request(), nothing)).tokens) == expected
