"""Agents: what turns model calls and an environment into a trajectory.

The context is kept in tokens and only ever grows: p1 = p0 ⊕ r0 ⊕ o0 (PEARL section 2.1). Generated tokens are never
decoded and encoded again, so training sees exactly what the model saw and prefix caches stay valid over all turns.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from pearl_executor.ports import Finish, Sampling
from pearl_rl.rollout.calls import Generate, ModelCall, TurnResult
from pearl_rl.rollout.environments.protocol import (
    Environment,
    EnvironmentFailure,
    PausableEnvironment,
    StepResult,
    Task,
    Value,
)
from pearl_rl.rollout.lifecycle import LifecycleTrace
from pearl_rl.rollout.tokenizer import AgentTokenizer
from pearl_state.phases import StartupMode
from pearl_state.samples import TurnSample
from pearl_state.trajectory import GroupId, Trajectory, TrajectoryId, Turn

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What an agent is asked to do."""

    trajectory: TrajectoryId
    group: GroupId
    task: Task
    dispatch_version: int
    """Trainer's weight version at dispatch."""
    seed: int
    """Seed of this trajectory's sampling; differs within a group."""


class Agent(Protocol):
    """Plays one episode."""

    async def run(self, episode: Episode, generate: Generate) -> Trajectory:
        """Play to the end. Raises `EnvironmentFailure` or `GenerationFailedError` where the infrastructure failed: run
        the task again, there is no reward. Safe to cancel; leaves nothing open.
        """
        ...


class PromptTooLongError(ValueError):
    """The first prompt leaves no room for a response. Trying again does not help: raise the limit or drop the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLimits:
    """Bounds of a trajectory, in real tokens: padding never counts."""

    turns: int
    """Most model calls."""
    new_tokens: int
    """Most tokens of one response."""
    context_tokens: int
    """Most tokens of the whole trajectory, the last response included."""
    pause_after_s: float = 5.0
    """An environment that can be paused is, while a model call takes longer than this, seconds."""
    environment_s: float = 60.0
    """Longest wait for one answer of the environment, seconds; longer is an `EnvironmentFailure`."""

    def __post_init__(self) -> None:
        for key in ("turns", "new_tokens", "context_tokens", "environment_s", "pause_after_s"):
            if not getattr(self, key) > 0:
                raise ValueError(f"agent: {key} = {getattr(self, key)} must be above 0")


class TextAgent:
    """The usual loop: observation in, text out, until the environment is done or a limit is reached.

    A response that a limit cut off still goes to the environment, which judges it as it is. A trajectory that reaches
    `turns` or `context_tokens` keeps the reward that it earned until then and says so in `info["truncated"]`.
    """

    def __init__(
        self,
        environment_factory: Callable[[], Environment],
        tokenizer: AgentTokenizer,
        limits: AgentLimits,
        sampling: Sampling | None = None,
        lifecycle: LifecycleTrace | None = None,
    ) -> None:
        self._lifecycle = lifecycle
        self._environment_factory = environment_factory
        self._tokenizer = tokenizer
        self._limits = limits
        stop = tokenizer.stop_token_ids
        self._sampling = replace(sampling or Sampling(), stop_token_ids=stop)

    async def run(self, episode: Episode, generate: Generate) -> Trajectory:
        """Play to the end, as `Agent.run` says. Raises `PromptTooLongError` too."""
        environment = self._environment_factory()
        if self._lifecycle is not None:
            warm = getattr(environment, "prewarmed", True)
            self._lifecycle.starting(episode.trajectory, StartupMode.PREWARMED if warm else StartupMode.COLD)
        try:
            return await self._play(episode, generate, environment)
        finally:
            await self._bounded(environment.close(), "close")

    async def _play(self, episode: Episode, generate: Generate, environment: Environment) -> Trajectory:
        play = _Play(episode, _now_s())
        observation = await self._bounded(environment.reset(episode.task), "reset")
        reset_s = _now_s() - play.started_s
        prompt = self._tokenizer.prompt(observation, previous=None)
        if len(prompt) >= self._limits.context_tokens:
            raise PromptTooLongError(
                f"task {episode.task.id}: its prompt of {len(prompt)} tokens leaves no room in a context of "
                f"{self._limits.context_tokens} tokens; raise the agent's context_tokens"
            )
        while True:
            result = await self._answer(generate(self._call(play, prompt)), environment)
            _check(result, play)
            before_s = _now_s()
            outcome = await self._bounded(environment.step(self._tokenizer.decode(result.tokens)), "step")
            play.add(prompt, result, outcome, _now_s() - before_s)
            if outcome.done:
                break
            if len(play.turns) >= self._limits.turns:
                play.info["truncated"] = "turns"
                break
            prompt = self._tokenizer.prompt(outcome.observation, previous=result.tokens)
            if len(play.context) + len(prompt) >= self._limits.context_tokens:
                play.info["truncated"] = "context"
                break
        if self._lifecycle is not None:
            self._lifecycle.rewarding(episode.trajectory)
        return play.trajectory(reset_s)

    async def _answer(self, answer: Awaitable[TurnResult], environment: Environment) -> TurnResult:
        """The model's answer; an environment that can wait is told to where it takes long."""
        if not isinstance(environment, PausableEnvironment):
            return await answer
        task = asyncio.ensure_future(answer)
        try:
            await asyncio.wait({task}, timeout=self._limits.pause_after_s)
            if task.done():
                return task.result()
            await self._bounded(environment.pause(), "pause")
            result = await task
            await self._bounded(environment.resume(), "resume")
            return result
        finally:
            task.cancel()

    def _call(self, play: "_Play", prompt: list[int]) -> ModelCall:
        context = (*play.context, *prompt)
        turn = len(play.turns)
        return ModelCall(
            trajectory=play.episode.trajectory,
            turn=turn,
            prompt=context,
            max_new_tokens=min(self._limits.new_tokens, self._limits.context_tokens - len(context)),
            sampling=replace(self._sampling, seed=turn_seed(play.episode.seed, turn)),
        )

    async def _bounded(self, answer: Awaitable[T], what: str) -> T:
        try:
            async with asyncio.timeout(self._limits.environment_s) as limit:
                return await answer
        except TimeoutError as late:
            if not limit.expired():
                raise
            raise EnvironmentFailure(
                f"the environment's {what} took longer than environment_s = {self._limits.environment_s:g} s"
            ) from late


