"""The table of bounds is true: its numbers are the code's, and a hang of each executor call is named and survived."""

import dataclasses
import importlib
import re
from collections import deque
from pathlib import Path

import pytest

from dst.script import Op, Script
from dst.world import LIMITS, Disk, Life, Machine
from pearl_executor.limits import Limits
from pearl_executor.testing import FaultScript
from pearl_executor.virtual_time import run_virtual
from pearl_rl.control.transfers import TransferWatch
from pearl_state.configuration import Configuration
from pearl_state.roles import Mode

TEXT = Path(__file__).with_name("BOUNDS.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TEXT.splitlines() if line.startswith("| `")]


def default(path: str) -> float:
    """The value that the code gives a bound."""
    head, name = path.rsplit(".", 1)
    try:
        return getattr(importlib.import_module(head), name)
    except ModuleNotFoundError:
        module, kind = head.rsplit(".", 1)
        (field,) = [f for f in dataclasses.fields(getattr(importlib.import_module(module), kind)) if f.name == name]
        return field.default


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("`"))
def test_a_bound_is_what_the_table_says_and_says_who_must_act(row) -> None:
    assert default(row[0].strip("`")) == float(row[1])
    assert all(row)


def test_every_limit_of_the_executors_that_bounds_a_call_is_in_the_table() -> None:
    pauses = {"interrupt_again_s", "retry_s", "retry_max_s", "cancel_s", "settle_s"}
    listed = {row[0].strip("`").rsplit(".", 1)[1] for row in ROWS if ".Limits." in row[0]}
    assert listed == {field.name for field in dataclasses.fields(Limits)} - pauses


HANGS = {
    "start": ("start", "start_s"),
    "load_weights": ("load_weights", "sync_s"),
    "interrupt": ("interrupt", "interrupt_s"),
    "release": ("release", "release_s"),
    "resume": ("resume", "resume_s"),
    "switch_role": ("switch_role", "switch_s"),
    "refresh_peers": ("refresh_peers", "refresh_s"),
    "samples": ("samples", "probe_s"),
    "stop": ("stop", "stop_s"),
    "kill": ("kill", "kill_s"),
    "training.release": ("release", "training_release_s"),
    "training.resume": ("resume", "training_resume_s"),
}


def test_every_hang_that_is_walked_is_a_row_of_the_table() -> None:
    named = set(re.findall(r"\| `(\w+)`", TEXT)) | {"training.release", "training.resume"}
    assert set(HANGS) <= named | {"start"}


@pytest.mark.parametrize("method", HANGS)
def test_a_call_that_hangs_is_named_ends_within_its_bound_and_the_run_goes_on(tmp_path, method: str) -> None:
    name, bound = HANGS[method]
    ops = (
        Op(0.0, "fault", (method, "hang")),
        Op(1.0, "offer", ([10, 11, 12],)),
        Op(25.0, "pin", ("2P1D",)),
        Op(25.0, "pin", ("1P2D",)),
        Op(15.0, "reclaim", ([12], 30.0)),
        Op(15.0, "crash", (10, True)),
        Op(60.0, "pin", ("",)),
    )
    script = Script(seed=0, borrowing="ungated", gpus_per_worker=1, steps=14, staleness=1, max_restarts=1000, ops=ops)

    async def main() -> Life:
        life = Life(Machine(FaultScript(), Disk(tmp_path)), script)
        await life.run(deque(ops))
        return life

    life = run_virtual(main())
    assert life.pipeline.counts.used == script.steps * 4
    # A return of the training GPUs may overtake a resume that hangs: it is cancelled before its own limit.
    ends = ("exceeded", "was cancelled") if method == "resume" else ("exceeded",)
    late = [action for action in life.actions if action.name == name and any(e in (action.failed or "") for e in ends)]
    assert late, f"{method} never hung in this run: {sorted({action.name for action in life.actions})}"
    who = "training" if method.startswith("training.") else f"worker {late[0].worker}"
    assert late[0].failed.startswith(f"{who}: {name} ")
    most = max(getattr(LIMITS, bound), LIMITS.load_s if name == "load_weights" else 0.0)
    assert late[0].duration_s <= most + LIMITS.cancel_s


def test_hand_overs_that_keep_failing_end_in_colocation_and_the_run_goes_on(tmp_path) -> None:
    """As in the table's last words; here a person wanted disaggregation."""
    ops = (Op(0.5, "pin", ("1P1D",)), Op(0.0, "transfer_failures", (1000,)), Op(4000.0, "thaw"))
    script = Script(seed=0, borrowing="off", gpus_per_worker=1, steps=4, staleness=1, max_restarts=1000, ops=ops)

    async def main() -> tuple[Life, list[str]]:
        life = Life(Machine(FaultScript(), Disk(tmp_path)), script)
        told: list[str] = []
        watch = TransferWatch(life.scheduler.post, told.append)
        life.router._on_transfer = watch.ended
        await life.run(deque(ops))
        return life, told

    life, told = run_virtual(main())
    assert told == ["kv_transfer: 10 hand-overs failed in a row; going on colocated"]
    assert life.machine.workers.transfer_failures > 900
    assert life.scheduler.state.pinned == Configuration(colocated=1)
    assert life.scheduler.state.table.configuration.mode is Mode.COLOCATION
    assert life.pipeline.counts.used == script.steps * 4
    assert life.pipeline.counts.lost == 0
