"""The control plane is killed at every write of its journal; each time the next one ends the run as if nothing was."""

import pytest

from dst.script import Op, Script
from dst.world import play


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
    assert lives >= 60 * 1.9, "most of these kills must hit"


def test_a_run_that_is_killed_again_and_again_still_ends_with_the_same_counts() -> None:
    kills = tuple(Op(14.0, "kill", (wait, wait % 2 == 0)) for wait in (3, 0, 5, 1, 4, 2, 7))
    report = play(script(ops=kills, steps=6))
    assert report.lives >= 5
    assert final(report) == final(play(script(ops=(), steps=6)))


def test_a_snapshot_at_every_other_record_gives_the_same_run() -> None:
    for write in range(0, 60, 7):
        report = play(script(kill=(write, True), snapshot_every=2))
        assert final(report)[:2] == (5, 20)
