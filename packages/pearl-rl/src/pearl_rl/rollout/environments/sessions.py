"""Environments behind HTTP: `/start`, `/observation`, `/end`, and `/pause` and `/resume` (TideRL appendix B.1).

A session that nobody uses is ended after a while, so that a client that died leaves no container behind. A task that
waits for its turn is no such client: between `/pause` and `/resume` the session's time stands still.

    POST /start        {"task": {"id", "seed", "payload"}}   → {"session", "messages"}
    POST /observation  {"session", "action"}                 → {"messages", "reward", "done", "info"}
    POST /pause, /resume, /end  {"session"}                  → {}
"""

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from pearl_executor.loopback_http import LoopbackServer, RefusedError, Request, Response, as_json
from pearl_rl.rollout.environments.protocol import Environment, EnvironmentFailure, Observation, Task
from pearl_telemetry.metrics import SPANS
from pearl_telemetry.remote import served


@dataclass(slots=True)
class _Session:
    environment: Environment
    left_s: float
    """Time without use after which it ends."""
    since_s: float
    paused: bool = False
    busy: bool = False
    timer: asyncio.TimerHandle | None = None


class Sessions:
    """Episodes by name, each with the time it may be left alone."""

    def __init__(self, make: Callable[[], Environment], inactivity_s: float) -> None:
        self._make = make
        self._inactivity_s = inactivity_s
        self._sessions: dict[str, _Session] = {}
        self._numbers = itertools.count()
        self._closing: set[asyncio.Task[None]] = set()
        self.expired = 0
        """Sessions that were ended because nobody used them."""

    def __len__(self) -> int:
        return len(self._sessions)

    async def start(self, task: Task) -> tuple[str, Observation]:
        """Begin an episode. Raises `EnvironmentFailure`."""
        environment = self._make()
        try:
            observation = await environment.reset(task)
        except BaseException:
            await environment.close()
            raise
        name = f"s{next(self._numbers):06d}"
        session = self._sessions[name] = _Session(environment, self._inactivity_s, self._now_s())
        self._arm(name, session)
        return name, observation

    async def observe(self, name: str, action: str) -> Mapping[str, Any]:
        """Carry an action out. Raises `KeyError` for a session that is over, `EnvironmentFailure`."""
        session = self._sessions[name]
        self._disarm(session)
        session.busy = True
        try:
            outcome = await session.environment.step(action)
        finally:
            session.busy = False
            session.left_s = self._inactivity_s
            if name in self._sessions:
                self._arm(name, session)
        return {
            "messages": messages_of(outcome.observation),
            "reward": outcome.reward,
            "done": outcome.done,
            "info": dict(outcome.info),
        }

    def pause(self, name: str) -> None:
        """Stop the session's time. May be called twice. Raises `KeyError` for a session that is over."""
        session = self._sessions[name]
        if not session.paused:
            self._disarm(session)
            session.paused = True

    def resume(self, name: str) -> None:
        """Let the session's time go on from where it stood. Raises `KeyError` for a session that is over."""
        session = self._sessions[name]
        if session.paused:
            session.paused = False
            self._arm(name, session)

    async def end(self, name: str) -> None:
        """End an episode. No effect where it is over."""
        session = self._sessions.pop(name, None)
        if session is not None:
            self._disarm(session)
            await session.environment.close()

    async def aclose(self) -> None:
        """End all."""
        for name in list(self._sessions):
            await self.end(name)
        if self._closing:
            await asyncio.gather(*self._closing)

    def _arm(self, name: str, session: _Session) -> None:
        if session.paused or session.busy:
            return
        session.since_s = self._now_s()
        session.timer = asyncio.get_running_loop().call_later(session.left_s, self._expire, name)

    def _disarm(self, session: _Session) -> None:
        if session.timer is not None:
            session.timer.cancel()
            session.timer = None
            session.left_s = max(0.0, session.left_s - (self._now_s() - session.since_s))

    def _expire(self, name: str) -> None:
        self.expired += 1
        closing = asyncio.get_running_loop().create_task(self.end(name))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


def messages_of(observation: Observation) -> list[dict[str, str]]:
    """An observation's messages as objects."""
    return [{"role": message.role, "content": message.content} for message in observation.messages]


class EnvironmentServer:
    """The reference server: any environment of ours behind the five endpoints, on this machine's loopback."""

    def __init__(
        self, make: Callable[[], Environment], *, token: str = "", inactivity_s: float = 300.0, port: int = 0
    ) -> None:
        """`token`: what requests must carry as `Authorization: Bearer`; empty asks for none."""
        self.sessions = Sessions(make, inactivity_s)
        self._token = token
        self._server = LoopbackServer(self._answer, port=port)
        self.url = ""
        """Base URL once it is started, without a slash at the end."""

    async def start(self) -> None:
        """Listen."""
        self.url = (await self._server.start()).rstrip("/")

    async def close(self) -> None:
        """Stop listening and end all sessions."""
        await self._server.aclose()
        await self.sessions.aclose()

    async def _answer(self, request: Request) -> Response:
        if self._token and not request.holds_token(self._token):
            raise RefusedError(HTTPStatus.UNAUTHORIZED, "the token is missing or wrong")
        if request.method != "POST":
            raise RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, f"{request.path} wants POST")
        try:
            body = json.loads(await request.body())
            with served(request.fields, SPANS.environment_request, {"pearl.op": request.path}):
                return as_json(await self._carry_out(request.path, body))
        except (ValueError, TypeError, RecursionError) as error:
            raise RefusedError(
                HTTPStatus.BAD_REQUEST, f"{request.path}: the body is not as it must be: {error}"
            ) from None
        except KeyError as error:
            raise RefusedError(
                HTTPStatus.NOT_FOUND, f"{request.path}: {error} is missing, or its session is over"
            ) from None
        except EnvironmentFailure as error:
            raise RefusedError(HTTPStatus.BAD_GATEWAY, str(error)) from None

    async def _carry_out(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        if path == "/start":
            task = body["task"]
            made = Task(id=str(task["id"]), seed=int(task["seed"]), payload=dict(task.get("payload", {})))
            name, observation = await self.sessions.start(made)
            return {"session": name, "messages": messages_of(observation)}
        name = str(body["session"])
        if path == "/observation":
            return await self.sessions.observe(name, str(body["action"]))
        if path == "/pause":
            self.sessions.pause(name)
        elif path == "/resume":
            self.sessions.resume(name)
        elif path == "/end":
            await self.sessions.end(name)
        else:
            raise RefusedError(HTTPStatus.NOT_FOUND, f"{path}: use /start, /observation, /pause, /resume or /end")
        return {}
