"""`pearl-rl train` on real SGLang servers: everything elastic happens, and everything that is claimed is verified."""

import json
import os
import re
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import HERE

from pearl_rl.run_folder import read_lines

pytestmark = pytest.mark.slow

STEPS = 6
LIMIT_S = 900.0
KEY = re.compile(rb"(?<![0-9a-f])[0-9a-f]{48}(?![0-9a-f])")
"""What an admin key looks like; no digest is as long."""


class Job:
    """A running job, its journal, and the control file that gives and takes its GPUs."""

    def __init__(self, interpreter, folder):
        self.folder = folder / "run"
        self.control = folder / "control.jsonl"
        self.control.touch()
        self._began = time.monotonic()
        command = [sys.executable, "-m", "pearl_rl", "train", str(HERE / "job.toml"), "--json", "--plain"]
        command += ["--run-dir", str(self.folder)]
        for key, value in {
            "run.steps": STEPS,
            "control.http": "true",
            "availability.control_file": str(self.control),
            "engine.sglang.interpreter": json.dumps(list(interpreter)),
        }.items():
            command += ["--set", f"{key}={value}"]
        self.errors = (folder / "stderr").open("w+")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.errors, text=True)

    def journal(self, *actions):
        """What was done to servers so far."""
        path = self.folder / "workers" / "sglang.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if line["action"] in actions]

    def serving(self):
        """The rows of those that serve, at each change of the table."""
        rows = {}
        for line in read_lines(self.folder / "table.jsonl"):
            rows |= line["rows"]
            for gone in line["gone"]:
                rows.pop(str(gone), None)
            yield [row for row in rows.values() if row["lifecycle"] == "active" and row["role"] != "training"]

    def wait(self, what, happened):
        """Wait until the journal shows it, or the job ended."""
        while not happened():
            if self.process.poll() is not None:
                raise AssertionError(f"the job ended before {what}: {self.said()}")
            if time.monotonic() - self._began > LIMIT_S:
                raise AssertionError(f"no {what} within {LIMIT_S:g} s: {self.said()}")
            time.sleep(0.2)  # noqa: TID251 - another process is waited for

    def say(self, **command):
        """One line of the control file."""
        with self.control.open("a") as file:
            file.write(json.dumps(command) + "\n")

    def pin(self, configuration):
        """What a person would type."""
        command = [sys.executable, "-m", "pearl_rl", "pin", configuration, "--run", str(self.folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr

    def said(self):
        self.errors.flush()
        return Path(self.errors.name).read_text()[-3000:]

    def result(self):
        out, _ = self.process.communicate(timeout=LIMIT_S)
        assert self.process.returncode == 0, self.said()
        return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def job(real_interpreter, tmp_path_factory):
    job = Job(real_interpreter, tmp_path_factory.mktemp("job"))
    try:
        job.wait("first weights", lambda: job.journal("weights"))
        # A second dedicated worker: the one that served colocated becomes half of a pair.
        job.say(offer=1)
        job.wait("change of mode", lambda: job.journal("relaunched"))
        job.say(offer=1)
        dedicated = {5, 6}
        job.wait(
            "second expansion", lambda: dedicated <= {line["worker"] for line in job.journal("started", "weights")}
        )
        borrowed = len(job.journal("resumed"))
        job.wait("borrow on top of it", lambda: len(job.journal("resumed")) > borrowed)
        # Of two ratios that no number of workers makes equal, one is another than there is: roles change in place.
        job.pin("3P1D")
        job.pin("1P3D")
        job.wait("change of role", lambda: job.journal("flipped"))
        job.say(reclaim=1)
        summary = job.result()
    finally:
        job.process.kill()
        job.process.wait()
        job.errors.close()
    print(json.dumps(summary))
    return job, summary


def test_nothing_is_lost_or_stale_while_gpus_come_and_go(job):
    _, summary = job
    assert summary["steps"] == STEPS
    assert summary["trajectories"] == STEPS * 16
    assert summary["lost_trajectories"] == 0
    assert summary["stale_served"] == 0
    assert summary["expansions"] >= 1
    assert summary["reclaims"] >= 1
    assert summary["borrows"] >= 1
    assert summary["returns"] >= 1
    assert summary["mode_switches"] >= 1


def test_modes_change_by_relaunch_and_roles_in_place(job):
    run, _ = job
    assert any(line["role"] in ("prefill", "decode") for line in run.journal("relaunched"))
    assert run.journal("flipped")
    assert len({line["worker"] for line in run.journal("started")}) >= 3


def test_what_is_borrowed_under_disaggregation_is_released_and_resumed_by_measure(job):
    run, _ = job
    released = [line for line in run.journal("released") if line["role"] != "colocated"]
    resumed = [line for line in run.journal("resumed") if line["role"] != "colocated"]
    assert released
    assert resumed
    assert all(line["released_bytes"] >= 0.95 * line["expected_bytes"] > 0 for line in released)
    assert all(line["taken_bytes"] > 0 for line in resumed)


def test_every_server_held_the_weights_that_were_published(job):
    run, _ = job
    loads = run.journal("weights")
    assert {line["verified_against"] for line in loads} == {"snapshot"}
    assert {line["version"] for line in loads} >= set(range(STEPS))
    for version in {line["version"] for line in loads}:
        assert len({line["checksum"] for line in loads if line["version"] == version}) == 1
    # Nobody was admitted with weights that it was not seen to hold.
    held = {(line["worker"], line["version"]) for line in loads}
    admitted = {(row["id"], row["weight_version"]) for rows in run.serving() for row in rows}
    assert admitted
    assert admitted <= held
    served = {line["worker"] for line in read_lines(run.folder / "requests.jsonl") if line["tokens"]}
    assert served <= {worker for worker, _ in admitted}


def test_at_least_three_servers_serve_at_the_same_time(job):
    run, _ = job
    assert max(len(rows) for rows in run.serving()) >= 3


def test_both_sides_of_a_pair_reuse_the_prefixes_of_earlier_turns(job):
    run, _ = job
    pairs = [line for line in read_lines(run.folder / "requests.jsonl") if line["prefill"] is not None]
    assert sum(line["cached_tokens"] > 0 for line in pairs) >= 10
    ended = run.journal("ended")
    assert any(line["role"] == "decode" and line["cached_tokens"] > 0 for line in ended)
    assert any(line["role"] == "prefill" and line["cached_tokens"] > 0 for line in ended)


def test_nothing_secret_is_in_the_run_folder_and_nobody_is_left(job):
    run, _ = job
    logs = list((run.folder / "workers").glob("w*.log"))
    assert logs
    assert KEY.search(secrets.token_hex(24).encode()), "what a run draws"
    for log in logs:
        text = log.read_text(errors="replace")
        assert "admin_api_key': '<redacted>'" in text
    keys = [file for file in run.folder.rglob("*") if file.is_file() and KEY.search(file.read_bytes())]
    assert not keys
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path("/proc", pid, "cmdline").read_bytes()
        except OSError:
            continue
        assert b"--admin-api-key" not in line
        assert str(run.folder).encode() not in line
