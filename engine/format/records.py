"""Records of the tables that are kept as msgpack arrays; `docs/format.md` describes them.

The first field is the version; fields are appended to, never moved.  An unknown version is refused by whoever reads.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from lakefs.errors import StoreUnusable

R = TypeVar("R")
UNREADABLE: Final = (msgspec.MsgspecError, ValueError, RecursionError)
"""What decoding raises: for other shapes, for text that is not UTF-8, for nesting without end."""


def decode_record(decoder: msgspec.msgpack.Decoder[R], value: bytes, what: str) -> R:
    """The record in an (already verified) value.  StoreUnusable, naming `what`, for a shape that is not known."""
    try:
        return decoder.decode(value)
    except UNREADABLE as error:
        raise StoreUnusable(f"{what} cannot be read ({error}): it is of another release") from error


class BucketRecord(msgspec.Struct, frozen=True, array_like=True):
    """A bucket's fixed properties and its settings; stored as msgpack array, first field the version."""

    version: int = 1
    domain: int = 0
    created_ns: int = 0
    versioning: int = 0
    policy: dict[str, str] = {}


class AccessKeyRecord(msgspec.Struct, frozen=True, array_like=True):
    """What an access key may do, and its secret; stored as msgpack array, first field the version."""

    version: int
    secret_key: str
    buckets: list[str]
    read_only: bool
    created_ns: int

    def __repr__(self) -> str:
        """Without the secret."""
        return f"AccessKeyRecord(buckets={self.buckets}, read_only={self.read_only})"


class UploadRecord(msgspec.Struct, frozen=True, array_like=True):
    """A multipart upload.  `node` is the packed record that its object will have, without blob; mtime 0: when done."""

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
    """That the parts of a node are kept, which came from an upload, and how many."""

    version: int
    node: int
    part_count: int


class ObjectPartsPage(msgspec.Struct, frozen=True, array_like=True):
    """Some of an object's parts, one behind the other: (number, size_bytes, checksums); where the first begins."""

    version: int
    offset_bytes: int
    parts: list[tuple[int, int, dict[str, bytes]]]


class VersionRecord(msgspec.Struct, frozen=True, array_like=True):
    """What a key was bound to before: a node.  `key` is the object's key where the table's key does not hold all of it.

    `order` says which of two versions of a key is newer; it is a number of the counter `node`.
    """

    version: int
    node: int
    order: int
    key: bytes = b""
