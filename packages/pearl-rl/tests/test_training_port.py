"""The recovering trainer, over a trainer whose ranks are lost on cue."""

import asyncio
from dataclasses import fields
from pathlib import Path

import pytest

from pearl_executor.ports import MemoryReport, WeightSnapshot
from pearl_rl.training.options import TrainerOptions
from pearl_rl.training.rank_group import TrainerError, TrainerLostError
from pearl_rl.training.results import UpdateMetrics, UpdateResult
from pearl_rl.training_port import RecoveringTrainer
from pearl_state.trajectory import GroupId, Trajectory, TrajectoryId, Turn, WeightSpan


class Ranks:
    """A trainer that fails as it is told."""

    def __init__(self, *errors):
        self.options = TrainerOptions()
        self.version = 5
        self.errors = list(errors)
        self.recovered = []

    async def update(self, batch):
        if self.errors:
            raise self.errors.pop(0)
        self.version += 1
        return UpdateResult(
            version=self.version,
            snapshot_path=Path("/weights"),
            snapshot_bytes=1,
            checksum="c",
            metrics=metrics(),
            duration_s=1.0,
        )

    async def recover(self, checkpoint):
        self.recovered.append(checkpoint)

    async def release(self):
        return MemoryReport(10, 0)

    async def resume(self):
        if self.errors:
            raise self.errors.pop(0)
        return MemoryReport(0, 10)


def metrics():
    return UpdateMetrics(**{item.name: 0.0 for item in fields(UpdateMetrics)})


def trajectories():
    return [
        Trajectory(
            id=TrajectoryId(f"t{number:08d}"),
            group=GroupId("g"),
            task="task",
            turns=(Turn(prompt=[1, 2], response=[3], logprobs=[-1.0], spans=(WeightSpan(5, 1),)),),
            reward=float(number),
            dispatch_version=5,
            started_s=0.0,
            finished_s=1.0,
        )
        for number in range(2)
    ]


def recovering(ranks, restarts=2, checkpoint=None):
    said = []
    port = RecoveringTrainer(
        ranks, max_staleness=1, restarts=restarts, checkpoint=lambda: checkpoint, on_message=said.append
    )
    return port, said


LOST = TrainerLostError("update: rank 1 of 2 is gone: ended by SIGKILL")


def test_an_update_is_made_again_after_ranks_were_lost():
    ranks = Ranks(LOST)
    port, said = recovering(ranks, checkpoint=Path("/run/checkpoints/step-00000004/trainer"))
    update = asyncio.run(port.update(trajectories()))
    assert update.version == port.version == 6
    assert isinstance(update.snapshot, WeightSnapshot)
    assert ranks.recovered == [Path("/run/checkpoints/step-00000004/trainer")]
    assert said == [
        "update: rank 1 of 2 is gone: ended by SIGKILL; training goes on from weights version 5 with the optimizer's "
        "state of step-00000004"
    ]


def test_ranks_that_are_lost_again_and_again_end_the_run():
    port, said = recovering(Ranks(LOST, LOST, LOST))
    with pytest.raises(TrainerLostError, match="rank 1 of 2 is gone"):
        asyncio.run(port.update(trajectories()))
    assert len(said) == 2
    assert "a fresh optimizer" in said[0]


def test_other_failures_are_not_retried():
    ranks = Ranks(TrainerError("update: rank 0: CheckpointError"))
    port, _ = recovering(ranks)
    with pytest.raises(TrainerError):
        asyncio.run(port.update(trajectories()))
    assert ranks.recovered == []


def test_ranks_that_were_lost_while_their_gpus_were_lent_are_there_again_after_the_return():
    ranks = Ranks(LOST)
    port, _ = recovering(ranks)
    assert asyncio.run(port.release()) == MemoryReport(10, 0)
    assert asyncio.run(port.resume()) == MemoryReport(0, 0)
    assert ranks.recovered == [None]
