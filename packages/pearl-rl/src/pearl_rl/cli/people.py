"""Commands that show a run and operate it. Each imports what it needs when it runs."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(report)
    app.command()(timeline)


def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR…", help="Run folders; several are compared.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="HTML file; default: report.html in the folder.")
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder that gets each plot as an SVG file.")] = None,
) -> None:
    """Write one self-contained HTML page of a run: outcome, plots, decisions with what lost, diagnosis.

    Example: pearl-rl report runs/20260101-120000 -o report.html
    """
    from pearl_rl.cli.report import write_report

    raise typer.Exit(int(write_report(run_dirs, out=out, plots=plots)))


def timeline(
    run_dir: Annotated[Path, typer.Argument(help="Run folder, of a run or a recorded simulation.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="JSON file; .gz compresses it.")] = Path("trace.json"),
    detail: Annotated[str, typer.Option(help="control, requests (and who served each), or all (and trajectories).")] = (
        "all"
    ),
) -> None:
    """Write a run as a trace for ui.perfetto.dev or chrome://tracing.

    Example: pearl-rl timeline runs/20260101-120000 -o trace.json.gz
    """
    from pearl_rl.cli.report import write_trace

    raise typer.Exit(int(write_trace(run_dir, out, detail)))
