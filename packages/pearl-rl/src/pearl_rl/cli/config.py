"""`pearl-rl config show | validate | schema`."""

import json
from collections.abc import Sequence
from pathlib import Path

import typer

from pearl_rl.preflight import check_parts
from pearl_rl.settings import json_schema, load_settings, to_json, to_toml


def show(config: Path | None, overrides: Sequence[str], *, as_json: bool) -> None:
    """Print the resolved settings as TOML with origins, or as JSON."""
    resolved = load_settings(config, overrides)
    typer.echo(json.dumps(to_json(resolved), indent=2) if as_json else to_toml(resolved), nl=as_json)


def validate(config: Path | None, overrides: Sequence[str], *, as_json: bool) -> None:
    """Check settings and the files they name. Raises `SettingsError`."""
    resolved = load_settings(config, overrides)
    check_parts(resolved.settings)
    changed = sum(1 for origin in resolved.origins.values() if origin != "default")
    if as_json:
        typer.echo(json.dumps({"settings": len(resolved.origins), "changed": changed}))
    else:
        typer.echo(f"ok: {len(resolved.origins)} settings, {changed} of them not the default job's")


def schema() -> None:
    """Print the JSON schema of a configuration file."""
    typer.echo(json.dumps(json_schema(), indent=2))
