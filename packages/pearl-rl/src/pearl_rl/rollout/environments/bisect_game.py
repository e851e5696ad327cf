"""The debugging game: one of N commits introduced a bug; name it with few test runs. Pure, no waiting.

Each turn the agent writes `git bisect FIRST LAST COMMIT`: it restates the first and the last suspect, as it read them,
and names a commit. The tool tests that commit and its parent. The commit is the first bad one (found), good (the bug
came later), or bad like its parent (the bug came before). Only the commit counts; what was restated is not checked.

Words and layout are few and fixed so that a model of 0.1 million parameters with a word-level tokenizer can learn it.
Restating puts what a choice depends on right before the choice; demonstrations show that form with random commits, so
that choosing among the suspects, and their middle, is left to reinforcement learning.
"""

import random
import re
from dataclasses import dataclass
from typing import Any, Final

from pearl_rl.rollout.environments.protocol import (
    Demonstration,
    EnvironmentSettingsError,
    Observation,
    StepResult,
    Task,
    observe,
)
from pearl_rl.rollout.environments.tools import run_tests

TOOL: Final = "run_tests"
"""Name of the tool that a game asks for."""

REPORTS: Final = {"": 0, "-v": 1, "-v --tb long": 2}
"""Options the agent may add, and how many further lines each reports. They change r and ΔL, never the reward."""

COMMAND: Final = re.compile(r"git bisect c(\d{1,4}) c(\d{1,4}) c(\d{1,4})(?: (-v(?: --tb long)?))?", re.ASCII)

TEXT: Final = (
    "git bisect -v --tb long a test that passed before fails at . name the first bad commit is after , tests "
    "left suspects of : parent failed found error expected command no such"
)
"""Every fixed word that a command, a prompt or an observation can hold."""


@dataclass(frozen=True, slots=True)
class BisectSettings:
    """Size of the game. Raises `EnvironmentSettingsError`."""

    commits: int = 8
    """N: the bug came with one of them, each equally likely."""
    tries: int = 6
    """Turns until the game is lost; a mistake uses one up as a test does."""
    lines: int = 2
    """Verbosity: lines of a short report. Every line is three words."""

    def __post_init__(self) -> None:
        limits = {"commits": (2, 100), "tries": (1, 99), "lines": (1, len(run_tests.MODULES) - max(REPORTS.values()))}
        for key, (low, high) in limits.items():
            value = getattr(self, key)
            if not low <= value <= high:
                raise EnvironmentSettingsError(f"bisect: {key} = {value} is out of range; use {low} to {high}")


def commit_name(commit: int) -> str:
    """`c07`: one word, and so one token."""
    return f"c{commit:02d}"


def vocabulary(settings: BisectSettings) -> tuple[str, ...]:
    """Every word of the game."""
    commits = (commit_name(commit) for commit in range(settings.commits))
    numbers = (str(number) for number in range(settings.tries + 1))
    return tuple(dict.fromkeys([*TEXT.split(), *run_tests.MODULES, *commits, *numbers]))


def make_task(settings: BisectSettings, seed: int, index: int) -> Task:
    """Task number `index` of the endless sequence `seed`."""
    draw = random.Random(f"bisect {seed} {index}")
    payload = {"culprit": draw.randrange(settings.commits), "faulty": draw.choice(run_tests.MODULES)}
    return Task(id=f"bisect-{index:06d}", seed=draw.getrandbits(31), payload=payload)


