"""`pearl-rl resume` and `pearl-rl replay-journal`: their options. What they need is imported when they run."""

from pathlib import Path
from typing import Annotated

import typer

from pearl_rl.cli.options import AsJson, Plain

RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run folder.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command(short_help="Go on with a run whose control plane ended.")(resume)
    app.command("replay-journal", short_help="Say from a run's journal why each decision was taken.")(replay_journal)


def resume(
    run_dir: RunDir,
    as_json: AsJson = False,
    plain: Plain = False,
) -> None:
    """Go on with a run whose control plane ended: killed, stopped, or the machine with it.

    Restored are the worker table, weight versions, groups, finished and half-played trajectories, and the trainer of
    the newest checkpoint; at most the model calls under way are made again.

    Example: pearl-rl resume runs/20260101-120000
    """
    from pearl_rl.cli.recovery import resume_run

    raise typer.Exit(int(resume_run(run_dir, as_json=as_json, plain=plain)))


def replay_journal(
    run_dir: RunDir,
    at: Annotated[
        int | None, typer.Option("--at", metavar="N", help="Stop before record N; default: all records.")
    ] = None,
    since: Annotated[
        int | None,
        typer.Option("--since", metavar="N", help="Show record N and later; begins at the snapshot before it."),
    ] = None,
    as_json: AsJson = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show every candidate of each decision.")] = False,
) -> None:
    """Derive a state of a run again from its journal, and say why each decision was taken. Changes nothing.

    Without --since everything is derived from the first record on, which takes half a minute for a million; with it, a
    moment.

    Example: pearl-rl replay-journal runs/20260101-120000 --since 100 --at 120 --explain
    """
    from pearl_rl.cli.recovery import replayed

    for line in replayed(run_dir, at, since=since, as_json=as_json, explain=explain):
        typer.echo(line)
