"""Tiny models of several architectures, and how the tests of the torch engine build and drive one."""

from functools import cache
from pathlib import Path

import pytest

_SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Large enough that greedy tokens vary and are far from ties.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GPT2 = {
    "vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_MLA = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "first_k_dense_replace": 1,
}  # fmt: skip


def _config(name: str):
    import transformers as t

    return {
        "qwen3": lambda: t.Qwen3Config(**_SIZES, head_dim=8, tie_word_embeddings=True),
        "llama": lambda: t.LlamaConfig(**_SIZES),
        "gpt2": lambda: t.GPT2Config(**_GPT2),
        "mistral-window": lambda: t.MistralConfig(**_SIZES, sliding_window=6),
        "gemma2-softcap": lambda: t.Gemma2Config(**_SIZES, head_dim=8, sliding_window=6, attn_logit_softcapping=2.0),
        "gptoss-sinks": lambda: t.GptOssConfig(
            **_SIZES, head_dim=8, num_local_experts=4, layer_types=["full_attention", "sliding_attention"],
            sliding_window=6, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        "deepseek-mla": lambda: t.DeepseekV3Config(**{**_SIZES, **_MLA}),
        "phi3-longrope": lambda: t.Phi3Config(
            **{**_SIZES, "pad_token_id": 0}, original_max_position_embeddings=64,
            rope_parameters={
                "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 64,
            },
        ),
        "falcon": lambda: t.FalconConfig(**{k: v for k, v in _SIZES.items() if k != "intermediate_size"}),
        "mamba": lambda: t.MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2),
        "hybrid": lambda: t.Lfm2Config(**_SIZES, layer_types=["full_attention", "conv"]),
    }[name]()  # fmt: skip


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """`model_dir(name, seed)`: a folder with config and random float32 weights."""

    @cache
    def make(name: str = "qwen3", seed: int = 0) -> Path:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.set_num_threads(1)
        folder = tmp_path_factory.mktemp(f"{name}-{seed}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            AutoModelForCausalLM.from_config(_config(name)).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def plain_model(model_dir):
    """`plain_model(name, seed)`: the same weights in transformers' own model (eager: its sdpa drops soft caps)."""

    @cache
    def load(name: str = "qwen3", seed: int = 0):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(model_dir(name, seed), attn_implementation="eager").eval()

    return load


@pytest.fixture(scope="session")
def make_engine(model_dir):
    """`make_engine(role, name=…, limits…)`: an engine with weight version 0. Its clock stands still where asked."""

    def make(
        role="colocated",
        *,
        name="qwen3",
        seed=0,
        pace=None,
        weight_version=0,
        frozen_clock=False,
        device="cpu",
        **limits,
    ):
        from time import perf_counter

        from pearl_executor.engines.torch.engine import Engine, EngineLimits
        from pearl_state.roles import Role

        sizes = {"max_running": 8, "kv_tokens": 2000, "prefill_chunk_tokens": 24, "max_context_tokens": 200} | limits
        return Engine(
            model_dir(name, seed),
            role=Role(role),
            limits=EngineLimits(**sizes),
            pace=pace,
            device=device,
            weight_version=weight_version,
            clock=(lambda: 100.0) if frozen_clock else perf_counter,
        )

    return make


@pytest.fixture(scope="session")
def drive():
    """`drive(engine)`: step until nothing is left. Returns results by rid, and exported KV by rid.

    Checks at every step that the streamed tokens are those of the results, and that KV stays in its budget.
    """

    def run(engine, *, streamed=None, steps=100_000):
        streamed = {} if streamed is None else streamed
        results, exported = {}, {}
        while engine.has_work and steps:
            steps -= 1
            output = engine.step()
            for rid, chunk in output.chunks.items():
                streamed.setdefault(rid, []).extend(chunk.tokens)
            for rid, result in output.finished.items():
                new = streamed.get(rid, [])
                assert list(result.tokens[len(result.tokens) - len(new) :]) == new
                assert len(result.tokens) == len(result.logprobs) == sum(span.tokens for span in result.spans)
                results[rid] = result
            exported.update(output.exported)
            samples = engine.take_samples()
            assert samples.kv_used_tokens <= samples.kv_capacity_tokens
        assert steps
        return results, exported

    return run
