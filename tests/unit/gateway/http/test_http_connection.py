"""Connections of the HTTP server: one answer for each request, in order, and no connection blocks the others."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing

from gateway.http.head import HttpRefusal
from gateway.http.messages import Request, Response, ResponseSender
from gateway.http.server import HttpServer
from lakefs.errors import EngineUnreachable
from lakefs.limits import (
    HTTP_HEAD_BYTES_MAX,
    HTTP_HEAD_TIMEOUT_S,
    HTTP_IDLE_TIMEOUT_S,
    HTTP_LINGER_BYTES_MAX,
    HTTP_LINGER_S,
    HTTP_STALL_TIMEOUT_S,
)
from lakefs.ports import Stream
from tests.sim.world.network import SimulatedNetwork

ADDRESS = "tcp://127.0.0.1:0"
GET = b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n"


def put(body: bytes, *headers: bytes) -> bytes:
    lines = [b"PUT /x HTTP/1.1", b"Host: h", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chunked(*pieces: bytes) -> bytes:
    framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (*pieces, b""))
    return b"PUT /x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + framed


async def read_body(request: Request) -> bytes:
    body, piece = bytearray(), bytearray(1000)
    while count := await request.body.receive_into(memoryview(piece)):
        body += piece[:count]
    return bytes(body)


async def echo(request: Request) -> Response:
    """Answer with the request's body."""
    return Response(200, [(b"X-Method", request.head.method.encode())], [await read_body(request)])


async def ignore(request: Request) -> Response:
    return Response(403, (), [b"no"])


def refused(refusal: HttpRefusal) -> Response:
    return Response(refusal.status, (), [refusal.code.encode()], close=True)


@dataclass
class Served:
    """A server on a simulated network."""

    network: SimulatedNetwork
    server: HttpServer
    address: str
    clients: list[Stream] = field(default_factory=list)

    async def client(self) -> Stream:
        stream = await self.network.connect(self.address)
        self.clients.append(stream)
        return stream


@asynccontextmanager
async def serving(
    handler: Callable[[Request], Awaitable[Response]], *, connections_max: int = 100
) -> AsyncIterator[Served]:
    network = SimulatedNetwork(random.Random(1))
    server = HttpServer(handler, refused, connections_max=connections_max)
    async with trio.open_nursery() as nursery:
        address = await nursery.start(server.serve, await network.listen(ADDRESS))
        served = Served(network, server, address)
        yield served
        for stream in served.clients:
            await stream.aclose()
        nursery.cancel_scope.cancel()


def run(body: Callable[[], Awaitable[None]]) -> None:
    trio.run(body, clock=trio.testing.MockClock(autojump_threshold=0))


async def received(stream: Stream) -> bytes:
    """Read all until the server ends the connection."""
    found = bytearray()
    piece = bytearray(4096)
    try:
        while count := await stream.receive_into(memoryview(piece)):
            found += piece[:count]
    except EngineUnreachable:
        pass
    return bytes(found)


async def answer(stream: Stream) -> tuple[bytes, bytes]:
    """Read head and body of the next answer with a Content-Length."""
    found = bytearray()
    while b"\r\n\r\n" not in found:
        found += await _some(stream, 1)
    head = bytes(found)
    [length] = [line.split(b": ")[1] for line in head.split(b"\r\n") if line.startswith(b"Content-Length")]
    body = bytearray()
    while len(body) < int(length):
        body += await _some(stream, int(length) - len(body))
    return head, bytes(body)


async def _some(stream: Stream, limit: int) -> bytes:
    piece = bytearray(limit)
    count = await stream.receive_into(memoryview(piece))
    assert count, "the server has ended the connection"
    return bytes(piece[:count])


@pytest.mark.parametrize("step", [1, 2, 3, 7, 100_000])
def test_requests_sent_at_once_or_byte_by_byte_are_answered_in_order(step: int) -> None:
    big = random.Random(2).randbytes(50_000)
    asked = GET + put(b"abc") + put(b"") + chunked(b"one", b"two" * 300) + put(big) + b"\r\n" + GET

    async def body() -> None:
        async with serving(echo) as served, trio.open_nursery() as nursery:
            stream = await served.client()

            async def send() -> None:
                for at in range(0, len(asked), step):
                    await stream.send([asked[at : at + step]])

            nursery.start_soon(send)
            bodies = [(await answer(stream))[1] for _ in range(6)]
            assert bodies == [b"", b"abc", b"", b"one" + b"two" * 300, big, b""]

    run(body)


