"""Plays many scripts; the first that breaks anything is made smaller and printed with the seed that reproduces it.

    python -m dst.explore --scripts 2000 --seed 0

`--script FILE` plays one script from its JSON instead (`-` reads it from standard input).
"""

import argparse
import contextlib
import logging
import os
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from dst.script import Script, draw, shrink
from dst.world import Report, play

CHUNK = 25
"""Seeds that a process plays before it takes others."""


def failure(script: Script) -> Exception | None:
    """What breaks when this script is played."""
    try:
        play(script)
    except Exception as error:
        return _innermost(error)
    return None


def _innermost(error: BaseException) -> Exception:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error


def describe(script: Script, error: Exception) -> str:
    def same(candidate: Script) -> bool:
        other = failure(candidate)
        return other is not None and type(other) is type(error)

    small = shrink(script, same)
    found = failure(small) or error
    return (
        f"seed {script.seed}: {type(found).__name__}: {found}\n"
        f"  again: python -m dst.explore --scripts 1 --seed {script.seed}\n"
        f"  smallest: {small.to_json()}\n" + "".join(traceback.format_exception(found))
    )


def explore(first: int, count: int, *, wall_s: float = float("inf"), most_failures: int = 1) -> tuple[int, list[str]]:
    """Play the scripts of `count` seeds from `first` on. Returns how many were played and what failed."""
    began = time.monotonic()
    failures: list[str] = []
    played = 0
    while played < count and len(failures) < most_failures and time.monotonic() - began < wall_s:
        script = draw(first + played)
        played += 1
        error = failure(script)
        if error is not None:
            failures.append(describe(script, error))
    return played, failures


def explore_with(
    jobs: int, first: int, count: int, *, wall_s: float = float("inf"), most_failures: int = 1
) -> tuple[int, list[str]]:
    """`explore`, in processes that take chunks of seeds in turn."""
    began = time.monotonic()
    failures: list[str] = []
    played = 0
    chunks = range(first, first + count, CHUNK)
    with ProcessPoolExecutor(jobs, initializer=logging.disable, initargs=(logging.CRITICAL,)) as pool:
        for at in range(0, len(chunks), jobs * 4):
            under_way = [
                pool.submit(explore, seed, min(CHUNK, first + count - seed), most_failures=most_failures)
                for seed in chunks[at : at + jobs * 4]
            ]
            for done in under_way:
                number, found = done.result()
                played += number
                failures += found
            if len(failures) >= most_failures or time.monotonic() - began > wall_s:
                break
    return played, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="python -m dst.explore --scripts 9")
    parser.add_argument("--scripts", type=int, default=2000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first; each further one has the next")
    parser.add_argument("--failures", type=int, default=1, help="stop after so many")
    parser.add_argument("--wall-s", type=float, default=float("inf"), help="stop after this time, seconds")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="processes")
    parser.add_argument("--script", help="play this one")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.script:
        text = sys.stdin.read() if options.script == "-" else Path(options.script).read_text(encoding="utf-8")
        report: Report = play(Script.from_json(text))
        print(f"{report.events} events, {report.ended_s:.1f} s of virtual time, {report.digest[:16]}")
        return 0
    began = time.monotonic()
    played, failures = explore_with(
        options.jobs, options.seed, options.scripts, wall_s=options.wall_s, most_failures=options.failures
    )
    for text in failures:
        print(text)
    print(
        f"{played} scripts (seeds {options.seed} to {options.seed + played - 1}) in {time.monotonic() - began:.1f} s: "
        f"{len(failures) or 'none'} failed"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
