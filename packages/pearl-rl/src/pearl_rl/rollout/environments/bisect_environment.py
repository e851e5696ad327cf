"""The bisect game as an environment: tests run in sandbox processes and take their time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pearl_rl.rollout.environments import bisect_game
from pearl_rl.rollout.environments.arguments import read_arguments
from pearl_rl.rollout.environments.bisect_game import BisectGame, BisectSettings
from pearl_rl.rollout.environments.protocol import (
    Demonstration,
    EnvironmentFailure,
    Observation,
    StepResult,
    Task,
    TaskSource,
)
from pearl_rl.rollout.environments.sandbox import SandboxLimits, SandboxPool
from pearl_rl.rollout.environments.task_sources import SeededTasks
from pearl_rl.rollout.environments.tool_runner import InlineTools, Latency, ToolRunner
from pearl_rl.rollout.environments.tools import run_tests


@dataclass(frozen=True, slots=True)
class BisectArguments:
    """Arguments of the environment `bisect`."""

    commits: int = 8
    tries: int = 6
    lines: int = 2
    latency_median_s: float = 0.15
    """Median time of a test run, seconds."""
    latency_sigma: float = 0.5
    """Spread of its logarithm: the long tail."""
    latency_longest_s: float = 2.0
    processes: int = 24
    """Sandbox processes; 0 runs tests inside this process (for simulation)."""
    call_s: float = 10.0
    """Longest test run beyond its latency, seconds."""


class BisectEnvironment:
    """One game. A test that the sandbox could not run is a failure of the infrastructure, never the agent's."""

    def __init__(self, settings: BisectSettings, latency: Latency, tools: ToolRunner) -> None:
        self._settings = settings
        self._latency = latency
        self._tools = tools
        self._task: Task | None = None
        self._game: BisectGame | None = None

    @property
    def prewarmed(self) -> bool:
        """Whether its tools are up: an episode that starts now is a prewarm hit, not a cold start."""
        return self._tools.prewarmed

    async def reset(self, task: Task) -> Observation:
        """Start the game."""
        self._task, self._game = task, BisectGame(self._settings, task)
        return self._game.prompt()

    async def step(self, action: str) -> StepResult:
        """Run the tests that the agent asks for. Raises `EnvironmentFailure`."""
        if self._game is None or self._task is None:
            raise RuntimeError("step before reset")
        request = self._game.request(action)
        if isinstance(request, str):
            return self._game.settle(request, None)
        latency_s = self._latency.draw_s(self._task.seed, self._game.used, request["commit"])
        reply = await self._tools.call(bisect_game.TOOL, request, latency_s)
        if reply.fault is not None:
            raise EnvironmentFailure(f"the test tool failed ({reply.fault}): {reply.detail}")
        return self._game.settle(request, reply.value)

    async def close(self) -> None:
        """Nothing of its own is open: the tools are the suite's."""


class BisectSuite:
    """The environment `bisect` with its sandbox."""

    name = "bisect"

    def __init__(self, arguments: BisectArguments | None = None, tools: ToolRunner | None = None) -> None:
        given = arguments or BisectArguments()
        self.settings = BisectSettings(commits=given.commits, tries=given.tries, lines=given.lines)
        self._latency = Latency(given.latency_median_s, given.latency_sigma, given.latency_longest_s)
        self._tools = tools or _tools(given)

    @classmethod
    def build(cls, arguments: Mapping[str, Any]) -> "BisectSuite":
        """From settings. Raises `EnvironmentSettingsError`."""
        return cls(read_arguments(BisectArguments, cls.name, arguments))

    def tasks(self, seed: int) -> TaskSource:
        """An endless sequence."""
        return SeededTasks(lambda index: bisect_game.make_task(self.settings, seed, index))

    def environment(self) -> BisectEnvironment:
        """A game that is yet to be reset."""
        return BisectEnvironment(self.settings, self._latency, self._tools)

    async def start(self) -> None:
        """Start the sandbox processes."""
        await self._tools.start()

    async def close(self) -> None:
        """End the sandbox processes."""
        await self._tools.close()

    def vocabulary(self) -> Sequence[str]:
        """Every word of the game."""
        return bisect_game.vocabulary(self.settings)

    def demonstrations(self, seed: int, count: int) -> Sequence[Demonstration]:
        """Games of uniformly random, valid commands: the syntax, and no strategy."""
        return bisect_game.demonstrations(self.settings, seed, count)


def _tools(arguments: BisectArguments) -> ToolRunner:
    if arguments.processes == 0:
        return InlineTools({bisect_game.TOOL: run_tests.run})
    limits = SandboxLimits(call_s=arguments.call_s)
    return SandboxPool({bisect_game.TOOL: Path(run_tests.__file__)}, arguments.processes, limits)
