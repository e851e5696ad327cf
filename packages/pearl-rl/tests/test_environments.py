"""Environments: the bisect game and the calculator play by their rules, and the registry explains what it refuses."""

import asyncio
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl_executor.virtual_time import run_virtual
from pearl_rl.rollout.environments.arguments import read_options
from pearl_rl.rollout.environments.bisect_environment import BisectArguments, BisectSuite
from pearl_rl.rollout.environments.bisect_game import (
    REPORTS,
    BisectGame,
    BisectSettings,
    command,
    demonstrations,
    make_task,
    vocabulary,
)
from pearl_rl.rollout.environments.calculator import CalculatorArguments, CalculatorSuite
from pearl_rl.rollout.environments.protocol import (
    Environment,
    EnvironmentFailure,
    EnvironmentSettingsError,
    EnvironmentSuite,
    StepResult,
    Task,
)
from pearl_rl.rollout.environments.suites import SUITES, make_suite
from pearl_rl.rollout.environments.task_sources import DatasetTasks
from pearl_rl.rollout.environments.tool_runner import InlineTools, Latency, ToolFault, ToolReply
from pearl_rl.rollout.environments.tools import calculate, run_tests

GAMES = st.builds(BisectSettings, commits=st.integers(2, 40), tries=st.integers(1, 9), lines=st.integers(1, 6))
Choose = Callable[[range], int]


