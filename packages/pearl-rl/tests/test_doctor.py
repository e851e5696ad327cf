"""The doctor: findings about this machine, without importing anything heavy."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from pearl_rl.cli.doctor import examine, memory_bytes, usable_cores
from pearl_rl.errors import ExitCode

CAN_TRAIN = all(find_spec(name) for name in ("torch", "transformers", "tokenizers"))


def test_the_exit_code_says_whether_the_default_job_can_run(capsys):
    code = examine(as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert code == (ExitCode.OK if CAN_TRAIN else ExitCode.CONFIG)
    assert report["train"] is CAN_TRAIN
    found = {finding["name"]: finding for finding in report["findings"]}
    assert {"python", "cores", "memory", "disk", "torch", "ray", "sglang", "gpu"} <= set(found)
    assert found["python"]["ok"]
    assert found["torch"]["ok"] is (find_spec("torch") is not None)


def test_whatever_is_missing_comes_with_a_remedy(capsys):
    examine(as_json=True)
    for finding in json.loads(capsys.readouterr().out)["findings"]:
        if not finding["ok"] and finding["name"] != "gpu":
            assert finding["remedy"], finding


def test_people_get_a_line_for_each_finding_and_a_verdict(capsys):
    examine(as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("pearl-rl train can")
    assert sum(line.startswith(("ok", "absent", "MISSING")) for line in lines) == len(lines) - 2


def test_a_missing_package_that_training_needs_is_named(capsys, monkeypatch):
    monkeypatch.setattr("pearl_rl.cli.doctor.find_spec", lambda name: None)
    assert examine(as_json=False) is ExitCode.CONFIG
    out = capsys.readouterr().out
    assert "MISSING  torch" in out
    assert "cannot run, for torch, transformers, tokenizers" in out
    assert "uv sync" in out


def test_looking_imports_nothing_heavy():
    code = "import sys\nfrom pearl_rl.cli.doctor import examine\nexamine(as_json=True)\nprint(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "ray", "sglang", "numpy"} & set(answer.stdout.split())


def test_cores_and_memory_are_those_of_this_machine():
    assert 0 < usable_cores() <= (os.cpu_count() or 1)
    total, available = memory_bytes()
    assert 0 <= available <= total


@pytest.mark.parametrize(("answer", "words"), [("echo NVIDIA H800, 81559 MiB", "1 × NVIDIA H800"), ("exit 9", "none")])
def test_gpus_are_those_that_the_driver_names(tmp_path, monkeypatch, capsys, answer, words):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{answer}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    examine(as_json=True)
    (gpu,) = [f for f in json.loads(capsys.readouterr().out)["findings"] if f["name"] == "gpu"]
    assert words in gpu["detail"]
