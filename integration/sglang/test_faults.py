"""What only the stand-in can do at will: connections that break at any byte, hangs, releases that free nothing."""

import asyncio
import os
import re
import secrets
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from servers import STAND_IN, TIMEOUTS, Servers
from support import cpu_options

from listeners import beyond_loopback, listeners
from pearl_executor.engines.sglang.answers import Answer, AnswerError
from pearl_executor.engines.sglang.launch import InterpreterLauncher, LaunchError
from pearl_executor.engines.sglang.options import SglangTimeouts, WeightTransport
from pearl_executor.engines.sglang.runtime import SglangRuntime
from pearl_executor.ports import (
    GenerateRequest,
    ReleaseVerificationError,
    Sampling,
    TransferError,
    WeightSnapshot,
    WorkerError,
    WorkerLostError,
)
from pearl_state.roles import Role

PROMPT = list(range(20, 60))


def request(tokens=8):
    return GenerateRequest(
        rid=secrets.token_hex(6), prompt=PROMPT, max_new_tokens=tokens, sampling=Sampling(temperature=0.0)
    )


@contextmanager
def world(model, folder, *roles, timeouts=TIMEOUTS, **changes):
    """Stand-ins in these roles with weights, version 1."""
    with Servers(STAND_IN, model, folder, timeouts=timeouts, **changes) as servers:
        rows = servers.start(*roles)

        async def load():
            snapshot = WeightSnapshot(1, str(servers.model))
            await asyncio.gather(*(servers.runtime.load_weights(row, snapshot) for row in rows))

        servers.run(load())
        yield servers, rows


def fault(servers, row, **faults):
    servers.run(servers.runtime.server(row).tell("/standin/faults", faults))


@pytest.fixture(scope="module")
def broken(model, tmp_path_factory):
    with world(model, tmp_path_factory.mktemp("faults"), Role.COLOCATED) as made:
        yield made


@pytest.mark.parametrize("at", [1, 90, 140, 400, 1500, 2500])
def test_an_answer_that_breaks_off_at_any_byte_is_a_failure_with_the_tokens_that_came(broken, at):
    """A stream is complete only with its [DONE]; what was seen before stays right, and goes on alike elsewhere."""
    servers, (row,) = broken
    whole = servers.run(servers.runtime.generate(row, request(), lambda _: None))
    fault(servers, row, drop_after_bytes={"/generate": at})
    chunks = []
    with pytest.raises(WorkerError, match=r"broke off|ended without|not JSON"):
        servers.run(servers.runtime.generate(row, request(), chunks.append))
    seen = tuple(token for chunk in chunks for token in chunk.tokens)
    assert seen == whole.tokens[: len(seen)]
    assert len(seen) < 8 or at > 1500
    assert servers.run(servers.runtime.generate(row, request(), lambda _: None)).tokens == whole.tokens


@pytest.mark.parametrize("path", ["/release_memory_occupation", "/pd_role_switch", "/update_weights_from_disk"])
def test_where_the_outcome_of_a_change_is_not_known_the_server_is_ended_and_nothing_is_repeated(model, tmp_path, path):
    with world(model, tmp_path, Role.DECODE) as (servers, (row,)):
        fault(servers, row, drop_after_bytes={path: 20})
        change = {
            "/release_memory_occupation": lambda: servers.runtime.release(row),
            "/pd_role_switch": lambda: servers.runtime.switch_role(row, Role.PREFILL),
            "/update_weights_from_disk": lambda: servers.runtime.load_weights(
                row, WeightSnapshot(2, str(servers.later))
            ),
        }[path]
        with pytest.raises(WorkerLostError, match=r"not known|in doubt"):
            servers.run(change())
        with pytest.raises(WorkerLostError):
            servers.run(servers.runtime.samples(row))


