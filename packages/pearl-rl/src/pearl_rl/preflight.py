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
    """Read the files that `settings` names. Raises `SettingsError` with one line."""
    from pearl_executor.availability import read_trace

    availability = settings.availability
    if availability.source == "trace":
        try:
            read_trace(trace_path(settings), availability.segment or None)
        except ValueError as error:
            raise SettingsError(f"availability.trace = {availability.trace}: {error}") from None


def check_installed() -> None:
    """Raise `CommandError` where a package that training needs is missing. Imports none of them."""
    missing = [name for name in ("torch", "transformers", "tokenizers") if find_spec(name) is None]
    if missing:
        raise CommandError(
            f"train needs {', '.join(missing)}, not installed here; run `uv sync` in the project's clone"
        )
