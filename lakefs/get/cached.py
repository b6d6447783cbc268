"""Ranges of an opened object that are in memory: copied and checked in the caller's thread, without a request.

For short ranges only: a hand-over to another thread costs as much as copying and checking two or three granules.  It
never waits for a disk.  What is not in memory, and what fails its check, is left to `lakefs.get.objects.read_range`.

The checks are those of every read: a chunk that lies in the range whole by its id where the client checks by BLAKE3,
anything else by the CRC32C of its granules.
"""

from __future__ import annotations

from typing import Final

from lakefs.content.verify import Check, matches_id
from lakefs.errors import StaleGrant
from lakefs.get.opened import Opened, Piece
from lakefs.grants.descriptors import SegmentDescriptors
from lakefs.grants.grant_reads import BRING_IN_FROM, cached_crcs, cached_part, may_be_cached, read_cached
from lakefs.ids import ChunkId
from lakefs.limits import MIB
from lakefs.wire.messages import Grant

FILLED_BYTES_MAX: Final = 2 * MIB
"""Longest range that is copied and checked so: 200 us, 500 with BLAKE3."""
CRCS_MAX: Final = 256
"""Chunks of one opened object whose CRCs are kept: 64 KiB for chunks of 4 MiB."""


def fill_cached(descriptors: SegmentDescriptors, check: Check, opened: Opened, offset: int, target: memoryview) -> bool:
    """Fill `target` with the object's bytes from `offset` on; return True if all were in memory, and right.

    All of the range is in the object.  After False `target` may hold anything.
    """
    end = offset + len(target)
    for piece in opened.overlapping(offset, len(target)):
        first, last = max(offset, piece.offset), min(end, piece.offset + piece.length)
        if not fill_part(
            descriptors, check, opened, piece, first - piece.offset, target[first - offset : last - offset]
        ):
            return False
    return True


def fill_part(
    descriptors: SegmentDescriptors, check: Check, opened: Opened, piece: Piece, offset: int, target: memoryview
) -> bool:
    """Like `fill_cached`, for bytes of one chunk, from its byte `offset` on."""
    chunk, _, length = piece
    inline = opened.inline.get(chunk)
    if inline is not None:
        target[:] = memoryview(inline)[offset : offset + len(target)]
        return True
    grant = opened.grants.get(chunk)
    if grant is None or grant.logical_bytes != length:
        return False
    if len(target) >= BRING_IN_FROM and not may_be_cached(descriptors, grant, offset, len(target)):
        return False
    try:
        if check is Check.BLAKE3 and len(target) == length:
            return read_cached(descriptors, grant, 0, target) and matches_id(chunk, target)
        crcs = _crcs(descriptors, opened, chunk, grant)
        return crcs is not None and cached_part(descriptors, chunk, grant, crcs, offset, target)
    except StaleGrant:
        return False  # the read that follows locates the chunk anew


def _crcs(descriptors: SegmentDescriptors, opened: Opened, chunk: ChunkId, grant: Grant) -> bytes | None:
    """Return the CRCs of a chunk's granules, kept with the object; None if they are not in memory.  StaleGrant."""
    crcs = opened.crcs.get(chunk)
    if crcs is None:
        crcs = cached_crcs(descriptors, chunk, grant)
        if crcs is not None:
            if len(opened.crcs) >= CRCS_MAX:
                opened.crcs.clear()
            opened.crcs[chunk] = crcs
    return crcs
