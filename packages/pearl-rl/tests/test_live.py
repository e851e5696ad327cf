"""Following a run and operating it: what is shown is what its files say, and a command does what it says."""

import asyncio
import fcntl
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from rich.console import Console

from pearl_rl.cli.app import app
from pearl_rl.errors import CommandError
from pearl_rl.live.follower import Follower, Tail, event_words
from pearl_rl.live.server import Dashboard
from pearl_rl.live.table_now import table_now
from pearl_rl.live.testing import OperableJob
from pearl_rl.live.top import WorkerTable, decided, under_way, weight_words
from pearl_rl.observer import StepRecord
from pearl_rl.run_folder import RunFolder
from pearl_rl.run_lock import RunLock, held
from pearl_rl.settings import load_settings
from pearl_rl.simulation.scenario import load_scenario


class Operated:
    """A job that listens in a thread of its own, so that commands can be run as people run them."""

    def __init__(self, path):
        self.path = path
        self._ready, self._thread = threading.Event(), ThreadPoolExecutor(1)

    def __enter__(self):
        self._future = self._thread.submit(asyncio.run, self._main())
        assert self._ready.wait(60) or self._future.result()
        return self

    async def _main(self):
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        async with OperableJob(self.path) as self.job:
            self._ready.set()
            await self._ending.wait()

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._ending.set)
        self._future.result(60)
        self._thread.shutdown()


@pytest.fixture
def operated(tmp_path):
    with Operated(tmp_path / "run") as running:
        yield running


def view(path):
    follower = Follower(path)
    follower.refresh()
    return follower.view()


def say(capsys, *words):
    """(exit code, standard output, standard error) of a command."""
    code = app([str(word) for word in words], standalone_mode=False)
    found = capsys.readouterr()
    return code, found.out, found.err


# ---- following ------------------------------------------------------------------------------------------------------


def test_a_tail_gives_each_line_once_and_waits_for_whole_ones(tmp_path):
    path = tmp_path / "a.jsonl"
    tail = Tail(path)
    assert list(tail.read()) == []
    path.write_text('{"a": 1}\n{"a"')
    assert list(tail.read()) == [{"a": 1}]
    with path.open("a") as file:
        file.write(": 2}\n")
    assert list(tail.read()) == [{"a": 2}]
    path.write_text('{"a": 3}\n')
    assert list(tail.read()) == [{"a": 3}]


def test_the_view_is_the_job_as_it_is(operated):
    seen, state = view(operated.path), operated.job.state
    assert {worker["id"] for worker in seen["workers"]} == set(state.table.rows)
    serving = [w for w in seen["workers"] if w["lifecycle"] == "active" and w["role"] != "training"]
    assert {worker["id"] for worker in serving} == set(state.table.active())
    assert seen["configuration"] == str(state.table.configuration)
    assert (seen["step"], seen["batch"], seen["remaining"]) == (1, 64, 64)
    assert {worker["running"] for worker in serving} == {3}
    assert seen["serving_versions"] == [seen["weight_version"]]
    assert seen["control"] is True
    assert seen["state"] == "running"


@pytest.mark.parametrize(
    ("served", "words"),
    [
        ([6], "weights v6"),
        ([5], "weights v5, newest v6"),
        ([4, 5, 6], "weights v4 to v6, newest v6"),
        ([], "no weights, newest v6"),
    ],
)
def test_served_weights_are_those_of_the_workers_and_not_the_newest(served, words):
    """A simulation ends in the moment in which the last weights are published."""
    assert weight_words({"serving_versions": served, "weight_version": 6}) == words


def test_of_large_clusters_the_first_workers_are_listed_and_all_are_counted(operated):
    follower = Follower(operated.path)
    follower.refresh()
    whole, part = follower.view(), follower.view(3)
    assert part["workers"] == whole["workers"][:3]
    assert part["more_workers"] == len(whole["workers"]) - 3
    for key in ("serving_gpus", "decoding", "waiting", "configuration"):
        assert part[key] == whole[key]
    assert whole["serving_gpus"] == len(operated.job.state.table.active())


def test_a_run_that_begins_says_so_and_one_that_is_silent_too(tmp_path):
    with RunFolder.create(load_settings(), tmp_path / "run"):
        assert view(tmp_path / "run")["state"] == "starting"
        later = Follower(tmp_path / "run", wall_s=lambda: 1e12)
        assert later.state() == "silent"


