"""Giving a rank's tensors away and taking them back, with the bytes that this really frees.

A parked storage is emptied in place (resized to 0 bytes), so parameters, FSDP's own views and the optimizer keep
their objects and need no rebinding. On CUDA the bytes wait in host memory; on the CPU, where that is the device's, in
a file.
"""

import ctypes
import gc
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_tensor(tensor: Tensor) -> Tensor:
    """The rank's own part of a tensor, sharded or not."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def device_bytes(device: torch.device) -> int:
    """Bytes that this process's tensors hold on `device`: the allocator's count on CUDA, all living ones on the CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return sum(storage.nbytes() for storage in _living_storages())


def settled_bytes(device: torch.device, enough: int, tries: int = 50, pause_s: float = 0.02) -> int:
    """`device_bytes`, once they are at most `enough` or about a second has passed.

    The thread that wrote a checkpoint drops its copy a moment after it says that it is done.
    """
    pause = threading.Event()
    found = device_bytes(device)
    for _ in range(tries):
        if found <= enough:
            break
        pause.wait(pause_s)
        found = device_bytes(device)
    return found


@dataclass(frozen=True, slots=True)
class _Parked:
    storage: torch.UntypedStorage
    size_bytes: int
    host: Tensor | None
    """Host copy (CUDA), or None where the bytes are in the file (CPU)."""


class ParkedTensors:
    """Tensors whose storages were emptied. `restore` fills them again, in the order they were parked."""

    def __init__(self, tensors: Iterable[Tensor], file: Path) -> None:
        self._file = file
        self._parked: list[_Parked] = []
        seen: set[int] = set()
        with file.open("wb") as out:
            for tensor in tensors:
                storage = local_tensor(tensor).untyped_storage()
                if storage.nbytes() == 0 or storage.data_ptr() in seen:
                    continue
                seen.add(storage.data_ptr())
                host = None if storage.device.type == "cpu" else _bytes_of(storage).to("cpu")
                if host is None:
                    out.write(_window(storage))
                self._parked.append(_Parked(storage, storage.nbytes(), host))
        # Only when all bytes are safe elsewhere may any go: a full disk leaves the rank as it was.
        for parked in self._parked:
            parked.storage.resize_(0)

    @property
    def size_bytes(self) -> int:
        """Bytes that were given away."""
        return sum(parked.size_bytes for parked in self._parked)

    def restore(self) -> None:
        """Take the memory again and fill it; the copies are dropped one by one, so that nothing is held twice."""
        with self._file.open("rb") as source:
            while self._parked:
                parked = self._parked.pop(0)
                parked.storage.resize_(parked.size_bytes)
                if parked.host is not None:
                    _bytes_of(parked.storage).copy_(parked.host)
                elif source.readinto(_window(parked.storage)) != parked.size_bytes:
                    raise EOFError(f"{self._file} ends before the parked tensors do")
        self._file.unlink()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _window(storage: torch.UntypedStorage) -> memoryview:
    """The storage's bytes, writable, without a copy. Not `Tensor.numpy`: a storage shared so can never be resized."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()))


def _living_storages() -> list[torch.UntypedStorage]:
    """Each storage on the CPU that a living Python tensor refers to, once."""
    gc.collect()
    found: dict[int, torch.UntypedStorage] = {}
    for item in gc.get_objects():
        # `type`, not isinstance: a lazy object's `__class__` may import half a library.
        if not issubclass(type(item), Tensor) or type(item) is DTensor or item.device.type != "cpu":
            continue
        storage = item.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage
    return list(found.values())
