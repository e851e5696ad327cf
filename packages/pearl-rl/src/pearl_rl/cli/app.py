"""Commands and their options. Each command imports what it needs when it runs, so that `--help` answers at once."""

import errno
import io
import os
import re
import signal
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pearl_rl.cli import people, recovery_commands
from pearl_rl.cli.options import AsJson, Config, Overrides, Plain, frameworks, scenarios
from pearl_rl.cli.output import drop
from pearl_rl.errors import CommandError, ExitCode

_USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]
"""Any complaint of the option parser; typer does not name the class."""


_INTERRUPTED = 128 + signal.SIGINT
"""What typer gives for Ctrl-C."""
_OF_A_PATH = frozenset(
    {errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.EROFS}
)
"""Errors of a path that a person gave, wherever it is looked at first."""


class OneLineErrors(TyperGroup):
    """The one place where errors meet people: a `CommandError` or a usage error is one line and an exit code."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command. Ends the process with its exit code, or returns it where `standalone_mode` is false."""
        standalone = extra.get("standalone_mode", True)
        if sys.stdout is None:
            # It was closed before we began: nobody wants to read anything.
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        try:
            code: Any = super().main(*args, **{**extra, "standalone_mode": False})
            sys.stdout.flush()
        except (CommandError, _USAGE_ERROR, typer.Abort) as error:
            code = _told(error)
        except SystemExit as ended:
            if not isinstance(ended.__context__, BrokenPipeError):
                raise
            # Whoever reads has read enough.
            drop(sys.stdout)
            code = ExitCode.PARTIAL
        except OSError as error:
            code = _of_system(error)
            if code is None:
                raise
        if code == _INTERRUPTED:
            code = _told(typer.Abort())
        code = code if isinstance(code, int) else ExitCode.OK
        if standalone:
            sys.exit(int(code))
        return int(code)


def _told(error: Exception) -> ExitCode:
    """Say on one line what ended a command, and give the code for it."""
    if isinstance(error, CommandError):
        print(f"pearl-rl: {error}", file=sys.stderr)
        return error.exit_code
    if isinstance(error, typer.Abort):
        print("pearl-rl: stopped by Ctrl-C", file=sys.stderr)
        return ExitCode.PARTIAL
    print(f"pearl-rl: {_complaint(error)} (see {_command(error)} --help)", file=sys.stderr)
    return ExitCode.CONFIG


def _of_system(error: OSError) -> ExitCode | None:
    """As `_told` for what a person can mend: a path, or where the output goes. None for anything else."""
    if error.errno in _OF_A_PATH and isinstance(error.filename, str):
        from pearl_rl.settings.messages import short

        print(f"pearl-rl: {short(error.filename)}: cannot be used ({error.strerror})", file=sys.stderr)
        return ExitCode.CONFIG
    if not _output_is_broken():
        return None
    drop(sys.stdout)
    print(f"pearl-rl: standard output cannot be written ({error.strerror})", file=sys.stderr)
    return ExitCode.PARTIAL


def _output_is_broken() -> bool:
    """Whether it was standard output that failed: then it takes no line end either."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def _complaint(error: Exception) -> str:
    """A usage error in words: which option, which value, which rule; or which commands there are."""
    text = " ".join((error.format_message() if hasattr(error, "format_message") else str(error)).split())
    refused = re.match(r"Invalid value for '(.+?)': Input should (.+?)(?:, unable to.*)?$", text)
    details = getattr(error.__cause__, "errors", None)
    if refused and details is not None:
        return f"{refused[1]} {str(details()[0]['input'])[:80]}: must {refused[2]}"
    names = getattr(getattr(getattr(error, "ctx", None), "command", None), "commands", None)
    return f"{text} There are: {', '.join(names)}" if text == "Missing command." and names else text


def _command(error: Exception) -> str:
    """The command that complains, by the names that lead to it."""
    names: list[str] = []
    context = getattr(error, "ctx", None)
    while context is not None and context.parent is not None:
        names.insert(0, context.info_name)
        context = context.parent
    return " ".join(["pearl-rl", *names])


app = typer.Typer(
    cls=OneLineErrors,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(rich_markup_mode=None, help="Show and check settings.")
app.add_typer(config_app, name="config")


def main() -> None:
    """Entry point."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that has no arrows gets question marks.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app()


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"pearl-rl {version('pearl-rl')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def pearl_rl(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """PEARL: agentic RL for language models on GPUs that come and go.

    Exit codes: 0 ok, 2 settings, 3 infeasible, 4 time limit, 5 ended early.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(short_help="Run a training job; without arguments the default one.")
