"""Real processes, really broken: killed, stopped, cut off, without room on disk; two control planes on one folder."""

import contextlib
import ctypes
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dst.kills import descendants
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


def train(folder: Path, log: Path, changes: dict[str, object] | None = None) -> subprocess.Popen:
    chosen = {**SETTINGS, **(changes or {})}
    options = [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]
    return pearl("train", *options, "--run-dir", str(folder), "--plain", log=log)


def finish(process: subprocess.Popen, log: Path, timeout_s: float = 500.0) -> None:
    try:
        code = process.wait(timeout_s)
    finally:
        process.kill()
    assert code == 0, log.read_text()[-3000:]


def wait_for(condition, timeout_s: float = 400.0) -> None:
    ends_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_s, "what the test waits for does not happen"
        subprocess.run(["sleep", "0.2"], check=True)


def log_name(pid: int) -> str:
    """The file that a process writes its output to; empty where the process has ended."""
    try:
        return Path(os.readlink(f"/proc/{pid}/fd/1")).name
    except OSError:
        return ""


def check_whole(folder: Path, steps: int = STEPS, batch: int = BATCH) -> None:
    """All steps were made, of the trajectories that they needed and no others, none twice."""
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == steps
    assert summary["trajectories"] == steps * batch
    assert summary["lost_trajectories"] == 0
    assert summary["stale_served"] == 0
    assert {line["step"] for line in read_lines(folder / "metrics.jsonl")} == set(range(1, steps + 1))


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


