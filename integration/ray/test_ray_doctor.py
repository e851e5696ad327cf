"""`pearl-rl doctor --cluster` against a real cluster: it finds what is there, and says what is not."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.ray

JOB = """
[cluster]
training_gpus = 2
reserved_rollout_gpus = 2
max_preemptible_gpus = 0

[cluster.ray]
training_labels = "pearl.zone=base"
reserved_labels = "pearl.zone=base"

[availability]
source = "fixed"
"""


def doctor(nodes, tmp_path, *overrides):
    (tmp_path / "job.toml").write_text(JOB)
    command = [sys.executable, "-m", "pearl_rl", "doctor", "--json", "--cluster", str(tmp_path / "job.toml")]
    command += ["--address", nodes.address, "--set", f"run.dir={tmp_path / 'runs'}"]
    for setting in overrides:
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, json.loads(done.stdout)


def test_the_doctor_finds_what_a_job_needs_on_the_cluster(nodes, tmp_path) -> None:
    code, report = doctor(nodes, tmp_path)
    assert code == 0, report
    assert report["train"]
    assert not list((tmp_path / "runs").iterdir())
    code, report = doctor(nodes, tmp_path, "cluster.training_gpus=64")
    assert code == 2
    lacking = [finding for finding in report["findings"] if not finding["ok"]]
    assert [finding["name"] for finding in lacking if finding["needed"]] == ["training GPUs"]
    assert "lower cluster.training_gpus" in lacking[0]["remedy"]
