"""Every command that the documents show is run, here or by the check that the table names."""

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("packages/*/README.md"))]
# The tutorial's commands build on each other: integration/test_tutorial.py.
DOCUMENTS += sorted(path for path in ROOT.glob("docs/*.md") if path.name != "tutorial.md")

ELSEWHERE = {
    "pip install uv": "every checkout begins with it",
    "pip install uv && uv run pearl-rl train": "nox -s job",
    "uv run pearl-rl train": "nox -s job",
    "uv run pearl-rl train job.toml --set train.learning_rate=3e-4 --json": "test_local_job.py runs this form",
    "python -m pearl_planner serve --model qwen3-8b --gpu h800 --tp 2 --port 8400": "test_guest.py starts it",
    "uv run pearl-rl train --set planner.policy=integration.examples.half_prefill:policy --set run.steps=2": (
        "test_own_policy.py takes it, and test_local_job.py runs a job"
    ),
    "uv run nox": "continuous integration",
    "uv sync --group lint": "nox does it",
    "uv run python integration/benchmarks/bench_effects.py": "nox -s effects",
}
"""Commands that are too long for a test, and what runs them."""


def commands(path):
    """Shell commands in code blocks without a language and in indented blocks."""
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:sh|console)?\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += [line.strip() for line in text.splitlines() if line.startswith("    ") and not line.startswith("     ")]
    for line in lines:
        bare = line.removeprefix("$ ").split(" #")[0].strip()
        if re.match(r"(uv|pip|python|pearl-rl)\b", bare):
            yield bare


SHOWN = sorted({(path.relative_to(ROOT).as_posix(), command) for path in DOCUMENTS for command in commands(path)})


def test_the_documents_show_commands() -> None:
    assert {"uv run nox", "pip install uv && uv run pearl-rl train"} <= {command for _, command in SHOWN}


@pytest.mark.parametrize(("document", "command"), [c for c in SHOWN if c[1] not in ELSEWHERE and " nox" not in c[1]])
def test_a_command_that_a_document_shows_runs(document, command, tmp_path) -> None:
    words = shlex.split(command.replace(" [--json]", ""))
    if words[:2] == ["uv", "run"]:
        words = words[2:]
    if words[0] == "pearl-rl":
        words = [sys.executable, "-m", "pearl_rl", *words[1:]]
    elif words[0] == "python":
        words[0] = sys.executable
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert done.returncode == 0, f"{document}: {command}\n{done.stderr[-2000:]}"
    assert done.stdout


def test_the_readme_is_short() -> None:
    words = (ROOT / "README.md").read_text(encoding="utf-8").split()
    assert len(words) <= 600


def test_the_policy_guide_shows_the_policy_that_is_run() -> None:
    guide = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    shown, test = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    source = (ROOT / "integration" / "examples" / "half_prefill.py").read_text(encoding="utf-8")
    assert source.split("\n", 2)[2] == shown
    assert len(shown.splitlines()) <= 30
    done = subprocess.run([sys.executable, "-c", test + "\ntest_every_worker_has_a_role()"], cwd=ROOT, timeout=120)
    assert done.returncode == 0


ROWS = re.findall(
    r"^\| [^|]* \| [^|]* \| `([\w.]+)` \| `([\w./-]+)` \|$",
    (ROOT / "docs" / "equations.md").read_text(encoding="utf-8"),
    flags=re.MULTILINE,
)


@pytest.mark.parametrize(("code", "test"), ROWS)
def test_each_equation_s_code_and_test_exist(code, test) -> None:
    module, _, name = code.rpartition(".")
    assert hasattr(importlib.import_module(module), name)
    assert (ROOT / test).is_file()


def test_the_table_of_equations_was_read() -> None:
    assert len(ROWS) >= 20


INLINE = sorted(
    {
        (path.relative_to(ROOT).as_posix(), name)
        for path in DOCUMENTS
        for name in re.findall(r"`pearl-rl ([a-z-]+(?: (?:list|cordon|uncordon|drain|show|validate|diff|schema))?)[ `]",
                               path.read_text(encoding="utf-8"))
    }
)  # fmt: skip


def test_each_command_that_a_sentence_names_has_help() -> None:
    from typer.testing import CliRunner

    from pearl_rl.cli.app import app

    assert INLINE
    for document, name in INLINE:
        done = CliRunner().invoke(app, [*name.split(), "--help"])
        assert done.exit_code == 0, f"{document}: pearl-rl {name}"
