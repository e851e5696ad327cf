"""Reproduction rows: tolerances as stated, every experiment yields rows for what it ran, the command prints them."""

import json
from typing import Any

import pytest

from pearl_rl.cli.app import app
from pearl_rl.simulation.experiments import registry
from pearl_rl.simulation.experiments.bench import BatchJob, Bench, ClusterJob, variant
from pearl_rl.simulation.experiments.effort import QUICK
from pearl_rl.simulation.experiments.figures import Figure7
from pearl_rl.simulation.experiments.registry import EXPERIMENTS, paper_rows, reproduce
from pearl_rl.simulation.experiments.tables import Table2, usual_choice
from pearl_rl.simulation.experiments.targets import TargetRow, summary
from pearl_rl.simulation.outcome import SimulationResult


def row(use="predict", paper=10.0, ours=10.0, unit="points", **options) -> TargetRow:
    return TargetRow(id="F0", name="x", use=use, paper=paper, ours=ours, unit=unit, **options)


@pytest.mark.parametrize(
    ("case", "ok"),
    [
        (row(paper=5.0, ours=14.9), True),
        (row(paper=5.0, ours=15.1), False),
        (row(paper=5.0, ours=-1.0), False),
        (row(paper=-6.1, ours=-0.1), True),
        (row(paper=2.0, ours=2.29, unit="ratio"), True),
        (row(paper=2.0, ours=2.31, unit="ratio"), False),
        (row("calibrate", paper=100.0, ours=104.9, unit="value"), True),
        (row("calibrate", paper=100.0, ours=105.1, unit="value"), False),
        (row("calibrate", paper=10.0, ours=14.9), True),
        (row("calibrate", paper=10.0, ours=15.1), False),
        (row(paper="2P3D", ours="2P3D", unit="text"), True),
        (row(paper="2P3D", ours="3P2D", unit="text"), False),
        (row(paper=1.0, ours=1.01, unit="ratio", at_least=True), True),
        (row(paper=1.0, ours=0.99, unit="ratio", at_least=True), False),
        (row(paper=1.0, ours=1.0, unit="ratio", at_least=True), False),
        (row(paper=1.0, ours=1.0, unit="ratio", at_least=True, noise=0.0), True),
        (row(paper=1.0, ours=0.996, unit="ratio", at_least=True, noise=0.005), True),
        (row(paper=1.0, ours=0.994, unit="ratio", at_least=True, noise=0.005), False),
        (row(paper=0.4, ours=-9.0, unit="within"), True),
        (row(paper=0.4, ours=10.5, unit="within"), False),
    ],
)
def test_a_row_is_met_within_its_tolerance_and_with_the_papers_sign(case, ok) -> None:
    assert case.ok is ok


def test_errors_are_relative_or_in_points() -> None:
    assert row(paper=10.0, ours=12.0).error == 2.0
    assert row(paper=10.0, ours=12.0, unit="ratio").error == pytest.approx(0.2)
    assert row(paper="a", ours="b", unit="text").error is None
    assert summary([row(), row("calibrate", ours=90.0)]) == "calibrate: 0 of 1 met, predict: 1 of 1 met"


def test_a_bench_runs_each_job_once_and_in_any_number_of_processes_the_same() -> None:
    scenario = variant(
        {"availability": {"trace": "none"}},
        rollout={"batch": 8, "group_size": 4},
        run={"steps": 1},
        workload={"max_turns": 4},
    )
    jobs = [ClusterJob(scenario), BatchJob(scenario, "2C", 1), BatchJob(scenario, "1P1D", 1)]
    done = []
    alone, together = Bench(1, lambda *of: done.append(of)), Bench(2)
    alone.prepare([*jobs, *jobs])
    assert done == [(1, 3), (2, 3), (3, 3)]
    together.prepare(jobs)
    assert together.batches(jobs[1]) == alone.batches(jobs[1])
    assert together.cluster(scenario).to_json() == alone.cluster(scenario).to_json()


class Recorded(Bench):
    """Gives made-up results of the right kind, so that rows can be looked at without running anything for long."""

    def cluster(self, scenario) -> SimulationResult:
        self.asked.add(ClusterJob(scenario))
        return self.result_of_all

    def batches(self, job):
        self.asked.add(job)
        return self.batch

    def result(self, job):
        self.asked.add(job)
        return self.result_of_all


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    bench = Recorded()
    bench.asked = set()
    scenario = variant({}, policy={"name": "pearl-ungated"}, run={"duration_s": 1500.0})
    bench.result_of_all = Bench().cluster(scenario)
    bench.batch = Bench().batches(BatchJob(scenario, "2C", 1))
    return bench


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_asks_for_what_it_reads_and_makes_rows(name, recorded) -> None:
    experiment = EXPERIMENTS[name](QUICK)
    recorded.asked.clear()
    rows = list(experiment.rows(recorded))
    assert recorded.asked <= set(experiment.jobs())
    assert rows
    assert all(r.id == name and r.use in ("calibrate", "predict") for r in rows)
    assert len({r.name for r in rows}) == len(rows)
    json.dumps([r.to_json() for r in rows], allow_nan=False)


