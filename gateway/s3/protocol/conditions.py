"""Conditions of requests that change something: their If-* headers, which the store checks with the change.  Pure.

Rules kept here:
- A condition is never ignored: one that the operation does not know is 501, one that cannot be read 400, and nothing is
  done.  A client that sends a condition has something to lose.
- If-Match on a key that does not exist is 404 NoSuchKey, as in S3; size and time hold there, as S3 documents them.

Conditions of reads, and of a copy's source, are in `gateway.http.ranges`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from gateway.http.head import RequestHead
from gateway.http.ranges import header_date
from gateway.s3.protocol.errors import invalid_argument, not_implemented
from gateway.s3.protocol.targets import Operation
from lakefs.wire.messages import Condition

_SIZE: Final = re.compile(rb"[0-9]{1,19}")
_IF_MATCH: Final = b"if-match"
_IF_NONE_MATCH: Final = b"if-none-match"
_MATCH_SIZE: Final = b"x-amz-if-match-size"
_MATCH_TIME: Final = b"x-amz-if-match-last-modified-time"
_OF_HTTP: Final = (_IF_MATCH, _IF_NONE_MATCH, b"if-modified-since", b"if-unmodified-since")
_ON_WRITES: Final = frozenset((_IF_MATCH, _IF_NONE_MATCH))
_KNOWN: Final[Mapping[Operation, frozenset[bytes]]] = {
    Operation.PUT_OBJECT: _ON_WRITES,
    Operation.COPY_OBJECT: _ON_WRITES,
    Operation.COMPLETE_MULTIPART_UPLOAD: _ON_WRITES,
    Operation.DELETE_OBJECT: frozenset((_IF_MATCH,)),
}
"""HTTP's conditions that each request which changes something honours."""
_READS: Final = ("GET", "HEAD")


def refuse_unknown_conditions(operation: Operation, head: RequestHead) -> None:
    """Raise S3Error 501 for a condition on a change that the operation does not know."""
    if head.method in _READS:
        return
    known = _KNOWN.get(operation, frozenset())
    for name in _OF_HTTP:
        if name in head.headers and name not in known:
            raise not_implemented(f"{operation.value} with the condition {name.decode().title()}")


def write_condition(headers: Mapping[bytes, bytes]) -> Condition:
    """Read If-Match and If-None-Match of a write.  S3Error for values that S3 does not have there."""
    none_match = headers.get(_IF_NONE_MATCH)
    if none_match not in (None, b"*"):
        raise not_implemented("If-None-Match with anything but * on a write")
    return Condition(absent=none_match is not None, etags=_etags(headers))


def delete_condition(headers: Mapping[bytes, bytes]) -> Condition:
    """Read If-Match, x-amz-if-match-size and x-amz-if-match-last-modified-time.  S3Error InvalidArgument."""
    size, modified = headers.get(_MATCH_SIZE), headers.get(_MATCH_TIME)
    size_bytes = None if size is None else read_size(size)
    mtime_s = header_date(modified)
    if size is not None and size_bytes is None:
        raise _unreadable(_MATCH_SIZE, size, "must be a number of bytes")
    if modified is not None and mtime_s is None:
        raise _unreadable(_MATCH_TIME, modified, "must be a date as HTTP has it, such as Sun, 06 Nov 1994 08:49:37 GMT")
    return Condition(etags=_etags(headers), size_bytes=size_bytes, mtime_s=mtime_s)


def read_size(text: bytes) -> int | None:
    """Parse a number of bytes; None if malformed."""
    return int(text) if _SIZE.fullmatch(text) else None


def _etags(headers: Mapping[bytes, bytes]) -> list[str]:
    match = headers.get(_IF_MATCH)
    return [] if match is None else [tag.strip().strip('"') for tag in match.decode("latin-1").split(",")]


def _unreadable(name: bytes, value: bytes, form: str) -> Exception:
    return invalid_argument(f"{name.decode()} {form}", name.decode(), value[:64].decode("latin-1"))