def test_a_body_that_nobody_read_is_dropped_when_short_and_ends_the_connection_when_long() -> None:
    async def body() -> None:
        async with serving(ignore) as served:
            stream = await served.client()
            await stream.send([put(b"x" * 5000) + GET])
            assert (await answer(stream))[1] == b"no"
            assert (await answer(stream))[1] == b"no"
            await stream.send([b"PUT /x HTTP/1.1\r\nHost: h\r\nContent-Length: 10000000\r\n\r\n"])
            assert b"Connection: close" in await received(stream)

    run(body)


def test_what_http_forbids_is_answered_once_and_ends_the_connection() -> None:
    async def body() -> None:
        async with serving(echo) as served:
            for sent, code in (
                (b"GET /x HTTP/1.1\nHost: h\n\r\n\r\n" + GET, b"BadRequest"),
                (b"GET /" + b"x" * HTTP_HEAD_BYTES_MAX, b"RequestHeaderSectionTooLarge"),
                (chunked(b"x")[:-5] + b"zz\r\n" + GET, b"BadRequest"),
                (put(b"abc", b"Transfer-Encoding: chunked") + GET, b"BadRequest"),
            ):
                stream = await served.client()
                await stream.send([sent])
                said = await received(stream)
                assert said.count(b"HTTP/1.1 ") == 1, said
                assert said.endswith(code), said
                assert b"Connection: close" in said

    run(body)


def test_a_body_cut_short_is_told_and_nothing_follows() -> None:
    async def body() -> None:
        cut: list[HttpRefusal] = []

        async def note(request: Request) -> Response:
            with pytest.raises(HttpRefusal) as caught:
                await read_body(request)
            cut.append(caught.value)
            raise caught.value

        async with serving(note) as served:
            for sent in (put(b"abcdef")[:-2], chunked(b"abc")[:-3]):
                stream = await served.client()
                await stream.send([sent])
                await stream.aclose()
                await trio.testing.wait_all_tasks_blocked()
        assert [refusal.code for refusal in cut] == ["IncompleteBody"] * 2

    run(body)


def test_a_streamed_body_that_ends_early_ends_the_connection_before_its_length() -> None:
    async def stream_some(sender: ResponseSender) -> None:
        await sender.send([b"abc"])

    async def body() -> None:
        done: list[bool] = []

        async def note_done() -> None:
            done.append(True)

        async def handler(request: Request) -> Response:
            return Response(200, length=10, stream=stream_some, done=note_done)

        async with serving(handler) as served:
            stream = await served.client()
            await stream.send([GET + GET])
            said = await received(stream)
            assert said.endswith(b"\r\n\r\nabc")
            assert b"Content-Length: 10" in said
            assert done == [True]

    run(body)


def test_head_has_the_length_and_no_body() -> None:
    async def handler(request: Request) -> Response:
        return Response(200, length=10)

    async def body() -> None:
        async with serving(handler) as served:
            stream = await served.client()
            await stream.send([b"HEAD /x HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"])
            said = await received(stream)
            assert said.endswith(b"Content-Length: 10\r\nConnection: close\r\n\r\n")

    run(body)


@pytest.mark.parametrize(
    ("sent", "limit_s"),
    [
        (b"", HTTP_IDLE_TIMEOUT_S),
        (GET[:10], HTTP_HEAD_TIMEOUT_S),
        (GET, HTTP_IDLE_TIMEOUT_S),
        (put(b"abc")[:-1], HTTP_STALL_TIMEOUT_S),
    ],
)
def test_who_takes_too_long_is_cut_off(sent: bytes, limit_s: float) -> None:
    async def body() -> None:
        async with serving(echo) as served:
            stream = await served.client()
            began = trio.current_time()
            await stream.send([sent])
            await received(stream)
            assert limit_s <= trio.current_time() - began <= limit_s + 3

    run(body)


def test_a_trickled_head_does_not_get_more_time() -> None:
    async def body() -> None:
        async with serving(echo) as served:
            stream = await served.client()
            began = trio.current_time()
            with pytest.raises(EngineUnreachable):
                for letter in b"GET /" + b"x" * 99:
                    await stream.send([bytes([letter])])
                    await trio.sleep(1)
            assert HTTP_HEAD_TIMEOUT_S <= trio.current_time() - began <= HTTP_HEAD_TIMEOUT_S + 5

    run(body)


def test_who_does_not_read_is_cut_off_and_a_slow_handler_is_not() -> None:
    async def body() -> None:
        async def slow(request: Request) -> Response:
            await trio.sleep(10 * HTTP_IDLE_TIMEOUT_S)
            return Response(200, (), [bytes(1 << 20)])

        async with serving(slow) as served:
            stream = await served.client()
            await stream.send([GET])
            await trio.sleep(10 * HTTP_IDLE_TIMEOUT_S + 1)
            assert len(served.server.connections) == 1
            await trio.sleep(HTTP_STALL_TIMEOUT_S + 3)
            assert not served.server.connections

    run(body)


