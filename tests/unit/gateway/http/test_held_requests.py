"""Requests that the door holds, and those that it waits for: answered later, given back, or nobody's any more."""

from __future__ import annotations

import os
import socket
import time

import pytest
import trio
from hypothesis import given, strategies as st

from gateway.http._door import Door as NativeDoor
from gateway.http.door import Door, Failed, HandedOver
from lakefs.errors import EngineUnreachable
from tests.unit.gateway.http.line_repeater import LineRepeater
from tests.unit.gateway.http.test_door import PEER, no_rest, parked, turn


def test_a_held_request_is_answered_later_and_its_connection_stays() -> None:
    repeater = LineRepeater()
    door = NativeDoor(repeater)
    with parked(door) as (client, server):
        client.send(b"3:abc")
        assert turn(door) is None
        (held,) = repeater.held
        assert held.line == b"3:abc"
        assert door.is_busy(server.fileno())
        assert door.quietest() == -1
        assert door.late(0, 0) == []
        assert door.answer(held.descriptor, held.number, b"done") is None
        assert client.recv(100) == b"done"
        assert not door.is_busy(server.fileno())
        assert repeater.peers == [PEER]
        client.send(b"?next\n")
        assert turn(door) is None
        assert client.recv(100) == b"NEXT"


def test_nothing_is_received_while_a_request_is_held() -> None:
    repeater = LineRepeater()
    door = NativeDoor(repeater)
    with parked(door) as (client, _):
        client.send(b"1:a")
        turn(door)
        client.send(b"?next\n")
        began = time.process_time()
        for _ in range(3):
            assert turn(door, 20_000_000) is None
        assert time.process_time() - began < 0.05, "no event is met again and again"
        assert door.answer(*repeater.held[0][:2], b"A") is None
        assert turn(door) is None
        assert client.recv(100) == b"ANEXT"


def test_a_held_request_is_given_back_byte_for_byte() -> None:
    repeater = LineRepeater()
    door = NativeDoor(repeater)
    with parked(door) as (client, server):
        client.send(b"1:a")
        turn(door)
        held = repeater.held[0]
        assert door.give_back(held.descriptor, held.number, held.line) == (server.fileno(), b"1:a", b"", None)
        assert door.give_back(held.descriptor, held.number, held.line) is None
        assert door.answer(held.descriptor, held.number, b"A") is None
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(100)


def test_an_answer_is_never_given_to_another_connection_or_to_another_request() -> None:
    repeater = LineRepeater()
    door = NativeDoor(repeater)
    with parked(door) as (client, server):
        client.send(b"1:a")
        turn(door)
        first = repeater.held[0]
        door.leave(server.fileno())
        door.park(server.fileno(), PEER)  # the same descriptor, of another connection
        assert door.answer(first.descriptor, first.number, b"A") is None
        client.send(b"1:b")
        turn(door)
        second = repeater.held[1]
        assert (second.descriptor, second.line) == (first.descriptor, b"1:b")
        assert door.answer(first.descriptor, first.number, b"A") is None
        assert door.give_back(first.descriptor, first.number, first.line) is None
        assert door.answer(second.descriptor, second.number, b"B") is None
        assert client.recv(100) == b"B"
    assert door.answer(-1, 1, b"A") is None
    assert door.answer(1 << 20, 1, b"A") is None
    assert door.answer(server.fileno(), 0, b"A") is None


def test_a_client_that_is_too_slow_for_the_answer_gets_the_rest_from_its_task() -> None:
    whole = os.urandom(1 << 22)
    repeater = LineRepeater()
    door = NativeDoor(repeater)
    with parked(door) as (client, server):
        client.send(b"1:a")
        turn(door)
        handed = door.answer(*repeater.held[0][:2], whole)
        assert handed is not None
        descriptor, received, unsent, rest = handed
        assert (descriptor, received, rest) == (server.fileno(), b"", None)
        got = b""
        while len(got) < len(whole) - len(unsent):
            got += client.recv(1 << 20)
        assert got + unsent == whole


def test_the_client_of_a_held_request_may_go() -> None:
    repeater = LineRepeater()
    door = NativeDoor(repeater)
    with parked(door) as (client, server):
        client.send(b"1:a")
        turn(door)
        client.close()
        assert turn(door, 10_000_000) is None
        assert door.answer(*repeater.held[0][:2], b"A") == (server.fileno(), None, b"", None)


