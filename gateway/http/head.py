"""The head of a request: bytes up to the empty line -> `RequestHead`.  Pure; the caller owns the buffer.

llhttp (through httptools) reads it, strictly: it refuses bare LF, folded lines, white space before a colon, control
characters, two Content-Lengths, Content-Length beside Transfer-Encoding, and anything but ASCII in the target.
llhttp accepts more than this module does; handled here are:
- request lines with more than one space, a protocol other than HTTP/1.0 and HTTP/1.1 (it takes RTSP, ICE, HTTP/0.9 and
  HTTP/2.0), empty lines before the request: the first line must be exactly what llhttp understood of it;
- repeated fields: a list is joined by ",", any other repetition is refused, in any upper and lower case;
- white space behind a value: cut off;
- an absolute-form target whose authority is not the Host: the signed and the served target must be the same.

A head that arrives in pieces is checked piece by piece (`HeadWatch`): bytes that no head has are refused on arrival,
not when the client gives up.  `parse_head` refuses all that `HeadWatch` refuses.

Invariants: names are lower-case; values have no white space around them and no control characters but tab; `path`
begins with "/"; a request of HTTP/1.1 has exactly one Host.
It does not decode: `path` and `query` are percent-encoded as received.

A request that the rules of HTTP forbid to serve raises `HttpRefusal`, while its head or its body is read.  The
connection answers with the status and closes, because the begin of the next request is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from lakefs.limits import HTTP_HEAD_BYTES_MAX

_END: Final = b"\r\n\r\n"
_VERSIONS: Final = {b" HTTP/1.1": (1, 1), b" HTTP/1.0": (1, 0)}
_VERSION_BYTES: Final = len(b" HTTP/1.1")
_LISTS: Final = frozenset({
    b"accept", b"accept-charset", b"accept-encoding", b"accept-language", b"access-control-request-headers",
    b"cache-control", b"connection", b"content-encoding", b"content-language", b"expect", b"forwarded",
    b"if-match", b"if-none-match", b"pragma", b"te", b"trailer", b"upgrade", b"via", b"x-amz-object-attributes",
    b"x-forwarded-for",
})  # fmt: skip
"""Fields that may be repeated (RFC 9110; the last but one by S3); their values are one list."""
_TLS_HANDSHAKE: Final = b"\x16"
"""The first byte of a TLS connection (RFC 8446, 5.1); no HTTP request begins with it."""
_BEGINNING_BYTES: Final = 2
_HTTP2_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\n"


class HttpRefusal(Exception):
    """`status` of the answer, `code` in S3's vocabulary, and a sentence for the author of the client."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


def bad_request(message: str) -> HttpRefusal:
    """Return a refusal with status 400: the bytes are not HTTP/1.1."""
    return HttpRefusal(400, "BadRequest", message)


class RequestHead(msgspec.Struct, frozen=True):
    """One request without its body.

    `target` is as received; `path` and `query` (without "?") are still percent-encoded; `authority` is the Host, with
    its port if it has one, b"" when a client of HTTP/1.0 sent none.  `headers`: lower-case name -> value.
    """

    method: str
    target: bytes
    path: bytes
    query: bytes
    authority: bytes
    version: tuple[int, int]
    headers: dict[bytes, bytes]
    keep_alive: bool


class _Reader:
    """Callbacks for httptools: two C functions, so that no Python runs for a header."""

    __slots__ = ("on_header", "on_url")

    def __init__(self, on_url: Callable[[bytes], None], on_header: Callable[[bytes, bytes], bytes | None]) -> None:
        self.on_url = on_url
        self.on_header = on_header


def head_length(buffer: bytes | bytearray, scanned: int = 0) -> int:
    """Return the length of the head at the start of `buffer`, with its empty line; 0 if it is not complete.

    `scanned`: bytes that an earlier call has seen.  HttpRefusal if the head is too long.
    """
    found = buffer.find(_END, max(0, scanned - 3), HTTP_HEAD_BYTES_MAX)
    if found >= 0:
        return found + len(_END)
    if len(buffer) >= HTTP_HEAD_BYTES_MAX:
        raise HttpRefusal(
            400,
            "RequestHeaderSectionTooLarge",
            f"the request line and headers are longer than {HTTP_HEAD_BYTES_MAX} bytes",
        )
    return 0


class HeadWatch:
    """Checks one head while it arrives in pieces; `parse_head` reads it when it is whole."""

    def __init__(self) -> None:
        self._parser = HttpRequestParser(None)
        self._begun = b""

    def feed(self, piece: bytes) -> None:
        """Check the next bytes; the head does not end in them.  HttpRefusal if no head continues like this."""
        if len(self._begun) < _BEGINNING_BYTES:
            self._begun += piece[:_BEGINNING_BYTES]
            check_beginning(self._begun)
        try:
            self._parser.feed_data(piece)
        except HttpParserError as error:
            raise _unreadable(self._begun, error) from None


