"""The default job as the README shows it, in full: it learns while its GPUs come and go."""

import json
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.job

MARGIN = 0.1
"""By how much the mean reward of the last ten steps beats that of the first ten; the README states it."""


def train(folder, *overrides):
    command = [sys.executable, "-m", "pearl_rl", "train", "--json", "--run-dir", str(folder), *overrides]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), time.monotonic() - began


def test_the_default_job_learns_while_gpus_are_taken_and_given_back(tmp_path) -> None:
    summary, wall_s = train(tmp_path / "run")
    print(json.dumps(summary))
    assert summary["reward_last10"] > summary["reward_first10"] + MARGIN
    for count in ("expansions", "reclaims", "borrows", "returns", "mode_switches", "ratio_switches"):
        assert summary[count] >= 1, count
    assert summary["lost_trajectories"] == 0
    assert summary["stale_served"] == 0
    assert wall_s < 300
