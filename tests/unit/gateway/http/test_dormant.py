"""Connections without a task: the door has them with their descriptors, and each is closed once, by whoever has it."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing

from gateway.http import door as door_module, loop_gap, server as server_module
from gateway.http.door import Door
from gateway.http.messages import Request, Response
from gateway.http.server import HttpServer
from lakefs.transport.streams import TrioNetwork
from tests.descriptors import descriptor_count
from tests.unit.gateway.http.line_repeater import LineRepeater
from tests.unit.gateway.http.test_door import no_rest
from tests.unit.gateway.http.test_http_connection import refused

GET = b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n"
WAIT_S = 10.0
LONG = bytes(range(256)) * (64 << 10)
"""More than the buffers between a server and its client hold."""


@dataclass
class Served:
    """A server with a door, on a real port."""

    server: HttpServer
    door: Door
    repeater: LineRepeater
    port: int
    peers: list[str] = field(default_factory=list)

    async def client(self) -> trio.SocketStream:
        before = self.server.counts()[0]
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        await until(lambda: self.server.counts()[0] > before)
        return stream


async def until(holds: Callable[[], object]) -> None:
    with trio.fail_after(WAIT_S):
        while not holds():  # noqa: ASYNC110 - what is waited for comes through a socket
            await trio.sleep(0.001)


async def received(stream: trio.SocketStream, count: int) -> bytes:
    found = b""
    with trio.fail_after(WAIT_S):
        while len(found) < count:
            piece = await stream.receive_some(count - len(found))
            if not piece:
                break
            found += piece
    return found


async def answer(stream: trio.SocketStream) -> bytes:
    """Read an answer; return its body."""
    found = b""
    while b"\r\n\r\n" not in found:
        piece = await received(stream, 1)
        assert piece, f"the server has ended the connection after {found!r}"
        found += piece
    [length] = [line.split(b": ")[1] for line in found.split(b"\r\n") if line.startswith(b"Content-Length")]
    return await received(stream, int(length))


async def is_ended(stream: trio.SocketStream) -> bool:
    try:
        return await received(stream, 1) == b""
    except trio.BrokenResourceError:
        return True


@asynccontextmanager
async def serving(repeater: LineRepeater | None = None, connections_max: int = 100) -> AsyncIterator[Served]:
    """Serve; at the end all that was opened is closed, and nothing else."""
    peers: list[str] = []

    async def handler(request: Request) -> Response:
        peers.append(request.peer)
        return Response(200, (), [request.head.target])

    repeater = repeater or LineRepeater()
    door = Door(repeater, lambda: None, lambda: None, no_rest)
    server = HttpServer(handler, refused, connections_max=connections_max, door=door)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(door.run)
        address = await nursery.start(server.serve, await TrioNetwork().listen("tcp://127.0.0.1:0"))
        yield Served(server, door, repeater, int(address.rpartition(":")[2]), peers)
        nursery.cancel_scope.cancel()
    assert server.counts() == (0, 0)


def run(body: Callable[[], Awaitable[None]]) -> None:
    """Run in trio; no descriptor is left open, and none was closed that another had."""
    before = descriptor_count()
    trio.run(body)
    assert descriptor_count() == before


@pytest.fixture(autouse=True)
def one_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only one parked connection keep its task: every next one that is parked makes it dormant."""
    monkeypatch.setattr(door_module, "_TASKS_MAX", 1)


@pytest.fixture(params=["in the gap", "in a task"])
def _with_and_without_gap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in a task":
        monkeypatch.setattr(loop_gap, "_inside", lambda: None)


@pytest.mark.usefixtures("_with_and_without_gap")
def test_a_connection_has_a_task_only_when_python_answers() -> None:
    async def body() -> None:
        async with serving() as served, await served.client() as one, await served.client() as two:
            assert not served.server.connections
            assert served.server.counts() == (2, 2)
            await one.send_all(b"?door\n")
            assert await received(one, 4) == b"DOOR"
            assert not served.server.connections, "the door alone has answered"
            for stream in (one, two, one, two):
                await stream.send_all(GET)
                assert await answer(stream) == b"/x"
                await until(lambda: (served.door.dormant_count, served.server.counts()) == (1, (2, 2)))
                await stream.send_all(b"?both\n")
                assert await received(stream, 4) == b"BOTH"
            assert len(served.server.connections) == 1

    run(body)