def test_a_load_that_is_given_up_in_its_middle_ends_the_server_unless_the_old_weights_stay(model, tmp_path):
    changes = {"weights": WeightTransport.IPC, "verify_checksum": False}
    with world(model, tmp_path, Role.COLOCATED, **changes) as (servers, (row,)):
        assert servers.run(servers.runtime.samples(row)).running == 0
        fault(servers, row, hang=["/update_weights_from_ipc"])

        async def give_up():
            load = asyncio.create_task(servers.runtime.load_weights(row, WeightSnapshot(2, str(servers.later))))
            await asyncio.sleep(0.5)
            load.cancel()
            await asyncio.wait({load})
            assert load.cancelled()

        servers.run(give_up())
        with pytest.raises(WorkerLostError):
            servers.run(servers.runtime.generate(row, request(), lambda _: None))


def test_a_server_that_dies_in_its_answer_is_lost(model, tmp_path):
    with world(model, tmp_path, Role.COLOCATED) as (servers, (row,)):
        fault(servers, row, die_after_bytes={"/generate": 700})
        chunks = []
        with pytest.raises(WorkerLostError, match="SIGKILL"):
            servers.run(servers.runtime.generate(row, request(), chunks.append))


def test_a_release_that_frees_nothing_is_found_by_measure(model, tmp_path):
    """200 with zero bytes freed, as where the memory saver is off (slime#579, sglang#4566)."""
    with world(model, tmp_path, Role.COLOCATED) as (servers, (row,)):
        fault(servers, row, release_frees_nothing=True)
        with pytest.raises(ReleaseVerificationError, match=r"released -?\d{1,6} bytes"):
            servers.run(servers.runtime.release(row))


def test_a_role_change_that_fails_half_way_ends_the_server(model, tmp_path):
    with world(model, tmp_path, Role.DECODE) as (servers, (row,)):
        fault(servers, row, fail_next_switch=True)
        with pytest.raises(WorkerLostError, match="failed half-way"):
            servers.run(servers.runtime.switch_role(row, Role.PREFILL))


def test_a_pair_that_hangs_after_its_prefill_worker_came_back_fails_its_canary(model, tmp_path):
    """P→D→P: a surviving decode server sends to a port that nobody reads; only its own time limit would tell."""
    env = {"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "1.5"}
    with world(model, tmp_path, Role.PREFILL, Role.DECODE, env=env) as (servers, (prefill, decode)):
        runtime = servers.runtime

        async def there_and_back():
            await runtime.refresh_peers(prefill)
            await runtime.server(decode).tell("/standin/faults", {"stale_routes": True})
            await runtime.switch_role(prefill, Role.DECODE)
            await runtime.switch_role(prefill, Role.PREFILL)
            with pytest.raises(TransferError, match="canary"):
                await runtime.refresh_peers(prefill)
            # The decode server forgot the port with its time limit: the pair works, and says so.
            await runtime.refresh_peers(prefill)
            assert len((await runtime.generate_pair(prefill, decode, request(), lambda _: None)).tokens) == 8

        servers.run(there_and_back())


def test_a_server_that_gives_no_sign_of_life_is_ended_and_reported(model, tmp_path):
    timeouts = SglangTimeouts(start_s=60.0, poll_s=0.1, silence_s=0.5)
    with world(model, tmp_path, Role.COLOCATED, timeouts=timeouts) as (servers, (row,)):
        fault(servers, row, hang=["/v1/loads"])

        async def lost():
            for _ in range(100):
                if servers.lost:
                    return
                await asyncio.sleep(0.1)

        servers.run(lost())
        ((id_, incarnation, cause),) = servers.lost
        assert (id_, incarnation) == (row.id, row.incarnation)
        assert "no sign of life for 0.5 s" in cause


def test_another_sglang_is_refused_with_what_to_install(model, tmp_path, monkeypatch):
    monkeypatch.setenv("PEARL_STANDIN_VERSION", "0.5.8")
    runtime = SglangRuntime(cpu_options(STAND_IN, model[0]), tmp_path)
    with pytest.raises(LaunchError, match=r"has SGLang 0\.5\.8, not 0\.5\.23; .*uv pip install sglang==0\.5\.23"):
        asyncio.run(runtime.__aenter__())


@pytest.mark.parametrize(
    ("interpreter", "words"),
    [(("no-such-program",), "is no program"), ((sys.executable,), "has no SGLang"), (("/bin/false",), "has no SGLang")],
)
def test_an_interpreter_without_sglang_is_refused_in_one_line(interpreter, words):
    with pytest.raises(LaunchError, match=words) as caught:
        asyncio.run(InterpreterLauncher(interpreter).check())
    assert "\n" not in str(caught.value)
    assert "uv pip install sglang==0.5.23" in str(caught.value)


def test_the_admin_key_is_in_no_log_journal_command_line_or_environment_and_nothing_listens_beyond_loopback(
    model, tmp_path
):
    key = re.compile(rb"(?<![0-9a-f])[0-9a-f]{48}(?![0-9a-f])")
    assert key.search(secrets.token_hex(24).encode()), "what a run draws"
    with world(model, tmp_path, Role.COLOCATED, Role.PREFILL) as (servers, rows):
        for row in rows:
            server = servers.runtime.server(row)
            place = Path("/proc", str(server.process.pid))
            for file in ("cmdline", "environ"):
                assert not key.search((place / file).read_bytes())
            # Who listens says so.
            assert server.url in (tmp_path / "sglang.jsonl").read_text()
            assert server.url.removeprefix("http://") in listeners(server.process.pid)
        assert not beyond_loopback(os.getpid())
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert any(b"<redacted>" in file.read_bytes() for file in written)
    assert not [file for file in written if key.search(file.read_bytes())]


def test_the_servers_end_with_the_control_plane(model, tmp_path):
    """Their standard input ends, whatever ended their parent."""
    with world(model, tmp_path, Role.COLOCATED) as (servers, (row,)):
        process = servers.runtime.server(row).process
        process.child.stdin.close()
        servers.run(asyncio.wait_for(asyncio.shield(process.exited), 10.0))
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)


