"""A small Qwen3 model from scratch: shape and seed in, a Hugging Face folder out, optionally warmed up on syntax.

Importing this needs no torch; `build_tiny_model` does and runs in a child process (`process.build_in_child`).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Qwen3ForCausalLM

    from pearl_rl.rollout.environments.protocol import Demonstration, Observation

INITIALIZER_RANGE = 0.1
"""Standard deviation of the random weights: wider than the 0.02 of large models, which leaves narrow ones silent."""

ROPE_THETA = 100.0
"""Base of the rotary wavelengths. Contexts are a few hundred tokens long: at the usual 10,000 and more, most of a small
head's dimensions barely turn, and looking one or two tokens back is learned several times more slowly."""

WARM_UP_RISE = 0.1
"""Part of the supervised steps over which their learning rate rises; it falls linearly afterwards."""


class ShapeError(ValueError):
    """A model shape that cannot be built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyShape:
    """A Qwen3 architecture."""

    vocabulary_size: int
    hidden_size: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 128
    max_context_tokens: int = 512
    stop_token_id: int = 0
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        for name in ("vocabulary_size", "hidden_size", "layers", "heads", "kv_heads", "head_dim", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ShapeError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.heads % self.kv_heads:
            raise ShapeError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")
        if self.head_dim % 2:
            raise ShapeError(f"head_dim is {self.head_dim}; rotary positions need an even one")


@dataclass(frozen=True, slots=True)
class Example:
    """A demonstration as tokens; `mask` marks those that the model shall learn to write."""

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Supervised steps on demonstrations of valid syntax, so that RL starts from answers that the game accepts."""

    examples: tuple[Example, ...]
    steps: int = 100
    batch: int = 16
    learning_rate: float = 3e-3
    observation_weight: float = 0.0
    """Weight of prompt and observation tokens in the loss beside 1 for response tokens: above 0 the model also learns
    to read the environment (what it reports, never what to do about it)."""


class DemonstrationTokenizer(Protocol):
    """What encoding a demonstration needs of a tokenizer."""

    def prompt(self, observation: "Observation", *, previous: Sequence[int] | None) -> list[int]:
        """New context tokens for an observation, up to where the next response begins."""
        ...

    def response(self, text: str) -> list[int]:
        """Tokens of a response with its end token."""
        ...


def encode_demonstrations(
    tokenizer: DemonstrationTokenizer, demonstrations: "Sequence[Demonstration]"
) -> tuple[Example, ...]:
    """Demonstrations as the token rows that rollout would have produced."""
    return tuple(_encode(tokenizer, demonstration) for demonstration in demonstrations)


def build_tiny_model(folder: Path, shape: TinyShape, seed: int, warm_up: WarmUp | None = None) -> int:
    """Write config.json and model.safetensors into `folder` (beside the tokenizer's files). Returns the parameters.

    The same shape, seed and warm-up give the same weights on the same machine.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=shape.vocabulary_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        max_position_embeddings=shape.max_context_tokens,
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        eos_token_id=shape.stop_token_id,
        pad_token_id=shape.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    if warm_up is not None and warm_up.steps > 0:
        _warm_up(model, warm_up, seed)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    generation = {"eos_token_id": [shape.stop_token_id], "pad_token_id": shape.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation) + "\n", encoding="utf-8")
    return sum(parameter.numel() for parameter in model.parameters())


def _encode(tokenizer: DemonstrationTokenizer, demonstration: "Demonstration") -> Example:
    tokens: list[int] = []
    mask: list[bool] = []
    previous: list[int] | None = None
    for observation, text in demonstration.turns:
        prompt = tokenizer.prompt(observation, previous=previous)
        previous = tokenizer.response(text)
        tokens += prompt + previous
        mask += [False] * len(prompt) + [True] * len(previous)
    return Example(tuple(tokens), tuple(mask))


def _warm_up(model: "Qwen3ForCausalLM", warm_up: WarmUp, seed: int) -> None:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=warm_up.learning_rate, weight_decay=0.0)
    model.train()
    rise = max(1.0, WARM_UP_RISE * warm_up.steps)
    for step, (tokens, mask, present) in enumerate(_batches(warm_up, seed)):
        for group in optimizer.param_groups:
            group["lr"] = warm_up.learning_rate * min((step + 1) / rise, 1 - step / warm_up.steps)
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        weights = mask[:, 1:].float() + warm_up.observation_weight * (~mask & present)[:, 1:].float()
        loss = (losses * weights).sum() / weights.sum()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _batches(warm_up: WarmUp, seed: int) -> "Iterator[tuple[Tensor, Tensor, Tensor]]":
    """`steps` random batches of right-padded rows [batch, longest]: tokens int64, mask bool, and what is no padding."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for _ in range(warm_up.steps):
        rows = torch.randint(len(warm_up.examples), (warm_up.batch,), generator=generator).tolist()
        chosen = [warm_up.examples[row] for row in rows]
        longest = max(len(example.tokens) for example in chosen)
        tokens = torch.zeros(len(chosen), longest, dtype=torch.int64)
        mask = torch.zeros(len(chosen), longest, dtype=torch.bool)
        present = torch.zeros_like(mask)
        for row, example in enumerate(chosen):
            tokens[row, : len(example.tokens)] = torch.tensor(example.tokens)
            mask[row, : len(example.mask)] = torch.tensor(example.mask)
            present[row, : len(example.tokens)] = True
        yield tokens, mask, present
