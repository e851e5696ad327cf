"""How large a model's weights and KV are, from its folder."""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

from pearl_executor.engines.sglang.checksums import stored_tensors

_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes that follow from a model's configuration and files."""

    weight_bytes: int
    kv_bytes_per_token: int

    @staticmethod
    def of(folder: Path, dtype: str) -> "ModelSize":
        """Read them from a Hugging Face model folder. Raises `ValueError` for a folder that is none."""
        try:
            config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
            width = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
            layers = int(config["num_hidden_layers"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder} holds no model configuration that can be read: {error}") from None
        weights = 0
        if any(folder.glob("*.safetensors")):
            for _, _, shape, (_, start, end) in stored_tensors(folder):
                # Loaded in another number format, a tensor takes that format's bytes.
                weights += prod(shape) * _BYTES[dtype] if dtype in _BYTES else end - start
        return ModelSize(weights, 2 * layers * heads * width * _BYTES.get(dtype, 2))
