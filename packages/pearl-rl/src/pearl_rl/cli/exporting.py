"""`pearl-rl export FRAMEWORK [CONFIG]`: our settings as another framework's configuration."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import typer

from pearl_rl.cli.report import write_text
from pearl_rl.errors import ExitCode, SettingsError
from pearl_rl.exporting import areal, roll, slime, verl
from pearl_rl.exporting.result import Exported
from pearl_rl.frameworks import NAMES
from pearl_rl.settings import Settings, load_settings
from pearl_rl.settings.load import ResolvedSettings

_WRITERS: Final[Mapping[str, tuple[Callable[[Settings], Exported], Callable[[Exported, str], str]]]] = {
    "verl": (verl.mapped, verl.text),
    "slime": (slime.mapped, slime.text),
    "roll": (roll.mapped, roll.text),
    "areal": (areal.mapped, areal.text),
}
"""Framework → the mapping, and how its configuration is written."""


def exported(framework: str, resolved: ResolvedSettings, source: str) -> tuple[Exported, str]:
    """What a framework takes over, and its configuration as text. Raises `SettingsError` with one line."""
    if framework not in NAMES:
        raise SettingsError(f"export {framework[:40]}: unknown framework; known: {', '.join(NAMES)}")
    mapping, write = _WRITERS[framework]
    found = mapping(resolved.settings)
    found.name_the_rest(resolved)
    return found, write(found, source)


def run_export(
    framework: str, config: Path | None, overrides: Sequence[str], *, output: Path | None, as_json: bool
) -> ExitCode:
    """Print or write the configuration; one line on standard error for each of our keys without a counterpart."""
    resolved = load_settings(config, overrides)
    found, text = exported(framework, resolved, "the default job" if config is None else config.name)
    if output is not None:
        write_text(output, text)
    if as_json:
        body = {
            "values": found.values,
            "origins": found.origins,
            "unsupported": found.unsupported,
            "notes": found.notes,
        }
        print(json.dumps(body, indent=1))
        return ExitCode.OK
    for line in found.unsupported:
        print(f"no counterpart: {line}", file=sys.stderr)
    for line in found.notes:
        print(f"look at {line}", file=sys.stderr)
    if output is None:
        typer.echo(text, nl=False)
    else:
        typer.echo(f"{output}: {len(found.values)} keys; {len(found.unsupported)} of ours without a counterpart")
    return ExitCode.OK
