"""What SGLang's HTTP API answers, and what kills a server: the same of the stand-in and of the real one.

Where they differ, the stand-in is wrong. The real one runs where `PEARL_SGLANG_PYTHON` names its environment.
"""

import asyncio
import secrets
from pathlib import Path

import pytest

from pearl_executor.engines.sglang import bodies
from pearl_executor.engines.sglang.checksums import compare, expected_checksums
from pearl_executor.engines.sglang.client import RefusedError, SglangClient, UnreachableError
from pearl_executor.ports import GenerateRequest, Sampling, WorkerError
from pearl_state.roles import Role

PROMPT = list(range(20, 60))


def request(rid="", tokens=8, prompt=PROMPT, **sampling):
    return GenerateRequest(
        rid=rid or secrets.token_hex(6),
        prompt=prompt,
        max_new_tokens=tokens,
        sampling=Sampling(**{"temperature": 0.0, **sampling}),
    )


@pytest.fixture
def one(servers, trio):
    """The colocated server."""
    return servers.runtime.server(trio[0])


@pytest.fixture
def pair(servers, trio):
    """The prefill and the decode server."""
    return servers.runtime.server(trio[1]), servers.runtime.server(trio[2])


async def events(server, body):
    return [event async for event in server.client.stream(server.url + "/generate", body, timeout_s=30.0)]


async def running(server, body):
    """A long request that brought a token; returns the task that reads it to its end."""
    begun, found = asyncio.Event(), []

    async def read():
        async for event in server.client.stream(server.url + "/generate", body, timeout_s=60.0):
            found.append(event)
            begun.set()
        return found

    task = asyncio.create_task(read())
    await asyncio.wait_for(begun.wait(), 30.0)
    assert not task.done()
    return task


def test_a_stream_gives_each_token_once_with_its_logprob_and_version(servers, one):
    found = servers.run(events(one, bodies.generate(request())))
    tokens = [token for event in found for token in event["output_ids"]]
    entries = [entry for event in found for entry in event["meta_info"]["output_token_logprobs"]]
    assert len(tokens) == 8
    assert [entry[1] for entry in entries] == tokens
    assert all(entry[0] < 0 for entry in entries)
    assert {event["meta_info"]["weight_version"] for event in found} == {"1"}
    last = found[-1]["meta_info"]
    assert last["completion_tokens"] == 8
    assert last["finish_reason"] == {"type": "length", "length": 8}
    assert last["weight_versions"] == [{"version": "1", "start": 0, "end": 8}]


def test_a_stop_token_ends_a_request_and_is_given(servers, one):
    free = [t for e in servers.run(events(one, bodies.generate(request()))) for t in e["output_ids"]]
    # The model's own end token ends it too.
    stop = free[1]
    found = servers.run(events(one, bodies.generate(request(stop_token_ids=(stop,)))))
    assert [t for e in found for t in e["output_ids"]] == free[: free.index(stop) + 1]
    assert found[-1]["meta_info"]["finish_reason"]["type"] == "stop"


def test_an_unknown_sampling_parameter_is_refused(servers, one):
    body = bodies.generate(request())
    body["sampling_params"]["max_tokens"] = 3
    with pytest.raises(RefusedError) as caught:
        servers.run(events(one, body))
    assert caught.value.status == 400


def test_an_id_that_is_in_use_is_refused(servers, one):
    async def twice():
        first = await running(one, bodies.generate(request("same", 1500)))
        try:
            (refused,) = await events(one, bodies.generate(request("same", 4)))
            assert "Duplicate request ID" in refused["error"]["message"]
            assert refused["error"]["code"] == 400
        finally:
            await one.tell("/abort_request", bodies.abort("same"))
            await first

    servers.run(twice())


def test_an_abort_ends_every_request_whose_id_begins_so_and_gives_its_tokens(servers, one):
    async def abort():
        first = await running(one, bodies.generate(request("t1", 1500)))
        second = await running(one, bodies.generate(request("t10", 1500)))
        other = asyncio.create_task(events(one, bodies.generate(request("u1", 40))))
        await one.tell("/abort_request", bodies.abort("t1"))
        for task in (first, second):
            last = (await task)[-1]["meta_info"]
            assert last["finish_reason"]["type"] == "abort"
            assert last["completion_tokens"] > 0
        assert (await other)[-1]["meta_info"]["finish_reason"]["type"] == "length"
        # An id that nobody has is no error.
        await one.tell("/abort_request", bodies.abort("nobody"))

    servers.run(abort())


