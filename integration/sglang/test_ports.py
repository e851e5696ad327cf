"""SGLang's servers listen on the configured address and nowhere else, as the kernel sees it, in every mode."""

import asyncio
import secrets

import pytest
from servers import Servers

from listeners import listeners
from pearl_executor.ports import GenerateRequest, Sampling, WeightSnapshot
from pearl_state.roles import Role

HOST = "127.0.0.2"
"""Loopback, but not the address to which anything is bound by itself."""


@pytest.fixture(scope="module")
def three(request, model, tmp_path_factory):
    """A colocated, a prefill and a decode server at `HOST`."""
    interpreter = request.getfixturevalue("real_interpreter")
    with Servers(interpreter, model, tmp_path_factory.mktemp("servers"), host=HOST) as servers:
        rows = servers.start(Role.COLOCATED, Role.PREFILL, Role.DECODE)

        async def load():
            await asyncio.gather(
                *(servers.runtime.load_weights(r, WeightSnapshot(1, str(servers.model))) for r in rows)
            )

        servers.run(load())
        yield servers, rows


def heard(servers, row):
    server = servers.runtime.server(row)
    found = listeners(server.process.pid, group=True)
    assert server.url.removeprefix("http://") in found
    return server, {address.rpartition(":")[0] for address in found}, found


def test_no_server_of_any_mode_listens_anywhere_but_at_its_address(three):
    servers, rows = three
    for row in rows:
        _, hosts, found = heard(servers, row)
        assert len(found) > 2, "its ranks and its hand-over listen too"
        # Gloo names an interface, and is on its first address.
        assert hosts <= {HOST, "127.0.0.1"}


def test_a_hand_over_a_role_change_and_another_hand_over_pass_there_and_open_nothing(three):
    servers, (colocated, prefill, decode) = three
    runtime = servers.runtime

    def asked():
        return GenerateRequest(
            rid=secrets.token_hex(6), prompt=tuple(range(20, 60)), max_new_tokens=8, sampling=Sampling(temperature=0.0)
        )

    async def play():
        alone, first = [], []
        await runtime.generate(colocated, asked(), alone.append)
        await runtime.generate_pair(prefill, decode, asked(), first.append)
        for row, role in ((prefill, Role.DECODE), (decode, Role.PREFILL)):
            await runtime.interrupt(row)
            await runtime.wait_idle(row)
            await runtime.switch_role(row, role)
        return [[t for chunk in chunks for t in chunk.tokens] for chunks in (alone, first)]

    alone, first = servers.run(play())
    assert len(alone) == 8
    assert first == alone
    for row in (prefill, decode):
        _, hosts, _ = heard(servers, row)
        assert hosts <= {HOST, "127.0.0.1"}


def test_each_server_says_so_itself(three):
    servers, rows = three
    for row in rows:
        server, _, found = heard(servers, row)
        said = [line for line in server.process.order.log.read_text().splitlines() if line.startswith("PEARL: this")]
        assert said
        assert all(address in " ".join(said) for address in found if address.startswith(server.url[7:]))
