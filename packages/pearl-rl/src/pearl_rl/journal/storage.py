"""Where a journal's bytes lie: numbered segments, in a folder or, for tests, in memory."""

import os
from pathlib import Path
from typing import Final, Protocol

from pearl_rl.journal.frames import JournalError

_SUFFIX: Final = ".journal"


class Storage(Protocol):
    """Segments of bytes, numbered from 1, that only grow; only the last one is written to."""

    def segments(self) -> list[int]:
        """Their numbers, in order."""
        ...

    def read(self, segment: int) -> bytes:
        """All bytes of a segment."""
        ...

    def append(self, segment: int, data: bytes) -> None:
        """Write at a segment's end; a new number makes a new segment. Durable only after `sync`."""
        ...

    def sync(self, segment: int) -> None:
        """Return once everything written to a segment survives a power cut."""
        ...

    def truncate(self, segment: int, size: int) -> None:
        """Cut a segment to `size` bytes, durably."""
        ...


class FolderStorage:
    """Segments as files `00000001.journal` of a folder. Raises `JournalError` where the disk refuses, e.g. is full."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: tuple[int, int] | None = None

    def segments(self) -> list[int]:
        """See `Storage`."""
        if not self._folder.is_dir():
            return []
        names = (file.stem for file in self._folder.iterdir() if file.suffix == _SUFFIX)
        return sorted(int(name) for name in names if name.isdecimal())

    def read(self, segment: int) -> bytes:
        """See `Storage`."""
        try:
            return self._path(segment).read_bytes()
        except OSError as error:
            raise JournalError(f"{self._path(segment)}: cannot be read ({error.strerror})") from None

    def append(self, segment: int, data: bytes) -> None:
        """See `Storage`."""
        try:
            descriptor = self._descriptor(segment)
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError as error:
            raise JournalError(f"{self._path(segment)}: cannot be written ({error.strerror})") from None

    def sync(self, segment: int) -> None:
        """See `Storage`."""
        try:
            os.fdatasync(self._descriptor(segment))
        except OSError as error:
            raise JournalError(f"{self._path(segment)}: cannot be flushed ({error.strerror})") from None

    def truncate(self, segment: int, size: int) -> None:
        """See `Storage`."""
        try:
            descriptor = self._descriptor(segment)
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)
        except OSError as error:
            raise JournalError(f"{self._path(segment)}: cannot be cut ({error.strerror})") from None

    def close(self) -> None:
        """Give the file back. May be called twice."""
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def _path(self, segment: int) -> Path:
        return self._folder / f"{segment:08d}{_SUFFIX}"

    def _descriptor(self, segment: int) -> int:
        if self._open is not None and self._open[0] == segment:
            return self._open[1]
        self.close()
        path = self._path(segment)
        new = not path.exists()
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._open = (segment, descriptor)
        if new:
            # A file is durable only once its folder knows it.
            folder = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        return descriptor


class MemoryStorage:
    """Segments in memory, with what a power cut would leave of them."""

    def __init__(self) -> None:
        self._data: dict[int, bytearray] = {}
        self._durable: dict[int, int] = {}

    def segments(self) -> list[int]:
        """See `Storage`."""
        return sorted(self._data)

    def read(self, segment: int) -> bytes:
        """See `Storage`."""
        return bytes(self._data[segment])

    def append(self, segment: int, data: bytes) -> None:
        """See `Storage`."""
        self._data.setdefault(segment, bytearray()).extend(data)

    def sync(self, segment: int) -> None:
        """See `Storage`."""
        self._durable[segment] = len(self._data[segment])

    def truncate(self, segment: int, size: int) -> None:
        """See `Storage`."""
        del self._data[segment][size:]
        self._durable[segment] = min(size, self._durable.get(segment, 0))

    def cut_power(self, kept_bytes: int = 0) -> None:
        """Lose what was not made durable, but for `kept_bytes` of it that reached the disk by chance."""
        for segment, data in list(self._data.items()):
            del data[self._durable.get(segment, 0) + kept_bytes :]
            if not data:
                del self._data[segment]
