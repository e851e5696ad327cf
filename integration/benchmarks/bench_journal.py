"""How many events a second the journal makes durable, and how fast a long journal is recovered.

python integration/benchmarks/bench_journal.py [--records 1000000] [--kind run|events] [--derive] [--folder DIR]
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pearl_executor.ports import Finish
from pearl_planner.elastic import ElasticSettings, ElasticState, initial_state
from pearl_planner.policies import pearl
from pearl_planner.step import step
from pearl_rl.journal.journal import Journal
from pearl_rl.journal.run_journal import SNAPSHOT_EVERY, RunJournal, recover
from pearl_rl.journal.storage import FolderStorage
from pearl_rl.rollout.calls import TurnResult
from pearl_rl.rollout.ledger import (
    BatchTaken,
    GroupOpened,
    RolloutLedger,
    RolloutRecord,
    SampleCompleted,
    SampleDispatched,
    StepTrained,
    TurnPlayed,
)
from pearl_state.effects import ApplyStage, Effect, PrepareGroup, ReleaseTraining, ResumeTraining, SyncWeights
from pearl_state.events import (
    Event,
    GpusOffered,
    GpusReclaimed,
    GroupPrepared,
    ProfileRefitted,
    RolloutBegan,
    RolloutFinished,
    RolloutProgressed,
    StageApplied,
    TrainingFinished,
    TrainingReleased,
    TrainingRequested,
    TrainingResumed,
    WeightsPublished,
    WeightsReported,
)
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.roles import Tenure
from pearl_state.trajectory import GroupId, Trajectory, TrajectoryId, Turn, WeightSpan
from pearl_state.worker import GpuId, WorkerId

SETTINGS = ElasticSettings(policy=pearl())
BATCH, SIZE, TURNS, RESPONSE = 64, 8, 4, 12


def start() -> ElasticState:
    workload = WorkloadProfile(batch=BATCH, turns=3, new_prompt_tokens=20, response_tokens=8)
    platform = PlatformProfile(
        decode_fixed_s=0.03,
        decode_per_sequence_s=0.002,
        prefill_per_token_s=0.003,
        kv_bytes_per_token=1024,
        transfer_bytes_per_s=1e8,
    )
    return initial_state(settings=SETTINGS, workload=workload, platform=platform, training_gpus=2)


def event(number: int) -> Event:
    """What most events of a run are: a trajectory more is complete."""
    at, left = divmod(number, BATCH + 1)
    now_s = 0.01 * number
    return (
        RolloutBegan(now_s=now_s, step=at, batch=BATCH)
        if left == 0
        else RolloutProgressed(now_s=now_s, step=at, remaining=BATCH - left)
    )


async def durable(folder: Path, count: int, *, together: int) -> float:
    """Durable events a second where `together` callers wait for each commit."""
    storage = FolderStorage(folder)
    journal = RunJournal(storage, start(), RolloutLedger(), snapshot_every=10**9)
    began = time.perf_counter()

    async def post(numbers: range) -> None:
        for number in numbers:
            journal.append(event(number), {})
            await journal.commit()

    await asyncio.gather(*(post(range(at, count, together)) for at in range(together)))
    rate = count / (time.perf_counter() - began)
    storage.close()
    return rate


class Writer:
    """Writes the journal of a long run: groups are played, updates made, GPUs come and go, and all effects succeed."""

    def __init__(self, folder: Path, *, rollout: bool) -> None:
        """`rollout`: also the rollout's records, as a run has them; else control events alone."""
        self._storage = FolderStorage(folder)
        self._rollout = rollout
        self._ledger = RolloutLedger()
        self._state = start()
        self._journal = RunJournal(self._storage, self._state, self._ledger)
        self._now_s = 0.0
        self._rng = random.Random(0)
        self.events = 0

    @property
    def records(self) -> int:
        return self._journal._journal.next_number

    def close(self) -> None:
        self._journal._journal.commit_now()
        self._storage.close()

    def note(self, record: RolloutRecord) -> None:
        if self._rollout:
            self._journal.note(record)

    def post(self, event: Event) -> None:
        """Take an event in, and the executors' answers to what follows from it."""
        waiting = [event]
        while waiting:
            event = waiting.pop(0)
            loads = {row.id: 2.0 for row in self._state.table.rows.values()}
            self._journal.append(event, loads)
            self._state, effects = step(self._state, event, loads)
            self.events += 1
            for effect in effects:
                waiting += self._answers(effect)
        if self.events % 64 == 0:
            self._journal._journal.commit_now()
            self._journal.applied(self._state)

    def _answers(self, effect: Effect) -> Iterator[Event]:
        now_s = self._now_s
        match effect:
            case PrepareGroup():
                version = self._state.table.target_version
                yield GroupPrepared(
                    now_s=now_s,
                    plan_id=effect.plan_id,
                    reported={w.id: version for w in effect.workers},
                    duration_s=3.0,
                )
            case ApplyStage():
                yield StageApplied(
                    now_s=now_s,
                    plan_id=effect.plan_id,
                    stage=effect.stage,
                    reported={w.id: effect.target_version for w in effect.admit},
                    left=frozenset(w.id for w in effect.leave),
                    duration_s=0.5,
                )
            case SyncWeights():
                for w in effect.workers:
                    yield WeightsReported(now_s=now_s, worker=w.id, incarnation=w.incarnation, version=effect.version)
            case ReleaseTraining():
                yield TrainingReleased(now_s=now_s, plan_id=effect.plan_id)
            case ResumeTraining():
                yield TrainingResumed(now_s=now_s, plan_id=effect.plan_id)

    def step(self, number: int) -> None:
        """One step of the default job."""
        now_s = self._now_s
        if number == 1:
            self.post(GpusOffered(now_s=now_s, gpus=frozenset({GpuId(2), GpuId(3)}), tenure=Tenure.RESERVED))
        if number % 12 == 2:
            self.post(GpusOffered(now_s=now_s, gpus=frozenset({GpuId(4), GpuId(5)})))
        if number % 12 == 8:
            self.post(GpusReclaimed(now_s=now_s, gpus=frozenset({GpuId(5)}), deadline_s=now_s + 2.0))
        if number % 12 == 10:
            self.post(GpusReclaimed(now_s=now_s, gpus=frozenset({GpuId(4)}), deadline_s=now_s + 2.0))
        self.post(RolloutBegan(now_s=now_s, step=number, batch=BATCH))
        samples = list(self._begin(number))
        for left, (group, name, at) in enumerate(samples[::-1]):
            self._now_s += 0.05
            self._play(name, number - 1)
            self.note(SampleCompleted(trajectory=self._trajectory(group, name, at, number - 1), version=number - 1))
            self.post(RolloutProgressed(now_s=self._now_s, step=number, remaining=BATCH - 1 - left))
        now_s = self._now_s
        self.post(RolloutFinished(now_s=now_s, step=number, makespan_s=3.2))
        self.post(ProfileRefitted(now_s=now_s, workload=self._state.workload, platform=self._state.platform))
        self.post(TrainingRequested(now_s=now_s))
        self.note(BatchTaken(step=number, groups=tuple(dict.fromkeys(group for group, _, _ in samples))))
        self.note(StepTrained(step=number))
        self.post(WeightsPublished(now_s=now_s, version=number))
        self.post(TrainingFinished(now_s=now_s, weight_version=number, duration_s=0.8))

    def _begin(self, number: int) -> Iterator[tuple[GroupId, TrajectoryId, int]]:
        for at in range(BATCH):
            sample = (number - 1) * BATCH + at
            group = GroupId(f"g{sample // SIZE:06d}")
            if at % SIZE == 0:
                self.note(GroupOpened(group=group, step=number, number=sample // SIZE))
            name = TrajectoryId(f"t{sample:08d}")
            self.note(SampleDispatched(group=group, trajectory=name, number=sample, version=number - 1))
            yield group, name, sample

    def _play(self, name: TrajectoryId, version: int) -> None:
        for turn in range(TURNS):
            result = TurnResult(
                tokens=tuple(range(RESPONSE)),
                logprobs=tuple(-self._rng.random() for _ in range(RESPONSE)),
                spans=(WeightSpan(version=version, tokens=RESPONSE),),
                finish=Finish.STOP,
                cached_tokens=26,
                queue_s=0.01,
                prefill_s=0.02,
                decode_s=0.3,
                transfer_s=0.0,
                started_s=self._now_s,
                finished_s=self._now_s + 0.4,
                interruptions=0,
                worker=WorkerId(2),
            )
            self.note(TurnPlayed(trajectory=name, turn=turn, prompt="5ffa44aa54aea9e7d0dad888", result=result))

    def _trajectory(self, group: GroupId, name: TrajectoryId, at: int, version: int) -> Trajectory:
        turn = Turn(
            prompt=tuple(range(15)),
            response=tuple(range(RESPONSE)),
            logprobs=tuple(-self._rng.random() for _ in range(RESPONSE)),
            spans=(WeightSpan(version=version, tokens=RESPONSE),),
            environment_s=0.2,
            prefill_s=0.01,
            decode_s=0.3,
        )
        return Trajectory(
            id=name,
            group=group,
            task=f"bisect-{at:06d}",
            turns=(turn,) * TURNS,
            reward=0.5,
            dispatch_version=version,
            started_s=0.0,
            finished_s=self._now_s,
        )


def long_journal(folder: Path, count: int, *, rollout: bool) -> tuple[float, int, int]:
    """Write a journal of `count` records, with snapshots as a run takes them. Returns seconds, records, and events."""
    began = time.perf_counter()
    writer = Writer(folder, rollout=rollout)
    number = 0
    while writer.records < count:
        number += 1
        writer.step(number)
    writer.close()
    return time.perf_counter() - began, writer.records, writer.events


def costly_tail(folder: Path, workers: int) -> None:
    """Write a journal that ends just before its next snapshot, of the events that take longest: each is decided on."""
    writer = Writer(folder, rollout=False)
    gpus = frozenset(GpuId(2 + i) for i in range(workers))
    writer.post(GpusOffered(now_s=0.0, gpus=gpus, tenure=Tenure.RESERVED))
    writer.post(RolloutBegan(now_s=0.0, step=1, batch=BATCH))
    state = start()
    loads = [state.workload, replace(state.workload, turns=12, response_tokens=400)]
    while writer.records < SNAPSHOT_EVERY - 1:
        loads.reverse()
        writer.post(ProfileRefitted(now_s=0.0, workload=loads[0], platform=state.platform, calibrated=True))
    writer.close()


def derived(folder: Path, *, since: int | None) -> tuple[float, int]:
    """Seconds that it takes to be back, and how many records were read."""
    began = time.perf_counter()
    recovered = recover(FolderStorage(folder), SETTINGS, since=since)
    return time.perf_counter() - began, recovered.records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=1_000_000, help="of each long journal")
    parser.add_argument("--kind", choices=("run", "events"), help="only this long journal; default: both")
    parser.add_argument("--derive", action="store_true", help="also derive them again from their first records")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        for together in (1, 16, 256):
            rate = asyncio.run(durable(folder / f"rate{together}", 200 * together, together=together))
            print(f"{rate:10,.0f} durable events/s, {together} callers wait at a time")
        for workers in (4, 16, 64):
            costly_tail(folder / f"tail{workers}", workers)
            took_s, read = derived(folder / f"tail{workers}", since=None)
            print(f"{took_s:10.2f} s to be back where {read} records follow the snapshot, {workers} workers replanned")
        kinds = {"run": ("a run's records", True), "events": ("control events alone", False)}
        for name, rollout in kinds.values() if options.kind is None else (kinds[options.kind],):
            long = folder / name.replace(" ", "-")
            took_s, count, events = long_journal(long, options.records, rollout=rollout)
            size = sum(file.stat().st_size for file in long.iterdir())
            print(f"{name}: {count:,}, {events:,} of them events, made in {took_s:.1f} s, {size / 1e6:.0f} MB")
            took_s, read = derived(long, since=None)
            print(f"{took_s:10.2f} s to be back: the newest snapshot and {read} records")
            if options.derive:
                took_s, read = derived(long, since=0)
                print(f"{took_s:10.2f} s to derive it all again: {read:,} records, {1e6 * took_s / read:.0f} µs each")
            _damage(long)


def _damage(folder: Path) -> None:
    """Cut the newest segment at random bytes: each time the journal opens, and only its tail is gone."""
    rng = random.Random(0)
    newest = max(folder.iterdir())
    data = newest.read_bytes()
    worst = 0.0
    for _ in range(20):
        newest.write_bytes(data[: rng.randrange(len(data) // 2, len(data))])
        began = time.perf_counter()
        storage = FolderStorage(folder)
        Journal(storage)
        storage.close()
        worst = max(worst, time.perf_counter() - began)
    newest.write_bytes(data)
    print(f"{worst:10.2f} s at most to open it after its newest segment was cut at a random byte (20 cuts)")


if __name__ == "__main__":
    main()
