"""The default job on a Ray cluster while workers are killed and nodes drain, come and are lost."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict

import pytest

from pearl_rl.run_folder import read_lines

pytestmark = [pytest.mark.ray, pytest.mark.torch, pytest.mark.slow]

STEPS = 9
RETURN_S = 10.0
NOTICE_S = 6.0
SETTINGS = {
    "run.steps": STEPS,
    "run.wall_limit_s": 1500.0,
    # A control run: as good as greedy, with weights that never change in value: equal prompts have equal answers.
    "rollout.temperature": 1e-6,
    "train.learning_rate": 0,
    "model.tiny.warm_up_steps": 30,
    "cluster.borrowing": "ungated",
    "cluster.max_preemptible_gpus": 2,
    "cluster.ray.training_labels": "pearl.zone=base",
    "cluster.ray.reserved_labels": "pearl.zone=base",
    "cluster.ray.preemptible_labels": "pearl.zone=elastic",
    "availability.source": "ray",
    "limits.training.return_s": RETURN_S,
    # Every process imports torch anew, which takes long where cores are busy with other things.
    "cluster.ray.start_s": 600.0,
    "limits.rollout.no_worker_s": 600.0,
    "limits.rollout.batch_s": 900.0,
    "limits.training.start_s": 600.0,
    "limits.executor.start_s": 600.0,
    # Longer than a step: whoever joins is still being prepared when training begins.
    "device.start_s": 14.0,
}


class Job:
    """The run as its journal tells it while it goes on."""

    def __init__(self, folder, address):
        command = [sys.executable, "-m", "pearl_rl", "train", "--json", "--runtime", "ray", "--address", address]
        command += ["--run-dir", str(folder)]
        for key, value in SETTINGS.items():
            command += ["--set", f"{key}={value}"]
        self.folder = folder
        self._log = folder.with_suffix(".err")
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)

    def events(self, kind=None, since_s=0.0):
        journal = self.folder / "events.jsonl"
        found = list(read_lines(journal)) if journal.is_file() else []
        return [e for e in found if (kind is None or e["event"] == kind) and e["now_s"] >= since_s]

    def rows(self):
        """The table's rows as they are now."""
        rows = {}
        for line in read_lines(self.folder / "table.jsonl"):
            rows |= line["rows"]
        return rows

    def serving_reserved(self):
        """The first reserved worker, once it serves."""
        rows = self.rows() if (self.folder / "table.jsonl").is_file() else {}
        return next((id_ for id_, row in rows.items() if row["gpus"] == [2] and row["lifecycle"] == "active"), None)

    def until(self, found, what, within_s=600.0):
        deadline_s = time.monotonic() + within_s
        while True:
            result = found()
            if result:
                return result
            assert self.process.poll() is None, f"the job ended before {what}: {self.words()}"
            assert time.monotonic() < deadline_s, f"not within {within_s} s: {what}: {self.words()}"
            time.sleep(0.1)  # noqa: TID251 - another process is waited for

    def middle_of(self, step):
        """Wait until a step has finished some of its trajectories, with many still in generation."""

        def progressed():
            return [e for e in self.events("RolloutProgressed") if e["step"] >= step and 16 <= e["remaining"] <= 60]

        return self.until(progressed, f"the middle of step {step}")[0]["now_s"]

    def words(self):
        return self._log.read_text()[-3000:]

    def close(self):
        self.process.kill()
        self.process.communicate()

    def end(self):
        out, _ = self.process.communicate(timeout=600)
        assert self.process.returncode == 0, self.words()
        return json.loads(out.splitlines()[-1])


def actors(prefix):
    """Process ids of the living actors of the run whose name begins so, by name."""
    import ray

    found = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        name = entry["name"].partition("-")[2]
        if name.startswith(prefix):
            handle = ray.get_actor(entry["name"], namespace=entry["namespace"])
            found[name] = ray.get(handle.describe.remote(), timeout=30).pid
    return found


class Story:
    """What was done to the job, and what is left of it."""


@pytest.fixture(scope="module")
def story(nodes, tmp_path_factory):
    import ray

    told = Story()
    first = nodes.join(1)
    ray.init(nodes.address, log_to_driver=False, logging_level="ERROR")
    job = told.job = Job(tmp_path_factory.mktemp("ray") / "run", nodes.address)
    try:
        # A reserved worker is killed in the middle of its work.
        victim = job.until(job.serving_reserved, "a reserved worker serves")
        told.victim = int(victim)
        job.middle_of(max(e["step"] for e in job.events("RolloutBegan")))
        told.actors = actors("w") | actors("train")
        told.killed_s = job.events()[-1]["now_s"]
        os.kill(next(pid for name, pid in told.actors.items() if name.startswith(f"w{victim}-")), signal.SIGKILL)
        job.until(lambda: job.events("WorkerFailed", told.killed_s), "the killed worker is noticed")
        # The elastic node drains while it generates, and is gone at the deadline.
        job.middle_of(max(e["step"] for e in job.events("RolloutBegan")) + 1)
        nodes.drain(first, NOTICE_S)
        gone_at_s = time.monotonic() + NOTICE_S
        # Another node joins: its worker is prepared while training begins.
        nodes.join(1)
        time.sleep(max(0.0, gone_at_s - time.monotonic()))  # noqa: TID251 - the provider keeps its deadline
        nodes.take_away(first)
        told.summary = job.end()
        told.left = actors("")
        ray.shutdown()
        yield told
    finally:
        job.close()
        ray.shutdown()


