"""What an environment is: multi-turn, asynchronous, with its own latency (PEARL section 2.1).

Two kinds of trouble are told apart. An agent's own mistake (bad syntax, an unknown commit) is data: it comes back as
an observation and counts in the reward. A failure of the infrastructure (a sandbox that died, a service that does
not answer) is `EnvironmentFailure`: the sample is refilled and never becomes a reward of 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

Value = str | int | float | bool | None
"""A plain value of a report: JSON can hold it."""


class EnvironmentFailure(Exception):
    """The environment broke, the agent did not. The trajectory has no reward; run its task again."""


class EnvironmentSettingsError(ValueError):
    """An environment cannot be built from what it was given: an unknown name, argument, or value."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem to solve. All trajectories of a GRPO group get the same task."""

    id: str
    """Unique within its source, e.g. `bisect-000017`."""
    seed: int
    """Source of all chance inside the environment, latency included."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """What only the environment reads, e.g. a data set's row."""


class TaskSource(Protocol):
    """Tasks by index, so that a resumed run asks for the next index and gets the task it would have got."""

    @property
    def size(self) -> int | None:
        """How many different tasks there are; None without an end. `task` takes any index all the same."""
        ...

    def task(self, index: int) -> Task:
        """The task at `index` >= 0. The same index gives the same task."""
        ...


@dataclass(frozen=True, slots=True)
class Message:
    """A message as chat templates take it."""

    role: str
    """`system`, `user`, `tool` or `assistant`."""
    content: str


@dataclass(frozen=True, slots=True)
class Observation:
    """What the agent sees next: only what is new, never the conversation so far."""

    messages: tuple[Message, ...]

    @property
    def text(self) -> str:
        """Contents of all messages, one a line."""
        return "\n".join(message.content for message in self.messages)


def observe(text: str, role: str = "user") -> Observation:
    """An observation of one message."""
    return Observation((Message(role, text),))


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an action led to."""

    observation: Observation
    reward: float
    """Reward of this step; a trajectory's reward is the sum over its steps."""
    done: bool
    info: Mapping[str, Value] = field(default_factory=dict)
    """Measures of the episode so far, e.g. `solved`, `tests`, `mistakes`."""


class Environment(Protocol):
    """One episode. Used by one trajectory, closed by whoever made it, whatever happened in between."""

    async def reset(self, task: Task) -> Observation:
        """Set the task up and give the first prompt. Raises `EnvironmentFailure`."""
        ...

    async def step(self, action: str) -> StepResult:
        """Carry out what the agent wrote. Never raises for what the agent wrote; raises `EnvironmentFailure`."""
        ...

    async def close(self) -> None:
        """Give everything back. May be called twice, and before `reset`."""
        ...


@runtime_checkable
class PausableEnvironment(Protocol):
    """An environment with timeouts of its own that can be told to wait (TideRL appendix B.1)."""

    async def pause(self) -> None:
        """The agent waits for the model for long: stop timeouts. May be called twice. Raises `EnvironmentFailure`."""
        ...

    async def resume(self) -> None:
        """The next action comes: let them run again. Raises `EnvironmentFailure`."""
        ...


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A transcript for a supervised warm-up: (observation, response) pairs in order, then how it ended."""

    turns: tuple[tuple[Observation, str], ...]
    reward: float


class EnvironmentSuite(Protocol):
    """An environment by name with all that its episodes share: tasks, tool processes, words."""

    @property
    def name(self) -> str:
        """The name it is registered by."""
        ...

    def tasks(self, seed: int) -> TaskSource:
        """Training tasks of this seed."""
        ...

    def environment(self) -> Environment:
        """A fresh environment for one trajectory. Cheap, starts nothing."""
        ...

    async def start(self) -> None:
        """Bring shared parts up (prewarm tool processes). Before the first `reset`."""
        ...

    async def close(self) -> None:
        """End shared parts; nothing runs afterwards. May be called twice, and before `start`."""
        ...

    def vocabulary(self) -> Sequence[str]:
        """Every word that prompts, observations and valid actions are made of, for a word-level tokenizer built
        from scratch; empty where the texts are open.
        """
        ...

    def demonstrations(self, seed: int, count: int) -> Sequence[Demonstration]:
        """Transcripts of valid syntax with random choices: they teach the format and no strategy. May be empty."""
        ...
