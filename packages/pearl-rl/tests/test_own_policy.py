"""A policy of the user's own is named like `module:attribute`, in a scenario and in settings."""

import sys
from pathlib import Path

import pytest

from pearl_planner.elastic import Borrowing
from pearl_planner.switching import SwitchCosts
from pearl_rl.errors import SettingsError
from pearl_rl.own_policy import PolicyError, own_policy
from pearl_rl.parts import policy as policy_of
from pearl_rl.settings import load_settings
from pearl_rl.simulation.policies import policy_setup
from pearl_rl.simulation.scenario import load_scenario

SOURCE = """
from pearl_planner import pearl, decide

class Mine:
    name = "mine"
    expands = False
    borrows = False
    def decide(self, **given):
        return decide(**given)

instance = Mine()
def make():
    return pearl()
number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine_for_tests.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "mine_for_tests"
    sys.modules.pop("mine_for_tests", None)


@pytest.mark.parametrize(("attribute", "name"), [("Mine", "mine"), ("instance", "mine"), ("make", "pearl")])
def test_an_instance_a_class_or_a_function_from_the_current_folder(module: str, attribute: str, name: str) -> None:
    assert own_policy(f"{module}:{attribute}").name == name


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere_at_all:x", "cannot be imported"),
        ("mine_for_tests:nothing", "has no 'nothing'"),
        ("json:loads", "cannot be made without arguments"),
        ("mine_for_tests:number", "cannot be made without arguments"),
        ("collections:OrderedDict", "has no name, expands, borrows, decide"),
        ("plain", "not like package.module:attribute"),
    ],
)
def test_what_is_no_policy_says_which_part_is_missing(module: str, name: str, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        own_policy(name)


def test_a_scenario_takes_it_with_its_own_wishes(module: str) -> None:
    setup = policy_setup(load_scenario("paper-segment1", [f"policy.name={module}:instance"]), SwitchCosts(), [])
    assert setup.policy.name == "mine"
    assert setup.borrowing is Borrowing.OFF
    assert setup.preemptible_gpus == 0


def test_a_job_takes_it(module: str) -> None:
    settings = load_settings(None, [f"planner.policy={module}:instance"]).settings
    assert policy_of(settings).name == "mine"


@pytest.mark.parametrize("text", ["perl", "a:b:c", ":x", "x:", "../x:y"])
def test_another_name_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(SettingsError, match=r"must be 'pearl'.*or a policy of your own, module:attribute"):
        load_settings(None, [f"planner.policy={text}"])
