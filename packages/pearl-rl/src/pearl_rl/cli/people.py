"""Commands that show a run and operate it. Each imports what it needs when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from pearl_rl.cli.options import AsJson, Overrides, scenarios

RunDir = Annotated[Path | None, typer.Argument(help="Run folder; default: the newest in runs.")]
OfRun = Annotated[Path | None, typer.Option("--run", metavar="RUN_DIR", help="Run folder; default: newest in runs.")]
Ids = Annotated[list[int], typer.Argument(metavar="WORKER", help="Numbers of workers, as `workers list` shows them.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command(short_help="Write one HTML page of a run, or one that compares several.")(report)
    app.command(short_help="Write a run as a trace for Perfetto.")(timeline)
    app.command(short_help="Replay a recorded run in the simulator, also changed.")(replay)
    app.command("what-if", short_help="Sweep a setting over a scenario or a recorded run.")(what_if)
    app.command(short_help="Print what a run looks like now.")(status)
    app.command(short_help="Watch a run in the terminal until it ends.")(top)
    app.command(short_help="Show a run as a local web page that follows it.")(dashboard)
    app.command(short_help="Hold a running job at a configuration.")(pin)
    app.command(short_help="Let the policy of a running job choose again.")(unpin)
    app.command(short_help="Hold a running job at what it has now.")(freeze)
    app.command(short_help="Lead a running job to the target of a plan or decision.")(apply)
    workers_app = typer.Typer(rich_markup_mode=None, help="List the workers of a run, fence them off, or drain them.")
    workers_app.command("list", short_help="List the workers of a run.")(list_workers)
    workers_app.command(short_help="Fence workers off: they leave in order.")(cordon)
    workers_app.command(short_help="Put workers that were fenced off back into service.")(uncordon)
    workers_app.command(short_help="Fence workers off, and wait until they are gone.")(drain)
    app.add_typer(workers_app, name="workers")


def register_config(config_app: typer.Typer) -> None:
    """Add what belongs to `pearl-rl config`."""
    config_app.command("diff", short_help="Print what two configurations have different.")(config_diff)


def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR", help="Run folders; several are compared.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="HTML file; default: report.html in the folder.")
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder that gets each plot as SVG and PNG.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page of a run: outcome, plots, decisions with what lost, diagnosis.

    Example: pearl-rl report runs/20260101-120000 -o report.html
    """
    from pearl_rl.cli.report import write_report

    raise typer.Exit(int(write_report(run_dirs, out=out, plots=plots, as_json=as_json)))


def timeline(
    run_dir: Annotated[Path, typer.Argument(help="Run folder, of a run or a recorded simulation.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="JSON file; .gz compresses it.")] = Path("trace.json"),
    detail: Annotated[str, typer.Option(help="control, requests (and who served each), or all (and trajectories).")] = (
        "all"
    ),
    as_json: AsJson = False,
) -> None:
    """Write a run as a trace for ui.perfetto.dev or chrome://tracing.

    Example: pearl-rl timeline runs/20260101-120000 -o trace.json.gz
    """
    from pearl_rl.cli.report import write_trace

    raise typer.Exit(int(write_trace(run_dir, out, detail, as_json=as_json)))


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
    source: Annotated[
        str,
        typer.Argument(help="Bundled scenario, TOML file, or the folder of a recorded run.", autocompletion=scenarios),
    ],
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B,…", help="Values to try, or FROM:TO:STEP; several options make a grid."),
    ] = None,
    policy: Annotated[str, typer.Option("--policy", metavar="A,B,…", help="Policies to compare.")] = "",
    seeds: Annotated[int, typer.Option(help="Seeds for each combination.")] = 1,
    overrides: Overrides = None,
    as_json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(help="PNG or SVG file of the throughput of each.")] = None,
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


def status(run_dir: RunDir = None, as_json: AsJson = False) -> None:
    """Print what a run looks like now: progress, workers, plan, decisions.

    Example: pearl-rl status runs/20260101-120000 --json
    """
    from pearl_rl.cli import operate

    raise typer.Exit(int(operate.status(run_dir, as_json=as_json)))


def top(
    run_dir: RunDir = None,
    every: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print once, as status does.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a look, each on a line.")] = False,
) -> None:
    """Watch a run in the terminal until it ends.

    Example: pearl-rl top runs/20260101-120000
    """
    from pearl_rl.cli import operate

    raise typer.Exit(int(operate.top(run_dir, every_s=every, once=once, as_json=as_json)))


