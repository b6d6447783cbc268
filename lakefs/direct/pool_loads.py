"""Loads into a pool without a request: the shared index says where, the client copies from the page cache.

    find in the shared index  ->  is it cached  ->  as any read of chunks by their ids (`lakefs.direct.chunk_reads`),
    into the pool

Rules kept here:
- Either every chunk of a load is known, fits its slot, and no two slots overlap; or nothing is read here, and the
  engine says what is wrong.
- What the page cache does not have is left to the engine, which reads past it: a client's pool is the cache.
- The kernel fills the pool, and what did not arrive whole is not looked at: memory that another program has shrunk is
  an error of the engine's answer.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from lakefs.grants.descriptors import SegmentDescriptors
from lakefs.ids import SegmentId
from lakefs.shared_index.table_format import Found
from lakefs.wire.grants import MEDIUM_SEGMENT


def slots_fit(found: Sequence[Found], offsets: Sequence[int], rooms: Sequence[int], pool_bytes: int) -> bool:
    """Whether chunks at these places go to these offsets of a pool, each within its room and beside all others."""
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
    """Those of the places that the page cache has, as far as anybody knows; neighbours are asked for together (2 us).

    A read of what is not there would have the kernel fetch it, page by page, beside the engine.
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
    """Segments that a descriptor would be needed of."""
    return descriptors.missing({SegmentId(place[1]) for place in found if place[0] == MEDIUM_SEGMENT})
