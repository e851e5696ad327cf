"""An output that may be closed while it is written to, as by `pearl-rl train | head`."""

import asyncio
import contextlib
import os
from typing import IO


class Lines:
    """Writes lines, each at once; from the first one that cannot be written on, none."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self.broken = asyncio.Event()
        """Set once a line could not be written."""

    def __call__(self, line: str) -> None:
        """Write a line."""
        if self.broken.is_set():
            return
        try:
            print(line, file=self._file, flush=True)
        except OSError:
            drop(self._file)
            self.broken.set()


def drop(file: IO[str]) -> None:
    """Send what is still to be written nowhere: at the process' end it would be tried again."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, file.fileno())
        finally:
            os.close(nowhere)
