"""The rows of `reproduce prorsa`: what is compared with what, whatever the simulations say."""

import json

import pytest

from pearl_rl.simulation.experiments.prorsa import RanksJob, RolloutSummary, _in_range, rows
from pearl_rl.simulation.experiments.targets import TargetRow


class Answers:
    """A bench that was told what each simulation gives."""

    def __init__(self) -> None:
        self.asked: list[RanksJob] = []

    def prepare(self, jobs: list[RanksJob]) -> None:
        self.asked = list(jobs)

    def result(self, job: RanksJob) -> RolloutSummary:
        assert job in self.asked, "every simulation is prepared with all others"
        policy = job.scenario.policy
        speed = {"roll": 1000.0, "prorsa": 1200.0, "pearl": 1100.0, "pearl+prorsa": 1260.0}
        static = {"3P5D": 900.0, "4P4D": 1150.0, "5P3D": 1100.0, "6P2D": 800.0}
        tokens_per_s = static[policy.configuration] if policy.configuration else speed[policy.name]
        return RolloutSummary(
            rollout_s=1e6 / tokens_per_s,
            tokens_per_s=tokens_per_s,
            configuration="8C" if policy.name in ("roll", "pearl+prorsa") else "4P4D",
            prefill_wape=0.10 if policy.name == "prorsa" else None,
            admission_wape=0.15 if policy.name == "prorsa" else None,
            switches=0,
            lost=0,
        )


def test_each_row_compares_what_it_says() -> None:
    found = {row.name: row for row in rows(Answers(), quick=True)}  # type: ignore[arg-type]
    where = "coding agent, staleness 0"
    assert found[f"{where}: over colocation (1.11 to 4.05)"].ours == pytest.approx(1.2)
    assert found[f"{where}: over colocation (1.11 to 4.05)"].ok
    assert found[f"{where}: over the best static ratio (1.0 to 1.44)"].ours == pytest.approx(1200 / 1150)
    assert found[f"{where}: WAPE of prefill forecasts, %"].ok
    assert not found[f"{where}: WAPE of admission forecasts, %"].ok
    assert found["math: Prorsa's time over colocation's"].ours == pytest.approx(1000 / 1200)
    assert found["math: the composition colocates where disaggregation loses"].ok
    assert found["segment1: pearl+prorsa over the better of its parts"].ours == pytest.approx(1.05)
    assert not found["pearl+prorsa over the better of its parts, best segment"].ok
    for row in found.values():
        document = json.loads(json.dumps(row.to_json()))
        assert {"id", "name", "use", "paper", "ours", "error", "ok"} <= document.keys()
        assert document["id"] == "prorsa"


def test_a_bound_from_above_is_met_below_and_at_it() -> None:
    def row(ours: float) -> TargetRow:
        return TargetRow(id="x", name="x", use="predict", paper=14.37, ours=ours, at_most=True)

    assert row(14.37).ok
    assert row(3.0).ok
    assert not row(14.38).ok


def test_a_speed_up_below_the_papers_range_is_a_miss_however_near() -> None:
    assert _in_range("x", 1.11, 4.05, 1.2).ok
    assert not _in_range("x", 1.11, 4.05, 1.08).ok
    assert not _in_range("x", 1.0, 1.44, 0.99).ok
    assert _in_range("x", 1.0, 1.44, 1.01).ok
