"""Keys of the table `versions`: what a bucket's keys were bound to before, newest first.

    node of the bucket (8), key, 0, order inverted (8, big-endian)
    node of the bucket (8), first 470 bytes of the key, 1, BLAKE3-128 of the key (16), order inverted (8, big-endian)

The second form is that of keys longer than 470 bytes.  An order is a number of the counter `node`, so it is taken once
and grows.  The version `null`, of which a key has one at most, has 8 zero bytes in the place of its order (its record
has the order), so that it is found with one read; no inverted order is 0.

A version is filed under its bucket and whole key, not under its parent as names are: a folder goes when the last name
in it goes, whatever versions there are of names that were in it.

Keys hold no NUL, so all versions of a key stand together, behind those of every lesser key, but for keys that agree in
470 bytes: those stand in the order of their hashes, and who lists them sorts.
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
"""No byte of UTF-8, hence behind every key."""


def group_of(bucket: NodeId, path: bytes) -> bytes:
    """What the keys of all versions of one key begin with, and no others."""
    if len(path) <= KEY_BYTES_KEPT:
        return node_key(bucket) + path + _WHOLE
    return node_key(bucket) + path[:KEY_BYTES_KEPT] + _CUT + blake3(path).digest(_DIGEST_BYTES)


def null_key(group: bytes) -> bytes:
    """Key of the version `null`."""
    return group + _NULL


def order_key(group: bytes, order: int) -> bytes:
    """Key of a version that has a number."""
    assert 0 < order < _ORDER_MAX
    return group + (_ORDER_MAX - order).to_bytes(ORDER_BYTES, "big")


def group_of_key(key: bytes) -> bytes:
    """What all versions of the same key begin with, from the table's key of one."""
    return key[:-ORDER_BYTES]


def is_null(key: bytes) -> bool:
    """Whether a key of the table is that of a version `null`."""
    return key.endswith(_NULL)


def bucket_of(key: bytes) -> NodeId:
    """The bucket's node, from a key of the table."""
    return NodeId(int.from_bytes(key[:_BUCKET_BYTES], "big"))


def path_of(key: bytes) -> bytes:
    """The object's key, from a key of the table; empty when it holds only the beginning."""
    group = group_of_key(key)
    return b"" if _is_cut(group) else group[_BUCKET_BYTES:-1]


def _is_cut(group: bytes) -> bool:
    """Whether a group is that of a key that was cut: no whole one is as long."""
    return len(group) == _BUCKET_BYTES + KEY_BYTES_KEPT + 1 + _DIGEST_BYTES


def cut_groups(group: bytes) -> bytes:
    """What the groups of all keys begin with that were cut at the same bytes; empty for a key that was not cut."""
    return group[: _BUCKET_BYTES + KEY_BYTES_KEPT + 1] if _is_cut(group) else b""


def behind(prefix: bytes) -> bytes:
    """The least key of the table behind all that begin with a group, or with the groups of cut keys."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1])


def first_key(bucket: NodeId, path: bytes = b"") -> bytes:
    """A key that no version of `path`, or of a greater key, is before."""
    return node_key(bucket) + path[:KEY_BYTES_KEPT]


def behind_below(bucket: NodeId, path: bytes) -> bytes:
    """A key behind all versions of keys that begin with `path`, which is at most 470 bytes long."""
    return node_key(bucket) + path + _NO_TEXT


def end_of(bucket: NodeId) -> bytes:
    """A key behind all versions in a bucket."""
    return node_key(NodeId(bucket + 1))
