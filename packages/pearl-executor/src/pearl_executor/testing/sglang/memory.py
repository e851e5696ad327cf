"""Real memory for the stand-in to hold, give back and take again, so that a release can be measured."""

import mmap
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from pearl_executor.engines.sglang.sizes import ModelSize


@dataclass(slots=True)
class Ballast:
    """Committed memory by tag."""

    regions: dict[str, mmap.mmap]
    stuck: bool = False
    """A fault: releases answer, and give nothing back."""
    _dropped: set[str] = field(default_factory=set[str])

    @staticmethod
    def of(model_dir: Path, kv_tokens: int) -> "Ballast":
        """As much as a model's weights and KV pool take; a small piece where the folder does not say."""
        try:
            size = ModelSize.of(model_dir, "float32")
        except ValueError:
            size = ModelSize(0, 64)
        sizes = {"weights": size.weight_bytes, "kv_cache": kv_tokens * size.kv_bytes_per_token}
        ballast = Ballast({tag: _private(count) for tag, count in sizes.items()})
        for tag in sizes:
            ballast.commit(tag)
        return ballast

    def drop(self, tags: Collection[str]) -> None:
        """Give the pages of `tags` back."""
        for tag in set(tags) & (self.regions.keys() - self._dropped):
            if not self.stuck:
                self.regions[tag].madvise(mmap.MADV_DONTNEED)
            self._dropped.add(tag)

    def commit(self, tag: str) -> None:
        """Have the kernel back every page of a tag."""
        region = self.regions.get(tag)
        if region is not None:
            self._dropped.discard(tag)
            for at in range(0, len(region), mmap.PAGESIZE):
                region[at] = 1


def _private(size: int) -> mmap.mmap:
    return mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
