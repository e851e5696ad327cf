"""A progress bar on standard error, where that is a terminal."""

import sys
import time
from types import TracebackType
from typing import Final, Self

_WIDTH: Final = 30
_EVERY_S: Final = 0.1


class ProgressBar:
    """Draws how many simulations are done. Use it as a context manager: nothing of it stays."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._drawn_at_s = 0.0

    def show(self, done: float, of: int, what: str = "") -> None:
        """`done` of `of`, parts of one included; `what` names the one under way. Drawn at most ten times a second."""
        now_s = time.monotonic()
        if not self._shown or now_s - self._drawn_at_s < _EVERY_S:
            return
        self._drawn_at_s = now_s
        bar = "█" * int(_WIDTH * done / max(1, of))
        words = f"{int(done)} of {of} simulations" + (f": {what}, {done % 1.0:.0%}" if what else "")
        print(f"\r\033[K{bar:░<{_WIDTH}} {words}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
