"""One clock for a run that went on after its end: each process counts from 0, and a page shows one line of time."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pearl_rl.report.lines import read_lines

_BACK_S = 0.5
"""Lines of one process may be this much out of order."""
_AT = ("now_s", "finished_s")
_TIMES = ("now_s", "started_s", "finished_s", "deadline_s", "at_s")


class RunClock:
    """Puts the processes of a run after each other, by its events."""

    def __init__(self, times_s: Iterable[float]) -> None:
        """`times_s`: when each event happened, in the order of the file."""
        self.offsets_s = [0.0]
        """What each process' times are moved by."""
        last_s = latest_s = 0.0
        for at_s in times_s:
            if at_s < last_s - _BACK_S:
                self.offsets_s.append(latest_s)
            last_s = at_s
            latest_s = max(latest_s, at_s + self.offsets_s[-1])

    @classmethod
    def of(cls, run: Path) -> "RunClock":
        """The clock of the run in this folder."""
        return cls(line["now_s"] for line in read_lines(run / "events.jsonl"))

    def lines(self, path: Path) -> Iterator[dict[str, Any]]:
        """The lines of one of the run's files on the common clock."""
        return self.mended(read_lines(path))

    def mended(self, lines: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Lines in the order in which they were written, on the common clock."""
        if len(self.offsets_s) == 1:
            yield from lines
            return
        process, last_s = 0, 0.0
        for line in lines:
            at_s = next(line[key] for key in _AT if key in line)
            if at_s < last_s - _BACK_S and process + 1 < len(self.offsets_s):
                process += 1
            last_s = at_s
            yield _moved(line, self.offsets_s[process])


def _moved(line: Mapping[str, Any], by_s: float) -> dict[str, Any]:
    moved = {key: value + by_s if key in _TIMES and value is not None else value for key, value in line.items()}
    if "turns" in moved:
        moved["turns"] = [_moved(turn, by_s) for turn in moved["turns"]]
    return moved
