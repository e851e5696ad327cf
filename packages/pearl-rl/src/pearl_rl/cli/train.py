"""`pearl-rl train`: check, make the run folder, run, watch, stop in order, report."""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pearl_rl.cli.output import Lines
from pearl_rl.errors import CommandError, ExitCode
from pearl_rl.observer import Observer
from pearl_rl.preflight import check_installed, check_parts
from pearl_rl.presentation.plain import PlainView
from pearl_rl.presentation.words import seconds
from pearl_rl.run_folder import RunFolder
from pearl_rl.run_lock import RunLock
from pearl_rl.settings import Settings, load_settings
from pearl_rl.summary import TrainSummary

if TYPE_CHECKING:
    from rich.console import Console

Train = Callable[[Settings, RunFolder, Observer], Awaitable[TrainSummary]]
"""Runs a job to its end. When it is cancelled it stops in order and returns what it has, or lets the cancel through."""

STOP_GRACE_S = 30.0
"""How long a run may take to stop in order."""
_TICK_S = 0.5
_SAME_SIGNAL_S = 0.5
_FIRST_STEPS = 10
"""A run of no more steps has no first ones that are not the last ones too."""


class Ending(Enum):
    """Why a run ended."""

    FINISHED = "finished"
    STOPPED = "stopped by a signal"
    TIMED_OUT = "reached run.wall_limit_s"
    UNREAD = "stopped, as its output cannot be written any more,"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, and its summary where it could still give one."""

    ending: Ending
    summary: TrainSummary | None = None
    given_up: bool = False
    """Whether the run did not stop in time: something of it may still be there."""


class View(Observer, Protocol):
    """An observer that wants to be redrawn."""

    def tick(self) -> None:
        """Redraw."""
        ...


def run_training(
    config: Path | None, overrides: Sequence[str], *, as_json: bool, run_dir: Path | None, plain: bool
) -> ExitCode:
    """Run the command. Raises `CommandError` before anything is written where the job cannot run."""
    resolved = load_settings(config, overrides)
    check_parts(resolved.settings)
    check_installed(resolved.settings)
    from pearl_rl.compose import train

    with RunFolder.create(resolved, run_dir) as folder, RunLock(folder.path):
        outcome = run_in_folder(train, resolved.settings, folder, as_json=as_json, plain=plain)
    return report_outcome(outcome, resolved.settings, folder, as_json=as_json)


def run_in_folder(
    train: Train, settings: Settings, folder: RunFolder, *, as_json: bool = False, plain: bool = False
) -> Outcome:
    """Run `train` under a view until it ends, a signal stops it, or the wall limit is reached; keep its summary."""
    from rich.console import Console

    # With --json standard output is for the summary alone.
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    live = console.is_terminal and not plain

    unread = asyncio.Event()
    write = Lines(console.file, unread.set)
    for line in opening(settings, folder):
        write(line)

    async def supervised() -> Outcome:
        with _view(console, settings, write, live=live) as view:
            return await supervise(train, settings, folder, view, unread)

    runner = asyncio.Runner(loop_factory=RunClockLoop)
    given_up = False
    try:
        outcome = runner.run(supervised())
        given_up = outcome.given_up
    finally:
        # Closing waits for every task, and one that was given up may never end.
        if not given_up:
            runner.close()
    if outcome.summary is not None:
        folder.write_summary(outcome.summary)
    return outcome


def opening(settings: Settings, folder: RunFolder) -> Iterator[str]:
    """What a person should know before the first step."""
    cluster, device = settings.cluster, settings.device
    yield f"run folder {folder.path}"
    yield (
        f"{cluster.training_gpus} training, {cluster.reserved_rollout_gpus} reserved and up to "
        f"{cluster.max_preemptible_gpus} preemptible GPUs, {cluster.gpus_per_worker} a worker, "
        f"borrowing {cluster.borrowing}"
    )
    if settings.engine.kind == "sglang":
        yield f"workers are SGLang servers; they listen on {settings.engine.sglang.host}, each on ports of its own"
    if device.paced:
        yield (
            f"GPUs are emulated: each engine is paced to A {seconds(device.decode_fixed_s)}, "
            f"b {seconds(device.decode_per_sequence_s)}, t_prefill {device.prefill_per_token_s * 1e6:.0f} µs; tokens, "
            "weights and learning are real, and the planner must find these costs from telemetry"
        )


class RunClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock, the run's clock, starts at 0: times in the journal count from the run's beginning."""

    def __init__(self) -> None:
        self._zero_s = 0.0
        super().__init__()
        self._zero_s = super().time()

    def time(self) -> float:
        """Seconds since the loop was made."""
        return super().time() - self._zero_s


