"""Broken and hostile input for every parser: each is taken, or refused in one line, and nothing happens by halves.

python -m dst.fuzz --inputs 50000 [--parser journal] [--seed 0]
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pearl_executor.availability import read_trace
from pearl_executor.availability_http import CommandSource
from pearl_executor.loopback_http import RefusedError, Request
from pearl_executor.ports import Finish
from pearl_planner.elastic import ElasticSettings, initial_state
from pearl_planner.policies import pearl
from pearl_planner.step import step
from pearl_rl.cli.importing import read_configuration, to_toml
from pearl_rl.control.control_server import ControlServer
from pearl_rl.encoding import encode_event
from pearl_rl.errors import CommandError
from pearl_rl.journal.frames import JournalError, frame, scan
from pearl_rl.journal.journal import Journal
from pearl_rl.journal.run_journal import RunJournal, recover
from pearl_rl.journal.storage import MemoryStorage
from pearl_rl.rollout.calls import TurnResult
from pearl_rl.rollout.ledger import (
    BatchTaken,
    GroupDropped,
    GroupOpened,
    RolloutLedger,
    RolloutRecord,
    RolloutResumed,
    SampleCompleted,
    SampleDispatched,
    SampleFailed,
    SamplesRejected,
    StepTrained,
    TurnPlayed,
    encode_record,
)
from pearl_rl.settings import load_settings
from pearl_state.configuration import Configuration
from pearl_state.effects import PrepareGroup
from pearl_state.events import (
    ConfigurationPinned,
    Event,
    GpusOffered,
    GpusReclaimed,
    GroupPrepared,
    ProfileRefitted,
    RolloutBegan,
    RolloutProgressed,
    RunResumed,
    TrainingFinished,
    TrainingRequested,
    WeightsPublished,
    WeightsReported,
    WorkerFailed,
    WorkersCordoned,
)
from pearl_state.plan import PlanId
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.roles import Tenure
from pearl_state.trajectory import GroupId, Trajectory, TrajectoryId, Turn, WeightSpan
from pearl_state.worker import GpuId, WorkerId

SETTINGS = ElasticSettings(policy=pearl())
PIECES = (
    b"",
    b"\x00",
    b"\xff\xfe",
    b"\n",
    b"\r\n",
    b'"',
    b"'''",
    b"[",
    b"]]",
    b"{",
    b"}",
    b"=",
    b",",
    b"-1",
    b"1e999",
    b"nan",
    b"99999999999999999999",
    b"null",
    b"true",
    b"../../../etc/passwd",
    b"$(reboot)",
    b"<script>alert(1)</script>",
    b"{{7*7}}",
    "é\u202e𝟘".encode(),
    b"PJL1",
)


def mutate(rng: random.Random, data: bytes) -> bytes:
    """`data` with a few bytes flipped, cut, doubled or replaced by pieces that hurt parsers."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 9))):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(6):
            case 0 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 1:
                out[at:at] = rng.choice(PIECES)
            case 2:
                del out[at : at + rng.randrange(1, 20)]
            case 3:
                out[at:at] = out[at : at + rng.randrange(1, 30)]
            case 4:
                del out[at:]
            case _:
                end = at + rng.randrange(1, 8)
                out[at:end] = rng.choice(PIECES)
    return bytes(out)


FOREIGN = (
    (
        "verl",
        ".sh",
        b'N=${N:-2}\nX=(data.train_batch_size=$((4 * N)))\nif [ "$N" -gt 1 ]; then X+=(trainer.nnodes=${N}); fi\n'
        b"case $N in 2|3) Y=a ;; *) Y=b ;; esac\npython -m verl.trainer.main_ppo --config-name=ppo_trainer "
        b'\\\n  "${X[@]}" actor_rollout_ref.rollout.n=8 algorithm.adv_estimator=grpo x=$Y 2>&1 | tee log\n',
    ),
    (
        "slime",
        ".sh",
        b"A=(\n --lr 1e-6 # rate\n --rollout-batch-size 8 --n-samples-per-prompt 4\n)\ncat <<EOF\n$A\nEOF\n"
        b'ray job submit -- python train_async.py "${A[@]}" --rollout-num-gpus ${G:-8} --prefill-num-servers 2\n',
    ),
    (
        "roll",
        ".yaml",
        b"rollout_batch_size: 64\nsequence_length: 4096\nactor_train: {device_mapping: 'list(range(0,4))'}\n"
        b"actor_infer: {device_mapping: 'list(range(0,8))', generating_args: {max_new_tokens: '${sequence_length}'}}\n",
    ),
    (
        "areal",
        ".yaml",
        b"rollout: {backend: 'sglang:d2t2', max_head_offpolicyness: 2}\n"
        b"actor: {backend: 'megatron:(attn:d2t2|ffn:e4)'}\ngconfig: {n_samples: 4, max_tokens: 2048}\n"
        b"seed: ${oc.select:a.b,1}\ntrain_dataset: &a {batch_size: 8}\nb: *a\n",
    ),
)
"""(framework, suffix, configuration) in the forms that their own examples use."""

