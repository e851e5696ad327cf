"""How many events a second the journal makes durable, and how fast a long journal is recovered.

python integration/benchmarks/bench_journal.py [--events 1000000] [--folder DIR]
"""

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path

from pearl_planner.elastic import ElasticSettings, ElasticState, initial_state
from pearl_planner.policies import pearl
from pearl_planner.step import step
from pearl_rl.journal.journal import Journal
from pearl_rl.journal.run_journal import RunJournal, recover
from pearl_rl.journal.storage import FolderStorage
from pearl_rl.rollout.ledger import RolloutLedger
from pearl_state.events import Event, RolloutBegan, RolloutProgressed
from pearl_state.profile import PlatformProfile, WorkloadProfile

SETTINGS = ElasticSettings(policy=pearl())
BATCH = 64


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


def long_journal(folder: Path, count: int) -> float:
    """Write a journal of `count` events, with snapshots as a run takes them. Returns seconds."""
    began = time.perf_counter()
    storage = FolderStorage(folder)
    state = start()
    journal = RunJournal(storage, state, RolloutLedger())
    raw: Journal = journal._journal
    for number in range(count):
        journal.append(event(number), {})
        state, _ = step(state, event(number))
        if number % 500 == 499:
            raw.commit_now()
            journal.applied(state)
    raw.commit_now()
    storage.close()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        for together in (1, 16, 256):
            rate = asyncio.run(durable(folder / f"rate{together}", 200 * together, together=together))
            print(f"{rate:10,.0f} durable events/s, {together} callers wait at a time")
        took_s = long_journal(folder / "long", options.events)
        size = sum(file.stat().st_size for file in (folder / "long").iterdir())
        print(f"{options.events:10,} events written and applied in {took_s:.1f} s, {size / 1e6:.0f} MB")
        began = time.perf_counter()
        recovered = recover(FolderStorage(folder / "long"), SETTINGS)
        took_s = time.perf_counter() - began
        print(f"{took_s:10.2f} s to recover it: its newest snapshot and {recovered.records} events")
        began = time.perf_counter()
        recovered = recover(FolderStorage(folder / "long"), SETTINGS, from_start=True)
        took_s = time.perf_counter() - began
        print(f"{took_s:10.2f} s to derive it again from the start: {recovered.records} events")
        _damage(folder / "long")


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
