"""What holds for every command: help with an example that its parser takes, --json, a test, and shell completion."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from pearl_rl.cli import app
from pearl_rl.cli.options import frameworks

PROGRAM: Any = typer.main.get_command(app)
TESTS = [*Path(__file__).parent.glob("test_*.py"), *(Path(__file__).parents[3] / "integration").rglob("test_*.py")]


def walked(command: Any = PROGRAM, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, with the words that name it."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
        return
    for name, part in inner.items():
        yield from walked(part, (*path, name))


COMMANDS = dict(walked())
NAMES = [" ".join(path) for path in COMMANDS]
PRINTS_JSON_ANYWAY = {("config", "schema")}


def named(name: str) -> tuple[tuple[str, ...], Any]:
    path = tuple(name.split())
    return path, COMMANDS[path]


def test_the_walk_finds_commands_and_those_within_groups() -> None:
    assert {("train",), ("workers", "list"), ("config", "diff"), ("what-if",)} <= COMMANDS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_help_says_what_it_does_and_shows_an_example_that_the_parser_takes(name: str) -> None:
    path, _ = named(name)
    shown = CliRunner().invoke(app, [*path, "--help"])
    assert shown.exit_code == 0
    text = " ".join(shown.stdout.split())
    found = re.search(r"Example: pearl-rl (.*?) (?:Arguments|Options):", text)
    assert found, f"{name} shows no example"
    words = shlex.split(found[1])
    assert tuple(words[: len(path)]) == path
    command: Any = PROGRAM
    for word in path:
        command = command.commands[word]
    # Parses all options and arguments of the example, and runs nothing.
    command.make_context(name, words[len(path) :])


@pytest.mark.parametrize("name", NAMES)
def test_every_option_and_argument_is_explained(name: str) -> None:
    _, command = named(name)
    for parameter in command.params:
        assert getattr(parameter, "help", None), f"{name}: {parameter.name} has no help"


@pytest.mark.parametrize("name", NAMES)
def test_every_command_speaks_json(name: str) -> None:
    path, command = named(name)
    options = {option for parameter in command.params for option in parameter.opts}
    assert "--json" in options or path in PRINTS_JSON_ANYWAY


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_a_test(name: str) -> None:
    words = r"\s*,\s*".join(f'"{word}"' for word in name.split())
    spoken = re.compile(rf"(?:{words}|pearl-rl {name}\b|invoke\(app, \[{words})")
    assert any(spoken.search(file.read_text(encoding="utf-8")) for file in TESTS if file.name != Path(__file__).name), (
        f"no test runs pearl-rl {name}"
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_list_of_commands_says_what_each_is_for_in_a_line_that_is_not_cut_off(name: str) -> None:
    path, command = named(name)
    assert command.short_help, f"{name} has no short help"
    assert len(command.short_help) <= 60
    shown = CliRunner().invoke(app, [*path[:-1], "--help"]).stdout
    assert command.short_help in " ".join(shown.split())


def test_a_shell_completes_names_of_scenarios() -> None:
    variables = {"_PEARL_RL_COMPLETE": "complete_bash", "COMP_WORDS": "pearl-rl simulate paper-seg", "COMP_CWORD": "2"}
    code = "import sys; sys.argv[0] = 'pearl-rl'; from pearl_rl.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **variables}
    )
    assert "paper-segment1" in done.stdout.split(), done.stderr
    assert frameworks("ve") == ["verl"]
