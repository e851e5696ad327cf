"""A process is gone only once that is confirmed: until then its GPUs are nobody else's."""

import asyncio
import contextlib
import os
import signal

import pytest

from pearl_executor.ports import WorkerError
from pearl_executor.runtimes.local.processes import ForkServer, ProcessError
from pearl_executor.runtimes.local.runtime import LocalRuntime
from pearl_executor.runtimes.local.scripted import scripted_recipe
from pearl_state.roles import Role, Zone
from pearl_state.worker import GpuId, Worker, WorkerId


class Deaf(ForkServer):
    """A fork server whose first kills are not confirmed, as on a machine that stopped answering."""

    def __init__(self, *args, refusals=2, **options):
        super().__init__(*args, **options)
        self.refusals = refusals

    async def kill(self, child):
        if self.refusals:
            self.refusals -= 1
            raise ProcessError(f"{child.name} is still there")
        await super().kill(child)


def row(incarnation=1):
    return Worker(
        id=WorkerId(0),
        gpus=frozenset({GpuId(0)}),
        role=Role.COLOCATED,
        zone=Zone.DEDICATED,
        incarnation=incarnation,
    )


@contextlib.asynccontextmanager
async def started(folder):
    recipe = scripted_recipe()
    async with Deaf(folder, preload=recipe.preload) as forks, LocalRuntime(recipe, forks=forks) as runtime:
        await runtime.start(row())
        yield runtime, runtime.pids[WorkerId(0)]


def alive(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_a_kill_is_repeated_until_the_process_is_confirmed_gone(tmp_path):
    async def main():
        async with started(tmp_path) as (runtime, pid):
            for _ in range(2):
                with pytest.raises(WorkerError, match="does not end"):
                    await runtime.kill(row())
                assert alive(pid)
            await runtime.kill(row())
            assert not alive(pid)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_slot_starts_anew_only_after_its_old_process_is_confirmed_gone(tmp_path):
    async def main():
        async with started(tmp_path) as (runtime, pid):
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(WorkerError):
                await runtime.kill(row())
            with pytest.raises(WorkerError, match="does not end"):
                await runtime.start(row(2))
            assert alive(pid)
            await runtime.start(row(3))
            assert not alive(pid)
            assert runtime.pids[WorkerId(0)] != pid

    asyncio.run(asyncio.wait_for(main(), 60))
