"""Where rollout GPUs come from and go to: trace replay, a control file for people, fixed pools, and their merge.

All sources keep time by the running event loop, so that a trace of hours replays in moments under virtual time.
`now_s` and `deadline_s` of their events are that loop's `time()`.
"""

import asyncio
import csv
import itertools
import json
import logging
import math
import os
import random
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from pearl_executor.ports import AvailabilitySource
from pearl_executor.trace_kinds import Row, counted_events, is_of_events, last_of_each_time
from pearl_state.events import GpusOffered, GpusReclaimed
from pearl_state.roles import Tenure
from pearl_state.worker import GpuId

AvailabilityEvent = GpusOffered | GpusReclaimed

_log = logging.getLogger(__name__)
_COUNT_COLUMNS: Final = ("preemptible_gpus", "instances")


@dataclass(frozen=True, slots=True)
class TraceRow:
    """From `t_s` on (seconds from the trace's start), `count` GPUs are available."""

    t_s: float
    count: int


def bundled_trace() -> Path:
    """The trace in this package: three two-hour segments of Bamboo's p3 trace, fitted to PEARL section 6.1."""
    return Path(str(files("pearl_executor") / "data" / "pearl_segments.csv"))


def read_trace(path: str | os.PathLike[str], segment: str | None = None) -> tuple[TraceRow, ...]:
    """Read a CSV step trace: columns `t_s`, `preemptible_gpus` or `instances`, and optionally `segment`.

    Without a `segment` column the whole file is the trace. A trace of events, columns `t_ms`, `event` and `node`, is
    counted. Raises `ValueError` with file and line for what is no trace: a missing column, time that does not grow, a
    count that is no whole number >= 0, an unknown segment.
    """
    path = Path(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows: list[tuple[int, Row]] = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: cannot read the availability trace: {error}") from None
    if not rows:
        raise ValueError(f"{path}:1: the availability trace has no rows")
    if is_of_events(rows[0][1]):
        rows = last_of_each_time(counted_events(path, rows))
    column = _count_column(path, rows[0][1])
    segments: dict[str, list[TraceRow]] = {}
    for line, row in rows:
        parsed = segments.setdefault(row.get("segment") or "", [])
        parsed.append(_parse_row(f"{path}:{line}", row, column, parsed[-1].t_s if parsed else None))
    return tuple(segments[_choose_segment(path, segments, segment)])


def _count_column(path: Path, row: Row) -> str:
    if "t_s" not in row:
        raise ValueError(f"{path}:1: the availability trace has no column t_s (seconds from its start)")
    for column in _COUNT_COLUMNS:
        if column in row:
            return column
    raise ValueError(f"{path}:1: the availability trace has neither column preemptible_gpus nor instances")


def _choose_segment(path: Path, segments: Mapping[str, object], segment: str | None) -> str:
    if segment is None and len(segments) == 1:
        return next(iter(segments))
    known = ", ".join(name or "(none)" for name in segments)
    if segment is None:
        raise ValueError(f"{path}:1: the trace has several segments ({known}); choose one")
    if segment not in segments:
        raise ValueError(f"{path}:1: the trace has no segment {segment!r}; it has {known}")
    return segment


def _parse_row(where: str, row: Row, column: str, before_s: float | None) -> TraceRow:
    t_s = _number(where, "t_s", row["t_s"])
    if t_s < 0:
        raise ValueError(f"{where}: t_s {row['t_s']} is negative; time counts from the trace's start")
    if before_s is not None and t_s <= before_s:
        raise ValueError(f"{where}: time goes back or stands still, t_s {t_s:g} after {before_s:g}; sort the trace")
    count = _number(where, column, row[column])
    if count < 0 or count != int(count):
        raise ValueError(f"{where}: {column} {row[column]} is not a whole number >= 0")
    return TraceRow(t_s, int(count))


def _number(where: str, column: str, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        raise ValueError(f"{where}: {column} {text!r} is not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"{where}: {column} {text} is not a finite number")
    return value


class DevicePool:
    """Emulated devices of one source: each is free, given out, or asked back and not yet returned."""

    def __init__(self, gpus: Iterable[int]) -> None:
        ids = [GpuId(gpu) for gpu in gpus]
        if not ids or len(set(ids)) != len(ids):
            raise ValueError(f"an availability source needs distinct GPU ids, got {ids}")
        self.all = frozenset(ids)
        self.given: set[GpuId] = set()
        self.recalled: set[GpuId] = set()
        self.changed = asyncio.Event()
        """Set at each return."""

    @property
    def free(self) -> list[GpuId]:
        """Devices that may be offered, lowest first."""
        return sorted(self.all - self.given - self.recalled)

    def give(self, gpus: Iterable[GpuId]) -> frozenset[GpuId]:
        """Mark free devices as given out."""
        chosen = frozenset(gpus)
        self.given |= chosen
        return chosen

    def recall(self, gpus: Iterable[GpuId]) -> frozenset[GpuId]:
        """Mark devices as asked back; returns those that were given out."""
        chosen = frozenset(gpus) & self.given
        self.given -= chosen
        self.recalled |= chosen
        return chosen

    def returned(self, gpus: frozenset[GpuId]) -> None:
        """Mark devices as free again; others than this pool's are ignored."""
        # A GPU given back unasked is free as well: the provider may offer it again.
        back = gpus & (self.recalled | self.given)
        self.recalled -= back
        self.given -= back
        if back:
            self.changed.set()


class TraceSource:
    """Replays a step trace of counts as offers and reclaims of emulated devices.

    The count is `clip(floor(scale * count) + offset, 0, len(gpus))`. Which devices go is drawn with `seed`; those that
    come are the lowest free ids. A device is offered again only after it was `returned`: where the trace rises before
    that, the offer follows the return. `time_scale` trace seconds pass in one second of the loop. Each reclaim is
    announced when the trace falls, with a deadline `notice_s` (loop seconds, not scaled) later. Iterate it once.
    """

    def __init__(
        self,
        trace: str | os.PathLike[str] | Sequence[tuple[float, int]],
        segment: str | None = None,
        *,
        gpus: Iterable[int],
        time_scale: float = 1.0,
        notice_s: float = 30.0,
        seed: int = 0,
        scale: float = 1.0,
        offset: int = 0,
        node: str = "",
    ) -> None:
        if not (math.isfinite(time_scale) and time_scale > 0):
            raise ValueError(f"time_scale is {time_scale}; it must be a finite number > 0 (trace seconds a second)")
        if not (math.isfinite(notice_s) and notice_s >= 0):
            raise ValueError(f"notice_s is {notice_s}; it must be a finite number >= 0 (seconds)")
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"scale is {scale}; it must be a finite number > 0 (GPUs per counted unit)")
        self._pool = DevicePool(gpus)
        rows = _check_rows(trace) if not isinstance(trace, (str, os.PathLike)) else read_trace(trace, segment)
        limit = len(self._pool.all)
        self.steps: tuple[TraceRow, ...] = tuple(
            TraceRow(row.t_s / time_scale, min(limit, max(0, math.floor(scale * row.count) + offset))) for row in rows
        )
        """The steps as they will be replayed: loop seconds from the start, GPUs of the pool."""
        self._notice_s = notice_s
        self._rng = random.Random(seed)
        self._node = node

    async def events(self) -> AsyncIterator[AvailabilityEvent]:
        """Offers and reclaims as they happen, from now on. Ends after the last step."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        for step, following in itertools.zip_longest(self.steps, self.steps[1:]):
            await asyncio.sleep(max(0.0, start_s + step.t_s - loop.time()))
            surplus = len(self._pool.given) - step.count
            if surplus > 0:
                chosen = self._rng.sample(sorted(self._pool.given), surplus)
                now_s = loop.time()
                yield GpusReclaimed(now_s=now_s, gpus=self._pool.recall(chosen), deadline_s=now_s + self._notice_s)
            async for offer in self._offers(step.count, start_s + following.t_s if following else None):
                yield offer

    async def _offers(self, count: int, until_s: float | None) -> AsyncIterator[GpusOffered]:
        """Bring the devices given out up to `count`, waiting for returns until `until_s` where too few are free."""
        loop = asyncio.get_running_loop()
        owed = count - len(self._pool.given)
        while owed > 0:
            free = self._pool.free[:owed]
            if free:
                owed -= len(free)
                yield GpusOffered(now_s=loop.time(), gpus=self._pool.give(free), node=self._node)
                continue
            self._pool.changed.clear()
            try:
                async with asyncio.timeout_at(until_s):
                    await self._pool.changed.wait()
            except TimeoutError:
                return

    def returned(self, gpus: frozenset[GpuId]) -> None:
        """Nothing of ours is left on `gpus`; those may be offered again."""
        self._pool.returned(gpus)


def _check_rows(rows: Iterable[tuple[float, int]]) -> tuple[TraceRow, ...]:
    parsed: list[TraceRow] = []
    for index, (t_s, count) in enumerate(rows):
        row = {"t_s": repr(t_s), "count": repr(count)}
        parsed.append(_parse_row(f"availability row {index}", row, "count", parsed[-1].t_s if parsed else None))
    if not parsed:
        raise ValueError("the availability trace has no rows")
    return tuple(parsed)


class FixedSource:
    """Offers all its GPUs at once and never takes one back."""

    def __init__(self, gpus: Iterable[int], tenure: Tenure = Tenure.RESERVED, node: str = "") -> None:
        self._gpus = frozenset(GpuId(gpu) for gpu in gpus)
        self._tenure = tenure
        self._node = node

    async def events(self) -> AsyncIterator[AvailabilityEvent]:
        """One offer, or none where there are no GPUs."""
        if self._gpus:
            now_s = asyncio.get_running_loop().time()
            yield GpusOffered(now_s=now_s, gpus=self._gpus, tenure=self._tenure, node=self._node)

    def returned(self, gpus: frozenset[GpuId]) -> None:
        """Nothing happens: a GPU that was given back is not offered again."""


class CommandError(ValueError):
    """A command of a person that cannot be carried out; the message says why."""


class Commands:
    """Offers and reclaims that people ask for: `{"offer": 2}`, `{"reclaim": [4, 5], "notice_s": 30}`.

    Both take a number of GPUs or a list of ids.
    """

    def __init__(self, gpus: Iterable[int], notice_s: float, node: str) -> None:
        self.pool = DevicePool(gpus)
        self._notice_s = notice_s
        self._node = node

    def event(self, command: Any, now_s: float) -> AvailabilityEvent:
        """Carry `command` out on the pool. Raises `CommandError`."""
        if not isinstance(command, dict) or len(command.keys() & {"offer", "reclaim"}) != 1:
            raise CommandError('a command is one of {"offer": n or ids} and {"reclaim": n or ids, "notice_s": seconds}')
        unknown = command.keys() - {"offer", "reclaim", "notice_s"}
        if unknown or ("offer" in command and "notice_s" in command):
            raise CommandError(f"a command has no key {sorted(unknown) or 'notice_s with an offer'}")
        if "offer" in command:
            chosen = _select(command["offer"], self.pool.free, "offer", "free")
            return GpusOffered(now_s=now_s, gpus=self.pool.give(chosen), node=self._node)
        notice_s = command.get("notice_s", self._notice_s)
        if isinstance(notice_s, bool) or not isinstance(notice_s, int | float) or not 0 <= notice_s < math.inf:
            raise CommandError(f"notice_s is {notice_s!r}; it must be a finite number >= 0 (seconds)")
        chosen = _select(command["reclaim"], sorted(self.pool.given, reverse=True), "reclaim", "given out")
        return GpusReclaimed(now_s=now_s, gpus=self.pool.recall(chosen), deadline_s=now_s + notice_s)


def _select(wanted: Any, available: Sequence[GpuId], verb: str, state: str) -> list[GpuId]:
    if isinstance(wanted, list):
        missing = [gpu for gpu in wanted if gpu not in available]
        if missing or not wanted or len(set(wanted)) != len(wanted):
            raise CommandError(f"cannot {verb} GPUs {wanted}; {state} are {sorted(available)}")
        return [GpuId(gpu) for gpu in wanted]
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not 1 <= wanted <= len(available):
        raise CommandError(f"cannot {verb} {wanted!r} GPUs; {state} are {sorted(available)}")
    return list(available[:wanted])


class ControlFileSource:
    """Follows a file to which people append one JSON command a line; runs until it is closed.

    A bad line is reported to `on_error` (default: a logged warning) with file and line, and changes nothing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        gpus: Iterable[int],
        notice_s: float = 30.0,
        poll_s: float = 0.5,
        node: str = "",
        on_error: Callable[[str], None] = _log.warning,
    ) -> None:
        self._path = Path(path)
        self._commands = Commands(gpus, notice_s, node)
        self._poll_s = poll_s
        self._on_error = on_error

    async def events(self) -> AsyncIterator[AvailabilityEvent]:
        """What the file asks for, from its first line on."""
        loop = asyncio.get_running_loop()
        offset = line = 0
        while True:
            text = b""
            with suppress(FileNotFoundError), self._path.open("rb") as file:
                file.seek(offset)
                text = file.read()
            # A line counts once its newline is there: an editor may be in the middle of it.
            complete = text[: text.rfind(b"\n") + 1]
            offset += len(complete)
            for raw in complete.splitlines():
                line += 1
                if not raw.strip():
                    continue
                try:
                    yield self._commands.event(json.loads(raw), loop.time())
                except ValueError as error:
                    self._on_error(f"{self._path}:{line}: {error}")
            await asyncio.sleep(self._poll_s)

    def returned(self, gpus: frozenset[GpuId]) -> None:
        """Nothing of ours is left on `gpus`; those may be offered again."""
        self._commands.pool.returned(gpus)


class MergedSource:
    """Several sources as one. Their GPU ids must not overlap."""

    def __init__(self, *sources: AvailabilitySource) -> None:
        self._sources = sources

    async def events(self) -> AsyncIterator[AvailabilityEvent]:
        """Events of all sources as they happen; ends when all have ended, fails when one fails."""
        queue: asyncio.Queue[AvailabilityEvent | Exception | None] = asyncio.Queue(maxsize=1)

        async def forward(source: AvailabilitySource) -> None:
            try:
                async for event in source.events():
                    await queue.put(event)
            except Exception as error:
                await queue.put(error)
            else:
                await queue.put(None)

        tasks = [asyncio.ensure_future(forward(source)) for source in self._sources]
        running = len(tasks)
        try:
            while running:
                event = await queue.get()
                if isinstance(event, Exception):
                    raise event
                if event is None:
                    running -= 1
                else:
                    yield event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def returned(self, gpus: frozenset[GpuId]) -> None:
        """Tell each source; it knows which GPUs are its own."""
        for source in self._sources:
            source.returned(gpus)


def merge_sources(*sources: AvailabilitySource) -> AvailabilitySource:
    """One source that gives the events of all `sources`."""
    return sources[0] if len(sources) == 1 else MergedSource(*sources)
