"""Reading what a run wrote: a file that is none of a run's ends in one line that names it."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pearl_rl.errors import CommandError

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""How `pearl_rl.encoding.encode` writes numbers that JSON has not."""


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """As `run_folder.read_lines`. Raises `CommandError` where the file cannot be read, or a line of it is damaged."""
    try:
        with suppress(FileNotFoundError), path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield parsed(path, number, line)
    except OSError as error:
        raise unreadable(path, error) from None


def parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Line `number` of a JSON Lines file. Raises `CommandError` where it is no object."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        found = error
    if isinstance(found, dict):
        return found
    why = f" ({found})" if isinstance(found, Exception) else ""
    raise CommandError(f"{path}: line {number} is no JSON object{why}; the file is damaged, take the line out")


def read_object(path: Path) -> dict[str, Any]:
    """A file that is one JSON object. Raises `CommandError` where it is none, or cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(path, error) from None
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{path}: cannot be read as JSON ({error}); the file is damaged") from None
    if not isinstance(found, dict):
        raise CommandError(f"{path}: is no JSON object; the file is damaged")
    return found


def unreadable(path: Path, error: OSError) -> CommandError:
    """What to say of a file of a run that cannot be read."""
    return CommandError(f"{path}: cannot be read ({error.strerror}); a run's folder holds a file of this name")


@contextmanager
def of_run(path: Path) -> Iterator[None]:
    """Around what rests on the files of the run in `path`. Raises `CommandError` where one lacks what is needed."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise CommandError(f"{path}: cannot be read as a run ({error!r}); is a file of it damaged?") from None


def step_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of `metrics.jsonl` with its numbers as such: what an update came to may be none that is finite.

    A prediction that is not finite is none. Raises `ValueError` for a time that is no finite number.
    """
    step: dict[str, Any] = {}
    for key, value in line.items():
        step[key] = _NOT_FINITE.get(value, value) if isinstance(value, str) else value
    step["predicted_rollout_s"] = finite(step["predicted_rollout_s"])
    for key, value in step.items():
        if key.endswith("_s") and value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
            raise ValueError(f"{key} = {value}")
    return step


def finite(value: float | None) -> float | None:
    """The number; None for one that is not finite."""
    return value if value is not None and math.isfinite(value) else None
