"""Kills the control plane of real jobs again and again, and compares what each job comes to with one left alone.

    python -m dst.kills --kills 200 --seed 0

A short form of the default job runs on real processes. Its control plane gets SIGKILL at a random moment of its life,
or right after a random number of its events; `pearl-rl resume` goes on, is killed again, and after some kills is let
run to its end. Then trajectories, groups and versions must be those of a run of the same seed that nobody killed, and
the journal must say that no trajectory was trained on twice and that no finished turn was generated twice.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dst.incubator import Incubator
from pearl_rl.journal.journal import read
from pearl_rl.journal.storage import FolderStorage
from pearl_rl.run_folder import CONFIG_TOML, read_lines

STEPS, GROUPS, SIZE = 5, 2, 3
SETTINGS = {
    "run.steps": STEPS,
    "run.wall_limit_s": 1000,
    "train.groups_per_step": GROUPS,
    "train.group_size": SIZE,
    "rollout.batch_size": GROUPS * SIZE,
    "train.checkpoint_every_steps": 2,
    "model.tiny.warm_up_steps": 0,
    "cluster.max_preemptible_gpus": 2,
    "environment.args.processes": 6,
}
MOST_KILLS = 14
"""Of one run; after them it is let run to its end."""
MOST_EVENTS = 45
"""After which a kill comes at the latest, where it comes after events."""
SEEDS = 4
"""Runs of so many seeds are compared with."""
LIFE_S = 900.0
"""A control plane that takes longer hangs."""
GONE_S = 30.0
"""What a dead control plane leaves behind is gone by then."""


_MAIN = """
import runpy, sys
sys.executable = sys.argv.pop(1)
sys.argv[0] = "pearl_rl"
runpy.run_module("pearl_rl", run_name="__main__", alter_sys=True)
"""
"""`python -m pearl_rl`, with another Python for what it starts."""


class BrokenRunError(AssertionError):
    """A resumed run did not come to what an uninterrupted one comes to."""


@dataclass(frozen=True)
class Final:
    """What a run comes to."""

    steps: int
    trajectories: int
    groups: int
    """That were opened, and all of them trained on."""
    version: int
    dispatched: int
    """Without those that the infrastructure failed."""
    lost: int
    stale: int


@dataclass
class Kill:
    """Where a control plane was killed."""

    after_s: float
    """Since its start."""
    events: int
    """That the run had seen."""
    step: int
    """Newest whose update was made."""
    last: str
    """Newest event."""


@dataclass
class Outcome:
    """One run that was killed."""

    run: int
    seed: int
    kills: list[Kill] = field(default_factory=list)
    wall_s: float = 0.0
    broken: str = ""


class Job:
    """A job in a folder of its own."""

    def __init__(self, folder: Path, seed: int, python: Path) -> None:
        self.folder = folder / "run"
        self._python = python
        self.seed = seed
        self._log = folder / "log"
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self) -> subprocess.Popen:
        """The next control plane: a first one where no folder of a run is there yet."""
        if (self.folder / CONFIG_TOML).is_file():
            return self._pearl("resume", str(self.folder), "--plain")
        shutil.rmtree(self.folder, ignore_errors=True)
        chosen = {**SETTINGS, "run.seed": self.seed}
        options = [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]
        return self._pearl("train", *options, "--run-dir", str(self.folder), "--plain")

    def finish(self, process: subprocess.Popen) -> None:
        """Let it run to its end."""
        try:
            code = process.wait(LIFE_S)
        except subprocess.TimeoutExpired:
            raise BrokenRunError(f"hangs for {LIFE_S:g} s: {self.said()}") from None
        finally:
            process.kill()
        if code:
            raise BrokenRunError(f"ended with {code}: {self.said()}")

    def said(self) -> str:
        return " | ".join(self._log.read_text(errors="replace").splitlines()[-4:])

    def events(self) -> list[str]:
        return [line["event"] for line in read_lines(self.folder / "events.jsonl")]

    def owns(self, pid: int) -> bool:
        """Whether a process writes to a log of this job."""
        try:
            return Path(os.readlink(f"/proc/{pid}/fd/1")).is_relative_to(self.folder)
        except OSError:
            return False

    def seen(self) -> int:
        """How many events there were."""
        file = self.folder / "events.jsonl"
        return file.read_bytes().count(b"\n") if file.is_file() else 0

    def step(self) -> int:
        return max((line["step"] for line in read_lines(self.folder / "metrics.jsonl")), default=0)

    def final(self) -> Final:
        """What summary, weights and journal say; the journal from its first record on. Raises `BrokenRunError`."""
        summary = json.loads((self.folder / "summary.json").read_text())
        manifest = json.loads((self.folder / "weights" / "manifest.json").read_text())
        trained, dispatched, groups, turns = audit(self.folder)
        twice = [name for name, steps in trained.items() if len(steps) > 1]
        if twice:
            raise BrokenRunError(f"{twice[0]} was trained on in steps {trained[twice[0]]}")
        again = [key for key, count in turns.items() if count > 1]
        if again:
            raise BrokenRunError(f"turn {again[0]} was generated to its end {turns[again[0]]} times")
        seen = [line["step"] for line in read_lines(self.folder / "metrics.jsonl")]
        if set(seen) != set(range(1, summary["steps"] + 1)):
            raise BrokenRunError(f"figures are there of the steps {sorted(set(seen))}")
        if len(trained) != summary["trajectories"]:
            raise BrokenRunError(
                f"{len(trained)} trajectories by the journal, {summary['trajectories']} by the summary"
            )
        return Final(
            steps=summary["steps"],
            trajectories=len(trained),
            groups=groups,
            version=manifest["newest"],
            dispatched=dispatched,
            lost=summary["lost_trajectories"],
            stale=summary["stale_served"],
        )

    def _pearl(self, *words: str) -> subprocess.Popen:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", _MAIN, str(self._python), *words]
        with self._log.open("ab") as file:
            return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)


def audit(folder: Path) -> tuple[dict[str, list[int]], int, int, Counter]:
    """From the journal's records alone: trajectory → steps that trained on it; samples dispatched but for those that
    failed; groups opened but for those dropped; and how often each (trajectory, turn) was finished.
    """
    _, records = read(FolderStorage(folder / "journal"), since=0)
    members: dict[str, set[str]] = {}
    waiting: dict[int, list[str]] = {}
    trained: dict[str, list[int]] = {}
    turns: Counter = Counter()
    samples = groups = 0

    def train(last: int) -> None:
        for step in [step for step in waiting if step <= last]:
            for name in waiting.pop(step):
                trained.setdefault(name, []).append(step)

    for record in _rollout(records):
        kind = record["record"]
        if kind == "GroupOpened":
            groups += 1
        elif kind == "GroupDropped":
            groups -= 1
        elif kind == "SampleDispatched":
            samples += 1
        elif kind == "SampleFailed":
            samples -= 1
        elif kind == "TurnPlayed":
            turns[record["trajectory"], record["turn"]] += 1
        elif kind == "SampleCompleted":
            members.setdefault(record["trajectory"]["group"], set()).add(record["trajectory"]["id"])
        elif kind == "BatchTaken":
            waiting[record["step"]] = [name for group in record["groups"] for name in sorted(members[group])]
        elif kind == "StepTrained":
            train(record["step"])
        elif kind == "RolloutResumed":
            train(record["completed"])
            waiting.clear()
    return trained, samples, groups, turns


def _rollout(records: Iterator[dict]) -> Iterator[dict]:
    return (record["v"] for record in records if record["k"] == "rollout")


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
    found, waiting = [], [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def kill(process: subprocess.Popen, job: Job, incubator: Incubator) -> None:
    """SIGKILL for the control plane. Raises `BrokenRunError` where something of it outlives it."""
    children = descendants(process.pid) + [pid for pid in descendants(incubator.pid) if job.owns(pid)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    ends_s = time.monotonic() + GONE_S
    while alive := [pid for pid in children if _runs(pid)]:
        if time.monotonic() > ends_s:
            raise BrokenRunError(f"processes {alive} outlive their control plane by {GONE_S:g} s")
        pause(0.05)


def _runs(pid: int) -> bool:
    """Whether it is there and no zombie that only waits to be counted."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def uninterrupted(folder: Path, seed: int, incubator: Incubator) -> tuple[Final, float]:
    """What a run of this seed comes to that nobody kills (made once a folder), and how long it took, seconds."""
    job = Job(folder, seed, incubator.executable)
    summary = job.folder / "summary.json"
    if not summary.is_file():
        job.finish(job.begin())
    return job.final(), float(json.loads(summary.read_text())["wall_s"])


