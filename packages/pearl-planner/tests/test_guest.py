"""The planner as a guest: what it is told changes what it answers, in process and over HTTP, and nothing else does."""

import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl_planner.guest import Guest
from pearl_planner.serve import _QUESTIONS, PlannerServer, profile
from pearl_state.configuration import Configuration
from pearl_state.errors import ProfileError, StateError
from pearl_state.samples import DecodeSample, PrefillSample, TurnSample


def guest(**given: Any) -> Guest:
    return Guest.start(model="qwen3-8b", gpu="h800", tensor_parallel=2, **given)


def trajectory(turns: int, *, step: int = 0, prompt: int = 300, response: int = 40) -> list[TurnSample]:
    return [
        TurnSample(
            step=step,
            turn=turn,
            new_prompt_tokens=prompt,
            response_tokens=response,
            retained_tokens=response,
            context_tokens=(turn + 1) * prompt,
            prefill_s=0.1,
            decode_s=0.5,
            queue_s=0.0,
            environment_s=0.2,
            last=turn == turns - 1,
        )
        for turn in range(turns)
    ]


def device_samples(fixed_s: float, each_s: float, token_s: float) -> dict[str, Any]:
    return {
        "decode": [DecodeSample(n, 20, 20 * (fixed_s + each_s * n)) for n in (1, 4, 8, 16, 32)],
        "prefill": [PrefillSample(n, n * token_s) for n in (100, 200, 400, 800) * 4],
    }


def test_before_any_measurement_it_chooses_a_ratio_only_if_told_to_trust_the_prior() -> None:
    assert str(guest().choose(13).selected) == "13C"
    assert str(guest(calibrated=True).choose(13).selected) == "4P9D"
    assert str(guest(calibrated=True).choose(2).selected) == "2C"


def test_measurements_replace_the_prior_and_say_so() -> None:
    told = guest().observe_step([trajectory(5) for _ in range(8)], batch=16, **device_samples(0.01, 0.002, 1e-4))
    assert told.calibrated
    assert told.platform.decode_fixed_s == pytest.approx(0.01, rel=1e-6)
    assert told.platform.decode_per_sequence_s == pytest.approx(0.002, rel=1e-6)
    assert told.platform.prefill_per_token_s == pytest.approx(1e-4, rel=1e-6)
    assert told.workload.batch == 16
    assert told.workload.new_prompt_tokens == pytest.approx(300)
    assert "telemetry" in told.platform.origin["decode_fixed_s"]
    assert not guest().calibrated


@pytest.mark.parametrize("ran", ["4C", "2P2D"])
def test_steps_that_say_the_same_again_make_no_mode_dearer(ran: str) -> None:
    known, segments = guest(batch=8), [(Configuration.parse(ran), 120.0)]
    costs = []
    for step in range(6):
        known = known.observe_step([trajectory(4, step=step)] * 8, segments=segments)
        costs.append((known.platform.overhead_per_turn_s, known.platform.handover_s))
    assert min(costs[1]) > 0
    assert all(later == pytest.approx(costs[1]) for later in costs[2:])


def test_too_few_samples_keep_the_prior_and_name_the_reason() -> None:
    told = guest().observe_step([trajectory(2)])
    assert told.platform.decode_fixed_s == guest().platform.decode_fixed_s
    assert any(line.startswith("turns: 2 turns, needs") for line in told.refused)


def test_a_broken_sample_is_refused_whole() -> None:
    before = guest()
    with pytest.raises(ProfileError, match="decode"):
        before.observe_step([trajectory(5)] * 4, decode=[DecodeSample(4, 10, float("nan"))])
    assert before == guest()


def test_old_steps_leave_the_window() -> None:
    told = guest()
    for step in range(6):
        told = told.observe_step([trajectory(4, step=step, prompt=100 * (step + 1))] * 4)
    assert len(told.turns) == 3
    assert told.workload.new_prompt_tokens == pytest.approx(500, rel=0.05)


def test_what_runs_now_counts_as_a_change_only_after_it_was_adopted() -> None:
    chosen = guest().choose(8).selected
    assert guest().choose(8).previous is None
    assert guest().adopt(chosen).choose(8).previous == chosen


def test_borrowing_pays_for_a_whole_batch_and_not_for_its_last_trajectory() -> None:
    asked = guest()
    assert asked.borrow(dedicated=4, lendable=8, remaining=64).borrow
    assert not asked.borrow(dedicated=4, lendable=8, remaining=0).borrow
    dear = asked.observe_toggle(activation_s=1e5)
    assert not dear.borrow(dedicated=4, lendable=8, remaining=64).borrow
    assert asked.borrow(dedicated=0, lendable=8, remaining=64).borrow


@pytest.mark.parametrize("counts", [{"dedicated": -1, "lendable": 2}, {"dedicated": 1, "lendable": 0}])
def test_counts_out_of_range_are_one_line(counts: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="dedicated ="):
        guest().borrow(**counts, remaining=3)


@pytest.fixture
def server() -> Iterator[PlannerServer]:
    with PlannerServer(guest()) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield running
        finally:
            running.shutdown()
            thread.join(timeout=10)


