"""What a running job offers to people who look at it: its queue depths, once a second, and the control server."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from pearl_executor.availability_http import CommandSource
from pearl_rl.control.control_server import ControlServer
from pearl_rl.control.scheduler import ElasticScheduler
from pearl_rl.errors import CommandError
from pearl_rl.rollout.serving import WorkerLoad
from pearl_rl.run_folder import RunFolder
from pearl_rl.settings import Settings
from pearl_state.worker import WorkerId

_EVERY_S = 1.0
Loads = Callable[[], Mapping[WorkerId, WorkerLoad]]


@asynccontextmanager
async def open_to_people(
    settings: Settings,
    folder: RunFolder,
    scheduler: ElasticScheduler,
    loads: Loads,
    *,
    gpus: CommandSource | None,
    say: Callable[[str], None],
) -> AsyncIterator[None]:
    """Keep queue depths and, where the settings want it, listen, as long as this is open.

    `say` gets one line for people. Raises `CommandError` where the port is taken.
    """
    keeping = asyncio.create_task(keep_loads(folder, loads), name="queue depths")
    try:
        if not settings.control.http:
            yield
            return
        server = ControlServer(
            folder.path,
            post=scheduler.post,
            state=lambda: scheduler.state,
            gpus=gpus,
            port=settings.control.http_port,
        )
        try:
            await server.__aenter__()
        except OSError as error:
            raise CommandError(
                f"control.http_port = {settings.control.http_port}: cannot listen there ({error.strerror}); "
                "use another port, or 0 for a free one"
            ) from None
        say(f"listens on {server.url}; pearl-rl dashboard, pin, workers and apply reach it by its run folder")
        try:
            yield
        finally:
            await server.__aexit__(None, None, None)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def keep_loads(folder: RunFolder, loads: Loads) -> None:
    """Keep what each worker has to do, once a second where it changed, until cancelled."""
    before: object = None
    loop = asyncio.get_running_loop()
    while True:
        now = loads()
        if now != before:
            before = now
            folder.record_loads(now, now_s=loop.time())
        await asyncio.sleep(_EVERY_S)
