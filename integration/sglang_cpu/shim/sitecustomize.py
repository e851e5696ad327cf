"""Changes torch right after its import, so that SGLang's code for CUDA devices runs on a CPU.

Done where torch has no accelerator: declares the operators that torchvision's CUDA build registers fakes for; drops
`pin_memory`; gives CUDA events and streams that are always complete, since on a CPU work is done when a call returns.
"""

import functools
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_PINNING = ("arange", "empty", "empty_like", "empty_strided", "full", "ones", "rand", "randn", "tensor", "zeros")


class _Event:
    """A CUDA event of work that is over."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, *_: object, **__: object) -> None: ...

    def wait(self, *_: object, **__: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: object) -> float:
        return 0.0


class _Stream:
    """A CUDA stream with nothing on it."""

    cuda_stream = 0

    def synchronize(self) -> None: ...

    def wait_event(self, *_: object) -> None: ...

    def wait_stream(self, *_: object) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def query(self) -> bool:
        return True


def _unpinned(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return call


def _adapt(torch: Any) -> None:
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch.pearl_declared = library
    if torch.cuda.is_available():
        return
    for name in (*_PINNING, "ones_like", "zeros_like"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    stream = _Stream()
    torch.cuda.Event = _Event
    torch.cuda.current_stream = lambda *_, **__: stream


class _AdaptingLoader(importlib.machinery.SourceFileLoader):
    """Loads torch, then adapts it."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _adapt(module)


class _TorchFinder:
    """Finds torch once, with the loader above."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.origin is not None:
            spec.loader = _AdaptingLoader(name, spec.origin)
        return spec


sys.meta_path.insert(0, _TorchFinder())  # type: ignore[arg-type]
