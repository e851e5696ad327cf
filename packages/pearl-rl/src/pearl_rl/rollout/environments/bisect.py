"""The debugging game as an environment: its test runs happen in sandbox processes and take their time."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pearl_rl.rollout.environments.bisect_game import (
    TOOL,
    BisectGame,
    BisectSettings,
    demonstrations,
    make_task,
    vocabulary,
)
from pearl_rl.rollout.environments.protocol import (
    Demonstration,
    EnvironmentFailure,
    EnvironmentSettingsError,
    Observation,
    StepResult,
    Task,
)
from pearl_rl.rollout.environments.sandbox import SandboxPool
from pearl_rl.rollout.environments.tool_runner import Latency, ToolRunner
from pearl_rl.rollout.environments.tools import run_tests


class BisectEnvironment:
    """One game. A tool run that fails is the infrastructure's fault: what the agent wrote never reaches the tool."""

    def __init__(self, settings: BisectSettings, tools: ToolRunner, latency: Latency) -> None:
        self._settings = settings
        self._tools = tools
        self._latency = latency
        self._game: BisectGame | None = None
        self._seed = 0

    async def reset(self, task: Task) -> Observation:
        """Begin the game of `task`."""
        self._game = BisectGame(self._settings, task)
        self._seed = task.seed
        return self._game.prompt()

    async def step(self, action: str) -> StepResult:
        """Play one turn. Raises `EnvironmentFailure` where the test run could not be made."""
        game = self._game
        if game is None:
            raise RuntimeError("step before reset")
        request = game.request(action)
        if isinstance(request, str):
            return game.settle(request, None)
        latency_s = self._latency.draw_s(self._seed, game.used, request["commit"])
        reply = await self._tools.call(TOOL, request, latency_s)
        if reply.fault is not None:
            raise EnvironmentFailure(f"a test run of the bisect game failed ({reply.fault}): {reply.detail}")
        return game.settle(request, reply.value)

    async def close(self) -> None:
        """Nothing of its own to end: the processes are shared."""


@dataclass(frozen=True, slots=True)
class _Tasks:
    """An endless sequence of games."""

    settings: BisectSettings
    seed: int

    @property
    def size(self) -> int | None:
        return None

    def task(self, index: int) -> Task:
        return make_task(self.settings, self.seed, index)


@dataclass(slots=True)
class BisectSuite:
    """The game by the name `bisect`, over a pool of sandbox processes."""

    settings: BisectSettings = field(default_factory=BisectSettings)
    latency: Latency = field(default_factory=Latency)
    processes: int = 64
    """Sandbox processes: test runs at a time. A run that finds none free waits."""
    name: str = "bisect"
    _pool: SandboxPool | None = None

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> "BisectSuite":
        """From `[environment.args]`: commits, tries, lines, median_s, sigma, longest_s, processes.

        Raises `EnvironmentSettingsError`.
        """
        game = {item.name for item in fields(BisectSettings)}
        times = {item.name for item in fields(Latency)}
        unknown = sorted(args.keys() - game - times - {"processes"})
        if unknown:
            known = ", ".join(sorted(game | times | {"processes"}))
            raise EnvironmentSettingsError(f"bisect: no argument '{unknown[0]}'; it has {known}")
        for key, value in args.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise EnvironmentSettingsError(f"bisect: {key} = {value!r} must be a number")
        processes = args.get("processes", 64)
        if not isinstance(processes, int) or processes < 1:
            raise EnvironmentSettingsError(f"bisect: processes = {processes} must be a whole number of at least 1")
        return cls(
            BisectSettings(**{key: value for key, value in args.items() if key in game}),
            Latency(**{key: value for key, value in args.items() if key in times}),
            processes,
        )

    def tasks(self, seed: int) -> _Tasks:
        """Training tasks of this seed."""
        return _Tasks(self.settings, seed)

    def environment(self) -> BisectEnvironment:
        """A fresh game."""
        if self._pool is None:
            raise RuntimeError("the suite was not started")
        return BisectEnvironment(self.settings, self._pool, self.latency)

    async def start(self) -> None:
        """Prewarm the sandbox processes."""
        if self._pool is None:
            self._pool = SandboxPool({TOOL: Path(run_tests.__file__)}, self.processes)
        await self._pool.start()

    async def close(self) -> None:
        """End the sandbox processes."""
        if self._pool is not None:
            await self._pool.close()

    def vocabulary(self) -> tuple[str, ...]:
        """Every word of the game."""
        return vocabulary(self.settings)

    def demonstrations(self, seed: int, count: int) -> tuple[Demonstration, ...]:
        """Transcripts of random probes: syntax, no strategy."""
        return demonstrations(self.settings, seed, count)
