"""People reach a run by HTTP on loopback: a command becomes an event of the control plane, or one line why not."""

import asyncio
import json
import os
import stat

import pytest

from pearl_executor.availability_http import CommandSource
from pearl_planner.elastic import ElasticSettings, initial_state
from pearl_planner.policies import pearl
from pearl_planner.step import step
from pearl_rl.control.control_server import ControlServer, read_control
from pearl_rl.control.open_to_people import keep_loads, open_to_people
from pearl_rl.errors import CommandError
from pearl_rl.parts import availability, people_gpus, prior_workload
from pearl_rl.rollout.serving import WorkerLoad
from pearl_rl.run_folder import RunFolder, read_lines
from pearl_rl.settings import load_settings
from pearl_state.configuration import Configuration
from pearl_state.events import ConfigurationPinned, GpusOffered, WorkersCordoned
from pearl_state.profile import PlatformProfile
from pearl_state.roles import Tenure
from pearl_state.worker import GpuId, WorkerId

PLATFORM = PlatformProfile(
    decode_fixed_s=0.01,
    decode_per_sequence_s=0.001,
    prefill_per_token_s=0.001,
    kv_bytes_per_token=100,
    transfer_bytes_per_s=1e9,
    kv_capacity_bytes=1e9,
)


def fresh_state():
    """Two training GPUs, and two reserved rollout GPUs whose workers are being prepared: slots 4 and 5."""
    state = initial_state(
        settings=ElasticSettings(policy=pearl()),
        workload=prior_workload(load_settings().settings),
        platform=PLATFORM,
        training_gpus=2,
    )
    offer = GpusOffered(now_s=0.0, gpus=frozenset({GpuId(2), GpuId(3)}), tenure=Tenure.RESERVED)
    return step(state, offer)[0]


class Lab:
    """A server without a job behind it."""

    def __init__(self, folder, gpus=None):
        self.posted = []
        self.state = fresh_state()
        self.server = ControlServer(folder, post=self.posted.append, state=lambda: self.state, gpus=gpus)


async def ask(url, token, command, method="POST", path="/commands"):
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = command if isinstance(command, str) else json.dumps(command)
    head = f"{method} {path} HTTP/1.1\r\nAuthorization: Bearer {token}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write((head + body).encode())
    answer = (await reader.read()).decode()
    writer.close()
    return int(answer.split()[1]), json.loads(answer.partition("\r\n\r\n")[2])


def talk(tmp_path, *commands, gpus=None, token=None):
    """Each command's (status, answer), and the events that were posted."""

    async def main():
        lab = Lab(tmp_path, gpus() if gpus else None)
        async with asyncio.timeout(60), lab.server as server:
            known = read_control(tmp_path)
            assert known["url"] == server.url
            answers = [await ask(known["url"], token or known["token"], command) for command in commands]
        assert read_control(tmp_path) is None
        return answers, lab.posted

    return asyncio.run(main())


def test_commands_become_events(tmp_path):
    answers, posted = talk(tmp_path, {"pin": "1P1D"}, {"unpin": True}, {"cordon": [4]}, {"uncordon": [4, 5]})
    assert answers == [
        (200, {"pinned": "1P1D"}),
        (200, {"pinned": None}),
        (200, {"cordoned": [4]}),
        (200, {"uncordoned": [4, 5]}),
    ]
    assert [type(event) for event in posted] == [ConfigurationPinned] * 2 + [WorkersCordoned] * 2
    assert posted[0].configuration == Configuration(1, 1)
    assert (posted[2].workers, posted[2].cordoned, posted[3].cordoned) == (frozenset({4}), True, False)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ({"pin": "2X"}, "not like '2P3D'"),
        ({"pin": "0C"}, "no worker"),
        ({"pin": "1P0D"}, "needs decode"),
        ({"unpin": 1}, "must be true"),
        ({"freeze": True}, "nothing serves at this moment"),
        ({"cordon": [77]}, "no rollout worker is called 77"),
        ({"cordon": [0]}, "no rollout worker is called 0"),
        ({"cordon": "4"}, "list of numbers"),
        ({"cordon": []}, "list of numbers"),
        ({"cordon": [True]}, "list of numbers"),
        ({"cordon": [4, 5]}, "nobody would serve"),
        ({"offer": 1}, "GPUs come from elsewhere"),
        ({"stop": True}, "no command is called 'stop'"),
        ({"pin": "1C", "unpin": True}, "a command is one of"),
        ([], "a command is one of"),
    ],
)
def test_a_bad_command_posts_nothing_and_says_why(tmp_path, command, said):
    ((status, answer),), posted = talk(tmp_path, command)
    assert status == 409
    assert said in answer["error"]
    assert "\n" not in answer["error"]
    assert posted == []


