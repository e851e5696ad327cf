import contextlib
import math
import os
import socket

import pytest

from pearl_executor.pacing import Pace
from pearl_executor.ports import GenerateRequest
from pearl_executor.runtimes.local.frames import FrameSocket, listen
from pearl_executor.runtimes.local.handover import KvPulls, KvRooms, Pull
from pearl_executor.runtimes.local.polling import Poller
from pearl_executor.runtimes.local.scripted import ScriptedBlob

PROMPT = tuple(range(10))


class Workers:
    """Both ends of a hand-over in one process, over real sockets, with a clock set by hand."""

    def __init__(self, folder, pace=None, ttl_s=60.0, timeout_s=10.0):
        self.now_s = 100.0
        self.held = 0
        self.path = str(folder / "p")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen()
        self.prefill_poller, self.decode_poller = Poller(), Poller()
        clock = lambda: self.now_s  # noqa: E731
        self.rooms = KvRooms(self.listener, self.prefill_poller, clock, ttl_s)
        self.pulls = KvPulls(
            self.decode_poller,
            clock,
            pace or Pace(),
            ScriptedBlob.from_bytes,
            lambda prompt, affinity: self.held,
            timeout_s,
        )

    def offer(self, rid, tokens=PROMPT, bytes_per_token=10):
        self.rooms.offer(rid, ScriptedBlob((*tokens, 7), 1, 0, bytes(bytes_per_token * (len(tokens) + 1))))

    def pull(self, rid, path=None):
        request = GenerateRequest(rid=rid, prompt=PROMPT, max_new_tokens=5)
        self.pulls.begin(Pull(request, 1, path or self.path, asked_s=self.now_s))

    def exchange(self, rounds=4):
        for _ in range(rounds):
            self.prefill_poller.wait(0.01)
            self.decode_poller.wait(0.01)

    def arrived(self):
        return list(self.pulls.arrived())

    def close(self):
        self.listener.close()
        for poller in (self.prefill_poller, self.decode_poller):
            for sock in list(poller._sockets):
                sock.close()


@pytest.fixture
def workers(tmp_path):
    with contextlib.ExitStack() as stack:

        def make(**options):
            made = Workers(tmp_path, **options)
            stack.callback(made.close)
            return made

        yield make


def test_kv_stays_until_the_receiver_says_it_has_it(workers):
    both = workers()
    both.offer("a")
    both.pull("a")
    both.exchange()
    (pull,) = both.arrived()
    assert pull.blob.tokens == (*PROMPT, 7)
    assert len(both.rooms) == 1
    both.pulls.done(pull)
    both.exchange()
    assert len(both.rooms) == 0


def test_only_the_missing_part_is_sent_and_all_of_it_after_a_refusal(workers):
    both = workers()
    both.offer("a")
    both.held = 8
    both.pull("a")
    both.exchange()
    (pull,) = both.arrived()
    assert (pull.blob.start, pull.blob.kv_tokens, pull.blob.nbytes) == (8, 3, 30)
    assert both.pulls.retry_whole(pull)
    both.exchange()
    (pull,) = both.arrived()
    assert (pull.blob.start, pull.blob.nbytes) == (0, 110)
    assert not both.pulls.retry_whole(pull)


def test_unclaimed_kv_expires_and_asking_for_it_says_so(workers):
    both = workers(ttl_s=5.0)
    both.offer("a")
    assert both.rooms.expire() == 105.0
    both.now_s = 105.0
    assert both.rooms.expire() == math.inf
    both.pull("a")
    both.exchange()
    (pull,) = both.arrived()
    assert "holds no KV of a" in pull.error


def test_a_silent_prefill_worker_is_given_up_in_time(workers):
    both = workers(timeout_s=3.0)
    both.offer("a")
    both.pull("a")
    assert both.pulls.next_due_s() == 103.0
    both.now_s = 102.9
    assert both.arrived() == []
    both.now_s = 103.0
    (pull,) = both.arrived()
    assert pull.error == "the prefill worker sent nothing within 3 s"
    assert "a" not in both.pulls


def test_a_prefill_worker_that_hangs_up_is_noticed_at_once(workers):
    both = workers()
    both.offer("a")
    both.pull("a")
    both.prefill_poller.wait(0.01)
    for sock in list(both.prefill_poller._sockets):
        sock.close()
    both.exchange(1)
    (pull,) = both.arrived()
    assert pull.error == "the prefill worker hung up"