def test_another_run_in_the_same_folder_leaves_nothing_of_the_one_before(operated):
    """`resume` begins a run anew that had not played anything."""
    follower, path = Follower(operated.path), operated.path
    follower.refresh()
    assert follower.view()["news"]
    for name in ("events", "decisions", "table", "loads", "metrics"):
        (path / f"{name}.jsonl").unlink()
        (path / f"{name}.jsonl").touch()
    follower.refresh()
    seen = follower.view()
    assert (seen["news"], seen["decisions"], seen["workers"], seen["batch"], seen["decoding"]) == ([], [], [], 0, 0)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"settings": '])
def test_a_damaged_or_half_written_configuration_is_one_line_whatever_is_asked(tmp_path, capsys, text):
    path = tmp_path / "run"
    with RunFolder.create(load_settings(), path), RunLock(path):
        (path / "config.resolved.json").write_text(text)
        for words in (("status", path), ("top", path), ("workers", "list", "--run", path), ("unpin", "--run", path)):
            code, _, error = say(capsys, *words)
            assert (code, error.count("\n")) == (2, 1), error
            assert "cannot be read as a run" in error or "config.resolved.json: " in error


def test_a_file_that_goes_while_it_is_looked_at_disturbs_nobody(tmp_path):
    """Half-written files get their names, and old parts of a journal go, at any moment."""
    with RunFolder.create(load_settings(), tmp_path / "run"):
        (tmp_path / "run" / ".summary.json.part").symlink_to(tmp_path / "gone")
        assert view(tmp_path / "run")["state"] == "starting"


def test_a_run_whose_process_is_gone_died_and_says_when_and_how_it_goes_on(tmp_path, capsys):
    path = tmp_path / "run"
    with RunFolder.create(load_settings(None, ["run.steps=6"]), path):
        with RunLock(path):
            assert view(path)["state"] == "starting"
            assert view(path)["outcome"] == ""
        assert view(path)["state"] == "died"
    code, out, _ = say(capsys, "status", path)
    assert code == 0
    words = " ".join(out.split())
    assert re.search(r"died at \d{4}-\d\d-\d\d [\d:]{8}, after 0 of 6 steps, without a summary", words)
    assert f"to go on: pearl-rl resume {path}" in "".join(out.split("\n")).replace("  ", " ")
    assert "starting" not in out
    # Its end is the end of what `top` watches.
    assert say(capsys, "top", path, "--json")[0] == 0


def test_a_run_that_ended_early_says_how_it_goes_on_and_one_that_goes_on_has_not_ended(tmp_path):
    path = tmp_path / "run"
    with RunFolder.create(load_settings(None, ["run.steps=6"]), path) as folder:
        folder.write_summary({"steps": 0})
        with RunLock(path):
            assert view(path)["state"] == "starting"
        assert view(path)["state"] == "ended"
        assert f"after 0 of 6 steps; to go on: pearl-rl resume {path}" in view(path)["outcome"]


def test_a_command_to_a_run_that_does_not_listen_says_why_and_what_to_do(tmp_path, capsys):
    silent, listens, simulated = (tmp_path / name for name in ("silent", "listens", "simulated"))
    with RunFolder.create(load_settings(), silent), RunLock(silent):
        assert "start it with --set control.http=true" in say(capsys, "unpin", "--run", silent)[2]
    with RunFolder.create(load_settings(None, ["control.http=true"]), listens):
        with RunLock(listens):
            assert "starts and does not listen yet; ask again" in say(capsys, "unpin", "--run", listens)[2]
        code, _, error = say(capsys, "freeze", "--run", listens)
    assert code == 2
    assert f"has ended, so nothing takes commands; to go on: pearl-rl resume {listens}" in error
    with RunFolder.create_simulation(load_scenario("webshop").model_dump(), simulated):
        assert "is a recorded simulation" in say(capsys, "workers", "cordon", "4", "--run", simulated)[2]
    assert "has no worker" in say(capsys, "pin", "0C", "--run", silent)[2]