def middle(candidates: range) -> int:
    return candidates[(len(candidates) - 1) // 2]


def play(game: BisectGame, choose: Choose) -> tuple[float, int]:
    reward = 0.0
    while not game.done:
        reward += game.step(command(game.candidates, choose(game.candidates))).reward
    return reward, game.used


# --- bisect -------------------------------------------------------------------------------------------------------


@given(settings=GAMES, seed=st.integers(0, 10**6), data=st.data())
def test_suspects_always_hold_the_culprit_and_never_grow(settings: BisectSettings, seed: int, data: Any) -> None:
    task = make_task(settings, seed, 0)
    game = BisectGame(settings, task)
    for _ in range(settings.tries):
        before = game.candidates
        assert task.payload["culprit"] in before
        probe = data.draw(st.integers(0, settings.commits - 1))
        result = game.step(command(before, probe, data.draw(st.sampled_from(sorted(REPORTS)))))
        assert set(game.candidates) <= set(before)
        assert (probe in before) == (len(game.candidates) < len(before) or bool(result.info["solved"]))
        if result.done:
            break
    assert game.done


@given(settings=GAMES, seed=st.integers(0, 10**6))
def test_halving_finds_the_culprit_in_logarithmically_many_tests(settings: BisectSettings, seed: int) -> None:
    game = BisectGame(settings, make_task(settings, seed, 1))
    reward, used = play(game, middle)
    enough = settings.commits.bit_length()
    assert (used <= enough and reward > 0) or settings.tries < enough


def test_halving_earns_clearly_more_than_chance() -> None:
    settings, draw = BisectSettings(), random.Random(3)
    games = [make_task(settings, 8, index) for index in range(400)]
    halving = [play(BisectGame(settings, task), middle)[0] for task in games]
    inside = [play(BisectGame(settings, task), draw.choice)[0] for task in games]
    anything = [play(BisectGame(settings, task), lambda _: draw.randrange(settings.commits))[0] for task in games]
    assert sum(halving) > 1.08 * sum(inside) > 1.08 * 1.5 * sum(anything)


@pytest.mark.parametrize(("used", "reward"), [(1, 1.0), (2, 0.75), (3, 0.5), (4, 0.25)])
def test_the_reward_falls_with_every_test_used(used: int, reward: float) -> None:
    settings = BisectSettings(commits=8, tries=4)
    task = Task("t", 0, {"culprit": 5, "faulty": "cache"})
    game = BisectGame(settings, task)
    results = [game.step(command(game.candidates, commit)) for commit in [*[0] * (used - 1), 5]]
    assert [result.reward for result in results] == [0.0] * (used - 1) + [reward]
    assert results[-1].info == {"solved": True, "tests": used, "mistakes": 0}


def test_a_game_without_a_find_is_worth_nothing() -> None:
    game = BisectGame(BisectSettings(commits=8, tries=3), Task("t", 0, {"culprit": 5, "faulty": "cache"}))
    assert play(game, lambda _: 1) == (0.0, 3)


@given(settings=GAMES, text=st.text(max_size=40) | st.sampled_from(["git bisect c00", "rm -rf /", "", "c99"]))
def test_what_is_no_command_costs_a_try_and_tells_nothing(settings: BisectSettings, text: str) -> None:
    """CASES B6: the agent's own mistake is data, not a failure."""
    game = BisectGame(settings, make_task(settings, 4, 4))
    before = game.candidates
    result = game.step(text)
    assert result.info == {"solved": False, "tests": 0, "mistakes": 1}
    assert (result.reward, game.candidates) == (0.0, before)
    assert result.observation.text.startswith("error : expected a command .")
    assert result.done == (settings.tries == 1)


def test_a_commit_that_does_not_exist_is_a_mistake() -> None:
    game = BisectGame(BisectSettings(commits=8), make_task(BisectSettings(commits=8), 0, 0))
    result = game.step(command(game.candidates, 8))
    assert result.observation.text.startswith("error : no such commit .")
    assert result.info["mistakes"] == 1


@given(settings=GAMES, seed=st.integers(0, 1000), data=st.data())
def test_every_word_is_in_the_vocabulary(settings: BisectSettings, seed: int, data: Any) -> None:
    game = BisectGame(settings, make_task(settings, seed, 0))
    said = [game.prompt().text]
    while not game.done:
        action = data.draw(
            st.sampled_from(
                ["nonsense", *(command(game.candidates, middle(game.candidates), report) for report in REPORTS)]
            )
        )
        said += [action] * (action != "nonsense")
        said.append(game.step(action).observation.text)
    assert {word for text in said for word in text.split()} <= set(vocabulary(settings))


def test_the_tests_of_the_tool_really_run_and_their_report_grows_with_the_options() -> None:
    assert run_tests.passes("cache", 3, 4, "cache")
    assert not run_tests.passes("cache", 4, 4, "cache")
    assert run_tests.passes("store", 4, 4, "cache")
    lengths = []
    for report in ("", "-v", "-v --tb long"):
        game = BisectGame(BisectSettings(lines=2), Task("t", 1, {"culprit": 5, "faulty": "cache"}))
        lengths.append(
            len(re.findall("passed|failed", game.step(command(game.candidates, 2, report)).observation.text))
        )
    # The parent's result is reported too.
    assert lengths == [3, 4, 5]


def test_turns_have_the_size_that_the_planner_needs() -> None:
    shown, said, turns = [], [], []
    for demonstration in demonstrations(BisectSettings(), 0, 200):
        turns.append(len(demonstration.turns))
        for observation, action in demonstration.turns:
            # One token a word, an opening and a closing token around.
            shown.append(len(observation.text.split()) + 2)
            said.append(len(action.split()) + 1)
    assert 24 <= sum(shown) / len(shown) <= 48
    assert 6 <= sum(said) / len(said) <= 12
    assert (min(turns), max(turns)) == (1, 6)
    assert len(set(said)) == len(REPORTS)


def test_demonstrations_are_valid_and_choose_uniformly() -> None:
    settings = BisectSettings(commits=8)
    chosen = [0] * 8
    for demonstration in demonstrations(settings, 1, 600):
        for observation, action in demonstration.turns:
            assert "error" not in observation.text
            chosen[int(re.findall(r"c(\d+)", action)[-1])] += 1
    assert max(chosen) < 1.25 * min(chosen)
    assert demonstrations(settings, 1, 5) == demonstrations(settings, 1, 600)[:5]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"commits": 1}, "bisect: commits = 1 is out of range; use 2 to 100"),
        ({"tries": 0}, "bisect: tries = 0 is out of range"),
        ({"lines": 7}, "bisect: lines = 7 is out of range; use 1 to 6"),
    ],
)
def test_sizes_of_the_game_are_checked(values: dict[str, int], message: str) -> None:
    with pytest.raises(EnvironmentSettingsError, match=re.escape(message)):
        BisectSettings(**values)


