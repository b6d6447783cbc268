"""Reads of granted chunks: bytes from a segment's file or a DRAM slab into a client's own memory, checked.

The fetch functions block and run as `Work` in a client's threads.  They `pread` from the segment's file, whose
descriptor the engine sent (`lakefs.grants.descriptors`), or copy from a slab (`lakefs.grants.dram_slabs`), and check
the bytes.  No mapping of a file on a disk is read (an I/O error under one would be SIGBUS).

`bring_in` precedes reads that have to wait for the disk, so that the page cache holds a segment in large folios.

`lakefs.content.verify` checks the bytes.  A failed check is `StaleGrant`: the caller locates the chunk again and reads
once more; if that fails too, the engine sends the bytes or reports the damage (`lakefs.get.fetch`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from lakefs.content.verify import (
    NO_VECTOR,
    Check,
    crcs_between,
    crcs_of,
    granule_crcs,
    granule_crcs_around,
    granules_around,
    matches,
    mismatch,
    room_for_vector,
    vector_bytes,
)
from lakefs.errors import ChunkNotFound, StaleGrant
from lakefs.grants.descriptors import SegmentDescriptors
from lakefs.host.descriptors import after
from lakefs.host.memory_advice import populate
from lakefs.ids import Buffer, ChunkId, SegmentId, id_text
from lakefs.limits import KIB
from lakefs.wire.grants import Grant
from lakefs.wire.media import IN_FILES, IN_SLABS, MEDIUM_NONE

BRING_IN_FROM = 256 * KIB
"""Shortest read that brings in pages first.  Shorter reads may be random, and reading more would be a waste."""


def missing_for(descriptors: SegmentDescriptors, grants: Iterable[Grant]) -> tuple[list[SegmentId], list[int]]:
    """Return the segments and the DRAM slabs that grants point to and that are not held or mapped."""
    segments: set[SegmentId] = set()
    slabs: set[int] = set()
    for grant in grants:
        if grant.medium in IN_SLABS:
            slabs.add(grant.segment)
        else:
            segments.add(SegmentId(grant.segment))
    return descriptors.missing(segments), descriptors.slabs.missing(slabs) if slabs else []


def fetch_into(descriptors: SegmentDescriptors, chunk: ChunkId, grant: Grant, target: memoryview, check: Check) -> None:
    """Read a whole granted chunk into `target` (its logical length) and check it.  Blocks.

    StaleGrant when the bytes are not the chunk's: freed, moved, or damaged.
    """
    assert len(target) == grant.logical_bytes
    vector = room_for_vector(grant.stored_bytes, check)
    if grant.medium in IN_SLABS:
        descriptors.slabs.copy(grant, 0, target, vector)
    else:
        with descriptors.use(SegmentId(grant.segment)) as descriptor:
            bring_in(descriptor, grant.offset, len(target) + len(vector))
            _pread_full(descriptor, [target, vector], grant.offset, chunk)
    if not matches(chunk, target, check, grant.crc, vector):
        raise mismatch(chunk, check)


def fetch_cached(
    descriptors: SegmentDescriptors, chunk: ChunkId, grant: Grant, target: memoryview, check: Check
) -> bool:
    """Like `fetch_into` for a short chunk, without a wait: False when the page cache lacks some bytes.  StaleGrant.

    The disk begins to read missing bytes: a caller that tries many chunks before it waits has them read side by side.
    """
    assert len(target) == grant.logical_bytes < BRING_IN_FROM
    vector = room_for_vector(grant.stored_bytes, check)
    if not read_pieces_cached(descriptors, grant, 0, [target, vector] if vector else [target]):
        return False
    if not matches(chunk, target, check, grant.crc, vector):
        raise mismatch(chunk, check)
    return True


def fetch_range(descriptors: SegmentDescriptors, chunk: ChunkId, grant: Grant, offset: int, length: int) -> memoryview:
    """Return the bytes [offset, offset + length) of a granted chunk, checked by granule.  Blocks.  StaleGrant."""
    begin, end = granules_around(offset, length, grant.logical_bytes)
    bring_in_granules(descriptors, grant, begin, end)
    crcs = fetch_crcs(descriptors, chunk, grant)
    target = memoryview(bytearray(end - begin))
    fetch_granules(descriptors, chunk, grant, crcs, begin, target)
    return target[offset - begin : offset - begin + length]


def fetch_crcs(descriptors: SegmentDescriptors, chunk: ChunkId, grant: Grant) -> bytes:
    """Return the CRC32C of each granule of a granted chunk, 4 bytes each.  Blocks.  StaleGrant."""
    vector = room_for_vector(grant.stored_bytes)
    _read_granted(descriptors, chunk, grant, grant.stored_bytes, vector)
    return crcs_of(chunk, vector, grant.crc)


def fetch_granules(
    descriptors: SegmentDescriptors, chunk: ChunkId, grant: Grant, crcs: bytes, begin: int, target: memoryview
) -> None:
    """Fill `target` with whole granules of a granted chunk, from `begin` on, and check each.  Blocks.  StaleGrant.

    `crcs` are the CRCs of the whole chunk.
    """
    _read_granted(descriptors, chunk, grant, begin, target)
    _check_granules(chunk, crcs, begin, target)


def cached_crcs(descriptors: SegmentDescriptors, chunk: ChunkId, grant: Grant) -> bytes | None:
    """Like `fetch_crcs`, without a wait: None when the CRCs are not in the page cache."""
    begin, vector = grant.stored_bytes, room_for_vector(grant.stored_bytes)
    if vector and not (
        may_be_cached(descriptors, grant, begin, len(vector)) and read_cached(descriptors, grant, begin, vector)
    ):
        return None
    return crcs_of(chunk, vector, grant.crc)


def cached_granules(
    descriptors: SegmentDescriptors, chunk: ChunkId, grant: Grant, crcs: bytes, begin: int, target: memoryview
) -> bool:
    """Like `fetch_granules`, without a wait: False when the page cache lacks some bytes."""
    if not read_cached(descriptors, grant, begin, target):
        return False
    _check_granules(chunk, crcs, begin, target)
    return True


def cached_part(
    descriptors: SegmentDescriptors, chunk: ChunkId, grant: Grant, crcs: bytes, offset: int, target: memoryview
) -> bool:
    """Like `cached_granules`, for bytes from `offset` on that need not be whole granules.  StaleGrant.

    The bytes are copied once, straight into `target`; what else their granules hold is read beside it.
    """
    begin, end = granules_around(offset, len(target), grant.logical_bytes)
    if end - begin == len(target):
        pieces = [target]
        lead = trail = NO_VECTOR
    else:
        beside = memoryview(bytearray(end - begin - len(target)))
        lead, trail = beside[: offset - begin], beside[offset - begin :]
        pieces = [piece for piece in (lead, target, trail) if piece]
    if not read_pieces_cached(descriptors, grant, begin, pieces):
        return False
    if granule_crcs_around(lead, target, trail) != crcs_between(crcs, begin, end):
        raise mismatch(chunk, Check.CRC32C)
    return True


def may_be_cached(descriptors: SegmentDescriptors, grant: Grant, begin: int, length: int) -> bool:
    """Return True if a place of the extent is in memory, or unknown; see `SegmentDescriptors.may_be_cached`."""
    return grant.medium in IN_SLABS or descriptors.may_be_cached(SegmentId(grant.segment), grant.offset + begin, length)


def read_cached(descriptors: SegmentDescriptors, grant: Grant, begin: int, target: memoryview) -> bool:
    """Fill `target` with bytes of the extent from `begin` on, unchecked; False if that would wait.  StaleGrant."""
    if grant.medium in IN_SLABS:
        descriptors.slabs.copy(grant, begin, target)
        return True
    return descriptors.read_cached(SegmentId(grant.segment), target, grant.offset + begin)


def read_pieces_cached(
    descriptors: SegmentDescriptors, grant: Grant, begin: int, targets: Sequence[memoryview]
) -> bool:
    """Like `read_cached`, for pieces of memory one after the other."""
    if grant.medium in IN_SLABS:
        for target in targets:
            descriptors.slabs.copy(grant, begin, target)
            begin += len(target)
        return True
    return descriptors.read_pieces_cached(SegmentId(grant.segment), targets, grant.offset + begin)


def _read_granted(
    descriptors: SegmentDescriptors, chunk: ChunkId, grant: Grant, begin: int, target: memoryview
) -> None:
    """Fill `target` with bytes of the extent from `begin` on, unchecked.  StaleGrant."""
    if grant.medium in IN_SLABS:
        descriptors.slabs.copy(grant, begin, target)
        return
    with descriptors.use(SegmentId(grant.segment)) as descriptor:
        _pread_full(descriptor, [target], grant.offset + begin, chunk)


def _check_granules(chunk: ChunkId, crcs: bytes, begin: int, target: memoryview) -> None:
    """Raise StaleGrant unless these are the chunk's granules from `begin` on; `crcs` are of the whole chunk."""
    if granule_crcs(target) != crcs_between(crcs, begin, begin + len(target)):
        raise mismatch(chunk, Check.CRC32C)


