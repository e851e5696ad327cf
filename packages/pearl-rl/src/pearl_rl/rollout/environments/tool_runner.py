"""How environments run their tools: the port, how long a run takes, and a runner inside this process."""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from pearl_rl.rollout.environments.protocol import EnvironmentSettingsError


class ToolFault(StrEnum):
    """Why a tool gave no value. Whether it is the agent's mistake is for the environment to say."""

    RAISED = "raised"
    """The tool raised an exception, or its output was above the limit."""
    TIMEOUT = "timeout"
    """It took too long and was ended."""
    LOST = "lost"
    """Its process ended: killed, out of memory, or out of CPU time."""


@dataclass(frozen=True, slots=True)
class ToolReply:
    """A tool's answer."""

    value: Any = None
    """What the tool gave: plain values, as JSON holds them."""
    fault: ToolFault | None = None
    detail: str = ""
    """What went wrong, one line."""


class ToolRunner(Protocol):
    """Runs named tools on arguments that may come from a model."""

    @property
    def prewarmed(self) -> bool:
        """Whether the next call finds a process that is up."""
        ...

    async def start(self) -> None:
        """Bring processes up ahead of the first call. Raises `EnvironmentFailure`."""
        ...

    async def call(self, tool: str, argument: Mapping[str, Any], latency_s: float = 0.0) -> ToolReply:
        """Run `tool` on `argument` (JSON values). The run takes at least `latency_s`. Raises `EnvironmentFailure`
        where no process can be had.
        """
        ...

    async def close(self) -> None:
        """End everything. May be called twice."""
        ...


class InlineTools:
    """Runs tools at once inside this process and waits in loop time: for simulation, and games played offline."""

    def __init__(self, tools: Mapping[str, Callable[[dict[str, Any]], Any]]) -> None:
        self._tools = dict(tools)

    @property
    def prewarmed(self) -> bool:
        """Always: there is no process."""
        return True

    async def start(self) -> None:
        """Nothing to bring up."""

    async def call(self, tool: str, argument: Mapping[str, Any], latency_s: float = 0.0) -> ToolReply:
        """Run the tool, then wait `latency_s`."""
        run = self._tools[tool]
        try:
            reply = ToolReply(run(dict(argument)))
        except Exception as error:  # a tool's exception is an answer, here as in a sandbox process
            reply = ToolReply(fault=ToolFault.RAISED, detail=f"{type(error).__name__}: {error}")
        await asyncio.sleep(latency_s)
        return reply

    async def close(self) -> None:
        """Nothing to end."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Time of a tool run: log-normal, so most are near the median and a few take many times as long."""

    median_s: float = 0.15
    sigma: float = 0.5
    """Standard deviation of the logarithm; 0 makes every run take the median."""
    longest_s: float = 2.0
    """Cap, seconds."""

    def __post_init__(self) -> None:
        for key in ("median_s", "sigma", "longest_s"):
            value = getattr(self, key)
            if not 0 <= value < float("inf"):
                raise EnvironmentSettingsError(f"latency: {key} = {value} must be 0 or above, and finite")

    def draw_s(self, *identity: int | str) -> float:
        """The time of the run that `identity` names, seconds: the same identity gives the same time."""
        draw = random.Random(" ".join(map(str, identity)))
        return min(self.longest_s, self.median_s * draw.lognormvariate(0.0, self.sigma))