def train(
    config: Config = None,
    overrides: Overrides = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as one JSON object on the last line of standard output.")
    ] = False,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for this run, new or empty; default: a new one in runs.")
    ] = None,
    plain: Plain = False,
    runtime: Annotated[
        str | None, typer.Option(help="Where processes live: local or ray (sets cluster.runtime).")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Ray cluster, host:port or auto (sets cluster.ray.address).")
    ] = None,
) -> None:
    """Run a training job; without arguments the default one, which learns in under 5 minutes on a laptop.

    `pearl-rl config show` lists all settings.

    Example: pearl-rl train job.toml --runtime ray --address auto
    """
    from pearl_rl.cli.train import run_training

    chosen = list(overrides or [])
    chosen += [f"cluster.runtime={runtime}"] if runtime is not None else []
    chosen += [f"cluster.ray.address={address}"] if address is not None else []
    code = run_training(config, chosen, as_json=as_json, run_dir=run_dir, plain=plain)
    raise typer.Exit(int(code))


@app.command(short_help="Choose prefill/decode mode and ratio for some workers.")
def plan(
    model: Annotated[str, typer.Option(help="Model, like qwen3-8b.")],
    gpu: Annotated[str, typer.Option(help="GPU, like h800.")],
    workers: Annotated[int, typer.Option(help="Rollout workers of the budget.")],
    tp: Annotated[int, typer.Option(help="GPUs of one worker (tensor parallelism).")] = 1,
    profile: Annotated[str, typer.Option(help="Workload: a bundled name or a JSON file.")] = "swe-32k",
    current: Annotated[str | None, typer.Option(help="Configuration now, like 4C or 2P3D.")] = None,
    printed: Annotated[bool, typer.Option("--printed", help="Decide by eqs. (1)-(3) exactly as printed.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Add what each makespan is made of.")] = False,
    as_json: AsJson = False,
) -> None:
    """Choose the prefill/decode mode and ratio for a number of workers.

    Example: pearl-rl plan --model qwen3-8b --gpu h800 --tp 2 --workers 8 --explain
    """
    from pearl_rl.cli.plan import PlanQuestion, answer

    question = PlanQuestion(
        model=model,
        gpu=gpu,
        tp=tp,
        workers=workers,
        profile=profile,
        current=current,
        makespan="printed" if printed else "extended",
    )
    raise typer.Exit(int(answer(question, explain=explain, as_json=as_json)))


@app.command(short_help="Run scenarios in virtual time, and compare policies.")
def simulate(
    scenario: Annotated[
        str, typer.Argument(help="TOML file, or a bundled name like paper-segment1.", autocompletion=scenarios)
    ],
    policy: Annotated[
        str,
        typer.Option(
            "--policy", metavar="A,B,…", help="Policies to compare, like roll,pearl, or MODULE:NAME of yours."
        ),
    ] = "",
    seeds: Annotated[int, typer.Option(help="Seeds for each policy, from run.seed on.")] = 1,
    overrides: Overrides = None,
    as_json: AsJson = False,
    full: Annotated[bool, typer.Option("--full", help="With --json: every step, decision and interval.")] = False,
    report: Annotated[Path | None, typer.Option(help="HTML file that gets one page of everything.")] = None,
    record: Annotated[Path | None, typer.Option(help="Folder that gets a run folder of each simulation.")] = None,
) -> None:
    """Run a scenario in virtual time: the real control plane on a simulated cluster.

    Example: pearl-rl simulate paper-segment1 --policy rlboost,pearl --report compared.html
    """
    if full and not as_json:
        raise CommandError("--full: says more in JSON only; give --json too")
    from pearl_rl.cli.simulate import run_simulation

    code = run_simulation(
        scenario,
        policies=policy,
        seeds=seeds,
        overrides=overrides or [],
        as_json=as_json,
        full=full,
        report=report,
        record=record,
    )
    raise typer.Exit(int(code))