@dataclass(slots=True)
class _Play:
    """A trajectory while it is played."""

    episode: Episode
    started_s: float
    context: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    reward: float = 0.0
    info: dict[str, float | str] = field(default_factory=dict)

    def add(self, prompt: list[int], result: TurnResult, outcome: StepResult, environment_s: float) -> None:
        self.context += [*prompt, *result.tokens]
        self.turns.append(
            Turn(
                prompt=tuple(prompt),
                response=tuple(result.tokens),
                logprobs=tuple(result.logprobs),
                spans=result.spans,
                environment_s=environment_s,
                prefill_s=result.prefill_s,
                decode_s=result.decode_s,
                queue_s=result.queue_s,
                started_s=result.started_s,
                finished_s=result.finished_s,
                interruptions=result.interruptions,
                cached_tokens=result.cached_tokens,
            )
        )
        self.reward += outcome.reward
        self.info.update({key: _plain(value) for key, value in outcome.info.items() if value is not None})

    def trajectory(self, reset_s: float) -> Trajectory:
        return Trajectory(
            id=self.episode.trajectory,
            group=self.episode.group,
            task=self.episode.task.id,
            turns=tuple(self.turns),
            reward=self.reward,
            dispatch_version=self.episode.dispatch_version,
            started_s=self.started_s,
            finished_s=_now_s(),
            info={**self.info, "reset_s": reset_s},
        )


def turn_seed(seed: int, turn: int) -> int:
    """Sampling seed of one turn, 31 bits; the same (seed, turn) gives the same in every process."""
    digest = hashlib.blake2b(f"{seed}.{turn}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def turn_samples(trajectory: Trajectory, step: int) -> tuple[TurnSample, ...]:
    """What telemetry learns from a finished trajectory, one sample a turn (PEARL section 5, Runtime statistics).

    A response is retained whole in the next turn's context unless its turn says otherwise; the last one has none.
    """
    samples = []
    context = 0
    for number, turn in enumerate(trajectory.turns):
        context += len(turn.prompt)
        last = number == len(trajectory.turns) - 1
        retained = len(turn.response) if turn.retained_tokens is None else turn.retained_tokens
        samples.append(
            TurnSample(
                step=step,
                turn=number,
                new_prompt_tokens=len(turn.prompt),
                response_tokens=len(turn.response),
                retained_tokens=0 if last else retained,
                context_tokens=context,
                prefill_s=turn.prefill_s,
                decode_s=turn.decode_s,
                queue_s=turn.queue_s,
                environment_s=turn.environment_s,
                last=last,
                cached_tokens=None if turn.cached_tokens is None else min(context, turn.cached_tokens),
            )
        )
        context += retained
    return tuple(samples)


def _check(result: TurnResult, play: _Play) -> None:
    """A generation whose parts disagree would poison training silently."""
    tokens, spans = len(result.tokens), sum(span.tokens for span in result.spans)
    if len(result.logprobs) != tokens or spans != tokens or result.finish is Finish.INTERRUPTED:
        raise ValueError(
            f"{play.episode.trajectory} turn {len(play.turns)}: a generation of {tokens} tokens came with "
            f"{len(result.logprobs)} log-probabilities, weight spans over {spans} tokens and finish {result.finish}"
        )


def _plain(value: Value) -> float | str:
    return value if isinstance(value, str) else float(value or 0.0)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
