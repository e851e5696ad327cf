"""Time that a rank spends on parts of an update."""

import time
from collections.abc import Callable

import torch
from torch import Tensor


class Stopwatch:
    """Adds up the time within its `with` blocks, seconds; on CUDA until the device is through with them."""

    def __init__(self, device: str) -> None:
        self.seconds = 0.0
        self._cuda = device == "cuda"
        self._began_s = 0.0

    def __enter__(self) -> None:
        self._began_s = self._now_s()

    def __exit__(self, *_: object) -> None:
        self.seconds += self._now_s() - self._began_s

    def _now_s(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def timed_score(score: Callable[[Tensor], Tensor], watch: Stopwatch) -> Callable[[Tensor], Tensor]:
    """`score`, each call of which `watch` times."""

    def timed(tokens: Tensor) -> Tensor:
        with watch:
            return score(tokens)

    return timed
