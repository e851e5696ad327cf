"""The network on its device: built from a Hugging Face folder, run on packed batches, emptied and filled again."""

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from pearl_executor.engines.torch.attention import IMPLEMENTATION, PackedBatch, PrefillBatch, Segment, ShapeProbe
from pearl_executor.engines.torch.contract import EngineError, WeightsRefusedError
from pearl_executor.engines.torch.pool import KvLayout, KvPool
from pearl_executor.engines.torch.weights import read_snapshot

_KINDS = ("full_attention", "sliding_attention")
"""Layer types of transformers' configs whose attention says all about itself in its arguments."""


class Model:
    """A causal LM for inference. Float32 on the CPU, the checkpoint's own type elsewhere."""

    def __init__(self, folder: Path, device: torch.device, seed: int) -> None:
        """Build it, and prove on two short prompts that packed attention gives the network's own logits.

        Raises `EngineError` for a folder without a model, and for a network that the engine cannot serve.
        """
        self.device = device
        self._network = _build(folder, device, seed)
        self._shapes = [parameter.shape for parameter in self._network.parameters()]
        config = self._network.config.get_text_config()
        self.vocabulary: int = self._network.get_input_embeddings().num_embeddings
        """Token ids are below this."""
        self.max_position: int | None = _max_position(config)
        """Tokens that positions exist for; None where unknown."""
        self.layout = self._probe()
        self._prove()

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
        return cast("Tensor", output.logits[0])

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
            if not bool(tensor.isfinite().all()):
                raise WeightsRefusedError(f"weights at {path} are broken: {name} has values that are not finite")
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
        kinds = getattr(self._network.config.get_text_config(), "layer_types", None)
        kinds = kinds or ["full_attention"] * max(1, len(probe.shapes))
        for layer, kind in enumerate(kinds):
            windowed = probe.windows.get(layer) is not None
            if layer not in probe.shapes or kind not in _KINDS or (kind == "sliding_attention" and not windowed):
                raise EngineError(
                    f"{type(self._network).__name__}: its layer {layer} is {kind}; the engine serves models whose"
                    " layers all attend, to everything before or within a window"
                )
        return KvLayout(tuple(probe.shapes[i] for i in sorted(probe.shapes)), probe.dtype)

    def _prove(self) -> None:
        """Compare two packed prompts with the same prompts run alone through the network's own attention.

        Finds networks that ignore positions, or pass something from token to token by other means than attention.
        """
        tokens = (torch.arange(8, device=self.device) * 7 + 3) % self.vocabulary
        positions = tokens.new_tensor([0, 1, 2, 0, 1, 2, 3, 4])
        slots = torch.arange(1, 9, device=self.device)
        pool = KvPool(self.layout, 8, 1, 1, self.device)
        segments = [Segment(0, 3, slots[:3]), Segment(3, 8, slots[3:])]
        packed = self.logits(tokens, positions, slots - 1, PrefillBatch(pool, slots, segments))
        self._network.set_attn_implementation("eager")
        with torch.inference_mode():
            alone = [
                self._network(input_ids=tokens[segment.begin : segment.end].unsqueeze(0), use_cache=False).logits[0]
                for segment in segments
            ]
        self._network.set_attn_implementation(IMPLEMENTATION)
        expected = torch.cat(alone).float()
        difference = float((packed.float() - expected).norm() / expected.norm().clamp(min=1e-30))
        # Low precision may send a token to another expert; what is looked for here is far larger.
        if not difference <= (1e-3 if self.layout.dtype == torch.float32 else 0.25):
            raise EngineError(
                f"{type(self._network).__name__}: packed logits differ from the network's own by {difference:.2g} of"
                " their norm; the engine cannot serve this architecture"
            )


def _max_position(config: Any) -> int | None:
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Beyond this, transformers rotates all requests of a batch by the longest one's rule.
        return int(rope["original_max_position_embeddings"])
    longest: int | None = getattr(config, "max_position_embeddings", None)
    return longest


def _build(folder: Path, device: torch.device, seed: int) -> Any:
    """The network with the folder's weights, or with random ones of `seed` where it has none."""
    if not (folder / "config.json").is_file():
        raise EngineError(f"no model at {folder}: it has no config.json")
    config = AutoConfig.from_pretrained(folder)
    dtype = torch.float32 if device.type == "cpu" else (config.dtype or torch.bfloat16)
    try:
        if any(folder.glob("*.safetensors")):
            network = _with_weights(folder, dtype)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                network = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION)
    except KeyError as error:
        if error.args != (IMPLEMENTATION,):
            raise
        raise EngineError(f"{config.model_type} models do not let their attention be replaced") from error
    if not getattr(network, "_supports_attention_backend", False):
        raise EngineError(f"{config.model_type} models do not let their attention be replaced")
    return network.to(device).eval().requires_grad_(False)


def _with_weights(folder: Path, dtype: torch.dtype) -> Any:
    transformers_logging.disable_progress_bar()
    network, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=IMPLEMENTATION, output_loading_info=True
    )
    if missing := sorted(report["missing_keys"]):
        raise WeightsRefusedError(f"weights in {folder} lack {missing[:3]}")
    for parameter in network.parameters():
        # Loaded tensors may be views of the mapped file, which others may replace or shorten.
        parameter.data = parameter.data.clone()
    return network
