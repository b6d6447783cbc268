"""Bytes that begin no request, sent to the HTTP server."""

from __future__ import annotations

import pytest
import trio

from tests.unit.gateway.http.test_http_connection import GET, answer, echo, received, run, serving


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\x00", b"\x16", b"\xff\xfe", b"\0", b"LAK1", b"GET /\x01"])
@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("before", [b"", b"\r\n", GET])
def test_bytes_that_begin_no_request_are_refused_at_once(sent: bytes, step: int, before: bytes) -> None:
    async def body() -> None:
        async with serving(echo) as served:
            stream = await served.client()
            began = trio.current_time()
            await stream.send([before])
            if before == GET:
                assert (await answer(stream))[0].startswith(b"HTTP/1.1 200 ")
            for at in range(0, len(sent), step):
                await stream.send([sent[at : at + step]])
            said = await received(stream)
            assert said.startswith(b"HTTP/1.1 400 "), said
            assert said.endswith(b"BadRequest")
            assert b"Connection: close" in said
            assert trio.current_time() - began < 1

    run(body)
