"""Keys of the table `versions`: the former versions of a bucket's keys, newest first.

    node of the bucket (8), key, 0, order inverted (8, big-endian)
    node of the bucket (8), first 470 bytes of the key, 1, BLAKE3-128 of the key (16), order inverted (8, big-endian)

The second form is for keys longer than 470 bytes.  A group is such a key without its order: the common prefix of all
versions of one key.  An order is a number of the counter `node`, so it is used once and grows.  A key has at most one
version `null`.  Its order is replaced by 8 zero bytes (its record has the order), so that one read finds it; no
inverted order is 0.

A version is filed under its bucket and whole key, not under its parent as names are: a folder is removed with the last
name in it, even if names that were in it have versions.

Keys hold no NUL, so all versions of a key are adjacent, behind those of every lesser key.  Exception: keys that agree
in their first 470 bytes stand in the order of their hashes, and a listing sorts them.
"""

from __future__ import annotations

from typing import Final

from blake3 import blake3

from engine.format.layouts import node_key
from lakefs.ids import NodeId

KEY_BYTES_KEPT: Final = 470
ORDER_BYTES: Final = 8
_BUCKET_BYTES: Final = 8
_DIGEST_BYTES: Final = 16
_NULL: Final = bytes(ORDER_BYTES)
_ORDER_MAX: Final = (1 << 64) - 1
_WHOLE: Final = b"\x00"
_CUT: Final = b"\x01"
_NO_TEXT: Final = b"\xff"
"""A byte that UTF-8 never has, hence behind every key."""
assert _BUCKET_BYTES + KEY_BYTES_KEPT + 1 + _DIGEST_BYTES + ORDER_BYTES <= 511, "LMDB refuses longer keys"


def group_of(bucket: NodeId, path: bytes) -> bytes:
    """Return the group of a key: the prefix of the table's keys of all its versions, and of no other key's."""
    if len(path) <= KEY_BYTES_KEPT:
        return node_key(bucket) + path + _WHOLE
    return node_key(bucket) + path[:KEY_BYTES_KEPT] + _CUT + blake3(path).digest(_DIGEST_BYTES)


def null_key(group: bytes) -> bytes:
    """Return the key of the version `null`."""
    return group + _NULL


def order_key(group: bytes, order: int) -> bytes:
    """Return the key of a version with that order."""
    assert 0 < order < _ORDER_MAX
    return group + (_ORDER_MAX - order).to_bytes(ORDER_BYTES, "big")


def group_of_key(key: bytes) -> bytes:
    """Return the group that a key of the table belongs to."""
    return key[:-ORDER_BYTES]


def is_null(key: bytes) -> bool:
    """Return True if a key of the table is that of a version `null`."""
    return key.endswith(_NULL)


def bucket_of(key: bytes) -> NodeId:
    """Return the bucket's node, from a key of the table."""
    return NodeId(int.from_bytes(key[:_BUCKET_BYTES], "big"))


def path_of(key: bytes) -> bytes:
    """Return the object's key, from a key of the table; empty if the table's key holds only its beginning."""
    group = group_of_key(key)
    return b"" if _is_cut(group) else group[_BUCKET_BYTES:-1]


def _is_cut(group: bytes) -> bool:
    """Return True if the group is that of a cut key: no group of a whole key is as long."""
    return len(group) == _BUCKET_BYTES + KEY_BYTES_KEPT + 1 + _DIGEST_BYTES


def cut_groups(group: bytes) -> bytes:
    """Return the common prefix of the groups of all keys cut at the same bytes; empty for a key that was not cut."""
    return group[: _BUCKET_BYTES + KEY_BYTES_KEPT + 1] if _is_cut(group) else b""


def behind_groups(prefix: bytes) -> bytes:
    """Return the least key of the table behind all that begin with a group, or with a prefix of groups."""
    stripped = prefix.rstrip(b"\xff")
    assert stripped, "a prefix begins with a node id, and ids are far below 2**64 - 1"
    return stripped[:-1] + bytes([stripped[-1] + 1])


def first_key(bucket: NodeId, path: bytes = b"") -> bytes:
    """Return a key that no version of `path`, or of a greater key, is before."""
    return node_key(bucket) + path[:KEY_BYTES_KEPT]


def behind_below(bucket: NodeId, path: bytes) -> bytes:
    """Return a key behind all versions of keys that begin with `path`, which has at most 470 bytes."""
    return node_key(bucket) + path + _NO_TEXT


def end_of(bucket: NodeId) -> bytes:
    """Return a key behind all versions in a bucket."""
    return node_key(NodeId(bucket + 1))
