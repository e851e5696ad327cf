"""An environment in another process, over the endpoints of `sessions`; and the suite `http` of such environments."""

import asyncio
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

from pearl_executor.tracing import trace_headers
from pearl_rl.rollout.environments.protocol import (
    Demonstration,
    EnvironmentFailure,
    EnvironmentSettingsError,
    Message,
    Observation,
    StepResult,
    Task,
)

MOST_ANSWER_BYTES = 32 * 2**20
"""A longer answer is a failure of the server."""


class HttpEnvironment:
    """One episode on a server. A server that cannot be reached, or refuses, is an `EnvironmentFailure`."""

    def __init__(self, url: str, *, token: str = "", request_s: float = 60.0) -> None:
        self._address = urlsplit(url)
        self._token = token
        self._request_s = request_s
        self._session: str | None = None

    async def reset(self, task: Task) -> Observation:
        """See `Environment`."""
        answer = await self._post("/start", {"task": {"id": task.id, "seed": task.seed, "payload": dict(task.payload)}})
        session = answer.get("session")
        if not isinstance(session, str):
            raise EnvironmentFailure(f"environment server {self._address.netloc}/start: an answer without session")
        self._session = session
        return _observation(answer)

    async def step(self, action: str) -> StepResult:
        """See `Environment`."""
        answer = await self._post("/observation", {"session": self._session, "action": action})
        reward, done, info = answer.get("reward"), answer.get("done"), answer.get("info", {})
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise EnvironmentFailure(f"environment server {self._address.netloc}/observation: reward is {reward!r}")
        if not isinstance(done, bool) or not isinstance(info, dict):
            raise EnvironmentFailure(f"environment server {self._address.netloc}/observation: done is {done!r}")
        plain = {key: value for key, value in info.items() if isinstance(value, str | int | float | None)}
        return StepResult(_observation(answer), float(reward), done, plain)

    async def pause(self) -> None:
        """Stop the session's timeouts: its task waits for its turn."""
        await self._post("/pause", {"session": self._session})

    async def resume(self) -> None:
        """Let them run again."""
        await self._post("/resume", {"session": self._session})

    async def close(self) -> None:
        """See `Environment`."""
        session, self._session = self._session, None
        if session is None:
            return
        try:
            await self._post("/end", {"session": session})
        except EnvironmentFailure:
            # The server ends a session that nobody uses by itself.
            return

    async def _post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        address = self._address
        try:
            async with asyncio.timeout(self._request_s):
                status, answer = await _exchange(address, path, json.dumps(body).encode(), self._token)
        except (OSError, TimeoutError, ValueError, RecursionError) as error:
            reason = f"no answer within {self._request_s:g} s" if isinstance(error, TimeoutError) else error
            raise EnvironmentFailure(f"environment server {address.netloc}{path}: {reason}") from error
        if status != 200:
            raise EnvironmentFailure(f"environment server {address.netloc}{path}: {status}: {answer.get('error', '')}")
        return answer


async def _exchange(address: SplitResult, path: str, body: bytes, token: str) -> tuple[int, Mapping[str, Any]]:
    reader, writer = await asyncio.open_connection(address.hostname, address.port or 80)
    try:
        headers = {**({"Authorization": f"Bearer {token}"} if token else {}), **trace_headers()}
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = (
            f"POST {address.path.rstrip('/')}{path} HTTP/1.1\r\nHost: {address.netloc}\r\n{fields}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        answer = bytearray()
        while part := await reader.read(65536):
            answer += part
            if len(answer) > MOST_ANSWER_BYTES:
                raise ValueError(f"the answer is longer than {MOST_ANSWER_BYTES} bytes")
    finally:
        writer.close()
    lines, _, payload = bytes(answer).partition(b"\r\n\r\n")
    words = lines.split(b" ", 2)
    if len(words) < 2:
        raise ValueError("the answer is not HTTP")
    status = int(words[1])
    decoded = json.loads(payload or b"{}")
    if not isinstance(decoded, dict):
        raise ValueError("the answer is no JSON object")
    return status, decoded


def _observation(answer: Mapping[str, Any]) -> Observation:
    try:
        return Observation(tuple(Message(str(m["role"]), str(m["content"])) for m in answer["messages"]))
    except (KeyError, TypeError) as error:
        raise EnvironmentFailure(f"environment server: no messages of role and content ({error})") from error


class _Numbered:
    """Tasks that are only numbers and seeds: the server knows what they mean."""

    size = None

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def task(self, index: int) -> Task:
        """See `TaskSource`."""
        return Task(id=f"http-{index:06d}", seed=self._seed * 1_000_003 + index)


class HttpSuite:
    """Episodes on a server at `url`; the environment variable `token_variable`, where named, holds its token."""

    name = "http"

    def __init__(self, url: str, token_variable: str, request_s: float) -> None:
        self._url = url
        self._token = os.environ.get(token_variable, "") if token_variable else ""
        self._request_s = request_s

    @staticmethod
    def build(arguments: Mapping[str, Any]) -> "HttpSuite":
        """Raises `EnvironmentSettingsError` for arguments that are none."""
        known = {"url", "token_variable", "request_s"}
        for name in arguments.keys() - known:
            raise EnvironmentSettingsError(f"environment http: unknown argument {name}; use {', '.join(sorted(known))}")
        url = str(arguments.get("url", ""))
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise EnvironmentSettingsError(f"environment http: url = {url!r}: must be like http://127.0.0.1:8000")
        request_s = float(arguments.get("request_s", 60.0))
        if not request_s > 0:
            raise EnvironmentSettingsError(f"environment http: request_s = {request_s}: must be above 0")
        return HttpSuite(url, str(arguments.get("token_variable", "")), request_s)

    def tasks(self, seed: int) -> _Numbered:
        """See `EnvironmentSuite`."""
        return _Numbered(seed)

    def environment(self) -> HttpEnvironment:
        """See `EnvironmentSuite`."""
        return HttpEnvironment(self._url, token=self._token, request_s=self._request_s)

    async def start(self) -> None:
        """Nothing to bring up: the server is somebody else's."""

    async def close(self) -> None:
        """Nothing to end."""

    def vocabulary(self) -> Sequence[str]:
        """Open texts."""
        return ()

    def demonstrations(self, seed: int, count: int) -> Sequence[Demonstration]:
        """None."""
        del seed, count
        return ()
