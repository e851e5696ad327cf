"""The text agent: exact token contexts, real-token budgets, measured environment time, nothing left open."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl_executor.ports import Finish, Sampling
from pearl_executor.virtual_time import run_virtual
from pearl_rl.rollout.agent import (
    AgentLimits,
    Episode,
    PromptTooLongError,
    TextAgent,
    turn_samples,
    turn_seed,
)
from pearl_rl.rollout.calls import FailureCause, GenerationFailedError, ModelCall, TurnResult
from pearl_rl.rollout.environments.bisect_environment import BisectArguments, BisectSuite
from pearl_rl.rollout.environments.protocol import EnvironmentFailure, Observation, StepResult, Task, observe
from pearl_state.trajectory import GroupId, Trajectory, TrajectoryId, WeightSpan
from pearl_state.worker import WorkerId

END = 0
EPISODE = Episode(
    trajectory=TrajectoryId("t00000007"), group=GroupId("g3"), task=Task("task-9", 5), dispatch_version=4, seed=11
)
LIMITS = AgentLimits(turns=10, new_tokens=8, context_tokens=200)


class Characters:
    """A tokenizer of one token a character; token 0 ends a response."""

    stop_token_ids = (END,)

    def prompt(self, observation: Observation, *, previous: Sequence[int] | None) -> list[int]:
        cut = previous is not None and (not previous or previous[-1] != END)
        return [END] * cut + [ord(character) for character in observation.text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token) for token in tokens if token != END)


@dataclass
class Script:
    """A fake environment: answers from a list, after a while each."""

    answers: list[StepResult]
    prompt: str = "begin"
    reset_s: float = 0.0
    step_s: float = 0.0
    closed: int = 0
    actions: list[str] = field(default_factory=list)
    error: Exception | None = None

    async def reset(self, task: Task) -> Observation:
        await asyncio.sleep(self.reset_s)
        return observe(self.prompt)

    async def step(self, action: str) -> StepResult:
        await asyncio.sleep(self.step_s)
        if self.error is not None:
            raise self.error
        self.actions.append(action)
        return self.answers[len(self.actions) - 1]

    async def close(self) -> None:
        self.closed += 1


@dataclass
class Model:
    """A fake of what the router gives: one text a call."""

    texts: list[str]
    calls: list[ModelCall] = field(default_factory=list)
    error: Exception | None = None
    change: Callable[[TurnResult], TurnResult] = lambda result: result

    async def __call__(self, call: ModelCall) -> TurnResult:
        started_s = asyncio.get_running_loop().time()
        await asyncio.sleep(1.0)
        if self.error is not None:
            raise self.error
        text = self.texts[len(self.calls)]
        self.calls.append(call)
        whole = [*map(ord, text), END]
        tokens = whole[: call.max_new_tokens]
        return self.change(
            TurnResult(
                finish=Finish.STOP if tokens == whole else Finish.LENGTH,
                tokens=tokens,
                logprobs=[-0.5] * len(tokens),
                spans=(WeightSpan(4, len(tokens)),),
                cached_tokens=0,
                queue_s=0.25,
                prefill_s=0.5,
                decode_s=0.25,
                transfer_s=0.0,
                started_s=started_s,
                finished_s=asyncio.get_running_loop().time(),
                interruptions=1,
                worker=WorkerId(2),
            )
        )


def more(text: str, reward: float = 0.0) -> StepResult:
    return StepResult(observe(text, "tool"), reward, False, {"steps": 1})


def last(reward: float = 1.0) -> StepResult:
    return StepResult(observe("bye", "tool"), reward, True, {"solved": True, "word": "x", "nothing": None})


def play(script: Script, model: Model, limits: AgentLimits = LIMITS, **options: Any) -> Trajectory:
    agent = TextAgent(lambda: script, Characters(), limits, **options)
    return run_virtual(agent.run(EPISODE, model))


def test_each_context_is_the_last_one_with_response_and_observation_joined() -> None:
    script, model = Script([more("abc"), more("de"), last()]), Model(["x", "yy", "zzz"])
    trajectory = play(script, model)
    expected: list[int] = []
    for turn, call in zip(trajectory.turns, model.calls, strict=True):
        expected += turn.prompt
        assert list(call.prompt) == expected
        expected += turn.response
    assert Characters().decode(expected) == "beginxabcyydezzz"
    assert script.actions == ["x", "yy", "zzz"]
    assert trajectory.total_tokens == len(expected)


def test_a_trajectory_says_who_it_is_and_what_it_earned() -> None:
    trajectory = play(Script([more("abc", 0.25), last(0.5)]), Model(["x", "y"]))
    assert (trajectory.id, trajectory.group, trajectory.task, trajectory.dispatch_version) == (
        "t00000007",
        "g3",
        "task-9",
        4,
    )
    assert trajectory.reward == 0.75
    assert trajectory.info == {"steps": 1.0, "solved": 1.0, "word": "x", "reset_s": 0.0}
    assert trajectory.spans == (WeightSpan(4, 4),)


def test_times_of_environment_and_model_are_measured_on_the_loops_clock() -> None:
    trajectory = play(Script([more("abc"), last()], reset_s=3.0, step_s=0.5), Model(["x", "y"]))
    assert [turn.environment_s for turn in trajectory.turns] == [0.5, 0.5]
    assert trajectory.info["reset_s"] == 3.0
    assert (trajectory.started_s, trajectory.finished_s) == (0.0, 6.0)
    first = trajectory.turns[0]
    assert (first.started_s, first.finished_s) == (3.0, 4.0)
    assert (first.queue_s, first.prefill_s, first.decode_s, first.interruptions) == (0.25, 0.5, 0.25, 1)


def test_a_cut_response_is_closed_by_the_next_prompt_never_by_changing_it() -> None:
    model = Model(["much too long", "y"])
    trajectory = play(Script([more("abc"), last()]), model)
    first, second = trajectory.turns
    assert Characters().decode(first.response) == "much too"
    assert list(second.prompt) == [END, *map(ord, "abc")]


def test_the_budget_of_a_turn_counts_real_tokens() -> None:
    """CASES B1 (verl#7207): what is left of the whole context bounds a response, and nothing was padded into it."""
    model = Model(["aaaa", "bbbbbbb"])
    trajectory = play(Script([more("cc"), more("dd")]), model, AgentLimits(turns=9, new_tokens=8, context_tokens=19))
    # begin (5) + aaaa and its end (5) + cc (2) leave 7 of 19 tokens.
    assert [call.max_new_tokens for call in model.calls] == [8, 7]
    assert trajectory.total_tokens == 19
    assert trajectory.info["truncated"] == "context"


def test_a_trajectory_that_reaches_its_turns_keeps_what_it_earned() -> None:
    trajectory = play(Script([more("a", 0.5), more("b", 0.25)]), Model(["x", "y"]), replace(LIMITS, turns=2))
    assert trajectory.reward == 0.75
    assert trajectory.info["truncated"] == "turns"


@given(
    texts=st.lists(st.tuples(st.text("xyz", max_size=12), st.text("abc", max_size=12)), min_size=1, max_size=6),
    limit=st.integers(6, 60),
)
def test_no_trajectory_is_longer_than_its_context(texts: list[tuple[str, str]], limit: int) -> None:
    script = Script([*(more(seen) for _, seen in texts[:-1]), last()])
    model = Model([said for said, _ in texts])
    trajectory = play(script, model, AgentLimits(turns=99, new_tokens=10, context_tokens=limit))
    assert trajectory.total_tokens <= limit
    assert all(1 <= call.max_new_tokens <= 10 for call in model.calls)
    assert all(len(turn.response) >= 1 for turn in trajectory.turns)
    assert script.closed == 1


def test_a_prompt_without_room_for_an_answer_is_refused_by_name() -> None:
    script = Script([last()], prompt="0123456789")
    with pytest.raises(PromptTooLongError, match=r"task task-9: its prompt of 10 tokens .* context of 10 tokens"):
        play(script, Model(["x"]), replace(LIMITS, context_tokens=10))
    assert script.closed == 1


@pytest.mark.parametrize(
    "error", [EnvironmentFailure("the sandbox died"), GenerationFailedError(FailureCause.NO_WORKER, "nobody")]
)
def test_a_failure_of_the_infrastructure_gives_no_trajectory_and_leaves_nothing_open(error: Exception) -> None:
    """CASES B6 (NeMo-RL#3589): never an empty text with reward 0."""
    inside = isinstance(error, EnvironmentFailure)
    script = Script([last()], error=error if inside else None)
    with pytest.raises(type(error)):
        play(script, Model(["x"], error=None if inside else error))
    assert script.closed == 1


@pytest.mark.parametrize(("reset_s", "step_s", "what"), [(99.0, 0.0, "reset"), (0.0, 99.0, "step")])
def test_an_environment_that_does_not_answer_is_given_up_by_name(reset_s: float, step_s: float, what: str) -> None:
    script = Script([last()], reset_s=reset_s, step_s=step_s)
    with pytest.raises(EnvironmentFailure, match=f"environment's {what} took longer than environment_s = 60 s"):
        play(script, Model(["x"]))
    assert script.closed == 1


def test_a_cancelled_episode_closes_its_environment() -> None:
    script = Script([last()], step_s=30.0)

    async def main() -> None:
        agent = TextAgent(lambda: script, Characters(), LIMITS)
        running = asyncio.create_task(agent.run(EPISODE, Model(["x"])))
        await asyncio.sleep(5.0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    run_virtual(main())
    assert script.closed == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda result: replace(result, logprobs=result.logprobs[1:]),
        lambda result: replace(result, spans=()),
        lambda result: replace(result, finish=Finish.INTERRUPTED),
    ],
)
def test_a_generation_whose_parts_disagree_is_a_bug_not_a_sample(change: Callable[[TurnResult], TurnResult]) -> None:
    with pytest.raises(ValueError, match="t00000007 turn 0: a generation of 2 tokens"):
        play(Script([last()]), Model(["x"], change=change))


