"""Bytes of key homes: the memory by which a client of a head finds the member that keeps a key.

    header        64 bytes: magic, version, vnodes, ring epoch, key of the hash
    positions     8 bytes for each vnode of the ring of keys, ascending
    homes         2 bytes for each vnode: the place of its member among the homes here; NOWHERE for any other

`lakefs.cluster.key_ring` says what the home of a key is; `lakefs.direct.key_homes` reads this.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from lakefs.layout import Layout

MAGIC: Final = b"LAKEHOME"
SUPERSEDED: Final = bytes(len(MAGIC))
FORMAT_VERSION: Final = 1
NOWHERE: Final = 0xFFFF
SEGMENT_BITS: Final = 48
"""Bits of a segment's id in a place; the bits above have the number of an index."""
HEADER: Final = Layout(
    "key homes header",
    64,
    [
        ("magic", "8s"),
        ("format_version", "I"),
        ("vnode_count", "I"),
        ("ring_epoch", "Q"),
        ("reserved", "8s"),
        ("hash_key", "32s"),
    ],
)
_VNODE_BYTES: Final = 10


def homes_bytes(vnode_count: int) -> int:
    """Return the length of the memory for a ring of so many vnodes."""
    return HEADER.size + _VNODE_BYTES * vnode_count


def pack_homes(ring_epoch: int, hash_key: bytes, positions: Sequence[int], homes: Sequence[int]) -> bytes:
    """Return the memory's content."""
    header = HEADER.pack(MAGIC, FORMAT_VERSION, len(positions), ring_epoch, b"", hash_key)
    return header + struct.pack(f"<{len(positions)}Q{len(homes)}H", *positions, *homes)
