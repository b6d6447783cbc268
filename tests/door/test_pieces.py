"""Requests that arrive in pieces, many at once, cut off, or with garbage behind: answered as if they had arrived whole.

A head in two pieces is the case that a native reader and Python hand to each other.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from tests.door.asks import Ask, Flaw, Way
from tests.door.line import Line, without_own
from tests.door.pieces import Batch, answers_in_pieces, batches, pieces_of, run_batch
from tests.door.stored import KIB, OPEN, THINGS
from tests.door.world import World, difference, figure, world
from tests.e2e.test_gateway import until

pytestmark = pytest.mark.slow
BATCHES = 60
PLANTED = (sys.executable, "-m", "tests.door.planted_lake")
_CLIENT = (
    ("user-agent", "lake-test"),
    ("accept", "*/*"),
    ("amz-sdk-invocation-id", "2f4b9f3a-0000-4000-8000-000000000000"),
    ("amz-sdk-request", "attempt=1"),
)
CUT = {
    "a get": Ask(f"/{THINGS}/size-{4 * KIB}"),
    "a get of a client with many headers": Ask(
        f"/{THINGS}/size-{4 * KIB}", headers=_CLIENT, signed=("amz-sdk-request",)
    ),
    "a get of a granule": Ask(f"/{THINGS}/size-{64 * KIB}"),
    "a head": Ask(f"/{THINGS}/size-{64 * KIB + 1}", "HEAD"),
    "a range": Ask(f"/{THINGS}/size-{64 * KIB}", headers=(("range", "bytes=10-99"),)),
    "a presigned get": Ask(f"/{THINGS}/size-1", way=Way.QUERY),
    "a stranger's get": Ask(f"/{OPEN}/size-{4 * KIB}", way=Way.NONE),
    "a wrong signature": Ask(f"/{THINGS}/size-1", flaw=Flaw.BIT),
    "a key that is missing": Ask(f"/{THINGS}/missing"),
    "HTTP/1.0": Ask(f"/{THINGS}/size-1", version="HTTP/1.0", headers=(("connection", "keep-alive"),)),
    "a get with a body": Ask(f"/{THINGS}/size-1", headers=(("content-length", "9"),), body=b"GET / HTT"),
    "a list": Ask(f"/{THINGS}", query=(("list-type", "2"),)),
}


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as made:
        yield made


def cut_anywhere(made: World, name: str, *, step: int = 1) -> None:
    """Cut a request in two at each byte, or at each `step`-th."""
    raw = made.raw(CUT[name])
    expected = made.send(raw).masked()
    with ExitStack() as stack:
        line = stack.enter_context(Line(made.door_address))
        for at in range(1, len(raw), step):
            line.send_and_wait_until_read(raw[:at])
            line.send(raw[at:])
            reply = line.reply(is_head=raw.startswith(b"HEAD"))
            assert reply.masked() == expected, f"cut at {at}: " + difference(raw, 0, expected, reply.masked())
            if reply.is_last:
                line = stack.enter_context(Line(made.door_address))


@pytest.mark.parametrize("name", CUT)
def test_a_request_that_is_cut_has_the_answer_of_the_whole(made: World, name: str) -> None:
    cut_anywhere(made, name, step=5)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CUT)
def test_a_request_that_is_cut_anywhere_has_the_answer_of_the_whole(made: World, name: str) -> None:
    cut_anywhere(made, name)


@pytest.mark.parametrize("name", CUT)
def test_a_request_that_arrives_byte_by_byte_has_the_answer_of_the_whole(made: World, name: str) -> None:
    raw = made.raw(CUT[name])
    expected = made.send(raw).masked()
    with Line(made.door_address) as line:
        for at in range(len(raw)):
            line.send_and_wait_until_read(raw[at : at + 1])
        reply = line.reply(is_head=raw.startswith(b"HEAD"))
        assert reply.masked() == expected, difference(raw, 0, expected, reply.masked())


def many_at_once(made: World, *, shrink: bool = True) -> None:
    """Send batches of requests."""

    @settings(
        max_examples=BATCHES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
    )
    @given(batches())
    def one(batch: Batch) -> None:
        expected = run_batch(made, made.plain_address, batch)
        given_ones = run_batch(made, made.door_address, batch)
        for number, (expect, found) in enumerate(zip(expected, given_ones, strict=True)):
            assert found == expect, difference(b"", number, expect, found) + f"\nof {batch}"

    one()


def test_many_requests_at_once_are_answered_in_order(made: World) -> None:
    many_at_once(made)


def test_two_hundred_requests_at_once_are_answered_in_order(made: World) -> None:
    """More answers than a socket holds: the client begins to read when it has sent everything."""
    asks = [CUT[("a get", "a head", "a range", "a get of a granule")[number % 4]] for number in range(200)]
    raws = [made.raw(ask) for ask in asks]
    expected = [made.send(raw).masked() for raw in raws[:4]]
    with Line(made.door_address) as line:
        line.send(b"".join(raws))
        for number, raw in enumerate(raws):
            found = line.reply(is_head=raw.startswith(b"HEAD")).masked()
            assert found == expected[number % 4], difference(raw, number, expected[number % 4], found)
        line.end_sending()
        assert line.rest() == b""


GARBAGE = {
    "zeros": bytes(100),
    "a TLS handshake": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "text": b"hello, is anybody there?\r\n\r\n",
    "an empty line": b"\r\n",
    "ten empty lines": b"\r\n" * 10,
    "half a head": b"GET /open/size-4096 HTTP/1.1\r\nHost: x\r\nRan",
    "half a first line": b"GET /op",
    "one letter": b"G",
    "a head without a host": b"GET / HTTP/1.1\r\n\r\n",
    "a head that is too long": b"GET / HTTP/1.1\r\nHost: x\r\nx: " + b"y" * (40 << 10),
}


def garbage_behind(made: World, name: str, *, together: bool) -> None:
    """Send garbage behind a request, in the same piece or in one of its own."""
    raw = made.raw(CUT["a get"])
    pieces = [raw, raw + GARBAGE[name]] if together else [raw, raw, GARBAGE[name]]
    found = [answers_in_pieces(address, pieces) for address in (made.plain_address, made.door_address)]
    assert found[1] == found[0], difference(b"".join(pieces), 0, found[0], found[1])


@pytest.mark.parametrize("name", GARBAGE)
@pytest.mark.parametrize("together", [True, False], ids=["together", "apart"])
def test_garbage_behind_a_request_is_answered_as_without_the_door(made: World, name: str, together: bool) -> None:
    garbage_behind(made, name, together=together)


@pytest.mark.parametrize("way", ["end", "close", "reset"])
def test_half_a_head_and_an_end_leave_nothing(made: World, way: str) -> None:
    """A connection that ends anywhere in a head is answered with nothing, and forgotten."""
    raw = made.raw(CUT["a get of a client with many headers"])
    chance = random.Random(way)
    for at in chance.sample(range(1, len(raw)), 40):
        with Line(made.door_address) as line:
            if at % 2:
                assert line.ask(raw).status == 200  # the door knows the connection
            line.send_and_wait_until_read(raw[:at])
            if way == "end":
                line.end_sending()
                assert line.rest() == b""
            elif way == "reset":
                line.reset()
    until(lambda: figure(made.with_door, "lake_s3_connections") == 0)
    assert made.exchange(made.door_address, [raw]) == made.exchange(made.plain_address, [raw])


@settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(sorted(CUT)), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_requests_in_pieces_of_any_size_have_the_answers_of_whole_ones(
    made: World, names: Sequence[str], chance: random.Random
) -> None:
    raw = b"".join(made.raw(CUT[name]) for name in names)
    expected = answers_in_pieces(made.plain_address, [raw])
    found = answers_in_pieces(made.door_address, pieces_of(raw, chance))
    assert found == expected, difference(raw, 0, expected, found)


def test_a_client_that_ends_behind_its_last_request_gets_all_answers(made: World) -> None:
    raws = [made.raw(CUT[name]) for name in ("a get", "a get", "a head", "a get of a granule")]
    expected = answers_in_pieces(made.plain_address, raws)
    assert expected.count(b"HTTP/1.1 200") == len(raws)
    for count in range(5):
        warm = [raws[0]] * count
        with Line(made.door_address) as line:
            for one in warm:
                line.ask(one)
            line.send(b"".join(raws))
            line.end_sending()
            assert without_own(line.rest()) == expected, f"behind {count} answers"


@pytest.mark.parametrize(
    ("bug", "check"),
    [
        ("lost-byte", lambda made: cut_anywhere(made, "a get")),
        ("doubled-request", lambda made: many_at_once(made, shrink=False)),
        ("late-garbage", lambda made: garbage_behind(made, "zeros", together=False)),
    ],
)
def test_a_gateway_with_a_planted_bug_is_noticed(made: World, bug: str, check: Callable[[World], None]) -> None:
    with made.beside((*PLANTED, bug)) as planted, pytest.raises((AssertionError, OSError)):
        check(planted)