def wait_for_the_moment(job: Job, process: subprocess.Popen, rng: random.Random, life_s: float) -> bool:
    """Return at a random moment of a life; False where it ended before."""
    began_s, already = time.monotonic(), job.seen()
    after_s = rng.uniform(0.0, life_s) if rng.random() < 0.5 else None
    events = rng.randint(1, MOST_EVENTS)
    while process.poll() is None:
        lived_s = time.monotonic() - began_s
        if lived_s > LIFE_S:
            raise BrokenRunError(f"hangs for {LIFE_S:g} s: {job.said()}")
        if (lived_s >= after_s) if after_s is not None else (job.seen() - already >= events):
            return True
        pause(0.02)
    return False


def killed(folder: Path, number: int, seed: int, life_s: float, wanted: Final, incubator: Incubator) -> Outcome:
    """Kill a run up to `MOST_KILLS` times and let it end. `broken` says what is not as it must be."""
    job, rng = Job(folder, seed, incubator.executable), random.Random(f"{seed} {number}")
    outcome, began_s = Outcome(number, seed), time.monotonic()
    try:
        while True:
            process = job.begin()
            born_s = time.monotonic()
            if len(outcome.kills) >= MOST_KILLS or not wait_for_the_moment(job, process, rng, life_s):
                break
            after_s = time.monotonic() - born_s
            kill(process, job, incubator)
            events = job.events()
            outcome.kills.append(Kill(round(after_s, 2), len(events), job.step(), events[-1] if events else ""))
        job.finish(process)
        found = job.final()
        if found != wanted:
            raise BrokenRunError(f"{found}, must be {wanted}")
    except BrokenRunError as error:
        outcome.broken = str(error)
    outcome.wall_s = round(time.monotonic() - began_s, 1)
    return outcome


