"""Loads into a pool without a request: selects the chunks that the client copies from the page cache itself.

    find in the shared index  ->  is it cached  ->  like any direct read (`lakefs.direct.chunk_reads`), into the pool

Rules kept here:
- Either every chunk of a load is known, fits its slot, and no two slots overlap; or nothing is read here, and the
  engine loads all of them or reports the error.
- Chunks that the page cache does not have are left to the engine, which reads past it: a client's pool is the cache.
  So the cache is asked before each read, which would make the kernel fetch the chunk in addition to the engine.
  Chunks of the DRAM tier are left to it, too: it copies with a system call, which fails if the pool was shrunk, while
  a copy here would raise a signal.
- The kernel fills the pool, and bytes that did not arrive whole are not read here: if another program has shrunk the
  memory, the engine's answer reports it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from lakefs.ids import SegmentId
from lakefs.shared_index.table_format import Found
from lakefs.wire.media import IN_FILES


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


def in_segments(found: Sequence[Found]) -> list[int]:
    """Return the indexes of the places that lie in segments."""
    return [at for at, place in enumerate(found) if place[0] in IN_FILES]


def segments_of(found: Sequence[Found]) -> set[SegmentId]:
    """Return the segments in which these places lie."""
    return {SegmentId(place[1]) for place in found if place[0] in IN_FILES}
