"""Answers that the door sends in pieces: their bytes, their bounds, and the ways in which they end."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from gateway.s3.door._repeater import Rest
from tests.unit.gateway.s3.door.taught import Taught

LONG = 150_000


@pytest.fixture
def long() -> Iterator[Taught]:
    made = Taught(os.urandom(LONG))
    yield made
    made.close()


def read_on(taught: Taught, count: int) -> bytes:
    """Read from the client's end, letting the door go on in between."""
    got = b""
    while len(got) < count:
        taught.door.begin(1_000_000_000)
        assert taught.door.serve() is None
        got += taught.client.recv(4096)
    return got


def test_long_content_is_sent_in_pieces(long: Taught) -> None:
    whole = long.answer(long.request())
    assert whole.endswith(long.content)
    assert long.repeater.answered == [(1, 0), (0, 0), (0, 0)]
    assert long.repeater.sent_bytes == LONG


@settings(max_examples=60, deadline=None)
@given(first=st.integers(0, LONG - 1), length=st.integers(1, LONG))
def test_a_range_of_long_content(first: int, length: int) -> None:
    long = Taught(bytes(range(256)) * (LONG // 256 + 1))
    last = min(first + length, len(long.content)) - 1
    answer = long.answer(long.request(more={"Range": f"bytes={first}-{last}"}))
    assert answer.partition(b"\r\n\r\n")[2] == long.content[first : last + 1]
    long.close()


def test_a_flipped_bit_of_long_content_is_never_sent(long: Taught) -> None:
    long.slab[64 * 1024 + 70_000] ^= 1
    assert long.ask(long.request()) is None
    assert long.passed() == {"content": 1}
    ok = long.answer(long.request(more={"Range": "bytes=0-65535"}))
    assert ok.endswith(long.content[:65536]), "the other granules are right"


def test_long_content_behind_another_request_is_passed_on(long: Taught) -> None:
    both = long.request("HEAD") + long.request()
    long.door.park(long.server.fileno(), b'"peer"')
    long.client.sendall(long.request() + both)
    long.door.begin(1_000_000_000)
    handed = long.door.serve()
    assert handed is not None
    assert handed[1] == long.request() + both


def test_an_answer_that_takes_long_is_shown_once_and_goes_on_from_there(long: Taught) -> None:
    long.narrow()
    long.begin(long.request())
    head = read_on(long, 5000)
    assert long.door.timed == 1
    assert long.door.take_long(0) is None
    handed = long.door.take_long(time.monotonic_ns())
    assert handed is not None
    descriptor, received, unsent, rest = handed
    assert (descriptor, received, unsent, long.door.timed) == (long.server.fileno(), b"", b"", 0)
    assert isinstance(rest, Rest)
    assert rest.span[1] == LONG
    assert long.chunk in rest.layout
    assert rest.name == b'"bucket":"bucket","key":"a key"'
    long.door.park(long.server.fileno(), b'"peer"', rest)
    assert long.door.is_busy(long.server.fileno())
    assert long.door.take_long(time.monotonic_ns()) is None
    got = head
    handed = None
    while handed is None:
        long.door.begin(1_000_000_000)
        handed = long.door.serve()
        got += long.client.recv(1 << 20)
    assert handed == (long.server.fileno(), b"", b"", None)
    while not got.endswith(long.content):
        got += long.client.recv(1 << 20)
    assert (long.repeater.answered, long.repeater.cut_short) == ([(1, 0), (0, 0), (0, 0)], 0)


def test_content_that_moves_away_in_the_midst_is_left_to_python(long: Taught) -> None:
    long.narrow()
    long.begin(long.request())
    read_on(long, 5000)
    long.set_generation(10)
    handed = None
    while handed is None:
        long.client.recv(4096)
        long.door.begin(1_000_000_000)
        handed = long.door.serve()
    rest = handed[3]
    assert isinstance(rest, Rest)
    at, stop = rest.span
    rest.end(stop - at)
    assert (long.repeater.sent_bytes, long.repeater.cut_short) == (LONG, 0)


def test_an_answer_that_is_broken_off_counts_what_was_sent(long: Taught) -> None:
    long.repeater.log(1, 10_000)
    long.narrow()
    long.begin(long.request())
    read_on(long, 5000)
    long.door.leave(long.server.fileno())
    assert long.repeater.cut_short == 1
    assert 0 < long.repeater.sent_bytes < LONG
    (line,) = long.repeater.take_log()[0].splitlines()
    assert msgspec.json.decode(line)["cut_short"] is True


def test_a_rest_that_is_freed_was_cut_short(long: Taught) -> None:
    long.narrow()
    long.begin(long.request())
    read_on(long, 5000)
    assert long.door.take_long(time.monotonic_ns()) is not None
    assert long.repeater.cut_short == 1


def test_a_rest_that_was_given_back_is_of_no_use_any_more(long: Taught) -> None:
    long.narrow()
    long.begin(long.request())
    read_on(long, 5000)
    handed = long.door.take_long(time.monotonic_ns())
    assert handed is not None
    rest = handed[3]
    assert isinstance(rest, Rest)
    long.door.park(long.server.fileno(), b'"peer"', rest)
    for use in (lambda: rest.span, lambda: rest.layout, lambda: rest.name, rest.release, lambda: rest.end(1)):
        with pytest.raises(ValueError):
            use()


def test_a_rest_in_a_circle_of_references_is_freed(long: Taught) -> None:
    long.narrow()
    long.begin(long.request())
    read_on(long, 5000)
    handed = long.door.take_long(time.monotonic_ns())
    assert handed is not None
    circle: list[object] = [handed[3], long.repeater]
    circle.append(circle)
    del circle, handed
    gc.collect()
    assert long.repeater.cut_short == 1