def test_who_looks_whether_a_run_lives_is_in_nobody_s_way(tmp_path):
    assert held(tmp_path) is None
    with RunLock(tmp_path):
        assert held(tmp_path) is True
        with pytest.raises(CommandError, match="runs this run"):
            RunLock(tmp_path)
    assert held(tmp_path) is False
    looking = os.open(tmp_path / "lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(0.01, os.close, [looking]).start()
    with RunLock(tmp_path):
        assert held(tmp_path) is True


def test_the_table_of_now_can_be_planned_on(operated):
    table = table_now(operated.path)
    assert table.rows == operated.job.state.table.rows
    assert table.active_roles == operated.job.state.table.active_roles
    assert table.holders == operated.job.state.table.holders


def test_events_are_told_in_words():
    assert event_words({"event": "GpusReclaimed", "gpus": [4, 5], "now_s": 1.0, "deadline_s": 3.0}) == (
        "GPU 4-5 reclaimed, 2.0 s notice"
    )
    assert event_words({"event": "ConfigurationPinned", "configuration": None}) == "unpinned by a person"
    assert event_words({"event": "RolloutProgressed"}) == ""


# ---- commands -------------------------------------------------------------------------------------------------------


def test_pin_and_unpin(operated, capsys):
    code, out, _ = say(capsys, "pin", "2P2D", "--run", operated.path)
    assert (code, out) == (0, "pinned to 2P2D\n")
    assert str(operated.job.state.pinned) == "2P2D"
    assert operated.job.state.table.configuration.mode == "disaggregation"
    assert view(operated.path)["pinned"] == "2P2D"
    code, out, _ = say(capsys, "unpin", "--run", operated.path, "--json")
    assert json.loads(out) == {"pinned": None}
    assert operated.job.state.pinned is None


def test_freeze_pins_what_runs(operated, capsys):
    now = str(operated.job.state.table.configuration)
    assert say(capsys, "freeze", "--run", operated.path)[1] == f"pinned to {now}\n"
    assert str(operated.job.state.pinned) == now


def test_cordon_drain_and_uncordon(operated, capsys):
    assert say(capsys, "workers", "cordon", "6", "--run", operated.path)[0] == 0
    code, out, _ = say(capsys, "workers", "drain", "7", "--run", operated.path, "--timeout", "5", "--json")
    assert code == 0
    assert json.loads(out) == {"cordoned": [7], "left": []}
    assert {6, 7}.isdisjoint(operated.job.state.table.active())
    assert say(capsys, "workers", "uncordon", "6", "7", "--run", operated.path)[0] == 0
    assert {6, 7} <= set(operated.job.state.table.active())


def test_workers_are_listed_as_they_are(operated, capsys):
    listed = json.loads(say(capsys, "workers", "list", "--run", operated.path, "--json")[1])
    assert {worker["id"] for worker in listed} == set(operated.job.state.table.rows)
    text = say(capsys, "workers", "list", "--run", operated.path)[1]
    assert "GPU 4" in text
    assert "training" in text


def test_status_and_top_show_one_screen(operated, capsys):
    operated.job.record_step(
        StepRecord(step=1, steps=60, now_s=9.0, reward_mean=0.5, duration_s=2.0, generated_tokens=100, rollout_s=1.5)
    )
    code, out, _ = say(capsys, "status", operated.path)
    assert code == 0
    for part in ("1/60", "running", "GPU 2", "preemptible", "0.500"):
        assert part in out
    assert say(capsys, "top", operated.path, "--once")[1] == out
    assert json.loads(say(capsys, "status", operated.path, "--json")[1])["completed"] == 1


def test_a_simulation_which_learns_nothing_shows_no_reward(tmp_path, capsys):
    with RunFolder.create_simulation(load_scenario("webshop").model_dump(), tmp_path / "run") as folder:
        folder.record_step(
            StepRecord(step=1, steps=4, now_s=9.0, reward_mean=0.0, duration_s=2.0, generated_tokens=100)
        )
        folder.write_summary({"steps": 4})
    code, out, _ = say(capsys, "status", tmp_path / "run")
    assert code == 0
    assert "tokens/s" in out
    assert "reward" not in out
    assert "resume" not in out
    assert json.loads(say(capsys, "status", tmp_path / "run", "--json")[1])["last_step"]["reward"] is None


def test_status_says_what_bounded_the_choice_and_which_gpus_wait(operated, capsys):
    out = say(capsys, "status", operated.path)[1]
    limits = operated.job.state.last_decision.limits
    assert limits
    for limit in limits:
        assert limit in " ".join(out.split())
    seen = {**view(operated.path), "loose": {"node-a": [9]}}
    assert "GPU 9 on node-a: offered, and fewer than one worker needs" in under_way(seen)


def test_apply_says_what_it_would_do_and_does_it(operated, capsys, tmp_path):
    file = tmp_path / "plan.json"
    count = len(operated.job.state.table.active())
    target = f"1P{count - 1}D"
    file.write_text(json.dumps({"selected": target}))
    before = operated.job.state
    code, out, _ = say(capsys, "apply", file, "--run", operated.path, "--dry-run")
    assert code == 0
    assert f"→ {target}" in out
    assert "becomes prefill" in out
    assert operated.job.state == before
    plan = json.loads(say(capsys, "apply", file, "--run", operated.path, "--dry-run", "--json")[1])["plan"]
    assert plan["target"] == target
    assert say(capsys, "apply", file, "--run", operated.path)[0] == 0
    assert str(operated.job.state.table.configuration) == target
    assert "nothing would change" in say(capsys, "apply", file, "--run", operated.path, "--dry-run")[1]


def test_a_target_without_enough_workers_is_infeasible(operated, capsys, tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"target": "9P9D"}))
    code, out, _ = say(capsys, "apply", file, "--run", operated.path, "--dry-run")
    assert code == 3
    assert "needs 18 workers" in out


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "is no JSON"), ("{}", "holds neither"), ('{"target": "2X"}', "2X"), ('{"target": "0C"}', "0C")],
)
def test_bad_plans_are_one_line(tmp_path, capsys, text, said):
    file = tmp_path / "plan.json"
    file.write_text(text)
    code, _, error = say(capsys, "apply", file, "--dry-run", "--run", tmp_path)
    assert (code, error.count("\n")) == (2, 1)
    assert said in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pin", "2X"], "not like '2P3D'"),
        (["workers", "cordon", "99"], "no rollout worker is called 99"),
        (["workers", "drain", "4", "--timeout", "0"], "--timeout 0"),
    ],
)
def test_refusals_are_one_line(operated, capsys, words, said):
    code, out, error = say(capsys, *words, "--run", operated.path)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert said in error


