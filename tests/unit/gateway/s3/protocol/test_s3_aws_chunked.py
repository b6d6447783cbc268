"""aws-chunked bodies: the reference's own examples, any cut, any changed byte."""

from __future__ import annotations

import hmac
import io
from hashlib import sha256
from itertools import pairwise
from typing import Final

import pytest
from botocore.httpchecksum import AwsChunkedWrapper, Crc32Checksum
from hypothesis import assume, given, settings, strategies as st

from gateway.s3.protocol.aws_chunked import AwsChunkedDecoder, is_framed
from gateway.s3.protocol.errors import S3Error
from gateway.s3.protocol.signing import AccessKey, Payload, Signature, SigningKey
from lakefs.limits import HTTP_CHUNK_LINE_BYTES_MAX, HTTP_TRAILER_BYTES_MAX
from tests.lengths import repeated

EXAMPLE_KEY: Final = AccessKey("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
SCOPE: Final = "20130524/us-east-1/s3/aws4_request"
TIMESTAMP: Final = "20130524T000000Z"
EXAMPLE_BODY: Final = b"a" * 66560


def raw_signing_key() -> bytes:
    key = b"AWS4" + EXAMPLE_KEY.secret_key.encode()
    for part in SCOPE.split("/"):
        key = hmac.new(key, part.encode(), sha256).digest()
    return key


def signature(payload: Payload, seed: str = "0" * 64) -> Signature:
    return Signature(EXAMPLE_KEY, payload, "", seed, SigningKey(raw_signing_key()), SCOPE, TIMESTAMP)


def request_headers(length: int, *trailers: str) -> dict[bytes, bytes]:
    headers = {b"x-amz-decoded-content-length": str(length).encode()}
    return headers | ({b"x-amz-trailer": ",".join(trailers).encode()} if trailers else {})


def decode(
    kind: Payload, headers: dict[bytes, bytes], *pieces: bytes, seed: str = "0" * 64
) -> tuple[bytes, dict[bytes, bytes]]:
    decoder = AwsChunkedDecoder(signature(kind, seed), headers)
    payload = b"".join(bytes(view) for piece in pieces for view in decoder.feed(memoryview(piece)))
    return payload, decoder.finish()


def encode(kind: Payload, chunks: list[bytes], trailers: dict[str, str], seed: str = "0" * 64) -> bytes:
    """Encode as a sender does, written from the reference alone."""
    key, previous, body = raw_signing_key(), seed, b""
    empty = sha256(b"").hexdigest()

    def link(label: str, hashes: str) -> str:
        text = "\n".join((f"AWS4-HMAC-SHA256-{label}", TIMESTAMP, SCOPE, previous, hashes))
        return hmac.new(key, text.encode(), sha256).hexdigest()

    for chunk in [*chunks, b""]:
        extension = ""
        if kind is not Payload.STREAMING_UNSIGNED_TRAILER:
            previous = link("PAYLOAD", f"{empty}\n{sha256(chunk).hexdigest()}")
            extension = f";chunk-signature={previous}"
        body += f"{len(chunk):x}{extension}\r\n".encode() + (chunk + b"\r\n" if chunk else b"")
    body += "".join(f"{name}:{value}\r\n" for name, value in trailers.items()).encode()
    if kind is Payload.STREAMING_SIGNED_TRAILER:
        lines = "".join(f"{name}:{value}\n" for name, value in sorted(trailers.items()))
        body += f"x-amz-trailer-signature:{link('TRAILER', sha256(lines.encode()).hexdigest())}\r\n".encode()
    return body + b"\r\n"


def refusal(kind: Payload, headers: dict[bytes, bytes], *pieces: bytes) -> tuple[int, str]:
    with pytest.raises(S3Error) as caught:
        decode(kind, headers, *pieces)
    return caught.value.status, caught.value.code


def test_the_example_of_the_reference_is_accepted() -> None:
    body = b"".join(
        (
            b"10000;chunk-signature=ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648\r\n",
            EXAMPLE_BODY[:65536] + b"\r\n",
            b"400;chunk-signature=0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497\r\n",
            EXAMPLE_BODY[65536:] + b"\r\n",
            b"0;chunk-signature=b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9\r\n\r\n",
        )
    )
    seed = "4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9"
    assert decode(Payload.STREAMING_SIGNED, request_headers(66560), body, seed=seed) == (EXAMPLE_BODY, {})


@pytest.mark.parametrize("end", [b"\r\n", b"\n\r\n"])
def test_the_example_with_a_trailer_is_accepted(end: bytes) -> None:
    body = b"".join(
        (
            b"10000;chunk-signature=b474d8862b1487a5145d686f57f013e54db672cee1c953b3010fb58501ef5aa2\r\n",
            EXAMPLE_BODY[:65536] + b"\r\n",
            b"400;chunk-signature=1c1344b170168f8e65b41376b44b20fe354e373826ccbbe2c1d40a8cae51e5c7\r\n",
            EXAMPLE_BODY[65536:] + b"\r\n",
            b"0;chunk-signature=2ca2aba2005185cf7159c6277faf83795951dd77a3a99e6e65d5c9f85863f992\r\n",
            b"x-amz-checksum-crc32c:sOO8/Q==" + end,
            b"x-amz-trailer-signature:d81f82fc3505edab99d459891051a732e8730629a2e4a59689829ca17fe2e435\r\n\r\n",
        )
    )
    seed = "106e2a8a18243abcf37539882f36619c00e2dfc72633413f02d3b74544bfeb8e"
    headers = request_headers(66560, "x-amz-checksum-crc32c")
    payload, trailers = decode(Payload.STREAMING_SIGNED_TRAILER, headers, body, seed=seed)
    assert (payload, trailers) == (EXAMPLE_BODY, {b"x-amz-checksum-crc32c": b"sOO8/Q=="})


@pytest.mark.parametrize("length", [0, 1, 1000, 5000])
def test_what_botocore_writes_unsigned_is_accepted(length: int) -> None:
    content = bytes(range(250)) * (length // 250) + b"x" * (length % 250)
    checksum = Crc32Checksum()
    wrapper = AwsChunkedWrapper(
        io.BytesIO(content), checksum_cls=lambda: checksum, checksum_name="x-amz-checksum-crc32", chunk_size=1024
    )
    body = wrapper.read()
    headers = request_headers(length, "X-Amz-Checksum-Crc32")
    payload, trailers = decode(Payload.STREAMING_UNSIGNED_TRAILER, headers, body)
    assert payload == content
    assert trailers == {b"x-amz-checksum-crc32": checksum.b64digest().encode()}


kinds = st.sampled_from([kind for kind in Payload if "STREAMING" in kind.value])
chunk_lists = st.lists(st.binary(min_size=1, max_size=60), max_size=4)


def trailers_of(kind: Payload) -> dict[str, str]:
    return {} if kind is Payload.STREAMING_SIGNED else {"x-amz-checksum-crc32": "AAAAAA==", "x-amz-meta-b": "c d"}


@given(kinds, chunk_lists, st.lists(st.integers(0, 900), max_size=8))
@settings(max_examples=200)
def test_a_body_cut_anywhere_is_the_same_body(kind: Payload, chunks: list[bytes], cuts: list[int]) -> None:
    trailers = trailers_of(kind)
    body = encode(kind, chunks, trailers)
    bounds = [0, *sorted({min(cut, len(body)) for cut in cuts}), len(body)]
    pieces = [body[first:last] for first, last in pairwise(bounds)]
    payload, found = decode(kind, request_headers(len(b"".join(chunks)), *trailers), *pieces)
    assert payload == b"".join(chunks)
    assert {name.decode(): value.decode() for name, value in found.items()} == trailers


@given(st.sampled_from([Payload.STREAMING_SIGNED, Payload.STREAMING_SIGNED_TRAILER]), chunk_lists, st.data())
@settings(max_examples=400)
def test_one_byte_of_a_signed_body_changed_is_refused(kind: Payload, chunks: list[bytes], data: st.DataObject) -> None:
    trailers = trailers_of(kind)
    body = encode(kind, chunks, trailers)
    at, to = data.draw(st.integers(0, len(body) - 1)), data.draw(st.integers(0, 255))
    other = body[:at] + bytes([to]) + body[at + 1 :]
    assume(other.lower() != body.lower())  # hexadecimal sizes and names of trailers have no case
    headers = request_headers(len(b"".join(chunks)), *trailers)
    with pytest.raises(S3Error):
        decode(kind, headers, other)


@given(kinds, chunk_lists, st.data())
@settings(max_examples=150)
def test_a_body_that_ends_early_or_goes_on_is_refused(kind: Payload, chunks: list[bytes], data: st.DataObject) -> None:
    trailers = trailers_of(kind)
    body = encode(kind, chunks, trailers)
    headers = request_headers(len(b"".join(chunks)), *trailers)
    assert refusal(kind, headers, body[: data.draw(st.integers(0, len(body) - 1))])[0] == 400
    assert refusal(kind, headers, body + b"\r\n") == (400, "InvalidRequest")


@pytest.mark.parametrize("length", [9, 11])
def test_the_decoded_length_must_hold(length: int) -> None:
    for kind in (Payload.STREAMING_SIGNED, Payload.STREAMING_UNSIGNED_TRAILER):
        body = encode(kind, [b"01234", b"56789"], {})
        assert refusal(kind, request_headers(length), body) == (400, "IncompleteBody")


def test_chunks_may_not_be_swapped() -> None:
    body = encode(Payload.STREAMING_SIGNED, [b"first!", b"second"], {})
    lines = body.split(b"\r\n")
    swapped = b"\r\n".join([*lines[2:4], *lines[:2], *lines[4:]])
    assert refusal(Payload.STREAMING_SIGNED, request_headers(12), swapped) == (403, "SignatureDoesNotMatch")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, (411, "MissingContentLength")),
        ({b"x-amz-decoded-content-length": b"-1"}, (400, "InvalidArgument")),
        (request_headers(0, "x-amz-checksum-crc32"), (400, "InvalidRequest")),
    ],
)
def test_the_request_must_announce_what_comes(headers: dict[bytes, bytes], expected: tuple[int, str]) -> None:
    assert refusal(Payload.STREAMING_SIGNED, headers, b"") == expected


