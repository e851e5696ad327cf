"""The default job on real processes, shortened: real engines, weights, hand-overs, sandboxes and training."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from listeners import beyond_loopback, listeners
from pearl_rl.cli.replay import calibrated
from pearl_rl.live.follower import Follower
from pearl_rl.report.page import run_page, tiles
from pearl_rl.report.run_record import read_run
from pearl_rl.report.timeline import timeline
from pearl_rl.run_folder import read_decisions, read_lines
from pearl_telemetry.metrics import METRICS, SPANS, all_metrics, all_spans

pytestmark = [pytest.mark.torch, pytest.mark.slow]

BUSY = {
    # A shortened trace in which GPUs come and go within seconds.
    "availability.time_scale": 400.0,
    "cluster.borrowing": "ungated",
}


def command(folder, steps, **overrides):
    settings = {"run.steps": steps, **BUSY, **overrides}
    line = [sys.executable, "-m", "pearl_rl", "train", "--json", "--run-dir", str(folder)]
    for key, value in settings.items():
        line += ["--set", f"{key}={value}"]
    return line


def run(folder, steps, **overrides):
    done = subprocess.run(command(folder, steps, **overrides), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def alive(marker):
    """Processes of this machine whose command line names `marker`."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path("/proc", pid, "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if marker in line:
            found.append((pid, line))
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job") / "run"
    return folder, run(folder, 8, **{"train.checkpoint_every_steps": 4, "telemetry.jsonl": "true"})


def test_nothing_is_lost_or_stale_while_gpus_come_and_go(finished) -> None:
    _, summary = finished
    assert summary["steps"] == 8
    assert summary["lost_trajectories"] == 0
    assert summary["stale_served"] == 0
    assert summary["trajectories"] == 8 * 64
    assert summary["borrows"] >= 1
    assert summary["returns"] >= 1
    assert summary["reclaims"] >= 1


def test_the_run_folder_explains_what_happened(finished) -> None:
    folder, summary = finished
    assert len(list(read_lines(folder / "metrics.jsonl"))) == 8
    assert len(list(read_lines(folder / "trajectories.jsonl"))) >= 8 * 64
    decisions = read_decisions(folder / "decisions.jsonl")
    measured = [m for decision in decisions for m in decision["measured"]]
    assert measured
    assert all(m["measured_s"] > 0 and m["predicted_s"] > 0 for m in measured)
    assert json.loads((folder / "summary.json").read_text()) == summary


def test_people_see_the_run_as_it_was(finished) -> None:
    folder, summary = finished
    run = read_run(folder)
    shown = {key: value for key, value, _ in tiles(run)}
    assert shown["steps"] == "8"
    assert [shown[key] for key in ("reclaims", "borrows")] == [str(summary[key]) for key in ("reclaims", "borrows")]
    assert {lane.group for lane in run.lanes} >= {"training", "reserved", "preemptible"}
    assert run_page(run).count("<svg") >= 12
    spans = [event["name"].split()[-1] for event in timeline(folder) if event["ph"] == "X"]
    assert {line["rid"] for line in read_lines(folder / "requests.jsonl")} <= set(spans)
    follower = Follower(folder)
    follower.refresh()
    assert (follower.view()["state"], follower.view()["completed"]) == ("ended", 8)


def test_what_workers_did_is_part_of_the_traces_of_the_run(finished) -> None:
    folder, summary = finished
    spans = list(read_lines(folder / "spans.jsonl"))
    by_id = {span["span"]: span for span in spans}
    elsewhere = {SPANS.environment_request.name, SPANS.planner_request.name, SPANS.transfer.name}
    assert {span.name for span in all_spans()} - elsewhere <= {span["name"] for span in spans}
    trained = {span["trace"] for span in spans if span["name"] == SPANS.trajectory.name}
    assert len(trained) == summary["trajectories"]
    served = [span for span in spans if span["name"] == SPANS.worker_request.name and span["trace"] in trained]
    assert {by_id[span["parent"]]["name"] for span in served} == {SPANS.turn.name}
    # A worker that is killed takes the spans of its last second along.
    turns = {span["span"] for span in spans if span["name"] == SPANS.turn.name}
    assert len(turns - {span["parent"] for span in served}) < 0.2 * len(turns)
    points = {point["name"] for point in read_lines(folder / "points.jsonl")}
    failures = {METRICS.worker_failures.name, METRICS.preparations_failed.name}
    assert {metric.name for metric in all_metrics()} - failures <= points


def test_the_run_plays_again_in_the_simulator(finished) -> None:
    folder, _ = finished
    _, result = calibrated(folder)
    recorded = list(read_lines(folder / "metrics.jsonl"))
    assert [step.trajectories for step in result.steps] == [step["trajectories"] for step in recorded]
    assert result.counts.lost_trajectories == result.counts.stale_served == 0
    tokens = sum(step["generated_tokens"] for step in recorded)
    assert sum(step.generated_tokens for step in result.steps) == pytest.approx(tokens, rel=0.05)


def test_weight_versions_within_a_trajectory_never_go_back_and_stay_within_the_bound(finished) -> None:
    folder, _ = finished
    for line in read_lines(folder / "trajectories.jsonl"):
        versions = [span["version"] for turn in line["turns"] for span in turn["spans"]]
        assert versions == sorted(versions)
        assert min(versions) >= line["dispatch_version"]


def test_a_run_goes_on_from_its_checkpoint_now_with_a_reference_on_a_rank_of_its_own(finished, tmp_path) -> None:
    folder, _ = finished
    reference = {"train.kl_coefficient": 0.01, "train.ref_actor": "decoupled"}
    again = run(tmp_path / "again", 10, **{"run.resume_from": str(folder), **reference})
    assert again["steps"] == 10
    steps = list(read_lines(tmp_path / "again" / "metrics.jsonl"))
    assert len(steps) == 2
    # The reference has the weights that the first run began with.
    assert all(step["kl"] > 1e-4 for step in steps)
    first = next(read_lines(tmp_path / "again" / "trajectories.jsonl"))
    assert first["id"] > max(line["id"] for line in read_lines(folder / "trajectories.jsonl"))
    assert first["dispatch_version"] > 8


def test_an_interrupted_run_stops_in_order_and_leaves_no_process(tmp_path) -> None:
    """A job that chooses where its reference works."""
    folder = tmp_path / "run"
    line = command(folder, 1000, **{"train.kl_coefficient": 0.01, "train.ref_actor": "auto"})
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").is_file() or not (folder / "metrics.jsonl").stat().st_size:
        assert time.monotonic() < deadline, "no step within two minutes"
        assert process.poll() is None
        process.stdout.readable()
        time.sleep(0.5)  # noqa: TID251 - another process is waited for
    # Training ranks listen for each other, and the walk sees them.
    assert listeners(process.pid)
    assert not beyond_loopback(process.pid)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 5
    summary = json.loads(out.splitlines()[-1])
    assert summary["steps"] >= 1
    assert summary["lost_trajectories"] == 0
    assert not alive(str(folder))
    modes = [update["decision"]["mode"] for update in read_lines(folder / "update_modes.jsonl")]
    assert modes == ["colocated"] * summary["steps"]
