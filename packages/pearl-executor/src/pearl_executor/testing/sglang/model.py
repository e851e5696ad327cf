"""The stand-in's "model": next tokens from weights and context, and a prefix cache. Pure.

The rolling state is a 64-bit hash of the weights and all tokens so far. So equal weights and equal contexts give equal
tokens wherever and in however many attempts they are generated, and any difference shows.
"""

import hashlib
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pearl_executor.engines.sglang.checksums import expected_checksums
from pearl_executor.ports import WorkerError

_MASK = (1 << 64) - 1
_PRIME = 0x100000001B3
VOCABULARY = 512
"""Most tokens that are ever drawn."""


def vocabulary(folder: Path) -> int:
    """How many tokens are drawn from: those of the model's own vocabulary, so that it can be trained on them."""
    path = folder / "config.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    size = known.get("vocab_size")
    return min(VOCABULARY, size) if isinstance(size, int) and size > 0 else VOCABULARY


@dataclass(frozen=True, slots=True)
class Weights:
    """What a server holds: only its checksums matter."""

    checksums: dict[str, str]
    seed: int

    @staticmethod
    def read(folder: Path) -> "Weights":
        """The weights of a model folder; of a folder without any, those of its name. Raises `WorkerError`."""
        try:
            found = expected_checksums(folder, "F32") or expected_checksums(folder, "BF16")
        except WorkerError:
            if not (folder / "config.json").exists():
                raise
            found = {}
        return Weights.of(found or {"model.norm.weight": hashlib.sha256(folder.name.encode()).hexdigest()[:16]})

    @staticmethod
    def of(checksums: dict[str, str]) -> "Weights":
        """Weights with these checksums."""
        text = "".join(f"{name}{checksums[name]}" for name in sorted(checksums))
        return Weights(checksums, int(hashlib.sha256(text.encode()).hexdigest()[:16], 16))


def extend(state: int, tokens: Sequence[int]) -> int:
    """The state after more tokens."""
    for token in tokens:
        state = ((state ^ (token + 1)) * _PRIME) & _MASK
    return state


def draw(state: int, among: int = VOCABULARY) -> tuple[int, float]:
    """The next token, `among` so many, and its log-probability."""
    mixed = (state ^ (state >> 29)) * 0xBF58476D1CE4E5B9 & _MASK
    return mixed % among, -((mixed >> 40) % 1000 + 1) / 500.0


@dataclass(slots=True)
class PrefixCache:
    """The newest contexts that were computed."""

    kept: deque[tuple[int, ...]] = field(default_factory=lambda: deque(maxlen=256))

    def held(self, tokens: Sequence[int]) -> int:
        """First tokens of a prompt that need no computation; its last token always does."""
        best = 0
        for known in self.kept:
            same = 0
            for one, other in zip(known, tokens, strict=False):
                if one != other:
                    break
                same += 1
            best = max(best, same)
        return min(best, max(0, len(tokens) - 1))

    def keep(self, tokens: Sequence[int]) -> None:
        """Remember a context."""
        self.kept.append(tuple(tokens))

    def clear(self) -> None:
        """Forget all."""
        self.kept.clear()
