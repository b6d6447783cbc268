"""Heads of requests: what is read from them, and the shapes that smuggle requests."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings, strategies as st

from gateway.http.head import HeadWatch, HttpRefusal, RequestHead, check_beginning, head_length, parse_head
from lakefs.limits import HTTP_HEAD_BYTES_MAX
from tests.lengths import repeated

TOKEN = "ABCXYZabcxyz0189-_.!#$%&'*+^`|~"


def head_of(*lines: bytes, first: bytes = b"GET /b/k HTTP/1.1", host: bytes = b"lake:9000") -> bytes:
    return b"\r\n".join((first, b"Host: " + host, *lines, b"", b""))


def refusal_of(head: bytes) -> HttpRefusal:
    with pytest.raises(HttpRefusal) as caught:
        parse_head(head)
    return caught.value


def test_a_head_is_taken_apart() -> None:
    head = parse_head(
        head_of(b"X-Amz-Date: 20260101T000000Z", b"RANGE:bytes=0-1", first=b"PUT /b/a%20?c=%2F&d HTTP/1.1")
    )
    assert head == RequestHead(
        "PUT",
        b"/b/a%20?c=%2F&d",
        b"/b/a%20",
        b"c=%2F&d",
        b"lake:9000",
        (1, 1),
        {b"host": b"lake:9000", b"x-amz-date": b"20260101T000000Z", b"range": b"bytes=0-1"},
        keep_alive=True,
    )


@pytest.mark.parametrize(
    ("first", "line", "keep_alive"),
    [
        (b"GET / HTTP/1.1", b"A: b", True),
        (b"GET / HTTP/1.1", b"Connection: close", False),
        (b"GET / HTTP/1.1", b"Connection: TE, Close", False),
        (b"GET / HTTP/1.0", b"A: b", False),
        (b"GET / HTTP/1.0", b"Connection: keep-alive", True),
        (b"PUT / HTTP/1.1", b"Content-Length: 5", True),
        (b"PUT / HTTP/1.1", b"Transfer-Encoding: chunked", True),
    ],
)
def test_keeping_the_connection_is_as_version_and_client_say(first: bytes, line: bytes, keep_alive: bool) -> None:
    assert parse_head(head_of(line, first=first)).keep_alive is keep_alive


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"http://lake:9000/b/k?x=1", b"/b/k", b"x=1"),
        (b"HTTP://LAKE:9000/b//k", b"/b//k", b""),
        (b"http://lake:9000", b"/", b""),
        (b"http://lake:9000?list-type=2", b"/", b"list-type=2"),
        (b"/b/k?a?b", b"/b/k", b"a?b"),
        (b"//b/http://c", b"//b/http://c", b""),
    ],
)
def test_a_target_may_be_a_path_or_a_url(target: bytes, path: bytes, query: bytes) -> None:
    head = parse_head(head_of(first=b"GET %b HTTP/1.1" % target))
    assert (head.target, head.path, head.query, head.authority) == (target, path, query, b"lake:9000")


def test_a_url_may_leave_out_the_port_of_its_scheme() -> None:
    assert parse_head(head_of(first=b"GET http://lake/b HTTP/1.1", host=b"lake:80")).path == b"/b"
    assert parse_head(head_of(first=b"GET https://lake:443/b HTTP/1.1", host=b"lake")).path == b"/b"


@pytest.mark.parametrize(
    "head",
    [
        head_of(b"Content-Length: 1", b"Content-Length: 2"),
        head_of(b"Content-Length: 1", b"Content-Length: 1"),
        head_of(b"Content-Length: 1", b"content-length: 1"),
        head_of(b"Content-Length: 1, 1"),
        head_of(b"Content-Length: +1"),
        head_of(b"Content-Length: 0x1"),
        head_of(b"Content-Length: 99999999999999999999"),
        head_of(b"Content-Length: 4", b"Transfer-Encoding: chunked"),
        head_of(b"Transfer-Encoding: chunked", b"Content-Length: 4"),
        head_of(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
        head_of(b"Transfer-Encoding: chunked", b"Transfer-encoding: identity"),
        head_of(b"Transfer-Encoding: xchunked"),
        head_of(b"Transfer-Encoding: chunked, gzip"),
        head_of(b"Transfer-Encoding : chunked"),
        head_of(b"Transfer-Encoding\t: chunked"),
        head_of(b" Transfer-Encoding: chunked"),
        head_of(b"Transfer-Encoding:\x0bchunked"),
        head_of(b"Transfer-Encoding:\r\n chunked"),
        head_of(b"A: b\r\n c"),
        head_of(b"A: b\r\n\tc"),
        head_of(b"A: b\nTransfer-Encoding: chunked"),
        head_of(b"A: b\rTransfer-Encoding: chunked"),
        head_of(b"A: b\x00"),
        head_of(b"A: \x01b"),
        head_of(b"A: b\x7f"),
        head_of(b"A\x00: b"),
        head_of(b"A b: c"),
        head_of(b"A\xe9: c"),
        head_of(b": c"),
        head_of(b"no colon"),
        head_of(first=b"GET / HTTP/1.1\nA: b"),
        head_of(first=b"GET /\x00 HTTP/1.1"),
        head_of(first=b"GET /\xff HTTP/1.1"),
        head_of(first=b"GET /a b HTTP/1.1"),
        head_of(first=b"GET /a#b HTTP/1.1"),
        head_of(first=b"GET  / HTTP/1.1"),
        head_of(first=b"GET /  HTTP/1.1"),
        head_of(first=b"GET / HTTP/1.1 "),
        head_of(first=b"GET\t/ HTTP/1.1"),
        head_of(first=b" GET / HTTP/1.1"),
        head_of(first=b"get / HTTP/1.1"),
        head_of(first=b"GOT / HTTP/1.1"),
        head_of(first=b"GET b/k HTTP/1.1"),
        head_of(first=b"GET ftp://lake:9000/ HTTP/1.1"),
        head_of(first=b"GET http://other:9000/ HTTP/1.1"),
        head_of(first=b"GET http://lake:9001/ HTTP/1.1"),
        head_of(first=b"GET http://user@lake:9000/ HTTP/1.1"),
        head_of(first=b"GET * HTTP/1.1"),
        head_of(first=b"CONNECT lake:9000 HTTP/1.1"),
        head_of(b"Host: lake:9000"),
        head_of(b"HOST: other"),
        head_of(b"X-Amz-Date: 1", b"X-Amz-Date: 1"),
        head_of(b"X-Amz-Meta-A: 1", b"x-amz-meta-a: 2"),
        head_of(b"Authorization: a", b"Authorization: b"),
        head_of(b"Range: bytes=0-1", b"Range: bytes=4-5"),
        head_of(b"A:", b"a: b"),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\r\n\r\n",
        b"\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)
def test_what_two_readers_could_read_differently_is_refused(head: bytes) -> None:
    assert refusal_of(head).status == 400


@pytest.mark.parametrize(
    "head",
    [
        b"GET /\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\n",
        head_of(first=b"GET / RTSP/1.0"),
        head_of(first=b"SOURCE / ICE/1.0"),
        head_of(first=b"GET / HTTP/2.0"),
        head_of(first=b"GET / HTTP/0.9"),
    ],
)
def test_another_protocol_is_refused_by_name(head: bytes) -> None:
    refusal = refusal_of(head)
    assert (refusal.status, refusal.code) == (505, "HttpVersionNotSupported")


def test_the_preface_of_http_2_is_told_what_to_speak() -> None:
    assert "use HTTP/1.1" in refusal_of(b"PRI * HTTP/2.0\r\n\r\n").message


def test_an_offer_to_upgrade_is_declined_by_going_on() -> None:
    head = parse_head(head_of(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk"))
    assert head.headers[b"upgrade"] == b"h2c"


def test_repeated_lists_are_joined_and_padded_and_empty_values_are_cleaned() -> None:
    head = parse_head(
        head_of(b"If-Match: a \t", b"Empty:", b"if-match:\t  b", b"Blank:   ", b"X-Amz-Meta-Inner: a  b ")
    )
    assert head.headers == {
        b"host": b"lake:9000",
        b"if-match": b"a,b",
        b"empty": b"",
        b"blank": b"",
        b"x-amz-meta-inner": b"a  b",
    }


def test_http_1_0_may_come_without_a_host() -> None:
    assert parse_head(b"GET / HTTP/1.0\r\n\r\n").authority == b""


def test_headers_are_limited_by_their_bytes_alone() -> None:
    lines = [b"A%d: b" % number for number in range(3000)]
    head = head_of(*lines)
    assert head_length(head) == len(head) <= HTTP_HEAD_BYTES_MAX
    assert len(parse_head(head).headers) == 3001
    assert parse_head(head_of(*[b"If-Match: b"] * 1000)).headers[b"if-match"] == b",".join([b"b"] * 1000)


def test_the_end_of_a_head_is_found_in_pieces() -> None:
    whole = head_of() + b"GET / HTTP/1.1\r\n\r\n"
    length = len(head_of())
    for seen in range(length):
        assert head_length(whole[:seen]) == 0
        for earlier in (0, max(0, seen - 1), seen):
            assert head_length(bytearray(whole), earlier) == length


def test_a_head_without_an_end_is_refused_at_the_limit() -> None:
    assert head_length(b"a" * (HTTP_HEAD_BYTES_MAX - 4) + b"\r\n\r\n") == HTTP_HEAD_BYTES_MAX
    with pytest.raises(HttpRefusal):
        head_length(b"a" * HTTP_HEAD_BYTES_MAX)
    with pytest.raises(HttpRefusal):
        head_length(b"a" * (HTTP_HEAD_BYTES_MAX - 3) + b"\r\n\r\n")


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"\x16", "TLS"),
        (b"\x00", "0x00"),
        (b"\x80", "0x80"),
        (b"{", "0x7b"),
        (b"g", "0x67"),
        (b"\n", "0x0a"),
        (b" ", "0x20"),
        (b"\rG", "0x0d"),
        (b"SS", "method"),
        (b"GET /\x00", "url"),
        (b"GET / F", "HTTP/"),
        (b"GET / HTTP/1.1\n", "CRLF"),
        (b"GET / HTTP/1.1\r\nA: b\x01", "header value"),
        (b"GET / HTTP/1.1\r\nA ", "header"),
        (b"PUT / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2", "Content-Length"),
    ],
)
def test_bytes_that_no_head_has_are_refused_at_the_first_of_them(sent: bytes, said: str) -> None:
    watch = HeadWatch()
    for at in range(len(sent) - 1):
        watch.feed(sent[at : at + 1])
    with pytest.raises(HttpRefusal) as caught:
        watch.feed(sent[-1:])
    assert (caught.value.status, caught.value.code) == (400, "BadRequest")
    assert said in caught.value.message
    with pytest.raises(HttpRefusal, match=said):
        HeadWatch().feed(sent)
    assert refusal_of(sent + b"\r\n\r\n").status == 400


def test_a_beginning_that_may_become_a_request_is_waited_for() -> None:
    for sent in (b"", b"\r", b"\r\n", b"G", head_of()[:-1]):
        check_beginning(sent)
        HeadWatch().feed(sent)


names = st.text(TOKEN, min_size=1, max_size=12).map(str.encode)
values = st.binary(max_size=24).map(lambda raw: re.sub(rb"[\x00-\x08\x0a-\x1f\x7f]", b"", raw).strip(b" \t"))
reserved = {b"host", b"content-length", b"transfer-encoding", b"connection", b"upgrade"}


@given(st.dictionaries(names.filter(lambda name: name.lower() not in reserved), values, max_size=8))
@settings(max_examples=300)
def test_every_header_arrives_as_it_was_sent(headers: dict[bytes, bytes]) -> None:
    lowered = {name.lower(): value for name, value in headers.items()}
    lines = [name.swapcase() + b": " + value for name, value in lowered.items()]
    assert parse_head(head_of(*lines)).headers == {b"host": b"lake:9000", **lowered}


pieces = st.one_of(
    st.sampled_from([b"GET", b" ", b"/", b"HTTP/1.1", b"HTTP/1.0", b"\r\n", b"\n", b"\r", b"Host:", b"a", b":", b"\t"]),
    st.sampled_from([b"Content-Length:", b"Transfer-Encoding:", b"chunked", b"7", b",", b"?", b"%", b"\x00", b"\xff"]),
    st.sampled_from([b"http://a", b"Connection:", b"#"]),
)


@pytest.mark.slow
@given(st.lists(pieces, max_size=24).map(b"".join), st.booleans())
@settings(max_examples=repeated(400, 2000))
@example(b"GET / HTTP/1.1\r\nHost:a\r\nHost:", True)
def test_any_bytes_are_a_head_that_can_be_written_again_or_a_refusal(tail: bytes, plausible: bool) -> None:
    raw = (b"GET / HTTP/1.1\r\nHost: a\r\n" if plausible else b"") + tail + b"\r\n\r\n"
    raw = raw[: head_length(raw)]
    try:
        head = parse_head(raw)
    except HttpRefusal:
        return
    # A reader that goes line by line reads the same.
    first, *lines = raw[:-4].split(b"\r\n")
    method, target, _ = first.split(b" ")
    assert (method.decode(), target) == (head.method, head.target)
    assert {line.split(b":")[0].lower() for line in lines} == set(head.headers)
    assert head.path[:1] == b"/"
    assert not (b"content-length" in head.headers and b"transfer-encoding" in head.headers)
    assert b"\n" not in first + b"".join(lines)
