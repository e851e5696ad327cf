"""The model that training starts from: reproducible, readable by transformers, and fluent in the game's syntax."""

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from safetensors.torch import load_file  # noqa: E402

from pearl_rl.rollout.environments.protocol import Demonstration, observe  # noqa: E402
from pearl_rl.rollout.tokenizer import build_word_tokenizer  # noqa: E402
from pearl_rl.training.tiny_model import (  # noqa: E402
    ShapeError,
    TinyShape,
    WarmUp,
    build_tiny_model,
    encode_demonstrations,
)

pytestmark = pytest.mark.torch

WORDS = ("say", "it", "again", "red", "green", "blue", "please")
COLOURS = ("red", "green", "blue")


def demonstrations(count):
    """The answer repeats the colour of the question; which colour is asked for is random."""
    draw = random.Random(3)
    made = []
    for _ in range(count):
        turns = tuple((observe(f"say {colour} please"), f"{colour} again") for colour in draw.choices(COLOURS, k=2))
        made.append(Demonstration(turns, 0.0))
    return made


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return build_word_tokenizer(WORDS, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def shape(tokenizer):
    return TinyShape(
        vocabulary_size=tokenizer.vocabulary_size,
        hidden_size=32,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=16,
        intermediate_size=48,
        stop_token_id=tokenizer.stop_token_ids[0],
        pad_token_id=tokenizer.pad_token_id,
    )


def test_demonstrations_become_the_rows_that_rollout_would_have_made(tokenizer):
    (example,) = encode_demonstrations(tokenizer, [demonstrations(1)[0]])
    first, second = demonstrations(1)[0].turns
    prompt = tokenizer.prompt(first[0], previous=None)
    response = tokenizer.response(first[1])
    rest = tokenizer.prompt(second[0], previous=response)
    last = tokenizer.response(second[1])
    assert example.tokens == tuple(prompt + response + rest + last)
    assert example.mask == (
        *[False] * len(prompt), *[True] * len(response), *[False] * len(rest), *[True] * len(last)
    )  # fmt: skip


def test_the_same_seed_builds_the_same_weights_and_another_one_does_not(tmp_path, shape):
    for name, seed in [("a", 1), ("b", 1), ("c", 2)]:
        build_tiny_model(tmp_path / name, shape, seed)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])


def test_transformers_reads_the_folder_with_its_tokenizer(tmp_path, shape):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    build_word_tokenizer(WORDS, tmp_path)
    parameters = build_tiny_model(tmp_path, shape, 1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model.generation_config.eos_token_id == [shape.stop_token_id]
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token_id == shape.stop_token_id


def test_a_warm_up_teaches_the_form_of_an_answer(tmp_path, tokenizer, shape):
    from transformers import AutoModelForCausalLM

    examples = encode_demonstrations(tokenizer, demonstrations(32))
    warm_up = WarmUp(examples=examples, steps=60, batch=8, learning_rate=1e-2)
    for name in ("warm", "again"):
        build_tiny_model(tmp_path / name, shape, 1, warm_up)
    build_tiny_model(tmp_path / "cold", shape, 1)
    warm, again = (load_file(tmp_path / name / "model.safetensors") for name in ("warm", "again"))
    assert all(torch.equal(warm[name], again[name]) for name in warm)

    def likelihood(name):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        row = torch.tensor([examples[0].tokens])
        logprobs = torch.log_softmax(model(row).logits[0, :-1], -1).gather(-1, row[0, 1:, None])[:, 0]
        return float(logprobs[torch.tensor(examples[0].mask[1:])].mean().detach())

    assert likelihood("warm") > -0.1 > -1.0 > likelihood("cold")


def test_a_shape_that_cannot_be_built_is_refused():
    with pytest.raises(ShapeError, match="kv_heads 3 does not divide heads 4"):
        TinyShape(vocabulary_size=10, heads=4, kv_heads=3)
    with pytest.raises(ShapeError, match="head_dim is 5; rotary positions need an even one"):
        TinyShape(vocabulary_size=10, head_dim=5)
    with pytest.raises(ShapeError, match="layers is 0; it must be at least 1"):
        TinyShape(vocabulary_size=10, layers=0)
