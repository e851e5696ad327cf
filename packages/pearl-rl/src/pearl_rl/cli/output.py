"""An output that may be closed while it is written to, as by `pearl-rl train | head`."""

import contextlib
import os
from collections.abc import Callable
from typing import IO


class Lines:
    """Writes lines, each at once; from the first one that cannot be written on, none."""

    def __init__(self, file: IO[str], on_broken: Callable[[], None]) -> None:
        self._file = file
        self._on_broken = on_broken
        self._broken = False

    def __call__(self, line: str) -> None:
        """Write a line."""
        if self._broken:
            return
        try:
            print(line, file=self._file, flush=True)
        except OSError:
            self._broken = True
            drop(self._file)
            self._on_broken()


def drop(file: IO[str]) -> None:
    """Send what is still to be written nowhere: at the process' end it would be tried again."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, file.fileno())
        finally:
            os.close(nowhere)