def test_a_run_that_does_not_listen_says_how_to_make_it(tmp_path, capsys, monkeypatch):
    with RunFolder.create(load_settings(), tmp_path / "runs" / "one"):
        pass
    monkeypatch.chdir(tmp_path)
    code, _, error = say(capsys, "pin", "2P3D")
    assert code == 2
    assert "control.http=true" in error
    (tmp_path / "runs" / "one" / "control.json").write_text(
        json.dumps({"url": "http://127.0.0.1:1", "token": "x", "pid": 1})
    )
    code, _, error = say(capsys, "unpin")
    assert code == 5
    assert "the run may be over" in error


def test_the_same_decision_again_and_again_is_one_line():
    def made(number, previous, selected, gate=None):
        return {
            "number": number, "at_s": float(number), "previous": previous, "selected": selected, "gate": gate,
            "budget_workers": 4, "why": "the best",
        }  # fmt: skip

    gate = {"open": False, "benefit_s": 0.1, "toggle_s": 0.5}
    newest_first = [
        made(7, "4C", "4C"), made(6, "4C", "4C"), made(5, None, None, gate), made(4, None, None, gate),
        made(3, "4C", "4C"), made(2, "3C", "4C"), made(1, "3C", "3C"),
    ]  # fmt: skip
    assert decided(newest_first) == [
        "7.0 s  stays 4C for 4 workers (the best), 2 times",
        "5.0 s  keep training GPUs: benefit 100 ms, cost 500 ms",
        "4.0 s  keep training GPUs: benefit 100 ms, cost 500 ms",
        "3.0 s  stays 4C for 4 workers (the best)",
        "2.0 s  3C → 4C for 4 workers (the best)",
        "1.0 s  stays 3C for 4 workers (the best)",
    ]


