"""One control plane a run folder: a lock that its process holds for as long as it lives."""

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from pearl_rl.errors import CommandError

LOCK: Final = "lock"


class RunLock:
    """Holds a run folder. The kernel gives it up when the process ends, however it ends; the file itself stays."""

    def __init__(self, folder: Path) -> None:
        """Take the lock. Raises `CommandError`, which names the holder, where another process has it."""
        self._path = folder / LOCK
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._file, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._file)
            raise CommandError(
                f"{folder}: process {holder} runs this run; wait for its end, stop it, or give another folder"
            ) from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Give the folder up. May be called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
