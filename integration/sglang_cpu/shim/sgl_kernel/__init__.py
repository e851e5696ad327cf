"""Stands in for SGLang's kernel package, whose wheels hold CUDA code only. Dense models on a CPU call none of it."""

from collections.abc import Callable
from typing import Any

import torch  # noqa: F401 - SGLang expects that importing its kernels has imported torch

__version__ = "0.4.10"


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_: object, **__: object) -> None:
        raise RuntimeError(f"sgl_kernel.{name} was called: it has no stand-in on a CPU")

    return kernel
