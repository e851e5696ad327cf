"""Programs that call a chat model, turned inside out: their calls are observations, actions are the answers."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from pearl_rl.rollout.environments.chat_endpoint import ChatEndpoint, ChatRefusal, ChatRequest
from pearl_rl.rollout.environments.program_environment import (
    ProgramEnvironment,
    ProgramOutcome,
    RewrittenConversationError,
    assistant_message,
)
from pearl_rl.rollout.environments.protocol import EnvironmentFailure, Observation, StepResult, Task
from pearl_rl.rollout.environments.verifiers_adapter import outcome

TASK = Task("task-1", 0)
Chat = Callable[[list[dict[str, Any]]], Awaitable[dict[str, Any]]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def program(body: Callable[[Chat], Awaitable[ProgramOutcome]], **request: Any) -> Callable[..., Any]:
    """A program whose `chat` calls the model of its environment directly."""

    async def play(environment: ProgramEnvironment, task: Task) -> ProgramOutcome:
        async def chat(messages: list[dict[str, Any]]) -> dict[str, Any]:
            return dict(await environment.answer(ChatRequest("s", {"messages": messages, **request})))

        return await body(chat)

    return play


async def countdown(chat: Chat) -> ProgramOutcome:
    """Asks until it is told `stop`, and keeps the whole conversation."""
    messages = [{"role": "system", "content": "count"}, user("go")]
    for number in range(9):
        messages.append(await chat(messages))
        if messages[-1]["content"] == "stop":
            return ProgramOutcome(0.5, {"asked": number})
        messages.append(user(f"and {number}"))
    return ProgramOutcome(0.0)


def test_each_call_shows_only_what_is_new_and_the_end_brings_the_reward() -> None:
    async def main() -> tuple[Observation, StepResult, StepResult]:
        environment = ProgramEnvironment(program(countdown))
        first = await environment.reset(TASK)
        second, last = await environment.step("one"), await environment.step("stop")
        await environment.close()
        return first, second, last

    first, second, last = asyncio.run(main())
    assert [(message.role, message.content) for message in first.messages] == [("system", "count"), ("user", "go")]
    assert [(message.role, message.content) for message in second.observation.messages] == [("user", "and 0")]
    assert (second.reward, second.done) == (0.0, False)
    assert (last.reward, last.done, last.info) == (0.5, True, {"asked": 1, "calls": 2})


def test_calls_of_tools_become_tool_calls_and_their_results_observations() -> None:
    tools = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}]

    async def body(chat: Chat) -> ProgramOutcome:
        messages = [user("2 + 3")]
        reply = await chat(messages)
        (call,) = reply["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": '{"a": 2, "b": 3}'}
        messages += [reply, {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "5"}]}]
        return ProgramOutcome(float((await chat(messages))["content"] == "five"))

    async def main() -> tuple[Observation, StepResult, StepResult]:
        environment = ProgramEnvironment(program(body, tools=tools))
        first = await environment.reset(TASK)
        call = 'Let me. <tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
        second, last = await environment.step(call), await environment.step("five")
        await environment.close()
        return first, second, last

    first, second, last = asyncio.run(main())
    assert '"name": "add"' in first.messages[0].content
    assert "<tool_call>" in first.messages[0].content
    assert [(message.role, message.content) for message in second.observation.messages] == [("tool", "5")]
    assert last.reward == 1.0


@pytest.mark.parametrize("text", ["<tool_call>{not json}</tool_call>", '<tool_call>{"arguments": {}}</tool_call>', "x"])
def test_what_is_no_well_formed_call_stays_text(text: str) -> None:
    assert assistant_message(text, 0) == {"role": "assistant", "content": text}


def test_several_calls_of_one_message_have_ids_of_their_own() -> None:
    text = "".join(f'<tool_call>{{"name": "t{number}"}}</tool_call>' for number in range(3))
    message = assistant_message(text, 4)
    assert [call["id"] for call in message["tool_calls"]] == ["call_4_0", "call_4_1", "call_4_2"]
    assert message["content"] == ""


@pytest.mark.parametrize("change", ["drop", "edit", "forget"])
def test_a_program_that_rewrites_its_conversation_is_refused(change: str) -> None:
    async def body(chat: Chat) -> ProgramOutcome:
        messages = [user("a"), user("b")]
        messages.append(await chat(messages))
        if change == "drop":
            messages = [user("c")]
        elif change == "edit":
            messages = [user("A"), *messages[1:], user("c")]
        else:
            messages = [*messages[:2], {"role": "assistant", "content": "other"}, user("c")]
        await chat(messages)
        return ProgramOutcome(1.0)

    async def main() -> None:
        environment = ProgramEnvironment(program(body))
        await environment.reset(TASK)
        try:
            with pytest.raises(RewrittenConversationError, match="first 3 messages"):
                await environment.step("x")
        finally:
            await environment.close()

    asyncio.run(main())


def test_a_program_that_breaks_is_a_failure_where_the_agent_waits_for_it() -> None:
    async def body(chat: Chat) -> ProgramOutcome:
        await chat([user("a")])
        raise EnvironmentFailure("its service is gone")

    async def silent(chat: Chat) -> ProgramOutcome:
        return ProgramOutcome(1.0)

    async def main() -> None:
        environment = ProgramEnvironment(program(body))
        await environment.reset(TASK)
        with pytest.raises(EnvironmentFailure, match="its service is gone"):
            await environment.step("x")
        await environment.close()
        with pytest.raises(EnvironmentFailure, match="task task-1: the program ended without a model call"):
            await ProgramEnvironment(program(silent)).reset(TASK)

    asyncio.run(main())


def test_closing_ends_the_program_and_refuses_its_later_calls() -> None:
    ended: list[str] = []

    async def body(chat: Chat) -> ProgramOutcome:
        try:
            await chat([user("a")])
        finally:
            ended.append("program")
        return ProgramOutcome(1.0)

    async def main() -> None:
        environment = ProgramEnvironment(program(body))
        await environment.reset(TASK)
        await environment.close()
        await environment.close()
        with pytest.raises(ChatRefusal, match="the episode is over"):
            await environment.answer(ChatRequest("s", {"messages": []}))

    asyncio.run(main())
    assert ended == ["program"]


# --- the endpoint over real HTTP ----------------------------------------------------------------------------------


async def post(
    url: str, body: bytes, headers: Mapping[str, str] | None = None, method: str = "POST"
) -> tuple[int, bytes]:
    host, _, rest = url.removeprefix("http://").partition("/")
    name, port = host.split(":")
    reader, writer = await asyncio.open_connection(name, int(port))
    lines = [f"{method} /{rest} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{key}: {value}" for key, value in (headers or {}).items()]
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)
    await writer.drain()
    head, _, payload = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return int(head.split()[1]), payload


async def echo(request: ChatRequest) -> Mapping[str, Any]:
    if request.session == "none":
        raise ChatRefusal(404, "no such episode")
    return {"role": "assistant", "content": f"{request.session}: {request.body['messages'][-1]['content']}"}


def served(*requests: tuple[str, bytes, Mapping[str, str], str]) -> list[tuple[int, bytes]]:
    async def main() -> list[tuple[int, bytes]]:
        endpoint = ChatEndpoint(echo, key="secret")
        await endpoint.start()
        try:
            return [await post(endpoint.url + path, body, headers, method) for path, body, headers, method in requests]
        finally:
            await endpoint.close()
            await endpoint.close()

    return asyncio.run(main())


def chat_body(**more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [user("hi")], **more}).encode()


def test_the_endpoint_answers_chat_completions_by_session() -> None:
    ((status, body),) = served(("/chat/completions", chat_body(), {"X-Session-ID": "s7"}, "POST"))
    answer = json.loads(body)
    assert (status, answer["object"], answer["model"]) == (200, "chat.completion", "m")
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "s7: hi"}
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_stream_holds_the_whole_answer_and_its_end() -> None:
    ((status, body),) = served(("/chat/completions", chat_body(stream=True), {}, "POST"))
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    chunks = [json.loads(line) for line in lines[:-1]]
    assert (status, lines[-1]) == (200, "[DONE]")
    assert chunks[0]["choices"][0]["delta"]["content"] == ": hi"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:2]] == [None, "stop"]


def test_what_the_endpoint_does_not_serve_is_refused() -> None:
    answers = served(
        ("/chat/completions", b"{", {}, "POST"),
        ("/chat/completions", b"{}", {}, "POST"),
        ("/models", b"", {}, "GET"),
        ("/../wrong/v1/chat/completions", chat_body(), {}, "POST"),
        ("/chat/completions", chat_body(), {"x-session-id": "none"}, "POST"),
    )
    assert [status for status, _ in answers] == [400, 400, 404, 404, 404]
    assert json.loads(answers[-1][1])["error"]["message"] == "no such episode"


def test_a_client_that_speaks_no_http_or_leaves_disturbs_nobody() -> None:
    async def main() -> int:
        endpoint = ChatEndpoint(echo, key="secret")
        await endpoint.start()
        port = int(endpoint.url.split(":")[2].split("/")[0])
        for rubbish in (b"rubbish\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: 99\r\n\r\nshort", b""):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(rubbish)
            writer.close()
            await writer.wait_closed()
        status, _ = await post(f"{endpoint.url}/chat/completions", chat_body())
        await endpoint.close()
        return status

    assert asyncio.run(main()) == 200


def test_many_programs_share_one_endpoint() -> None:
    async def main() -> list[float]:
        environments: dict[str, ProgramEnvironment] = {}

        async def answer(request: ChatRequest) -> Mapping[str, Any]:
            return await environments[request.session].answer(request)

        endpoint = ChatEndpoint(answer, key="secret")
        await endpoint.start()

        async def episode(number: int) -> float:
            async def play(environment: ProgramEnvironment, task: Task) -> ProgramOutcome:
                body = json.dumps({"messages": [user(str(number))]}).encode()
                _, payload = await post(f"{endpoint.url}/chat/completions", body, {"x-session-id": task.id})
                said = json.loads(payload)["choices"][0]["message"]["content"]
                return ProgramOutcome(float(said))

            environment = environments[str(number)] = ProgramEnvironment(play)
            seen = await environment.reset(Task(str(number), 0))
            result = await environment.step(str(2 * int(seen.text)))
            await environment.close()
            return result.reward

        try:
            return await asyncio.gather(*map(episode, range(40)))
        finally:
            await endpoint.close()

    assert asyncio.run(main()) == [2.0 * number for number in range(40)]


# --- how a verifiers episode is judged ----------------------------------------------------------------------------


@dataclass
class Trace:
    """The fields of a verifiers trace that the adapter reads."""

    reward: float = 0.0
    metrics: dict[str, float | None] = field(default_factory=dict)
    stop_condition: str | None = None
    errors: list[Any] = field(default_factory=list)


def test_a_finished_episode_gives_reward_and_measures() -> None:
    trace = Trace(0.75, {"length": 3, "unknown": None}, "agent_completed")
    ended = outcome(SimpleNamespace(ok=True, errors=[], traces=[trace]))
    assert ended == ProgramOutcome(0.75, {"length": 3.0, "stop": "agent_completed"})


def test_an_episode_that_verifiers_could_not_finish_is_a_failure_with_its_reason() -> None:
    """CASES B6: never a reward of 0."""
    error = SimpleNamespace(type="SandboxError", message="no docker")
    with pytest.raises(EnvironmentFailure, match="SandboxError: no docker"):
        outcome(SimpleNamespace(ok=False, errors=[], traces=[Trace(errors=[error])]))
    with pytest.raises(EnvironmentFailure, match="no reason given"):
        outcome(SimpleNamespace(ok=True, errors=[], traces=[]))
