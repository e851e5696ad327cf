"""Each planted bug is caught within a few hundred scripts, and none is caught where nothing is planted."""

import pytest

from dst.explore import failure
from dst.plants import PLANTS
from dst.script import draw

MOST_SCRIPTS = 500


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_caught(plant, monkeypatch, record_property) -> None:
    plant(monkeypatch.setattr)
    for seed in range(MOST_SCRIPTS):
        error = failure(draw(seed))
        if error is not None:
            record_property("caught", f"seed {seed}: {type(error).__name__}: {error}")
            return
    pytest.fail(f"{MOST_SCRIPTS} scripts do not notice: {plant.__doc__}")


def test_without_a_plant_the_same_scripts_pass() -> None:
    assert [seed for seed in range(60) if failure(draw(seed)) is not None] == []


def test_at_least_eight_bugs_are_planted() -> None:
    assert len(PLANTS) >= 8