def check_beginning(received: bytes) -> None:
    """Raise HttpRefusal if no request begins with these bytes; an empty line before one is left to the caller."""
    if not received or received[:1].isupper() or received[:2] in (b"\r", b"\r\n"):
        return
    if received[:1] == _TLS_HANDSHAKE:
        raise bad_request("a TLS handshake came, and this port speaks plain HTTP: use http:// instead of https://")
    raise bad_request(f"not a request of HTTP/1.1: none begins with the byte 0x{received[0]:02x}")


def parse_head(head: bytes) -> RequestHead:
    """Parse the head, which ends with the empty line at the end of `head`.  HttpRefusal."""
    target_parts: list[bytes] = []
    received: dict[bytes, bytes] = {}
    parser = HttpRequestParser(_Reader(target_parts.append, received.setdefault))
    try:
        parser.feed_data(head)
    except HttpParserUpgrade:
        pass  # an upgrade is an offer; continuing with HTTP/1.1 declines it
    except HttpParserError as error:
        raise _unreadable(head, error) from None
    method = parser.get_method()
    target = target_parts[0] if len(target_parts) == 1 else b"".join(target_parts)
    expected = head.startswith(b"%b %b HTTP/1.1\r\n" % (method, target)) and b"#" not in target
    version = (1, 1) if expected else _checked_version(head, method, target)
    headers = {name.lower(): value.rstrip() for name, value in received.items()}
    if len(headers) != head.count(b"\n") - 2:
        headers = _joined(head)
    host = headers.get(b"host")
    if host is None:
        if version == (1, 1):
            raise bad_request("a request of HTTP/1.1 needs a Host header")
        host = b""
    path, _, query = (target if target[:1] == b"/" else _origin_form(target, host)).partition(b"?")
    return RequestHead(
        method.decode("ascii"), target, path, query, host, version, headers, _keep_alive(headers, version)
    )


def _keep_alive(headers: dict[bytes, bytes], version: tuple[int, int]) -> bool:
    connection = headers.get(b"connection")
    if connection is None:
        return version == (1, 1)
    options = [option.strip() for option in connection.lower().split(b",")]
    return b"close" not in options and (version == (1, 1) or b"keep-alive" in options)


def _checked_version(head: bytes, method: bytes, target: bytes) -> tuple[int, int]:
    check_beginning(head)
    line = head[: head.find(b"\r")]
    version = _VERSIONS.get(line[-_VERSION_BYTES:])
    if not line:
        raise bad_request("an empty line stands where a request should begin")
    if version is None:
        raise _version_refusal(head)
    if line[:-_VERSION_BYTES] != b"%b %b" % (method, target):
        raise bad_request("the request line is not METHOD TARGET HTTP/1.1 with single spaces between")
    if b"#" in target:
        raise bad_request("a request's target has no fragment; encode # as %23")
    return version


def _version_refusal(head: bytes) -> HttpRefusal:
    if head.startswith(_HTTP2_PREFACE):
        message = "HTTP/2 is not spoken here; use HTTP/1.1"
    else:
        message = "only HTTP/1.1 and HTTP/1.0 are spoken here"
    return HttpRefusal(505, "HttpVersionNotSupported", message)


def _unreadable(head: bytes, error: HttpParserError) -> HttpRefusal:
    if head.startswith(_HTTP2_PREFACE):
        return _version_refusal(head)
    check_beginning(head)
    return bad_request(f"not a request of HTTP/1.1: {error}")


def _joined(head: bytes) -> dict[bytes, bytes]:
    """Return the headers of a head that llhttp accepted, where some are repeated."""
    headers: dict[bytes, bytes] = {}
    for line in head.split(b"\r\n")[1:-2]:
        raw_name, _, raw_value = line.partition(b":")
        name, value = raw_name.lower(), raw_value.strip(b" \t")
        if name not in headers:
            headers[name] = value
        elif name in _LISTS:
            headers[name] = b"%b,%b" % (headers[name], value)  # as signers join repeated fields
        else:
            raise bad_request(f"the header {name.decode('latin-1')} may not be repeated")
    return headers


def _origin_form(target: bytes, host: bytes) -> bytes:
    """Return path and query of an absolute-form target, `scheme://authority/path?query`."""
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        raise bad_request("the request's target is neither a path nor a URL")
    authority_bytes = min(at for at in (rest.find(b"/"), rest.find(b"?"), len(rest)) if at >= 0)
    authority, origin = rest[:authority_bytes], rest[authority_bytes:]
    default_port = b":80" if scheme.lower() == b"http" else b":443"
    if host and _bare(authority, default_port) != _bare(host, default_port):
        raise bad_request("the target's host is not that of the Host header")
    return origin if origin[:1] == b"/" else b"/" + origin


def _bare(authority: bytes, default_port: bytes) -> bytes:
    """Return a host as it is compared: without the default port, and without the dot at the end of its name."""
    host, colon, port = authority.lower().removesuffix(default_port).partition(b":")
    return host.removesuffix(b".") + colon + port