def bring_in_granules(descriptors: SegmentDescriptors, grant: Grant, begin: int, end: int) -> None:
    """Do `bring_in` for granules [begin, end) of a granted chunk and its vector of CRCs.  Blocks.  StaleGrant."""
    if end - begin < BRING_IN_FROM or grant.medium in IN_SLABS:
        return
    with descriptors.use(SegmentId(grant.segment)) as descriptor:
        bring_in(descriptor, grant.offset + begin, end - begin)
        if vector_length := vector_bytes(grant.stored_bytes):
            # Read later, the vector would be a single page, which keeps the next chunk from having a large folio.
            populate(descriptor, grant.offset + grant.stored_bytes, vector_length)


def bring_in(descriptor: int, offset: int, length: int) -> None:
    """Have the kernel read a place of a segment into its page cache, in folios as large as it has.  Blocks.

    Reads by several threads look random to the kernel, which then fills its cache page by page (so does
    posix_fadvise(WILLNEED)).  Single pages cost twice the CPU to fill, and are copied two to three times slower ever
    after.  See `lakefs.host.memory_advice`.  Errors are left to the read that follows; so are places shorter than
    `BRING_IN_FROM`.
    """
    if length >= BRING_IN_FROM:
        populate(descriptor, offset, length)


def drop_pages(descriptors: SegmentDescriptors, grants: Iterable[Grant]) -> None:
    """Have the kernel drop the cached pages of these extents, for a reader that keeps their bytes elsewhere.

    Only pages that are wholly in an extent, and clean.  Blocks.  Does nothing for extents whose segment is not held.
    """
    for grant in grants:
        if grant.medium in IN_FILES and (held := descriptors.enter(SegmentId(grant.segment))) is not None:
            try:
                os.posix_fadvise(held.descriptor, grant.offset, grant.stored_bytes, os.POSIX_FADV_DONTNEED)
            finally:
                descriptors.leave(held)


