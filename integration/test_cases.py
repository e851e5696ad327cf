"""Faults of peer systems that concern the whole control plane, and the table from each known case to its tests."""

import asyncio
import re
from collections import deque
from pathlib import Path

import pytest

from dst.script import Op, Script
from dst.world import Disk, Life, Machine, play
from pearl_executor.ports import WorkerError
from pearl_executor.testing import FaultScript
from pearl_executor.virtual_time import run_virtual
from pearl_rl.control.liveness import StallProbe
from pearl_state.lifecycle import Lifecycle
from pearl_state.roles import Role, Zone
from pearl_state.worker import GpuId, Worker, WorkerId

ROOT = Path(__file__).parent.parent
TABLE = Path(__file__).with_name("CASES.md")


def rows():
    lines = [
        line.split("|") for line in TABLE.read_text(encoding="utf-8").splitlines() if re.match(r"\| [A-G]\d", line)
    ]
    return [(cells[1].strip(), re.findall(r"`([^`]+)`", cells[3])) for cells in lines]


def test_every_case_names_tests_that_exist() -> None:
    cases = rows()
    assert len(cases) == len({case for case, _ in cases}) >= 27
    missing = []
    for case, tests in cases:
        assert tests, f"{case} names no test"
        for test in tests:
            file, _, name = test.partition("::")
            path = ROOT / file
            if not path.is_file() or not re.search(rf"def {name}\b", path.read_text(encoding="utf-8")):
                missing.append(f"{case}: {test}")
    assert missing == []


def script(*ops: Op, **changes) -> Script:
    values = {
        "seed": 0,
        "borrowing": "off",
        "gpus_per_worker": 1,
        "steps": 6,
        "staleness": 1,
        "max_restarts": 3,
        "ops": ops,
    }
    return Script(**{**values, **changes})


async def live(machine: Machine, of: Script) -> Life:
    life = Life(machine, of)
    await life.run(deque(of.ops))
    return life


@pytest.mark.parametrize("withdrawn", [False, True])
def test_steps_do_not_wait_for_workers_that_start_and_a_withdrawn_one_leaves_nothing(tmp_path, withdrawn: bool) -> None:
    """SkyRL#1954, miles#693: starts of minutes blocked training; here they run beside it."""

    async def times(of: Script, start_s: float) -> tuple[list[float], Life]:
        machine = Machine(FaultScript({"start@4": start_s, "start@5": start_s, "load_weights": 1.0}), Disk(tmp_path))
        life = Life(machine, of)
        finished: list[float] = []
        check = life.check

        def noting(event, state, effects):
            check(event, state, effects)
            if type(event).__name__ == "TrainingFinished":
                finished.append(asyncio.get_running_loop().time())

        life.scheduler._on_step = noting
        await life.run(deque(of.ops))
        return finished, life

    ops = [Op(20.0, "offer", ([10, 11],))]
    if withdrawn:
        ops.append(Op(12.0, "reclaim", ([10, 11], 5.0)))
    alone, _ = run_virtual(times(script(Op(1e4, "thaw"), steps=40), 110.0))
    beside, life = run_virtual(times(script(*ops, Op(1e4, "thaw"), steps=40), 110.0))
    # They were asked for after 20 s, and are up 110 s later.
    until_up = [at_s for at_s in beside if at_s < 130.0]
    assert len(until_up) >= 10
    assert until_up == pytest.approx(alone[: len(until_up)])
    new = {GpuId(10), GpuId(11)}
    rows = [row for row in life.scheduler.state.table.rows.values() if row.gpus & new]
    if withdrawn:
        assert beside == pytest.approx(alone)
        assert rows == []
        assert all(not process.gpus & new for process in life.machine.workers.processes.values())
    else:
        assert {row.lifecycle for row in rows} == {Lifecycle.ACTIVE}
        assert new == {gpu for row in rows for gpu in row.gpus}


def test_workers_that_hang_are_asked_at_once_not_one_after_another() -> None:
    """radixark/miles#692: sixteen checks of 30 s each, one after another; here one round."""

    class Deaf:
        async def samples(self, worker):
            await asyncio.get_running_loop().create_future()
            raise WorkerError

    async def main() -> float:
        named: asyncio.Queue = asyncio.Queue()
        probe = StallProbe(Deaf(), named.put_nowait, probe_s=30.0)
        for i in range(16):
            gpus = frozenset({GpuId(i)})
            probe.suspect(
                Worker(id=WorkerId(i), gpus=gpus, role=Role.DECODE, zone=Zone.DEDICATED, incarnation=1), "stall", 1
            )
        assert len({(await named.get()).worker for _ in range(16)}) == 16
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) <= 31.0


def test_a_stalled_rollout_starts_no_worker(tmp_path) -> None:
    """prime-rl#3211: while clients time out and engines idle, nobody scales up."""
    frozen = script(Op(6.0, "freeze", (2,)), Op(0.0, "freeze", (3,)), Op(200.0, "thaw"), steps=3)
    report = play(frozen)
    assert report.outcome.steps == 3

    async def main() -> int:
        life = await live(Machine(FaultScript(), Disk(tmp_path)), frozen)
        return max(row.id for row in life.scheduler.state.table.rows.values())

    # Slots 0 and 1 train, 2 and 3 are the reserved ones, 4 and 5 those offered at the script's end.
    assert run_virtual(main()) <= 5