@pytest.mark.parametrize(
    "tail",
    [
        b"0\r\n\r\n",
        b"0\r\nx-amz-checksum-sha1:AA\r\n\r\n",
        b"0\r\nx-amz-checksum-crc32:A\r\nx-amz-checksum-crc32:A\r\n\r\n",
        b"0\r\nx-amz-checksum-crc32 :A\r\n\r\n",
        b"0\r\nx-amz-checksum-crc32\r\n\r\n",
        b"0\r\nx-amz-checksum-crc32:A\nB:c\r\n\r\n",
        b"0\r\nx-amz-trailer-signature:A\r\n\r\n",
    ],
)
def test_trailers_are_those_that_were_announced(tail: bytes) -> None:
    headers = request_headers(0, "x-amz-checksum-crc32")
    assert refusal(Payload.STREAMING_UNSIGNED_TRAILER, headers, tail) == (400, "MalformedTrailerError")


@pytest.mark.parametrize(
    "line", [b"5;chunk-signature=" + b"0" * 64, b"5;a=b", b"0x5", b"-5", b"", b" 5", b"5 ", b"G", b"1" * 16]
)
def test_an_unsigned_chunk_begins_with_its_size_alone(line: bytes) -> None:
    body = line + b"\r\n01234\r\n0\r\n\r\n"
    assert refusal(Payload.STREAMING_UNSIGNED_TRAILER, request_headers(5), body)[0] == 400


