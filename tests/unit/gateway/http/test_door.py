"""The door alone: what it answers, what it hands over, and to whom a connection belongs."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio
import trio.testing
from hypothesis import given, strategies as st

from gateway.http._door import Door as NativeDoor
from gateway.http.door import Door, HandedOver
from gateway.http.messages import ResponseSender
from tests.unit.gateway.http.line_repeater import LineRepeater

ENOUGH_NS = 1_000_000_000
PEER = b'"127.0.0.1:1"'


@contextmanager
def parked(door: NativeDoor, peer: bytes = PEER) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield a client's socket, and the server's, which is parked."""
    client, server = socket.socketpair()
    with client, server:
        door.park(server.fileno(), peer)
        yield client, server


def turn(door: NativeDoor, most_ns: int = ENOUGH_NS) -> object:
    """Serve one turn, up to the first connection that is handed over."""
    door.begin(most_ns)
    return door.serve()


def test_a_known_request_is_answered_and_the_connection_stays() -> None:
    repeater = LineRepeater()
    door = NativeDoor(repeater)
    with parked(door) as (client, _):
        client.send(b"?hello\n")
        assert turn(door) is None
        assert client.recv(100) == b"HELLO"
        client.send(b"?again\n")
        assert turn(door) is None
        assert client.recv(100) == b"AGAIN"
    assert repeater.peers == [PEER, PEER]


def test_a_request_that_is_not_known_goes_to_its_task_untouched_and_the_door_takes_no_more() -> None:
    door = NativeDoor(LineRepeater())
    with parked(door) as (client, server):
        client.send(b"!what\n")
        assert turn(door) == (server.fileno(), b"!what\n", b"", None)
        client.send(b"?more\n")
        assert turn(door) is None
        assert server.recv(100) == b"?more\n"
        door.park(server.fileno(), PEER)
        client.send(b"?now\n")
        assert turn(door) is None
        assert client.recv(100) == b"NOW"


@given(lines=st.lists(st.sampled_from([b"?a\n", b"?bc\n", b"!d\n", b"?e", b""]), min_size=1, max_size=8))
def test_pipelined_requests_are_answered_in_order_up_to_the_first_that_is_not_known(lines: list[bytes]) -> None:
    sent = b"".join(lines) or b"!"
    known = b""
    rest = sent
    while rest.startswith(b"?") and b"\n" in rest:
        line, _, rest = rest.partition(b"\n")
        known += line[1:].upper()
    door = NativeDoor(LineRepeater())
    with parked(door) as (client, server):
        client.send(sent)
        handed = turn(door)
        assert handed == ((server.fileno(), rest, b"", None) if rest else None)
        if known:
            assert client.recv(1000) == known


def test_a_client_that_is_too_slow_for_an_answer_gets_the_rest_from_its_task() -> None:
    whole = os.urandom(1 << 20)
    door = NativeDoor(LineRepeater(lambda _: whole))
    with parked(door) as (client, server):
        client.send(b"?all\n?next\n")
        handed = turn(door)
        assert handed is not None
        assert isinstance(handed, tuple)
        descriptor, received, unsent, _ = handed
        assert (descriptor, received) == (server.fileno(), b"?next\n")
        assert 0 < len(unsent) < len(whole)
        got = b""
        while len(got) < len(whole) - len(unsent):
            got += client.recv(1 << 20)
        assert got + unsent == whole


def test_the_end_of_a_connection_is_handed_over() -> None:
    door = NativeDoor(LineRepeater())
    with parked(door) as (client, server):
        client.send(b"?last\n")
        client.shutdown(socket.SHUT_WR)
        assert turn(door) == (server.fileno(), None, b"", None)
        assert client.recv(100) == b"LAST"


def test_a_client_that_resets_its_connection_is_handed_over_as_ended() -> None:
    door = NativeDoor(LineRepeater(lambda _: bytes(1 << 20)))
    with parked(door) as (client, server):
        client.send(b"?x\n?y\n")
        client.close()
        handed = turn(door)
        assert isinstance(handed, tuple)
        assert handed[:2] == (server.fileno(), None)


