import asyncio
import contextlib
import json

import pytest

from pearl_executor.availability_http import ControlServerSource
from pearl_state.events import GpusOffered, GpusReclaimed


async def talk(url, text):
    """Send raw bytes; returns status and JSON of the answer."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(text.encode() if isinstance(text, str) else text)
    if isinstance(text, bytes):
        writer.write_eof()
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def call(source, method="GET", path="/gpus", body="", token=None):
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {token or source.token}"]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines) + "\r\n\r\n" + body


def serve(scenario, **options):
    async def main():
        source = ControlServerSource(gpus=[4, 5, 6], **options)
        events = []

        async def follow():
            async for event in source.events():
                events.append(event)  # noqa: PERF401 (as they come)

        following = asyncio.ensure_future(follow())
        async with asyncio.timeout(30):
            url = await source.url()
            await scenario(source, url, events)
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following

    asyncio.run(main())


def test_people_offer_and_reclaim_over_http():
    async def scenario(source, url, events):
        post = lambda **command: talk(url, call(source, "POST", "/commands", json.dumps(command)))  # noqa: E731
        assert await talk(url, call(source)) == (200, {"free": [4, 5, 6], "given": [], "recalled": []})
        assert await post(offer=2) == (200, {"offered": [4, 5]})
        assert (await post(reclaim=[4], notice_s=7))[0] == 200
        assert await talk(url, call(source)) == (200, {"free": [6], "given": [5], "recalled": [4]})
        source.returned(frozenset([4]))
        status, answer = await post(offer=3)
        assert (status, answer["error"]) == (409, "cannot offer 3 GPUs; free are [4, 6]")
        assert [type(e) for e in events] == [GpusOffered, GpusReclaimed]
        assert events[1].deadline_s - events[1].now_s == pytest.approx(7.0)

    serve(scenario)


def test_nothing_is_done_without_the_token():
    async def scenario(source, url, events):
        for text in (
            call(source, "POST", "/commands", '{"offer": 1}', token="wrong"),
            'POST /commands HTTP/1.1\r\nContent-Length: 12\r\n\r\n{"offer": 1}',
            "GET /gpus HTTP/1.1\r\n\r\n",
        ):
            status, answer = await talk(url, text)
            assert status == 401
            assert source.token not in answer["error"]
        assert events == []

    serve(scenario)


def test_bad_requests_are_refused_in_one_line():
    async def scenario(source, url, events):
        head = f"Authorization: Bearer {source.token}\r\n"
        for expected, text in (
            (404, call(source, "GET", "/")),
            (404, call(source, "DELETE", "/gpus")),
            (400, call(source, "POST", "/commands", "offer 2")),
            (409, call(source, "POST", "/commands", '{"offer": 9}')),
            (411, f"POST /commands HTTP/1.1\r\n{head}\r\n"),
            (411, f"POST /commands HTTP/1.1\r\n{head}Content-Length: -1\r\n\r\n"),
            (413, f"POST /commands HTTP/1.1\r\n{head}Content-Length: 999999\r\n\r\n"),
            (400, f"POST /commands HTTP/1.1\r\n{head}Content-Length: 50\r\n\r\nshort".encode()),
            (400, b"hello"),
            (400, b"GET / HTTP/1.1\r\nX: " + b"x" * 20000),
        ):
            status, answer = await talk(url, text)
            assert (status, "\n" in answer["error"]) == (expected, False), text
        assert events == []

    serve(scenario)


def test_it_listens_on_loopback_only_and_wants_a_real_token():
    with pytest.raises(ValueError, match=r"host is 0\.0\.0\.0"):
        ControlServerSource(gpus=[1], host="0.0.0.0")
    with pytest.raises(ValueError, match="shorter than 8"):
        ControlServerSource(gpus=[1], token="abc")
    assert ControlServerSource(gpus=[1]).token != ControlServerSource(gpus=[1]).token
    assert ControlServerSource(gpus=[1], token="long enough").token == "long enough"
