"""aws-chunked bodies: the chunks that S3 clients put inside a body, their signatures, and trailing checksums.  Sans-IO.

A body is in chunks if x-amz-content-sha256 says STREAMING-, and also if another header says so (`is_framed`): framing
is never content.  Chunks of the other kinds have no signatures: a hash is that of the bytes as received.

    chunk    = hex-size [";chunk-signature=" 64hex] CRLF payload CRLF
    last     = "0" [";chunk-signature=" 64hex] CRLF
    trailers = *(name ":" value CRLF) ["x-amz-trailer-signature:" 64hex CRLF]
    body     = *chunk last trailers CRLF

Rules kept here:
- STREAMING-AWS4-HMAC-SHA256-PAYLOAD has no trailers; the other kinds have just those that x-amz-trailer names.
- Every chunk's signature is checked when its last byte was fed, chained from the request's; the trailers' likewise.  So
  payload is returned before it is proven: the caller keeps it to itself until `finish` has returned.
- x-amz-decoded-content-length is the number of payload bytes, neither more nor less.
- Payload is returned as views of the fed bytes.  At most one line is kept between calls.

`feed` hashes signed payload in the calling thread: a caller with large pieces calls it in a thread.
Source: "Signature calculations for the Authorization header: transferring payload in multiple chunks" of the S3 API
reference, and the chapter behind it, "including trailing headers".
"""

from __future__ import annotations

import enum
import hmac
import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Final

from gateway.http.framing import LineReader, split_trailer
from gateway.http.head import HttpRefusal
from gateway.s3.protocol.errors import S3Error
from gateway.s3.protocol.signing import Payload, Signature
from lakefs.limits import HTTP_CHUNK_LINE_BYTES_MAX, HTTP_TRAILER_BYTES_MAX, HTTP_TRAILERS_MAX

_SIGNED_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,15});chunk-signature=([0-9a-f]{64})")
_UNSIGNED_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})")
_LENGTH: Final = re.compile(rb"[0-9]{1,18}")
_EMPTY_SHA256: Final = sha256(b"").hexdigest()
_TRAILER_SIGNATURE: Final = b"x-amz-trailer-signature"
_SIGNED: Final = (Payload.STREAMING_SIGNED, Payload.STREAMING_SIGNED_TRAILER)
_STREAMING: Final = (*_SIGNED, Payload.STREAMING_UNSIGNED_TRAILER)
_DECODED_LENGTH: Final = b"x-amz-decoded-content-length"
_CODING: Final = re.compile(rb"(?:^|,)[ \t]*aws-chunked[ \t]*(?=,|$)", re.IGNORECASE)


def is_framed(payload: Payload, headers: Mapping[bytes, bytes], length_bytes: int | None) -> bool:
    """Return True if a body is in chunks: x-amz-content-sha256, Content-Encoding or the decoded length says so.

    `length_bytes`: of the body as received, None if unknown.  An empty body with the coding alone is an empty payload;
    a decoded length that is the length of the body, without the coding, is that of a plain body.
    """
    if payload in _STREAMING:
        return True
    stated = headers.get(_DECODED_LENGTH)
    if _CODING.search(headers.get(b"content-encoding", b"")):
        return length_bytes != 0 or stated not in (None, b"0")
    return stated is not None and stated != b"%d" % (-1 if length_bytes is None else length_bytes)


def without_coding(content_encoding: bytes) -> bytes:
    """Return a Content-Encoding less `aws-chunked`, otherwise as it is."""
    kept = _CODING.sub(b"", content_encoding)
    return content_encoding if kept == content_encoding else kept.lstrip(b", \t")


class _State(enum.Enum):
    SIZE = enum.auto()
    PAYLOAD = enum.auto()
    PAYLOAD_END = enum.auto()
    TRAILERS = enum.auto()
    DONE = enum.auto()


