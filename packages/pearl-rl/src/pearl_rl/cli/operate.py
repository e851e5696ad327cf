"""Commands that look at a run while it goes on, and operate it."""

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pearl_rl.errors import CommandError, ExitCode
from pearl_rl.run_folder import CONFIG_JSON, SCENARIO_JSON

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pearl_rl.live.follower import Follower

_POLL_S = 0.3
_MOST_S = 86_400.0


def run_folder(given: Path | None, parent: Path = Path("runs")) -> Path:
    """`given`, or the newest run in `runs`. Raises `CommandError` where there is none."""
    if given is not None:
        return given
    with suppress(OSError):
        runs = [path for path in parent.iterdir() if (path / CONFIG_JSON).is_file() or (path / SCENARIO_JSON).is_file()]
        if runs:
            return max(runs, key=lambda path: path.stat().st_mtime)
    raise CommandError(f"no run in {parent}; name the folder of one")


def status(run: Path | None, *, as_json: bool) -> ExitCode:
    """Print what a run looks like now."""
    from pearl_rl.live.top import whole

    _show(run_folder(run), _view, whole, as_json=as_json)
    return ExitCode.OK


def top(run: Path | None, *, every_s: float, once: bool, as_json: bool) -> ExitCode:
    """Redraw a run, or print one JSON object a look, until it ends or somebody presses Ctrl-C."""
    if not 0.1 <= every_s <= _MOST_S:
        raise CommandError(f"--every {every_s:g}: must be from 0.1 to {_MOST_S:g} seconds")
    if once:
        return status(run, as_json=as_json)
    from pearl_rl.live.follower import Follower

    follower = Follower(run_folder(run))
    if as_json:
        with suppress(KeyboardInterrupt):
            asyncio.run(_follow(follower, every_s, lambda view: print(_line(follower.path, view), flush=True)))
        return ExitCode.OK
    from rich.console import Console
    from rich.live import Live

    from pearl_rl.live.top import whole
    from pearl_rl.report.lines import of_run

    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:

        def redraw(view: Mapping[str, Any]) -> None:
            with of_run(follower.path):
                drawn = whole(view, most_workers=max(4, console.height - 24))
            live.update(drawn, refresh=True)

        with suppress(KeyboardInterrupt):
            asyncio.run(_follow(follower, every_s, redraw))
    if console.is_terminal:
        # What was drawn went with the alternate screen.
        console.print(whole(follower.view()))
    return ExitCode.OK


async def _follow(follower: "Follower", every_s: float, show: Callable[[Mapping[str, Any]], None]) -> None:
    """Show a run every so many seconds, until it has ended."""
    while True:
        follower.refresh()
        view = follower.view()
        show(view)
        if view["state"] in ("ended", "died"):
            return
        await asyncio.sleep(every_s)


def dashboard(run: Path | None, *, host: str, port: int, control: bool, as_json: bool) -> ExitCode:
    """Serve the page until a signal comes; with `as_json` its address is one JSON object."""
    from pearl_executor.loopback_http import new_token
    from pearl_rl.live.server import Dashboard

    folder = run_folder(run)
    token = new_token() if control else None
    server = Dashboard(folder, host=host, port=port, token=token)

    async def serve() -> None:
        try:
            url = await server.start()
        except OSError as error:
            raise CommandError(f"--host {host} --port {port}: cannot listen there ({error.strerror})") from None
        ending = asyncio.Event()
        with suppress(NotImplementedError):
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, ending.set)
        page = f"{url}/#token={token}" if control else f"{url}/"
        if as_json:
            print(json.dumps({"url": page, "run": str(folder), "control": control}), flush=True)
        else:
            print(page)
            how = "" if control else ", read-only (--control lets you act)"
            print(f"shows {folder}{how}; Ctrl-C ends it", flush=True)
        try:
            await ending.wait()
        finally:
            await server.aclose()

    asyncio.run(serve())
    return ExitCode.OK


def workers(run: Path | None, *, as_json: bool) -> ExitCode:
    """List the workers of a run."""
    from pearl_rl.live.top import WorkerTable

    _show(run_folder(run), lambda folder: _view(folder)["workers"], WorkerTable, as_json=as_json)
    return ExitCode.OK


