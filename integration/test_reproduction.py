"""The page of reproduced figures says what the simulator says, and explains each miss."""

import json
import runpy
from pathlib import Path

import pytest

from pearl_rl.simulation.experiments.bench import Bench
from pearl_rl.simulation.experiments.registry import EXPERIMENTS, reproduce

RENDER = runpy.run_path(str(Path(__file__).parent / "reproduction" / "render.py"))


def test_the_page_is_made_of_its_rows_and_each_miss_has_a_cause() -> None:
    assert RENDER["PAGE"].read_text(encoding="utf-8") == RENDER["document"]()


def test_a_miss_without_a_cause_is_refused() -> None:
    row = {"id": "F0", "name": "x", "use": "predict", "paper": 1, "ours": 2, "unit": "ratio", "error": 1.0, "ok": False}
    with pytest.raises(ValueError, match=r"misses without a cause: .*F0: x"):
        RENDER["page"]([row], [])


def test_most_rows_of_tiderl_are_met_and_its_goodput_is_asked_on_each_segment_and_bound() -> None:
    rows = RENDER["rows"]("tiderl.json")
    assert sum(row["ok"] for row in rows) >= 0.75 * len(rows)
    assert sum("tokens trained a second" in row["name"] for row in rows) == 6


def test_all_calibrated_and_most_predicted_rows_are_met() -> None:
    rows = RENDER["rows"]()
    assert {row["id"] for row in rows} == set(EXPERIMENTS)
    calibrated = [row["ok"] for row in rows if row["use"] == "calibrate"]
    predicted = [row["ok"] for row in rows if row["use"] == "predict"]
    assert all(calibrated)
    assert len(predicted) >= 20
    assert sum(predicted) >= 0.5 * len(predicted)


def test_rows_that_are_cheap_to_compute_are_what_the_simulator_says_now() -> None:
    now = [json.loads(json.dumps(row.to_json())) for row in reproduce(["F2b"], Bench())]
    assert now == [row for row in RENDER["rows"]() if row["id"] == "F2b"]