class Broken:
    """A tool runner whose tools fail."""

    def __init__(self, fault: ToolFault) -> None:
        self.fault = fault

    async def start(self) -> None: ...

    async def call(self, tool: str, argument: Any, latency_s: float = 0.0) -> ToolReply:
        return ToolReply(fault=self.fault, detail="why")

    async def close(self) -> None: ...


@pytest.mark.parametrize("fault", list(ToolFault))
def test_a_test_that_could_not_run_is_never_the_agents_fault(fault: ToolFault) -> None:
    """CASES B6: infrastructure failures never become a reward of 0."""
    suite = BisectSuite(BisectArguments(), tools=Broken(fault))

    async def main() -> StepResult:
        environment = suite.environment()
        await environment.reset(suite.tasks(0).task(0))
        return await environment.step(command(range(suite.settings.commits), 0))

    with pytest.raises(EnvironmentFailure, match=f"test tool failed \\({fault}\\): why"):
        run_virtual(main())


# --- calculator ---------------------------------------------------------------------------------------------------


def calculated(actions: list[str], payload: dict[str, Any], **options: Any) -> list[StepResult]:
    suite = CalculatorSuite(CalculatorArguments(processes=0, **options))

    async def main() -> list[StepResult]:
        environment = suite.environment()
        await environment.reset(Task("t", 1, payload))
        return [await environment.step(action) for action in actions]

    return run_virtual(main())


STORY = {"story": "there are 12 books .", "answer": 84}


def test_calculations_lead_to_an_answer_and_its_reward() -> None:
    steps = calculated(["calc 12 * 7", "answer 84"], STORY)
    assert [step.observation.text for step in steps] == ["84 .", "right ."]
    assert [(step.reward, step.done) for step in steps] == [(0.0, False), (1.0, True)]


def test_numbers_may_be_written_digit_by_digit() -> None:
    steps = calculated(["calc 1 2 * 7", "answer 8 4"], STORY)
    assert (steps[0].observation.text, steps[1].reward) == ("84 .", 1.0)


def test_a_wrong_answer_ends_it_and_mistakes_cost() -> None:
    assert [step.reward for step in calculated(["answer 85"], STORY)] == [0.0]
    steps = calculated(["hello", "calc 1 / 0", "calc 2 ** 9", "answer 84"], STORY)
    assert [step.observation.text for step in steps[:3]] == [
        "expected calc or answer .",
        "division by zero .",
        "only numbers and + - * / // % ( ) .",
    ]
    assert steps[-1].reward == pytest.approx(0.7)
    assert steps[-1].info == {"solved": True, "calls": 4, "mistakes": 3}


def test_without_an_answer_it_ends_with_the_tries() -> None:
    steps = calculated(["calc 1 + 1"] * 3, STORY, tries=3)
    assert [step.done for step in steps] == [False, False, True]
    assert steps[-1].observation.text == "2 . no more tries ."


@given(index=st.integers(0, 10**5), operations=st.integers(1, 8))
def test_the_answer_is_what_the_story_adds_up_to(index: int, operations: int) -> None:
    suite = CalculatorSuite(CalculatorArguments(operations=operations, processes=0))
    task = suite.tasks(2).task(index)
    numbers = iter(re.findall(r"\d+", task.payload["story"]))
    amount = int(next(numbers))
    for sentence in re.findall(r"then (?!answer).*? \.", task.payload["story"]):
        number = int(next(numbers))
        amount = amount + number if "added" in sentence else amount - number if "away" in sentence else amount * number
        assert amount >= 0
    assert amount == task.payload["answer"]
    assert {word for word in task.payload["story"].split() if not word.isdigit()} <= set(suite.vocabulary())