AFTERWARDS: tuple[Event, ...] = (
    RolloutProgressed(now_s=9.0, step=1, remaining=1),
    GpusOffered(now_s=9.0, gpus=frozenset({GpuId(20), GpuId(21)})),
    TrainingRequested(now_s=9.0),
    GpusReclaimed(now_s=9.0, gpus=frozenset({GpuId(20)}), deadline_s=11.0),
    RunResumed(now_s=9.0, weight_version=1),
    GpusOffered(now_s=9.0, gpus=frozenset({GpuId(20), GpuId(21)})),
)
"""What happens to a state that was read: nothing of it may be a surprise to the core."""


VALUES = (
    *("null", "true", "false", "0", "1", "-1", "3", "7", "0.5", "-0.5", "1" + 20 * "0", "1e300"),
    *('""', '"x"', '"4"', '"NaN"', '"-Infinity"', "[]", "[4]", "{}", '{"4": 1}'),
)
"""That stand where others are expected."""


def mutate_value(rng: random.Random, line: bytes) -> bytes:
    """A line of JSON whose keys or values are changed in a few places: it can be read, and says something else."""
    value = json.loads(line)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(value))
        if not places:
            break
        holder, key = rng.choice(places)
        match rng.randrange(4):
            case 0:
                del holder[key]
            case 1:
                other, name = rng.choice(places)
                holder[key] = json.loads(json.dumps(other[name]))
            case _:
                holder[key] = json.loads(rng.choice(VALUES))
    return json.dumps(value).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a value that holds another one."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def rollout_records() -> list[RolloutRecord]:
    """One group of two samples, from its beginning to its update; then two more samples that fail or are too old."""
    group, names = GroupId("g0"), [TrajectoryId(f"t{at}") for at in range(4)]
    result = TurnResult(
        tokens=(5, 6),
        logprobs=(-0.5, -0.25),
        spans=(WeightSpan(version=0, tokens=2),),
        finish=Finish.STOP,
        cached_tokens=1,
        queue_s=0.0,
        prefill_s=0.1,
        decode_s=0.2,
        transfer_s=0.0,
        started_s=1.0,
        finished_s=1.3,
        interruptions=0,
        worker=WorkerId(2),
    )

    def completed(name: TrajectoryId) -> SampleCompleted:
        turn = Turn(prompt=(1, 2), response=result.tokens, logprobs=result.logprobs, spans=result.spans)
        trajectory = Trajectory(
            id=name,
            group=group,
            task="a task",
            turns=(turn,),
            reward=0.5,
            dispatch_version=0,
            started_s=0.0,
            finished_s=2.0,
        )
        return SampleCompleted(trajectory=trajectory, version=0)

    begun = [SampleDispatched(group=group, trajectory=name, number=at, version=0) for at, name in enumerate(names)]
    return [
        GroupOpened(group=group, step=1, number=0),
        *begun[:3],
        TurnPlayed(trajectory=names[0], turn=0, prompt="5ffa44aa54aea9e7d0dad888", result=result),
        completed(names[0]),
        SampleFailed(group=group, trajectory=names[1], cause="timed out"),
        completed(names[2]),
        SamplesRejected(trajectories=(names[2],)),
        begun[3],
        completed(names[3]),
        BatchTaken(step=1, groups=(group,)),
        StepTrained(step=1),
        RolloutResumed(completed=1),
        GroupOpened(group=GroupId("g1"), step=2, number=1),
        GroupDropped(group=GroupId("g1")),
    ]


def one_line(error: Exception) -> None:
    assert str(error), "an error without words"
    assert "\n" not in str(error), f"an error of several lines: {error}"


