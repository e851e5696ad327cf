"""The command line, `pearl-rl`. Importing it pulls nothing heavier than typer."""

from pearl_rl.cli.app import app, main

__all__ = ["app", "main"]
