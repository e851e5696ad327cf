"""The rows of `reproduce prorsa`: what is compared with what, whatever the simulations say."""

import json

import pytest

from pearl_rl.simulation.experiments.prorsa import RanksJob, RolloutSummary, _from_equal, _in_range, agent_job, rows
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
            trajectory_s=5e5 / tokens_per_s,
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
    (best,) = (row for name, row in found.items() if name.startswith(f"{where}: over the best static ratio, 4P4D"))
    assert best.ours == pytest.approx(1200 / 1150)
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


def test_to_be_as_fast_is_within_a_range_that_begins_at_one_and_noise_is_what_seeds_differ_by() -> None:
    assert _from_equal("x", 1.44, [1.0]).ok
    assert not _from_equal("x", 1.44, [0.999]).ok, "of one seed no noise is known"
    row = _from_equal("x", 1.44, [1.01, 0.985, 1.0])
    assert row.noise == pytest.approx(0.00726, abs=1e-4)
    assert row.ours == pytest.approx(0.99833, abs=1e-4)
    assert row.ok
    assert "standard error of 3 seeds, 0.007" in row.name
    assert not _from_equal("x", 1.44, [0.96, 0.97, 0.98]).ok


def test_as_many_trajectories_are_in_flight_whatever_the_staleness() -> None:
    """16 on each of 128 attention ranks, in whole groups of 32."""
    for staleness in (0, 2, 8):
        rollout = agent_job("coding agent", staleness, "roll").scenario.rollout
        assert rollout.group_size == 32
        assert abs(rollout.batch * (staleness + 1) - 2048) <= 16 * (staleness + 1)
