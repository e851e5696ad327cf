"""Commands that show a run and operate it. Each imports what it needs when it runs."""

from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One value; may be repeated.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(report)
    app.command()(timeline)
    app.command()(replay)
    app.command("what-if")(what_if)


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


def replay(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run of `pearl-rl train`.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
    report: Annotated[Path | None, typer.Option(help="HTML file that gets one page of everything.")] = None,
    record: Annotated[Path | None, typer.Option(help="Folder that gets the run folders of the replays.")] = None,
) -> None:
    """Replay a recorded run in the simulator, as it was and with other settings.

    Example: pearl-rl replay runs/20260101-120000 --set cluster.max_preemptible_gpus=10 --set cluster.borrowing=off
    """
    from pearl_rl.cli.replay import run_replay

    raise typer.Exit(int(run_replay(run_dir, overrides or [], as_json=as_json, report=report, record=record)))


def what_if(
    source: Annotated[str, typer.Argument(help="Bundled scenario, TOML file, or the folder of a recorded run.")],
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B,…", help="Values to try, or FROM:TO:STEP; several options make a grid."),
    ] = None,
    policy: Annotated[str, typer.Option("--policy", metavar="A,B,…", help="Policies to compare.")] = "",
    seeds: Annotated[int, typer.Option(help="Seeds for each combination.")] = 1,
    overrides: Overrides = None,
    as_json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(help="SVG file that gets the throughput of each.")] = None,
) -> None:
    """Sweep a setting over a scenario, or over a recorded run, and compare.

    Example: pearl-rl what-if paper-segment1 --vary cluster.max_preemptible_gpus=4,8,12 --policy rlboost,pearl
    """
    from pearl_rl.cli.what_if import run_what_if

    code = run_what_if(
        source,
        vary=vary or [],
        policies=policy,
        seeds=seeds,
        overrides=overrides or [],
        as_json=as_json,
        plot=plot,
    )
    raise typer.Exit(int(code))