def read_ahead(descriptors: SegmentDescriptors, grant: Grant, begin: int, end: int) -> None:
    """Start to bring in [begin, end) of a granted chunk in another thread, with its vector of CRCs.

    Like `bring_in_granules`, but does not block; does nothing if the segment's descriptor is not held.
    """
    if grant.medium in IN_FILES and end - begin >= BRING_IN_FROM:
        stop = grant.stored_bytes + vector_bytes(grant.stored_bytes) if end >= grant.logical_bytes else end
        descriptors.ahead.want(SegmentId(grant.segment), grant.offset + begin, stop - begin)


def require_present(chunk: ChunkId, grant: Grant, name: str) -> None:
    """Raise ChunkNotFound if the engine answered that it does not have the chunk of an object."""
    if grant.medium == MEDIUM_NONE:
        raise ChunkNotFound(f"{name}: chunk {id_text(chunk)} is not in the store", subject=name)


def _pread_full(descriptor: int, targets: Sequence[memoryview], offset: int, chunk: ChunkId) -> None:
    """Fill pieces of memory, one after the other, with the bytes at `offset`.  StaleGrant."""
    missing: Sequence[Buffer] = [target for target in targets if target]
    while missing:
        try:
            count = os.preadv(descriptor, missing, offset)
        except OSError as error:
            raise StaleGrant(
                f"chunk {id_text(chunk)} cannot be read: {error.strerror}", subject=id_text(chunk)
            ) from error
        if count == 0:
            raise StaleGrant(f"the segment ends inside chunk {id_text(chunk)}", subject=id_text(chunk))
        offset += count
        missing = after(missing, count)
