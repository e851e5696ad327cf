"""Options that several commands share, and what a shell completes."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from pearl_rl.frameworks import NAMES

Config = Annotated[Path | None, typer.Argument(help="TOML file with what differs from the default job.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One setting, like run.seed=1; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Plain = Annotated[bool, typer.Option("--plain", help="One line a step instead of the live view.")]


def frameworks(incomplete: str) -> list[str]:
    """Names that begin like `incomplete`."""
    return [name for name in NAMES if name.startswith(incomplete)]


def scenarios(incomplete: str) -> list[str]:
    """Bundled scenarios that begin like `incomplete`."""
    found = (files("pearl_rl.simulation") / "data" / "scenarios").iterdir()
    return sorted(name for file in found if (name := file.name.removesuffix(".toml")).startswith(incomplete))