def test_a_paused_server_lives_is_not_ready_and_holds_requests(servers, one):
    async def pause():
        await one.tell("/pause_generation", bodies.pause("in_place"))
        try:
            assert await one.ask("/ping") is None
            with pytest.raises(RefusedError) as caught:
                await one.ask("/ready")
            assert caught.value.status == 503
            held = asyncio.create_task(events(one, bodies.generate(request())))
            await asyncio.sleep(0.3)
            assert not held.done()
        finally:
            await one.tell("/continue_generation", {})
        assert len(await held) >= 1
        await one.ask("/ready")

    servers.run(pause())


def test_a_flush_is_refused_while_a_request_runs_and_empties_the_cache_of_an_idle_server(servers, one):
    async def flush():
        prompt = [7, *PROMPT]
        await events(one, bodies.generate(request(prompt=prompt)))
        hit = await events(one, bodies.generate(request(prompt=prompt)))
        assert hit[-1]["meta_info"]["cached_tokens"] >= len(prompt) - 1
        busy = await running(one, bodies.generate(request("busy", 1500)))
        with pytest.raises(RefusedError) as caught:
            await one.tell("/flush_cache", {})
        assert caught.value.status == 400
        await one.tell("/abort_request", bodies.abort("busy"))
        await busy
        await one.flush(10.0)
        cold = await events(one, bodies.generate(request(prompt=prompt)))
        assert cold[-1]["meta_info"]["cached_tokens"] == 0

    servers.run(flush())


def test_a_retracted_request_goes_on_after_the_pause(servers, one):
    async def retract():
        whole = await events(one, bodies.generate(request(tokens=200)))
        task = asyncio.create_task(events(one, bodies.generate(request("again", 200))))
        await asyncio.sleep(0.1)
        await one.tell("/pause_generation", bodies.pause("retract"))
        await one.tell("/flush_cache", {})
        await one.tell("/continue_generation", {})
        found = await task
        assert [t for e in found for t in e["output_ids"]] == [t for e in whole for t in e["output_ids"]]

    servers.run(retract())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/end_weight_update", {}),
        ("/update_weights_from_tensor", bodies.weights_from_tensor(["gASVAAAAAAAAAF2ULg=="], 2)),
        ("/update_weights_from_distributed", bodies.weights_from_group([], [], [], "g", 2)),
    ],
)
def test_weights_come_inside_a_session_only(servers, one, path, body):
    with pytest.raises(RefusedError) as caught:
        servers.run(one.tell(path, body))
    assert caught.value.status == 400


def test_weights_that_are_shared_with_another_device_are_refused(servers, one):
    with pytest.raises(RefusedError, match="not found in zmq_handles") as caught:
        servers.run(one.tell("/update_weights_from_ipc", bodies.weights_from_ipc({"GPU-x": "ipc:///tmp/nobody"}, 2)))
    assert caught.value.status == 400


def test_a_session_is_opened_once(servers, one):
    async def session():
        await one.tell("/begin_weight_update", {})
        try:
            with pytest.raises(RefusedError) as caught:
                await one.tell("/begin_weight_update", {})
            assert caught.value.status == 400
        finally:
            await one.tell("/end_weight_update", {})

    servers.run(session())


def test_weights_of_a_folder_that_is_not_there_are_refused_and_the_old_ones_stay(servers, one):
    async def update():
        before = await one.tell("/weights_checker", bodies.checksum())
        with pytest.raises(RefusedError) as caught:
            await one.tell("/update_weights_from_disk", bodies.weights_from_disk("/no/such/folder", 9))
        assert caught.value.status == 400
        after = await one.tell("/weights_checker", bodies.checksum())
        assert after["per_engine_checksum"] == before["per_engine_checksum"]
        assert (await one.ask("/model_info"))["weight_version"] == "1"

    servers.run(update())


def test_a_version_is_text(servers, one):
    body = {**bodies.weights_from_disk(str(servers.model), 1), "weight_version": 1}
    with pytest.raises(RefusedError) as caught:
        servers.run(one.tell("/update_weights_from_disk", body))
    assert caught.value.status == 400


def test_the_checksum_of_a_server_is_that_of_the_snapshot_it_loaded(servers, one):
    found = servers.run(one.tell("/weights_checker", bodies.checksum()))["ranks"][0]["checksums"]
    assert compare(found, expected_checksums(Path(servers.model), "F32")) is None
    assert compare(found, expected_checksums(Path(servers.later), "F32")) is not None


def test_control_needs_the_key_and_generation_does_not(servers, one):
    async def calls():
        async with SglangClient("not-the-key") as stranger:
            with pytest.raises(RefusedError) as caught:
                await stranger.post(one.url + "/flush_cache", {}, timeout_s=10.0)
            assert caught.value.status == 401
            await stranger.get(one.url + "/ping", timeout_s=10.0)
            body = bodies.generate(request())
            assert [e async for e in stranger.stream(one.url + "/generate", body, timeout_s=10.0)]

    servers.run(calls())