def test_demonstrations_of_the_calculator_are_valid_and_random() -> None:
    suite = CalculatorSuite(CalculatorArguments(processes=0))
    shown = suite.demonstrations(0, 300)
    solved = sum(demonstration.reward for demonstration in shown) / len(shown)
    assert 0 < solved < 0.3
    words = {word for demonstration in shown for _, action in demonstration.turns for word in action.split()}
    assert {word for word in words if not word.isdigit()} <= set(suite.vocabulary())


@given(st.recursive(st.integers(0, 99).map(str), lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(
    lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"), max_leaves=6))  # fmt: skip
def test_the_calculator_agrees_with_python(expression: str) -> None:
    if len(expression) <= calculate.LONGEST:
        assert calculate.run({"expression": expression}) == {"result": str(eval(expression))}


@pytest.mark.parametrize(
    ("expression", "mistake"),
    [
        ("__import__('os').system('true')", "only numbers"),
        ("2 ** 99", "only numbers"),
        ("1 << 60", "only numbers"),
        ("True + 1", "only numbers"),
        ("'a' * 9", "only numbers"),
        ("1j", "only numbers"),
        ("9999999 * 9999999", "number too large"),
        ("1e400", "number too large"),
        ("7 % 0", "division by zero"),
        ("1 +", "not an expression"),
        ("\x00", "not an expression"),
        ("(" * 150, "not an expression"),
        ("-" * 199 + "1", ""),
        ("1" * 201, "expression too long"),
    ],
)
def test_the_calculator_evaluates_nothing_but_bounded_arithmetic(expression: str, mistake: str) -> None:
    answer = calculate.run({"expression": expression})
    assert (mistake in answer["mistake"]) if mistake else answer == {"result": "-1"}


def test_decimals_are_written_shortly() -> None:
    assert [calculate.run({"expression": text})["result"] for text in ("7 / 2", "6 / 2", "1 / 3", "0.1 + 0.2")] == [
        "3.5",
        "3",
        "0.333333",
        "0.3",
    ]


# --- tasks, latency, registry -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bisect", "calculator"])
def test_the_same_index_gives_the_same_task_and_seeds_differ(name: str) -> None:
    suite = make_suite(name, {"processes": 0})
    tasks = [suite.tasks(1).task(index) for index in range(50)]
    assert tasks == [suite.tasks(1).task(index) for index in range(50)]
    assert len({task.id for task in tasks}) == 50
    assert [task.payload for task in tasks] != [suite.tasks(2).task(index).payload for index in range(50)]
    assert suite.tasks(1).size is None


@given(size=st.integers(1, 20), seed=st.integers(0, 99), epoch=st.integers(0, 5))
def test_every_pass_over_a_data_set_takes_each_task_once(size: int, seed: int, epoch: int) -> None:
    tasks = DatasetTasks([Task(str(number), 0) for number in range(size)], seed)
    taken = [tasks.task(epoch * size + place).id for place in range(size)]
    assert sorted(taken) == sorted(map(str, range(size)))
    assert tasks.size == size
    # In any order of asking.
    assert [tasks.task(epoch * size + place).id for place in reversed(range(size))] == taken[::-1]


def test_a_data_set_without_tasks_is_refused() -> None:
    with pytest.raises(EnvironmentSettingsError, match="no tasks"):
        DatasetTasks([], 0)


def test_latency_is_long_tailed_repeatable_and_capped() -> None:
    latency = Latency(median_s=0.15, sigma=0.5, longest_s=0.6)
    drawn = sorted(latency.draw_s(index, "x") for index in range(4000))
    assert drawn == sorted(latency.draw_s(index, "x") for index in range(4000))
    assert drawn[2000] == pytest.approx(0.15, rel=0.05)
    assert sum(drawn) / 4000 > drawn[2000]
    assert drawn[-1] == 0.6
    assert {Latency(0.2, 0.0).draw_s(index) for index in range(9)} == {0.2}
    with pytest.raises(EnvironmentSettingsError, match="sigma = nan"):
        Latency(sigma=float("nan"))


def test_inline_tools_answer_like_a_sandbox_in_loop_time() -> None:
    tools = InlineTools({"double": lambda argument: 2 * argument["n"]})

    async def main() -> tuple[ToolReply, ToolReply, float]:
        good, bad = await asyncio.gather(tools.call("double", {"n": 4}, 3.0), tools.call("double", {}, 1.0))
        return good, bad, asyncio.get_running_loop().time()

    good, bad, now_s = run_virtual(main())
    assert (good.value, now_s) == (8, 3.0)
    assert (bad.fault, bad.detail) == (ToolFault.RAISED, "KeyError: 'n'")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("bisec", {}, "unknown environment 'bisec'; did you mean 'bisect'?"),
        ("zzz", {}, "unknown environment 'zzz'; there is bisect, calculator, gymnasium, http, repair, verifiers"),
        ("bisect", {"comits": 8}, "bisect: unknown argument 'comits'; did you mean 'commits'?"),
        ("bisect", {"commits": "8"}, "bisect: commits = '8' must be of type int"),
        ("bisect", {"commits": True}, "bisect: commits = True must be of type int"),
        ("bisect", {"latency_median_s": -1}, "latency: median_s = -1.0 must be 0 or above"),
        ("calculator", {"operations": 0}, "calculator: operations = 0 is out of range; use 1 to 8"),
        ("gymnasium", {}, "gymnasium: the argument `id` is missing"),
        ("verifiers", {}, "verifiers: the argument `taskset` is missing"),
        ("no_such_module:suite", {}, "'no_such_module:suite' cannot be imported"),
        ("random:suite", {}, "random has no 'suite'"),
        ("math:pi", {}, "must be a function or a class with `build`"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentSettingsError) as refused:
        make_suite(name, arguments)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_suite_of_ones_own_is_named_by_module_and_attribute() -> None:
    suite = make_suite("pearl_rl.rollout.environments.bisect_environment:BisectSuite", {"commits": 4, "processes": 0})
    assert isinstance(suite, BisectSuite)
    assert suite.settings.commits == 4


def test_every_registered_name_is_a_suite_of_that_name() -> None:
    built: list[EnvironmentSuite] = [make_suite(name, {"processes": 0}) for name in ("bisect", "calculator")]
    assert [suite.name for suite in built] == ["bisect", "calculator"]
    assert set(SUITES) == {"bisect", "calculator", "gymnasium", "http", "repair", "verifiers"}


@pytest.mark.parametrize("name", ["bisect", "calculator"])
def test_closing_is_safe_at_any_time(name: str) -> None:
    suite = make_suite(name, {"processes": 0})

    async def main() -> None:
        environment: Environment = suite.environment()
        await environment.close()
        with pytest.raises(RuntimeError, match="step before reset"):
            await environment.step("x")
        await environment.close()
        await suite.close()

    run_virtual(main())


def test_options_nest_and_keep_their_types() -> None:
    assert read_options("x", ["a.b=1", "a.c=true", "d=text", 'e=[1, "2"]', "f = 1.5 "]) == {
        "a": {"b": 1, "c": True},
        "d": "text",
        "e": [1, "2"],
        "f": 1.5,
    }
    for line in ("novalue", "=1", "a..b=1"):
        with pytest.raises(EnvironmentSettingsError, match="must be of the form key=value"):
            read_options("x", [line])
    with pytest.raises(EnvironmentSettingsError, match="has a value already"):
        read_options("x", ["a=1", "a.b=2"])
