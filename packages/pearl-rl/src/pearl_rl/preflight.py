"""What must hold before a run may write anything: the files it names are sound, and what it needs is installed."""

from importlib.util import find_spec
from pathlib import Path

from pearl_rl.errors import CommandError, SettingsError
from pearl_rl.settings.root import Settings


def trace_path(settings: Settings) -> Path:
    """The file of `availability.trace`: a bundled trace by its name, or any CSV file by its path."""
    from pearl_executor.availability import bundled_trace

    bundled = bundled_trace()
    return bundled if settings.availability.trace == bundled.stem else Path(settings.availability.trace)


def check_parts(settings: Settings) -> None:
    """Build every part that needs no process, and read the files that `settings` names.

    Raises `SettingsError` with the one line in which a part says what it cannot do.
    """
    from pearl_executor.availability import read_trace
    from pearl_rl import parts
    from pearl_rl.checkpoints import find
    from pearl_rl.rollout.environments.suites import make_suite

    availability, environment = settings.availability, settings.environment
    if availability.source == "trace":
        try:
            read_trace(trace_path(settings), availability.segment or None)
        except ValueError as error:
            raise SettingsError(f"availability.trace = {availability.trace}: {error}") from None
    try:
        make_suite(environment.name, environment.args)
    except (ValueError, ImportError) as error:
        raise SettingsError(f"environment.name = {environment.name}: {error}") from None
    if settings.run.resume_from:
        find(Path(settings.run.resume_from))
    if settings.engine.kind == "sglang":
        _check_sglang(settings)
    for build in (
        parts.pace,
        parts.limits,
        parts.engine_limits,
        parts.timeouts,
        parts.router_limits,
        parts.agent_limits,
        parts.sampling,
        parts.elastic_settings,
        parts.toggle_costs,
        parts.availability,
        parts.pipeline_settings,
        parts.trainer_options,
        parts.trainer_limits,
        parts.prior_workload,
    ):
        try:
            build(settings)
        except ValueError as error:
            raise SettingsError(f"settings cannot be used: {error}") from None


def _check_sglang(settings: Settings) -> None:
    """The interpreter must have the SGLang that this package speaks to; asking it takes a moment."""
    import asyncio

    from pearl_executor.engines.sglang.launch import InterpreterLauncher, LaunchError
    from pearl_rl.engines import sglang_options

    try:
        options = sglang_options(settings, Path(settings.model.path))
        if settings.cluster.runtime == "ray":
            # It runs on the cluster's nodes, which are asked once there is a connection.
            return
        asyncio.run(InterpreterLauncher(options.interpreter).check())
    except (ValueError, LaunchError) as error:
        raise SettingsError(str(error)) from None


def check_installed(settings: Settings) -> None:
    """Raise `CommandError` where a package that training needs is missing. Imports none of them."""
    if settings.cluster.runtime == "ray" and find_spec("ray") is None:
        raise CommandError(
            'cluster.runtime = "ray" needs the package ray, not installed here; run `uv sync --group ray` in the '
            "project's clone"
        )
    if settings.engine.kind == "sglang" and find_spec("aiohttp") is None:
        raise CommandError(
            'engine.kind = "sglang" needs the package aiohttp, not installed here; install pearl-rl[sglang]'
        )
    missing = [name for name in ("torch", "transformers", "tokenizers") if find_spec(name) is None]
    if missing:
        raise CommandError(
            f"train needs {', '.join(missing)}, not installed here; run `uv sync` in the project's clone"
        )
