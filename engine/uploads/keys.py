"""Keys of the table `uploads`: uploads in byte order of bucket, key and id, then parts by upload and number.

    upload   1, node of the bucket (8), key (cut at 480 bytes), 0 or, when it was cut, 1, upload id (16)
    part     2, upload id (16), number (2, big-endian)
    kept     3, upload id (16), page (2, big-endian): what is known of the parts when the upload is over

Keys of objects hold no NUL, so an upload to `a` stands before all to keys that begin with `a`; one whose key was cut
stands behind the upload to the 480 bytes themselves.  Uploads whose keys were cut at the same bytes stand together, in
the order of their ids: whoever lists them sorts those.
"""

from __future__ import annotations

from typing import Final

from engine.format.layouts import node_key
from lakefs.ids import NodeId

UPLOAD_ID_BYTES: Final = 16
KEY_BYTES_KEPT: Final = 480
UPLOADS_BEGIN: Final = b"\x01"
UPLOADS_END: Final = b"\x02"
PARTS_BEGIN: Final = b"\x02"
PARTS_END: Final = b"\x03"
OBJECT_PARTS_BEGIN: Final = b"\x03"
OBJECT_PARTS_END: Final = b"\x04"
_WHOLE: Final = b"\x00"
_CUT: Final = b"\x01"
BEHIND_WHOLE: Final = _CUT
"""Behind a key that was not cut: what follows all uploads to it."""
_BUCKET_END: Final = 9
_PART_PREFIX_BYTES: Final = 1 + UPLOAD_ID_BYTES


def bucket_prefix(bucket: NodeId) -> bytes:
    """What the keys of a bucket's uploads begin with."""
    return UPLOADS_BEGIN + node_key(bucket)


def key_prefix(bucket: NodeId, path: bytes) -> bytes:
    """What the keys of all uploads to one key begin with, and of no others unless it was cut."""
    kept = path[:KEY_BYTES_KEPT]
    return bucket_prefix(bucket) + kept + (_WHOLE if len(path) <= KEY_BYTES_KEPT else _CUT)


def upload_key(bucket: NodeId, path: bytes, upload: bytes) -> bytes:
    """Key of an upload."""
    assert len(upload) == UPLOAD_ID_BYTES, "an upload's id has 16 bytes"
    return key_prefix(bucket, path) + upload


def bucket_of(key: bytes) -> NodeId:
    """The bucket's node, from the key of an upload."""
    return NodeId(int.from_bytes(key[1:_BUCKET_END], "big"))


def upload_of(key: bytes) -> bytes:
    """The upload's id, from the key of an upload."""
    return key[-UPLOAD_ID_BYTES:]


def is_cut(key: bytes) -> bool:
    """Whether the key of an upload holds only the beginning of the object's key."""
    return key[-UPLOAD_ID_BYTES - 1 : -UPLOAD_ID_BYTES] == _CUT


def part_key(upload: bytes, number: int) -> bytes:
    """Key of a part."""
    return PARTS_BEGIN + upload + number.to_bytes(2, "big")


def part_of(key: bytes) -> tuple[bytes, int]:
    """Upload id and number, from the key of a part."""
    return key[1:_PART_PREFIX_BYTES], int.from_bytes(key[_PART_PREFIX_BYTES:], "big")


def object_parts_key(upload: bytes, page: int) -> bytes:
    """Key of a page of the parts of the object that came from an upload; of their header with page 0."""
    return OBJECT_PARTS_BEGIN + upload + page.to_bytes(2, "big")


def parts_range(upload: bytes, after: int = 0) -> tuple[bytes, bytes]:
    """Start and end of the parts of an upload with numbers above `after`."""
    return part_key(upload, after + 1), PARTS_BEGIN + upload + b"\xff\xff\xff"