def test_a_request_that_is_cut_anywhere_is_answered_and_its_peer_known() -> None:
    async def body() -> None:
        async with serving() as served, await served.client() as stream, await served.client() as other:
            port = stream.socket.getsockname()[1]
            asked = GET + b"PUT /y HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc"
            for at in range(1, len(asked)):
                await other.send_all(GET)  # takes the place of the one that keeps its task
                assert await answer(other) == b"/x"
                await until(lambda: served.door.dormant_count == 1)
                served.peers.clear()
                await stream.send_all(asked[:at])
                await until(lambda: len(served.server.connections) == 2 or served.peers)
                await stream.send_all(asked[at:])
                assert [await answer(stream), await answer(stream)] == [b"/x", b"/y"]
                assert served.peers == [f"127.0.0.1:{port}"] * 2
                await until(lambda: served.door.dormant_count == 1)  # the other one's

    run(body)


def test_an_answer_that_a_dormant_client_is_too_slow_for_is_sent_whole() -> None:
    async def body() -> None:
        repeater = LineRepeater(lambda line: LONG)
        async with serving(repeater) as served, await served.client() as stream:
            await stream.send_all(b"?long\n" + GET)
            await until(lambda: served.server.connections)
            assert await received(stream, len(LONG)) == LONG
            assert await answer(stream) == b"/x"

    run(body)


def test_half_a_request_of_a_dormant_connection_gets_a_task_in_time() -> None:
    async def body() -> None:
        async with serving() as served, await served.client() as stream:
            await stream.send_all(b"9:GET /z ")
            await until(lambda: served.server.connections)
            assert await answer(stream) == b"BadRequest"

    run(body)


@pytest.mark.parametrize("how", ["closed", "reset", "half closed"])
def test_a_client_that_goes_is_forgotten(how: str) -> None:
    async def body() -> None:
        async with serving() as served, await served.client() as stream, await served.client() as other:
            if how == "reset":
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            if how == "half closed":
                await stream.send_eof()
                assert await is_ended(stream)
            await stream.aclose()
            await until(lambda: served.server.counts() == (1, 1))
            await other.send_all(GET)
            assert await answer(other) == b"/x"

    run(body)


def test_the_dormant_connection_that_was_idle_longest_makes_room() -> None:
    async def body() -> None:
        async with serving(connections_max=3) as served:
            first, second, third = [await served.client() for _ in range(3)]
            await first.send_all(b"?a\n")
            assert await received(first, 1) == b"A"
            async with await trio.open_tcp_stream("127.0.0.1", served.port) as fourth:
                await fourth.send_all(GET)
                assert await answer(fourth) == b"/x"
                assert await is_ended(second)
                for stream in (first, third):
                    await stream.send_all(GET)
                    assert await answer(stream) == b"/x"
                assert served.server.counts()[0] == 3
                assert served.server.turned_away == 0
            for stream in (first, second, third):
                await stream.aclose()

    run(body)


def test_none_is_ended_while_all_dormant_connections_are_busy() -> None:
    async def body() -> None:
        async with serving(connections_max=1) as served, await served.client() as stream:
            await stream.send_all(b"1:a")
            await until(lambda: served.repeater.held)
            assert served.server.counts() == (1, 0)
            async with await trio.open_tcp_stream("127.0.0.1", served.port) as other:
                assert (await received(other, 12)) == b"HTTP/1.1 503"
            served.door.answer(served.repeater.held[0], b"held")
            assert await received(stream, 4) == b"held"
            assert served.server.counts() == (1, 1)

    run(body)


def test_a_dormant_connection_ends_when_it_was_idle_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_SWEEP_S", 0.01)
    monkeypatch.setattr(server_module, "HTTP_IDLE_TIMEOUT_S", 0.5)

    async def body() -> None:
        async with serving() as served, await served.client() as idle, await served.client() as used:
            ended = False

            async def watch() -> None:
                nonlocal ended
                ended = await is_ended(idle)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch)
                while not ended:
                    await used.send_all(b"?a\n")
                    assert await received(used, 1) == b"A"
                    await trio.sleep(0.01)
            assert served.server.timed_out == 1
            assert served.server.counts() == (1, 1)

    run(body)


