"""`train.ref_actor = "auto"`: what an update weighs in each mode, what it cost, and where people see the choice."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pearl_planner.ref_actor import RefActorMode
from pearl_planner.update_mode import PassCosts, UpdateLoad
from pearl_rl.encoding import encode
from pearl_rl.live.follower import Follower
from pearl_rl.presentation.update_mode import update_mode_line
from pearl_rl.report.page import body
from pearl_rl.report.run_record import read_run
from pearl_rl.report.timeline import Detail, timeline
from pearl_rl.run_folder import RunFolder, read_lines
from pearl_rl.settings import load_settings
from pearl_rl.training.batch import TrainBatch
from pearl_rl.training.options import LossOptions, RefActor, TrainerOptions
from pearl_rl.training.rank_group import TrainerLostError
from pearl_rl.training.ref_actor_auto import AutoRefActor, UpdateModeRecord, load_of, measured_costs
from pearl_rl.training.results import RankTimes, UpdateMetrics, UpdateResult
from pearl_rl.training.testing import random_batch
from pearl_state.trajectory import GroupId, Trajectory, TrajectoryId, Turn, WeightSpan

OPTIONS = TrainerOptions(
    loss=LossOptions(kl_coefficient=0.1),
    minibatches=2,
    epochs=3,
    micro_batch_tokens=12,
    ref_actor=RefActor.COLOCATED,
)


def sequence(number: int, group: str, tokens: int) -> Trajectory:
    turn = Turn(prompt=[1] * (tokens - 1), response=[2], logprobs=[-1.0], spans=(WeightSpan(0, 1),))
    return Trajectory(
        id=TrajectoryId(f"t{number:08d}"),
        group=GroupId(group),
        task="task",
        turns=(turn,),
        reward=float(number),
        dispatch_version=0,
        started_s=0.0,
        finished_s=1.0,
    )


BATCH = TrainBatch.build([sequence(0, "a", 10), sequence(1, "a", 6), sequence(2, "b", 4), sequence(3, "b", 4)], 0)
"""An optimizer step for each group."""


def test_a_load_counts_the_largest_of_the_micro_batches_that_ranks_pass_side_by_side() -> None:
    """Two actors: 10 beside 6, then 4 beside 4. One: 10, 6 (20 > 12 together), then 2 × 4, so 1.5 a step: as two."""
    assert load_of(BATCH, OPTIONS, 2) == UpdateLoad(optimizer_steps=6, ready_s=(0.0, 0.0), micro_batch_tokens=7.0)
    assert load_of(BATCH, OPTIONS, 1) == UpdateLoad(optimizer_steps=6, ready_s=(0.0, 0.0), micro_batch_tokens=6.0)


def test_colocated_costs_are_means_over_ranks_and_the_rest_of_asking_is_swaps() -> None:
    """Three epochs of 14 tokens; 12 swaps."""
    times = (RankTimes(10.0, 2.0, 5.0), RankTimes(12.0, 4.0, 5.0))
    assert measured_costs(BATCH, OPTIONS, times, {}) == PassCosts(
        reference_s=pytest.approx(3 / 42), actor_s=pytest.approx(6 / 42), swap_s=pytest.approx(2 / 12)
    )


def test_decoupled_costs_are_of_who_does_the_work_and_swaps_stay_known() -> None:
    options = replace(OPTIONS, ref_actor=RefActor.DECOUPLED, reference_rank=True)
    times = (RankTimes(20.0, 0.0, 2.0), RankTimes(0.0, 9.0, 0.0))
    known = {RefActorMode.COLOCATED: PassCosts(reference_s=1.0, actor_s=1.0, swap_s=0.25)}
    assert measured_costs(BATCH, options, times, known) == PassCosts(
        reference_s=pytest.approx(9 / 72), actor_s=pytest.approx(18 / 72), swap_s=0.25
    )


class Ranks:
    """Ranks whose times are said."""

    def __init__(self, times: tuple[RankTimes, ...], forming_s: float = 1.0) -> None:
        self.options = OPTIONS
        self.timed = False
        self.forming_s = forming_s
        self.formed: list[bool] = []
        self.fails = 0
        self.version = 0
        self._times = times

    @property
    def ranks(self) -> int:
        return len(self._times)

    def slow(self) -> None:
        self._times = tuple(replace(rank, update_s=2 * rank.update_s) for rank in self._times)

    async def form_anew(self, *, reference_rank: bool) -> None:
        self.formed.append(reference_rank)
        self.options = replace(self.options, reference_rank=reference_rank)

    async def update(self, batch: TrainBatch) -> UpdateResult:
        assert self.timed
        if self.fails:
            self.fails -= 1
            raise TrainerLostError("update: rank 1 of 2 is gone")
        self.version += 1
        metrics = UpdateMetrics(**dict.fromkeys(UpdateMetrics.__dataclass_fields__, 0.0))  # type: ignore[arg-type]
        return UpdateResult(
            version=self.version,
            snapshot_path=Path("/weights"),
            snapshot_bytes=1,
            checksum="c",
            metrics=metrics,
            duration_s=1.0,
            times=self._times,
        )


def updates(ranks: Ranks, count: int) -> list[UpdateModeRecord]:
    records: list[UpdateModeRecord] = []

    async def make() -> None:
        auto = AutoRefActor(ranks, records.append)
        for _ in range(count):
            await auto.update(random_batch(1))

    asyncio.run(make())
    return records


DEAR = (RankTimes(100.0, 1.0, 95.0), RankTimes(100.0, 1.0, 95.0))
"""Of 100 s each, 94 are swaps."""


def test_nothing_is_decided_by_the_first_update_of_the_ranks() -> None:
    ranks = Ranks(DEAR)
    records = updates(ranks, 3)
    assert [list(record.costs) for record in records] == [[], [], [RefActorMode.COLOCATED]]
    assert [record.decision.changes for record in records] == [False, False, True]
    assert ranks.formed == [True]
    assert records[2].decision.mode is RefActorMode.DECOUPLED
    assert records[2].measured_s == 100.0


def test_the_first_update_of_ranks_that_took_the_place_of_lost_ones_teaches_nothing() -> None:
    ranks, records = Ranks(DEAR, forming_s=1e4), []
    auto = AutoRefActor(ranks, records.append)

    async def make() -> None:
        for _ in range(2):
            await auto.update(random_batch(1))
        ranks.fails = 1
        with pytest.raises(TrainerLostError):
            await auto.update(random_batch(1))
        ranks.slow()
        await auto.update(random_batch(1))
        await auto.update(random_batch(1))
        await auto.update(random_batch(1))

    asyncio.run(make())
    assert [record.version for record in records] == [1, 2, 3, 4, 5]
    known = [record.costs.get(RefActorMode.COLOCATED) for record in records]
    assert known[2] is not None
    assert known[3] == known[2]
    assert known[4] is not None
    assert known[4].actor_s > known[2].actor_s


def test_ranks_stay_while_forming_them_anew_costs_more_than_it_saved() -> None:
    ranks = Ranks(DEAR, forming_s=1e4)
    records = updates(ranks, 5)
    assert ranks.formed == []
    behind_s = [record.decision.behind_s for record in records]
    assert behind_s[:2] == [0.0, 0.0]
    assert 0.0 < behind_s[2] < behind_s[3] < behind_s[4] == pytest.approx(3 * behind_s[2])


def test_one_training_gpu_is_colocated_for_good() -> None:
    records = updates(Ranks(DEAR[:1], forming_s=0.0), 4)
    assert {record.decision.mode for record in records} == {RefActorMode.COLOCATED}
    assert records[-1].decision.decoupled_s is None
    assert "one GPU has no other mode" in update_mode_line(encode(records[-1]))


def test_a_line_says_what_either_mode_was_expected_to_take() -> None:
    first, _, changed = updates(Ranks(DEAR), 3)
    assert update_mode_line(encode(first)) == (
        "ref-actor stays colocated for version 1 (no measurement yet); took 1 min 40 s"
    )
    words = update_mode_line(encode(changed))
    assert words.startswith("ref-actor changes to decoupled for version 3 (colocated 1 min 40 s, decoupled ")
    assert "> 1.0 s); took 1 min 40 s" in words


def recorded(tmp_path: Path) -> tuple[Path, list[Mapping[str, Any]]]:
    with RunFolder.create(load_settings(None, []), tmp_path / "run") as folder:
        for number, record in enumerate(updates(Ranks(DEAR), 4)):
            folder.record_update_mode(record, now_s=float(number))
    return tmp_path / "run", list(read_lines(tmp_path / "run" / "update_modes.jsonl"))


def test_the_choice_is_kept_and_shown_in_report_timeline_and_status(tmp_path: Path) -> None:
    run, lines = recorded(tmp_path)
    assert [line["decision"]["mode"] for line in lines] == ["colocated", "colocated", "decoupled", "decoupled"]
    page = body(read_run(run))
    assert "Reference and actor" in page
    assert page.count("(formed anew)") == 1
    marks = [event["name"] for event in timeline(run, Detail.CONTROL) if event["ph"] == "i"]
    assert marks == ["update colocated"] * 2 + ["update decoupled"] * 2
    follower = Follower(run)
    follower.refresh()
    assert [news["at_s"] for news in follower.view()["news"]] == [2.0]


def test_a_run_that_leaves_no_choice_has_neither_file_nor_section(tmp_path: Path) -> None:
    with RunFolder.create(load_settings(None, []), tmp_path / "run"):
        pass
    assert not (tmp_path / "run" / "update_modes.jsonl").exists()
    assert "Reference and actor" not in body(read_run(tmp_path / "run"))
