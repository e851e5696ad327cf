"""A policy of the user's own is named like `module:attribute`, in a scenario and in settings."""

import re
import sys
from pathlib import Path

import pytest

from pearl_planner import find_gpu, find_model, find_profile, planning_inputs
from pearl_planner.elastic import Borrowing
from pearl_planner.policies import Observing
from pearl_planner.switching import SwitchCosts
from pearl_rl.cli.app import app
from pearl_rl.control.forecasting import forecasting_for
from pearl_rl.errors import ExitCode, SettingsError
from pearl_rl.own_policy import PolicyError, own_policy
from pearl_rl.parts import policy as policy_of
from pearl_rl.settings import load_settings
from pearl_rl.simulation.policies import policy_setup
from pearl_rl.simulation.scenario import load_scenario
from pearl_state.decision import SwitchKind

SOURCE = """
from pearl_planner import pearl, decide

class Mine:
    name = "mine"
    expands = False
    borrows = False
    def decide(self, **given):
        return decide(**given)

instance = Mine()

class Silent:
    name, expands, borrows = "silent", True, True
silent = Silent()

class Learning(Mine):
    def __init__(self, seen=()):
        self.seen = seen
    def observing(self, kind, seconds):
        return Learning((*self.seen, (kind, seconds)))
class Keen(Mine):
    def decide(self, *, current, remaining_fraction, steps_ahead, pinned, calibrated, **given):
        return decide(current=current, pinned=pinned, **given)
keen = Keen()
def make():
    return pearl()
number = 3

from pearl_planner.in_step import InStepPolicy
from pearl_planner.policies import ModelPolicy
class InStep(InStepPolicy):
    def decide(self, **asked):
        return super().decide(**asked)
in_step = InStep(name="in-step", between=ModelPolicy(name="between"), keeps_ratio=False)
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
        ("nowhere_at_all:x", "cannot be imported: no module 'nowhere_at_all' in .*call from the folder that holds it"),
        ("mine_for_tests.py:instance", "without .py"),
        ("mine_for_tests:nothing", "has no 'nothing'"),
        ("json:loads", "cannot be made without arguments"),
        ("mine_for_tests:number", "has no name, expands, borrows, decide"),
        ("mine_for_tests:silent", "has no decide"),
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


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise KeyError('turns')", r"fails when it decides: KeyError: 'turns' \(wrong_for_tests\.py, line 6\)"),
        ("return Configuration(prefill=given['budget_workers'])", r"prefill needs decode.*line 6\)"),
        ("return Configuration(colocated=given['budget_workers'])", "answers with Configuration, not with a Decision"),
        ("pass", "answers with NoneType, not with a Decision"),
        ("return decide(**{**given, 'budget_workers': 1})", "answers with 1C where 2 workers are to be placed"),
        (
            "return decide(**{**given, 'pinned': None})",
            r"answers with 2C for 2 workers where a person pinned 4P1D; it must hold what is pinned",
        ),
        (
            "return decide(**{**given, 'pinned': Configuration(prefill=1, decode=1)})",
            r"for 2 workers where a person pinned 4C; it must hold",
        ),
        ("import sys; sys.exit(9)", r"fails when it decides: SystemExit: 9 \(wrong_for_tests\.py, line 6\)"),
    ],
)
def test_a_policy_with_a_mistake_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], body: str, says: str
) -> None:
    source = f"""from pearl_planner import decide
from pearl_state import Configuration
class Wrong:
    name, expands, borrows = "wrong", True, True
    def decide(self, **given):
        {body}
"""
    (tmp_path / "wrong_for_tests.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = "wrong_for_tests:Wrong"
    try:
        for arguments in (
            ["simulate", "paper-segment1", "--policy", f"pearl,{name}"],
            ["what-if", "paper-segment1", "--vary", "run.steps=1,2", "--policy", name],
            ["train", "--set", f"planner.policy={name}", "--run-dir", "run"],
        ):
            assert app(arguments, standalone_mode=False) == ExitCode.CONFIG
            out, err = capsys.readouterr()
            assert out == ""
            assert re.search(says, err)
            assert len(err.splitlines()) == 1
    finally:
        sys.modules.pop("wrong_for_tests", None)
    assert not (tmp_path / "run").exists()


def test_what_a_module_raises_while_it_is_imported_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torn_for_tests.py").write_text("policy = (\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(PolicyError, match=r"cannot be imported: SyntaxError: '\(' was never closed"):
        own_policy("torn_for_tests:policy")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import sys; sys.exit(3)", r"cannot be imported: SystemExit: 3 \(odd_for_tests\.py, line 1\)"),
        (
            "class P(Q):\n    def __init__(self): raise SystemExit('no')",
            "cannot be made without arguments: SystemExit: no",
        ),
        ("class P(Q):\n    name = 3", "has name = 3, which is no str; docs/policies.md says what each is"),
        ("class P(Q):\n    expands = 'yes'", "has expands = 'yes', which is no bool"),
        (
            "class P(Q):\n    @property\n    def borrows(self): raise OSError('disk')",
            r"fails when it is asked what it is: OSError: disk \(odd_for_tests\.py",
        ),
    ],
)
def test_a_module_that_does_odd_things_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, says: str
) -> None:
    before = "" if source.startswith("import") else "class Q:\n    name, expands, borrows = 'q', True, True\n"
    (tmp_path / "odd_for_tests.py").write_text(f"{before}{source}\n    decide = None\n" if before else source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        with pytest.raises(PolicyError, match=says):
            own_policy("odd_for_tests:P")
    finally:
        sys.modules.pop("odd_for_tests", None)


def test_a_policy_gets_every_argument_however_it_is_asked(module: str) -> None:
    asked = planning_inputs(find_profile("swe-32k"), find_model("qwen3-8b"), find_gpu("h800"), tensor_parallel=2)
    policy = own_policy(f"{module}:keen")
    decision = policy.decide(workload=asked.workload, platform=asked.platform, budget_workers=3)
    assert decision.selected.workers == 3


def test_one_that_answers_forecasts_keeps_being_asked_for_them(module: str) -> None:
    """Whether a run forecasts at all is seen by the policy's kind."""
    assert forecasting_for(own_policy(f"{module}:in_step"), 10.0) is not None
    assert forecasting_for(own_policy(f"{module}:instance"), 10.0) is None


def test_a_policy_that_learns_from_switches_still_does(module: str) -> None:
    policy = own_policy(f"{module}:Learning")
    assert isinstance(policy, Observing)
    learned = policy.observing(SwitchKind.FLIP, 2.0).observing(SwitchKind.RELAUNCH, 9.0)
    assert isinstance(learned, Observing)
    assert learned.policy.seen == ((SwitchKind.FLIP, 2.0), (SwitchKind.RELAUNCH, 9.0))
    assert not isinstance(own_policy(f"{module}:instance"), Observing)
