"""Kills the control plane of real jobs again and again, and compares what each job comes to with one left alone.

    python -m dst.kills --kills 20 --seed 0
    python -m dst.kills --job default --kills 200

The default job, or a short form of it, runs on real processes. Its control plane gets SIGKILL at a random moment of its
life, or right after a random number of its events; `pearl-rl resume` goes on, is killed again, and after some kills is
let run to its end. Then trajectories, groups and versions must be those of a run of the same seed that nobody killed,
and the journal must say that no trajectory was trained on twice and that no finished turn was generated twice.

Which samples are too old when an update takes them depends on what was under way when, and so differs from run to run;
each is replaced by another one. So samples that failed or were too old are not among those compared, but told apart.
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
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from dst.incubator import Incubator
from pearl_rl.journal.journal import read
from pearl_rl.journal.storage import FolderStorage
from pearl_rl.run_folder import CONFIG_TOML, read_lines


@dataclass(frozen=True)
class Form:
    """A job that is killed, and how often."""

    settings: Mapping[str, object]
    """What differs from `pearl-rl train` without arguments, but for the seed."""
    most_kills: int
    """Of one run; after them it is let run to its end."""
    most_events: int
    """Of one control plane, after which it is killed at the latest, where it is killed after events."""
    most_s: float
    """Where it is killed after a time: the longest, seconds, or a whole run's where that is less."""
    seeds: int
    """Runs of so many seeds are compared with."""


_STEPS, _GROUPS, _SIZE = 5, 2, 3
FORMS: Mapping[str, Form] = {
    "short": Form(
        settings={
            "run.steps": _STEPS,
            "run.wall_limit_s": 1000,
            "train.groups_per_step": _GROUPS,
            "train.group_size": _SIZE,
            "rollout.batch_size": _GROUPS * _SIZE,
            "train.checkpoint_every_steps": 2,
            "model.tiny.warm_up_steps": 0,
            "cluster.max_preemptible_gpus": 2,
            "environment.args.processes": 6,
        },
        most_kills=14,
        most_events=45,
        most_s=float("inf"),
        seeds=4,
    ),
    # Of the eight seconds that a control plane lives in the mean, it plays for four: a run takes sixty kills.
    "default": Form(settings={}, most_kills=60, most_events=160, most_s=16.0, seeds=2),
}
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
    """Without those that the infrastructure failed or that were too old at use: others were played in their place."""
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
    back_s: float | None = None
    """From its start to its first event; None where it was killed before."""


@dataclass
class Outcome:
    """One run that was killed."""

    run: int
    seed: int
    kills: list[Kill] = field(default_factory=list)
    wall_s: float = 0.0
    broken: str = ""
    final: Final | None = None
    rejected: int = 0
    """Samples that were too old at use."""


class Job:
    """A job in a folder of its own."""

    def __init__(self, folder: Path, form: Form, seed: int, python: Path) -> None:
        self.folder = folder / "run"
        self._form = form
        self._python = python
        self.seed = seed
        self._log = folder / "log"
        self._read = self._seen = 0
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self) -> subprocess.Popen:
        """The next control plane: a first one where no folder of a run is there yet."""
        if (self.folder / CONFIG_TOML).is_file():
            return self._pearl("resume", str(self.folder), "--plain")
        shutil.rmtree(self.folder, ignore_errors=True)
        chosen = {**self._form.settings, "run.seed": self.seed}
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
        """How many events there were. Reads only what is new since it was last asked."""
        file = self.folder / "events.jsonl"
        size = file.stat().st_size if file.is_file() else 0
        if size < self._read:
            # A run that had not begun to play starts over.
            self._read = self._seen = 0
        if size > self._read:
            with file.open("rb") as opened:
                opened.seek(self._read)
                new = opened.read(size - self._read)
            self._read += len(new)
            self._seen += new.count(b"\n")
        return self._seen

    def step(self) -> int:
        return max((line["step"] for line in read_lines(self.folder / "metrics.jsonl")), default=0)

    def final(self) -> tuple[Final, int]:
        """What summary, weights and journal say, the journal from its first record on; and how many samples were too
        old. Raises `BrokenRunError`.
        """
        summary = json.loads((self.folder / "summary.json").read_text())
        manifest = json.loads((self.folder / "weights" / "manifest.json").read_text())
        found = audit(self.folder)
        twice = [name for name, steps in found.trained.items() if len(steps) > 1]
        if twice:
            raise BrokenRunError(f"{twice[0]} was trained on in steps {found.trained[twice[0]]}")
        again = [key for key, count in found.turns.items() if count > 1]
        if again:
            raise BrokenRunError(f"turn {again[0]} was generated to its end {found.turns[again[0]]} times")
        seen = [line["step"] for line in read_lines(self.folder / "metrics.jsonl")]
        if set(seen) != set(range(1, summary["steps"] + 1)):
            raise BrokenRunError(f"figures are there of the steps {sorted(set(seen))}")
        if len(found.trained) != summary["trajectories"]:
            raise BrokenRunError(
                f"{len(found.trained)} trajectories by the journal, {summary['trajectories']} by the summary"
            )
        final = Final(
            steps=summary["steps"],
            trajectories=len(found.trained),
            groups=found.groups,
            version=manifest["newest"],
            dispatched=found.samples,
            lost=summary["lost_trajectories"],
            stale=summary["stale_served"],
        )
        return final, found.rejected

    def _pearl(self, *words: str) -> subprocess.Popen:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", _MAIN, str(self._python), *words]
        with self._log.open("ab") as file:
            return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)


