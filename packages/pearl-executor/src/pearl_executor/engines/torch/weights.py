"""Weight snapshots on disk: read, identify, verify."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pearl_executor.engines.torch.contract import WeightsRefusedError


def weights_checksum(tensors: Mapping[str, Tensor]) -> str:
    """Digest of names, types, shapes and values, in order of names: 32 hex digits.

    Publisher and worker compute the same from the same tensors, wherever they lie and whatever file they travel in.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


def read_snapshot(path: Path, checksum: str | None) -> dict[str, Tensor]:
    """All tensors of a safetensors file, or of all such files in a folder, on the CPU.

    Raises `WeightsRefusedError` where there is none, one is damaged, or the checksum (if given) differs.
    """
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise WeightsRefusedError(f"no weights at {path}: expected a .safetensors file or a folder with some")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise WeightsRefusedError(f"weights in {file} are not readable: {error}") from error
    if checksum and (found := weights_checksum(tensors)) != checksum:
        raise WeightsRefusedError(f"weights at {path} have checksum {found}, announced was {checksum}")
    return tensors