class BisectGame:
    """The state of one game. `step` plays with the tool in this process; an environment that runs the tool elsewhere
    uses `request` and `settle`.
    """

    def __init__(self, settings: BisectSettings, task: Task) -> None:
        self._settings = settings
        self._task = task
        self._culprit = int(task.payload["culprit"])
        self._low = 0
        self._high = settings.commits - 1
        self.used = 0
        """Tries used up."""
        self.mistakes = 0
        self.done = False

    @property
    def candidates(self) -> range:
        """Commits that may still be the first bad one."""
        return range(self._low, self._high + 1)

    def prompt(self) -> Observation:
        """The first observation."""
        last = commit_name(self._settings.commits - 1)
        head = f"a test that passed before {commit_name(0)} fails at {last} . name the first bad commit ."
        return observe(f"{head} {self._status()}")

    def request(self, action: str) -> dict[str, Any] | str:
        """The tool's argument for this action, or where the action is the agent's mistake, what is wrong with it."""
        command = COMMAND.fullmatch(" ".join(action.split()))
        if command is None:
            return "error : expected a command"
        commit = int(command[3])
        if commit >= self._settings.commits:
            return "error : no such commit"
        return {
            "commit": commit,
            "culprit": self._culprit,
            "faulty": self._task.payload["faulty"],
            "lines": self._settings.lines + REPORTS[command[4] or ""],
            "seed": self._task.seed,
        }

    def settle(self, request: dict[str, Any] | str, report: dict[str, Any] | None) -> StepResult:
        """Take the tool's report on `request` (None for a mistake) into account and say what the agent sees."""
        self.used += 1
        if isinstance(request, str) or report is None:
            self.mistakes += 1
            return self._result(f"{request} .", solved=False)
        commit = int(request["commit"])
        name = commit_name(commit)
        lines = " , ".join(f"{module} {'passed' if passed else 'failed'}" for module, passed in report["results"])
        head = f"tests of {name} : {lines} . parent {'failed' if report['parent_bad'] else 'passed'} ."
        if report["bad"] and not report["parent_bad"]:
            return self._result(f"{head} found first bad commit {name} .", solved=True)
        if report["bad"]:
            self._high = min(self._high, commit - 1)
        else:
            self._low = max(self._low, commit + 1)
        return self._result(
            f"{head} first bad commit is {'before' if report['bad'] else 'after'} {name} .", solved=False
        )

    def step(self, action: str) -> StepResult:
        """Play one turn with the tool in this process, at once."""
        request = self.request(action)
        return self.settle(request, None if isinstance(request, str) else run_tests.run(request))

    def _result(self, text: str, *, solved: bool) -> StepResult:
        self.done = solved or self.used >= self._settings.tries
        reward = 1.0 - (self.used - 1) / self._settings.tries if solved else 0.0
        seen = text if self.done else f"{text} {self._status()}"
        info = {"solved": solved, "tests": self.used - self.mistakes, "mistakes": self.mistakes}
        return StepResult(observe(seen, "tool"), reward, self.done, info)

    def _status(self) -> str:
        left = self._settings.tries - self.used
        return f"{left} tests left , suspects {_ends(self.candidates)}"


def command(candidates: range, commit: int, report: str = "") -> str:
    """The action that tests `commit` while `candidates` are left; `report` is a key of `REPORTS`."""
    return f"git bisect {_ends(candidates)} {commit_name(commit)} {report}".strip()


def _ends(candidates: range) -> str:
    return f"{commit_name(candidates[0])} {commit_name(candidates[-1])}"


def demonstrations(settings: BisectSettings, seed: int, count: int) -> tuple[Demonstration, ...]:
    """Transcripts whose every probe is uniformly random over all commits, in and out of the range alike.

    They show the syntax and nothing of how to play: the policy that copies them is the uniform one.
    """
    made = []
    for index in range(count):
        draw = random.Random(f"bisect demonstration {seed} {index}")
        game = BisectGame(settings, make_task(settings, draw.getrandbits(31), index))
        observation, turns, reward = game.prompt(), [], 0.0
        while not game.done:
            action = command(game.candidates, draw.randrange(settings.commits), draw.choice(tuple(REPORTS)))
            result = game.step(action)
            turns.append((observation, action))
            observation, reward = result.observation, reward + result.reward
        made.append(Demonstration(tuple(turns), reward))
    return tuple(made)
