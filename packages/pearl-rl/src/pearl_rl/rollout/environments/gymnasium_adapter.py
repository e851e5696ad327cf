"""Any Gymnasium environment with a text mapping: text spaces as they are, discrete actions by number or by name.

Environments are synchronous and may be slow, so each runs on a thread of its own.
"""

import asyncio
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pearl_rl.rollout.environments.arguments import read_arguments, read_options
from pearl_rl.rollout.environments.protocol import (
    Demonstration,
    EnvironmentFailure,
    EnvironmentSettingsError,
    Observation,
    StepResult,
    Task,
    TaskSource,
    Value,
    observe,
)
from pearl_rl.rollout.environments.task_sources import SeededTasks

T = TypeVar("T")

Encode = Callable[[Any], str]
"""An observation of the environment as text."""
Decode = Callable[[str], Any]
"""What the agent wrote as an action; raises `ValueError` with what is wrong for the agent to read."""


@dataclass(frozen=True, slots=True)
class GymnasiumArguments:
    """Arguments of the environment `gymnasium`."""

    id: str
    """Registered id, e.g. `FrozenLake-v1`; `module:id` imports the module first, as gymnasium does."""
    prompt: str = ""
    """Said before the first observation: what the task is and what actions look like."""
    actions: list[str] = field(default_factory=list)
    """Names of a discrete space's actions in order; empty: numbers."""
    encode: str = ""
    """`module:function` that turns an observation into text; empty: text as it is, anything else by `str`."""
    decode: str = ""
    """`module:function` that turns text into an action; empty: by the action space."""
    options: list[str] = field(default_factory=list)
    """Keyword arguments of `gymnasium.make`, each `key=value`."""


class GymnasiumEnvironment:
    """One episode of a Gymnasium environment."""

    def __init__(self, make: Callable[[], Any], prompt: str, encode: Encode, decode: Decode | None) -> None:
        self._make = make
        self._prompt = prompt
        self._encode = encode
        self._decode = decode
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gymnasium")
        self._environment: Any = None
        self._steps = 0
        self._mistakes = 0
        self._last = ""

    async def reset(self, task: Task) -> Observation:
        """Make the environment and reset it with the task's seed. Raises `EnvironmentFailure`."""

        def begin() -> str:
            self._environment = self._make()
            seen, _ = self._environment.reset(seed=task.seed)
            return self._encode(seen)

        self._last = await self._call(begin, "reset")
        return observe(f"{self._prompt}\n{self._last}".strip())

    async def step(self, action: str) -> StepResult:
        """Take an action. Text that is no action is the agent's mistake: nothing moves and it costs a turn."""
        if self._environment is None:
            raise RuntimeError("step before reset")
        decode = self._decode or space_decoder(self._environment.action_space, ())
        try:
            chosen = decode(action)
        except ValueError as wrong:
            self._mistakes += 1
            return StepResult(observe(f"error: {wrong}\n{self._last}"), 0.0, False, self._info({}))

        def move() -> tuple[str, float, bool, Mapping[str, Any]]:
            seen, reward, terminated, truncated, info = self._environment.step(chosen)
            return self._encode(seen), float(reward), bool(terminated or truncated), info

        self._steps += 1
        self._last, reward, done, info = await self._call(move, "step")
        return StepResult(observe(self._last), reward, done, self._info(info))

    async def close(self) -> None:
        """Close the environment and end its thread."""
        environment, self._environment = self._environment, None
        if environment is not None:
            await self._call(environment.close, "close")
        self._thread.shutdown(wait=False)

    async def _call(self, work: Callable[[], T], what: str) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except Exception as error:
            # Whatever somebody else's environment raises is not the agent's doing.
            raise EnvironmentFailure(f"gymnasium's {what} failed: {type(error).__name__}: {error}") from error

    def _info(self, info: Mapping[str, Any]) -> dict[str, Value]:
        plain = {key: value for key, value in info.items() if isinstance(value, str | int | float)}
        return {**plain, "steps": self._steps, "mistakes": self._mistakes}


