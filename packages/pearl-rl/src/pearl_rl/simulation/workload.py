"""What simulated trajectories do: scripts from a turn model or from a recording, within a context limit."""

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pearl_rl.rollout.environments.protocol import Task
from pearl_rl.simulation.turn_model import TurnModel

_LEAST_RESPONSE = 1


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """One turn: what the environment adds, what the model generates, and what the environment then takes."""

    prompt_tokens: int
    response_tokens: int
    tool_s: float
    retained_tokens: int
    """Generated tokens that stay in the context; reasoning may be dropped from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A whole trajectory, known before it is played."""

    turns: tuple[ScriptedTurn, ...]
    """The first turn's prompt is the whole first prompt."""
    root: str = ""
    """Name of the first prompt, which all samples of its task share."""
    reset_s: float = 0.0
    """Time until the environment is ready, seconds."""
    reward: float = 0.0
    truncated: bool = False
    """Whether the context limit ended it."""

    @property
    def response_tokens(self) -> int:
        """Generated tokens of all turns."""
        return sum(turn.response_tokens for turn in self.turns)

    @property
    def total_tokens(self) -> int:
        """Prompt, observation and response tokens."""
        return sum(turn.prompt_tokens + turn.response_tokens for turn in self.turns)


class Workload(Protocol):
    """Gives the script of every sample. The same (task, sample) gives the same script."""

    @property
    def stable_fraction(self) -> float:
        """Part of a prompt that the next turn's prompt repeats unchanged; the rest is rewritten (history edited)."""
        ...

    def script(self, task: Task, sample: int) -> Script:
        """The script of one sample of a task; samples are numbered over the whole run."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """How a turn model is stretched, and where it is cut. Scales multiply the model's values."""

    max_context_tokens: int = 32_768
    """Longest trajectory, the last response included."""
    max_turns: int = 1000
    max_response_tokens: int = 1 << 30
    turns_scale: float = 1.0
    turns_spread: float = 1.0
    """Exponent on a trajectory's turns around their median: above 1, long trajectories are longer still."""
    first_prompt_scale: float = 1.0
    prompt_scale: float = 1.0
    response_scale: float = 1.0
    tool_scale: float = 1.0
    reset_s: float = 0.0
    retained_fraction: float = 1.0
    """Part of the generated tokens that stays in the next prompts; the rest (reasoning) is dropped from them."""
    stable_fraction: float = 1.0
    """Part of a prompt that the next prompt repeats unchanged; the rest is rewritten (history edited)."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for what no trajectory can have."""
        for name in ("max_context_tokens", "max_turns", "max_response_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"workload: {name} = {getattr(self, name)} must be at least 1")
        for name in (
            "turns_scale",
            "turns_spread",
            "first_prompt_scale",
            "prompt_scale",
            "response_scale",
            "tool_scale",
            "reset_s",
        ):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"workload: {name} = {value} must be a number of at least 0")
        for name in ("retained_fraction", "stable_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"workload: {name} = {getattr(self, name)} must be in [0, 1]")


class ModelWorkload:
    """Scripts drawn from a turn model."""

    def __init__(self, model: TurnModel, options: WorkloadOptions, seed: int) -> None:
        self._model = model
        self._options = options
        self._seed = seed

    @property
    def stable_fraction(self) -> float:
        """See `Workload`."""
        return self._options.stable_fraction

    def script(self, task: Task, sample: int) -> Script:
        """See `Workload`."""
        shared = random.Random(f"{self._seed}/task/{task.id}")
        own = random.Random(f"{self._seed}/sample/{sample}")
        options = self._options
        first, length, turns = self._model.trajectory(shared, own, options.max_turns)
        reward = 1.0 if own.random() < 0.5 else 0.0
        count = _turn_count(length, self._model.turns.at(0.0), options)
        prompts = itertools.chain([round(first * options.first_prompt_scale)], itertools.repeat(None))
        # Lazily: a full context ends most trajectories long before their last turn.
        sized = (
            (
                round(new * options.prompt_scale) if prompt is None else prompt,
                round(response * options.response_scale),
                tool_s * options.tool_scale,
            )
            for prompt, (new, response, tool_s) in zip(prompts, _stretched(turns, count), strict=False)
        )
        return fitted(sized, options, root=f"task {task.id}", reward=reward)


def _turn_count(turns: int, median: float, options: WorkloadOptions) -> int:
    stretched: float = options.turns_scale * median * (turns / median) ** options.turns_spread
    return max(1, round(stretched))


def _stretched(turns: Sequence[tuple[int, int, float]], count: int) -> Iterator[tuple[int, int, float]]:
    """`count` turns: repeated from the second on, or cut."""
    yield from turns[:count]
    rest = turns[1:] or turns
    for number in range(len(turns), count):
        yield rest[number % len(rest)]


def fitted(
    turns: Iterable[tuple[int, int, float]],
    options: WorkloadOptions,
    *,
    root: str = "",
    reward: float = 0.0,
    retained: Sequence[int | None] = (),
) -> Script:
    """A script of (new prompt tokens, generated tokens, tool time), cut where the context is full.

    `retained` is how many generated tokens of each turn stay in the context, where that is known.
    """
    kept: list[ScriptedTurn] = []
    context, truncated = 0, False
    stays = itertools.chain(retained, itertools.repeat(None))
    for (new, response, tool_s), staying in zip(itertools.islice(turns, options.max_turns), stays, strict=False):
        new = max(1, new)
        room = options.max_context_tokens - context - new
        if room < _LEAST_RESPONSE:
            truncated = True
            break
        tokens = min(max(1, response), options.max_response_tokens, room)
        truncated = tokens == room
        left = round(tokens * options.retained_fraction) if staying is None else min(staying, tokens)
        kept.append(ScriptedTurn(new, tokens, tool_s, left))
        context += new + left
        if truncated:
            break
    if not kept:
        # The first prompt alone is too long: it is cut to leave room for one token.
        kept.append(ScriptedTurn(options.max_context_tokens - 1, 1, 0.0, 1))
    return Script(turns=tuple(kept), root=root, reset_s=options.reset_s, reward=reward, truncated=truncated)


class ScriptedWorkload:
    """Replays scripts in their order, from the beginning again when they are used up."""

    def __init__(self, scripts: Sequence[Script], *, stable_fraction: float = 1.0) -> None:
        if not scripts:
            raise ValueError("a replay needs at least one trajectory")
        self._scripts = scripts
        self.stable_fraction = stable_fraction

    def script(self, task: Task, sample: int) -> Script:
        """See `Workload`. Which sample of its group a refill replaces is not known: it takes the next script."""
        del task
        return self._scripts[sample % len(self._scripts)]


class SimulatedTasks:
    """An endless source of tasks that are only numbers."""

    size = None

    def task(self, index: int) -> Task:
        """The task of a group."""
        return Task(id=f"{index:06d}", seed=index, payload={})