def test_every_turn_samples_with_a_seed_of_its_own_and_stops_at_the_tokenizers_end() -> None:
    model = Model(["x", "y"])
    play(Script([more("a"), last()]), model, sampling=Sampling(temperature=0.7))
    assert [call.sampling.seed for call in model.calls] == [turn_seed(11, 0), turn_seed(11, 1)]
    assert len({turn_seed(seed, turn) for seed in range(30) for turn in range(30)}) == 900
    assert all(call.sampling.stop_token_ids == (END,) and call.sampling.temperature == 0.7 for call in model.calls)


def test_samples_of_turns_add_up_to_the_trajectory() -> None:
    trajectory = play(Script([more("abc"), last()], step_s=0.5), Model(["x", "yy"]))
    first, second = turn_samples(trajectory, step=6)
    assert (first.step, first.turn, first.last, second.turn, second.last) == (6, 0, False, 1, True)
    assert (first.new_prompt_tokens, first.response_tokens, first.context_tokens, first.retained_tokens) == (5, 2, 5, 2)
    assert (second.new_prompt_tokens, second.response_tokens, second.context_tokens) == (3, 3, 10)
    assert second.retained_tokens == 0
    assert first.environment_s == 0.5
    assert second.context_tokens + second.response_tokens == trajectory.total_tokens


