"""Append records, make them durable together, read them back."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Final

from pearl_rl.journal.frames import JournalError, Record, frame, records, scan
from pearl_rl.journal.storage import Storage

SCHEMA: Final = 2
"""Version of what records mean; the first record of every segment carries it. A reader refuses newer ones by name."""

BEGIN: Final = "begin"
"""Kind of a segment's first record: the schema, the number of the next record, and a snapshot of everything before."""


class Journal:
    """One writer. Records are numbered from 0 over all segments; a snapshot begins a new segment.

    `append` only collects; `commit` returns once all that was appended before it is durable. Commits of several callers
    that come while a flush is under way share the next one (group commit).
    """

    def __init__(self, storage: Storage) -> None:
        """Continue the journal in `storage`, or begin an empty one.

        Cuts off what a kill left behind the last whole frame: it was never acknowledged. Raises `JournalError` where
        acknowledged records are damaged or a newer schema was written.
        """
        self._storage = storage
        self._segment, self.next_number, self.torn_bytes = _open(storage)
        self._durable = self.next_number
        self._lines: list[bytes] = []
        self._flushing: asyncio.Task[None] | None = None
        self._failed: JournalError | None = None
        self.commits = 0
        """Flushes so far."""

    @property
    def flushing(self) -> bool:
        """Whether a `commit` writes at this moment; nothing else may be written then."""
        return self._flushing is not None

    @property
    def empty(self) -> bool:
        """Whether nothing was ever written: begin with `snapshot`."""
        return self._segment == 0

    def append(self, kind: str, value: Any) -> int:
        """Collect a record; returns its number. Lost unless `commit` returns after it."""
        number = self.next_number
        self.next_number += 1
        self._lines.append(_line({"n": number, "k": kind, "v": value}))
        return number

    def snapshot(self, value: Any) -> None:
        """Begin a new segment with `value`, which stands for all records appended so far. Durable on return.

        Not while `flushing`: records would change their order.
        """
        if self.flushing:
            raise RuntimeError("a snapshot in the middle of a commit")
        self.commit_now()
        line = _line({"n": self.next_number, "k": BEGIN, "schema": SCHEMA, "v": value})
        self._write(self._segment + 1, [line])
        self._segment += 1

    async def commit(self) -> None:
        """Return once everything appended before this call is durable. Raises `JournalError` where the disk refuses."""
        wanted = self.next_number
        while self._durable < wanted:
            if self._failed is not None:
                raise self._failed
            if self._flushing is None:
                # A task of its own: a caller that is cancelled must not let the next flush begin beside this one.
                self._flushing = asyncio.get_running_loop().create_task(self._flush_in_thread())
            await asyncio.shield(self._flushing)

    async def _flush_in_thread(self) -> None:
        upto = self.next_number
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._flush, self._take())
            self._durable = upto
        finally:
            self._flushing = None

    def commit_now(self) -> None:
        """`commit` without an event loop. Raises `JournalError` where the disk refuses, now or before."""
        if self._failed is not None:
            raise self._failed
        self._flush(self._take())
        self._durable = self.next_number

    def _take(self) -> list[bytes]:
        lines, self._lines = self._lines, []
        return lines

    def _flush(self, lines: list[bytes]) -> None:
        if not lines:
            return
        if self._segment == 0:
            raise JournalError("the journal was not begun: write a snapshot first")
        self._write(self._segment, lines)
        self.commits += 1

    def _write(self, segment: int, lines: list[bytes]) -> None:
        try:
            self._storage.append(segment, frame(lines))
            self._storage.sync(segment)
        except JournalError as error:
            # Nothing may be appended behind a hole.
            self._failed = error
            raise


def read(storage: Storage, *, up_to: int | None = None, since: int | None = None) -> tuple[Record, Iterator[Record]]:
    """The newest snapshot (not after record `since`, where it is given; 0 is the first one), and all records after it.

    `up_to` is the number of the first record that is not given. Raises `JournalError` where there is no such snapshot.
    """
    segments = storage.segments()
    if not segments:
        raise JournalError("the journal is empty")
    begin: Record | None = None
    first = 0
    latest = min((number for number in (up_to, since) if number is not None), default=None)
    for at in reversed(range(len(segments))):
        found = _begin(storage, segments[at])
        if found is not None and (latest is None or found["n"] <= latest):
            begin, first = found, at
            break
    if begin is None:
        raise JournalError(_no_snapshot(storage, segments, latest))
    return begin, _records(storage, segments[first:], up_to)


def _no_snapshot(storage: Storage, segments: list[int], latest: int | None) -> str:
    """Why there is none to begin with."""
    readable = [found["n"] for segment in segments if (found := _begin(storage, segment)) is not None]
    if not readable:
        files = "its file does not begin" if len(segments) == 1 else f"none of its {len(segments)} files begins"
        return f"is damaged: {files} with a snapshot that can be read"
    return (
        f"what comes before record {readable[0]} is damaged or missing, and record {latest} is asked for; "
        f"ask for record {readable[0]} or a later one"
    )


def _records(storage: Storage, segments: list[int], up_to: int | None) -> Iterator[Record]:
    expected: int | None = None
    for segment in segments:
        found = scan(storage.read(segment))
        for payload in found.payloads:
            for record in records(payload):
                if record.get("k") == BEGIN:
                    continue
                number = record.get("n")
                if not isinstance(number, int) or (expected is not None and number != expected):
                    raise JournalError(f"segment {segment}: record {number} where {expected} must be")
                if up_to is not None and number >= up_to:
                    return
                expected = number + 1
                yield record
        if found.damaged_at is not None:
            raise JournalError(f"segment {segment}: damaged at byte {found.damaged_at}, and more follows")


def _begin(storage: Storage, segment: int) -> Record | None:
    """A segment's first record; None where its writing was cut short."""
    payloads = scan(storage.read(segment)).payloads
    first = next(records(payloads[0]), None) if payloads else None
    if first is None:
        return None
    if first.get("k") != BEGIN or not isinstance(first.get("n"), int):
        raise JournalError(f"segment {segment}: does not begin with a snapshot")
    if first.get("schema") != SCHEMA:
        raise JournalError(
            f"segment {segment}: schema {first.get('schema')!r}, this one reads {SCHEMA}: use the version that wrote it"
        )
    return first


def _open(storage: Storage) -> tuple[int, int, int]:
    """The segment to go on with, the next record's number, and how many torn bytes were cut off."""
    torn = 0
    for segment in reversed(storage.segments()):
        data = storage.read(segment)
        found = scan(data)
        if found.damaged_at is not None:
            raise JournalError(f"segment {segment}: damaged at byte {found.damaged_at}, and more follows")
        torn += len(data) - found.end
        if found.end < len(data):
            storage.truncate(segment, found.end)
        begin = _begin(storage, segment)
        if begin is None:
            continue
        number = begin["n"]
        for payload in reversed(found.payloads):
            last = next(records(payload.rsplit(b"\n", 1)[-1]), None)
            if last is not None and last.get("k") != BEGIN:
                number = _number(segment, last) + 1
                break
        return segment, number, torn
    return 0, 0, torn


def _number(segment: int, record: Record) -> int:
    number = record.get("n")
    if not isinstance(number, int):
        raise JournalError(f"segment {segment}: a record has no number")
    return number


def _line(record: Record) -> bytes:
    return json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
