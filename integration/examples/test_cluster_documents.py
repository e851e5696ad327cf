"""The documents on clusters: their settings are valid and the paper's, their commands have the options they use."""

import functools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "docs" / "cluster"
JOB = FOLDER / "qwen3-8b-swe.toml"
SCRIPTS = sorted(path for path in FOLDER.iterdir() if path.suffix in (".sbatch", ".yaml", ".md"))


def pearl_rl(*words, **options):
    return subprocess.run(
        [sys.executable, "-m", "pearl_rl", *words], capture_output=True, text=True, timeout=120, check=False, **options
    )


@functools.cache
def helped(command):
    return pearl_rl(command, "--help", env={**os.environ, "COLUMNS": "200"}).stdout


def test_the_papers_set_up_is_valid(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    row = '{"instance_id": "a", "image": "b", "problem_statement": "c", "evaluation": "true"}'
    (tmp_path / "tasks.jsonl").write_text(row)
    overrides = [f"model.path={tmp_path / 'model'}", f"environment.args.tasks={tmp_path / 'tasks.jsonl'}"]
    words = [word for setting in overrides for word in ("--set", setting)]
    done = pearl_rl("config", "validate", str(JOB), *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ok:")


def test_what_is_only_yours_to_set_is_asked_for_in_one_line():
    done = pearl_rl("config", "validate", str(JOB))
    assert done.returncode == 2
    assert "model.path" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_set_up_is_the_papers():
    """PEARL section 6.1: 16 training, 4 reserved and up to 12 preemptible GPUs, TP2, groups of 16, batches of 64."""
    job = tomllib.loads(JOB.read_text(encoding="utf-8"))
    cluster, rollout, train = job["cluster"], job["rollout"], job["train"]
    assert (cluster["training_gpus"], cluster["reserved_rollout_gpus"], cluster["max_preemptible_gpus"]) == (16, 4, 12)
    assert cluster["gpus_per_worker"] == 2
    assert (train["group_size"], rollout["batch_size"], train["max_staleness_versions"]) == (16, 64, 1)
    assert job["model"]["max_context_tokens"] == 32 * 1024


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_commands_have_the_options_that_scripts_give_them(script):
    text = script.read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.findall(r"pearl-rl (train|doctor)\b([^\n`]*)", text)
    for command, words in found:
        shown = helped(command)
        for option in re.findall(r"--[a-z][a-z-]*", words):
            assert option in shown, (command, option)
    assert found or script.name in ("elastic.yaml", "slurm-elastic.sbatch")


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.sbatch")), ids=lambda path: path.name)
def test_batch_scripts_are_valid_shell(script):
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


def test_tasks_are_valid_yaml_and_their_scripts_valid_shell():
    files = sorted(FOLDER.glob("*.yaml"))
    assert files
    for file in files:
        task = yaml.safe_load(file.read_text(encoding="utf-8"))
        assert task["resources"]["accelerators"]
        for part in ("setup", "run"):
            done = subprocess.run(["bash", "-n"], input=task[part], text=True, capture_output=True, check=False)
            assert done.returncode == 0, (file.name, part, done.stderr)


def test_every_file_that_the_page_names_is_there():
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert links
    for link in links:
        name, _, heading = link.partition("#")
        assert (FOLDER / name).is_file(), name
        titles = re.findall(r"^#+ (.+)$", (FOLDER / name).read_text(encoding="utf-8"), re.MULTILINE)
        assert not heading or heading in {title.lower().replace(" ", "-") for title in titles}, link