def test_many_episodes_of_the_game_run_at_once_in_virtual_time() -> None:
    suite = BisectSuite(BisectArguments(commits=8, processes=0))
    tasks = suite.tasks(3)
    agent = TextAgent(suite.environment, Characters(), AgentLimits(turns=8, new_tokens=40, context_tokens=4000))

    async def probe(call: ModelCall) -> TurnResult:
        seen = Characters().decode(call.prompt).rsplit("suspects ", 1)[1]
        low, high = (int(name[1:]) for name in seen.split())
        model = Model([f"git bisect c{low:02d} c{high:02d} c{(low + high) // 2:02d}"])
        return await model(call)

    async def main() -> list[Trajectory]:
        episodes = [replace(EPISODE, task=tasks.task(index), seed=index) for index in range(60)]
        return await asyncio.gather(*(agent.run(episode, probe) for episode in episodes))

    trajectories = run_virtual(main())
    assert all(trajectory.info["solved"] == 1.0 for trajectory in trajectories)
    assert {len(trajectory.turns) for trajectory in trajectories} == {1, 2, 3, 4}
    waits = [turn.environment_s for trajectory in trajectories for turn in trajectory.turns]
    assert all(0 < wait <= 2.0 for wait in waits)
    assert len(set(waits)) == len(waits)


@pytest.mark.parametrize("key", ["turns", "new_tokens", "context_tokens", "environment_s"])
def test_limits_must_be_above_zero(key: str) -> None:
    with pytest.raises(ValueError, match=f"agent: {key} = 0 must be above 0"):
        replace(LIMITS, **{key: 0})
