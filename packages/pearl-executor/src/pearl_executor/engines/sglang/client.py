"""The HTTP client of SGLang servers: bounded calls, streams, and errors that say who did not do what."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Self

import aiohttp

from pearl_executor.ports import WorkerError
from pearl_executor.tracing import trace_headers


class RefusedError(WorkerError):
    """A server answered, and said no."""

    def __init__(self, url: str, status: int, text: str) -> None:
        self.answer = _object(text)
        self.status = status
        self.message = _message(self.answer, text)
        super().__init__(f"{url} answered {status}: {self.message}")


class UnreachableError(WorkerError):
    """No answer, or one that broke off: the server may or may not have done what it was asked."""


class StreamEndedError(WorkerError):
    """A stream ended before it said that it was complete."""


class SglangClient:
    """Calls to servers. The admin key goes with control calls only, as a header, and is never part of a message."""

    def __init__(self, admin_key: str) -> None:
        self._control = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # Streams of whole rollouts are open at once; the limit is the servers', not the client's.
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, url: str, *, timeout_s: float) -> Any:
        """The answer of a `GET`, from JSON where it is JSON."""
        return await self._call("GET", url, None, timeout_s)

    async def post(self, url: str, body: Mapping[str, Any], *, timeout_s: float) -> Any:
        """The answer of a `POST`. Raises `RefusedError` where it is none of success, `UnreachableError` for none."""
        return await self._call("POST", url, body, timeout_s)

    async def delete(self, url: str, *, timeout_s: float) -> Any:
        """The answer of a `DELETE`; raises as `post`."""
        return await self._call("DELETE", url, None, timeout_s)

    async def _call(self, method: str, url: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        limit = aiohttp.ClientTimeout(total=timeout_s)
        headers = {**self._control, **trace_headers()}
        try:
            async with self._open.request(method, url, json=body, headers=headers, timeout=limit) as answer:
                text = await answer.text(errors="replace")
        except TimeoutError:
            raise UnreachableError(f"{url} did not answer within {timeout_s:g} s") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise UnreachableError(f"{url}: {error or type(error).__name__}") from None
        if answer.status not in (200, 202):
            raise RefusedError(url, answer.status, text)
        try:
            return json.loads(text) if text else None
        except ValueError:
            return text

    async def stream(
        self, url: str, body: Mapping[str, Any], *, timeout_s: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed `POST /generate`, each once, until `[DONE]`.

        Raises `StreamEndedError` where the connection ends before. Closing the iterator hangs up, which ends the
        request in the server within seconds.
        """
        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._open.post(url, json=body, headers=trace_headers(), timeout=limit) as answer:
                if answer.status != 200:
                    raise RefusedError(url, answer.status, await answer.text(errors="replace"))
                async for line in _lines(answer.content):
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield _event(url, data)
        except TimeoutError:
            raise StreamEndedError(f"{url}: no end of the stream within {timeout_s:g} s") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise StreamEndedError(f"{url}: the stream broke off ({error or type(error).__name__})") from None
        raise StreamEndedError(f"{url}: the stream ended without [DONE]")

    @property
    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise WorkerError("the SGLang client is closed")
        return self._session


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length: an event with a long list of tokens has no bound."""
    rest = b""
    async for data in content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line


def _event(url: str, data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        raise StreamEndedError(f"{url}: an event is not JSON: {data[:80]!r}") from None
    if not isinstance(event, dict):
        raise StreamEndedError(f"{url}: an event is not an object: {data[:80]!r}")
    return event


def _object(text: str) -> dict[str, Any]:
    """A JSON object; empty where `text` is none."""
    try:
        answer = json.loads(text)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _message(answer: Mapping[str, Any], text: str) -> str:
    """What an error answer says, on one line."""
    error = answer.get("error")
    found = answer.get("message") or (error.get("message") if isinstance(error, dict) else error) or text
    return " ".join(str(found).split())[:500] or "no text"
