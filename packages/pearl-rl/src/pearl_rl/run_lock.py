"""One control plane a run folder: a lock that its process holds for as long as it lives."""

import fcntl
import os
import select
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from pearl_rl.errors import CommandError

LOCK: Final = "lock"
_TRIES, _PAUSE_S = 5, 0.02
"""Who only looks (`held`) has the lock for a moment."""


class RunLock:
    """Holds a run folder. The kernel gives it up when the process ends, however it ends; the file itself stays."""

    def __init__(self, folder: Path) -> None:
        """Take the lock. Raises `CommandError`, which names the holder, where another process has it."""
        self._path = folder / LOCK
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not self._taken():
            holder = os.pread(self._file, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._file)
            raise CommandError(
                f"{folder}: process {holder} runs this run; wait for its end, stop it, or give another folder"
            )
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def _taken(self) -> bool:
        for tries_left in reversed(range(_TRIES)):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                select.select([], [], [], _PAUSE_S if tries_left else 0)
            else:
                return True
        return False

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


def held(folder: Path) -> bool | None:
    """Whether a process runs the run of this folder. None where none ever locked it, or the file system cannot say."""
    try:
        file = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(file)
    return False