def test_the_job_runs_to_its_end_on_real_actors_and_nothing_is_lost_or_stale(story):
    assert len([name for name in story.actors if name.startswith("w")]) >= 4
    assert len(set(story.actors.values())) == len(story.actors)
    summary = story.summary
    assert summary["steps"] == STEPS
    assert summary["trajectories"] == STEPS * 64
    assert summary["lost_trajectories"] == 0
    assert summary["stale_served"] == 0
    assert story.left == {}


def test_a_killed_worker_is_explained_and_comes_back_as_another_incarnation(story):
    failure = next(e for e in story.job.events("WorkerFailed") if e["worker"] == story.victim)
    assert failure["now_s"] - story.killed_s < 3.0
    assert "ended from outside" in failure["cause"]
    row = story.job.rows()[str(story.victim)]
    assert row["incarnation"] > failure["incarnation"]
    assert row["failures"] >= 1
    # The log says it all: lost, gone for certain, started again.
    gone = next(
        e
        for e in story.job.events("WorkersCleaned", failure["now_s"])
        if e["workers"].get(str(story.victim)) == failure["incarnation"]
    )
    assert [e for e in story.job.events("GroupPrepared", gone["now_s"]) if str(story.victim) in e["reported"]]


def test_a_drained_node_is_left_by_its_deadline(story):
    (reclaim,) = story.job.events("GpusReclaimed")
    assert 0.0 < reclaim["deadline_s"] - reclaim["now_s"] <= NOTICE_S
    (worker,) = (int(id_) for id_, row in story.job.rows().items() if row["gpus"] == reclaim["gpus"])
    left = next(e for e in story.job.events("StageApplied", reclaim["now_s"]) if worker in e["left"])
    assert left["now_s"] <= reclaim["deadline_s"]
    assert left["failed"] == {}
    # It was reclaimed while it generated: calls on it ended, or ended with what they had.
    requests = list(read_lines(story.job.folder / "requests.jsonl"))
    begun = [r for r in requests if r["worker"] == worker and r["started_s"] <= reclaim["now_s"] < r["finished_s"]]
    assert begun
    assert {r["finish"] for r in begun} <= {"stop", "length", "interrupted"}
    # Its events and the ends of its calls come by different ways.
    assert max(r["finished_s"] for r in begun) <= left["now_s"] + 1.0
    assert any(r["tokens"] > 0 for r in requests if r["finish"] == "interrupted")


def test_training_begins_while_an_expansion_is_prepared_and_neither_waits_for_the_other(story):
    offered = story.job.events("GpusOffered")[-1]
    assert offered["tenure"] == "preemptible"
    (worker,) = (id_ for id_, row in story.job.rows().items() if row["gpus"] == offered["gpus"])
    prepared = next(e for e in story.job.events("GroupPrepared", offered["now_s"]) if worker in e["reported"])
    begun = story.job.events("TrainingRequested", offered["now_s"])[0]["now_s"]
    assert begun < prepared["now_s"]
    assert story.job.events("TrainingFinished", begun)
    assert story.job.rows()[worker]["lifecycle"] == "active"


def test_borrowed_gpus_are_back_by_the_deadline_every_time(story):
    borrowers = {
        int(id_) for id_, row in story.job.rows().items() if row["zone"] == "overlap" and row["role"] != "training"
    }
    requests = [e["now_s"] for e in story.job.events("TrainingRequested")]
    returns = [e for e in story.job.events("StageApplied") if set(e["left"]) & borrowers]
    assert returns
    assert story.summary["returns"] >= 1
    for stage in returns:
        asked_s = max(at for at in requests if at <= stage["now_s"])
        assert stage["now_s"] - asked_s <= RETURN_S
        assert stage["failed"] == {}


def test_resumed_work_has_the_tokens_of_undisturbed_work(story):
    """Greedy, with equal weights: all trajectories of a group are equal, however often a worker was taken from one."""
    groups, resumed = defaultdict(list), defaultdict(list)
    for line in read_lines(story.job.folder / "trajectories.jsonl"):
        group = line["step"], line["group"]
        groups[group].append([(turn["prompt"], turn["response"]) for turn in line["turns"]])
        resumed[group].append(any(turn["interruptions"] for turn in line["turns"]))
    # There is something to compare: resumed members beside undisturbed ones.
    assert [group for group, members in resumed.items() if any(members) and not all(members)]
    for members in groups.values():
        assert all(turns == members[0] for turns in members)
