"""Changes modules right after their import, so that SGLang's code for CUDA devices runs on a CPU.

Done where torch has no accelerator: declares the operators that torchvision's CUDA build registers fakes for; drops
`pin_memory`; gives CUDA events and streams that are always complete, since on a CPU work is done when a call returns.
checkpoint-engine's receiver takes shared memory of the CPU for what is a GPU's to it.
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


def _adapt_receiver(worker: Any) -> None:
    """checkpoint-engine's receiver: memory that is shared between processes, on a CPU instead of a GPU."""

    class Device:
        """What is left of a device: work is done when a call returns, and nothing is cached."""

        def __init__(self) -> None:
            self.device_module = self

        def synchronize(self) -> None: ...

        def ipc_collect(self) -> None: ...

        def empty_cache(self) -> None: ...

    worker.DeviceManager = Device
    worker._rebuild_ipc = lambda handle, device_id=None: handle[0](*handle[1])


class _AdaptingLoader(importlib.machinery.SourceFileLoader):
    """Loads a module, then adapts it."""

    def __init__(self, name: str, path: str, adapt: Callable[[Any], None]) -> None:
        super().__init__(name, path)
        self._adapt = adapt

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self._adapt(module)


class _Finder:
    """Finds one module once, with the loader above."""

    def __init__(self, name: str, adapt: Callable[[Any], None]) -> None:
        self._name = name
        self._adapt = adapt

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.origin is not None:
            spec.loader = _AdaptingLoader(name, spec.origin, self._adapt)
        return spec


sys.meta_path.insert(0, _Finder("torch", _adapt))  # type: ignore[arg-type]
sys.meta_path.insert(0, _Finder("checkpoint_engine.worker", _adapt_receiver))  # type: ignore[arg-type]
