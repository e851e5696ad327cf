import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl_executor.ports import GenerateRequest, Sampling, TokenChunk
from pearl_executor.runtimes.local.frames import Frame, FrameDecoder, FrameError, FrameSocket, encode_frame
from pearl_executor.runtimes.local.wire import chunks_from_wire, chunks_to_wire, request_from_wire, request_to_wire

relaxed = settings(max_examples=50, deadline=None)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
frames = st.builds(Frame, st.dictionaries(st.text(max_size=3), json_values, max_size=3), st.binary(max_size=99))
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@relaxed
@given(st.lists(frames, max_size=4), st.lists(st.integers(1, 40), min_size=1))
def test_a_stream_gives_the_same_frames_however_it_is_cut(sent, cuts):
    stream = b"".join(encode_frame(frame.head, frame.body) for frame in sent)
    decoder, received, start, index = FrameDecoder(), [], 0, 0
    while start < len(stream):
        size = cuts[index % len(cuts)]
        received += decoder.feed(stream[start : start + size])
        start, index = start + size, index + 1
    assert received == sent


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("!II", 1 << 30, 0),
        struct.pack("!II", 2, (1 << 30) + 1),
        struct.pack("!II", 2, 0) + b"xx",
        struct.pack("!II", 2, 0) + b"[]",
        b"GET / HTTP/1.1\r\n",
    ],
    ids=["head too long", "body too long", "no JSON", "no object", "HTTP"],
)
def test_bytes_that_are_no_frame_are_refused(data):
    with pytest.raises(FrameError):
        FrameDecoder().feed(data)


def test_a_frame_over_the_limit_is_not_sent():
    with pytest.raises(FrameError, match="over the limit"):
        encode_frame({"text": "x" * (17 << 20)})


def test_sending_never_blocks_and_nothing_is_lost():
    left, right = (FrameSocket(sock) for sock in socket.socketpair())
    body = bytes(range(256)) * 8192
    for number in range(4):
        left.send({"number": number}, body)
    assert left.has_unsent
    received = []
    while len(received) < 4:
        received += right.receive()
        left.flush()
    assert received == [Frame({"number": number}, body) for number in range(4)]
    assert not left.has_unsent
    left.close()
    assert right.receive() == []
    assert right.closed
    left.send({"to": "nobody"})


def test_what_was_sent_before_a_hang_up_arrives():
    left, right = (FrameSocket(sock) for sock in socket.socketpair())
    left.send({"last": True}, b"words")
    left.close()
    assert right.receive() + right.receive() == [Frame({"last": True}, b"words")]
    assert right.closed


def test_garbage_from_a_peer_ends_the_connection():
    raw, sock = socket.socketpair()
    receiver = FrameSocket(sock)
    raw.sendall(encode_frame({"good": 1}) + b"\xff" * 64)
    assert receiver.receive() in ([], [Frame({"good": 1})])
    assert receiver.closed
    raw.close()


@relaxed
@given(
    tokens,
    st.builds(
        Sampling,
        temperature=st.floats(0, 2),
        top_p=st.floats(0.1, 1),
        stop_token_ids=st.lists(st.integers(0, 99)).map(tuple),
        seed=st.none() | st.integers(0, 2**40),
    ),
    st.text(),
    st.integers(0, 10),
)
def test_a_request_survives_the_wire(prompt, sampling, affinity, position):
    request = GenerateRequest(
        rid="t1.0.0", prompt=tuple(prompt), max_new_tokens=7, sampling=sampling, affinity=affinity, position=position
    )
    (frame,) = FrameDecoder().feed(encode_frame(*request_to_wire(request)))
    assert request_from_wire(frame) == request


@relaxed
@given(st.dictionaries(st.text(min_size=1), st.lists(st.tuples(st.integers(0, 9), st.floats(-50, 0)), max_size=4)))
def test_tokens_survive_the_wire_bit_by_bit(by_request):
    chunks = {
        rid: TokenChunk([t for t, _ in pairs], [p for _, p in pairs], version=3) for rid, pairs in by_request.items()
    }
    (frame,) = FrameDecoder().feed(encode_frame(*chunks_to_wire(chunks)))
    received = {rid: (list(ids), list(probs), version) for rid, ids, probs, version in chunks_from_wire(frame)}
    assert received == {rid: (list(c.tokens), list(c.logprobs), 3) for rid, c in chunks.items()}


def test_a_token_notice_with_missing_bytes_is_refused():
    head, body = chunks_to_wire({"a": TokenChunk([1, 2], [-1.0, -2.0], 0)})
    with pytest.raises(FrameError, match="announces 2 tokens"):
        list(chunks_from_wire(Frame(head, body[:-1])))
