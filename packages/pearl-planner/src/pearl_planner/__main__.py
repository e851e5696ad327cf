"""`python -m pearl_planner decide …`: the PD Decision Engine from the command line; `serve …`: the same over HTTP.

Exit codes: 0 a configuration was selected, 2 bad input (one line on stderr), 3 nothing meets every constraint, 5 the
output cannot be written.
"""

import argparse
import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, Final, NoReturn

from pearl_planner.catalog import PROFILES, find_gpu, find_model, find_profile
from pearl_planner.decide import BOTH_MODES, DecideSettings, decide
from pearl_planner.explain import deciding_constraints, explain
from pearl_planner.guest import Guest
from pearl_planner.roofline import PlanningInputs, planning_inputs
from pearl_state.configuration import Configuration
from pearl_state.decision import Decision, Reason
from pearl_state.errors import StateError
from pearl_state.roles import Mode

_TOKEN: Final = "PEARL_PLANNER_TOKEN"
_OK, _BAD_INPUT, _INFEASIBLE, _UNWRITTEN = 0, 2, 3, 5


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(_BAD_INPUT, f"error: {message}\n")


def _workers(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least 1")
    return count


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m pearl_planner", description="Choose mode and roles of rollout workers.")
    command = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    ask = command.add_parser("decide", help="rank all configurations of a budget")
    ask.add_argument("--model", required=True, help="model of the catalog, like qwen3-8b")
    ask.add_argument("--gpu", required=True, help="GPU of the catalog, like h800")
    ask.add_argument("--tp", type=_workers, required=True, help="GPUs of one worker (tensor parallelism)")
    ask.add_argument("--workers", type=_workers, required=True, help="rollout workers at hand")
    ask.add_argument("--profile", default=PROFILES[0], help="bundled workload profile (default: %(default)s)")
    ask.add_argument("--current", help="configuration that runs now, like 3P5D or 8C")
    ask.add_argument("--makespan", choices=("extended", "printed"), default="extended", help="model that decides")
    ask.add_argument("--mode", choices=[str(m) for m in Mode], help="only this mode")
    ask.add_argument("--json", action="store_true", help="print JSON instead of a table")
    serve = command.add_parser(
        "serve",
        help="answer over HTTP",
        epilog="example: python -m pearl_planner serve --model qwen3-8b --gpu h800 --tp 2 --port 8400",
        description=f"Answer other processes over HTTP. ${_TOKEN} is the token that callers must send, if set.",
    )
    serve.add_argument("--model", required=True, help="model of the catalog, like qwen3-8b")
    serve.add_argument("--gpu", required=True, help="GPU of the catalog, like h800")
    serve.add_argument("--tp", type=_workers, default=1, help="GPUs of one worker (default: %(default)s)")
    serve.add_argument("--profile", default=PROFILES[0], help="bundled workload profile (default: %(default)s)")
    serve.add_argument("--trust-prior", action="store_true", help="choose ratios before anything was measured")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    serve.add_argument(
        "--spans",
        metavar="MODULE:FUNCTION",
        help="what opens a span around each answer, like pearl_telemetry.remote:open_planner_spans",
    )
    serve.add_argument("--port", type=int, default=8400, help="port; 0 takes a free one (default: %(default)s)")
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    # Only here: a decision needs no HTTP server.
    from pearl_planner.serve import PlannerServer

    guest = Guest.start(
        model=arguments.model,
        gpu=arguments.gpu,
        tensor_parallel=arguments.tp,
        profile=arguments.profile,
        calibrated=arguments.trust_prior,
    )
    token = os.environ.get(_TOKEN, "")
    if not token and arguments.host not in ("127.0.0.1", "localhost", "::1"):
        raise ValueError(
            f"--host {arguments.host} is open to others: set ${_TOKEN} to the token that callers must send"
        )
    options = {} if arguments.spans is None else {"serving": _opened(arguments.spans)}
    try:
        server = PlannerServer(guest, host=arguments.host, port=arguments.port, token=token, **options)
    except (OSError, OverflowError) as error:
        raise ValueError(f"cannot listen on {arguments.host} port {arguments.port}: {error}") from None
    signal.signal(signal.SIGTERM, _end)
    with server:
        host, port = server.server_address[:2]
        print(f"listening on http://{host!s}:{port}" + (" (token required)" if token else ""), flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return _OK
    return _OK


def _end(_number: int, _frame: FrameType | None) -> None:
    """A service is told to end by SIGTERM: as in order as by Ctrl-C."""
    raise KeyboardInterrupt


def _opened(name: str) -> Any:
    """What `MODULE:FUNCTION` returns. Raises `ValueError`."""
    module, colon, function = name.partition(":")
    try:
        if not colon:
            raise ValueError("is not like module:function")
        return getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--spans {name[:80]}: {error}") from None


def _decide(arguments: argparse.Namespace) -> tuple[Decision, PlanningInputs]:
    inputs = planning_inputs(
        find_profile(arguments.profile), find_model(arguments.model), find_gpu(arguments.gpu), arguments.tp
    )
    decision = decide(
        workload=inputs.workload,
        platform=inputs.platform,
        budget_workers=arguments.workers,
        current=Configuration.parse(arguments.current) if arguments.current else None,
        settings=DecideSettings(model=arguments.makespan),
        allowed=frozenset({Mode(arguments.mode)}) if arguments.mode else BOTH_MODES,
    )
    return decision, inputs


def _json(decision: Decision, inputs: PlanningInputs) -> dict[str, Any]:
    return {
        **decision.to_json(),
        "decided_by": [str(c) for c in deciding_constraints(decision)],
        "notes": list(inputs.notes),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "serve":
            return _serve(arguments)
        decision, inputs = _decide(arguments)
    except (StateError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _BAD_INPUT
    if arguments.json:
        text = json.dumps(_json(decision, inputs), indent=1)
    else:
        text = "\n".join([explain(decision), *(f"- {note}" for note in inputs.notes)])
    try:
        print(text, flush=True)
    except OSError as error:
        # At the process' end it would be tried again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"error: standard output cannot be written ({error.strerror})", file=sys.stderr)
        return _UNWRITTEN
    return _INFEASIBLE if decision.reason is Reason.FALLBACK else _OK


if __name__ == "__main__":
    sys.exit(main())
