"""x-amz-* headers: which ones each operation understands.  Pure.

Rules kept here:
- Every operation has a closed list.  Any other x-amz-* header asks for something that this store does not do: the
  request is answered with 501 before its body is read and before anything is changed.  A header unknown today must
  not be ignored: `x-amz-write-offset-bytes` would lose the object's content.
- Some headers are understood with the values that change nothing here (`STANDARD`, `private`); any other is 501.
- The owner that a request expects must be this store's.
- A header is the same in the request's head and in its query (`gateway.s3.protocol.targets`).

The operations read the other headers that they understand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.s3.operations.buckets import OWNER_ID
from gateway.s3.protocol import checksums
from gateway.s3.protocol.errors import S3Error, not_implemented
from gateway.s3.protocol.targets import Operation

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
}
UNDERSTOOD: Final = {operation: _ALWAYS | _OWN[operation] for operation in Operation}
"""Headers by operation; the import fails if an operation has no list."""

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


def check_headers(operation: Operation, headers: Mapping[bytes, bytes]) -> None:
    """Raise S3Error: NotImplemented for a header that the operation does not understand, AccessDenied for another
    owner, InvalidRequest for a checksum that is announced and not sent."""
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


def _text(part: bytes) -> str:
    return part[:_SHOWN_BYTES].decode("latin-1")
