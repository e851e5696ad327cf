"""The engine's tokens and log-probabilities are the model's own, whatever runs beside a request."""

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pearl_executor.engines.torch.contract import EngineError, RequestRefusedError  # noqa: E402
from pearl_executor.engines.torch.sampling import sample, uniform  # noqa: E402
from pearl_executor.ports import Finish, GenerateRequest, Sampling  # noqa: E402

pytestmark = pytest.mark.torch

FAMILIES = ["qwen3", "llama", "gpt2", "mistral-window", "gemma2-softcap", "gptoss-sinks", "deepseek-mla"]
GREEDY = Sampling(temperature=0.0)


def prompts(count, seed=0, longest=60):
    draw = random.Random(seed)
    return [[draw.randrange(1, 128) for _ in range(draw.randrange(1, longest))] for _ in range(count)]


def request(rid, prompt, new=12, sampling=GREEDY, **more):
    return GenerateRequest(rid=str(rid), prompt=prompt, max_new_tokens=new, sampling=sampling, **more)


def generate(model, prompt, new):
    """Greedy tokens by transformers' own generate."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0
        )
    return out[0, len(prompt) :].tolist()


def plain_logprobs(model, prompt, tokens, temperature=1.0):
    """Log-softmax of logits / temperature at each token, by one forward pass over everything."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0].float() / temperature
    table = torch.log_softmax(logits, -1)
    return [float(table[len(prompt) - 1 + i, token]) for i, token in enumerate(tokens)]


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_of_a_mixed_batch_equal_those_of_transformers_generate(name, make_engine, drive, plain_model):
    engine = make_engine(name=name, max_running=5)
    work = {str(i): prompt for i, prompt in enumerate(prompts(9))}
    for rid, prompt in work.items():
        engine.add(request(rid, prompt, new=10 + int(rid)))
    results, _ = drive(engine)
    for rid, prompt in work.items():
        assert list(results[rid].tokens) == generate(plain_model(name), prompt, 10 + int(rid))
        assert results[rid].finish is Finish.LENGTH


@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_are_those_of_a_plain_forward_at_the_temperature_used(name, make_engine, drive, plain_model):
    engine = make_engine(name=name)
    temperatures = {"cold": 0.0, "warm": 0.7, "hot": 1.5}
    work = dict(zip(temperatures, prompts(3, seed=1), strict=True))
    for rid, temperature in temperatures.items():
        engine.add(request(rid, work[rid], sampling=Sampling(temperature=temperature, seed=3)))
    results, _ = drive(engine)
    for rid, temperature in temperatures.items():
        expected = plain_logprobs(plain_model(name), work[rid], results[rid].tokens, temperature or 1.0)
        assert results[rid].logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_neither_company_nor_chunking_changes_a_request(chunk, make_engine, drive):
    work = prompts(6, seed=2)
    sampled = Sampling(temperature=0.8, seed=5)
    alone = make_engine(prefill_chunk_tokens=1000)
    together = make_engine(prefill_chunk_tokens=chunk)
    for i, prompt in enumerate(work):
        together.add(request(i, prompt, sampling=sampled if i % 2 else GREEDY))
    results, _ = drive(together)
    for i, prompt in enumerate(work):
        alone.add(request(i, prompt, sampling=sampled if i % 2 else GREEDY))
        single = drive(alone)[0][str(i)]
        assert results[str(i)].tokens == single.tokens
        assert results[str(i)].logprobs == pytest.approx(single.logprobs, abs=1e-4)


def test_requests_that_join_and_leave_midway_change_no_other(make_engine, drive):
    work = prompts(8, seed=3)
    engine, calm = make_engine(max_running=3), make_engine()
    results, streamed = {}, {}
    for i, prompt in enumerate(work):
        engine.add(request(i, prompt, new=3 + 5 * (i % 3)))
        for _ in range(2):
            output = engine.step()
            results |= output.finished
            for rid, chunk in output.chunks.items():
                streamed.setdefault(rid, []).extend(chunk.tokens)
    results |= drive(engine, streamed=streamed)[0]
    for i, prompt in enumerate(work):
        calm.add(request(i, prompt, new=3 + 5 * (i % 3)))
    expected, _ = drive(calm)
    assert {rid: r.tokens for rid, r in results.items()} == {rid: r.tokens for rid, r in expected.items()}


def test_a_stop_token_ends_the_response_and_is_part_of_it(make_engine, drive):
    engine = make_engine()
    prompt = prompts(1, seed=4)[0]
    engine.add(request("free", prompt, new=20))
    tokens = drive(engine)[0]["free"].tokens
    stop = tokens[6]
    engine.add(request("stopped", prompt, new=20, sampling=Sampling(temperature=0.0, stop_token_ids=(stop,))))
    result = drive(engine)[0]["stopped"]
    assert result.finish is Finish.STOP
    assert result.tokens == tokens[: tokens.index(stop) + 1]


