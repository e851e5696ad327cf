"""Real SGLang and the embedded torch engine with the same float32 weights: equal greedy tokens and logprobs."""

import asyncio
import random
import secrets

import pytest
import torch
from transformers import AutoModelForCausalLM

from pearl_executor.engines.torch.contract import EngineLimits
from pearl_executor.engines.torch.engine import Engine
from pearl_executor.ports import GenerateRequest, Sampling
from pearl_state.roles import Role

TOLERANCE = 2e-4
"""Of a log-probability: both compute in float32, in another order."""


@pytest.fixture(scope="module", params=["real"])
def servers(request, real_servers):
    return real_servers


def prompts(count):
    draw = random.Random(5)
    return [[draw.randrange(4, 250) for _ in range(draw.randrange(3, 80))] for _ in range(count)]


def request(prompt, tokens, **sampling):
    return GenerateRequest(
        rid=secrets.token_hex(6), prompt=prompt, max_new_tokens=tokens, sampling=Sampling(**sampling)
    )


def embedded(folder, prompt, tokens):
    """What the torch engine generates greedily."""
    limits = EngineLimits(max_running=4, kv_tokens=4096, prefill_chunk_tokens=64, max_context_tokens=1024)
    engine = Engine(folder, role=Role.COLOCATED, limits=limits, weight_version=0)
    asked = request(prompt, tokens, temperature=0.0)
    engine.add(asked)
    while True:
        finished = engine.step().finished
        if finished:
            return finished[asked.rid]


def test_greedy_tokens_equal_those_of_the_torch_engine(servers, trio):
    colocated, prefill, decode = trio

    async def play(prompt):
        alone = await servers.runtime.generate(colocated, request(prompt, 24, temperature=0.0), lambda _: None)
        pair = await servers.runtime.generate_pair(
            prefill, decode, request(prompt, 24, temperature=0.0), lambda _: None
        )
        return alone, pair

    async def play_all():
        return await asyncio.gather(*(play(prompt) for prompt in prompts(6)))

    for prompt, results in zip(prompts(6), servers.run(play_all()), strict=True):
        wanted = embedded(servers.model, prompt, 24)
        for result in results:
            assert result.tokens == wanted.tokens
            assert result.logprobs == pytest.approx(wanted.logprobs, abs=TOLERANCE)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_drawn_tokens_are_the_models_at_the_temperature_used(servers, trio, temperature):
    """What the trainer divides by: SGLang must not report log-probabilities of another temperature."""
    model = AutoModelForCausalLM.from_pretrained(servers.model, dtype=torch.float32).eval()
    for prompt in prompts(3):
        result = servers.run(
            servers.runtime.generate(trio[0], request(prompt, 16, temperature=temperature), lambda _: None)
        )
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *result.tokens]])).logits[0].float() / temperature
        table = torch.log_softmax(logits, -1)
        wanted = [float(table[len(prompt) - 1 + at, token]) for at, token in enumerate(result.tokens)]
        assert result.logprobs == pytest.approx(wanted, abs=TOLERANCE)
