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
from collections.abc import Callable
from pathlib import Path

from pearl_executor.availability import read_trace
from pearl_executor.availability_http import CommandSource
from pearl_executor.loopback_http import RefusedError, Request
from pearl_planner.elastic import ElasticSettings, initial_state
from pearl_planner.policies import pearl
from pearl_planner.step import step
from pearl_rl.control.control_server import ControlServer
from pearl_rl.encoding import encode_event
from pearl_rl.errors import CommandError
from pearl_rl.journal.frames import JournalError, frame
from pearl_rl.journal.journal import Journal
from pearl_rl.journal.run_journal import RunJournal, recover
from pearl_rl.journal.storage import MemoryStorage
from pearl_rl.rollout.ledger import RolloutLedger
from pearl_rl.settings import load_settings
from pearl_state.events import GpusOffered, RolloutBegan, RolloutProgressed
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.worker import GpuId

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

    def journal(self, rng: random.Random) -> None:
        """Damage to the bytes, and, behind right checksums, to what they say."""
        storage = MemoryStorage()
        if rng.random() < 0.5:
            data = mutate(rng, self._journal)
        else:
            event = encode_event(RolloutBegan(now_s=1.0, step=1, batch=8))
            record = json.dumps({"n": 3, "k": "event", "v": {**event, "loads": {}}}).encode()
            data = self._journal + frame([mutate(rng, record)])
        storage.append(1, data)
        try:
            Journal(storage)
            recovered = recover(storage, SETTINGS)
        except JournalError as error:
            one_line(error)
        else:
            # What was read must be a state that the core can go on from.
            step(recovered.state, RolloutProgressed(now_s=9.0, step=1, remaining=1))

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
PARSERS = ("settings", "trace", "journal", "http")


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
