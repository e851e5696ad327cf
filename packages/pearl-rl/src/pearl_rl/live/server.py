"""`pearl-rl dashboard`: a page on loopback that shows a run as it goes on, by server-sent events.

It reads the run's folder and nothing else. Acting needs the token that the command prints, and goes on to the run's
own control server.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from html import escape
from http import HTTPStatus
from pathlib import Path

from pearl_executor.loopback_http import (
    EventStream,
    LoopbackServer,
    RefusedError,
    Request,
    Response,
    as_json,
    is_loopback,
)
from pearl_rl.errors import CommandError
from pearl_rl.live.control_client import send_command
from pearl_rl.live.follower import Follower
from pearl_rl.report.page import asset, document
from pearl_rl.report.run_record import check_run_folder

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'"
)
_EVERY_S = 0.5
_MOST_WORKERS = 500
"""More cells than a person looks at, and than a page should be sent twice a second."""
_AT_LEAST_EVERY_S = 5.0


class Dashboard:
    """Serves one run. `token` None makes it read-only; on a host that is not loopback every request needs the token."""

    def __init__(self, run: Path, *, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        check_run_folder(run)
        self._run = run
        self._token = token
        self._guarded = not is_loopback(host)
        if self._guarded and token is None:
            raise CommandError(
                f"--host {host} is not this machine's loopback: it needs --control, whose token guards it"
            )
        self._server = LoopbackServer(self._handle, host=host, port=port)

    async def start(self) -> str:
        """Begin to listen; returns the address. Raises `OSError` where the port is taken."""
        return await self._server.start()

    async def aclose(self) -> None:
        """Listen no more, and end what is open."""
        await self._server.aclose()

    async def _handle(self, request: Request) -> Response | EventStream:
        if self._guarded:
            self._check_token(request)
        match request.method, request.path:
            case "GET", "/":
                text = page(self._run.resolve().name, control=self._token is not None)
                return Response(
                    body=text.encode(),
                    content_type="text/html; charset=utf-8",
                    headers={"Content-Security-Policy": f"{POLICY}; frame-ancestors 'none'", "X-Frame-Options": "DENY"},
                )
            case "GET", "/state":
                return self._state()
            case "GET", "/events":
                return EventStream(self._views())
            case "POST", "/commands":
                return await self._command(request)
        raise RefusedError(HTTPStatus.NOT_FOUND, "there is GET /, /state, /events, and POST /commands")

    def _state(self) -> Response:
        try:
            follower = Follower(self._run)
            follower.refresh()
            return as_json(follower.view())
        except CommandError as error:
            raise RefusedError(HTTPStatus.INTERNAL_SERVER_ERROR, str(error)) from None

    def _check_token(self, request: Request) -> None:
        if self._token is None:
            raise RefusedError(HTTPStatus.FORBIDDEN, "this dashboard is read-only; start it with --control to act")
        if not request.holds_token(self._token):
            raise RefusedError(
                HTTPStatus.UNAUTHORIZED, "the token is missing or wrong; use the address that was printed"
            )

    async def _command(self, request: Request) -> Response:
        self._check_token(request)
        try:
            command = json.loads(await request.body())
        except ValueError as error:
            raise RefusedError(HTTPStatus.BAD_REQUEST, f"the body is no JSON: {error}") from None
        try:
            return as_json(await send_command(self._run, command))
        except CommandError as error:
            raise RefusedError(HTTPStatus.CONFLICT, str(error)) from None

    async def _views(self) -> AsyncIterator[str]:
        """The view whenever it changed, and now and then where it did not; or why there is none."""
        loop = asyncio.get_running_loop()
        follower: Follower | None = None
        sent_s, before = -_AT_LEAST_EVERY_S, ""
        while True:
            try:
                follower = follower or Follower(self._run)
                follower.refresh()
                text = json.dumps(follower.view(_MOST_WORKERS), allow_nan=False)
            except CommandError as error:
                # It is read anew: somebody may mend the file.
                follower, text = None, json.dumps({"error": str(error)})
            if text != before or loop.time() - sent_s >= _AT_LEAST_EVERY_S:
                sent_s, before = loop.time(), text
                yield text
            await asyncio.sleep(_EVERY_S)


def page(name: str, *, control: bool) -> str:
    """The page, which fills itself from `/events`; `name` is text."""
    content = asset("dashboard.html").replace("{{run}}", escape(name)).replace("{{control}}", str(control).lower())
    return document(f"PEARL {name}", content, script="dashboard.js", policy=POLICY)
