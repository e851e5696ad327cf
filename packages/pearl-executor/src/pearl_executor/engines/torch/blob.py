"""KvBlob: the KV of one request on its way between workers, with everything needed to continue the request."""

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from pearl_executor.ports import TransferError
from pearl_state.trajectory import WeightSpan

_MAGIC = b"PKV1"
_STORAGE: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<i2"),
}
"""numpy has no bfloat16: its bits travel as 16-bit integers."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvBlob:
    """KV of `tokens[start:-1]`: the last token is known but not yet computed, as always between two decode steps.

    Arrays are per layer, shaped [tokens, KV heads, head dim]; keys are stored as attention uses them (rotated).
    """

    rid: str
    version: int
    """Weight version of the engine that exported it."""
    mixed: bool = False
    """Whether a weight load happened while the KV was computed: then it serves this request, but no other."""
    tokens: tuple[int, ...]
    """Prompt and generated tokens."""
    start: int = 0
    """First token whose KV is here; the receiver must hold the KV of those before."""
    logprobs: tuple[float, ...]
    """Of the generated tokens, which are the last `len(logprobs)` of `tokens`; from a prefill worker, of one."""
    spans: tuple[WeightSpan, ...]
    dtype: str
    """"float32", "float16" or "bfloat16" (as 16-bit integers)."""
    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    cached_tokens: int = 0
    """Prompt tokens that the exporting engine found in its prefix cache."""
    queue_s: float = 0.0
    prefill_s: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of KV: what a hand-over moves."""
        return sum(array.nbytes for array in chain(self.keys, self.values))

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV is here."""
        return len(self.tokens) - 1 - self.start

    def tail(self, start: int) -> "KvBlob":
        """The same without the KV of the first `start` tokens, for a receiver that holds them (`Engine.held_tokens`).

        Keeps at least the KV of one token. Never adds: a smaller `start` than the present one changes nothing.
        """
        drop = min(start, len(self.tokens) - 2) - self.start
        if drop <= 0:
            return self
        keys, values = tuple(k[drop:] for k in self.keys), tuple(v[drop:] for v in self.values)
        return replace(self, start=self.start + drop, keys=keys, values=values)

    def to_bytes(self) -> bytes:
        """Self-describing bytes: magic, CRC-32 of all that follows, header length, JSON header, KV layer by layer."""
        data = b"".join(np.ascontiguousarray(array).tobytes() for pair in self._layers() for array in pair)
        header = {name: getattr(self, name) for name in _HEADER}
        header["spans"] = [(span.version, span.tokens) for span in self.spans]
        header["layers"] = [(k.shape, v.shape) for k, v in self._layers()]
        text = json.dumps(header).encode()
        rest = b"".join((struct.pack("<I", len(text)), text, data))
        return b"".join((_MAGIC, struct.pack("<I", zlib.crc32(rest)), rest))

    @staticmethod
    def from_bytes(data: bytes) -> "KvBlob":
        """Read what `to_bytes` wrote. Raises `TransferError` for bytes that are not whole or not consistent."""
        try:
            return _read(memoryview(data))
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise TransferError(f"KV hand-over of {len(data)} bytes is not readable: {error}") from error

    def _layers(self) -> Sequence[tuple[Array, Array]]:
        return list(zip(self.keys, self.values, strict=True))


_HEADER = (
    "rid", "version", "mixed", "tokens", "start", "logprobs", "dtype", "cached_tokens", "queue_s", "prefill_s",
)  # fmt: skip


def _read(data: memoryview) -> KvBlob:
    if bytes(data[:4]) != _MAGIC:
        raise ValueError(f"starts with {bytes(data[:4])!r}, not {_MAGIC!r}")
    crc, length = struct.unpack("<II", data[4:12])
    if zlib.crc32(data[8:]) != crc:
        raise ValueError("its checksum differs: damaged or cut off on the way")
    header = json.loads(bytes(data[12 : 12 + length]))
    body = data[12 + length :]
    storage = _STORAGE[header["dtype"]]
    arrays: list[Array] = []
    offset = 0
    for shape in chain.from_iterable(header["layers"]):
        count = int(np.prod(shape))
        arrays.append(np.frombuffer(body, storage, count, offset).reshape(shape))
        offset += count * storage.itemsize
    if offset != len(body):
        raise ValueError(f"{len(body)} bytes of KV, but the header describes {offset}")
    fields = {name: header[name] for name in _HEADER}
    fields["tokens"], fields["logprobs"] = tuple(header["tokens"]), tuple(header["logprobs"])
    blob = KvBlob(
        **fields,
        spans=tuple(WeightSpan(version, tokens) for version, tokens in header["spans"]),
        keys=tuple(arrays[::2]),
        values=tuple(arrays[1::2]),
    )
    if any(len(array) != blob.kv_tokens for array in arrays):
        raise ValueError(f"{blob.kv_tokens} tokens of KV announced, arrays hold {sorted({len(a) for a in arrays})}")
    return blob