def test_a_prefill_worker_that_is_not_there_is_an_error_at_once(workers, tmp_path):
    both = workers()
    both.pull("a", str(tmp_path / "nobody"))
    assert both.pulls.next_due_s() == 0.0
    (pull,) = both.arrived()
    assert "cannot be reached" in pull.error


def test_a_damaged_hand_over_is_an_error(workers):
    both = workers()

    class Damaged(ScriptedBlob):
        def tail(self, start):
            return self

        def to_bytes(self):
            return b"garbage"

    both.rooms.offer("a", Damaged((1,), 1, 0, b""))
    both.pull("a")
    both.exchange()
    (pull,) = both.arrived()
    assert "not readable" in pull.error


def test_transfers_share_the_link_and_each_pays_the_fixed_cost(workers):
    both = workers(pace=Pace(kv_bytes_per_s=100.0, handover_s=0.5))
    for rid in "ab":
        both.offer(rid)
        both.pull(rid)
    both.exchange()
    # 110 bytes at 100 bytes/s are 1.1 s on the link, one after the other, plus 0.5 s each.
    for now_s, expected in ((101.59, []), (101.6, ["a"]), (102.69, []), (102.71, ["b"])):
        both.now_s = now_s
        assert [pull.request.rid for pull in both.arrived()] == expected
    samples = both.pulls.take_samples()
    assert [(s.tokens, s.bytes, s.duration_s) for s in samples] == [(11, 110, pytest.approx(1.6))] * 2
    assert both.pulls.take_samples() == ()


def test_a_cancelled_pull_frees_the_room_and_what_still_comes_is_dropped(workers):
    both = workers()
    for rid in "ab":
        both.offer(rid)
        both.pull(rid)
    assert [pull.request.rid for pull in both.pulls.cancel("a")] == ["a"]
    assert both.pulls.cancel("a") == []
    both.exchange()
    assert [pull.request.rid for pull in both.arrived()] == ["b"]
    assert len(both.rooms) == 1


def test_a_forgotten_peer_is_connected_to_anew(workers):
    both = workers()
    for attempt in range(2):
        both.offer("a")
        both.pull("a")
        both.exchange()
        both.pulls.done(both.arrived()[0])
        both.exchange()
        assert len(both.prefill_poller._sockets) == 1, attempt
        both.pulls.forget(both.path)
        both.exchange(2)
        both.prefill_poller.wait(0)
        assert not both.prefill_poller._sockets


def test_a_large_hand_over_blocks_neither_side(workers):
    both = workers()
    both.offer("a", bytes_per_token=1 << 20)
    both.pull("a")
    arrived = []
    for _ in range(2000):
        both.prefill_poller.wait(0)
        both.decode_poller.wait(0)
        arrived += both.arrived()
    assert [pull.blob.nbytes for pull in arrived] == [11 << 20]


def test_a_poller_outlives_its_sockets(tmp_path):
    poller = Poller()
    got = []
    for number in range(50):
        left, right = socket.socketpair()
        sender = FrameSocket(left)
        poller.add(FrameSocket(right), lambda _, frame: got.append(frame.head["n"]))
        sender.send({"n": number})
        sender.close()
        poller.wait(0.01)
        poller.wait(0.01)
    assert got == list(range(50))
    assert len(os.listdir("/proc/self/fd")) < 200


def test_over_tcp_kv_goes_only_to_those_who_show_the_key():
    listener, address = listen("tcp://127.0.0.1:0")
    served, asking = Poller(), Poller()
    try:
        rooms = KvRooms(listener, served, lambda: 0.0, 60.0, "the key")
        rooms.offer("a", ScriptedBlob((*PROMPT, 7), 1, 0, bytes(110)))
        for key, outcome in (("the key", 110), ("another", "hung up"), ("schlüssel", "hung up")):
            pulls = KvPulls(asking, lambda: 1.0, Pace(), ScriptedBlob.from_bytes, lambda *_: 0, 10.0, key)
            pulls.begin(Pull(GenerateRequest(rid="a", prompt=PROMPT, max_new_tokens=5), 1, address, asked_s=0.0))
            for _ in range(4):
                served.wait(0.05)
                asking.wait(0.05)
            (pull,) = pulls.arrived()
            assert outcome == (pull.blob.nbytes if pull.blob else pull.error.rpartition("worker ")[2])
            pulls.forget(address)
    finally:
        for poller in (served, asking):
            for sock in list(poller._sockets):
                sock.close()
        listener.close()
