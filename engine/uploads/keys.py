"""Keys of the table `uploads`: uploads in byte order of bucket, key and id, then parts by upload and number.

    upload   1, node of the bucket (8), key (cut at 480 bytes), 0 or, if it was cut, 1, upload id (16)
    part     2, upload id (16), number (2, big-endian)
    kept     3, upload id (16), page (2, big-endian): the part list that a completed upload leaves

An upload's id begins with the time when the upload began, so those to one key are in that order; the rest is random.

Keys of objects hold no NUL, so an upload to `a` is before all to keys that begin with `a`.  An upload whose key was cut
is behind the uploads to the 480 bytes themselves.  Uploads whose keys were cut at the same bytes are adjacent, in the
order of their ids; a listing sorts those.
"""

from __future__ import annotations

from typing import Final

from engine.format.layouts import node_key
from lakefs.ids import NodeId, new_id16

UPLOAD_ID_BYTES: Final = 16
KEY_BYTES_KEPT: Final = 480
UPLOADS_BEGIN: Final = b"\x01"
UPLOADS_END: Final = b"\x02"
PARTS_BEGIN: Final = b"\x02"
PARTS_END: Final = b"\x03"
OBJECT_PARTS_BEGIN: Final = b"\x03"
OBJECT_PARTS_END: Final = b"\x04"
_TIME_BYTES: Final = 8
_WHOLE: Final = b"\x00"
_CUT: Final = b"\x01"
BEHIND_WHOLE: Final = _CUT
"""Behind a key that was not cut: the end of all uploads to it."""
assert 1 + 8 + KEY_BYTES_KEPT + 1 + UPLOAD_ID_BYTES <= 511, "LMDB refuses longer keys"
_BUCKET_END: Final = 9
_PART_PREFIX_BYTES: Final = 1 + UPLOAD_ID_BYTES


def new_upload_id(now_ns: int) -> bytes:
    """Return an id for an upload that begins now: nanoseconds since 1970 (8 bytes, big-endian), and 8 random bytes."""
    return now_ns.to_bytes(_TIME_BYTES, "big") + new_id16()[_TIME_BYTES:]


def bucket_prefix(bucket: NodeId) -> bytes:
    """Return the common prefix of the keys of a bucket's uploads."""
    return UPLOADS_BEGIN + node_key(bucket)


def key_prefix(bucket: NodeId, path: bytes) -> bytes:
    """Return the common prefix of the keys of all uploads to one key; other keys share it only if this one was cut."""
    kept = path[:KEY_BYTES_KEPT]
    return bucket_prefix(bucket) + kept + (_WHOLE if len(path) <= KEY_BYTES_KEPT else _CUT)


def upload_key(bucket: NodeId, path: bytes, upload: bytes) -> bytes:
    """Return the key of an upload."""
    assert len(upload) == UPLOAD_ID_BYTES, "an upload's id has 16 bytes"
    return key_prefix(bucket, path) + upload


def bucket_of(key: bytes) -> NodeId:
    """Return the bucket's node, from the key of an upload."""
    return NodeId(int.from_bytes(key[1:_BUCKET_END], "big"))


def upload_of(key: bytes) -> bytes:
    """Return the upload's id, from the key of an upload."""
    return key[-UPLOAD_ID_BYTES:]


def is_cut(key: bytes) -> bool:
    """Return True if the key of an upload holds only the beginning of the object's key."""
    return key[-UPLOAD_ID_BYTES - 1 : -UPLOAD_ID_BYTES] == _CUT


def part_key(upload: bytes, number: int) -> bytes:
    """Return the key of a part."""
    return PARTS_BEGIN + upload + number.to_bytes(2, "big")


def part_of(key: bytes) -> tuple[bytes, int]:
    """Return the upload id and number, from the key of a part."""
    return key[1:_PART_PREFIX_BYTES], int.from_bytes(key[_PART_PREFIX_BYTES:], "big")


def object_parts_key(upload: bytes, page: int) -> bytes:
    """Return the key of a page of the parts of the object that came from an upload; page 0 is their header."""
    return OBJECT_PARTS_BEGIN + upload + page.to_bytes(2, "big")


def parts_range(upload: bytes, after: int = 0) -> tuple[bytes, bytes]:
    """Return the start and end of the parts of an upload with numbers above `after`."""
    return part_key(upload, after + 1), PARTS_BEGIN + upload + b"\xff\xff\xff"
