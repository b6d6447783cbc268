"""The native door has dormant connections with their descriptors: it answers them, hands them over, or closes them."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gateway.http._door import Door as NativeDoor
from tests.unit.gateway.http.line_repeater import LineRepeater
from tests.unit.gateway.http.test_door import ENOUGH_NS, PEER, turn

WAIT_S = 10.0


@contextmanager
def dormant(door: NativeDoor) -> Iterator[tuple[socket.socket, int]]:
    """Yield a client's socket, and the descriptor of the server's, which is the door's."""
    client, server = socket.socketpair()
    client.settimeout(WAIT_S)
    descriptor = server.detach()
    with client:
        door.park(descriptor, PEER)
        assert door.let_go(descriptor)
        yield client, descriptor


def test_a_dormant_connection_is_answered_and_stays_dormant() -> None:
    door = NativeDoor(LineRepeater())
    with dormant(door) as (client, descriptor):
        for line in (b"one", b"two"):
            client.send(b"?%b\n" % line)
            assert turn(door) is None
            assert client.recv(100) == line.upper()
        assert door.is_dormant(descriptor)
        assert (door.dormant_count, door.dormant()) == (1, [descriptor])
        assert door.quietest() == descriptor


def test_a_dormant_connection_that_is_handed_over_is_the_callers_and_open() -> None:
    door = NativeDoor(LineRepeater())
    with dormant(door) as (client, descriptor):
        client.send(b"!what\n")
        assert turn(door) == (descriptor, b"!what\n", b"", None)
        assert (door.dormant_count, door.is_dormant(descriptor), door.end(descriptor)) == (0, False, False)
        assert door.peer(descriptor) == PEER
        os.write(descriptor, b"answer")
        os.close(descriptor)
        assert client.recv(100) == b"answer"
        assert client.recv(100) == b""


def test_the_end_of_a_dormant_connection_is_handed_over() -> None:
    door = NativeDoor(LineRepeater())
    with dormant(door) as (client, descriptor):
        client.shutdown(socket.SHUT_WR)
        assert turn(door) == (descriptor, None, b"", None)
        os.close(descriptor)


@pytest.mark.parametrize("sent", [b"5:ab", b"1:a"], ids=["half a request", "a request that is held"])
def test_a_busy_connection_keeps_its_task(sent: bytes) -> None:
    door = NativeDoor(LineRepeater())
    client, server = socket.socketpair()
    with client, server:
        door.park(server.fileno(), PEER)
        client.send(sent)
        assert turn(door) is None
        assert not door.let_go(server.fileno())
        door.leave(server.fileno())


def test_what_cannot_be_let_go_is_left_as_it_is() -> None:
    door = NativeDoor(LineRepeater())
    client, server = socket.socketpair()
    with client, server:
        assert not door.let_go(server.fileno()), "it is not parked"
        assert not door.let_go(-1)
        door.park(server.fileno(), b"x" * 92)
        assert not door.let_go(server.fileno()), "its peer may have been cut"
        door.leave(server.fileno())
        door.park(server.fileno(), PEER)
        door.finish(server.fileno())
        assert not door.let_go(server.fileno()), "it ends soon"
        assert not door.end(server.fileno()), "it is its task's"
        client.send(b"?a\n")
        assert turn(door) is None
        assert client.recv(100) == b"A"
        assert door.dormant_count == 0


def test_a_dormant_connection_cannot_be_let_go_again_and_is_closed_once() -> None:
    door = NativeDoor(LineRepeater())
    with dormant(door) as (client, descriptor):
        assert not door.let_go(descriptor)
        assert door.dormant_count == 1
        assert door.end(descriptor)
        assert client.recv(100) == b""
        other = os.dup(client.fileno())  # takes the number
        assert other == descriptor
        assert not door.end(descriptor)
        os.fstat(other)
        os.close(other)


def test_a_door_that_goes_closes_what_is_dormant() -> None:
    door = NativeDoor(LineRepeater())
    pairs = [socket.socketpair() for _ in range(3)]
    for client, server in pairs:
        client.settimeout(WAIT_S)
        door.park(server.fileno(), PEER)
    (quiet, _), (busy, _), (kept, attended) = pairs
    for _, server in pairs[:2]:
        assert door.let_go(server.detach())
    busy.send(b"5:ab")
    assert turn(door) is None
    del door
    gc.collect()
    assert quiet.recv(100) == b""
    assert busy.recv(100) == b""
    attended.send(b"open")
    assert kept.recv(100) == b"open"
    for client, server in pairs:
        client.close()
        server.close()


def test_the_time_of_a_turn_is_kept_with_dormant_connections() -> None:
    door = NativeDoor(LineRepeater())
    with dormant(door) as (client, _):
        client.send(b"?a\n")
        assert turn(door, 0) is None
        assert turn(door, ENOUGH_NS) is None
        assert client.recv(100) == b"A"
