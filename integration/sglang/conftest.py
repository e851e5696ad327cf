"""Servers for the contract suite: the stand-in always, and real SGLang where its environment is named."""

import asyncio
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from pearl_executor.engines.sglang.options import SglangTimeouts
from pearl_executor.engines.sglang.runtime import SglangRuntime
from pearl_executor.ports import WeightSnapshot
from pearl_rl.rollout.tokenizer import build_word_tokenizer
from pearl_state.roles import Role, Zone
from pearl_state.worker import GpuId, Worker, WorkerId

sys.path.insert(0, str(Path(__file__).parents[1] / "sglang_cpu"))
from support import PYTHON, cpu_options, fork_server, tiny_model

STAND_IN = (sys.executable, "-m", "pearl_executor.testing.sglang")
TIMEOUTS = SglangTimeouts(start_s=90.0, control_s=30.0, poll_s=0.3, silence_s=20.0, stop_s=5.0)
KINDS = ["stand-in", "real"] if PYTHON else ["stand-in"]
collect_ignore = [] if PYTHON else ["test_job.py", "test_structs.py"]
"""What needs the real one; `nox -s sglang` runs it."""


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A tiny Qwen3 with a tokenizer, and later weights of it: two folders."""
    folders = [tiny_model(tmp_path_factory.mktemp("model"), seed) for seed in (0, 1)]
    for folder in folders:
        build_word_tokenizer([f"word{n}" for n in range(250)], folder)
    return tuple(folders)


@pytest.fixture(scope="session")
def real_interpreter():
    """The command of real SGLang's Python; imports it once for all tests."""
    with fork_server() as interpreter:
        yield interpreter


class Servers:
    """A runtime on an event loop of its own, and rows for it."""

    def __init__(self, interpreter, model, folder, **changes):
        self.folder = folder
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


@pytest.fixture(scope="module", params=KINDS)
def servers(request, model, tmp_path_factory):
    """A runtime whose servers are of one kind."""
    interpreter = STAND_IN if request.param == "stand-in" else request.getfixturevalue("real_interpreter")
    with ExitStack() as stack:
        yield stack.enter_context(Servers(interpreter, model, tmp_path_factory.mktemp("servers")))


@pytest.fixture(scope="module")
def trio(servers):
    """One colocated, one prefill and one decode server with the same weights, version 1."""
    rows = servers.start(Role.COLOCATED, Role.PREFILL, Role.DECODE)

    async def load():
        await asyncio.gather(*(servers.runtime.load_weights(r, WeightSnapshot(1, str(servers.model))) for r in rows))

    servers.run(load())
    return rows