def test_lines_are_bounded() -> None:
    headers = request_headers(5, "a")
    for body in (b"5" * (HTTP_CHUNK_LINE_BYTES_MAX + 2), b"0\r\na:" + b"b" * HTTP_TRAILER_BYTES_MAX):
        decoder = AwsChunkedDecoder(signature(Payload.STREAMING_UNSIGNED_TRAILER), headers)
        with pytest.raises(S3Error):
            for at in range(0, len(body), 64):
                decoder.feed(memoryview(body)[at : at + 64])


@pytest.mark.parametrize("kind", [Payload.HASH, Payload.UNSIGNED])
def test_chunks_under_a_hash_or_none_are_decoded_as_unsigned_ones(kind: Payload) -> None:
    body = b"5\r\n01234\r\n0\r\nx-amz-checksum-crc32:AA\r\n\r\n"
    payload, trailers = decode(kind, request_headers(5, "x-amz-checksum-crc32"), body)
    assert (payload, trailers) == (b"01234", {b"x-amz-checksum-crc32": b"AA"})
    assert refusal(kind, request_headers(5), b"01234") == (400, "IncompleteBody")
    assert refusal(kind, {}, body) == (411, "MissingContentLength")


@pytest.mark.parametrize(
    ("kind", "headers", "length", "framed"),
    [
        (Payload.UNSIGNED, {}, 5, False),
        (Payload.UNSIGNED, {b"content-encoding": b"aws-chunked"}, 5, True),
        (Payload.HASH, {b"content-encoding": b"gzip,aws-chunked"}, 5, True),
        (Payload.HASH, {b"content-encoding": b"AWS-CHUNKED , gzip"}, None, True),
        (Payload.HASH, {b"content-encoding": b"my-aws-chunked"}, 5, False),
        (Payload.HASH, {b"content-encoding": b"aws-chunked"}, 0, False),
        (Payload.HASH, {b"content-encoding": b"aws-chunked", **request_headers(5)}, 0, True),
        (Payload.HASH, {b"content-encoding": b"aws-chunked", **request_headers(5)}, 5, True),
        (Payload.UNSIGNED, request_headers(5), 5, False),
        (Payload.UNSIGNED, request_headers(5), 15, True),
        (Payload.UNSIGNED, request_headers(5), None, True),
        (Payload.STREAMING_SIGNED, {}, 0, True),
    ],
)
def test_any_header_may_say_that_a_body_is_in_chunks(
    kind: Payload, headers: dict[bytes, bytes], length: int | None, framed: bool
) -> None:
    assert is_framed(kind, headers, length) is framed


def test_payload_is_not_copied() -> None:
    body = memoryview(encode(Payload.STREAMING_SIGNED, [b"x" * 100_000], {}))
    decoder = AwsChunkedDecoder(signature(Payload.STREAMING_SIGNED), request_headers(100_000))
    (view,) = decoder.feed(body)
    assert view.obj is body.obj
    assert decoder.finish() == {}


@pytest.mark.slow
@given(
    kinds,
    st.lists(st.sampled_from([b"5", b"0", b"\r\n", b"\n", b";chunk-signature=", b"0" * 64, b"a:", b"x"]), max_size=20),
)
@settings(max_examples=repeated(200, 600))
def test_any_bytes_are_refused_in_s3s_words_alike_whole_and_in_pieces(kind: Payload, tokens: list[bytes]) -> None:
    def outcome(*pieces: bytes) -> object:
        try:
            return decode(kind, request_headers(5), *pieces)
        except S3Error as error:
            return error.code

    body = b"".join(tokens)
    assert outcome(body) == outcome(*(body[at : at + 1] for at in range(len(body))))