def ask(server: PlannerServer, path: str, body: object = None, token: str = "") -> tuple[int, Any]:
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{server.server_address[1]}{path}", data=data)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_over_http_it_answers_what_it_answers_in_process(server: PlannerServer) -> None:
    samples = device_samples(0.01, 0.002, 1e-4)
    status, believed = ask(
        server,
        "/v1/observe",
        {
            "trajectories": [[vars_of(turn) for turn in trajectory(5)] for _ in range(8)],
            "decode": [vars_of(one) for one in samples["decode"]],
            "prefill": [vars_of(one) for one in samples["prefill"]],
            "segments": [["8C", 40.0]],
        },
    )
    here = guest().observe_step(
        [trajectory(5) for _ in range(8)], **samples, segments=[(Configuration(colocated=8), 40.0)]
    )
    assert status == 200
    assert believed == json.loads(json.dumps(profile(here)))
    assert ask(server, "/v1/choose", {"workers": 8}) == (200, json.loads(json.dumps(here.choose(8).to_json())))
    assert ask(server, "/v1/adopt", {"configuration": "3P5D"}) == (200, {"current": "3P5D"})
    assert ask(server, "/v1/choose", {"workers": 8})[1]["previous"] == "3P5D"
    status, verdict = ask(server, "/v1/borrow", {"dedicated": 4, "lendable": 4, "remaining": 64})
    assert (status, verdict["borrow"]) == (200, here.borrow(dedicated=4, lendable=4, remaining=64).borrow)
    assert ask(server, "/v1/toggle", {"activation_s": 2.0})[1]["toggle_s"] == pytest.approx(2.0 + 3.18)
    assert ask(server, "/v1/profile")[1]["current"] == "3P5D"


def vars_of(sample: Any) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in sample.__slots__}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/choose", {"worker": 8}, "unknown key 'worker'; did you mean 'workers'?"),
        ("/v1/choose", {"workers": -1}, "'workers' = -1"),
        ("/v1/choose", {"workers": 2.5}, "whole number"),
        ("/v1/choose", {"workers": 10**400}, "very large"),
        ("/v1/choose", {}, "'workers' is missing"),
        ("/v1/choose", [], "expected a JSON object"),
        ("/v1/choose", b"{", "line 1"),
        ("/v1/choose", b'{"workers": NaN}', "finite"),
        ("/v1/choose", b"[" * 100_000, "nests too deeply"),
        ("/v1/adopt", {"configuration": "two"}, "'2P3D' or '4C'"),
        ("/v1/observe", {"decode": [{"sequences": 1}]}, "'iterations' is missing"),
        ("/v1/observe", {"segments": [["2C"]]}, "expected [configuration, seconds]"),
        ("/v1/start", {"model": "gpt-9", "gpu": "h800"}, "gpt-9"),
        ("/v1/dance", {}, "no such question"),
    ],
)
def test_a_bad_message_is_one_line_and_changes_nothing(
    server: PlannerServer, path: str, body: object, says: str
) -> None:
    status, answer = ask(server, path, body)
    assert status in (400, 404)
    assert says in answer["error"]
    assert "\n" not in answer["error"]
    assert server.guest == guest()


def test_what_was_sent_to_no_question_is_not_taken_for_the_next_one(server: PlannerServer) -> None:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=10)
    for _ in range(2):
        connection.request("POST", "/v1/dance", body=b"GET /v1/profile HTTP/1.1\r\n\r\n")
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("Connection")) == (404, "close")
        assert "no such question" in json.load(answer)["error"]
    connection.close()


def test_a_token_is_asked_for_and_compared() -> None:
    with PlannerServer(guest(), token="secret") as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            assert ask(running, "/v1/profile")[0] == 401
            assert ask(running, "/v1/profile", token="secrets")[0] == 401
            assert ask(running, "/v1/choose", {"workers": 4}, token="")[0] == 401
            assert ask(running, "/v1/profile", token="secret")[0] == 200
        finally:
            running.shutdown()
            thread.join(timeout=10)


def test_the_command_says_where_it_listens_and_refuses_to_be_open_without_a_token() -> None:
    start = [sys.executable, "-m", "pearl_planner", "serve", "--model", "qwen3-8b", "--gpu", "h800", "--tp", "2"]
    with subprocess.Popen([*start, "--trust-prior", "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        request = urllib.request.Request(f"{address}/v1/choose", data=b'{"workers": 13}')
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert json.load(answer)["selected"] == "4P9D"
        process.kill()
        process.wait(timeout=10)
    environment = {key: value for key, value in os.environ.items() if key != "PEARL_PLANNER_TOKEN"}
    for arguments, says in ((["--host", "0.0.0.0"], "PEARL_PLANNER_TOKEN"), (["--port", "99999"], "99999")):
        done = subprocess.run(
            [*start, *arguments], capture_output=True, text=True, timeout=30, check=False, env=environment
        )
        assert done.returncode == 2
        assert says in done.stderr
        assert done.stderr.count("\n") == 1


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["workers", "decode", "trajectories", "segments", "configuration", "batch", "sequences"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(_QUESTIONS)), _JSON)
def test_any_json_is_answered_or_refused_in_one_line(path: str, message: object) -> None:
    before = guest()
    with contextlib.suppress(StateError, ValueError):
        after, answer = _QUESTIONS[path](before, message)
        json.dumps(answer)
        assert isinstance(after, Guest)
