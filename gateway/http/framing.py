"""Framing of request bodies: their length, and bodies in chunks (RFC 9112, sections 6 and 7).  Sans-IO and pure.

Rules kept here:
- A body has one framing: Content-Length in plain digits, or Transfer-Encoding that is exactly `chunked`, on HTTP/1.1.
  Both at once, other codings, signs, lists are refused: another reader of the same bytes may end the body elsewhere.
- Lines end with CRLF; a lone CR or LF in one is refused.
- At most one line is kept between calls: HTTP_CHUNK_LINE_BYTES_MAX.  Payload is returned as views of the caller's
  buffer, never copied.
"""

from __future__ import annotations

import enum
import re
from typing import Final

from gateway.http.head import HttpRefusal, RequestHead, bad_request
from lakefs.limits import HTTP_CHUNK_LINE_BYTES_MAX, HTTP_TRAILER_BYTES_MAX, HTTP_TRAILERS_MAX

_LENGTH: Final = re.compile(rb"[0-9]{1,18}")
_CHUNK_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[\t ]*;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER_LINE: Final = re.compile(rb"([-!#$%&'*+.^_`|~0-9A-Za-z]+):[\t ]*([\t\x20-\x7e\x80-\xff]*)")


def body_framing(head: RequestHead) -> int | None:
    """Return the length of a request's body in bytes, 0 without one; None if it comes in chunks.  HttpRefusal."""
    coding = head.headers.get(b"transfer-encoding")
    length = head.headers.get(b"content-length")
    if coding is None:
        if length is not None and not _LENGTH.fullmatch(length):
            raise bad_request("the Content-Length is not a number of bytes")
        return int(length or 0)
    if length is not None:
        raise bad_request("a request has Content-Length or Transfer-Encoding, not both")
    if head.version < (1, 1):
        raise bad_request("HTTP/1.0 has no Transfer-Encoding")
    if coding.lower() != b"chunked":
        raise HttpRefusal(501, "NotImplemented", "the only Transfer-Encoding that is read here is chunked")
    return None


class LineReader:
    """Reads lines that end with CRLF from pieces that end anywhere.  Keeps at most `limit_bytes` and a CR."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held = b""

    def take(self, data: memoryview, start: int) -> tuple[bytes | None, int]:
        """Return the next line without its CRLF, and the offset behind it; None if `data` ends within it and was kept.

        HttpRefusal if the line is too long.
        """
        held = self._held
        window = held + bytes(data[start : start + self._limit_bytes + 2 - len(held)])
        end = window.find(b"\r\n")
        if end < 0:
            if len(window) >= self._limit_bytes + 2:
                raise bad_request(f"a line of the body's framing is longer than {self._limit_bytes} bytes")
            self._held = window
            return None, len(data)
        self._held = b""
        return window[:end], start + end + 2 - len(held)


class _State(enum.Enum):
    SIZE = enum.auto()
    PAYLOAD = enum.auto()
    PAYLOAD_END = enum.auto()
    TRAILERS = enum.auto()
    DONE = enum.auto()


class ChunkedDecoder:
    """Decodes a body in chunks.  `done` once its last byte was fed; `trailers` is then complete.

    Chunk extensions are ignored.  Trailers must be few and short; their names are lower-case; one that repeats, or
    that would change framing, is refused.
    """

    def __init__(self) -> None:
        self.trailers: dict[bytes, bytes] = {}
        self._state = _State.SIZE
        self._lines = LineReader(HTTP_CHUNK_LINE_BYTES_MAX)
        self._left_bytes = 0
        self._trailer_bytes = 0

    @property
    def done(self) -> bool:
        """True if the body has ended."""
        return self._state is _State.DONE

    def feed(self, data: memoryview) -> tuple[list[memoryview], int]:
        """Return the payload in `data` as views of it, and the number of bytes of `data` that belong to this body.

        That is all of `data`, unless the body ended: the rest is the next request's.  HttpRefusal.
        """
        payload: list[memoryview] = []
        at = 0
        while at < len(data) and self._state is not _State.DONE:
            if self._state is _State.PAYLOAD:
                piece = data[at : at + self._left_bytes]
                payload.append(piece)
                at += len(piece)
                self._left_bytes -= len(piece)
                if not self._left_bytes:
                    self._state = _State.PAYLOAD_END
                continue
            line, at = self._lines.take(data, at)
            if line is not None:
                self._take_line(line)
        return payload, at

    def _take_line(self, line: bytes) -> None:
        if self._state is _State.SIZE:
            self._left_bytes = _chunk_size(line)
            self._state = _State.PAYLOAD if self._left_bytes else _State.TRAILERS
        elif self._state is _State.PAYLOAD_END:
            if line:
                raise bad_request("a chunk is longer than its size says")
            self._state = _State.SIZE
        elif line:
            self._take_trailer(line)
        else:
            self._state = _State.DONE

    def _take_trailer(self, line: bytes) -> None:
        self._trailer_bytes += len(line) + 2
        name, value = split_trailer(line)
        if self._trailer_bytes > HTTP_TRAILER_BYTES_MAX or len(self.trailers) >= HTTP_TRAILERS_MAX:
            raise bad_request("the body has too many trailers")
        if name in self.trailers or name in (b"content-length", b"transfer-encoding", b"host"):
            raise bad_request(f"the trailer {name.decode('ascii')} is not allowed here")
        self.trailers[name] = value


def split_trailer(line: bytes) -> tuple[bytes, bytes]:
    """Split `name: value`; the name is lower-cased.  HttpRefusal."""
    match = _TRAILER_LINE.fullmatch(line)
    if match is None:
        raise bad_request("a trailer is not NAME: VALUE")
    return match[1].lower(), match[2].rstrip(b" \t")


def _chunk_size(line: bytes) -> int:
    match = _CHUNK_LINE.fullmatch(line)
    if match is None:
        raise bad_request("a chunk's size is not a hexadecimal number")
    return int(match[1], 16)