def play(folder: Path, kills: int, first: int, jobs: int, out: Path | None) -> tuple[int, list[Outcome]]:
    """Kill at least so many times, over as many runs as that takes. Returns how often, and the runs."""
    outcomes: list[Outcome] = []
    number = count = 0
    with ExitStack() as stack:
        short = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pk")))
        incubator = stack.enter_context(Incubator(short))
        seeds = range(first, first + SEEDS)
        wholes = {seed: uninterrupted(folder / f"whole-{seed}", seed, incubator) for seed in seeds}
        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        under_way: set[Future[Outcome]] = set()
        while under_way or count < kills:
            while len(under_way) < jobs and count < kills:
                seed = first + number % SEEDS
                final, life_s = wholes[seed]
                run = folder / f"killed-{number}"
                under_way.add(pool.submit(killed, run, number, seed, life_s, final, incubator))
                number += 1
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for outcome in (future.result() for future in done):
                outcomes.append(outcome)
                count += len(outcome.kills)
                tell(outcome, count, out)
                if outcome.broken:
                    kills = 0
                else:
                    shutil.rmtree(folder / f"killed-{outcome.run}", ignore_errors=True)
    return count, outcomes


def tell(outcome: Outcome, count: int, out: Path | None) -> None:
    """Say what became of a run, and keep it in the file `out`."""
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
    said = outcome.broken or "as if nothing was"
    kills, wall_s = len(outcome.kills), outcome.wall_s
    print(
        f"run {outcome.run}, seed {outcome.seed}: {kills} kills in {wall_s:.0f} s, {count} in all: {said}", flush=True
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="python -m dst.kills --kills 20")
    parser.add_argument("--kills", type=int, default=20, help="how many at least")
    parser.add_argument("--seed", type=int, default=0, help="of the first runs that are compared with")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, help="where each run's kills are kept, as JSON lines")
    parser.add_argument("--folder", type=Path, help="where the runs lie; a broken one stays there")
    options = parser.parse_args()
    began_s = time.monotonic()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="pearl-kills-"))
    count, outcomes = play(folder, options.kills, options.seed, options.jobs, options.out)
    broken = [outcome for outcome in outcomes if outcome.broken]
    where = Counter(moment.last or "before its first event" for outcome in outcomes for moment in outcome.kills)
    print(f"newest event when it was killed: {dict(where.most_common())}")
    print(
        f"{count} kills over {len(outcomes)} runs of seeds {options.seed} to {options.seed + SEEDS - 1} in "
        f"{time.monotonic() - began_s:.0f} s: {len(broken) or 'none'} broken"
    )
    if not broken and options.folder is None:
        shutil.rmtree(folder)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
