"""Real processes, really broken: the control plane killed, a worker stopped, two control planes on one folder."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pearl_rl.run_folder import read_lines

pytestmark = [pytest.mark.job, pytest.mark.torch]

STEPS, BATCH = 3, 8
SETTINGS = {
    "run.steps": STEPS,
    "run.wall_limit_s": 400,
    "train.groups_per_step": 2,
    "train.group_size": 4,
    "rollout.batch_size": BATCH,
    "train.checkpoint_every_steps": 1,
    "model.tiny.warm_up_steps": 0,
    "limits.rollout.stall_s": 15,
}


def pearl(*words: str, log: Path) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "pearl_rl", *words], stdout=file, stderr=subprocess.STDOUT, env=environment
        )


def train(folder: Path, log: Path) -> subprocess.Popen:
    options = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    return pearl("train", *options, "--run-dir", str(folder), "--plain", log=log)


def finish(process: subprocess.Popen, log: Path, timeout_s: float = 500.0) -> None:
    try:
        code = process.wait(timeout_s)
    finally:
        process.kill()
    assert code == 0, log.read_text()[-3000:]


def wait_for(condition, timeout_s: float = 200.0) -> None:
    ends_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_s, "what the test waits for does not happen"
        subprocess.run(["sleep", "0.2"], check=True)


def descendants(pid: int) -> list[int]:
    """Ids of all processes under `pid`."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents.setdefault(int(stat.rsplit(")", 1)[1].split()[1]), []).append(int(entry.name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def log_name(pid: int) -> str:
    """The file that a process writes its output to."""
    return Path(os.readlink(f"/proc/{pid}/fd/1")).name


def check_whole(folder: Path) -> None:
    """All steps were made, of the trajectories that they needed and no others, none twice."""
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["trajectories"] == STEPS * BATCH
    assert summary["lost_trajectories"] == 0
    assert summary["stale_served"] == 0
    assert {line["step"] for line in read_lines(folder / "metrics.jsonl")} == set(range(1, STEPS + 1))


def completed_events(folder: Path) -> int:
    return sum(1 for _ in read_lines(folder / "events.jsonl"))


def test_a_control_plane_that_is_killed_goes_on_and_ends_with_the_same_counts(tmp_path) -> None:
    rng = random.Random(5)
    folder, log = tmp_path / "run", tmp_path / "log"
    process = train(folder, log)
    for _ in range(2):
        already = completed_events(folder)
        more = rng.randint(8, 25)
        wanted, now = already + more, process
        wait_for(lambda wanted=wanted, now=now: completed_events(folder) >= wanted or now.poll() is not None)
        children = descendants(process.pid)
        process.kill()
        process.wait()
        # Nothing of a dead control plane outlives it.
        wait_for(lambda pids=children: not any(Path(f"/proc/{pid}/exe").exists() for pid in pids), 30.0)
        if (folder / "summary.json").exists():
            break
        process = pearl("resume", str(folder), "--plain", log=log)
    finish(process, log)
    check_whole(folder)


def test_a_second_control_plane_is_refused_by_name_and_a_stopped_worker_is_replaced(tmp_path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    process = train(folder, log)
    try:
        wait_for(lambda: completed_events(folder) >= 10)
        second = subprocess.run(
            [sys.executable, "-m", "pearl_rl", "resume", str(folder)], capture_output=True, text=True, check=False
        )
        assert second.returncode == 2
        assert f"process {process.pid} runs this run" in second.stderr
        workers = [pid for pid in descendants(process.pid) if re.match(r"w\d", log_name(pid))]
        assert workers
        os.kill(workers[0], signal.SIGSTOP)
    except BaseException:
        process.kill()
        raise
    finish(process, log)
    check_whole(folder)
