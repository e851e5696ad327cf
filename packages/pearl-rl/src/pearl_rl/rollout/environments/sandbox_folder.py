"""The empty folder that sandbox processes run in, in the system's folder for temporary files.

Its owner holds a lock on it, which the kernel gives up when the owner ends, however it ends. So the next owner knows
which folders nobody will remove any more, and removes them. On a file system without locks all of them stay.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

PREFIX: Final = "pearl-sandboxes-"
_TRIES: Final = 100


class SandboxFolder:
    """A new folder of this process'; those that others left are removed first."""

    def __init__(self) -> None:
        """Make it. Raises `OSError`."""
        sweep()
        for _ in range(_TRIES):
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            lock = _opened(self.path)
            # Who sweeps may find it before we have locked it; then it is theirs.
            if lock is not None and _locked(lock) is not False and self.path.is_dir():
                self._lock = lock
                return
            if lock is not None:
                os.close(lock)
        raise FileNotFoundError(f"{self.path} is removed whenever it is made")

    def remove(self) -> None:
        """Remove it with what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep() -> None:
    """Remove the folders of ours whose owner is gone."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        lock = _opened(path)
        if lock is None:
            continue
        if os.fstat(lock).st_uid == os.getuid() and _locked(lock):
            shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _opened(path: Path) -> int | None:
    """A descriptor of a folder; None where it is gone, another user's, or no folder itself."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None


def _locked(folder: int) -> bool | None:
    """Whether we have its lock now; None where the file system has no locks."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