@app.command(short_help="Print the paper's figures beside those of the simulation.")
def reproduce(
    targets: Annotated[list[str] | None, typer.Argument(help="Targets like F5 or T2; default: all.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes; default: as many as there are cores to use.")] = None,
    seeds: Annotated[int, typer.Option(help="Seeds of the whole simulations of F5, F7 and F8.")] = 1,
    parameters: Annotated[
        str, typer.Option(metavar="SET", help="Parameter set in place of the paper's: history-edited, roll-sglang.")
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Short runs, only to see that everything works.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print what the paper measured beside what the simulation gives.

    Example: pearl-rl reproduce F2a T2 --jobs 1
    """
    from pearl_rl.cli.reproduce import run_reproduction

    code = run_reproduction(targets or [], jobs=jobs, seeds=seeds, parameters=parameters, quick=quick, as_json=as_json)
    raise typer.Exit(int(code))


@app.command(short_help="Say what this machine, or a Ray cluster, can run.")
def doctor(
    as_json: AsJson = False,
    cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Look at the Ray cluster for the job of this TOML file instead.")
    ] = None,
    address: Annotated[str | None, typer.Option(help="Its address; default: cluster.ray.address of the file.")] = None,
    wait_s: Annotated[
        float, typer.Option(min=0.0, help="Ask again for so many seconds while nodes are missing.")
    ] = 0.0,
    overrides: Overrides = None,
) -> None:
    """Say what this machine, or a Ray cluster, can run and how to get what is missing.

    Example: pearl-rl doctor --cluster docs/cluster/qwen3-8b-swe.toml --address auto
    """
    if cluster is None:
        given = {"--address": address, "--wait-s": wait_s, "--set": overrides}
        if any(given.values()):
            name = next(name for name, value in given.items() if value)
            raise CommandError(f"{name}: is about a Ray cluster; name the job that it is for by --cluster FILE")
        from pearl_rl.cli.doctor import examine

        raise typer.Exit(int(examine(as_json=as_json)))
    from pearl_rl.cli.doctor_cluster import examine_cluster

    code = examine_cluster(cluster, overrides or [], address=address, wait_s=wait_s, as_json=as_json)
    raise typer.Exit(int(code))


@app.command("import", short_help="Turn another framework's configuration into ours.")
def import_(
    framework: Annotated[str, typer.Argument(help="verl, slime, roll or areal.", autocompletion=frameworks)],
    file: Annotated[Path, typer.Argument(help="Its launch script (verl, slime) or YAML file.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; default: print.")] = None,
    model_path: Annotated[str | None, typer.Option(help="Model folder on this machine.")] = None,
    as_json: AsJson = False,
) -> None:
    """Turn another framework's configuration into ours, and name each key without a counterpart.

    Example: pearl-rl import verl run_dapo.sh -o job.toml --model-path models/qwen3-8b
    """
    from pearl_rl.cli.importing import run_import

    code = run_import(framework, file, output=output, model_path=model_path, as_json=as_json)
    raise typer.Exit(int(code))


@app.command(short_help="Turn our settings into another framework's configuration.")
def export(
    framework: Annotated[str, typer.Argument(help="verl, slime, roll or areal.", autocompletion=frameworks)],
    config: Config = None,
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; default: print.")] = None,
    as_json: AsJson = False,
) -> None:
    """Turn our settings into another framework's configuration, and name what has no counterpart there.

    Example: pearl-rl export roll job.toml -o agentic.yaml
    """
    from pearl_rl.cli.exporting import run_export

    raise typer.Exit(int(run_export(framework, config, overrides or [], output=output, as_json=as_json)))


@config_app.command(short_help="Print the resolved settings, each with its origin.")
def show(config: Config = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print the resolved settings, each with its origin.

    Example: pearl-rl config show job.toml --set train.learning_rate=3e-4
    """
    from pearl_rl.cli import config as commands

    commands.show(config, overrides or [], as_json=as_json)


@config_app.command(short_help="Check a configuration file without running anything.")
def validate(config: Config = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check a configuration file without running anything.

    Example: pearl-rl config validate job.toml
    """
    from pearl_rl.cli import config as commands

    commands.validate(config, overrides or [], as_json=as_json)


@config_app.command(short_help="Print the JSON schema of a configuration file.")
def schema() -> None:
    """Print the JSON schema of a configuration file, with every key explained.

    Example: pearl-rl config schema
    """
    from pearl_rl.cli import config as commands

    commands.schema()


people.register(app)
recovery_commands.register(app)
people.register_config(config_app)