def test_the_longest_idle_makes_room_and_when_all_are_busy_the_new_one_is_turned_away() -> None:
    async def body() -> None:
        release = trio.Event()

        async def wait(request: Request) -> Response:
            await release.wait()
            return Response(200)

        async with serving(wait, connections_max=2) as served:
            first = await served.client()
            await trio.sleep(1)
            second = await served.client()
            await trio.sleep(1)
            third = await served.client()
            assert await received(first) == b""
            await second.send([GET])
            await third.send([GET])
            await trio.testing.wait_all_tasks_blocked()
            fourth = await served.client()
            assert (await received(fourth)).startswith(b"HTTP/1.1 503 ")
            release.set()
            assert (await answer(second))[0].startswith(b"HTTP/1.1 200 ")
            assert (await answer(third))[0].startswith(b"HTTP/1.1 200 ")

    run(body)


def test_a_drain_lets_answers_be_finished_and_ends_the_rest() -> None:
    async def body() -> None:
        async def slow(request: Request) -> Response:
            await trio.sleep(5 if request.head.path == b"/x" else 50)
            return Response(200, (), [b"whole"])

        async with serving(slow) as served:
            idle, busy, stuck = [await served.client() for _ in range(3)]
            await busy.send([GET])
            await stuck.send([GET.replace(b"/x", b"/y")])
            await trio.testing.wait_all_tasks_blocked()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(served.server.drain, 20)
                assert await received(idle) == b""
                assert (await received(busy)).endswith(b"Connection: close\r\n\r\nwhole")
                assert await received(stuck) == b""
            with pytest.raises(EngineUnreachable):
                await served.network.connect(served.address)

    run(body)


def test_a_bug_in_a_handler_ends_its_connection_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async def handler(request: Request) -> Response:
            if request.head.path == b"/x":
                raise ZeroDivisionError
            return Response(200, (), [b"fine"])

        async with serving(handler) as served:
            broken, fine = [await served.client() for _ in range(2)]
            await broken.send([GET])
            assert await received(broken) == b""
            await fine.send([GET.replace(b"/x", b"/y")])
            assert (await answer(fine))[1] == b"fine"

    run(body)


def test_a_connection_that_always_has_a_request_ready_lets_others_run() -> None:
    async def body() -> None:
        async with serving(echo) as served, trio.open_nursery() as nursery:
            greedy, other = [await served.client() for _ in range(2)]

            async def ask() -> None:
                for _ in range(2000):
                    await greedy.send([GET])

            async def read() -> None:
                for _ in range(2000):
                    await answer(greedy)

            nursery.start_soon(ask)
            nursery.start_soon(read)
            await other.send([GET])
            assert (await answer(other))[0].startswith(b"HTTP/1.1 200 ")

    run(body)


def test_a_refused_client_that_still_sends_is_answered_and_then_read_for_a_while_only() -> None:
    async def main() -> None:
        async with serving(ignore) as served:
            client = await served.client()
            await client.send([b"PUT /x HTTP/1.1\r\nHost: h\r\nContent-Length: 999999999999\r\n\r\n"])
            assert await received(client) == await one_refusal(), "the server has ended its half"
            began = trio.current_time()
            with pytest.raises(EngineUnreachable):
                while True:
                    await client.send([bytes(1000)])
                    await trio.sleep(0.1)
            assert HTTP_LINGER_S / 2 < trio.current_time() - began < 2 * HTTP_LINGER_S

    async def one_refusal() -> bytes:
        async with serving(ignore) as served:
            client = await served.client()
            await client.send([b"GET /x HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"])
            return await received(client)

    run(main)


def test_a_refused_client_that_sends_without_end_is_read_up_to_a_bound() -> None:
    async def main() -> None:
        async with serving(ignore) as served:
            client = await served.client()
            await client.send([b"not HTTP\r\n\r\n"])
            assert b"BadRequest" in await received(client)
            sent = 0
            with pytest.raises(EngineUnreachable):
                while sent < 2 * HTTP_LINGER_BYTES_MAX:
                    await client.send([bytes(1 << 20)])
                    sent += 1 << 20
            assert HTTP_LINGER_BYTES_MAX <= sent <= HTTP_LINGER_BYTES_MAX + (4 << 20)

    run(main)


def test_a_refused_client_that_still_sends_holds_up_neither_a_stop_nor_who_comes() -> None:
    async def main() -> None:
        async with serving(ignore, connections_max=1) as served:
            for _ in range(2):
                refused_one = await served.client()
                await refused_one.send([b"not HTTP\r\n\r\n"])
                assert b"BadRequest" in await received(refused_one)
            began = trio.current_time()
            await served.server.drain(20)
            assert trio.current_time() - began < HTTP_LINGER_S / 2

    run(main)
