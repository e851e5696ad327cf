"""The network on its device: built from a Hugging Face folder, run on packed batches, emptied and filled again."""

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from pearl_executor.engines.torch.attention import IMPLEMENTATION, PackedBatch, ShapeProbe
from pearl_executor.engines.torch.contract import EngineError, WeightsRefusedError
from pearl_executor.engines.torch.pool import KvLayout
from pearl_executor.engines.torch.weights import read_snapshot


class Model:
    """A causal LM for inference. Float32 on the CPU, the checkpoint's own type elsewhere."""

    def __init__(self, folder: Path, device: torch.device, seed: int) -> None:
        if not (folder / "config.json").is_file():
            raise EngineError(f"no model at {folder}: it has no config.json")
        self.device = device
        self._network = _build(folder, device, seed)
        if not getattr(self._network, "_supports_attention_backend", False):
            raise EngineError(f"{type(self._network).__name__} does not let its attention be replaced")
        self._shapes = [parameter.shape for parameter in self._network.parameters()]
        self.max_position: int | None = getattr(self._network.config, "max_position_embeddings", None)
        self.vocabulary: int = self._network.config.vocab_size
        """Token ids are below this."""
        self.layout = self._probe()

    def logits(self, tokens: Tensor, positions: Tensor, wanted: Tensor, batch: PackedBatch) -> Tensor:
        """Run one packed row of `tokens` [tokens]. Returns logits of the `wanted` row indices, [wanted, vocabulary]."""
        with torch.inference_mode():
            output = self._network(
                input_ids=tokens.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=wanted,
                packed_batch=batch,
            )
        logits: Tensor = output.logits[0]
        return logits

    def load(self, path: Path, checksum: str | None) -> None:
        """Replace all weights by a snapshot's. One that does not fit changes nothing (`WeightsRefusedError`)."""
        tensors = read_snapshot(path, checksum)
        own = self._network.state_dict()
        tied = set(getattr(self._network, "all_tied_weights_keys", None) or ())
        missing = sorted(own.keys() - tensors.keys() - tied)
        unknown = sorted(tensors.keys() - own.keys())
        if missing or unknown:
            raise WeightsRefusedError(f"weights at {path} do not fit: missing {missing[:3]}, unknown {unknown[:3]}")
        for name, tensor in tensors.items():
            if tensor.shape != own[name].shape:
                raise WeightsRefusedError(
                    f"weights at {path} do not fit: {name} is {tuple(tensor.shape)}, needed {tuple(own[name].shape)}"
                )
        with torch.no_grad():
            for name, tensor in tensors.items():
                own[name].copy_(tensor)

    def release(self) -> None:
        """Give the weights' memory back. Buffers stay: they are small, and no snapshot has them."""
        for parameter in self._network.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self.device)

    def resume(self) -> None:
        """Take the memory again; its contents mean nothing until `load`."""
        for parameter, shape in zip(self._network.parameters(), self._shapes, strict=True):
            parameter.data = torch.empty(shape, dtype=parameter.dtype, device=self.device)

    def tensors(self) -> list[Tensor]:
        """All tensors that take device memory."""
        return [*self._network.parameters(), *self._network.buffers()]

    def _probe(self) -> KvLayout:
        """Ask the attention layers what they store, by running one token: configs name this in too many ways."""
        probe = ShapeProbe()
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.logits(zero, zero, zero, probe)
        if sorted(probe.shapes) != list(range(len(probe.shapes))) or not probe.shapes:
            raise EngineError(
                f"{type(self._network).__name__}: attention in layers {sorted(probe.shapes)} only;"
                " the engine serves models whose layers all attend"
            )
        return KvLayout(tuple(probe.shapes[i] for i in sorted(probe.shapes)), probe.dtype)


def _build(folder: Path, device: torch.device, seed: int) -> Any:
    """The network with the folder's weights, or with random ones of `seed` where it has none."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    config = AutoConfig.from_pretrained(folder)
    dtype = torch.float32 if device.type == "cpu" else (config.dtype or torch.bfloat16)
    if any(folder.glob("*.safetensors")):
        transformers.utils.logging.disable_progress_bar()
        network, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=IMPLEMENTATION, output_loading_info=True
        )
        if missing := sorted(report["missing_keys"]):
            raise WeightsRefusedError(f"weights in {folder} lack {missing[:3]}")
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION)
    return network.to(device).eval().requires_grad_(False)