@dataclass
class Audit:
    """What the records of a journal amount to."""

    trained: dict[str, list[int]] = field(default_factory=dict)
    """Trajectory → steps that trained on it."""
    samples: int = 0
    """Dispatched, but for those that failed or were rejected."""
    rejected: int = 0
    groups: int = 0
    """Opened, but for those dropped."""
    turns: Counter = field(default_factory=Counter)
    """(Trajectory, turn) → how often it was finished."""


def audit(folder: Path) -> Audit:
    """Read a run's journal from its first record on, and no other file."""
    _, records = read(FolderStorage(folder / "journal"), since=0)
    found = Audit()
    members: dict[str, set[str]] = {}
    waiting: dict[int, list[str]] = {}

    def train(last: int) -> None:
        for step in [step for step in waiting if step <= last]:
            for name in waiting.pop(step):
                found.trained.setdefault(name, []).append(step)

    for record in _rollout(records):
        match record["record"]:
            case "GroupOpened":
                found.groups += 1
            case "GroupDropped":
                found.groups -= 1
            case "SampleDispatched":
                found.samples += 1
            case "SampleFailed":
                found.samples -= 1
            case "SamplesRejected":
                found.samples -= len(record["trajectories"])
                found.rejected += len(record["trajectories"])
                for group in members.values():
                    group.difference_update(record["trajectories"])
            case "TurnPlayed":
                found.turns[record["trajectory"], record["turn"]] += 1
            case "SampleCompleted":
                members.setdefault(record["trajectory"]["group"], set()).add(record["trajectory"]["id"])
            case "BatchTaken":
                waiting[record["step"]] = [name for group in record["groups"] for name in sorted(members[group])]
            case "StepTrained":
                train(record["step"])
            case "RolloutResumed":
                train(record["completed"])
                waiting.clear()
    return found


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


@dataclass(frozen=True)
class Whole:
    """A run that nobody killed."""

    final: Final
    wall_s: float


def uninterrupted(folder: Path, form: Form, seed: int, incubator: Incubator) -> Whole:
    """A run of this seed that nobody kills; made once a folder."""
    job = Job(folder, form, seed, incubator.executable)
    summary = job.folder / "summary.json"
    if not summary.is_file():
        job.finish(job.begin())
    return Whole(job.final()[0], float(json.loads(summary.read_text())["wall_s"]))


@dataclass
class Life:
    """One control plane, from its start on."""

    job: Job
    process: subprocess.Popen
    began_s: float
    already: int
    """Events before it."""
    back_s: float | None = None

    @property
    def lived_s(self) -> float:
        return time.monotonic() - self.began_s

    def made(self, step: int) -> bool:
        """Return once this step is made; False where it ended before."""
        while self.job.step() < step:
            if self.process.poll() is not None:
                return False
            self._hangs()
            pause(0.2)
        return True

    def _hangs(self) -> None:
        if self.lived_s > LIFE_S:
            raise BrokenRunError(f"hangs for {LIFE_S:g} s: {self.job.said()}")

    def until(self, after_s: float | None, events: int) -> bool:
        """Return after so many seconds, or where that is None after so many events; False where it ended before."""
        while self.process.poll() is None:
            lived_s, seen = self.lived_s, self.job.seen() - self.already
            if self.back_s is None and seen > 0:
                self.back_s = round(lived_s, 2)
            self._hangs()
            if (lived_s >= after_s) if after_s is not None else (seen >= events):
                return True
            pause(0.02)
        return False


