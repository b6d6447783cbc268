"""PUTs that the native door proves and holds: which, with what, and how they are answered."""

from __future__ import annotations

import hashlib
import time
from base64 import b64encode
from collections.abc import Iterator

import msgspec
import pytest

from gateway.s3.door._repeater import OPERATIONS
from tests.unit.gateway.s3.door.taught import HOST, KEY_ID, NAMES, NEW, Taught

BODY = b"the body of a PUT" * 100
LINES = b'ETag: "abc"\r\n'
NAME = b'"bucket":"bucket","key":"a/new key"'
PUTS = OPERATIONS.index("PutObject")


def md5(body: bytes) -> bytes:
    return hashlib.md5(body, usedforsecurity=False).digest()


@pytest.fixture
def taught() -> Iterator[Taught]:
    made = Taught()
    yield made
    made.close()


def test_a_whole_and_proven_put_is_held_with_all_that_python_needs(taught: Taught) -> None:
    request = taught.put(BODY, more={"Content-Type": "text/x", "User-Agent": "tests"})
    put = taught.held(request)
    assert put is not None
    assert bytes(memoryview(put)) == BODY
    assert len(put) == len(BODY)
    assert (put.host, put.target, put.headers) == (HOST, NEW, {b"content-type": b"text/x"})
    assert put.signer == b'"%b"' % KEY_ID.encode()
    assert put.md5 == md5(BODY)
    assert put.request == request
    assert taught.passed() == {}


def test_it_is_answered_counted_and_logged(taught: Taught) -> None:
    taught.repeater.log(1, 1 << 16)
    put = taught.held(taught.put(BODY, more={"User-Agent": 'a "client"'}))
    assert put is not None
    assert taught.door.answer(put.descriptor, put.number, put.answer(LINES, NAME)) is None
    answer = taught.client.recv(10_000)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\nServer: lake\r\nDate: ")
    assert answer.endswith(b'\r\nETag: "abc"\r\nContent-Length: 0\r\n\r\n')
    assert taught.repeater.answered[PUTS] == (1, 0)
    assert taught.repeater.received_bytes == len(BODY)
    assert taught.repeater.sent_bytes == 0
    times, took_ns = taught.repeater.times(PUTS)
    assert sum(times) == 1
    assert took_ns > 0
    line = msgspec.json.decode(taught.repeater.take_log()[0])
    assert line["request_id"].encode() in answer
    said = {"method", "operation", "bucket", "key", "status", "bytes_in", "bytes_out", "access_key", "user_agent"}
    assert {name: line[name] for name in said} == {
        "method": "PUT",
        "operation": "PutObject",
        "bucket": "bucket",
        "key": "a/new key",
        "status": 200,
        "bytes_in": len(BODY),
        "bytes_out": 0,
        "access_key": KEY_ID,
        "user_agent": 'a "client"',
    }


@pytest.mark.parametrize("size", [1, 4096, 20_000, 65_535, 65_536])
def test_bodies_of_up_to_64_kib_are_gathered_in_however_many_parts_they_come(taught: Taught, size: int) -> None:
    body = bytes(range(256)) * 256
    put = taught.held(taught.put(body[:size]))
    assert put is not None
    assert bytes(memoryview(put)) == body[:size]


def test_an_empty_content_type_is_not_none(taught: Taught) -> None:
    for more, found in (({}, None), ({"Content-Type": ""}, b"")):
        put = taught.held(taught.put(BODY, more=more))
        assert put is not None
        assert put.headers.get(b"content-type") == found
        taught.door.leave(put.descriptor)


def test_content_md5_may_be_sent_if_it_is_right(taught: Taught) -> None:
    assert taught.held(taught.put(BODY, more={"Content-MD5": b64encode(md5(BODY)).decode()})) is not None


def test_a_checksum_that_was_signed_is_given_to_python(taught: Taught) -> None:
    names = (*NAMES, b"x-amz-checksum-crc32", b"x-amz-sdk-checksum-algorithm")
    sums = {"x-amz-checksum-crc32": "AAAAAA==", "x-amz-sdk-checksum-algorithm": "CRC32"}
    taught.learn_signer(names=names)
    put = taught.held(taught.put(BODY, more=sums, names=names))
    assert put is not None
    assert put.headers == {name.encode(): value.encode() for name, value in sums.items()}


def test_a_client_that_waits_for_it_is_asked_for_the_body(taught: Taught) -> None:
    request = taught.put(BODY, more={"Expect": "100-Continue"})
    head = request[: -len(BODY)]
    taught.door.park(taught.server.fileno(), b'"peer"')
    taught.client.sendall(head)
    taught.door.begin(1_000_000_000)
    assert taught.door.serve() is None
    assert taught.client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    taught.client.sendall(BODY)
    taught.door.begin(1_000_000_000)
    assert taught.door.serve() is None
    (put,) = taught.repeater.take_puts(2)
    assert put.request == request
    taught.door.leave(taught.server.fileno())
    assert taught.held(request) is not None, "a client that did not wait is not asked"
    taught.client.setblocking(False)
    with pytest.raises(BlockingIOError):
        taught.client.recv(100)


def test_a_stranger_who_waits_is_not_asked_for_the_body(taught: Taught) -> None:
    taught.repeater.forget_claims()
    head = taught.put(BODY, more={"Expect": "100-continue"})[: -len(BODY)]
    assert taught.held(head) is None
    taught.client.setblocking(False)
    with pytest.raises(BlockingIOError):
        taught.client.recv(100)