def test_nothing_without_the_token(tmp_path):
    answers, posted = talk(tmp_path, {"pin": "1C"}, token="guess")
    assert answers[0][0] == 401
    assert posted == []


def test_a_body_that_is_no_json_is_refused(tmp_path):
    assert talk(tmp_path, "pin 2P3D")[0][0][0] == 400


def test_people_offer_and_reclaim_where_they_provide_the_gpus(tmp_path):
    answers, posted = talk(tmp_path, {"offer": 1}, {"reclaim": [6]}, gpus=lambda: CommandSource(gpus=[6, 7]))
    assert answers[0] == (200, {"offered": [6]})
    assert answers[1][1]["reclaimed"] == [6]
    assert posted == []


def test_only_the_owner_may_read_the_token(tmp_path):
    async def main():
        async with Lab(tmp_path).server:
            return stat.S_IMODE(os.stat(tmp_path / "control.json").st_mode)

    assert asyncio.run(main()) == 0o600


def test_a_running_configuration_can_be_frozen(tmp_path):
    async def main():
        lab = Lab(tmp_path)
        table = lab.state.table
        from dataclasses import replace

        from pearl_state.lifecycle import Lifecycle

        for lifecycle in (Lifecycle.STARTING, Lifecycle.PENDING_WEIGHTS):
            table = table.move(
                [id_ for id_ in (WorkerId(4), WorkerId(5)) if table.rows[id_].lifecycle is not lifecycle], lifecycle
            )
        for id_ in (WorkerId(4), WorkerId(5)):
            table = table.report(id_, 0)
        lab.state = replace(lab.state, table=table.move([WorkerId(4), WorkerId(5)], Lifecycle.ACTIVE))
        return lab.server.carry_out({"freeze": True}), lab.posted

    answer, posted = asyncio.run(main())
    assert answer == {"pinned": "2C"}
    assert posted[0].configuration == Configuration(colocated=2)


# ---- in a run -------------------------------------------------------------------------------------------------------


def opened(tmp_path, *overrides):
    """(what was said, whether it listened) of a run that is open for a moment."""

    async def main():
        said = []
        settings = load_settings(None, overrides)
        with RunFolder.create(settings, tmp_path / "run") as folder:

            class Scheduler:
                state = fresh_state()
                post = said.append

            async with open_to_people(
                settings.settings, folder, Scheduler, dict, gpus=people_gpus(settings.settings), say=said.append
            ):
                listened = read_control(folder.path) is not None
        return said, listened

    return asyncio.run(main())


def test_a_run_listens_only_where_it_is_told_to(tmp_path):
    assert opened(tmp_path / "a") == ([], False)
    said, listened = opened(tmp_path / "b", "control.http=true")
    assert listened
    assert said[0].startswith("listens on http://127.0.0.1:")


def test_a_taken_port_is_one_line(tmp_path):
    async def main():
        server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            with pytest.raises(CommandError, match=rf"control.http_port = {port}: cannot listen"):
                await asyncio.to_thread(opened, tmp_path, "control.http=true", f"control.http_port={port}")
        finally:
            server.close()

    asyncio.run(main())


def test_people_provide_gpus_through_the_server_or_through_a_file():
    by_http = load_settings(None, ["availability.source=control", "control.http=true"]).settings
    source = people_gpus(by_http)
    assert source is not None
    assert source.gpus()["free"] == [4, 5, 6, 7]
    assert people_gpus(load_settings().settings) is None
    file = load_settings(None, ["availability.source=control", "availability.control_file=x"]).settings
    assert people_gpus(file) is None
    assert availability(by_http, people=source) is not None


def test_queue_depths_are_kept_when_they_change(tmp_path):
    async def main():
        load = WorkerLoad(running=3, waiting=1, tokens=100, cached_tokens=50)
        with RunFolder.create(load_settings(), tmp_path / "run") as folder:
            task = asyncio.create_task(keep_loads(folder, lambda: {WorkerId(4): load}))
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return list(read_lines(folder.path / "loads.jsonl"))

    (line,) = asyncio.run(main())
    assert line["loads"]["4"]["running"] == 3
