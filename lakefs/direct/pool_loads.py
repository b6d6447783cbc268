"""Loads into a pool without a request: selects the chunks that the client copies from the page cache itself.

    find in the shared index  ->  is it cached  ->  like any direct read (`lakefs.direct.chunk_reads`), into the pool

Rules kept here:
- Either every chunk of a load is known, fits its slot, and no two slots overlap; or nothing is read here, and the
  engine loads all of them or reports the error.
- Chunks that the page cache does not have are left to the engine, which reads past it: a client's pool is the cache.
  Chunks of the DRAM tier are left to it, too: it copies with a system call, which fails if the pool was shrunk, while
  a copy here would raise a signal.
- The kernel fills the pool, and bytes that did not arrive whole are not read here: if another program has shrunk the
  memory, the engine's answer reports it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from lakefs.grants.descriptors import SegmentDescriptors
from lakefs.ids import SegmentId
from lakefs.shared_index.table_format import Found
from lakefs.wire.grants import MEDIUM_SEGMENT


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


def cached_indexes(descriptors: SegmentDescriptors, found: Sequence[Found]) -> list[int]:
    """Return indexes of the places that the page cache has, or may have; neighbours are checked together (2 us).

    A read of a place that is not cached would make the kernel fetch it, page by page, in addition to the engine.
    """
    cached: list[int] = []
    first = 0
    while first < len(found):
        medium, segment, begin, length, _ = found[first]
        behind, end = first + 1, begin + length
        while behind < len(found) and found[behind][:3] == (medium, segment, end):
            end += found[behind][3]
            behind += 1
        if medium == MEDIUM_SEGMENT and descriptors.may_be_cached(SegmentId(segment), begin, end - begin):
            cached += range(first, behind)
        first = behind
    return cached


def missing_segments(descriptors: SegmentDescriptors, found: Sequence[Found]) -> list[SegmentId]:
    """Return the segments of these places for which no descriptor is held."""
    return descriptors.missing({SegmentId(place[1]) for place in found if place[0] == MEDIUM_SEGMENT})
