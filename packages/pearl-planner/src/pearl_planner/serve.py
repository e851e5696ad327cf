"""`python -m pearl_planner serve`: the planner over HTTP, for frameworks in other processes or languages.

    POST /v1/start     {"model","gpu","tp","batch","profile","calibrated"}    begin anew
    POST /v1/observe   {"trajectories","decode","prefill","transfer","segments","batch"}
    POST /v1/toggle    {"activation_s","deactivation_s"}                      what a borrow or a return took
    POST /v1/adopt     {"configuration": "2P3D" | null}                       what runs from now on
    POST /v1/choose    {"workers","remaining_fraction","steps_ahead"}         → the decision with its candidates
    POST /v1/borrow    {"dedicated","lendable","remaining"}                   → eq. (7) with its terms
    GET  /v1/profile                                                          what the planner believes, with origins

The one imperative module of this package: everything it answers comes from `guest.Guest`. A bad message gets 400 with
{"error": one line} and changes nothing. It listens on loopback unless told otherwise, and can ask for a token.
"""

import hmac
import json
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from pearl_planner import wire
from pearl_planner.decide import STEPS_AHEAD
from pearl_planner.guest import Guest
from pearl_state.errors import StateError
from pearl_state.samples import DecodeSample, PrefillSample, TransferSample

_LARGEST_BODY: Final = 64 * 1024 * 1024
_TIMEOUT_S: Final = 30.0

Answer = tuple[Guest, Mapping[str, Any]]
Serving = Callable[[Mapping[str, str], str], AbstractContextManager[object]]
"""(headers by lower-case name, question) → a context around its answer."""


def _start(_: Guest, message: object) -> Answer:
    asked = wire.take(message, ("model", "gpu", "tp", "batch", "profile", "calibrated"), "start")
    guest = Guest.start(
        model=wire.text(asked, "model"),
        gpu=wire.text(asked, "gpu"),
        tensor_parallel=wire.count(asked, "tp", 1, least=1),
        batch=wire.count(asked, "batch", least=1) if "batch" in asked else None,
        profile=wire.text(asked, "profile", "swe-32k"),
        calibrated=wire.flag(asked, "calibrated", False),
    )
    return guest, profile(guest)


def _observe(guest: Guest, message: object) -> Answer:
    asked = wire.take(message, ("trajectories", "decode", "prefill", "transfer", "segments", "batch"), "observe")
    guest = guest.observe_step(
        wire.listed(asked, "trajectories", wire.turns),
        batch=wire.count(asked, "batch", least=1) if "batch" in asked else None,
        decode=wire.listed(asked, "decode", wire.sample(DecodeSample)),
        prefill=wire.listed(asked, "prefill", wire.sample(PrefillSample)),
        transfer=wire.listed(asked, "transfer", wire.sample(TransferSample)),
        segments=wire.listed(asked, "segments", wire.segment),
    )
    return guest, profile(guest)


def _toggle(guest: Guest, message: object) -> Answer:
    asked = wire.take(message, ("activation_s", "deactivation_s"), "toggle")
    guest = guest.observe_toggle(**{key: wire.number(asked, key) for key in asked})
    return guest, {"toggle_s": guest.costs.toggle_s}


def _adopt(guest: Guest, message: object) -> Answer:
    asked = wire.take(message, ("configuration",), "adopt")
    guest = guest.adopt(wire.configuration(asked.get("configuration"), "configuration"))
    return guest, {"current": None if guest.current is None else str(guest.current)}


def _choose(guest: Guest, message: object) -> Answer:
    asked = wire.take(message, ("workers", "remaining_fraction", "steps_ahead"), "choose")
    decision = guest.choose(
        wire.count(asked, "workers"),
        remaining_fraction=wire.number(asked, "remaining_fraction", 1.0),
        steps_ahead=wire.number(asked, "steps_ahead", STEPS_AHEAD),
    )
    return guest, decision.to_json()


def _borrow(guest: Guest, message: object) -> Answer:
    asked = wire.take(message, ("dedicated", "lendable", "remaining"), "borrow")
    verdict = guest.borrow(
        dedicated=wire.count(asked, "dedicated"),
        lendable=wire.count(asked, "lendable", least=1),
        remaining=wire.count(asked, "remaining"),
    )
    return guest, asdict(verdict)


def profile(guest: Guest) -> Mapping[str, Any]:
    """What the planner believes: both profiles with the origin of each value, and what the last fit refused."""
    return {
        "workload": _plain(asdict(guest.workload)),
        "platform": _plain(asdict(guest.platform)),
        "calibrated": guest.calibrated,
        "refused": list(guest.refused),
        "current": None if guest.current is None else str(guest.current),
        "toggle_s": guest.costs.toggle_s,
    }


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


_QUESTIONS: Final[Mapping[str, Callable[[Guest, object], Answer]]] = {
    "/v1/start": _start,
    "/v1/observe": _observe,
    "/v1/toggle": _toggle,
    "/v1/adopt": _adopt,
    "/v1/choose": _choose,
    "/v1/borrow": _borrow,
}


class PlannerServer(ThreadingHTTPServer):
    """Holds the one guest. Port 0 takes a free port; `server_address` says which."""

    daemon_threads = True

    def __init__(
        self,
        guest: Guest,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
        serving: Serving = lambda _headers, _question: nullcontext(),
    ) -> None:
        """`serving` gives a context in which a question is answered, like a span below the caller's `traceparent`."""
        self.guest = guest
        self.serving = serving
        self.token = token
        self.turn = threading.Lock()
        """One question at a time: an answer may replace the guest. Nobody waits for anything while holding it."""
        super().__init__((host, port), _Requests)


class _Requests(BaseHTTPRequestHandler):
    """One connection. `timeout` bounds a client that stops sending."""

    server: PlannerServer
    timeout = _TIMEOUT_S
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if not self._known():
            return
        if self.path != "/v1/profile":
            self._answer(404, {"error": f"no such question: GET {self.path[:60]}; GET /v1/profile is one"})
            return
        self._answer(200, profile(self.server.guest))

    def do_POST(self) -> None:
        if not self._known():
            return
        ask = _QUESTIONS.get(self.path)
        if ask is None:
            self._answer(404, {"error": f"no such question: {self.path[:60]}; known: {', '.join(_QUESTIONS)}"})
            return
        try:
            message = json.loads(self._body())
            headers = {name.lower(): value for name, value in self.headers.items()}
            with self.server.serving(headers, self.path), self.server.turn:
                # A guest is a value: what fails leaves the old one in place.
                self.server.guest, answer = ask(self.server.guest, message)
        except RecursionError:
            self._answer(400, {"error": "the body nests too deeply"})
        except (StateError, ValueError) as error:
            self._answer(400, {"error": str(error).replace("\n", " ")})
        else:
            self._answer(200, answer)

    def _known(self) -> bool:
        given = self.headers.get("Authorization", "")
        if self.server.token and not hmac.compare_digest(given.encode(), f"Bearer {self.server.token}".encode()):
            self._answer(401, {"error": "send the token as 'Authorization: Bearer …'"})
            return False
        return True

    def _body(self) -> bytes:
        given = self.headers.get("Content-Length", "")
        if not given.isascii() or not given.isdigit() or int(given) > _LARGEST_BODY:
            self.close_connection = True
            raise wire.WireError(f"Content-Length '{given[:20]}': needs a length of at most {_LARGEST_BODY} bytes")
        return self.rfile.read(int(given))

    def _answer(self, status: int, body: Mapping[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status in (401, 404):
            # The body of a stranger, or of no question, is not read: nothing may follow it.
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Silent: whoever embeds the planner logs for himself."""
