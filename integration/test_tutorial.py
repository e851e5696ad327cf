"""The tutorial's commands, in its order, in an empty folder; what it shows of simulations is what they print."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    uv run (pearl-rl .*)$", TEXT, re.M)
SHOWN = dict(re.findall(r"^    uv run (pearl-rl [^\n]*)\n\n```text\n(.*?)^```", TEXT, re.M | re.S))
"""Command → the output that stands below it."""
SIMULATIONS = [command for command in SHOWN if command.split()[1] in ("what-if", "simulate")]
"""The only ones that give the same wherever they run."""


def rows(output: str) -> list[tuple[str, list[float]]]:
    """Name and figures of each row of a table."""
    found = (re.fullmatch(r" (\S+) {2,}(\S.*?)\s*", line) for line in output.splitlines())
    numbers = [(row[1], re.findall(r"-?[\d,]*\.?\d+", row[2])) for row in found if row]
    return [(name, [float(number.replace(",", "")) for number in figures]) for name, figures in numbers if figures]


@pytest.mark.job
def test_every_step_of_the_tutorial_works_one_after_the_other(tmp_path: Path) -> None:
    assert len(COMMANDS) == 9
    for name in ("integration", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    for command in COMMANDS:
        words = shlex.split(command)[1:]
        done = subprocess.run(
            [sys.executable, "-m", "pearl_rl", *words],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            cwd=tmp_path,
        )
        # A machine without GPUs is not ready for the cluster; the doctor says so by its exit code.
        expected = {0, 2, 3} if words[0] == "doctor" else {0}
        assert done.returncode in expected, f"{command}\n{done.stderr[-2000:]}"
        assert done.stdout or done.stderr
        if command in SIMULATIONS:
            shown, printed = rows(SHOWN[command]), dict(rows(done.stdout))
            assert len(shown) == 3
            for name, figures in shown:
                # The document leaves out columns that a narrow terminal has no room for.
                real = printed[name][: len(figures)]
                assert figures == pytest.approx(real, rel=0.01, abs=0.2), f"renew it in the tutorial: {name} {real}"
    assert len(SIMULATIONS) == 2
    assert (tmp_path / "first.html").stat().st_size > 10_000
