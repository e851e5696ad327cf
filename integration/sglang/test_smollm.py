"""A real language model end to end: SmolLM2-135M-Instruct on real SGLang, in a tool-using environment, one update."""

import json
import os
import subprocess
import sys

import pytest
from support import HERE, PYTHON, environment

from pearl_rl.run_folder import read_lines


@pytest.fixture(scope="module")
def smollm(tmp_path_factory):
    """The model's folder: PEARL_SMOLLM names one that is there already."""
    if os.path.isdir(os.environ["PEARL_SMOLLM"]):
        return os.environ["PEARL_SMOLLM"]
    folder = tmp_path_factory.mktemp("smollm")
    subprocess.run([PYTHON, str(HERE / "smollm2.py"), str(folder)], check=True, env=environment())
    return str(folder)


def test_one_step_of_a_real_language_model_reaches_every_server(real_interpreter, smollm, tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "pearl_rl", "train", str(HERE / "smollm.toml"), "--json", "--plain"]
    command += ["--run-dir", str(folder), "--set", f"model.path={smollm}"]
    command += ["--set", f"engine.sglang.interpreter={json.dumps(list(real_interpreter))}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(summary))
    assert summary["steps"] == 1
    assert summary["trajectories"] == 4
    assert summary["lost_trajectories"] == 0

    trajectories = list(read_lines(folder / "trajectories.jsonl"))
    assert any(len(trajectory["turns"]) > 1 for trajectory in trajectories)
    loads = [
        line for line in map(json.loads, (folder / "workers" / "sglang.jsonl").read_text().splitlines())
        if line["action"] == "weights"
    ]  # fmt: skip
    workers = {line["worker"] for line in loads}
    assert len(workers) == 3
    by_version = {v: {x["worker"]: x["checksum"] for x in loads if x["version"] == v} for v in (0, 1)}
    for version in (0, 1):
        assert by_version[version].keys() == workers
        assert len(set(by_version[version].values())) == 1
    assert set(by_version[0].values()) != set(by_version[1].values())
    assert {line["verified_against"] for line in loads} == {"snapshot"}
