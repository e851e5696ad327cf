"""The walk over checkouts: every script and YAML file ends as settings or one line, whatever kind of checkout it is."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from guests import public_files as tool

JOB = """\
rollout: {backend: 'sglang:d4'}
actor: {backend: 'fsdp:d2'}
gconfig: {n_samples: 4}
train_dataset: {batch_size: 8}
mystery: 1
"""
FILES = {
    "examples/job.yaml": JOB,
    "examples/tuning.yml": "actor: {path: x}\n",
    "run.sh": "echo hello\n",
    ".github/workflow.yaml": "a: 1\n",
    "notes.md": "nothing\n",
}


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", "-C", str(folder), *who, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A work tree whose newest commit has another job than its first."""
    folder = tmp_path / "project"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", "one")
    (folder / "examples/job.yaml").write_text(JOB.replace("n_samples: 4", "n_samples: 8"))
    git(folder, "commit", "--quiet", "-a", "-m", "two")
    return folder


def record(folder: Path, commit: str, **expected: Any) -> Path:
    digest = hashlib.sha256(JOB.encode()).hexdigest()
    entry = {"framework": "areal", "repository": "a/b", "commit": commit, "path": "examples/job.yaml", "sha256": digest}
    file = folder / "record.json"
    file.write_text(json.dumps([{**entry, **expected}]))
    return file


@pytest.mark.parametrize("kind", ["work tree", "bare", "plain"])
def test_every_kind_of_checkout_is_walked_and_the_file_on_record_is_found_in_its_history(
    project: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = git(project, "rev-list", "--max-parents=0", "HEAD")
    kept = record(
        tmp_path, first, settings={"train.group_size": 4, "cluster.training_gpus": 2}, unsupported=["mystery"]
    )
    folder = project
    if kind == "bare":
        folder = tmp_path / "bare"
        git(tmp_path, "clone", "--quiet", "--bare", str(project), str(folder))
    elif kind == "plain":
        (project / ".git").rename(tmp_path / "away")
    assert tool.main([f"areal={folder}", "--json", "--record", str(kept)]) == 0
    found = json.loads(capsys.readouterr().out)
    (walked,) = found["projects"]
    outcomes = {file["path"]: file for file in walked["outcomes"]}
    assert {path: file["kind"] for path, file in outcomes.items()} == {
        "examples/job.yaml": "valid",
        "examples/tuning.yml": "line",
        "run.sh": "line",
    }
    assert outcomes["examples/job.yaml"]["settings"]["train.group_size"] == 8
    assert outcomes["run.sh"]["line"].startswith("run.sh: AReaL is configured by YAML")
    # An unpacked archive has no history, and what it has under that path is another text.
    assert [each["differs"] for each in found["on_record"]] == ([None] if kind == "plain" else [[]])


@pytest.mark.parametrize(
    ("expected", "says"),
    [
        ({"settings": {"train.group_size": 5}}, "train.group_size = 4, not 5"),
        ({"settings": {}, "unsupported": ["seed"]}, "seed is not named"),
        ({"line": "no such thing"}, "no line with 'no such thing', but valid"),
    ],
)
def test_another_outcome_than_on_record_is_named_and_fails(
    project: Path,
    tmp_path: Path,
    expected: dict[str, Any],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = record(tmp_path, git(project, "rev-parse", "HEAD^"), **expected)
    assert tool.main([f"areal={project}", "--record", str(kept)]) == 1
    assert says in capsys.readouterr().out


class Broken:
    """A command that ends in one of the ways that people must not see."""

    def __init__(self, how: str) -> None:
        self.how = how

    def main(self, words: list[str], *, standalone_mode: bool) -> int:
        assert not standalone_mode
        if self.how == "traceback":
            raise KeyError("actor")
        if self.how == "two lines":
            print(f"pearl-rl: {words[2]}: one\nand two", file=sys.stderr)
            return 2
        if self.how == "other code":
            print(f"pearl-rl: {words[2]}: one", file=sys.stderr)
            return 1
        if self.how == "not valid":
            Path(words[4]).write_text("[rollout]\ntemperature = -1\n")
        else:
            Path(words[4]).write_text("")
        print(json.dumps({"settings": {}, "unsupported": [] if self.how == "not valid" else ["a key and no reason"]}))
        return 0


@pytest.mark.parametrize("how", ["traceback", "two lines", "other code", "not valid", "no reason"])
def test_a_file_that_gives_neither_settings_nor_one_line_is_shown_and_fails(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "COMMAND", Broken(how))
    (tmp_path / "job.yaml").write_text(JOB)
    empty = tmp_path / "record.json"
    empty.write_text("[]")
    assert tool.main([f"areal={tmp_path}", "--record", str(empty)]) == 1
    shown = capsys.readouterr().out
    assert "1 files: 0 valid settings, 0 one line, 1 neither" in shown
    assert "neither  job.yaml: " in shown


@pytest.mark.parametrize("word", ["trl=.", "verl", "verl=no/such/folder"])
def test_what_cannot_be_walked_is_a_mistake_of_the_arguments(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        tool.main([word])
    assert ended.value.code == 2
    assert word.partition("=")[2] in capsys.readouterr().err


def test_the_record_names_at_least_three_files_of_each_framework() -> None:
    entries = json.loads(tool.RECORD.read_text(encoding="utf-8"))
    of = {name: [entry for entry in entries if entry["framework"] == name] for name in tool.NAMES}
    assert all(len(found) >= 3 for found in of.values())
    for entry in entries:
        assert len(entry["commit"]) == 40
        assert len(entry["sha256"]) == 64
        assert entry.get("line") or (len(entry["settings"]) >= 5 and entry["unsupported"])
