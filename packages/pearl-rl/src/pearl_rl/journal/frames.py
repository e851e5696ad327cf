"""The journal's bytes: checksummed frames, each one group commit of whole records.

A frame is `PJL1`, the payload's length and CRC-32 (both 32 bits, little-endian), and the payload: one JSON object a
line. A frame counts whole or not at all. JSON because a journal may come from a stranger: it is data, never code.

Why not a database: only appends and one sequential read are ever needed. A frame costs one write and one flush, and
what truncation or a flipped bit anywhere does to it can be tested byte by byte.
"""

import json
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

MAGIC: Final = b"PJL1"
_HEAD: Final = struct.Struct("<4sII")
MOST_PAYLOAD_BYTES: Final = 1 << 30
"""A longer frame is taken for damage."""

Record = dict[str, Any]


class JournalError(Exception):
    """A journal cannot be read or continued; the message says where and why, in one line."""


@dataclass(frozen=True, slots=True)
class Scan:
    """What a segment holds."""

    payloads: tuple[bytes, ...]
    """Of the whole frames, in order."""
    end: int
    """Where the last whole frame ends, bytes; what follows was never acknowledged."""
    damaged_at: int | None
    """Where a frame is damaged though whole ones follow: acknowledged records are lost. None where nothing is."""


def frame(lines: Iterable[bytes]) -> bytes:
    """One frame of records, each a line of JSON without its line end."""
    payload = b"\n".join(lines)
    return _HEAD.pack(MAGIC, len(payload), zlib.crc32(payload)) + payload


def scan(data: bytes) -> Scan:
    """Read the frames of a segment until the first that is not whole."""
    payloads: list[bytes] = []
    at = 0
    while (payload := _frame_at(data, at)) is not None:
        payloads.append(payload)
        at += _HEAD.size + len(payload)
    return Scan(tuple(payloads), at, at if _whole_frame_after(data, at) else None)


def records(payload: bytes) -> Iterator[Record]:
    """The records of a frame. Raises `JournalError` for what is none."""
    if not payload:
        return
    for line in payload.split(b"\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise JournalError(f"a record is no JSON ({error}): {line[:80]!r}") from None
        if not isinstance(record, dict):
            raise JournalError(f"a record is no JSON object: {line[:80]!r}")
        yield record


def _frame_at(data: bytes, at: int) -> bytes | None:
    """The payload of the frame at `at`; None where there is no whole one."""
    if at + _HEAD.size > len(data):
        return None
    magic, size, checksum = _HEAD.unpack_from(data, at)
    if magic != MAGIC or size > MOST_PAYLOAD_BYTES or at + _HEAD.size + size > len(data):
        return None
    payload = data[at + _HEAD.size : at + _HEAD.size + size]
    return payload if zlib.crc32(payload) == checksum else None


def _whole_frame_after(data: bytes, at: int) -> bool:
    """Whether a whole frame begins somewhere behind `at`."""
    found = data.find(MAGIC, at + 1)
    while found >= 0:
        if _frame_at(data, found) is not None:
            return True
        found = data.find(MAGIC, found + 1)
    return False