async def supervise(
    train: Train, settings: Settings, folder: RunFolder, view: View, unread: asyncio.Event | None = None
) -> Outcome:
    """Wait for `train`, a signal, the wall limit, or `unread` (what it says goes nowhere), and stop it in order."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    run = asyncio.ensure_future(train(settings, folder, view))
    unread = unread or asyncio.Event()
    ends = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(unread.wait())]
    watchers = [*ends, asyncio.ensure_future(_ticking(view))]

    def on_signal() -> None:
        # A later signal finds the default handlers again and ends the process at once. One right behind the first is
        # the same wish: what we run under, like `uv run`, hands on what the whole process group got already.
        if not stop.is_set():
            stop.set()
            loop.call_later(_SAME_SIGNAL_S, _remove_handlers, loop)

    with suppress(NotImplementedError):
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
    try:
        await asyncio.wait({run, *ends}, timeout=settings.run.wall_limit_s, return_when=asyncio.FIRST_COMPLETED)
        if run.done():
            return Outcome(Ending.FINISHED, await run)
        ending = Ending.STOPPED if stop.is_set() else Ending.UNREAD if unread.is_set() else Ending.TIMED_OUT
        view.on_message(f"{ending.value}; stopping in order (Ctrl-C ends it at once)")
        return await _stopped(run, ending, view)
    finally:
        _remove_handlers(loop)
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)


async def _stopped(run: "asyncio.Future[TrainSummary]", ending: Ending, view: View) -> Outcome:
    """Cancel `run` and wait for what it still has to say, not longer than `STOP_GRACE_S`."""
    run.cancel()
    await asyncio.wait({run}, timeout=STOP_GRACE_S)
    if not run.done():
        view.on_message(f"the run did not stop within {seconds(STOP_GRACE_S)} and is given up")
        return Outcome(ending, given_up=True)
    return Outcome(ending, None if run.cancelled() else await run)


async def _ticking(view: View) -> None:
    while True:
        await asyncio.sleep(_TICK_S)
        view.tick()


def _remove_handlers(loop: asyncio.AbstractEventLoop) -> None:
    with suppress(NotImplementedError):
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


class _StillView(PlainView):
    """Plain lines need no redrawing."""

    def tick(self) -> None:
        """Nothing to redraw."""


@contextmanager
def _view(console: "Console", settings: Settings, write: Lines, *, live: bool) -> Iterator[View]:
    """The view that suits where the output goes."""
    if not live:
        yield _StillView(write)
        return
    from pearl_rl.presentation.live import LiveView

    clock = asyncio.get_running_loop().time
    with LiveView(console, steps=settings.run.steps, wall_limit_s=settings.run.wall_limit_s, clock=clock) as view:
        yield view


def report_outcome(outcome: Outcome, settings: Settings, folder: RunFolder, *, as_json: bool) -> ExitCode:
    """Print how the run ended and map it to an exit code."""
    summary = outcome.summary
    if summary is None:
        code = ExitCode.TIMEOUT if outcome.ending is Ending.TIMED_OUT else ExitCode.PARTIAL
        raise CommandError(
            f"the run {outcome.ending.value} before it could sum up; see {folder.path}, or go on: "
            f"pearl-rl resume {folder.path}",
            code,
        )
    if as_json:
        print(summary.to_json_line(), flush=True)
    else:
        for line in closing(summary):
            print(line)
    if outcome.ending is Ending.TIMED_OUT:
        return _early(ExitCode.TIMEOUT, outcome.ending.value, summary, settings, folder)
    if outcome.ending in (Ending.STOPPED, Ending.UNREAD) or summary.steps < settings.run.steps:
        return _early(ExitCode.PARTIAL, outcome.ending.value, summary, settings, folder)
    return ExitCode.OK


def _early(code: ExitCode, cause: str, summary: TrainSummary, settings: Settings, folder: RunFolder) -> ExitCode:
    done = f"after {summary.steps} of {settings.run.steps} steps"
    print(f"pearl-rl: the run {cause} {done}; to go on: pearl-rl resume {folder.path}", file=sys.stderr)
    return code


def closing(summary: TrainSummary) -> Iterator[str]:
    """The summary for people."""
    reward = f"{summary.reward_first10:.3f} (first ten) → {summary.reward_last10:.3f} (last ten)"
    if summary.steps <= _FIRST_STEPS:
        reward = f"{summary.reward_last10:.3f} on average"
    yield f"{summary.steps} steps in {seconds(summary.wall_s)}: reward {reward}, {summary.tokens_per_s:.0f} tokens/s"
    yield (
        f"{summary.trajectories} trajectories, {summary.lost_trajectories} lost, "
        f"{summary.stale_served} requests served by stale weights"
    )
    yield (
        f"{summary.expansions} expansions, {summary.reclaims} reclaims, {summary.borrows} borrows, "
        f"{summary.returns} returns, {summary.mode_switches} mode switches, {summary.ratio_switches} ratio switches"
    )
    yield f"run folder {summary.run_dir}"
