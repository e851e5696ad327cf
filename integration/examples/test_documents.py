"""Every command that the documents show is run, here or by the check that the table names."""

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    path
    for pattern in ("*.md", "packages/*/README.md", "docs/**/*.md", "integration/**/*.md")
    for path in sorted(ROOT.glob(pattern))
    # The tutorial's commands build on each other: integration/test_tutorial.py.
    if path.name != "tutorial.md"
]

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
    "python integration/benchmarks/gpu/bench_engine.py --gpu h200": "needs a GPU; test_gpu_bench.py runs it on a CPU",
    "curl -s localhost:8400/v1/choose -d '{\"workers\": 8}'": "test_guest.py asks the service this",
    "ray job submit --address http://127.0.0.1:8265 --working-dir . -- uv run pearl-rl train "
    "docs/cluster/qwen3-8b-swe.toml --runtime ray --address auto": "test_cluster_documents.py, and nox -s ray",
    "uv run python integration/guests/public_files.py verl=../verl slime=../slime roll=../ROLL areal=../AReaL": (
        "needs clones of others; test_public_files.py walks some of its own"
    ),
    "uv venv /opt/sglang": "nox -s sglang makes such an environment",
    "uv pip install --python /opt/sglang/bin/python sglang==0.5.23 mooncake-transfer-engine": "nox -s sglang does",
}
"""Commands that are too long for a test, and what runs them."""


NO_COMMANDS = ("python", "toml", "json", "yaml")
"""Languages of code blocks; what others hold is a command where it begins with a program."""
PROGRAM = re.compile(r"(uv|pip|python3?|pearl-rl|curl|ray|nox(?! >)|git|bash|sbatch|sky|kubectl|docker)\s")


def commands(path):
    """Shell commands in code blocks and in indented blocks, continued lines joined."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for language, block in blocks if language not in NO_COMMANDS for line in block.splitlines()]
    lines += [line.strip() for line in text.splitlines() if line.startswith("    ") and not line.startswith("     ")]
    for line in lines:
        bare = " ".join(line.removeprefix("$ ").split(" #")[0].split())
        if PROGRAM.match(bare):
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
        (path.relative_to(ROOT).as_posix(), command)
        for path in [*DOCUMENTS, ROOT / "docs" / "tutorial.md"]
        for command in re.findall(r"`(?:uv run )?pearl-rl ([^`\n]+)`", path.read_text(encoding="utf-8"))
    }
)


def test_each_command_that_a_sentence_names_is_one_and_has_the_options_that_it_is_given() -> None:
    import typer

    from pearl_rl.cli.app import app

    assert INLINE
    for document, line in INLINE:
        command, words = typer.main.get_command(app), shlex.split(line.replace("…", "").replace("|", " "))
        name = "pearl-rl"
        while words and hasattr(command, "commands") and not words[0].startswith("-"):
            assert words[0] in command.commands, f"{document}: {name} {words[0]}"
            command, name = command.commands[words[0]], f"{name} {words.pop(0)}"
        # What the line leaves out, it leaves to the reader; what it says must be there.
        known = {option for parameter in getattr(command, "params", ()) for option in parameter.opts}
        given = [word.partition("=")[0] for word in words if word.startswith("-")]
        assert set(given) <= known | {"--help"}, f"{document}: pearl-rl {line}"


def test_scripts_and_sessions_that_sentences_name_are_there() -> None:
    sessions = set(
        re.findall(r"^@nox\.session.*\n(?:@.*\n)*def (\w+)", (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.M)
    )
    for path in [*DOCUMENTS, ROOT / "docs" / "tutorial.md"]:
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r"nox -s \"?(\w+)", text)) <= sessions, path
        for name in re.findall(r"\bpython (integration/[\w/]+\.py)", text):
            assert (ROOT / name).is_file(), f"{path}: {name}"
    told = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert sessions == set(re.findall(r"nox -s \"?(\w+)", told)), "a contributor finds each session in the table"


def test_everything_that_is_run_elsewhere_is_still_shown() -> None:
    assert ELSEWHERE.keys() <= {command for _, command in SHOWN}