class GymnasiumSuite:
    """The environment `gymnasium`."""

    name = "gymnasium"

    def __init__(self, arguments: GymnasiumArguments) -> None:
        gymnasium = _gymnasium()
        self._arguments = arguments
        self._options = read_options(self.name, arguments.options)
        self._encode: Encode = _function(arguments.encode) if arguments.encode else _text
        try:
            probe = gymnasium.make(arguments.id, **self._options)
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise EnvironmentSettingsError(f"gymnasium: {arguments.id!r} cannot be made: {error}") from error
        try:
            self._decode = (
                _function(arguments.decode)
                if arguments.decode
                else space_decoder(probe.action_space, tuple(arguments.actions))
            )
        finally:
            probe.close()

    @classmethod
    def build(cls, arguments: Mapping[str, Any]) -> "GymnasiumSuite":
        """From settings. Raises `EnvironmentSettingsError`."""
        if "id" not in arguments:
            raise EnvironmentSettingsError("gymnasium: the argument `id` is missing; give e.g. id = 'FrozenLake-v1'")
        return cls(read_arguments(GymnasiumArguments, cls.name, arguments))

    def tasks(self, seed: int) -> TaskSource:
        """An endless sequence of seeds."""
        return SeededTasks(lambda index: Task(f"{self._arguments.id}-{index:06d}", (seed * 1_000_003 + index) % 2**31))

    def environment(self) -> GymnasiumEnvironment:
        """An episode that is yet to be reset."""
        given, options, gymnasium = self._arguments, self._options, _gymnasium()

        def make() -> Any:
            return gymnasium.make(given.id, **options)

        return GymnasiumEnvironment(make, given.prompt, self._encode, self._decode)

    async def start(self) -> None:
        """Nothing is shared between episodes."""

    async def close(self) -> None:
        """Nothing is shared between episodes."""

    def vocabulary(self) -> Sequence[str]:
        """Empty: the texts are open."""
        return ()

    def demonstrations(self, seed: int, count: int) -> Sequence[Demonstration]:  # noqa: ARG002 (the protocol's)
        """None: the format is the environment's own."""
        return ()


def space_decoder(space: Any, names: tuple[str, ...]) -> Decode:
    """Text to actions of a `Text` or `Discrete` space. Raises `EnvironmentSettingsError` for any other space."""
    spaces = _gymnasium().spaces
    if isinstance(space, spaces.Text):
        return lambda text: _checked_text(space, text)
    if not isinstance(space, spaces.Discrete):
        raise EnvironmentSettingsError(f"gymnasium: no text mapping for the action space {space}; give `decode`")
    if names and len(names) != space.n:
        raise EnvironmentSettingsError(f"gymnasium: `actions` has {len(names)} names for {space.n} actions")
    first = int(space.start)
    words = {name.lower(): first + number for number, name in enumerate(names)}

    def decode(text: str) -> int:
        for word in re.findall(r"[\w-]+", text.lower()):
            if word in words:
                return words[word]
            if not words and word.isdecimal() and space.contains(int(word)):
                return int(word)
        raise ValueError(f"expected one of {', '.join(names) or f'{first} to {first + int(space.n) - 1}'}")

    return decode


def _checked_text(space: Any, text: str) -> str:
    if not space.contains(text):
        raise ValueError(f"expected {space.min_length} to {space.max_length} characters of its alphabet")
    return text


def _text(seen: Any) -> str:
    return seen if isinstance(seen, str) else str(seen)


def _function(name: str) -> Callable[[Any], Any]:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise EnvironmentSettingsError(f"gymnasium: {name!r} is not a `module:function`: {error}") from error
    if not callable(found):
        raise EnvironmentSettingsError(f"gymnasium: {name!r} is not a function")
    return found  # type: ignore[no-any-return]


def _gymnasium() -> Any:
    try:
        import gymnasium
    except ImportError as missing:
        raise EnvironmentSettingsError("gymnasium is not installed; install pearl-rl[envs]") from missing
    return gymnasium
