"""A word problem to solve with a calculator: several tool calls, then an answer.

`calc 12 * 7` asks the calculator, `answer 84` ends the episode. Blanks inside numbers are ignored, since a tokenizer
that takes digits apart writes `8 4`.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pearl_rl.rollout.environments.arguments import read_arguments
from pearl_rl.rollout.environments.protocol import (
    Demonstration,
    EnvironmentFailure,
    EnvironmentSettingsError,
    Observation,
    StepResult,
    Task,
    TaskSource,
    observe,
)
from pearl_rl.rollout.environments.sandbox import SandboxLimits, SandboxPool
from pearl_rl.rollout.environments.task_sources import SeededTasks
from pearl_rl.rollout.environments.tool_runner import InlineTools, Latency, ToolFault, ToolReply, ToolRunner
from pearl_rl.rollout.environments.tools import calculate

TOOL: Final = "calculate"

ACTION: Final = re.compile(r"(calc|answer)\s+(\S.*)")

THINGS: Final = ("books", "apples", "coins", "shells", "stamps", "nails")

STORIES: Final[Mapping[str, str]] = {
    "+": "then {number} {things} are added .",
    "-": "then {number} {things} are taken away .",
    "*": "then every one of the {things} becomes {number} .",
}

TEXT: Final = (
    "there are . how many are there now ? use calc and then answer right wrong expected or no more tries calc : "
    "only numbers and + - * / // % ( ) number too large division by zero not an expression long"
)


@dataclass(frozen=True, slots=True)
class CalculatorArguments:
    """Arguments of the environment `calculator`. Raises `EnvironmentSettingsError`."""

    operations: int = 2
    """Steps of the story, each one calculation."""
    largest: int = 20
    """Largest number in the story."""
    tries: int = 6
    """Actions until the episode ends without an answer."""
    mistake_cost: float = 0.1
    """Taken off the reward of a right answer for each command that was not understood; never below 0."""
    latency_median_s: float = 0.05
    latency_sigma: float = 0.5
    latency_longest_s: float = 1.0
    processes: int = 8
    """Sandbox processes; 0 calculates inside this process (for simulation)."""

    def __post_init__(self) -> None:
        for key, low, high in (("operations", 1, 8), ("largest", 2, 999), ("tries", 1, 99), ("mistake_cost", 0, 1)):
            if not low <= getattr(self, key) <= high:
                raise EnvironmentSettingsError(
                    f"calculator: {key} = {getattr(self, key)} is out of range; use {low} to {high}"
                )


def make_task(arguments: CalculatorArguments, seed: int, index: int) -> Task:
    """Story number `index` of the endless sequence `seed`; amounts are never negative."""
    draw = random.Random(f"calculator {seed} {index}")
    things = draw.choice(THINGS)
    amount = draw.randint(1, arguments.largest)
    story = [f"there are {amount} {things} ."]
    for _ in range(arguments.operations):
        operation = draw.choice([name for name in STORIES if name != "-" or amount > 1])
        number = draw.randint(2, min(arguments.largest, amount) if operation == "-" else arguments.largest)
        amount = {"+": amount + number, "-": amount - number, "*": amount * number}[operation]
        story.append(STORIES[operation].format(number=number, things=things))
    story.append(f"how many {things} are there now ? use calc and then answer .")
    payload = {"story": " ".join(story), "answer": amount}
    return Task(id=f"calculator-{index:06d}", seed=draw.getrandbits(31), payload=payload)


class CalculatorEnvironment:
    """One story."""

    def __init__(self, arguments: CalculatorArguments, latency: Latency, tools: ToolRunner) -> None:
        self._arguments = arguments
        self._latency = latency
        self._tools = tools
        self._task: Task | None = None
        self._used = 0
        self._mistakes = 0

    @property
    def prewarmed(self) -> bool:
        """Whether its tools are up: an episode that starts now is a prewarm hit, not a cold start."""
        return self._tools.prewarmed

    async def reset(self, task: Task) -> Observation:
        """Tell the story."""
        self._task, self._used, self._mistakes = task, 0, 0
        return observe(str(task.payload["story"]))

    async def step(self, action: str) -> StepResult:
        """Calculate, or take the answer. Raises `EnvironmentFailure`."""
        if self._task is None:
            raise RuntimeError("step before reset")
        self._used += 1
        command = ACTION.fullmatch(" ".join(action.split()))
        if command is None:
            return self._mistake("expected calc or answer")
        text = re.sub(r"\s", "", command[2])
        if command[1] == "answer":
            solved = _number(text) == self._task.payload["answer"]
            reward = max(0.0, 1.0 - self._arguments.mistake_cost * self._mistakes) if solved else 0.0
            return self._result("right ." if solved else "wrong .", reward, done=True, solved=solved)
        latency_s = self._latency.draw_s(self._task.seed, self._used)
        reply = await self._tools.call(TOOL, {"expression": text}, latency_s)
        return self._calculated(reply)

    async def close(self) -> None:
        """Nothing of its own is open: the tools are the suite's."""

    def _calculated(self, reply: ToolReply) -> StepResult:
        if reply.fault is ToolFault.LOST:
            raise EnvironmentFailure(f"the calculator was lost: {reply.detail}")
        if reply.fault is not None:
            # The tool bounds what it evaluates; if an expression still gets through, it is the agent's.
            return self._mistake("not an expression")
        if "mistake" in reply.value:
            return self._mistake(reply.value["mistake"])
        return self._result(f"{reply.value['result']} .", 0.0)

    def _mistake(self, text: str) -> StepResult:
        self._mistakes += 1
        return self._result(f"{text} .", 0.0)

    def _result(self, text: str, reward: float, *, done: bool = False, solved: bool = False) -> StepResult:
        out = self._used >= self._arguments.tries
        seen = f"{text} no more tries ." if out and not done else text
        info = {"solved": solved, "calls": self._used, "mistakes": self._mistakes}
        return StepResult(observe(seen, "tool"), reward, done or out, info)