def test_a_drain_ends_dormant_connections_and_waits_for_busy_ones() -> None:
    async def body() -> None:
        async with serving() as served, await served.client() as quiet, await served.client() as busy:
            await busy.send_all(b"1:a")
            await until(lambda: served.repeater.held)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(served.server.drain, WAIT_S)
                assert await is_ended(quiet)
                assert served.server.counts() == (1, 0)
                began = trio.current_time()
                served.door.answer(served.repeater.held[0], b"held")
                assert await received(busy, 4) == b"held"
                assert await is_ended(busy)
            assert trio.current_time() - began < WAIT_S / 2

    run(body)


def test_a_drain_waits_no_longer_than_it_may() -> None:
    async def body() -> None:
        async with serving() as served, await served.client() as busy:
            await busy.send_all(b"1:a")
            await until(lambda: served.repeater.held)
            await served.server.drain(0.05)
            assert await is_ended(busy)
            served.door.answer(served.repeater.held[0], b"held")  # nobody's by now

    run(body)


def test_a_request_that_is_given_back_during_a_drain_is_answered_once_more() -> None:
    async def body() -> None:
        async with serving() as served, await served.client() as busy:
            await busy.send_all(b"1:a")
            await until(lambda: served.repeater.held)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(served.server.drain, WAIT_S)
                await trio.testing.wait_all_tasks_blocked()
                began = trio.current_time()
                served.door.give_back(served.repeater.held[0], GET)
                assert await answer(busy) == b"/x"
                assert await is_ended(busy)
            assert trio.current_time() - began < WAIT_S / 2

    run(body)


@pytest.mark.parametrize("which", ["the door", "the server"])
def test_the_end_of_either_closes_what_is_dormant(which: str) -> None:
    async def body() -> None:
        door = Door(LineRepeater(), lambda: None, lambda: None, no_rest)
        server = HttpServer(never, refused, connections_max=10, door=door)
        scopes = {name: trio.CancelScope() for name in ("the door", "the server")}
        async with trio.open_nursery() as nursery:

            async def run_door() -> None:
                with scopes["the door"]:
                    await door.run()

            async def run_server(*, task_status: trio.TaskStatus[str]) -> None:
                with scopes["the server"]:
                    await server.serve(await TrioNetwork().listen("tcp://127.0.0.1:0"), task_status=task_status)

            nursery.start_soon(run_door)
            port = int((await nursery.start(run_server)).rpartition(":")[2])
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                await until(lambda: door.dormant_count)
                scopes[which].cancel()
                assert await is_ended(stream)
                assert door.dormant_count == 0
            nursery.cancel_scope.cancel()

    run(body)


async def never(request: Request) -> Response:
    raise AssertionError("no request is sent")


def test_a_connection_that_the_system_does_not_watch_is_served_by_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise OSError("no more watches")

    monkeypatch.setattr(Door, "adopt", refuse)

    async def body() -> None:
        async with serving() as served, await served.client() as stream:
            assert len(served.server.connections) == 1
            await stream.send_all(GET)
            assert await answer(stream) == b"/x"

    run(body)


def test_many_connections_take_turns_and_none_is_lost() -> None:
    async def body() -> None:
        async with serving() as served:
            streams = [await served.client() for _ in range(40)]
            for turn_number in range(3):
                async with trio.open_nursery() as nursery:
                    for number, stream in enumerate(streams):

                        async def ask(stream: trio.SocketStream = stream, number: int = number + turn_number) -> None:
                            for _ in range(5):
                                if number % 2:
                                    await stream.send_all(GET)
                                    assert await answer(stream) == b"/x"
                                else:
                                    await stream.send_all(b"?a\n")
                                    assert await received(stream, 1) == b"A"

                        nursery.start_soon(ask)
                assert served.server.counts()[0] == len(streams)
            await until(lambda: served.door.dormant_count == len(streams) - 1)
            for stream in streams:
                await stream.aclose()
            await until(lambda: served.server.counts() == (0, 0))

    run(body)


def test_a_turn_that_hands_over_the_ends_of_many_closes_each() -> None:
    async def body() -> None:
        async with serving() as served:
            streams = [await served.client() for _ in range(70)]
            for stream in streams:
                await stream.aclose()
            await until(lambda: served.server.counts() == (0, 0))

    run(body)