def test_under_disaggregation_a_request_needs_a_room(servers, pair):
    for server in pair:
        last = servers.run(asyncio.wait_for(events(server, bodies.generate(request())), 10.0))[-1]
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
        assert last["meta_info"]["finish_reason"]["status_code"] == 400
        assert "room" in last["meta_info"]["finish_reason"]["message"]


def test_both_servers_of_a_pair_get_the_same_request_and_the_decode_server_answers(servers, one, pair):
    prefill, decode = pair

    async def both():
        room = (prefill.options.host, prefill.ports.bootstrap, secrets.randbits(62))
        body = bodies.generate(request(), room)
        return await asyncio.gather(events(prefill, body), events(decode, body))

    first, result = servers.run(both())
    alone = servers.run(events(one, bodies.generate(request())))
    tokens = [t for e in result for t in e["output_ids"]]
    assert tokens == [t for e in alone for t in e["output_ids"]]
    assert [t for e in first for t in e["output_ids"]] == tokens[:1]


def switch(server, role, **body):
    return server.tell("/pd_role_switch", {**bodies.role_switch(role, 0.0), **body})


def test_a_change_of_role_is_refused_without_harm_where_it_cannot_be(servers, one, pair):
    prefill, decode = pair

    async def changes():
        with pytest.raises(RefusedError) as caught:
            await switch(one, Role.DECODE)
        assert caught.value.answer["safe_to_restore"] is True
        same = await switch(decode, Role.DECODE)
        assert same["success"] is True
        assert same["safe_to_restore"] is False
        room = (prefill.options.host, prefill.ports.bootstrap, secrets.randbits(62))
        body = bodies.generate(request("busy", 1500), room)
        busy = asyncio.create_task(events(decode, body))
        first = asyncio.create_task(events(prefill, body))
        await asyncio.sleep(0.3)
        with pytest.raises(RefusedError, match="not idle") as caught:
            await switch(decode, Role.PREFILL)
        assert caught.value.answer["safe_to_restore"] is True
        await decode.tell("/abort_request", bodies.abort("busy"))
        await asyncio.gather(busy, first)

    servers.run(changes())


def died(servers, server):
    """Whether a server ends within seconds."""

    async def wait():
        await asyncio.wait([server.process.exited], timeout=15.0)

    servers.run(wait())
    return server.process.exited.done()


def test_a_release_while_a_request_runs_kills_the_server(servers):
    (row,) = servers.start(Role.COLOCATED)
    server = servers.runtime.server(row)

    async def release():
        busy = await running(server, bodies.generate(request("busy", 1500)))
        with pytest.raises(UnreachableError):
            await server.tell("/release_memory_occupation", bodies.tags("kv_cache", "weights"), timeout_s=10.0)
        with pytest.raises(WorkerError):
            await busy

    servers.run(release())
    assert died(servers, server)


def test_a_second_resume_kills_the_server(servers):
    (row,) = servers.start(Role.COLOCATED)
    server = servers.runtime.server(row)

    async def resume():
        await server.tell("/pause_generation", bodies.pause("in_place"))
        await server.flush(10.0)
        await server.tell("/release_memory_occupation", bodies.tags("kv_cache", "weights"))
        await server.tell("/resume_memory_occupation", bodies.tags("kv_cache", "weights"))
        with pytest.raises(UnreachableError):
            await server.tell("/resume_memory_occupation", bodies.tags("kv_cache"), timeout_s=10.0)

    servers.run(resume())
    assert died(servers, server)


def test_a_refused_flush_is_told_as_a_refused_update_though_the_weights_are_new(servers):
    """Pitfall of SGLang 0.5.23: the version stays too, so only the checksum tells."""
    (row,) = servers.start(Role.COLOCATED)
    server = servers.runtime.server(row)

    async def update():
        busy = await running(server, bodies.generate(request("busy", 1500)))
        await server.tell("/pause_generation", bodies.pause("in_place"))
        body = {**bodies.weights_from_disk(str(servers.later), 7), "flush_cache": True}
        with pytest.raises(RefusedError, match="Weights were updated, but the cache was not flushed"):
            await server.tell("/update_weights_from_disk", body)
        assert (await server.ask("/model_info"))["weight_version"] == "-1"
        found = (await server.tell("/weights_checker", bodies.checksum()))["ranks"][0]["checksums"]
        assert compare(found, expected_checksums(Path(servers.later), "F32")) is None
        await server.tell("/continue_generation", {})
        await server.tell("/abort_request", bodies.abort_all())
        await busy

    servers.run(update())
    servers.run(servers.runtime.kill(row))