def test_a_repeated_last_token_is_taken_once():
    """The event of a request that is aborted in a queue repeats the last token."""
    answer = Answer()
    meta = {"completion_tokens": 1, "weight_version": "3", "output_token_logprobs": [[-0.5, 7, None]]}
    assert answer.add({"output_ids": [7], "meta_info": meta}).tokens == (7,)
    end = {**meta, "finish_reason": {"type": "abort", "message": "Aborted", "status_code": None}}
    assert answer.add({"output_ids": [7], "meta_info": end}) is None
    assert answer.tokens == [7]


def test_an_answer_in_which_tokens_are_missing_is_refused():
    answer = Answer()
    meta = {"completion_tokens": 2, "weight_version": "3", "output_token_logprobs": [[-0.5, 7, None]]}
    with pytest.raises(AnswerError, match="1 tokens were never sent"):
        answer.add({"output_ids": [7], "meta_info": meta})


def test_a_relaunch_takes_newer_weights_where_its_own_are_not_kept_any_more(model, tmp_path):
    with world(model, tmp_path / "run", Role.COLOCATED, Role.COLOCATED) as (servers, (one, other)):
        old = tmp_path / "old"
        shutil.copytree(servers.later, old)

        async def relaunch():
            await servers.runtime.load_weights(one, WeightSnapshot(2, str(old)))
            await servers.runtime.load_weights(other, WeightSnapshot(3, str(servers.later)))
            shutil.rmtree(old)
            await servers.runtime.switch_role(one, Role.DECODE)
            assert servers.runtime.server(one).version == 3
            shutil.copytree(servers.later, old)
            await servers.runtime.load_weights(other, WeightSnapshot(4, str(old)))
            shutil.rmtree(old)
            with pytest.raises(WorkerLostError, match="weights 4 are not kept any more"):
                await servers.runtime.switch_role(other, Role.DECODE)

        servers.run(relaunch())


def test_a_server_without_weights_serves_nobody(model, tmp_path):
    timeouts = SglangTimeouts(start_s=60.0, versions_s=0.3)
    with Servers(STAND_IN, model, tmp_path, timeouts=timeouts) as servers:
        (row,) = servers.start(Role.COLOCATED)
        with pytest.raises(WorkerError, match=r"could not begin within 0\.3 s: worker 1 .* holds weights None"):
            servers.run(servers.runtime.generate(row, request(), lambda _: None))