def dashboard(
    run_dir: RunDir = None,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port; 0 takes a free one.")] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on; another than loopback needs --control.")] = (
        "127.0.0.1"
    ),
    control: Annotated[bool, typer.Option("--control", help="Let whoever has the printed address act.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the address as one JSON object.")] = False,
) -> None:
    """Show a run as a local web page that follows it, read-only unless told otherwise.

    Example: pearl-rl dashboard runs/20260101-120000 --port 8765 --control
    """
    from pearl_rl.cli import operate

    raise typer.Exit(int(operate.dashboard(run_dir, host=host, port=port, control=control, as_json=as_json)))


def pin(
    configuration: Annotated[str, typer.Argument(help="Configuration to keep, like 2P3D or 4C.")],
    run: OfRun = None,
    as_json: AsJson = False,
) -> None:
    """Hold a running job at a configuration; its ratio is kept as GPUs come and go. Needs control.http=true.

    Example: pearl-rl pin 2P3D --run runs/20260101-120000
    """
    from pearl_rl.cli import operate

    raise typer.Exit(int(operate.pin(run, configuration, as_json=as_json)))


def unpin(run: OfRun = None, as_json: AsJson = False) -> None:
    """Let the policy of a running job choose again.

    Example: pearl-rl unpin --run runs/20260101-120000
    """
    from pearl_rl.cli import operate

    raise typer.Exit(int(operate.command(run, {"unpin": True}, as_json=as_json)))


def freeze(run: OfRun = None, as_json: AsJson = False) -> None:
    """Hold a running job at the configuration that it has now.

    Example: pearl-rl freeze --run runs/20260101-120000
    """
    from pearl_rl.cli import operate

    raise typer.Exit(int(operate.command(run, {"freeze": True}, as_json=as_json)))


def apply(
    file: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan, or a decision of `pearl-rl plan --json`.")],
    run: OfRun = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the stages from now to the target, do nothing.")] = (
        False
    ),
    as_json: AsJson = False,
) -> None:
    """Lead a running job to the target of a plan or decision, by the fewest changes.

    Example: pearl-rl apply plan.json --run runs/20260101-120000 --dry-run
    """
    from pearl_rl.cli.apply import apply as apply_file

    raise typer.Exit(int(apply_file(file, run, dry_run=dry_run, as_json=as_json)))


def list_workers(run: OfRun = None, as_json: AsJson = False) -> None:
    """List the workers of a run.

    Example: pearl-rl workers list --run runs/20260101-120000
    """
    from pearl_rl.cli import operate

    raise typer.Exit(int(operate.workers(run, as_json=as_json)))


def cordon(workers: Ids, run: OfRun = None, as_json: AsJson = False) -> None:
    """Fence workers off: they leave in order and count out of the budget. Needs control.http=true.

    Example: pearl-rl workers cordon 4 5 --run runs/20260101-120000
    """
    from pearl_rl.cli import operate

    raise typer.Exit(int(operate.command(run, {"cordon": workers}, as_json=as_json)))


def uncordon(workers: Ids, run: OfRun = None, as_json: AsJson = False) -> None:
    """Put workers that were fenced off back into service.

    Example: pearl-rl workers uncordon 4 5 --run runs/20260101-120000
    """
    from pearl_rl.cli import operate

    raise typer.Exit(int(operate.command(run, {"uncordon": workers}, as_json=as_json)))


def drain(
    workers: Ids,
    run: OfRun = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait; exit code 4 after that.")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Fence workers off and wait until nothing of them is left on their GPUs.

    Example: pearl-rl workers drain 4 --run runs/20260101-120000 --timeout 30
    """
    from pearl_rl.cli import operate

    raise typer.Exit(int(operate.drain(run, workers, limit_s=timeout, as_json=as_json)))


def config_diff(
    first: Annotated[Path, typer.Argument(help="TOML file or run folder.")],
    second: Annotated[Path | None, typer.Argument(help="Another one; default: FIRST against the default job.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print what two configurations have different, key by key.

    Example: pearl-rl config diff runs/20260101-120000 runs/20260102-120000
    """
    from pearl_rl.cli.config_diff import diff

    raise typer.Exit(int(diff(first, second, as_json=as_json)))
