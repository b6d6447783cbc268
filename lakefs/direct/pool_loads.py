"""Loads into a pool without a request: chunks that the client copies from the page cache or the DRAM tier itself.

    find in the shared index  ->  is it cached  ->  like any direct read (`lakefs.direct.chunk_reads`), into the pool

Rules kept here:
- Either every chunk of a load is known, fits its slot, and no two slots overlap; or nothing is read here, and the
  engine loads all of them or reports the error.
- Chunks that the page cache does not have are left to the engine, which reads past it: a client's pool is the cache.
  So the cache is asked before each read, which would make the kernel fetch the chunk in addition to the engine.
- The kernel fills the pool, also from the DRAM tier, and bytes that did not arrive whole are not read here: if another
  program has shrunk the memory, the engine's answer reports it, where a copy here would raise a signal.
- Chunks of the DRAM tier of more than a granule are left to the engine if they are checked by CRC32C.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from lakefs.ids import SegmentId
from lakefs.shared_index.table_format import Found, unpack_place
from lakefs.wire.media import IN_FILES, IN_SLABS


def slots_fit(found: Sequence[Found], offsets: Sequence[int], rooms: Sequence[int], pool_bytes: int) -> bool:
    """Return True if the chunks fit at these offsets of a pool, each within its room and none overlapping another."""
    lengths = [place[3] for place in found]
    if rooms and any(map(operator.gt, lengths, rooms)):
        return False
    end = 0
    for offset, length in sorted(zip(offsets, lengths, strict=True)):
        if offset < end:
            return False
        end = offset + length
    return end <= pool_bytes


def segments_of(found: Sequence[Found]) -> set[SegmentId]:
    """Return the segments in which these places lie."""
    return {SegmentId(place[1]) for place in found if place[0] in IN_FILES}


def slabs_of(found: Sequence[Found]) -> set[int]:
    """Return the slabs of the DRAM tier in which these places lie."""
    return {unpack_place(place[1])[0] for place in found if place[0] in IN_SLABS}
