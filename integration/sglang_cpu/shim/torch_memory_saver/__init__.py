"""Stands in for torch_memory_saver on a CPU: gives pages back while addresses stay valid, as CUDA's VMM does.

Storages that are made inside a region are remembered by tag and their pages committed. `pause` drops the pages (their
contents are gone unless backed up); `resume` commits them again. As with the real one, what a caller must not do
shows: paused memory reads as zeros, not as weights.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_PAGE = 4096
_MADV_DONTNEED = 4
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _commit(storage: torch.UntypedStorage) -> None:
    """Make the kernel back every page, contents unchanged."""
    view = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
    view[::_PAGE].add_(0)


def _drop(storage: torch.UntypedStorage) -> None:
    """Give whole pages inside the storage back to the kernel."""
    start, size = storage.data_ptr(), storage.nbytes()
    low, high = -(-start // _PAGE) * _PAGE, (start + size) // _PAGE * _PAGE
    if high > low and _LIBC.madvise(low, high - low, _MADV_DONTNEED) != 0:
        raise OSError(ctypes.get_errno(), "madvise")


class _Recorder(TorchDispatchMode):
    """Notes every storage that an operation returns."""

    def __init__(self, found: "dict[Any, bool]", backup: bool) -> None:
        super().__init__()
        self._found = found
        self._backup = backup

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and tensor.untyped_storage().nbytes():
                self._found.setdefault(tensor.untyped_storage()._weak_ref(), self._backup)
        return result


class TorchMemorySaver:
    """What SGLang uses of it."""

    enabled = True

    def __init__(self) -> None:
        self._regions: dict[str, dict[Any, bool]] = {}
        self._backups: dict[Any, torch.UntypedStorage] = {}
        self._paused: set[str] = set()

    @contextmanager
    def region(self, tag: str = "default", enable_cpu_backup: bool = False, **_: object) -> Iterator[None]:
        """Everything allocated inside belongs to `tag`."""
        region = self._regions.setdefault(tag, {})
        with _Recorder(region, enable_cpu_backup):
            yield
        for _, storage, _ in self._living(tag):
            _commit(storage)

    @contextmanager
    def cuda_graph(self, **_: object) -> Iterator[None]:
        """There are no graphs."""
        yield

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Nothing is recorded outside regions anyway."""
        yield

    def pause(self, tag: str | None = None) -> None:
        """Give the memory of a tag, or of all, back."""
        for name in [tag] if tag else list(self._regions):
            if name not in self._paused:
                for key, storage, backup in self._living(name):
                    if backup:
                        self._backups[key] = storage.clone()
                    _drop(storage)
                self._paused.add(name)

    def resume(self, tag: str | None = None) -> None:
        """Take it again."""
        for name in [tag] if tag else list(self._regions):
            if name in self._paused:
                for key, storage, _ in self._living(name):
                    saved = self._backups.pop(key, None)
                    _commit(storage) if saved is None else storage.copy_(saved)
                self._paused.discard(name)

    def _living(self, tag: str) -> Iterator[tuple[Any, torch.UntypedStorage, bool]]:
        region = self._regions.get(tag, {})
        for key, backup in list(region.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(key)
            if storage is None:
                del region[key]
            else:
                yield key, storage, backup


torch_memory_saver = TorchMemorySaver()


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """A CPU needs no preloaded library."""
    yield