def test_a_connection_that_left_between_its_event_and_its_turn_is_not_received_from() -> None:
    door = NativeDoor(LineRepeater())
    with parked(door) as (first, one), parked(door) as (second, two):
        first.send(b"!first\n")
        second.send(b"!second\n")
        door.begin(ENOUGH_NS)
        handed = door.serve()  # both events were fetched; one is handed over
        assert handed is not None
        left, line = (two, b"!second\n") if handed[1] == b"!first\n" else (one, b"!first\n")
        door.leave(left.fileno())
        assert door.serve() is None
        assert left.recv(100) == line


def test_a_turn_ends_when_its_time_is_over_and_the_next_goes_on() -> None:
    door = NativeDoor(LineRepeater())
    with parked(door) as (client, _):
        client.send(b"?a\n")
        assert turn(door, 0) is None
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(100)
        assert turn(door) is None
        assert client.recv(100) == b"A"


def test_the_time_since_a_connection_was_heard() -> None:
    door = NativeDoor(LineRepeater())
    with parked(door) as (client, server):
        at_first = door.heard_ns(server.fileno())
        assert abs(time.monotonic_ns() - at_first) < 10 * ENOUGH_NS
        client.send(b"?a\n")
        turn(door)
        assert door.heard_ns(server.fileno()) > at_first
        door.leave(server.fileno())
        assert door.heard_ns(server.fileno()) == 0
    assert door.heard_ns(1 << 20) == 0


def test_a_closed_or_impossible_descriptor_is_refused() -> None:
    door = NativeDoor(LineRepeater())
    with pytest.raises(ValueError):
        door.park(-1, PEER)
    client, server = socket.socketpair()
    number = server.fileno()
    client.close()
    server.close()
    with pytest.raises(OSError):
        door.park(number, PEER)
    door.leave(number)
    door.leave(-1)


def test_a_long_peer_is_cut() -> None:
    repeater = LineRepeater()
    door = NativeDoor(repeater)
    with parked(door, b"x" * 1000) as (client, _):
        client.send(b"?a\n")
        turn(door)
    assert repeater.peers == [b"x" * 92]


async def no_rest(rest: object, go_on: object, sender: ResponseSender) -> None:
    raise AssertionError("no answer has a rest")


# --- in trio ---------------------------------------------------------------------------------------------


def test_a_task_waits_at_the_door_and_gets_what_is_not_known() -> None:
    trio.run(_waits_and_gets)


async def _waits_and_gets() -> None:
    client, server = socket.socketpair()
    turns: list[None] = []
    door = Door(LineRepeater(), lambda: turns.append(None), lambda: turns.append(None), no_rest)
    with client, server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(door.run)
            client.send(b"?one\n")
            with trio.move_on_after(0.2) as waiting:
                await door.next_bytes(server.fileno(), PEER)
            assert waiting.cancelled_caught
            assert client.recv(100) == b"ONE"
            client.send(b"?two\n!three\n")
            assert await door.next_bytes(server.fileno(), PEER) == HandedOver(b"!three\n", b"")
            nursery.cancel_scope.cancel()
    assert turns


def test_leaving_wakes_the_task_that_waits_and_so_does_the_end_of_the_door() -> None:
    trio.run(_leaves)


async def _leaves() -> None:
    first, server = socket.socketpair()
    second, other = socket.socketpair()
    found: list[HandedOver] = []
    door = Door(LineRepeater(), lambda: None, lambda: None, no_rest)

    async def wait(sock: socket.socket) -> None:
        found.append(await door.next_bytes(sock.fileno(), PEER))

    with first, server, second, other:
        async with trio.open_nursery() as waiters, trio.open_nursery() as nursery:
            nursery.start_soon(door.run)
            waiters.start_soon(wait, server)
            waiters.start_soon(wait, other)
            await trio.testing.wait_all_tasks_blocked()
            door.leave(server.fileno())
            await trio.testing.wait_all_tasks_blocked()
            assert found == [HandedOver(None, b"")]
            nursery.cancel_scope.cancel()
    assert found == [HandedOver(None, b"")] * 2