def test_a_second_control_plane_is_refused_by_name(tmp_path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    process = train(folder, log)
    try:
        wait_for(lambda: completed_events(folder) >= 1)
        second = subprocess.run(
            [sys.executable, "-m", "pearl_rl", "resume", str(folder)], capture_output=True, text=True, check=False
        )
        assert second.returncode == 2
        assert f"process {process.pid} runs this run" in second.stderr
    finally:
        process.kill()
        process.wait()


# ---- the table of faults in BOUNDS.md -------------------------------------------------------------------------------

BOUNDS = Path(__file__).with_name("BOUNDS.md").read_text(encoding="utf-8")
SHORT = {
    "limits.rollout.stall_s": 10,
    "limits.executor.probe_s": 5,
    "limits.rollout.environment_s": 4,
    "limits.training.update_s": 25,
    "limits.training.checkpoint_s": 25,
}
"""Bounds of the run that the faults happen to, so that it need not take minutes."""
SLACK_S = 25.0
"""What a busy machine may add."""


def faults() -> dict[str, tuple[list[str], str]]:
    """Fault → the settings whose sum bounds it, and the pattern of what is said."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in BOUNDS.splitlines() if line.startswith("| *")]
    return {row[0].strip("*"): (re.findall(r"`([a-z_.]+_s)`", row[1]), row[2].strip("`")) for row in rows}


def close_sockets(pid: int) -> None:
    """Shut every connection of a process that lives on: what a broken network does."""
    handle = os.pidfd_open(pid)
    try:
        for entry in list(Path(f"/proc/{pid}/fd").iterdir()):
            # The first one that matters ends it.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if os.readlink(entry).startswith("socket:"):
                    shut(handle, int(entry.name))
    finally:
        os.close(handle)


def shut(handle: int, descriptor: int) -> None:
    """Shut a socket of another process."""
    number = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, handle, descriptor, 0)
    if number < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with socket.socket(fileno=number) as copy, contextlib.suppress(OSError):
        copy.shutdown(socket.SHUT_RDWR)


PIDFD_GETFD = 438


def workers(pid: int) -> list[int]:
    return [child for child in descendants(pid) if re.match(r"w\d", log_name(child))]


def ranks(pid: int) -> list[int]:
    return sorted(child for child in descendants(pid) if re.match(r"train\d", log_name(child)))


def sandboxes(pid: int) -> list[int]:
    return [child for child in descendants(pid) if b"sandbox_child" in command_line(child)]


def command_line(pid: int) -> bytes:
    """What a process was started as; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def stop_all(pids: list[int]) -> None:
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


INJECT = {
    "a worker's connections close": lambda pid: close_sockets(workers(pid)[0]),
    "a worker is killed": lambda pid: os.kill(workers(pid)[0], signal.SIGKILL),
    "a worker is stopped": lambda pid: stop_all(workers(pid)[:1]),
    "every environment stands still": lambda pid: stop_all(sandboxes(pid)),
    "a training rank is killed": lambda pid: os.kill(ranks(pid)[0], signal.SIGKILL),
    "a training rank is stopped": lambda pid: stop_all(ranks(pid)[-1:]),
}


def test_every_fault_of_the_table_is_named_within_its_bound_and_survived(tmp_path, record_property) -> None:
    """One job, to which all of them happen, one after another."""
    table = faults()
    assert table.keys() == INJECT.keys()
    steps, batch = 14, 16
    folder, log = tmp_path / "run", tmp_path / "log"
    changes = {
        **SHORT,
        "run.steps": steps,
        "train.groups_per_step": 4,
        "rollout.batch_size": batch,
        "cluster.borrowing": "off",
        "cluster.max_preemptible_gpus": 0,
        "environment.args.processes": 4,
        "train.checkpoint_every_steps": 2,
        # Without it the model writes no command, and nothing asks an environment.
        "model.tiny.warm_up_steps": 60,
    }
    process = train(folder, log, changes)
    try:
        for fault, (settings, pattern) in table.items():
            wait_for(lambda: len(workers(process.pid)) == 2 and len(ranks(process.pid)) == 2)
            done = made(folder)
            # In the middle of a step: what is to be noticed must be in use.
            wait_for(lambda done=done: made(folder) > done)
            known, began_s = said(folder, log), time.monotonic()
            INJECT[fault](process.pid)
            most_s = sum(SHORT[name] for name in settings) + SLACK_S
            wait_for(lambda known=known, pattern=pattern: is_said(pattern, known, said(folder, log)), most_s)
            record_property(fault, f"named after {time.monotonic() - began_s:.1f} s")
            print(f"{fault}: named after {time.monotonic() - began_s:.1f} s")
        assert process.poll() is None, log.read_text()[-3000:]
    except BaseException:
        process.kill()
        raise
    finish(process, log)
    check_whole(folder, steps, batch)


def made(folder: Path) -> int:
    return max((line["step"] for line in read_lines(folder / "metrics.jsonl")), default=0)


def said(folder: Path, log: Path) -> tuple[str, str]:
    """Causes of all failures so far, and what was printed."""
    causes = [str(line) for line in read_lines(folder / "events.jsonl") if "cause" in line or line.get("failed")]
    return "\n".join(causes), log.read_text(errors="replace")


def is_said(pattern: str, before: tuple[str, str], now: tuple[str, str]) -> bool:
    """Whether something new matches."""
    return any(re.search(pattern, text[len(known) :]) for known, text in zip(before, now, strict=True))


def test_a_full_disk_ends_the_run_in_one_line_and_once_there_is_room_it_goes_on(tmp_path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "none", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here; run as root")
    folder, log, filler = disk / "run", tmp_path / "log", disk / "filler"
    process = train(folder, log)
    try:
        wait_for(lambda: made(folder) >= 1 or process.poll() is not None)
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        assert process.wait(120.0) == 5
        (line,) = [line for line in log.read_text().splitlines() if line.startswith("pearl-rl: ")]
        assert re.search(r"the run ended early: .*(No space left on device|cannot be written)", line), line
        assert "Traceback" not in log.read_text()
        filler.unlink()
        finish(pearl("resume", str(folder), "--plain", log=log), log)
        check_whole(folder)
    finally:
        process.kill()
        process.wait()
        subprocess.run(["umount", "-l", str(disk)], check=True)
