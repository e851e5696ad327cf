"""The bundled in-step example on stand-in SGLang servers, wherever they run: roles flip in place inside a step."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from servers import STAND_IN

from pearl_rl.run_folder import read_decisions, read_lines

EXAMPLE = Path(__file__).parents[1] / "examples" / "in_step_switching.toml"
SERVERS = {
    "engine.kind": "sglang",
    "engine.sglang.interpreter": json.dumps(list(STAND_IN)),
    # Contexts grow until decode needs the memory of more than half of the servers.
    "engine.kv_tokens": 2048,
    # The servers say how fast they are, not an emulated device; an iteration takes long enough for steps to last.
    "device.paced": "false",
    "engine.sglang.variables": json.dumps(["PEARL_STANDIN_STEP_S=0.05"]),
}


def run(folder: Path, **settings: str) -> dict[str, Any]:
    """The summary of a run into `folder`, which lost nothing. Settings have `__` for their dots."""
    line = [sys.executable, "-m", "pearl_rl", "train", str(EXAMPLE), "--json", "--plain", "--run-dir", str(folder)]
    for key, value in {**SERVERS, **{key.replace("__", "."): value for key, value in settings.items()}}.items():
        line += ["--set", f"{key}={value}"]
    # Not from there: Ray wants the project's root where `uv run` started the tests.
    env = {**os.environ, "PYTHONPATH": str(EXAMPLE.parent)}
    done = subprocess.run(line, capture_output=True, text=True, timeout=400, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert (summary["steps"], summary["trajectories"]) == (1, 16)
    assert summary["lost_trajectories"] == 0
    assert summary["stale_served"] == 0
    return summary


def check_switched_unnoticed(folder: Path, **settings: str) -> None:
    """Run with roles that follow the forecasts and with a ratio that stands: one flips, and both say the same."""
    moving = run(folder / "moving", planner__policy="even_prorsa:policy", **settings)
    still = run(folder / "still", planner__policy="static_pd", planner__configuration="2P2D", **settings)
    decisions = [line["decision"] for line in read_decisions(folder / "moving" / "decisions.jsonl")]
    assert [decision for decision in decisions if decision["reason"] == "forecast"]
    assert moving["ratio_switches"] >= 1
    assert still["ratio_switches"] == 0
    done = list(read_lines(folder / "moving" / "workers" / "sglang.jsonl"))
    # In place: no server ended before the run did.
    assert [line for line in done if line["action"] == "flipped"]
    assert len([line for line in done if line["action"] == "started"]) == 4
    assert _generated(folder / "moving") == _generated(folder / "still")


def _generated(folder: Path) -> dict[str, list[list[int]]]:
    """Trajectory → the tokens of its responses, turn by turn."""
    lines = read_lines(folder / "trajectories.jsonl")
    return {line["id"]: [turn["response"] for turn in line["turns"]] for line in lines}
