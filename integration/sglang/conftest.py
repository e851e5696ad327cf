"""Servers for the contract suite: the stand-in always, and real SGLang where its environment is named."""

import asyncio
import os
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from pearl_executor.ports import WeightSnapshot
from pearl_rl.rollout.tokenizer import build_word_tokenizer
from pearl_state.roles import Role

sys.path.insert(0, str(Path(__file__).parents[1] / "sglang_cpu"))
from servers import STAND_IN, Servers
from support import PYTHON, fork_server, tiny_model

KINDS = ["stand-in", "real"] if PYTHON else ["stand-in"]
_NEEDS_REAL = ["test_equal_tokens.py", "test_job.py", "test_ports.py", "test_structs.py", "test_transports.py"]
_LONG = ["test_in_step.py"]
collect_ignore = [] if PYTHON else [*_NEEDS_REAL, *_LONG]
"""What needs the real one, or half a minute; `nox -s sglang` runs it."""
if "PEARL_GATEWAY_PYTHON" not in os.environ:
    collect_ignore.append("test_gateway.py")
if "PEARL_SMOLLM" not in os.environ:
    collect_ignore.append("test_smollm.py")


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


@pytest.fixture(scope="module", params=KINDS)
def servers(request, model, tmp_path_factory):
    """A runtime whose servers are of one kind."""
    interpreter = STAND_IN if request.param == "stand-in" else request.getfixturevalue("real_interpreter")
    with ExitStack() as stack:
        yield stack.enter_context(Servers(interpreter, model, tmp_path_factory.mktemp("servers")))


@pytest.fixture(scope="module")
def real_servers(real_interpreter, model, tmp_path_factory):
    """A runtime with real servers."""
    with ExitStack() as stack:
        yield stack.enter_context(Servers(real_interpreter, model, tmp_path_factory.mktemp("servers")))


@pytest.fixture(scope="module")
def trio(servers):
    """One colocated, one prefill and one decode server with the same weights, version 1."""
    rows = servers.start(Role.COLOCATED, Role.PREFILL, Role.DECODE)

    async def load():
        await asyncio.gather(*(servers.runtime.load_weights(r, WeightSnapshot(1, str(servers.model))) for r in rows))

    servers.run(load())
    return rows