def test_the_body_may_be_left_open_by_the_signature(taught: Taught) -> None:
    assert taught.held(taught.put(BODY, content="UNSIGNED-PAYLOAD")) is not None


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"Content-MD5": b64encode(md5(b"another")).decode()}, "field"),
        ({"Content-MD5": "x"}, "field"),
        ({"Content-MD5": b64encode(md5(BODY)).decode() + "=="}, "field"),
        ({"Range": "bytes=0-0"}, "field"),
        ({"x-amz-checksum-mode": "ENABLED"}, "field"),
        ({"x-amz-meta-a": "b"}, "field"),
        ({"x-amz-copy-source": "/bucket/other"}, "field"),
        ({"If-None-Match": "*"}, "field"),
        ({"Expect": "something"}, "field"),
        ({"x-amz-checksum-crc32": "not signed"}, "signature"),
        ({"Transfer-Encoding": "chunked"}, "field"),
        ({"Content-Encoding": "gzip"}, "field"),
        ({"Connection": "close"}, "field"),
        ({"content-type": "a", "Content-Type": "b"}, "field"),
        ({"x-amz-user-agent": "not signed"}, "signature"),
    ],
)
def test_what_asks_for_more_or_is_wrong_is_passed_on(taught: Taught, more: dict[str, str], reason: str) -> None:
    assert taught.held(taught.put(BODY, more=more)) is None
    assert taught.passed() == {reason: 1}


@pytest.mark.parametrize("length", ["", "+1700", "1700 0", "0x6a4", "1,700", "-1", "0", "65537", "99999", "100000"])
def test_lengths_that_are_odd_none_or_too_long_are_passed_on(taught: Taught, length: str) -> None:
    assert taught.held(taught.put(BODY, length=length)) is None
    assert taught.passed() == {"field": 1}


def test_a_put_without_a_length_is_passed_on(taught: Taught) -> None:
    request = taught.request("PUT", target=NEW, content=hashlib.sha256(b"").hexdigest())
    assert taught.held(request) is None
    assert taught.passed() == {"field": 1}


@pytest.mark.parametrize(
    "target", [b"/bucket/key?x-id=PutObject", b"/bucket/key?", b"/bucket/key?uploadId=1&partNumber=1"]
)
def test_a_query_is_passed_on(taught: Taught, target: bytes) -> None:
    assert taught.held(taught.put(BODY, target=target)) is None
    assert taught.passed() == {"signature": 1}


def test_another_body_than_the_signature_says_is_passed_on(taught: Taught) -> None:
    for said in (hashlib.sha256(b"another").hexdigest(), hashlib.sha256(BODY).hexdigest().upper(), "STREAMING-x", ""):
        assert taught.held(taught.put(BODY, content=said)) is None
    assert taught.passed() == {"signature": 4}


def test_a_wrong_signature_a_wrong_time_and_an_unknown_signer_are_passed_on(taught: Taught) -> None:
    good = taught.put(BODY)
    at = good.index(b"Signature=") + 20
    assert taught.held(good[:at] + (b"0" if good[at : at + 1] != b"0" else b"1") + good[at + 1 :]) is None
    late = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(time.time() - 1000))
    assert taught.held(taught.put(BODY, date=late)) is None
    assert taught.held(good.replace(NEW, NEW + b"2")) is None
    taught.repeater.forget_claims()
    assert taught.held(good) is None
    assert taught.passed() == {"signature": 4}


def test_a_stranger_is_not_waited_for(taught: Taught) -> None:
    """Only who is known may have the door keep half a request."""
    taught.repeater.forget_claims()
    taught.door.park(taught.server.fileno(), b'"peer"')
    half = taught.put(BODY)[:-100]
    taught.client.sendall(half)
    taught.door.begin(1_000_000_000)
    assert taught.door.serve() == (taught.server.fileno(), half, b"", None)


def test_nothing_is_gathered_when_the_keys_are_old(taught: Taught) -> None:
    taught.repeater.hold_until(time.monotonic() - 1)
    assert taught.held(taught.put(BODY)) is None
    assert taught.passed() == {"keys": 1}


def test_a_pipelined_put_with_more_behind_it_is_passed_on(taught: Taught) -> None:
    assert taught.held(taught.put(BODY) + b"GET / HTTP/1.1\r\n\r\n") is None


def test_a_get_with_a_body_is_passed_on(taught: Taught) -> None:
    request = taught.request(more={"Content-Length": "1"}, body=b"x")
    assert taught.ask(request) is None
    assert taught.passed() == {"field": 1}


def test_puts_are_taken_in_the_order_in_which_they_came_and_some_may_stay(taught: Taught) -> None:
    for number in range(5):
        taught.door.park(taught.server.fileno(), b'"peer"')
        taught.client.sendall(taught.put(b"%d" % number))
        taught.door.begin(1_000_000_000)
        assert taught.door.serve() is None
        taught.door.leave(taught.server.fileno())
    assert taught.repeater.gathered == 5
    first, rest = taught.repeater.take_puts(2), taught.repeater.take_puts(10)
    assert [bytes(memoryview(put)) for put in first + rest] == [b"0", b"1", b"2", b"3", b"4"]
    assert taught.repeater.gathered == 0
    assert taught.repeater.take_puts(1) == []


def test_a_put_outlives_the_claims_that_proved_it(taught: Taught) -> None:
    put = taught.held(taught.put(BODY))
    assert put is not None
    taught.repeater.forget()
    assert put.signer == b'"%b"' % KEY_ID.encode()
    assert b"Content-Length: 0" in put.answer(b"", b"")


def test_lines_that_are_too_long_are_no_answer(taught: Taught) -> None:
    put = taught.held(taught.put(BODY))
    assert put is not None
    with pytest.raises(ValueError, match="too long"):
        put.answer(b"x" * (1 << 20), b"")
