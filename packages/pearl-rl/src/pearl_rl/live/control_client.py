"""Sends a command to a running job through its control server."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from pearl_rl.control.control_server import CONTROL_FILE, read_control
from pearl_rl.errors import CommandError, ExitCode
from pearl_rl.report.lines import of_run
from pearl_rl.report.run_record import read_configuration
from pearl_rl.run_folder import SCENARIO_JSON
from pearl_rl.run_lock import held

_ANSWER_S: Final = 10.0


async def send_command(run: Path, command: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the run answers. Raises `CommandError` where it does not listen, or refuses, with its reason."""
    control = read_control(run)
    if control is None:
        raise CommandError(f"{run}: {_why_silent(run)}")
    with of_run(run):
        address = urlsplit(str(control["url"]))
        host, port, token = address.hostname, address.port, control["token"]
    body = json.dumps(command).encode()
    head = (
        f"POST /commands HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    try:
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(head.encode() + body)
                await writer.drain()
                answer = await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        reason = "no answer in time" if isinstance(error, TimeoutError) else error.strerror or error
        raise CommandError(
            f"{run}: its control server at {control['url']} cannot be reached ({reason}); the run may be over",
            ExitCode.PARTIAL,
        ) from None
    status = answer.split(b" ", 2)[1:2]
    try:
        result = json.loads(answer.partition(b"\r\n\r\n")[2] or b"{}")
    except ValueError:
        result = None
    if not isinstance(result, dict):
        raise CommandError(
            f"{run}: what listens at {control['url']} is no control server of a run; the run may be over",
            ExitCode.PARTIAL,
        )
    if status != [b"200"]:
        raise CommandError(f"{run}: {result.get('error', 'the command was refused')}")
    return result


def _why_silent(run: Path) -> str:
    """Why a run has no control file, and what to do."""
    if (run / SCENARIO_JSON).is_file():
        return "is a recorded simulation; only a run of `pearl-rl train` can be operated"
    alive = held(run)
    if alive is False:
        return f"its process has ended, so nothing takes commands; to go on: pearl-rl resume {run}"
    if alive and read_configuration(run)["control"]["http"]:
        return "starts and does not listen yet; ask again when `pearl-rl status` says that it is running"
    return f"does not listen (no {CONTROL_FILE}); start it with --set control.http=true, or it is over"