def test_the_last_answer_hands_the_connection_over() -> None:
    repeater = LineRepeater()
    door = NativeDoor(repeater)
    with parked(door) as (client, server):
        client.send(b"1:a")
        turn(door)
        door.finish(server.fileno())
        assert door.answer(*repeater.held[0][:2], b"A") == (server.fileno(), b"", b"", None)
        assert client.recv(100) == b"A"


@given(cuts=st.lists(st.integers(1, 10), max_size=4), before=st.sampled_from([b"", b"?x\n"]))
def test_a_request_that_comes_in_parts_is_held_when_it_is_whole(cuts: list[int], before: bytes) -> None:
    repeater = LineRepeater()
    door = NativeDoor(repeater)
    sent = before + b"9:012345678"
    ends = sorted({len(before) + 2 + cut for cut in cuts if len(before) + 2 + cut < len(sent)} | {len(sent)})
    with parked(door) as (client, server):
        begin = 0
        for end in ends:
            assert repeater.held == []
            client.send(sent[begin:end])
            assert turn(door) is None
            begin = end
        (held,) = repeater.held
        assert held.line == b"9:012345678"
        assert door.timed == 0
        assert door.is_busy(server.fileno())


def test_half_a_request_is_handed_over_when_it_takes_long_and_when_its_client_ends() -> None:
    door = NativeDoor(LineRepeater())
    with parked(door) as (client, server):
        client.send(b"9:01")
        turn(door)
        client.send(b"23")
        turn(door)
        assert door.timed == 1
        assert door.is_busy(server.fileno())
        assert door.take_long(time.monotonic_ns() - 10**9) is None
        assert door.take_long(time.monotonic_ns()) == (server.fileno(), b"9:0123", b"", None)
        assert door.timed == 0
        door.park(server.fileno(), PEER)
        client.send(b"9:0")
        turn(door)
        client.shutdown(socket.SHUT_WR)
        assert turn(door) == (server.fileno(), b"9:0", b"", None)
        assert door.timed == 0


def test_half_a_request_that_is_left_is_forgotten() -> None:
    door = NativeDoor(LineRepeater())
    with parked(door) as (client, server):
        client.send(b"9:01")
        turn(door)
        door.leave(server.fileno())
        assert door.timed == 0
        door.park(server.fileno(), PEER)
        client.send(b"?a\n")
        assert turn(door) is None
        assert client.recv(100) == b"A"


def test_the_task_of_a_request_that_failed_is_told_so() -> None:
    trio.run(_told_so)


async def _told_so() -> None:
    client, server = socket.socketpair()
    repeater = LineRepeater()
    came = trio.Event()

    def after_turn() -> None:
        if repeater.held:
            came.set()

    door = Door(repeater, lambda: None, after_turn, no_rest)
    failure = EngineUnreachable("gone")
    with client, server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(door.run)
            found: list[HandedOver] = []

            async def wait() -> None:
                found.append(await door.next_bytes(server.fileno(), PEER))

            async with trio.open_nursery() as waiters:
                waiters.start_soon(wait)
                began_ns = time.monotonic_ns()
                client.send(b"1:a")
                await came.wait()
                assert not door.is_quiet(server.fileno())
                held = repeater.held[0]
                now_ns = time.monotonic_ns()
                door.give_back(held, held.line, failure)
            (handed,) = found
            assert handed.failed is not None
            assert began_ns <= handed.failed.began_ns <= now_ns
            assert handed == HandedOver(b"1:a", b"", None, Failed(failure, handed.failed.began_ns))
            nursery.cancel_scope.cancel()


def test_half_a_request_goes_to_its_task_in_time_though_nothing_more_comes() -> None:
    trio.run(_goes_in_time)


async def _goes_in_time() -> None:
    client, server = socket.socketpair()
    door = Door(LineRepeater(), lambda: None, lambda: None, no_rest)
    with client, server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(door.run)
            client.send(b"5:ab")
            with trio.fail_after(5):
                assert await door.next_bytes(server.fileno(), PEER) == HandedOver(b"5:ab", b"")
            nursery.cancel_scope.cancel()