def test_what_listens_there_now_and_is_no_run_is_one_line(tmp_path, capsys, monkeypatch):
    with RunFolder.create(load_settings(), tmp_path / "runs" / "one"):
        pass
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        answer = b"HTTP/1.1 200 OK\r\n\r\n<html>somebody else</html>"

        def serve():
            taken, _ = server.accept()
            with taken:
                taken.recv(65_536)
                taken.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        where = {"url": f"http://127.0.0.1:{server.getsockname()[1]}", "token": "x", "pid": 1}
        (tmp_path / "runs" / "one" / "control.json").write_text(json.dumps(where))
        code, _, error = say(capsys, "unpin")
        thread.join(10)
    assert (code, error.count("\n")) == (5, 1)
    assert "is no control server of a run" in error


def test_without_a_run_the_commands_ask_for_one(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in (["status"], ["workers", "list"], ["unpin"], ["dashboard"]):
        code, _, error = say(capsys, *words)
        assert (code, error) == (2, "pearl-rl: no run in runs; name the folder of one\n")
    assert say(capsys, "status", tmp_path)[0] == 2
    assert say(capsys, "top", "--every", "0")[0] == 2


def test_configurations_are_compared_key_by_key(tmp_path, capsys):
    file = tmp_path / "a.toml"
    file.write_text("[train]\nlearning_rate = 0.5\n")
    code, out, _ = say(capsys, "config", "diff", file)
    assert code == 0
    assert "train.learning_rate: 0.001 → 0.5" in out
    with RunFolder.create(load_settings(None, ["run.seed=7"]), tmp_path / "run"):
        pass
    found = json.loads(say(capsys, "config", "diff", file, tmp_path / "run", "--json")[1])["changed"]
    assert found == {
        "run.seed": {"first": 0, "second": 7},
        "train.learning_rate": {"first": 0.5, "second": 0.001},
    }
    assert "no difference" in say(capsys, "config", "diff", file, file)[1]
    assert say(capsys, "config", "diff", tmp_path)[0] == 2


@pytest.mark.parametrize(
    "command",
    ["report", "timeline", "replay", "what-if", "status", "top", "dashboard", "pin", "unpin", "freeze", "apply"]
    + [f"workers {name}" for name in ("list", "cordon", "uncordon", "drain")]
    + ["config diff"],
)
def test_help_has_an_example(command, capsys):
    code, out, _ = say(capsys, *command.split(), "--help")
    assert code == 0
    assert f"Example: pearl-rl {command}" in " ".join(out.split())


# ---- the dashboard's server -----------------------------------------------------------------------------------------


async def request(url, method="GET", path="/", body="", token=None, until=b""):
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    extra = f"Authorization: Bearer {token}\r\n" if token else ""
    writer.write(f"{method} {path} HTTP/1.1\r\n{extra}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    answer = await (reader.readuntil(until) if until else reader.read())
    writer.close()
    return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2]


def served(path, scenario, **options):
    async def main():
        dashboard = Dashboard(path, **options)
        async with asyncio.timeout(60):
            url = await dashboard.start()
            try:
                return await scenario(url)
            finally:
                await dashboard.aclose()

    return asyncio.run(main())


def test_the_dashboard_shows_the_view_and_is_read_only_by_default(operated):
    async def scenario(url):
        status, page = await request(url)
        assert status == 200
        assert b"connect-src" in page
        assert json.loads((await request(url, path="/state"))[1])["batch"] == 64
        event = (await request(url, path="/events", until=b"\n\n"))[1]
        assert json.loads(event.removeprefix(b"data: "))["run"] == "run"
        refused = await request(url, "POST", "/commands", '{"unpin": true}')
        assert refused[0] == 403
        assert b"read-only" in refused[1]
        assert (await request(url, path="/other"))[0] == 404

    served(operated.path, scenario)
    assert operated.job.state.pinned is None


def test_with_a_token_commands_go_on_to_the_run(operated):
    async def scenario(url):
        assert (await request(url, "POST", "/commands", '{"pin": "2P2D"}', token="wrong"))[0] == 401
        assert (await request(url, "POST", "/commands", "pin", token="the-token"))[0] == 400
        status, answer = await request(url, "POST", "/commands", '{"pin": "3X"}', token="the-token")
        assert (status, b"not like" in answer) == (409, True)
        return await request(url, "POST", "/commands", '{"pin": "2P2D"}', token="the-token")

    assert served(operated.path, scenario, token="the-token")[0] == 200
    assert str(operated.job.state.pinned) == "2P2D"


def test_another_host_than_loopback_needs_the_token_for_everything(operated):
    with pytest.raises(CommandError, match="needs --control"):
        Dashboard(operated.path, host="0.0.0.0")

    async def scenario(url):
        local = url.replace("0.0.0.0", "127.0.0.1")
        assert (await request(local))[0] == 401
        return await request(local, path="/?token=the-token")

    assert served(operated.path, scenario, host="0.0.0.0", token="the-token")[0] == 200


def test_names_of_runs_stay_text(tmp_path):
    path = tmp_path / "<b>run"
    with RunFolder.create(load_settings(), path):
        pass

    async def scenario(url):
        return (await request(url))[1]

    page = served(path, scenario)
    assert b"<b>run" not in page
    assert b"&lt;b&gt;run" in page


# ---- as processes ---------------------------------------------------------------------------------------------------


def test_the_shell_completes_commands():
    environment = {**os.environ, "_PEARL_RL_COMPLETE": "complete_bash", "COMP_WORDS": "pearl-rl rep", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv[0] = 'pearl-rl'; from pearl_rl.cli import main; main()"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert {"report", "replay", "reproduce"} <= set(done.stdout.split())
    assert all(word.startswith("rep") for word in done.stdout.split())


def test_the_dashboard_prints_its_address_and_ends_in_order(operated):
    words = [sys.executable, "-m", "pearl_rl", "dashboard", str(operated.path), "--control"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        url, _, token = process.stdout.readline().strip().partition("/#token=")
        status, body = asyncio.run(request(url, "POST", "/commands", '{"pin": "2P2D"}', token=token))
        process.terminate()
        assert process.wait(60) == 0
    assert (status, json.loads(body)) == (200, {"pinned": "2P2D"})


def test_top_draws_until_the_run_is_over(operated, capsys):
    (operated.path / "summary.json").write_text("{}")
    code, out, _ = say(capsys, "top", operated.path, "--every", "0.1")
    assert code == 0
    assert "ended" in out


def test_a_taken_port_is_one_line(operated, capsys):
    async def main():
        server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
        try:
            port = server.sockets[0].getsockname()[1]
            return await asyncio.to_thread(say, capsys, "dashboard", operated.path, "--port", port)
        finally:
            server.close()

    code, _, error = asyncio.run(main())
    assert code == 2
    assert "cannot listen there" in error


@pytest.mark.parametrize(
    ("width", "shown", "left_out"),
    [
        (84, ("C colocated", "GPU 6-7", "preemptible", "12+3", "v60", "fails"), ()),
        (80, ("C colocated", "preemptible", "12+3", "v60", "fails"), ("GPU 6",)),
        (72, ("preemptible", "12+3", "v60", "fails"), ("colocated",)),
        (60, ("12+3", "v60", "fails"), ("preemptible",)),
        (50, ("12+3", "fails"), ("v60",)),
        (40, ("6-7",), ("12+3", "fails")),
    ],
)
def test_workers_fit_a_terminal_by_shorter_cells_and_then_by_fewer(width, shown, left_out):
    widest = {"id": 11, "role": "colocated", "lifecycle": "pending_weights", "cordoned": False, "reclaim_at_s": None,
              "weight_version": 60, "place": "GPU 6-7", "group": "preemptible", "running": 12, "waiting": 3,
              "failures": 2}  # fmt: skip
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(WorkerTable([widest]))
    text = console.export_text()
    assert "…" not in text
    # No cell is folded: a head, a line, and the worker.
    assert sum(bool(line.strip()) for line in text.splitlines()) == 3
    for part in ("pending weights", *shown):
        assert part in text
    for part in left_out:
        assert part not in text


def test_nothing_is_under_way_in_a_run_that_is_over(tmp_path, capsys):
    path = tmp_path / "run"
    with Operated(path):
        line = json.loads((path / "table.jsonl").read_text().splitlines()[-1])
        group = {"id": 7, "kind": "expansion", "workers": [3], "cancelled": False}
        with (path / "table.jsonl").open("a") as file:
            file.write(json.dumps({**line, "groups": [group]}) + "\n")
        assert "preparing expansion 7" in say(capsys, "status", path)[1]
    (path / "summary.json").write_text("{}")
    out = say(capsys, "status", path)[1]
    assert "ended" in out
    assert "preparing" not in out
