"""Headers that ask for something: which x-amz-* headers and conditions each operation understands.  Pure.

Rules kept here:
- Every operation has a closed list.  Any other x-amz-* header asks for something that this store does not do: the
  request is answered with 501 before its body is read and before anything is changed.  A header unknown today must
  not be ignored: `x-amz-write-offset-bytes` would lose the object's content.
- Some headers are understood with the values that change nothing here (`STANDARD`, `private`); any other is 501.
- The owner that a request expects must be this store's.
- A header is the same in the request's head and in its query (`gateway.s3.protocol.targets`).
- A condition on a change is never ignored: one that the operation does not know is 501, one that cannot be read 400,
  and nothing is done.  A client that sends a condition has something to lose.  The store checks it with the change.
- If-Match on a key that does not exist is 404 NoSuchKey, as in S3; size and time hold there, as S3 documents them.

The operations read the other headers that they understand.  Conditions of reads, and of a copy's source, are in
`gateway.http.ranges`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from gateway.http.ranges import header_date
from gateway.s3.protocol import checksums
from gateway.s3.protocol.errors import S3Error, invalid_argument, not_implemented
from gateway.s3.protocol.operation import Operation
from gateway.s3.protocol.targets import READING
from gateway.s3.protocol.xml import OWNER_ID
from lakefs.wire.messages import Condition

META: Final = b"x-amz-meta-"
"""In a list: every header with this prefix."""
_SHOWN_BYTES: Final = 64

# The signature's own, the SDK's name and S3's, the payer (no one pays here), and the owner, which is checked.
_ALWAYS: Final = frozenset(
    (
        b"x-amz-api-version",
        b"x-amz-content-sha256",
        b"x-amz-date",
        b"x-amz-expected-bucket-owner",
        b"x-amz-request-payer",
        b"x-amz-user-agent",
    )
)
_CHECKSUMS: Final = frozenset(checksums.HEADERS.values())
_BODY: Final = _CHECKSUMS | {b"x-amz-decoded-content-length", b"x-amz-sdk-checksum-algorithm", b"x-amz-trailer"}
_NEW_OBJECT: Final = frozenset(
    (
        b"x-amz-acl",
        b"x-amz-metadata-directive",  # s3fs-fuse also sends it where there is no source
        b"x-amz-storage-class",
        b"x-amz-tagging",
        META,
    )
)
_COPY_SOURCE: Final = frozenset(
    (
        b"x-amz-copy-source",
        b"x-amz-copy-source-if-match",
        b"x-amz-copy-source-if-modified-since",
        b"x-amz-copy-source-if-none-match",
        b"x-amz-copy-source-if-unmodified-since",
        b"x-amz-source-expected-bucket-owner",
    )
)
_NONE: Final[frozenset[bytes]] = frozenset()
_LIST: Final = frozenset((b"x-amz-optional-object-attributes",))

# In addition to those that all operations understand.
_OWN: Final[Mapping[Operation, frozenset[bytes]]] = {
    Operation.LIST_BUCKETS: _NONE,
    Operation.CREATE_BUCKET: _BODY
    | {b"x-amz-acl", b"x-amz-bucket-namespace", b"x-amz-bucket-object-lock-enabled", b"x-amz-object-ownership"},
    Operation.DELETE_BUCKET: _NONE,
    Operation.HEAD_BUCKET: _NONE,
    Operation.GET_BUCKET_LOCATION: _NONE,
    Operation.GET_BUCKET_VERSIONING: _NONE,
    Operation.PUT_BUCKET_VERSIONING: _BODY,
    Operation.LIST_OBJECTS: _LIST,
    Operation.LIST_OBJECTS_V2: _LIST,
    Operation.LIST_OBJECT_VERSIONS: _LIST,
    Operation.LIST_MULTIPART_UPLOADS: _NONE,
    Operation.DELETE_OBJECTS: _BODY | {b"x-amz-bypass-governance-retention"},
    Operation.GET_OBJECT: _NONE | {b"x-amz-checksum-mode", b"x-amz-te"},
    Operation.HEAD_OBJECT: _NONE | {b"x-amz-checksum-mode"},
    Operation.PUT_OBJECT: _BODY | _NEW_OBJECT,
    Operation.COPY_OBJECT: _COPY_SOURCE | _NEW_OBJECT | {b"x-amz-checksum-algorithm", b"x-amz-tagging-directive"},
    Operation.DELETE_OBJECT: _NONE
    | {b"x-amz-bypass-governance-retention", b"x-amz-if-match-last-modified-time", b"x-amz-if-match-size"},
    Operation.GET_OBJECT_ATTRIBUTES: _NONE
    | {b"x-amz-max-parts", b"x-amz-object-attributes", b"x-amz-part-number-marker"},
    Operation.GET_OBJECT_TAGGING: _NONE,
    Operation.PUT_OBJECT_TAGGING: _BODY,
    Operation.DELETE_OBJECT_TAGGING: _NONE,
    Operation.CREATE_MULTIPART_UPLOAD: _NEW_OBJECT | {b"x-amz-checksum-algorithm", b"x-amz-checksum-type"},
    Operation.UPLOAD_PART: _BODY,
    Operation.UPLOAD_PART_COPY: _COPY_SOURCE | {b"x-amz-copy-source-range"},
    # The checksums are those of the object: no trailer has one of the list.
    Operation.COMPLETE_MULTIPART_UPLOAD: _CHECKSUMS
    | {b"x-amz-checksum-type", b"x-amz-decoded-content-length", b"x-amz-mp-object-size"},
    Operation.ABORT_MULTIPART_UPLOAD: _NONE,
    Operation.LIST_PARTS: _NONE,
    Operation.PUT_BUCKET_CORS: _BODY,
    Operation.PUT_BUCKET_TAGGING: _BODY,
}
UNDERSTOOD: Final = {operation: _ALWAYS | _OWN.get(operation, _NONE) for operation in Operation}
"""Headers by operation; one without a list has no others than all have."""

ONLY: Final[Mapping[bytes, frozenset[bytes]]] = {
    b"x-amz-api-version": frozenset((b"2006-03-01",)),
    b"x-amz-acl": frozenset((b"private", b"bucket-owner-full-control")),
    b"x-amz-bucket-namespace": frozenset((b"global",)),
    b"x-amz-bucket-object-lock-enabled": frozenset((b"false",)),
    b"x-amz-object-ownership": frozenset((b"BucketOwnerEnforced",)),
    b"x-amz-optional-object-attributes": frozenset((b"RestoreStatus",)),
    b"x-amz-storage-class": frozenset((b"STANDARD",)),
}
"""Values of a header that change nothing here: the same as without it."""
_OWNER: Final = OWNER_ID.encode()
_OWNERS: Final = (b"x-amz-expected-bucket-owner", b"x-amz-source-expected-bucket-owner")

_SIZE: Final = re.compile(rb"[0-9]{1,19}")
_IF_MATCH: Final = b"if-match"
_IF_NONE_MATCH: Final = b"if-none-match"
_MATCH_SIZE: Final = b"x-amz-if-match-size"
_MATCH_TIME: Final = b"x-amz-if-match-last-modified-time"
_OF_HTTP: Final = (_IF_MATCH, _IF_NONE_MATCH, b"if-modified-since", b"if-unmodified-since")
_ON_WRITES: Final = frozenset((_IF_MATCH, _IF_NONE_MATCH))
_CONDITIONS: Final[Mapping[Operation, frozenset[bytes]]] = {
    Operation.PUT_OBJECT: _ON_WRITES,
    Operation.COPY_OBJECT: _ON_WRITES,
    Operation.COMPLETE_MULTIPART_UPLOAD: _ON_WRITES,
    Operation.DELETE_OBJECT: frozenset((_IF_MATCH,)),
}
"""HTTP's conditions that each request which changes something honours."""


def check_headers(operation: Operation, headers: Mapping[bytes, bytes]) -> None:
    """Raise S3Error: NotImplemented for a header or condition that the operation does not understand, AccessDenied for
    another owner, InvalidRequest for a checksum that is announced and not sent."""
    if operation not in READING:
        known = _CONDITIONS.get(operation, ())
        for name in _OF_HTTP:
            if name in headers and name not in known:
                raise not_implemented(f"{operation.value} with the condition {name.decode().title()}")
    understood = UNDERSTOOD[operation]
    for name, value in headers.items():
        if name[:6] != b"x-amz-":
            continue
        if name not in understood and not (META in understood and name.startswith(META)):
            raise not_implemented(f"{operation.value} with the header {_text(name)}")
        if name in ONLY and value not in ONLY[name]:
            raise not_implemented(f"{operation.value} with {_text(name)}: {_text(value)}")
    checksums.check_algorithm(headers)
    for name in _OWNERS:
        if headers.get(name, _OWNER) != _OWNER:
            raise S3Error(403, "AccessDenied", f"Access Denied: every bucket here belongs to {OWNER_ID}")


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


def _text(part: bytes) -> str:
    return part[:_SHOWN_BYTES].decode("latin-1")
