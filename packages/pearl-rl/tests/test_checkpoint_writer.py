"""Checkpoints of a run: what a lost rank costs."""

import asyncio
import shutil
import threading
from pathlib import Path

import pytest

from pearl_rl.checkpoints import CheckpointWriter, find
from pearl_rl.rollout.ledger import Position
from pearl_rl.training.rank_group import CheckpointLateError, TrainerError, TrainerLostError


class Ranks:
    """A trainer whose checkpoints end as `ends` says: one entry each, None for a good one."""

    def __init__(self, *ends, at_once=False):
        self.version = 0
        self._ends = list(ends)
        self._at_once = at_once

    async def begin_checkpoint(self, path: Path):
        error = self._ends.pop(0)
        if error is not None and self._at_once:
            raise error

        async def save():
            await asyncio.sleep(0)
            if error is not None:
                raise error
            await asyncio.to_thread(path.mkdir, parents=True)

        return asyncio.get_running_loop().create_task(save())


def steps(folder, ranks, last=3, keep=5):
    async def main():
        writer = CheckpointWriter(folder / "checkpoints", ranks, every=1, keep=keep, last=last)
        for step in range(1, last + 1):
            ranks.version = step
            await writer.completed(step, Position())
        await writer.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("at_once", [False, True])
def test_a_rank_that_is_lost_while_it_writes_costs_that_checkpoint_and_no_more(tmp_path, at_once, caplog):
    steps(tmp_path, Ranks(None, TrainerLostError("rank 1 of 2 is gone", None), None, at_once=at_once))
    assert find(tmp_path).step == 3
    assert sorted(file.parent.name for file in tmp_path.glob("checkpoints/*/run.json")) == [
        "step-00000001",
        "step-00000003",
    ]
    assert "rank 1 of 2 is gone" in caplog.text


def test_a_checkpoint_that_takes_too_long_costs_that_checkpoint_and_no_more(tmp_path, caplog):
    # A rank that stands still while it writes: the update says so, and has it begin anew.
    steps(tmp_path, Ranks(None, CheckpointLateError("not written within 25 s"), None))
    assert find(tmp_path).step == 3
    assert "a checkpoint is missing: not written within 25 s" in caplog.text


def test_those_that_are_missing_are_not_among_those_kept_and_removals_do_not_hold_the_run_up(tmp_path, monkeypatch):
    """A removal of many gigabytes in the event loop would silence everything else for so long."""
    removed_by = set()
    remove = shutil.rmtree

    def noted(path, **options):
        if path.exists():
            removed_by.add(threading.current_thread())
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", noted)
    steps(tmp_path, Ranks(None, None, CheckpointLateError("not written within 25 s"), None), last=4, keep=2)
    kept = sorted(tmp_path.glob("checkpoints/*"))
    assert [folder.name for folder in kept] == ["step-00000002", "step-00000004"]
    assert all((folder / "run.json").is_file() for folder in kept)
    assert removed_by
    assert threading.main_thread() not in removed_by


def test_the_last_checkpoint_is_not_silently_missing(tmp_path):
    with pytest.raises(TrainerLostError, match="rank 0 of 2"):
        steps(tmp_path, Ranks(None, None, TrainerLostError("rank 0 of 2 is gone", None)))
    assert find(tmp_path).step == 2


def test_a_checkpoint_that_cannot_be_written_ends_the_run(tmp_path):
    with pytest.raises(TrainerError, match="No space left"):
        steps(tmp_path, Ranks(TrainerError("No space left on device"), None, None))
