"""Records of tables that are stored as msgpack arrays; `docs/format.md` describes them.

The first field is the version.  Fields are appended, never moved.  The reader of a record refuses an unknown version.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from lakefs.errors import StoreUnusable

R = TypeVar("R")
UNREADABLE: Final = (msgspec.MsgspecError, ValueError, RecursionError)
"""Errors of decoding: another shape, text that is not UTF-8, endless nesting."""


def decode_record(decoder: msgspec.msgpack.Decoder[R], value: bytes, what: str) -> R:
    """Decode the record in an (already verified) value.  StoreUnusable, naming `what`, for an unknown shape."""
    try:
        return decoder.decode(value)
    except UNREADABLE as error:
        raise StoreUnusable(f"{what} cannot be read ({error}): it is of another release") from error


class BucketRecord(msgspec.Struct, frozen=True, array_like=True):
    """A bucket's fixed properties and its settings."""

    version: int = 1
    domain: int = 0
    created_ns: int = 0
    versioning: int = 0
    policy: dict[str, str] = {}


class AccessKeyRecord(msgspec.Struct, frozen=True, array_like=True):
    """The rights of an access key, and its secret."""

    version: int
    secret_key: str
    buckets: list[str]
    read_only: bool
    created_ns: int

    def __repr__(self) -> str:
        """Show the key without its secret."""
        return f"AccessKeyRecord(buckets={self.buckets}, read_only={self.read_only})"


class UploadRecord(msgspec.Struct, frozen=True, array_like=True):
    """A multipart upload.  `node` is the packed record of its future object, without blob; mtime 0: when completed."""

    version: int
    key: str
    created_ns: int
    node: bytes
    details: dict[str, str]


class PartRecord(msgspec.Struct, frozen=True, array_like=True):
    """A part of the upload whose record has the key `upload_key`."""

    version: int
    upload_key: bytes
    blob: bytes
    size_bytes: int
    etag: bytes
    mtime_ns: int
    checksums: dict[str, bytes]


class ObjectPartsHeader(msgspec.Struct, frozen=True, array_like=True):
    """Says that the parts of a node made by an upload are kept, and their number."""

    version: int
    node: int
    part_count: int


class ObjectPartsPage(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive parts of an object: (number, size_bytes, checksums).  `offset_bytes` is where the first begins."""

    version: int
    offset_bytes: int
    parts: list[tuple[int, int, dict[str, bytes]]]


class VersionRecord(msgspec.Struct, frozen=True, array_like=True):
    """An old version of a key: its node.  `key` is the object's key if the table's key does not hold all of it.

    Of two versions of a key, the one with the greater `order`, a number of the counter `node`, is newer.
    """

    version: int
    node: int
    order: int
    key: bytes = b""
