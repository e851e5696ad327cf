import asyncio
import contextlib

import pytest

from pearl_executor.loopback_http import EventStream, LoopbackServer, Request, Response, as_json, is_loopback


async def raw(url, text):
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(text.encode())
    answer = await reader.read()
    writer.close()
    return answer.decode()


def serve(handle, scenario):
    async def main():
        server = LoopbackServer(handle)
        async with asyncio.timeout(60):
            url = await server.start()
            try:
                return await scenario(url)
            finally:
                server.close()

    return asyncio.run(main())


async def echo(request: Request):
    return as_json({"path": request.path, "query": dict(request.query), "held": request.holds_token("secret-token")})


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.9.9.9"])
def test_loopback_hosts(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "example.org", ""])
def test_other_hosts(host):
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("Host: 127.0.0.1:80", 200),
        ("Host: localhost", 200),
        ("Host: [::1]:80", 200),
        ("Host: rebound.example.org", 403),
        ("Host: localhost\r\nOrigin: https://example.org", 403),
        ("Host: localhost\r\nOrigin: null", 403),
        ("Host: localhost\r\nOrigin: http://127.0.0.1:99", 200),
    ],
)
def test_pages_of_other_sites_are_refused(head, status):
    async def scenario(url):
        return await raw(url, f"GET / HTTP/1.1\r\n{head}\r\n\r\n")

    assert serve(echo, scenario).startswith(f"HTTP/1.1 {status} ")


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("GET /a?token=secret-token HTTP/1.1\r\n\r\n", True),
        ("GET /a HTTP/1.1\r\nAuthorization: Bearer secret-token\r\n\r\n", True),
        ("GET /a?token=other HTTP/1.1\r\n\r\n", False),
        ("GET /a HTTP/1.1\r\n\r\n", False),
    ],
)
def test_the_token_comes_in_the_head_or_the_query(text, held):
    async def scenario(url):
        return await raw(url, text)

    answer = serve(echo, scenario)
    assert ('"held": true' in answer) is held
    assert '"path": "/a"' in answer


def test_events_are_sent_as_they_come_and_end_with_their_source():
    async def messages():
        for number in range(3):
            yield f"{number}"
            await asyncio.sleep(0.01)

    async def stream(request):
        return EventStream(messages())

    async def scenario(url):
        return await raw(url, "GET / HTTP/1.1\r\n\r\n")

    answer = serve(stream, scenario)
    assert "text/event-stream" in answer
    assert answer.endswith("data: 0\n\ndata: 1\n\ndata: 2\n\n")


def test_a_listener_that_goes_away_ends_its_stream():
    ended = asyncio.Event()

    async def messages():
        try:
            yield "first"
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def stream(request):
        return EventStream(messages())

    async def scenario(url):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await reader.readuntil(b"data: first\n\n")
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        await asyncio.wait_for(ended.wait(), 5)

    serve(stream, scenario)
    assert ended.is_set()


def test_answers_are_not_kept_and_not_sniffed():
    async def page(request):
        return Response(body=b"<p>", content_type="text/html", headers={"X-A": "1"})

    async def scenario(url):
        return await raw(url, "GET / HTTP/1.1\r\n\r\n")

    answer = serve(page, scenario)
    for line in ("Cache-Control: no-store", "X-Content-Type-Options: nosniff", "X-A: 1", "Content-Length: 3"):
        assert line in answer


def test_closing_ends_open_streams():
    async def messages():
        yield "first"
        await asyncio.sleep(60)

    async def stream(request):
        return EventStream(messages())

    async def main():
        server = LoopbackServer(stream)
        url = await server.start()
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await reader.readuntil(b"data: first\n\n")
        async with asyncio.timeout(5):
            await server.aclose()
            assert await reader.read() == b""
        writer.close()

    asyncio.run(main())
