"""The control plane is killed at every write of its journal; each time the next one ends the run as if nothing was."""

from pathlib import Path

import pytest

from dst.kills import audit
from dst.script import Op, Script
from dst.world import play
from pearl_rl.journal.journal import Journal
from pearl_rl.journal.storage import FolderStorage
from pearl_rl.rollout.ledger import (
    BatchTaken,
    GroupOpened,
    RolloutRecord,
    RolloutResumed,
    SampleCompleted,
    SampleDispatched,
    SamplesRejected,
    StepTrained,
    encode_record,
)
from pearl_state.trajectory import GroupId, Trajectory, TrajectoryId


def script(kill=None, **changes) -> Script:
    ops = [Op(4.0, "offer", ([10, 11],)), Op(8.0, "crash", (2, True)), Op(9.0, "reclaim", ([11], 5.0))]
    if kill is not None:
        ops.insert(0, Op(0.0, "kill", kill))
    values = {
        "seed": 0,
        "borrowing": "ungated",
        "gpus_per_worker": 1,
        "steps": 5,
        "staleness": 1,
        "max_restarts": 1000,
        "checkpoint_every": 1,
        "ops": tuple(ops),
    }
    return Script(**{**values, **changes})


def final(report):
    """Versions made, samples used, played for it (but for those that failed), too old, lost."""
    outcome, counts = report.outcome, report.outcome.counts
    return outcome.version, counts.used, counts.dispatched - counts.failed, counts.rejected, counts.lost


@pytest.mark.parametrize("checkpoint_every", [1, 2])
@pytest.mark.parametrize("torn", [False, True])
def test_a_kill_at_any_of_the_first_sixty_writes_changes_no_final_count(torn: bool, checkpoint_every: int) -> None:
    whole = play(script(checkpoint_every=checkpoint_every))
    lives = 0
    for write in range(60):
        report = play(script(kill=(write, torn), checkpoint_every=checkpoint_every))
        assert final(report) == final(whole), f"killed at write {write}"
        lives += report.lives
    assert lives >= 60 * 1.7, "most of these kills must hit"


def test_a_run_that_is_killed_again_and_again_still_ends_with_the_same_counts() -> None:
    kills = tuple(Op(14.0, "kill", (wait, wait % 2 == 0)) for wait in (3, 0, 5, 1, 4, 2, 7))
    report = play(script(ops=kills, steps=6))
    assert report.lives >= 5
    assert final(report) == final(play(script(ops=(), steps=6)))


def test_a_snapshot_at_every_other_record_gives_the_same_run() -> None:
    for write in range(0, 60, 7):
        report = play(script(kill=(write, True), snapshot_every=2))
        assert final(report)[:2] == (5, 20)


def journalled(folder: Path, *records: RolloutRecord) -> Path:
    """A run folder whose journal holds these; the rollout's own fold is not asked."""
    storage = FolderStorage(folder / "journal")
    journal = Journal(storage)
    journal.snapshot({})
    for record in records:
        journal.append("rollout", encode_record(record))
    journal.commit_now()
    storage.close()
    return folder


def dispatched(name: str, group: str) -> SampleDispatched:
    return SampleDispatched(group=GroupId(group), trajectory=TrajectoryId(name), number=int(name[1:]), version=0)


def completed(name: str, group: str) -> SampleCompleted:
    trajectory = Trajectory(
        id=TrajectoryId(name),
        group=GroupId(group),
        task="t",
        turns=(),
        reward=0.0,
        dispatch_version=0,
        started_s=0.0,
        finished_s=0.0,
    )
    return SampleCompleted(trajectory=trajectory, version=0)


def test_the_audit_of_real_runs_counts_what_was_trained_from_the_records_alone(tmp_path) -> None:
    opened = GroupOpened(group=GroupId("g0"), step=1, number=0)
    played = (dispatched("t0", "g0"), dispatched("t1", "g0"), completed("t0", "g0"), completed("t1", "g0"))
    begin = (opened, *played)
    taken = BatchTaken(step=1, groups=(GroupId("g0"),))
    # An update that published nothing is undone; one that did counts, whether or not the journal still heard of it.
    undone = journalled(tmp_path / "a", *begin, taken, RolloutResumed(completed=0), taken, StepTrained(step=1))
    assert audit(undone).trained == {"t0": [1], "t1": [1]}
    unheard = journalled(tmp_path / "b", *begin, taken, RolloutResumed(completed=1))
    assert audit(unheard).trained == {"t0": [1], "t1": [1]}
    again = BatchTaken(step=2, groups=(GroupId("g0"),))
    twice = journalled(tmp_path / "c", *begin, taken, StepTrained(step=1), again, StepTrained(step=2))
    assert audit(twice).trained == {"t0": [1, 2], "t1": [1, 2]}
    # A sample that was too old is no more among those trained on; the one in its place is.
    replaced = (*begin, SamplesRejected(trajectories=(TrajectoryId("t0"),)), dispatched("t2", "g0"))
    old = journalled(tmp_path / "d", *replaced, completed("t2", "g0"), taken, StepTrained(step=1))
    assert audit(old).trained == {"t1": [1], "t2": [1]}
    assert (audit(old).samples, audit(old).rejected, audit(old).groups) == (2, 1, 1)
