"""A program that calls a chat model, as an environment: its model calls are observations, our actions the answers.

The program keeps the whole conversation and sends it with every call. An agent here must see only what is new, so the
program may only append: one that rewrites earlier messages (compaction, several conversations) cannot be used.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pearl_rl.rollout.environments.chat_endpoint import ChatRefusal, ChatRequest
from pearl_rl.rollout.environments.protocol import (
    EnvironmentFailure,
    Message,
    Observation,
    StepResult,
    Task,
    Value,
    observe,
)

TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
"""How models of the Qwen family write a call, and what the tool prompt below asks for."""


class RewrittenConversationError(RuntimeError):
    """The program does not only append to its conversation, so its episodes are no single token sequence."""


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """How a program ended."""

    reward: float
    info: Mapping[str, Value] = field(default_factory=dict)


Program = Callable[["ProgramEnvironment", Task], Awaitable[ProgramOutcome]]
"""Plays a task; its model calls must reach `ProgramEnvironment.answer`. Raises `EnvironmentFailure`."""


class ProgramEnvironment:
    """One run of a program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._run: asyncio.Task[ProgramOutcome] | None = None
        self._calls: asyncio.Queue[tuple[ChatRequest, asyncio.Future[Mapping[str, Any]]]] = asyncio.Queue()
        self._waiting: asyncio.Future[Mapping[str, Any]] | None = None
        self._known: list[Mapping[str, Any]] = []
        self._offers_tools = False
        self._turns = 0

    async def answer(self, request: ChatRequest) -> Mapping[str, Any]:
        """The assistant's message for a model call of this run; waits until the agent has acted."""
        if self._run is None or self._run.done():
            raise ChatRefusal(409, "the episode is over")
        promise: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        await self._calls.put((request, promise))
        return await promise

    async def reset(self, task: Task) -> Observation:
        """Start the program and wait for its first model call. Raises `EnvironmentFailure`."""
        self._run = asyncio.get_running_loop().create_task(self._play(task), name=f"program {task.id}")
        observation = await self._next()
        if observation is None:
            raise EnvironmentFailure(f"task {task.id}: the program ended without a model call")
        return observation

    async def step(self, action: str) -> StepResult:
        """Answer the open model call with `action` and wait for the next one, or the end."""
        if self._run is None or self._waiting is None:
            raise RuntimeError("step before reset")
        message = assistant_message(action, self._turns) if self._offers_tools else _plain(action)
        self._turns += 1
        self._known.append(message)
        if not self._waiting.done():
            self._waiting.set_result(message)
        self._waiting = None
        observation = await self._next()
        if observation is not None:
            return StepResult(observation, 0.0, False, {"calls": self._turns})
        outcome = self._run.result()
        return StepResult(observe(""), outcome.reward, True, {**outcome.info, "calls": self._turns})

    async def close(self) -> None:
        """End the program."""
        if self._run is None:
            return
        self._run.cancel()
        with contextlib.suppress(asyncio.CancelledError, EnvironmentFailure):
            await self._run
        if self._waiting is not None:
            self._waiting.cancel()
        while not self._calls.empty():
            self._calls.get_nowait()[1].cancel()

    async def _play(self, task: Task) -> ProgramOutcome:
        return await self._program(self, task)

    async def _next(self) -> Observation | None:
        """What the next model call shows; None at the program's end. Raises what ended the program."""
        assert self._run is not None
        call = asyncio.get_running_loop().create_task(self._calls.get())
        try:
            await asyncio.wait({call, self._run}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                self._run.result()
                return None
            request, self._waiting = call.result()
        finally:
            call.cancel()
        return self._show(request)

    def _show(self, request: ChatRequest) -> Observation:
        messages: Sequence[Mapping[str, Any]] = request.body["messages"]
        known = len(self._known)
        if len(messages) <= known or not all(map(_same, self._known, messages)):
            raise RewrittenConversationError(
                f"the program changed the first {known} messages of its conversation; only programs that append "
                "can be trained on (turn compaction off)"
            )
        fresh = messages[known:]
        self._known.extend(fresh)
        shown = [Message(_role(message), _content(message)) for message in fresh]
        tools = request.body.get("tools")
        if tools and not known:
            self._offers_tools = True
            shown.insert(0, Message("system", tool_prompt(tools)))
        return Observation(tuple(shown))


def tool_prompt(tools: Sequence[Mapping[str, Any]]) -> str:
    """How to call the program's tools, for models without a template that says it."""
    lines = "\n".join(json.dumps(tool.get("function", tool)) for tool in tools)
    return (
        f"You can call these tools, given as JSON schemas:\n{lines}\n"
        'To call one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call>.'
    )


def assistant_message(text: str, turn: int) -> dict[str, Any]:
    """What the model wrote as a chat message: well-formed calls become `tool_calls`, the rest is content."""
    calls = []
    for number, match in enumerate(TOOL_CALL.finditer(text)):
        try:
            call = json.loads(match[1])
            function = {"name": str(call["name"]), "arguments": json.dumps(call.get("arguments", {}))}
        except (ValueError, KeyError, TypeError):
            # Not a call: the program sees it as text and says what it thinks of it.
            return _plain(text)
        calls.append({"id": f"call_{turn}_{number}", "type": "function", "function": function})
    if not calls:
        return _plain(text)
    return {"role": "assistant", "content": TOOL_CALL.sub("", text).strip(), "tool_calls": calls}


def _plain(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _same(known: Mapping[str, Any], sent: Mapping[str, Any]) -> bool:
    """Whether a message is the one seen before. Programs may add fields and drop empty ones."""
    return (
        known.get("role") == sent.get("role")
        and _content(known) == _content(sent)
        and [call.get("id") for call in known.get("tool_calls") or ()]
        == [call.get("id") for call in sent.get("tool_calls") or ()]
    )


def _role(message: Mapping[str, Any]) -> str:
    role = str(message.get("role", "user"))
    return "system" if role == "developer" else role


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return content or ""
    return "\n".join(str(part.get("text", "")) for part in content if part.get("type") == "text")
