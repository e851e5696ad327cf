"""The journal: durable before it is acknowledged, whole or cut at an acknowledged record, and never silently wrong."""

import asyncio
import errno
import os
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl_rl.journal.frames import JournalError, frame, records, scan
from pearl_rl.journal.journal import Journal, read
from pearl_rl.journal.storage import FolderStorage, MemoryStorage


def written(storage, *batches, begin=None):
    journal = Journal(storage)
    if journal.empty:
        journal.snapshot(begin or {"start": True})
    for batch in batches:
        for value in batch:
            journal.append("event", value)
        journal.commit_now()
    return journal


def values(storage, **options):
    begin, rest = read(storage, **options)
    return begin["v"], [record["v"] for record in rest]


def test_records_come_back_in_order_over_snapshots_and_restarts(tmp_path) -> None:
    storage = FolderStorage(tmp_path / "journal")
    journal = written(storage, [1, 2], [3])
    journal.snapshot({"so far": 3})
    journal.append("event", 4)
    journal.commit_now()
    storage.close()
    again = written(FolderStorage(tmp_path / "journal"), [5])
    assert again.next_number == 5
    reopened = FolderStorage(tmp_path / "journal")
    assert values(reopened) == ({"so far": 3}, [4, 5])
    assert values(reopened, since=0) == ({"start": True}, [1, 2, 3, 4, 5])
    assert values(reopened, up_to=2) == ({"start": True}, [1, 2])
    assert values(reopened, up_to=4) == ({"so far": 3}, [4])


@given(cut=st.floats(0, 1), batches=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4), max_size=6))
@settings(max_examples=60, deadline=None)
def test_a_journal_cut_at_any_byte_keeps_every_whole_commit_before_it(cut, batches) -> None:
    whole = MemoryStorage()
    written(whole, *batches)
    data = whole.read(1)
    ends, at = [], 0
    for payload in scan(data).payloads:
        at += 12 + len(payload)
        ends.append(at)
    size = int(cut * len(data))
    storage = MemoryStorage()
    storage.append(1, data[:size])
    journal = Journal(storage)
    kept = sum(end <= size for end in ends)
    if kept == 0:
        assert journal.empty
        return
    assert values(storage)[1] == [value for batch in batches[: kept - 1] for value in batch]
    journal.append("event", 1000)
    journal.commit_now()
    assert values(storage)[1][-1] == 1000


@given(seed=st.integers(0, 10**6))
@settings(max_examples=80, deadline=None)
def test_a_flipped_bit_loses_the_tail_or_is_named_but_never_changes_what_is_read(seed) -> None:
    rng = random.Random(seed)
    whole = MemoryStorage()
    written(whole, [1, 2], [3], [4, 5, 6], [7])
    data = bytearray(whole.read(1))
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    storage = MemoryStorage()
    storage.append(1, bytes(data))
    got, told = [], ""
    try:
        Journal(storage)
        got = values(storage)[1]
    except JournalError as error:
        told = str(error)
    assert got == [1, 2, 3, 4, 5, 6, 7][: len(got)]
    assert len(got) in (6, 7) or any(word in told for word in ("damaged at byte", "empty", "no snapshot"))


def test_only_what_was_committed_survives_a_power_cut() -> None:
    storage = MemoryStorage()
    journal = written(storage, [1])
    journal.append("event", 2)
    storage.append(1, frame([b'{"n":1,"k":"event","v":2}']))
    storage.cut_power(kept_bytes=7)
    assert Journal(storage).next_number == 1
    assert values(storage)[1] == [1]


def test_commits_that_come_together_share_a_flush(tmp_path) -> None:
    async def main():
        storage = FolderStorage(tmp_path / "journal")
        journal = written(storage)

        async def one(number):
            journal.append("event", number)
            await journal.commit()

        await asyncio.gather(*(one(number) for number in range(500)))
        assert values(storage)[1] == list(range(500))
        storage.close()
        return journal.commits

    assert asyncio.run(main()) < 20


def test_a_full_disk_is_one_named_error_and_nothing_is_written_behind_it(tmp_path, monkeypatch) -> None:
    async def main():
        storage = FolderStorage(tmp_path / "journal")
        journal = written(storage, [1])
        whole = os.write

        def full(descriptor, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        journal.append("event", 2)
        with pytest.raises(JournalError, match=r"cannot be written \(No space left on device\)"):
            await journal.commit()
        monkeypatch.setattr(os, "write", whole)
        journal.append("event", 3)
        with pytest.raises(JournalError, match="No space"):
            await journal.commit()
        storage.close()

    asyncio.run(main())
    assert values(FolderStorage(tmp_path / "journal"))[1] == [1]


def test_a_newer_schema_and_a_gap_in_the_numbers_are_refused_by_name() -> None:
    storage = MemoryStorage()
    storage.append(1, frame([b'{"n":0,"k":"begin","schema":99,"v":{}}']))
    with pytest.raises(JournalError, match="schema 99"):
        Journal(storage)
    storage = MemoryStorage()
    written(storage, [1])
    storage.append(1, frame([b'{"n":5,"k":"event","v":2}']))
    with pytest.raises(JournalError, match="record 5 where 1 must be"):
        values(storage)


@given(data=st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_read_without_a_traceback(data) -> None:
    for payload in (*scan(data).payloads, data):
        told = ""
        try:
            list(records(payload))
        except JournalError as error:
            told = str(error)
        assert "\n" not in told


def test_a_commit_that_is_cancelled_lets_nothing_be_written_beside_it(tmp_path) -> None:
    """Frames that change places would make the journal unreadable."""
    slow = threading.Event()

    class Slow(FolderStorage):
        def sync(self, segment: int) -> None:
            slow.wait(10.0)
            super().sync(segment)

    async def main() -> None:
        slow.set()
        journal = Journal(Slow(tmp_path))
        journal.snapshot({})
        slow.clear()
        journal.append("event", "first")
        first = asyncio.create_task(journal.commit())
        await asyncio.sleep(0.01)
        assert journal.flushing
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert journal.flushing
        with pytest.raises(RuntimeError, match="in the middle of a commit"):
            journal.snapshot({})
        journal.append("event", "second")
        second = asyncio.create_task(journal.commit())
        await asyncio.sleep(0.01)
        slow.set()
        await second
        assert not journal.flushing

    asyncio.run(main())
    assert [record["v"] for record in read(FolderStorage(tmp_path))[1]] == ["first", "second"]


@pytest.mark.parametrize("write", [0, 1, 2])
def test_a_disk_that_refuses_a_snapshot_or_a_commit_ends_the_journal(tmp_path, write: int) -> None:
    class Full(FolderStorage):
        writes = 0

        def append(self, segment: int, data: bytes) -> None:
            self.writes += 1
            if self.writes > write + 1:
                super().append(segment, data[:20])
                raise JournalError("no space left")
            super().append(segment, data)

    async def main() -> None:
        journal = Journal(Full(tmp_path))
        journal.snapshot({})
        for number in range(write):
            journal.append("event", number)
            await journal.commit()
        journal.append("event", "lost")
        with pytest.raises(JournalError, match="no space"):
            journal.snapshot({}) if write == 1 else await journal.commit()
        for again in (journal.commit_now, lambda: journal.snapshot({})):
            with pytest.raises(JournalError, match="no space"):
                again()

    asyncio.run(main())
    assert [record["v"] for record in read(FolderStorage(tmp_path))[1]] == list(range(write))