class CalculatorSuite:
    """The environment `calculator` with its sandbox."""

    name = "calculator"

    def __init__(self, arguments: CalculatorArguments | None = None, tools: ToolRunner | None = None) -> None:
        self.arguments = given = arguments or CalculatorArguments()
        self._latency = Latency(given.latency_median_s, given.latency_sigma, given.latency_longest_s)
        self._tools = tools or _tools(given)

    @classmethod
    def build(cls, arguments: Mapping[str, Any]) -> "CalculatorSuite":
        """From settings. Raises `EnvironmentSettingsError`."""
        return cls(read_arguments(CalculatorArguments, cls.name, arguments))

    def tasks(self, seed: int) -> TaskSource:
        """An endless sequence."""
        return SeededTasks(lambda index: make_task(self.arguments, seed, index))

    def environment(self) -> CalculatorEnvironment:
        """An episode that is yet to be reset."""
        return CalculatorEnvironment(self.arguments, self._latency, self._tools)

    async def start(self) -> None:
        """Start the sandbox processes."""
        await self._tools.start()

    async def close(self) -> None:
        """End the sandbox processes."""
        await self._tools.close()

    def vocabulary(self) -> Sequence[str]:
        """Every word, and the ten digits: numbers are read digit by digit."""
        stories = " ".join(STORIES.values()).replace("{number}", "").replace("{things}", "")
        return tuple(dict.fromkeys([*f"{TEXT} {stories}".split(), *THINGS, *"0123456789", "."]))

    def demonstrations(self, seed: int, count: int) -> Sequence[Demonstration]:
        """Episodes of random calculations with random numbers of the story, then a random answer of them."""
        return tuple(_demonstration(self.arguments, seed, index) for index in range(count))


def _demonstration(arguments: CalculatorArguments, seed: int, index: int) -> Demonstration:
    draw = random.Random(f"calculator demonstration {seed} {index}")
    task = make_task(arguments, draw.getrandbits(31), index)
    numbers = re.findall(r"\d+", str(task.payload["story"]))
    observation, turns = observe(str(task.payload["story"])), []
    for _ in range(draw.randint(0, min(arguments.operations, arguments.tries - 1))):
        expression = f"{draw.choice(numbers)} {draw.choice('+-*')} {draw.choice(numbers)}"
        turns.append((observation, f"calc {expression}"))
        result = calculate.run({"expression": expression})["result"]
        numbers.append(result.lstrip("-"))
        observation = observe(f"{result} .", "tool")
    answer = draw.choice(numbers)
    turns.append((observation, f"answer {answer}"))
    return Demonstration(tuple(turns), 1.0 if int(answer) == task.payload["answer"] else 0.0)


def _number(text: str) -> float | None:
    """The number that a text is; None for anything else."""
    return float(text) if re.fullmatch(r"-?\d{1,15}(\.\d{1,9})?", text, re.ASCII) else None


def _tools(arguments: CalculatorArguments) -> ToolRunner:
    if arguments.processes == 0:
        return InlineTools({TOOL: calculate.run})
    # An expression is the agent's: its own bounds end it long before these do.
    limits = SandboxLimits(call_s=5.0, cpu_s=1)
    return SandboxPool({TOOL: Path(calculate.__file__)}, arguments.processes, limits)
