"""What SGLang's checksum of a server's weights must be for a snapshot: computed from the snapshot's own bytes.

SGLang fuses q/k/v and gate/up projections along their first axis, which for contiguous tensors is a concatenation of
bytes. So no tensor library is needed. It holds where weights stay whole and on the CPU (one rank, no quantization);
elsewhere servers are compared with each other.
"""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pearl_executor.ports import WorkerError

_FUSED: Final[Mapping[str, tuple[str, ...]]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_PART_OF: Final = {part: fused for fused, parts in _FUSED.items() for part in parts}
_VOCABULARY: Final = ("model.embed_tokens.weight", "lm_head.weight")
_VOCABULARY_ROWS: Final = 64
"""SGLang pads these with rows of zeros to a multiple of this."""
_BLOCK: Final = 1 << 20
_TORCH_DTYPES: Final = {
    "F64": "torch.float64", "F32": "torch.float32", "F16": "torch.float16", "BF16": "torch.bfloat16",
    "I64": "torch.int64", "I32": "torch.int32", "I16": "torch.int16", "I8": "torch.int8", "U8": "torch.uint8",
    "BOOL": "torch.bool",
}  # fmt: skip
Place = tuple[Path, int, int]
"""File, first byte, byte after the last."""


def snapshot_checksum(folder: Path) -> str:
    """The digest under which a snapshot was published (`engines.torch.weights.weights_checksum`), from its files."""
    entries = {name: (kind, shape, place) for name, kind, shape, place in stored_tensors(folder)}
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(entries):
        kind, shape, place = entries[name]
        digest.update(f"{name}|{_TORCH_DTYPES.get(kind, kind)}|{tuple(shape)}|".encode())
        for block in _blocks(place):
            digest.update(block)
    return digest.hexdigest()


def expected_checksums(folder: Path, dtype: str) -> dict[str, str]:
    """SGLang's parameter name → its checksum, for a folder of safetensors whose values have `dtype` ("F32", "BF16").

    Empty where a file holds another dtype: SGLang would convert it. Raises `WorkerError` for files that are not whole.
    """
    places: dict[str, Place] = {}
    padding: dict[str, int] = {}
    for name, kind, shape, place in stored_tensors(folder):
        if kind != dtype:
            return {}
        places[name] = place
        if name in _VOCABULARY:
            padding[name] = -shape[0] % _VOCABULARY_ROWS * ((place[2] - place[1]) // shape[0])
    found: dict[str, str] = {}
    for name, place in places.items():
        head, part, tail = _split(name)
        if part is None:
            found[name] = _digest([place], padding.get(name, 0))
            continue
        fused = _PART_OF[part]
        names = [f"{head}{p}{tail}" for p in _FUSED[fused]]
        if all(n in places for n in names):
            found[f"{head}{fused}{tail}"] = _digest([places[n] for n in names])
    return found


def _split(name: str) -> tuple[str, str | None, str]:
    for part in _PART_OF:
        head, dot, tail = name.partition(f".{part}.")
        if dot:
            return f"{head}.", part, f".{tail}"
    return name, None, ""


def _digest(places: list[Place], zeros: int = 0) -> str:
    digest = hashlib.sha256()
    for place in places:
        for block in _blocks(place):
            digest.update(block)
    digest.update(bytes(zeros))
    return digest.hexdigest()[:16]


def _blocks(place: Place) -> Iterator[bytes]:
    file, start, end = place
    with file.open("rb") as stream:
        stream.seek(start)
        left = end - start
        while left > 0 and (block := stream.read(min(_BLOCK, left))):
            left -= len(block)
            yield block


def stored_tensors(folder: Path) -> Iterator[tuple[str, str, list[int], Place]]:
    """Name, dtype, shape, and where its bytes lie, of each tensor of all files."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WorkerError(f"no weights in {folder}: expected .safetensors files")
    for file in files:
        yield from _entries(file)


def _entries(file: Path) -> Iterator[tuple[str, str, list[int], Place]]:
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header: dict[str, Any] = json.loads(stream.read(length)) if length < size else {}
        offset = 8 + length
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                if offset + end > size:
                    raise ValueError(f"{name} ends after the file")
                yield name, str(entry["dtype"]), list(entry["shape"]), (file, offset + start, offset + end)
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise WorkerError(f"weights in {file} are not readable: {error}") from None


def compare(found: Mapping[str, str], expected: Mapping[str, str]) -> str | None:
    """Why a server's weights are not the snapshot's; None where they are.

    A head that is tied to the embedding is no parameter of its own in the server.
    """
    differing = sorted(name for name in expected.keys() & found.keys() if expected[name] != found[name])
    if differing:
        return f"{len(differing)} of {len(found)} parameters differ, {differing[0]} first"
    missing = sorted(expected.keys() - found.keys() - {"lm_head.weight"})
    if missing:
        return f"{len(missing)} parameters of the snapshot are not in the server, {missing[0]} first"
    return None