def killed(
    folder: Path, number: int, form: Form, seed: int, whole: Whole, incubator: Incubator, spared: int = 0
) -> Outcome:
    """Kill a run up to `most_kills` times, not before step `spared` is made, and let it end. `broken` says what is not
    as it must be.
    """
    job, rng = Job(folder, form, seed, incubator.executable), random.Random(f"{seed} {number}")
    outcome, began_s = Outcome(number, seed), time.monotonic()
    most_s = min(form.most_s, whole.wall_s)
    try:
        while True:
            already = job.seen()
            life = Life(job, job.begin(), time.monotonic(), already)
            after_s = rng.uniform(0.0, most_s) if rng.random() < 0.5 else None
            events = rng.randint(1, form.most_events)
            if len(outcome.kills) >= form.most_kills or not life.made(spared) or not life.until(after_s, events):
                break
            lived_s = round(life.lived_s, 2)
            kill(life.process, job, incubator)
            seen = job.events()
            newest = seen[-1] if seen else ""
            outcome.kills.append(Kill(lived_s, len(seen), job.step(), newest, life.back_s))
        job.finish(life.process)
        outcome.final, outcome.rejected = job.final()
        if outcome.final != whole.final:
            raise BrokenRunError(f"{outcome.final}, must be {whole.final}")
    except BrokenRunError as error:
        outcome.broken = str(error)
    outcome.wall_s = round(time.monotonic() - began_s, 1)
    return outcome


def play(
    folder: Path, form: Form, kills: int, first: int, jobs: int, out: Path | None, spared: int = 0
) -> tuple[int, list[Outcome]]:
    """Kill at least so many times, over as many runs as that takes. Returns how often, and the runs."""
    outcomes: list[Outcome] = []
    number = count = 0
    with ExitStack() as stack:
        short = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pk")))
        incubator = stack.enter_context(Incubator(short))
        seeds = range(first, first + form.seeds)
        wholes = {seed: uninterrupted(folder / f"whole-{seed}", form, seed, incubator) for seed in seeds}
        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        under_way: set[Future[Outcome]] = set()
        while under_way or count < kills:
            while len(under_way) < jobs and count < kills:
                seed = first + number % form.seeds
                run = folder / f"killed-{number}"
                under_way.add(pool.submit(killed, run, number, form, seed, wholes[seed], incubator, spared))
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
    parser.add_argument("--job", choices=sorted(FORMS), default="short", help="which form of the default job")
    parser.add_argument("--kills", type=int, default=20, help="how many at least")
    parser.add_argument("--seed", type=int, default=0, help="of the first runs that are compared with")
    parser.add_argument("--spare", type=int, default=0, metavar="STEPS", help="kill no run before it made so many")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, help="where each run's kills are kept, as JSON lines")
    parser.add_argument("--folder", type=Path, help="where the runs lie; a broken one stays there")
    options = parser.parse_args()
    began_s = time.monotonic()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="pearl-kills-"))
    form = FORMS[options.job]
    count, outcomes = play(folder, form, options.kills, options.seed, options.jobs, options.out, options.spare)
    broken = [outcome for outcome in outcomes if outcome.broken]
    where = Counter(moment.last or "before its first event" for outcome in outcomes for moment in outcome.kills)
    back = sorted(moment.back_s for outcome in outcomes for moment in outcome.kills if moment.back_s is not None)
    if back:
        print(f"from a start to its first event: {median(back):.1f} s in the middle, {back[-1]:.1f} s at most")
    print(f"newest event when it was killed: {dict(where.most_common())}")
    print(
        f"{count} kills over {len(outcomes)} runs of seeds {options.seed} to {options.seed + form.seeds - 1} in "
        f"{time.monotonic() - began_s:.0f} s: {len(broken) or 'none'} broken"
    )
    if not broken and options.folder is None:
        shutil.rmtree(folder)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