class AwsChunkedDecoder:
    """Decodes one body.  `feed` the received bytes, in order, then `finish`."""

    def __init__(self, signature: Signature, headers: Mapping[bytes, bytes]) -> None:
        """`headers` are the request's: x-amz-decoded-content-length and x-amz-trailer.  S3Error."""
        self.decoded_bytes = _decoded_length(headers)
        """Number of payload bytes that the client has promised."""
        self._signature = signature
        self._signed = signature.payload in _SIGNED
        self._previous = signature.seed
        self._promised = _promised_trailers(signature.payload, headers)
        self._trailers: dict[bytes, bytes] = {}
        self._trailer_bytes = 0
        self._state = _State.SIZE
        self._lines = LineReader(HTTP_CHUNK_LINE_BYTES_MAX)
        self._chunk_signature = ""
        self._chunk_sha256 = sha256()
        self._chunk_left_bytes = 0
        self._undeclared_bytes = self.decoded_bytes

    def feed(self, data: memoryview) -> list[memoryview]:
        """Return the payload in `data`, as views of it.  S3Error; the body is then worthless."""
        payload: list[memoryview] = []
        at = 0
        while at < len(data):
            if self._state is _State.PAYLOAD:
                piece = data[at : at + self._chunk_left_bytes]
                at += len(piece)
                payload.append(piece)
                self._take_payload(piece)
            elif self._state is _State.DONE:
                raise _malformed("bytes follow the end of the aws-chunked body")
            else:
                at = self._take_line(data, at)
        return payload

    def finish(self) -> dict[bytes, bytes]:
        """Return the trailers, once all was fed and proven.  S3Error if the body is not complete."""
        if self._state is not _State.DONE:
            raise S3Error(400, "IncompleteBody", "the aws-chunked body ended before its last chunk")
        return self._trailers

    def _take_payload(self, piece: memoryview) -> None:
        if self._signed:
            self._chunk_sha256.update(piece)
        self._chunk_left_bytes -= len(piece)
        if not self._chunk_left_bytes:
            self._check_chunk(self._chunk_sha256.hexdigest())
            self._state = _State.PAYLOAD_END

    def _take_line(self, data: memoryview, at: int) -> int:
        try:
            line, at = self._lines.take(data, at)
        except HttpRefusal as refusal:
            raise _malformed(refusal.message) from None
        if line is None:
            return at
        if self._state is _State.SIZE:
            self._begin_chunk(line)
        elif self._state is _State.PAYLOAD_END:
            if line:
                raise _malformed("a chunk is longer than its size says")
            self._state = _State.SIZE
        elif line:
            self._take_trailer(line)
        else:
            self._end()
        return at

    def _begin_chunk(self, line: bytes) -> None:
        match = (_SIGNED_LINE if self._signed else _UNSIGNED_LINE).fullmatch(line)
        if match is None:
            form = "SIZE;chunk-signature=SIGNATURE" if self._signed else "SIZE"
            raise _malformed(f"a chunk of this body begins with a line of {form}")
        size = int(match[1], 16)
        if size > self._undeclared_bytes:
            raise _wrong_length("longer", self.decoded_bytes)
        self._undeclared_bytes -= size
        self._chunk_left_bytes = size
        if self._signed:
            self._chunk_signature = match[2].decode()
            self._chunk_sha256 = sha256()
        if size:
            self._state = _State.PAYLOAD
            return
        if self._undeclared_bytes:
            raise _wrong_length("shorter", self.decoded_bytes)
        self._check_chunk(_EMPTY_SHA256)
        self._state = _State.TRAILERS

    def _check_chunk(self, payload_sha256: str) -> None:
        if self._signed:
            self._check("AWS4-HMAC-SHA256-PAYLOAD", f"{_EMPTY_SHA256}\n{payload_sha256}", self._chunk_signature)

    def _take_trailer(self, line: bytes) -> None:
        self._trailer_bytes += len(line) + 2
        try:
            # Some clients end a trailer with LF CRLF, as an example in the reference does.
            name, value = split_trailer(line.removesuffix(b"\n"))
        except HttpRefusal as refusal:
            raise _bad_trailer(refusal.message) from None
        expected = name in self._promised or (name == _TRAILER_SIGNATURE and self._has_signed_trailers)
        if not expected:
            raise _bad_trailer(f"the trailer {name.decode('ascii')} was not announced in x-amz-trailer")
        if name in self._trailers or _TRAILER_SIGNATURE in self._trailers:
            raise _bad_trailer(f"the trailer {name.decode('ascii')} comes twice or behind the signature")
        if self._trailer_bytes > HTTP_TRAILER_BYTES_MAX:
            raise _bad_trailer("the trailers are too long")
        self._trailers[name] = value

    def _end(self) -> None:
        given = self._trailers.pop(_TRAILER_SIGNATURE, b"") if self._has_signed_trailers else b""
        missing = self._promised - self._trailers.keys()
        if missing:
            raise _bad_trailer(f"the announced trailer {min(missing).decode('latin-1')} did not come")
        if self._has_signed_trailers:
            lines = b"".join(b"%b:%b\n" % pair for pair in sorted(self._trailers.items()))
            self._check("AWS4-HMAC-SHA256-TRAILER", sha256(lines).hexdigest(), given.decode("latin-1"))
        self._state = _State.DONE

    @property
    def _has_signed_trailers(self) -> bool:
        return self._signature.payload is Payload.STREAMING_SIGNED_TRAILER

    def _check(self, kind: str, hashes: str, given: str) -> None:
        """Compare one link of the chain; the next is chained from it."""
        signature = self._signature
        to_sign = f"{kind}\n{signature.timestamp}\n{signature.scope}\n{self._previous}\n{hashes}"
        expected = signature.signing_key.sign(to_sign.encode())
        if not hmac.compare_digest(expected.encode(), given.encode()):
            raise S3Error(
                403,
                "SignatureDoesNotMatch",
                "The signature of a chunk or of the trailers does not match; nothing was stored.",
            )
        self._previous = expected


def _decoded_length(headers: Mapping[bytes, bytes]) -> int:
    text = headers.get(_DECODED_LENGTH)
    if text is None:
        raise S3Error(411, "MissingContentLength", "an aws-chunked body needs x-amz-decoded-content-length")
    if not _LENGTH.fullmatch(text):
        raise S3Error(400, "InvalidArgument", "x-amz-decoded-content-length is not a number of bytes")
    return int(text)


def _promised_trailers(payload: Payload, headers: Mapping[bytes, bytes]) -> frozenset[bytes]:
    text = headers.get(b"x-amz-trailer", b"")
    names = frozenset(name for name in map(bytes.strip, text.lower().split(b",")) if name)
    if names and payload is Payload.STREAMING_SIGNED:
        raise S3Error(400, "InvalidRequest", f"{payload.value} has no trailers; x-amz-trailer announces some")
    if len(names) > HTTP_TRAILERS_MAX or _TRAILER_SIGNATURE in names:
        raise _bad_trailer("x-amz-trailer announces too many trailers, or their signature")
    return names


def _malformed(message: str) -> S3Error:
    return S3Error(400, "InvalidRequest", message)


def _bad_trailer(message: str) -> S3Error:
    return S3Error(400, "MalformedTrailerError", message)


def _wrong_length(how: str, decoded_bytes: int) -> S3Error:
    return S3Error(
        400,
        "IncompleteBody",
        f"the body is {how} than the {decoded_bytes} bytes of x-amz-decoded-content-length; nothing was stored",
    )
