"""Device memory, measured."""

from collections.abc import Iterable

import torch
from torch import Tensor


def held_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes in use: on CUDA, of the whole device as its driver says; elsewhere, of the storages behind `tensors`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
