"""The bundled example on real processes: roles switch in the middle of a step, and nobody notices."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pearl_rl.run_folder import read_decisions, read_lines

pytestmark = [pytest.mark.torch, pytest.mark.slow]

EXAMPLE = Path(__file__).parent / "examples" / "in_step_switching.toml"


def run(folder: Path, **settings: str) -> dict:
    line = [sys.executable, "-m", "pearl_rl", "train", str(EXAMPLE), "--json", "--run-dir", str(folder)]
    for key, value in settings.items():
        line += ["--set", f"planner.{key}={value}"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def generated(folder: Path) -> dict[str, list]:
    """Trajectory → the tokens of its responses, turn by turn."""
    lines = read_lines(folder / "trajectories.jsonl")
    return {line["id"]: [turn["response"] for turn in line["turns"]] for line in lines}


def test_roles_switch_inside_a_step_and_every_trajectory_says_what_it_would_have_said(tmp_path: Path) -> None:
    moving = run(tmp_path / "moving")
    still = run(tmp_path / "still", policy="static_pd", configuration="2P2D")
    switches = [
        d for d in read_decisions(tmp_path / "moving" / "decisions.jsonl") if d["decision"]["reason"] == "forecast"
    ]
    assert len(switches) >= 3
    assert moving["ratio_switches"] >= 3
    assert still["ratio_switches"] == 0
    for summary in (moving, still):
        assert summary["steps"] == 1
        assert summary["trajectories"] == 16
        assert summary["lost_trajectories"] == 0
        assert summary["stale_served"] == 0
    assert generated(tmp_path / "moving") == generated(tmp_path / "still")
