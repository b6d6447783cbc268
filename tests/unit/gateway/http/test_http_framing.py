"""Bodies of requests: their length, and chunks cut anywhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from gateway.http.framing import ChunkedDecoder, LineReader, body_framing
from gateway.http.head import HttpRefusal, RequestHead
from lakefs.limits import HTTP_CHUNK_LINE_BYTES_MAX, HTTP_TRAILER_BYTES_MAX, HTTP_TRAILERS_MAX
from tests.lengths import repeated


def head_with(headers: dict[bytes, bytes], version: tuple[int, int] = (1, 1)) -> RequestHead:
    return RequestHead("PUT", b"/", b"/", b"", b"a", version, {b"host": b"a", **headers}, keep_alive=True)


def decode(*pieces: bytes) -> tuple[bytes, dict[bytes, bytes], bytes]:
    """Return payload, trailers and what is left of the last piece."""
    decoder = ChunkedDecoder()
    payload = b""
    taken = 0
    for piece in pieces:
        views, taken = decoder.feed(memoryview(piece))
        payload += b"".join(views)
    assert decoder.done
    return payload, decoder.trailers, pieces[-1][taken:]


@pytest.mark.parametrize(
    ("headers", "length"),
    [
        ({}, 0),
        ({b"content-length": b"0"}, 0),
        ({b"content-length": b"0017"}, 17),
        ({b"transfer-encoding": b"Chunked"}, None),
    ],
)
def test_a_body_has_one_framing(headers: dict[bytes, bytes], length: int | None) -> None:
    assert body_framing(head_with(headers)) == length


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({b"content-length": b"1", b"transfer-encoding": b"chunked"}, 400),
        ({b"content-length": b""}, 400),
        ({b"content-length": b"-1"}, 400),
        ({b"content-length": b"+1"}, 400),
        ({b"content-length": b"1 1"}, 400),
        ({b"content-length": b"1, 1"}, 400),
        ({b"content-length": b"0x10"}, 400),
        ({b"content-length": b"1_0"}, 400),
        ({b"content-length": "\u0661".encode()}, 400),
        ({b"content-length": b"9" * 19}, 400),
        ({b"transfer-encoding": b"gzip, chunked"}, 501),
        ({b"transfer-encoding": b"identity"}, 501),
        ({b"transfer-encoding": b""}, 501),
    ],
)
def test_a_doubtful_framing_is_refused(headers: dict[bytes, bytes], status: int) -> None:
    with pytest.raises(HttpRefusal) as caught:
        body_framing(head_with(headers))
    assert caught.value.status == status


def test_http_1_0_has_no_chunks() -> None:
    with pytest.raises(HttpRefusal):
        body_framing(head_with({b"transfer-encoding": b"chunked"}, (1, 0)))


def test_chunks_become_a_body_and_what_follows_is_left() -> None:
    body = b"4\r\nlake\r\n00A ; x=y\r\n0123456789\r\n0\r\nA: b\r\nc:\td \r\n\r\nGET /"
    assert decode(body) == (b"lake0123456789", {b"a": b"b", b"c": b"d"}, b"GET /")


def test_payload_is_handed_out_as_views_of_the_buffer() -> None:
    body = memoryview(b"8\r\npayload!\r\n0\r\n\r\n")
    views, _ = ChunkedDecoder().feed(body)
    assert [view.obj is body.obj for view in views] == [True]


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=5),
    st.lists(st.integers(min_value=0, max_value=400), max_size=8),
    st.sampled_from([b"", b";a=b", b' ; q="1"']),
    st.sampled_from([b"", b"x-amz-checksum-crc32: AAAAAA==\r\n"]),
)
@settings(max_examples=300)
def test_a_body_cut_anywhere_is_the_same_body(
    chunks: list[bytes], cuts: list[int], extension: bytes, trailer: bytes
) -> None:
    body = b"".join(b"%X%b\r\n%b\r\n" % (len(chunk), extension, chunk) for chunk in chunks)
    body += b"0\r\n" + trailer + b"\r\n"
    bounds = [0, *sorted({min(cut, len(body)) for cut in cuts}), len(body)]
    pieces = [body[first:last] for first, last in pairwise(bounds)]
    payload, trailers, left = decode(*pieces)
    assert (payload, len(trailers)) == (b"".join(chunks), bool(trailer))
    assert left == b""


def test_a_body_byte_by_byte_is_the_same_body() -> None:
    body = b"3\r\nabc\r\n0\r\nA: b\r\n\r\n"
    assert decode(*(body[at : at + 1] for at in range(len(body)))) == (b"abc", {b"a": b"b"}, b"")


@pytest.mark.parametrize(
    "body",
    [
        b"\r\n",
        b"4\nlake\r\n",
        b"4\r\nlakes\r\n",
        b"4\r\nlak\r\n0\r\n\r\n",
        b"4 5\r\n",
        b"-1\r\n",
        b"+1\r\n",
        b"0x4\r\n",
        b"4_0\r\n",
        b" 4\r\n",
        b"4 \r\n",
        b"g\r\n",
        b"4;a\rb\r\n",
        b"4;a\nb\r\n",
        b"4;a\x00\r\n",
        b"fffffffffffffffff\r\n",
        b"0\r\nno colon\r\n\r\n",
        b"0\r\nA : b\r\n\r\n",
        b"0\r\n A: b\r\n\r\n",
        b"0\r\nA: b\nC: d\r\n\r\n",
        b"0\r\nA: b\r\na: c\r\n\r\n",
        b"0\r\nContent-Length: 4\r\n\r\n",
        b"0\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_broken_chunks_are_refused(body: bytes) -> None:
    with pytest.raises(HttpRefusal):
        ChunkedDecoder().feed(memoryview(body))


def test_extensions_and_trailers_are_bounded() -> None:
    for body in (
        b"1;" + b"a" * HTTP_CHUNK_LINE_BYTES_MAX,
        b"0\r\n" + b"".join(b"A%d: b\r\n" % number for number in range(HTTP_TRAILERS_MAX + 1)),
        b"0\r\n" + b"".join(b"A%d: %b\r\n" % (n, b"b" * 1000) for n in range(HTTP_TRAILER_BYTES_MAX // 1000 + 1)),
    ):
        decoder = ChunkedDecoder()
        with pytest.raises(HttpRefusal):
            for at in range(0, len(body), 100):
                decoder.feed(memoryview(body)[at : at + 100])


def test_a_line_may_be_as_long_as_its_limit_wherever_it_is_cut() -> None:
    line = b"x" * 10 + b"\r\n"
    for cut in range(len(line)):
        reader = LineReader(10)
        assert reader.take(memoryview(line[:cut]), 0) == (None, cut)
        assert reader.take(memoryview(line[cut:] + b"rest"), 0) == (b"x" * 10, len(line) - cut)
    for cut in range(11):
        reader = LineReader(10)
        reader.take(memoryview(b"x" * cut), 0)
        with pytest.raises(HttpRefusal):
            reader.take(memoryview(b"x" * (12 - cut)), 0)


@pytest.mark.slow
@given(st.lists(st.sampled_from([b"0", b"1", b"a", b"\r\n", b"\r", b"\n", b";", b":", b"x"]), max_size=30))
@settings(max_examples=repeated(300, 1000))
def test_any_bytes_are_chunks_or_refused_alike_whole_and_in_pieces(tokens: list[bytes]) -> None:
    def outcome(*pieces: bytes) -> tuple[bytes, bool] | None:
        decoder = ChunkedDecoder()
        payload = b""
        try:
            for piece in pieces:
                views, _ = decoder.feed(memoryview(piece))
                payload += b"".join(views)
        except HttpRefusal:
            return None
        return payload, decoder.done

    body = b"".join(tokens)
    assert outcome(body) == outcome(*(body[at : at + 1] for at in range(len(body))))
