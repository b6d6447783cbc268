"""Requests that expect 100 Continue: when it is sent, and what a refusal does to the connection."""

from __future__ import annotations

from lakefs.ports import Stream
from tests.unit.gateway.http.test_http_connection import answer, echo, ignore, received, run, serving


async def some(stream: Stream, limit: int) -> bytes:
    piece = bytearray(limit)
    return bytes(piece[: await stream.receive_into(memoryview(piece))])


def test_continue_is_sent_when_the_body_is_asked_for_and_not_when_it_is_refused() -> None:
    head = b"PUT /x HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n"

    async def body() -> None:
        async with serving(echo) as served:
            stream = await served.client()
            await stream.send([head])
            told = b"HTTP/1.1 100 Continue\r\n\r\n"
            assert await some(stream, len(told)) == told
            await stream.send([b"abc"])
            assert (await answer(stream))[1] == b"abc"
        async with serving(ignore) as served:
            stream = await served.client()
            await stream.send([head])
            said = await received(stream)
            assert said.startswith(b"HTTP/1.1 403 ")
            assert b"100 Continue" not in said
            assert b"Connection: close" in said, "nobody knows whether the body will come"

    run(body)


def test_continue_is_sent_for_an_empty_body_too_and_the_connection_goes_on() -> None:
    head = b"PUT /x HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\nExpect: 100-continue\r\n\r\n"

    async def body() -> None:
        for handler, content in ((echo, b""), (ignore, b"no")):
            async with serving(handler) as served:
                stream = await served.client()
                for _ in range(2):
                    await stream.send([head])
                    told = b""
                    while not told.endswith(b"\r\n\r\n"):
                        told += await some(stream, 1)
                    assert told == b"HTTP/1.1 100 Continue\r\n\r\n"
                    assert (await answer(stream))[1] == content

    run(body)
