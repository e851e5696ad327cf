"""Real Gymnasium environments as text environments."""

import asyncio
from typing import Any

import pytest

from pearl_rl.rollout.environments.protocol import EnvironmentFailure, EnvironmentSettingsError, StepResult, Task
from pearl_rl.rollout.environments.suites import make_suite

gymnasium = pytest.importorskip("gymnasium")

from pearl_rl.rollout.environments.gymnasium_adapter import (  # noqa: E402 (after the skip where the extra is missing)
    GymnasiumEnvironment,
    space_decoder,
)

LAKE = {
    "id": "FrozenLake-v1",
    "prompt": "You stand on a 4x4 lake. Say left, down, right or up.",
    "actions": ["left", "down", "right", "up"],
    "options": ["is_slippery=false"],
}


def walk(arguments: dict[str, Any], actions: list[str]) -> tuple[str, list[StepResult]]:
    suite = make_suite("gymnasium", arguments)

    async def main() -> tuple[str, list[StepResult]]:
        await suite.start()
        environment = suite.environment()
        try:
            first = await environment.reset(suite.tasks(0).task(0))
            return first.text, [await environment.step(action) for action in actions]
        finally:
            await environment.close()
            await suite.close()

    return asyncio.run(main())


def test_a_walk_over_the_lake_ends_with_its_reward() -> None:
    first, steps = walk(LAKE, ["down", "go down", "Right", "down", "right", "right!"])
    assert first == "You stand on a 4x4 lake. Say left, down, right or up.\n0"
    assert [step.observation.text for step in steps] == ["4", "8", "9", "13", "14", "15"]
    assert [(step.reward, step.done) for step in steps] == [(0.0, False)] * 5 + [(1.0, True)]
    assert (steps[-1].info["steps"], steps[-1].info["mistakes"]) == (6, 0)


def test_text_that_is_no_action_costs_a_turn_and_moves_nothing() -> None:
    _, steps = walk(LAKE, ["down", "jump", "down"])
    assert [step.observation.text for step in steps] == ["4", "error: expected one of left, down, right, up\n4", "8"]
    assert (steps[1].info["steps"], steps[1].info["mistakes"]) == (1, 1)


def test_actions_without_names_are_numbers() -> None:
    _, steps = walk({"id": "FrozenLake-v1", "options": ["is_slippery=false"]}, ["action 1", "9"])
    assert [step.observation.text for step in steps] == ["4", "error: expected one of 0 to 3\n4"]


def test_the_same_task_plays_the_same() -> None:
    arguments = {"id": "Blackjack-v1", "actions": ["stick", "hit"]}
    assert walk(arguments, ["hit", "stick"]) == walk(arguments, ["hit", "stick"])
    suite = make_suite("gymnasium", arguments)
    assert len({suite.tasks(seed).task(index).seed for seed in range(5) for index in range(50)}) == 250


class Parrot(gymnasium.Env[str, str]):
    """A text game: repeat the word; the word `crash` breaks it."""

    observation_space = gymnasium.spaces.Text(20)
    action_space = gymnasium.spaces.Text(5, min_length=1, charset="abcdefghijklmnopqrstuvwxyz")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "say hello", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "crash":
            raise OSError("no disk")
        return f"you said {action}", float(action == "hello"), False, action == "hello", {"word": action, "raw": [1]}


def parrot(actions: list[str]) -> list[StepResult]:
    async def main() -> list[StepResult]:
        environment = GymnasiumEnvironment(Parrot, "", str, None)
        try:
            await environment.reset(Task("t", 0))
            return [await environment.step(action) for action in actions]
        finally:
            await environment.close()

    return asyncio.run(main())


def test_text_spaces_are_taken_as_they_are() -> None:
    steps = parrot(["too long a text", "hey", "hello"])
    assert steps[0].observation.text == "error: expected 1 to 5 characters of its alphabet\nsay hello"
    assert [step.observation.text for step in steps[1:]] == ["you said hey", "you said hello"]
    assert (steps[-1].reward, steps[-1].done) == (1.0, True)
    assert steps[-1].info == {"word": "hello", "steps": 2, "mistakes": 1}


def test_an_environment_that_raises_is_a_failure_of_the_infrastructure() -> None:
    """CASES B6."""
    with pytest.raises(EnvironmentFailure, match="gymnasium's step failed: OSError: no disk"):
        parrot(["crash"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"id": "NoSuchGame-v0"}, "'NoSuchGame-v0' cannot be made"),
        ({**LAKE, "actions": ["left"]}, "`actions` has 1 names for 4 actions"),
        ({**LAKE, "options": ["no_such_option=1"]}, "cannot be made"),
        ({**LAKE, "decode": "math:no_such"}, "'math:no_such' is not a `module:function`"),
        ({**LAKE, "encode": "math:pi"}, "'math:pi' is not a function"),
        ({**LAKE, "encode": "nothing"}, "'nothing' is not a `module:function`"),
    ],
)
def test_what_cannot_be_built_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentSettingsError, match=message):
        make_suite("gymnasium", arguments)


def test_an_action_space_without_text_needs_a_decoder() -> None:
    with pytest.raises(EnvironmentSettingsError, match="no text mapping for the action space Box"):
        space_decoder(gymnasium.spaces.Box(0, 1), ())