class Inputs:
    """What each parser is given, and what must hold after it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "input"
        self._toml = [
            b"[run]\nsteps = 3\nseed = 1\n[train]\nlearning_rate = 1e-4\ngroup_size = 8\n",
            b'[cluster]\ntraining_gpus = 2\nborrowing = "gated"\n[availability]\nsource = "trace"\n',
            b'[environment]\nname = "bisect"\n[environment.args]\nlevels = [1, 2]\n',
        ]
        self._trace = b"t_s,preemptible_gpus\n0,2\n10,4\n20,0\n30.5,1\n"
        self._journal = self._valid_journal()
        self._events = [
            json.dumps({"n": 3, "k": "event", "v": {**encode_event(event), "loads": {"4": 1.0}}}).encode()
            for event in self._any_events()
        ]
        self._records = [
            json.dumps({"n": 3 + at, "k": "rollout", "v": encode_record(record)}).encode()
            for at, record in enumerate(rollout_records())
        ]
        self._snapshot = self._valid_snapshot()
        self._commands = [
            b'{"pin": "2P3D"}',
            b'{"unpin": true}',
            b'{"freeze": true}',
            b'{"cordon": [4, 5]}',
            b'{"offer": 2}',
            b'{"reclaim": [10], "notice_s": 5}',
        ]

    # ---- settings and traces ----------------------------------------------------------------------------------------

    def settings(self, rng: random.Random) -> None:
        self._file.write_bytes(mutate(rng, rng.choice(self._toml)))
        try:
            load_settings(self._file, [])
        except CommandError as error:
            one_line(error)

    def foreign(self, rng: random.Random) -> None:
        framework, suffix, text = rng.choice(FOREIGN)
        path = self._file.with_suffix(suffix)
        path.write_bytes(mutate(rng, text))
        try:
            found = read_configuration(framework, path, None)
        except CommandError as error:
            one_line(error)
        else:
            assert all("\n" not in line for line in found.unsupported)
            # What was taken can be written, and read as settings or refused.
            self._file.write_text(to_toml(found, path), encoding="utf-8")
            try:
                load_settings(self._file, [])
            except CommandError as error:
                one_line(error)

    def trace(self, rng: random.Random) -> None:
        self._file.write_bytes(mutate(rng, self._trace))
        try:
            rows = read_trace(self._file)
        except ValueError as error:
            one_line(error)
        else:
            assert rows
            assert all(row.count >= 0 for row in rows)

    # ---- journals ---------------------------------------------------------------------------------------------------

    def _state(self):
        workload = WorkloadProfile(batch=8, turns=2, new_prompt_tokens=4, response_tokens=4)
        platform = PlatformProfile(
            decode_fixed_s=0.03,
            decode_per_sequence_s=0.002,
            prefill_per_token_s=0.01,
            kv_bytes_per_token=1024,
            transfer_bytes_per_s=1e8,
        )
        return initial_state(settings=SETTINGS, workload=workload, platform=platform, training_gpus=2)

    def _valid_journal(self) -> bytes:
        storage = MemoryStorage()
        journal = RunJournal(storage, self._state(), RolloutLedger())
        events = [
            GpusOffered(now_s=0.0, gpus=frozenset({GpuId(2), GpuId(3)})),
            RolloutBegan(now_s=1.0, step=1, batch=8),
            RolloutProgressed(now_s=2.0, step=1, remaining=5),
        ]
        for event in events:
            journal.append(event, {})
            journal._journal.commit_now()
        return storage.read(1)

    def _any_events(self) -> list[Event]:
        """One of each kind that a file may hold numbers, names and sets of."""
        state = self._state()
        return [
            RolloutBegan(now_s=1.0, step=1, batch=8),
            GpusOffered(now_s=1.0, gpus=frozenset({GpuId(4), GpuId(5)}), tenure=Tenure.RESERVED, node="a"),
            GpusReclaimed(now_s=1.0, gpus=frozenset({GpuId(2)}), deadline_s=3.0),
            ProfileRefitted(now_s=1.0, workload=state.workload, platform=state.platform, calibrated=True),
            WeightsPublished(now_s=1.0, version=1),
            WeightsReported(now_s=1.0, worker=WorkerId(4), incarnation=1, version=0),
            TrainingFinished(now_s=1.0, weight_version=1, duration_s=0.5),
            ConfigurationPinned(now_s=1.0, configuration=Configuration(1, 1)),
            WorkersCordoned(now_s=1.0, workers=frozenset({WorkerId(4)}), cordoned=True),
            WorkerFailed(now_s=1.0, worker=WorkerId(4), incarnation=1, cause="ended"),
            GroupPrepared(now_s=1.0, plan_id=PlanId(1), reported={WorkerId(4): 0, WorkerId(5): 0}, duration_s=2.0),
        ]

    def _valid_snapshot(self) -> bytes:
        """A snapshot's line: workers serve, others start, a plan is under way, and samples are played and complete."""
        storage = MemoryStorage()
        ledger = RolloutLedger()
        for record in rollout_records()[:6]:
            ledger.apply(record)
        state, effects = step(self._state(), GpusOffered(now_s=0.0, gpus=frozenset(map(GpuId, range(4, 8)))))
        for effect in effects:
            if isinstance(effect, PrepareGroup):
                reported = {worker.id: 0 for worker in effect.workers}
                state, _ = step(state, GroupPrepared(now_s=1.0, plan_id=effect.plan_id, reported=reported))
        state, _ = step(state, GpusOffered(now_s=2.0, gpus=frozenset(map(GpuId, range(8, 10)))))
        assert state.running is not None
        assert state.groups
        RunJournal(storage, state, ledger)
        return scan(storage.read(1)).payloads[0]

    def journal(self, rng: random.Random) -> None:
        """Damage to the bytes, and, behind right checksums, to what they say: a record, or the snapshot before all."""
        storage = MemoryStorage()
        change = mutate if rng.random() < 0.2 else mutate_value
        match rng.randrange(4):
            case 0:
                data = mutate(rng, self._journal)
            case 1:
                data = self._journal + frame([change(rng, rng.choice(self._events))])
            case 2:
                last = rng.randrange(len(self._records))
                data = self._journal + frame([*self._records[:last], change(rng, self._records[last])])
            case _:
                data = frame([change(rng, self._snapshot)])
        storage.append(1, data)
        try:
            Journal(storage)
            recovered = recover(storage, SETTINGS)
        except JournalError as error:
            one_line(error)
        else:
            # What was read must be a state that the core can go on from, and a ledger that a run resumes with.
            recovered.rollout.apply(RolloutResumed(completed=1))
            state = recovered.state
            for event in AFTERWARDS:
                state, _ = step(state, event)

    # ---- HTTP bodies ------------------------------------------------------------------------------------------------

    def http(self, rng: random.Random) -> None:
        posted: list[object] = []
        state, _ = step(self._state(), GpusOffered(now_s=0.0, gpus=frozenset(map(GpuId, range(4, 8)))))
        server = ControlServer(
            self._folder, post=posted.append, state=lambda: state, gpus=CommandSource(gpus=range(10, 14))
        )
        body = mutate(rng, rng.choice(self._commands))
        fields = {"content-length": str(len(body)), "authorization": f"Bearer {server.token}"}
        refused_by_token = rng.random() < 0.1
        if refused_by_token:
            fields["authorization"] = "Bearer " + rng.choice(("", "x", server.token[:-1], "é"))

        async def main() -> None:
            reader = asyncio.StreamReader()
            reader.feed_data(body)
            reader.feed_eof()
            await server._handle(Request("POST", "/commands", {}, fields, reader))

        try:
            LOOP.run_until_complete(main())
        except RefusedError as error:
            one_line(error)
            assert not posted, "refused, but posted"
        else:
            assert not refused_by_token, "taken without its token"


LOOP = asyncio.new_event_loop()
PARSERS = ("settings", "foreign", "trace", "journal", "http")


def fuzz(parser: str, first: int, count: int) -> str | None:
    """Give `count` inputs to a parser. Returns what went wrong with which seed."""
    with tempfile.TemporaryDirectory() as folder:
        feed: Callable[[random.Random], None] = getattr(Inputs(Path(folder)), parser)
        for seed in range(first, first + count):
            try:
                feed(random.Random(seed))
            except Exception:
                return f"{parser}, seed {seed}:\n{traceback.format_exc()}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=50_000, help="for each parser")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parser", choices=PARSERS, action="append")
    options = parser.parse_args()
    failed = False
    for name in options.parser or PARSERS:
        began = time.monotonic()
        wrong = fuzz(name, options.seed, options.inputs)
        failed |= wrong is not None
        print(wrong or f"{name}: {options.inputs} inputs in {time.monotonic() - began:.1f} s, all taken or refused")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
