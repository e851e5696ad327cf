"""A loopback chat endpoint in the OpenAI wire format that asks *us* for every completion.

Programs that drive a model themselves (agent harnesses, `verifiers`) are turned inside out with it: their model call
becomes an observation, our action becomes its answer. HTTP/1.1 over asyncio streams, one request a connection at a
time. A request for a stream gets its whole answer as one event.
"""

import asyncio
import contextlib
import hmac
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

LARGEST_BODY_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One chat completion that a program wants."""

    session: str
    """Value of the session header: which episode it belongs to."""
    body: Mapping[str, Any]
    """The request as sent: `messages`, `tools`, …"""


class ChatRefusal(Exception):
    """A request that is answered with an HTTP error; the text says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


Answer = Callable[[ChatRequest], Awaitable[Mapping[str, Any]]]
"""Gives the assistant's message for a request. Raises `ChatRefusal`."""


class ChatEndpoint:
    """The endpoint. `key` is part of its URL, so that only who was told it can ask."""

    def __init__(self, answer: Answer, key: str, session_header: str = "x-session-id") -> None:
        self._answer = answer
        self._key = key
        self._session_header = session_header
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Base URL for clients, without a slash at the end."""
        if self._server is None:
            raise RuntimeError("the endpoint is not started")
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://{host}:{port}/{self._key}/v1"

    async def start(self) -> None:
        """Listen on a free port of the loopback device."""
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)

    async def close(self) -> None:
        """Stop listening and drop all connections. May be called twice."""
        if self._server is None:
            return
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            # The client went away or does not speak HTTP: nobody is there to tell.
            return
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request. False once the connection has ended."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ", 2)
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        length = int(headers.get("content-length", "0"))
        if not 0 <= length <= LARGEST_BODY_BYTES:
            raise ValueError("body too large")
        body = await reader.readexactly(length)
        kind = "application/json"
        try:
            request = self._request(method, target, body)
            answer = completion(
                request, await self._answer(ChatRequest(headers.get(self._session_header, ""), request))
            )
            status, payload = 200, json.dumps(answer).encode()
            if request.get("stream"):
                kind, payload = "text/event-stream", events(answer)
        except ChatRefusal as refusal:
            error = {"error": {"message": str(refusal), "type": "invalid_request_error"}}
            status, payload = refusal.status, json.dumps(error).encode()
        lines = (f"HTTP/1.1 {status} {'OK' if status == 200 else 'Error'}", f"content-type: {kind}")
        writer.write("\r\n".join([*lines, f"content-length: {len(payload)}", "", ""]).encode() + payload)
        await writer.drain()
        return headers.get("connection", "").lower() != "close"

    def _request(self, method: str, target: str, body: bytes) -> dict[str, Any]:
        path = f"/{self._key}/v1/chat/completions"
        if method != "POST" or not hmac.compare_digest(target.encode(), path.encode()):
            raise ChatRefusal(404, "only POST {base_url}/chat/completions is served")
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):
            raise ChatRefusal(400, "the body is not JSON") from None
        if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
            raise ChatRefusal(400, "the body has no list of messages")
        return request


def completion(request: Mapping[str, Any], message: Mapping[str, Any]) -> dict[str, Any]:
    """The chat completion that answers `request` with `message`."""
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    return {
        "id": "chatcmpl-pearl",
        "object": "chat.completion",
        "created": 0,
        "model": str(request.get("model", "")),
        "choices": [{"index": 0, "message": dict(message), "finish_reason": reason, "logprobs": None}],
        # Tokens are counted where they are generated, not here.
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


def events(answer: Mapping[str, Any]) -> bytes:
    """A chat completion as a stream of server-sent events: the whole message in one, then its end."""
    choice = answer["choices"][0]
    delta = dict(choice["message"])
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
    head = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks = (
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        {**head, "choices": [], "usage": answer["usage"]},
    )
    lines = [*(json.dumps(chunk) for chunk in chunks), "[DONE]"]
    return "".join(f"data: {line}\n\n" for line in lines).encode()
