"""SGLang's own gateway lists those that serve, whatever becomes of the table; its requests get the same tokens."""

import asyncio
import os
import secrets
import signal
import subprocess
from contextlib import contextmanager
from dataclasses import replace

import aiohttp
import pytest
from servers import STAND_IN, Servers

from pearl_executor.engines.sglang import bodies
from pearl_executor.engines.sglang.answers import Answer
from pearl_executor.engines.sglang.client import SglangClient
from pearl_executor.engines.sglang.gateway import GatewayMirror
from pearl_executor.engines.sglang.launch import free_ports
from pearl_executor.ports import GenerateRequest, Sampling, WeightSnapshot
from pearl_rl.rollout.testing import admit, withdraw
from pearl_state.lifecycle import Lifecycle
from pearl_state.roles import Role
from pearl_state.table import WorkerTable

START_S = 120.0


@contextmanager
def gateway(port, *arguments):
    """The real one, in a process of its own."""
    (metrics,) = free_ports("127.0.0.1", 1)
    command = [
        os.environ["PEARL_GATEWAY_PYTHON"],
        "-m",
        "sglang_router.launch_router",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += ["--prometheus-port", str(metrics), "--policy", "round_robin", "--log-level", "error", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


class World:
    """Stand-ins, a table of them, and a gateway that a mirror keeps in line."""

    def __init__(self, servers, rows, url):
        self.servers, self.rows, self.url = servers, rows, url
        self.table = WorkerTable().bind(*rows).publish(1)

    async def listed(self):
        try:
            async with aiohttp.ClientSession() as session, session.get(f"{self.url}/workers") as answer:
                return {(entry["url"], entry["worker_type"]) for entry in (await answer.json())["workers"]}
        except aiohttp.ClientError:
            return None

    def serving(self):
        runtime = self.servers.runtime
        rows = [self.table.rows[id_] for id_ in self.table.active()]
        return {(runtime.member(row).url, row.role.value.replace("colocated", "regular")) for row in rows}

    async def until_in_line(self):
        wanted = self.serving()
        async with asyncio.timeout(START_S):
            while (found := await self.listed()) != wanted:  # noqa: ASYNC110 - somebody else's list
                await asyncio.sleep(0.2)
        assert found == wanted


@pytest.fixture
def world(model, tmp_path):
    (port,) = free_ports("127.0.0.1", 1)
    with Servers(STAND_IN, model, tmp_path) as servers:
        rows = servers.start(Role.PREFILL, Role.DECODE, Role.DECODE)

        async def load():
            snapshot = WeightSnapshot(1, str(servers.model))
            await asyncio.gather(*(servers.runtime.load_weights(row, snapshot) for row in rows))

        servers.run(load())
        yield World(servers, rows, f"http://127.0.0.1:{port}"), port


def test_the_gateway_follows_the_table_through_a_flip_and_its_own_restart(world):
    world, port = world
    runtime = world.servers.runtime

    async def play():
        prefill, decode, other = world.rows
        async with GatewayMirror(world.url, runtime.member, look_s=0.5) as mirror:
            with gateway(port, "--pd-disaggregation"):
                world.table = admit(world.table, [prefill.id, decode.id])
                mirror.apply(world.table)
                await world.until_in_line()
                assert await ask(world.url) == await directly(runtime, prefill, decode)
                # One that served as decode comes back as prefill: the gateway must forget what it was.
                world.table = withdraw(admit(world.table, [other.id]), [decode.id])
                mirror.apply(world.table)
                await world.until_in_line()
                await runtime.switch_role(decode, Role.PREFILL)
                world.table = flipped(world.table, decode, Role.PREFILL)
                mirror.apply(world.table)
                await world.until_in_line()
                assert len(world.serving()) == 3
            assert await world.listed() is None
            with gateway(port, "--pd-disaggregation"):
                await world.until_in_line()
                await mirror.__aexit__()
                assert await world.listed() == set()
                await mirror.__aenter__()

    world.servers.run(play())


def flipped(table, row, role):
    """The table after a drained worker changed its role and was admitted again."""
    table = table.move([row.id], Lifecycle.SWITCHING)
    table = table.update([replace(table.rows[row.id], role=role, lifecycle=Lifecycle.PENDING_WEIGHTS)])
    return table.move([row.id], Lifecycle.ACTIVE)


def request():
    return GenerateRequest(
        rid=secrets.token_hex(6), prompt=list(range(20, 60)), max_new_tokens=6, sampling=Sampling(temperature=0.0)
    )


async def directly(runtime, prefill, decode):
    return (await runtime.generate_pair(prefill, decode, request(), lambda _: None)).tokens


async def ask(url):
    """The same request through the gateway, which chooses the pair and the room itself."""
    answer = Answer()
    async with SglangClient("") as client:
        async for event in client.stream(f"{url}/generate", bodies.generate(request()), timeout_s=30.0):
            answer.add(event)
    return tuple(answer.tokens)
