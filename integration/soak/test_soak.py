"""A small soak holds, and a soak finds what it is there to find."""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from soak import Plan, Soak

SMALL = {
    "minutes": 0.2,
    "workers": 24,
    "streams": 8,
    "shelves": 1,
    "failing_per_minute": 2.0,
    "step_s": 0.05,
    "start_s": 8.0,
}


def play(soak):
    return asyncio.run(soak.run())


def test_a_small_cluster_keeps_serving_while_workers_die_and_hang(tmp_path):
    report = play(Soak(Plan(**SMALL, folder=tmp_path)))
    assert report["problems"] == []
    assert report["killed"] > 0
    # One that fails while it starts is noticed by its group.
    assert report["failures_noticed"] + report["groups_failed"] >= report["killed"] + report["hung"]
    assert report["turns"] > 50
    assert report["tasks_after"] <= report["tasks_before"]


class Forgetful(Soak):
    """Expects other tokens than the workers say, and leaves a task behind."""

    def _continuation(self, context):
        self.left = asyncio.ensure_future(asyncio.sleep(60.0))
        return super()._continuation(context)[:-1]


def test_wrong_tokens_and_tasks_that_are_left_are_found(tmp_path):
    report = play(Forgetful(Plan(**{**SMALL, "minutes": 0.05, "failing_per_minute": 0.01}, folder=tmp_path)))
    problems = " ".join(report["problems"])
    assert "expected" in problems
    assert "tasks more than before" in problems
