"""Environments over HTTP: an episode's way, and sessions whose time stands still while their task waits."""

import asyncio
from collections.abc import Sequence

import pytest

from pearl_executor.ports import Finish
from pearl_executor.virtual_time import run_virtual
from pearl_rl.rollout.agent import AgentLimits, Episode, TextAgent
from pearl_rl.rollout.calls import ModelCall, TurnResult
from pearl_rl.rollout.environments.http_environment import HttpEnvironment, HttpSuite
from pearl_rl.rollout.environments.protocol import (
    EnvironmentFailure,
    EnvironmentSettingsError,
    Observation,
    PausableEnvironment,
    StepResult,
    Task,
    observe,
)
from pearl_rl.rollout.environments.sessions import EnvironmentServer, Sessions
from pearl_rl.rollout.environments.suites import make_suite
from pearl_state.trajectory import GroupId, TrajectoryId, WeightSpan
from pearl_state.worker import WorkerId

TASK = Task(id="task-1", seed=7, payload={"goal": "three"})


class Counting:
    """Done after three actions; an action `break` breaks it."""

    def __init__(self) -> None:
        self.actions = 0
        self.closed = 0

    async def reset(self, task: Task) -> Observation:
        return observe(f"count to {task.payload['goal']}")

    async def step(self, action: str) -> StepResult:
        if action == "break":
            raise EnvironmentFailure("the counter broke")
        self.actions += 1
        return StepResult(observe(str(self.actions), "tool"), 0.5, self.actions == 3, {"actions": self.actions})

    async def close(self) -> None:
        self.closed += 1


def test_an_episode_runs_over_the_five_endpoints() -> None:
    async def main() -> None:
        server = EnvironmentServer(Counting, token="secret")
        await server.start()
        try:
            environment = HttpEnvironment(server.url, token="secret")
            assert isinstance(environment, PausableEnvironment)
            assert (await environment.reset(TASK)).text == "count to three"
            await environment.pause()
            await environment.pause()
            await environment.resume()
            outcomes = [await environment.step("one more") for _ in range(3)]
            assert [outcome.done for outcome in outcomes] == [False, False, True]
            assert outcomes[-1].observation.messages[0].role == "tool"
            assert outcomes[-1].info == {"actions": 3}
            await environment.close()
            await environment.close()
            assert len(server.sessions) == 0
        finally:
            await server.close()

    asyncio.run(main())


def test_what_goes_wrong_is_the_environment_s_failure_in_one_line() -> None:
    async def main() -> None:
        server = EnvironmentServer(Counting, token="secret")
        await server.start()
        try:
            with pytest.raises(EnvironmentFailure, match=r"/start: 401: the token"):
                await HttpEnvironment(server.url).reset(TASK)
            environment = HttpEnvironment(server.url, token="secret")
            await environment.reset(TASK)
            with pytest.raises(EnvironmentFailure, match="502: the counter broke"):
                await environment.step("break")
            await server.sessions.aclose()
            with pytest.raises(EnvironmentFailure, match=r"404: .*its session is over"):
                await environment.step("one more")
            with pytest.raises(EnvironmentFailure, match=r"404: /start/observation: use /start"):
                await HttpEnvironment(f"{server.url}/start", token="secret").step("one")
        finally:
            await server.close()
        with pytest.raises(EnvironmentFailure, match="/start"):
            await environment.reset(TASK)

    asyncio.run(main())


def test_an_unused_session_ends_and_a_paused_one_does_not() -> None:
    async def main() -> None:
        made: list[Counting] = []
        sessions = Sessions(lambda: made.append(Counting()) or made[-1], inactivity_s=60.0)  # type: ignore[func-returns-value]
        paused, _ = await sessions.start(TASK)
        await sessions.start(TASK)
        await asyncio.sleep(40.0)
        sessions.pause(paused)
        await asyncio.sleep(1000.0)
        assert (len(sessions), sessions.expired) == (1, 1)
        assert [environment.closed for environment in made] == [0, 1]
        sessions.resume(paused)
        # Twenty seconds are left of its sixty; an action gives it all of them again.
        await asyncio.sleep(19.0)
        await sessions.observe(paused, "one more")
        await asyncio.sleep(59.0)
        assert len(sessions) == 1
        await asyncio.sleep(2.0)
        assert (len(sessions), sessions.expired) == (0, 2)
        await sessions.aclose()

    run_virtual(main())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "url = ''"),
        ({"url": "ftp://x"}, "must be like http://"),
        ({"url": "http://h:1", "request_s": 0}, "request_s"),
        ({"url": "http://h:1", "tokn": "x"}, "unknown argument tokn"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(EnvironmentSettingsError, match=message):
        make_suite("http", arguments)


def test_the_suite_gives_numbered_tasks_and_environments() -> None:
    suite = HttpSuite.build({"url": "http://127.0.0.1:9"})
    assert suite.tasks(3).task(5) == suite.tasks(3).task(5)
    assert suite.tasks(3).task(5) != suite.tasks(4).task(5)
    assert isinstance(suite.environment(), HttpEnvironment)


class Letters:
    """A tokenizer of one token a character."""

    stop_token_ids = (0,)

    def prompt(self, observation: Observation, *, previous: Sequence[int] | None) -> list[int]:
        del previous
        return [ord(letter) for letter in observation.text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))


class Patient(Counting):
    """Notes when it was told to wait, and when to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, float]] = []

    async def pause(self) -> None:
        self.told.append(("pause", asyncio.get_running_loop().time()))

    async def resume(self) -> None:
        self.told.append(("resume", asyncio.get_running_loop().time()))


def test_the_agent_pauses_an_environment_only_while_the_model_takes_long() -> None:
    async def main() -> None:
        environment = Patient()
        limits = AgentLimits(turns=3, new_tokens=4, context_tokens=400, pause_after_s=5.0)
        agent = TextAgent(lambda: environment, Letters(), limits)
        waits_s = iter((1.0, 20.0, 1.0))

        async def generate(call: ModelCall) -> TurnResult:
            await asyncio.sleep(next(waits_s))
            return TurnResult(
                finish=Finish.LENGTH, tokens=[5], logprobs=[-1.0], spans=(WeightSpan(0, 1),), cached_tokens=0,
                queue_s=0.0, prefill_s=0.0, decode_s=0.0, transfer_s=0.0, started_s=0.0, finished_s=0.0,
                interruptions=0, worker=WorkerId(0),
            )  # fmt: skip

        episode = Episode(trajectory=TrajectoryId("t"), group=GroupId("g"), task=TASK, dispatch_version=0, seed=1)
        await agent.run(episode, generate)
        assert environment.told == [("pause", 6.0), ("resume", 21.0)]

    run_virtual(main())


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", "not HTTP"),
        (b"hello\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 yes\r\n\r\n{}", "invalid literal"),
        (b"HTTP/1.1 200 OK\r\n\r\n[]", "no JSON object"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000, "/observation"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"done": true}', "reward is None"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"reward": NaN, "done": true}', "reward is nan"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"reward": 1.0, "done": "no"}', "done is 'no'"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"reward": 1.0, "done": true, "messages": 7}', "no messages"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (33 * 2**20), "longer than"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_answer_that_is_none_is_the_environment_s_failure(answer: bytes, said: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        with pytest.raises(EnvironmentFailure, match=said):
            await HttpEnvironment(f"http://{host}:{port}").step("one")
        server.close()

    asyncio.run(main())