def test_a_single_token_prompt_and_a_single_new_token_work(make_engine, drive, plain_model):
    engine = make_engine()
    engine.add(request("one", [5], new=1))
    assert list(drive(engine)[0]["one"].tokens) == generate(plain_model(), [5], 1)


def test_a_seed_fixes_the_sample_and_another_seed_changes_it(make_engine, drive):
    engine = make_engine()
    prompt = prompts(1, seed=5)[0]
    for rid, seed in (("a", 1), ("b", 1), ("c", 2)):
        engine.add(request(rid, prompt, new=30, sampling=Sampling(temperature=1.0, seed=seed)))
    results, _ = drive(engine)
    assert results["a"].tokens == results["b"].tokens
    assert results["a"].tokens != results["c"].tokens


def test_requests_without_a_seed_differ_from_each_other_and_repeat_with_the_engine(make_engine, drive):
    prompt = prompts(1, seed=6)[0]
    runs = []
    for _ in range(2):
        engine = make_engine()
        for rid in "ab":
            engine.add(request(rid, prompt, new=30, sampling=Sampling(temperature=1.0)))
        runs.append({rid: result.tokens for rid, result in drive(engine)[0].items()})
    assert runs[0] == runs[1]
    assert runs[0]["a"] != runs[0]["b"]


@pytest.mark.parametrize(
    ("new", "prompt", "more", "named"),
    [
        (0, [1], {}, "max_new_tokens"),
        (5, [], {}, "prompt is empty"),
        (150, [1] * 51, {}, "max_context_tokens"),
        (5, [1, 128], {}, "token ids"),
        (5, [-1], {}, "token ids"),
        (5, [1], {"sampling": Sampling(temperature=-1.0)}, "temperature"),
        (5, [1], {"sampling": Sampling(top_p=0.0)}, "top_p"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_by_name(new, prompt, more, named, make_engine):
    engine = make_engine()
    with pytest.raises(RequestRefusedError, match=named):
        engine.add(request("r", prompt, new=new, **more))
    assert not engine.has_work


@pytest.mark.parametrize("name", ["falcon", "mamba", "hybrid"])
def test_an_architecture_that_packed_attention_does_not_reproduce_is_refused_at_once(name, make_engine):
    with pytest.raises(EngineError, match=r"attention be replaced|is conv"):
        make_engine(name=name)


def test_a_network_that_ignores_positions_is_found_by_its_logits(make_engine, monkeypatch):
    from transformers import GPT2Model

    forward = GPT2Model.forward
    monkeypatch.setattr(GPT2Model, "forward", lambda self, *a, position_ids=None, **more: forward(self, *a, **more))
    with pytest.raises(EngineError, match="logits differ"):
        make_engine(name="gpt2")


def test_samples_follow_the_distribution():
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(0)) * 2
    points = [(i + 0.5) / 4000 for i in range(4000)]
    tokens, logprobs = sample(logits.expand(4000, -1), [Sampling(temperature=0.5)] * 4000, points)
    expected = torch.softmax(logits[0] / 0.5, -1)
    found = torch.bincount(torch.tensor(tokens), minlength=12) / 4000
    assert torch.allclose(found, expected, atol=2 / 4000)
    assert torch.allclose(torch.tensor(logprobs), expected.log()[torch.tensor(tokens)], atol=1e-5)


def test_top_p_keeps_the_smallest_likeliest_set_and_reports_the_uncut_logprob():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(1000, -1)
    points = [i / 1000 for i in range(1000)]
    tokens, logprobs = sample(logits, [Sampling(temperature=1.0, top_p=0.75)] * 1000, points)
    assert set(tokens) == {0, 1}
    assert tokens.count(0) == pytest.approx(1000 * 0.5 / 0.8, abs=1)
    assert min(logprobs) == pytest.approx(torch.tensor(0.3).log().item(), abs=1e-5)


def test_broken_logits_are_an_error_and_not_a_token():
    logits = torch.full((2, 8), float("nan"))
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(logits, [Sampling(temperature=1.0), GREEDY], [0.3, 0.3])


def test_uniform_numbers_are_spread_and_depend_on_seed_and_position_only():
    draws = [uniform(seed, position) for seed in range(40) for position in range(100)]
    assert len(set(draws)) == len(draws)
    assert all(0.0 <= number < 1.0 for number in draws)
    tenths = [sum(i / 10 <= number < (i + 1) / 10 for number in draws) for i in range(10)]
    assert min(tenths) > 330
    assert max(tenths) < 470
    assert uniform(7, 11) == uniform(7, 11)
