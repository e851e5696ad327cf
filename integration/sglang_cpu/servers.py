"""SGLang servers of either kind on an event loop of their own, and rows for them."""

import asyncio
import sys

from support import cpu_options

from pearl_executor.engines.sglang.options import SglangTimeouts
from pearl_executor.engines.sglang.runtime import SglangRuntime
from pearl_state.roles import Zone
from pearl_state.worker import GpuId, Worker, WorkerId

STAND_IN = (sys.executable, "-m", "pearl_executor.testing.sglang")
TIMEOUTS = SglangTimeouts(start_s=90.0, control_s=30.0, poll_s=0.3, silence_s=20.0, stop_s=5.0)


class Servers:
    """A runtime on an event loop of its own, and rows for it."""

    def __init__(self, interpreter, model, folder, **changes):
        self.folder = folder
        self.kind = "stand-in" if interpreter == STAND_IN else "real"
        self.model, self.later = model
        self.runner = asyncio.Runner()
        self.lost = []
        timeouts = changes.pop("timeouts", TIMEOUTS)
        self.runtime = SglangRuntime(
            cpu_options(interpreter, self.model, **changes),
            folder,
            timeouts=timeouts,
            on_lost=lambda *loss: self.lost.append(loss),
        )
        self._next = 0

    def __enter__(self):
        self.run(self.runtime.__aenter__())
        return self

    def __exit__(self, *exc):
        self.run(self.runtime.__aexit__(*exc))
        self.runner.close()

    def run(self, coroutine):
        """Run on the loop on which the servers live."""
        return self.runner.run(coroutine)

    def row(self, role):
        """A row that was never used."""
        self._next += 1
        return Worker(
            id=WorkerId(self._next),
            gpus=frozenset({GpuId(self._next)}),
            role=role,
            zone=Zone.DEDICATED,
            incarnation=1,
        )

    def start(self, *roles):
        """New servers in these roles, all at once."""
        rows = [self.row(role) for role in roles]

        async def begin():
            await asyncio.gather(*(self.runtime.start(row) for row in rows))

        self.run(begin())
        return rows