def pin(run: Path | None, configuration: str, *, as_json: bool) -> ExitCode:
    """Hold a run at a configuration. Raises `CommandError` for none, before any run is asked."""
    from pearl_state.configuration import Configuration
    from pearl_state.errors import ConfigurationError

    try:
        if not Configuration.parse(configuration).workers:
            raise CommandError(f"configuration '{configuration}' has no worker, so that nothing would be served")
    except ConfigurationError as error:
        folder = "; a run folder is given by --run RUN_DIR" if "/" in configuration else ""
        raise CommandError(f"{error}{folder}") from None
    return command(run, {"pin": configuration}, as_json=as_json)


def command(run: Path | None, order: Mapping[str, Any], *, as_json: bool) -> ExitCode:
    """Send one command to a run and print its answer."""
    answer = send(run_folder(run), order)
    print(json.dumps(answer) if as_json else answer_words(answer))
    return ExitCode.OK


def drain(run: Path | None, ids: Sequence[int], *, limit_s: float, as_json: bool) -> ExitCode:
    """Fence workers off and wait until nothing of them is left on their GPUs.

    Exit code 4 where that takes longer than `limit_s`; they stay fenced off.
    """
    if not 0 < limit_s <= _MOST_S:
        raise CommandError(f"--timeout {limit_s:g}: must be more than 0 and at most {_MOST_S:g} seconds")
    folder = run_folder(run)
    answer = send(folder, {"cordon": list(ids)})
    from pearl_rl.live.follower import Follower

    follower = Follower(folder)
    left = asyncio.run(_drained(follower, set(ids), limit_s))
    document = {**answer, "left": sorted(left)}
    if as_json:
        print(json.dumps(document))
    elif not left:
        print(f"drained: nothing of {_ids(ids)} is left on its GPUs")
    if left:
        print(f"pearl-rl: workers {_ids(sorted(left))} still hold their GPUs after {limit_s:g} s", file=sys.stderr)
        return ExitCode.TIMEOUT
    return ExitCode.OK


_GONE = frozenset({"vacant", "released", "retired"})


async def _drained(follower: "Follower", ids: set[int], limit_s: float) -> set[int]:
    """Those of `ids` that still hold their GPUs when all are gone, or after `limit_s`."""
    deadline_s = asyncio.get_running_loop().time() + limit_s
    while True:
        follower.refresh()
        rows = follower.rows
        left = {id_ for id_ in ids if id_ in rows and not (rows[id_]["cordoned"] and rows[id_]["lifecycle"] in _GONE)}
        if not left or asyncio.get_running_loop().time() >= deadline_s:
            return left
        await asyncio.sleep(_POLL_S)


def _show(folder: Path, look: Callable[[Path], Any], draw: Callable[[Any], "RenderableType"], *, as_json: bool) -> None:
    """Print what `look` sees of a run, drawn or as JSON. Raises `CommandError` where a file of it is damaged."""
    from rich.console import Console

    from pearl_rl.report.lines import of_run

    seen = look(folder)
    if as_json:
        print(_line(folder, seen))
        return
    with of_run(folder):
        drawn = draw(seen)
    console = Console(highlight=False)
    # Where nobody sees an edge, nothing is cut off at it.
    console.width = console.width if console.is_terminal else max(console.width, 120)
    console.print(drawn)


def _line(folder: Path, seen: Any) -> str:
    """What is seen of a run as one line of JSON. Raises `CommandError` where that is no JSON."""
    from pearl_rl.report.lines import of_run

    with of_run(folder):
        return json.dumps(seen, allow_nan=False)


def answer_words(answer: Mapping[str, Any]) -> str:
    """A run's answer for people."""
    words: Mapping[str, Callable[[Any], str]] = {
        "pinned": lambda value: "unpinned: the policy chooses again" if value is None else f"pinned to {value}",
        "cordoned": lambda ids: f"fenced off: {_ids(ids)}; they leave in order",
        "uncordoned": lambda ids: f"back in service: {_ids(ids)}",
    }
    return "; ".join(words[key](value) if key in words else f"{key} {value}" for key, value in answer.items())


def _ids(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids))


def _view(folder: Path) -> Mapping[str, Any]:
    from pearl_rl.live.follower import Follower

    follower = Follower(folder)
    follower.refresh()
    return follower.view()


def send(folder: Path, order: Mapping[str, Any]) -> Mapping[str, Any]:
    """A run's answer to a command. Raises `CommandError`."""
    from pearl_rl.live.control_client import send_command
    from pearl_rl.report.run_record import check_run_folder

    check_run_folder(folder)
    return asyncio.run(send_command(folder, order))
