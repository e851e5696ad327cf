"""What was done to servers and verified of it, one JSON object a line. Holds no keys and no prompts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Clock = Callable[[], float]


class Journal:
    """Appends to a file; None keeps nothing."""

    def __init__(self, path: Path | None, clock: Clock) -> None:
        self._clock = clock
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")

    def write(self, action: str, worker: int, incarnation: int, **facts: Any) -> None:
        """Note one action; `facts` are JSON values."""
        if self._file is not None:
            line = {"at_s": self._clock(), "action": action, "worker": worker, "incarnation": incarnation, **facts}
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
