"""How people reach a running job: pin, fence, freeze, offer and reclaim, by HTTP on loopback with a token.

curl -H "Authorization: Bearer $TOKEN" -d '{"pin": "2P3D"}' http://127.0.0.1:PORT/commands

Where it listens and its token stand in the run folder's `control.json`, which only its owner may read. A command
becomes an event of the control plane, like any other; the answer says what was posted, not that it is done.
"""

import asyncio
import json
import os
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from pearl_executor.availability import CommandError
from pearl_executor.availability_http import CommandSource
from pearl_executor.loopback_http import LoopbackServer, RefusedError, Request, Response, as_json, new_token
from pearl_planner.elastic import ElasticState
from pearl_state.configuration import Configuration
from pearl_state.errors import ConfigurationError
from pearl_state.events import ConfigurationPinned, Event, WorkersCordoned
from pearl_state.roles import Role
from pearl_state.worker import WorkerId

CONTROL_FILE: Final = "control.json"
_COMMANDS: Final = '{"pin": "2P3D"}, {"unpin": true}, {"freeze": true}, {"cordon": [ids]} and {"uncordon": [ids]}'


class ControlServer:
    """Listens while it is open as a context manager. `post` takes events in, `state` gives the state of now.

    `gpus` takes offers and reclaims where people provide the preemptible GPUs.
    """

    def __init__(
        self,
        folder: Path,
        *,
        post: Callable[[Event], None],
        state: Callable[[], ElasticState],
        gpus: CommandSource | None = None,
        port: int = 0,
    ) -> None:
        self.token = new_token()
        self.url = ""
        self._file = folder / CONTROL_FILE
        self._post = post
        self._state = state
        self._gpus = gpus
        self._server = LoopbackServer(self._handle, port=port)

    async def __aenter__(self) -> Self:
        self.url = await self._server.start()
        text = json.dumps({"url": self.url, "token": self.token, "pid": os.getpid()})
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._server.aclose()
        self._file.unlink(missing_ok=True)

    async def _handle(self, request: Request) -> Response:
        if not request.holds_token(self.token):
            raise RefusedError(HTTPStatus.UNAUTHORIZED, "the header Authorization: Bearer TOKEN is missing or wrong")
        if (request.method, request.path) == ("GET", "/gpus") and self._gpus is not None:
            return as_json(self._gpus.gpus())
        if (request.method, request.path) != ("POST", "/commands"):
            raise RefusedError(HTTPStatus.NOT_FOUND, "there is POST /commands, and GET /gpus for GPUs of people")
        try:
            command = json.loads(await request.body())
        except (ValueError, RecursionError) as error:
            raise RefusedError(HTTPStatus.BAD_REQUEST, f"the body is no JSON: {error}") from None
        try:
            return as_json(self.carry_out(command))
        except CommandError as error:
            raise RefusedError(HTTPStatus.CONFLICT, str(error)) from None

    def carry_out(self, command: Any) -> dict[str, Any]:
        """Do what a command asks for, and say what that was. Raises `CommandError`."""
        if not isinstance(command, dict) or not command:
            raise CommandError(f"a command is one of {_COMMANDS}")
        if command.keys() & {"offer", "reclaim"}:
            if self._gpus is None:
                raise CommandError('GPUs come from elsewhere: people provide them with availability.source = "control"')
            return self._gpus.carry_out(command)
        if len(command) != 1:
            raise CommandError(f"a command is one of {_COMMANDS}")
        (name, value), now_s = *command.items(), asyncio.get_running_loop().time()
        event = self._event(name, value, now_s)
        self._post(event)
        if isinstance(event, ConfigurationPinned):
            return {"pinned": None if event.configuration is None else str(event.configuration)}
        return {"cordoned" if event.cordoned else "uncordoned": sorted(event.workers)}

    def _event(self, name: str, value: Any, now_s: float) -> ConfigurationPinned | WorkersCordoned:
        state = self._state()
        match name:
            case "pin":
                return ConfigurationPinned(now_s=now_s, configuration=_configuration(value))
            case "unpin" | "freeze" if value is not True:
                raise CommandError(f"{name} is {value!r}; it must be true")
            case "unpin":
                return ConfigurationPinned(now_s=now_s, configuration=None)
            case "freeze":
                return ConfigurationPinned(now_s=now_s, configuration=_present(state))
            case "cordon" | "uncordon":
                cordoned = name == "cordon"
                return WorkersCordoned(now_s=now_s, workers=_workers(state, value, cordoned), cordoned=cordoned)
        raise CommandError(f"no command is called {name!r}; there is {_COMMANDS}")


def _configuration(value: Any) -> Configuration:
    try:
        configuration = Configuration.parse(str(value))
    except ConfigurationError as error:
        raise CommandError(str(error)) from None
    if configuration.workers == 0:
        raise CommandError(f"{value} has no worker, so that nothing would be served; pin at least 1C")
    return configuration


def _present(state: ElasticState) -> Configuration:
    """What runs now, or what the plan under way leads to."""
    if state.running is not None:
        return state.running.plan.target
    try:
        configuration = state.table.configuration
    except ConfigurationError:
        configuration = Configuration()
    if configuration.workers == 0:
        raise CommandError("nothing serves at this moment, so that there is nothing to freeze; try again")
    return configuration


def _workers(state: ElasticState, value: Any, cordoned: bool) -> frozenset[WorkerId]:
    rows = {id_: row for id_, row in state.table.rows.items() if row.role is not Role.TRAINING}
    if not isinstance(value, list) or not value or not all(type(id_) is int for id_ in value):
        raise CommandError(f"workers are {value!r}; they must be a list of numbers like [4, 5]")
    unknown = sorted(set(value) - rows.keys())
    if unknown:
        raise CommandError(f"no rollout worker is called {_words(unknown)}; there are {_words(rows)}")
    chosen = frozenset(WorkerId(id_) for id_ in value)
    left = [id_ for id_ in state.available if id_ not in chosen and not rows[id_].cordoned]
    if cordoned and not left:
        raise CommandError("this would fence off every worker on rollout's own GPUs, and nobody would serve; keep one")
    return chosen


def _words(ids: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ids)))


def read_control(folder: Path) -> Mapping[str, Any] | None:
    """Where a run listens: `url`, `token`, `pid`; None where it does not."""
    try:
        found: Mapping[str, Any] = json.loads((folder / CONTROL_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found