def other_paper(bench, *, quick):
    assert quick
    yield row(ours=bench.result(BatchJob(variant({}, rollout={"batch": 4, "group_size": 4}), "1C", 1)).makespan_s)


def test_a_target_of_another_paper_is_one_function_and_no_part_of_all(monkeypatch) -> None:
    monkeypatch.setattr(registry, "OTHER_PAPERS", {"else": "somewhere:rows"})
    monkeypatch.setattr(registry, "paper_rows", lambda _name: other_paper)
    monkeypatch.setattr(registry, "EXPERIMENTS", {})
    assert [r.id for r in reproduce(["ELSE"], Bench(), QUICK)] == ["F0"]
    assert reproduce(["all"], Bench(), QUICK) == []


def test_every_target_of_another_paper_can_be_imported() -> None:
    assert registry.OTHER_PAPERS
    assert all(callable(paper_rows(name)) for name in registry.OTHER_PAPERS)


def test_reconfigurations_take_what_table_3_says() -> None:
    found = reproduce(["t3"], Bench())
    assert found
    assert all(row.ok for row in found)


def test_the_usual_choice_is_the_most_frequent_one_of_that_size(recorded) -> None:
    result = recorded.result_of_all
    sizes = {
        sum(map(int, d.selected.replace("P", " ").replace("D", " ").replace("C", " ").split()))
        for d in result.decisions
        if d.gate is None
    }
    assert sizes
    for size in sizes:
        assert usual_choice(result, size)
    assert usual_choice(result, 10_000) == ""


def test_the_command_prints_rows_and_refuses_unknown_targets(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["reproduce", "R", "F2b", "--quick", "--jobs", "1", "--json"])
    assert ended.value.code == 0
    rows = json.loads(capsys.readouterr().out)
    assert {r["id"] for r in rows} == {"R", "F2b"}
    assert set(rows[0]) >= {"id", "name", "use", "paper", "ours", "error", "ok"}
    with pytest.raises(SystemExit):
        app(["reproduce", "R", "--quick"])
    assert "calibrate" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        app(["reproduce", "F99"])
    assert ended.value.code == 2
    assert "no target 'F99'" in capsys.readouterr().err


def test_as_many_processes_as_there_are_cores_to_use_simulate_unless_told_otherwise(capsys, monkeypatch) -> None:
    asked: list[int] = []

    def bench(jobs: int, *more: Any, **options: Any) -> Bench:
        asked.append(jobs)
        return Bench(1, *more, **options)

    monkeypatch.setattr("pearl_rl.cli.doctor.usable_cores", lambda: 2.5)
    monkeypatch.setattr("pearl_rl.simulation.experiments.bench.Bench", bench)
    for options in ([], ["--jobs", "7"]):
        with pytest.raises(SystemExit):
            app(["reproduce", "F2b", "--quick", *options])
    assert asked == [2, 7]
    with pytest.raises(SystemExit) as ended:
        app(["reproduce", "F2b", "--jobs", "0"])
    assert ended.value.code == 2
    assert "--jobs 0: must be from 1 to 256" in capsys.readouterr().err


def test_what_two_targets_ask_for_is_simulated_once() -> None:
    both = {*Table2().jobs()} & {*Figure7().jobs()}
    assert {job.scenario.policy.name for job in both if isinstance(job, ClusterJob)} == {"pearl-ungated"}


@pytest.mark.parametrize("name", ["history-edited", "roll-sglang"])
def test_another_parameter_set_calibrated_on_the_same_rows_meets_them(name, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["reproduce", "F2b", "--quick", "--parameters", name, "--json"])
    assert ended.value.code == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["ok"] for row in rows] == [True] * 3


def test_a_parameter_set_that_is_none_is_one_clear_line(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["reproduce", "F2b", "--parameters", "papr"])
    assert ended.value.code == 2
    assert (
        "parameters = papr: no such parameter set; known are paper, history-edited, roll-sglang"
        in capsys.readouterr().err
    )
