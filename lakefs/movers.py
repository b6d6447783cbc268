"""Movers: how a client gets a granted chunk's bytes into its own memory, checked.

The fetch functions block and run as `Work` in a client's threads: they `pread` from the segment's file, whose
descriptor the engine sent (`segment_descriptors`), check, and are done.  No mapping is read (an I/O error under one
would be SIGBUS).

Reads that have to wait for the disk are preceded by `bring_in`, so that the page cache holds a segment in large folios.

Checks: `BLAKE3` hashes whole chunks and compares with their id, the default, and the only one that holds
against a lying engine; `CRC32C` compares granule checksums, which finds rot, torn and stale bytes; `NONE` is
"unverified", for callers that check the bytes themselves.  A range of a chunk is always checked by CRC32C, and a
manifest by BLAKE3.  A failed check is `StaleGrant`: the caller locates again, and when the place is
unchanged it reports `ChunkDamaged`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from enum import Enum

from lakefs.crc import crc32c
from lakefs.descriptors import after
from lakefs.errors import ChunkDamaged, ChunkNotFound, StaleGrant
from lakefs.ids import Buffer, ChunkId, SegmentId, chunk_id_of, id_text, kind_of
from lakefs.limits import GRANULE_BYTES, KIB
from lakefs.memory_advice import populate
from lakefs.segment_descriptors import SegmentDescriptors
from lakefs.wire.messages import Grant

MEDIUM_NONE = 0
MEDIUM_SEGMENT = 1
MEDIUM_INLINE = 2
MEDIUM_DRAM = 3
MEDIA_DRAM = 1
"""Bit of a request's `media`: grants of `MEDIUM_DRAM` are understood."""
_NO_MEMORY = memoryview(b"")
BRING_IN_FROM = 256 * KIB
"""Shorter reads may be random ones, for which reading more would be a waste."""


class Check(Enum):
    """Which check a read makes; named wherever a figure says "verified"."""

    BLAKE3 = "blake3"
    CRC32C = "crc32c"
    NONE = "unverified"
    """Whole chunks are not checked: rot, and a place that the engine gave up while it was read, go unnoticed."""


def missing_for(
    descriptors: SegmentDescriptors, grants: Iterable[Grant]
) -> tuple[list[SegmentId], list[int]]:
    """Segments, and slabs of the DRAM tier, that grants point to and that are not held or mapped."""
    segments: set[SegmentId] = set()
    slabs: set[int] = set()
    for grant in grants:
        if grant.medium == MEDIUM_DRAM:
            slabs.add(grant.segment)
        else:
            segments.add(SegmentId(grant.segment))
    return descriptors.missing(segments), descriptors.slabs.missing(slabs) if slabs else []


def fetch_into(
    descriptors: SegmentDescriptors, chunk: ChunkId, grant: Grant, target: memoryview, check: Check
) -> None:
    """Read a whole granted chunk into `target` (its logical length) and check it.  Blocks.

    StaleGrant when the bytes are not the chunk's: freed, moved, or damaged.
    """
    assert len(target) == grant.logical_bytes
    vector = _room_for_vector(grant, check)
    if grant.medium == MEDIUM_DRAM:
        _copy_from_slab(descriptors, grant, target, vector)
    else:
        with descriptors.use(SegmentId(grant.segment)) as descriptor:
            bring_in(descriptor, grant.offset, len(target) + len(vector))
            _pread_full(descriptor, [target, vector], grant.offset, chunk)
    _check_chunk(chunk, grant, target, vector, check)


def _room_for_vector(grant: Grant, check: Check) -> memoryview:
    """Memory for the vector of CRCs, where the check needs it."""
    return _NO_MEMORY if check is not Check.CRC32C else memoryview(bytearray(_vector_bytes(grant)))


def _copy_from_slab(
    descriptors: SegmentDescriptors, grant: Grant, target: memoryview, vector: memoryview
) -> None:
    descriptors.slabs.copy(grant, 0, target)
    if vector:
        descriptors.slabs.copy(grant, grant.stored_bytes, vector)


def _check_chunk(chunk: ChunkId, grant: Grant, target: memoryview, vector: memoryview, check: Check) -> None:
    if check is Check.BLAKE3:
        check_digest(chunk, target)
    elif check is Check.CRC32C:
        check_granules(chunk, target, _checked_vector(vector, chunk, grant))


def fetch_cached(
    descriptors: SegmentDescriptors, chunk: ChunkId, grant: Grant, target: memoryview, check: Check
) -> bool:
    """As `fetch_into` for a short chunk, without a wait: False when the page cache lacks some.  StaleGrant.

    What it lacks the disk begins to read: who asks for many so, and only then waits, has it read them side by side.
    """
    assert len(target) == grant.logical_bytes < BRING_IN_FROM
    vector = _room_for_vector(grant, check)
    if grant.medium == MEDIUM_DRAM:
        _copy_from_slab(descriptors, grant, target, vector)
    elif not descriptors.read_extent_cached(SegmentId(grant.segment), target, vector, grant.offset):
        return False
    _check_chunk(chunk, grant, target, vector, check)
    return True


def fetch_range(
    descriptors: SegmentDescriptors, chunk: ChunkId, grant: Grant, offset: int, length: int
) -> memoryview:
    """The bytes [offset, offset + length) of a granted chunk, checked by granule.  Blocks.  StaleGrant."""
    begin, end = granules_around(offset, length, grant.logical_bytes)
    bring_in_granules(descriptors, grant, begin, end)
    crcs = fetch_crcs(descriptors, chunk, grant)
    target = memoryview(bytearray(end - begin))
    fetch_granules(descriptors, chunk, grant, crcs, begin, target)
    return target[offset - begin : offset - begin + length]


def granules_around(offset: int, length: int, chunk_bytes: int) -> tuple[int, int]:
    """Begin and end in a chunk of the whole granules that hold [offset, offset + length) of it."""
    begin = offset - offset % GRANULE_BYTES
    return begin, min(-(-(offset + length) // GRANULE_BYTES) * GRANULE_BYTES, chunk_bytes)


def fetch_crcs(descriptors: SegmentDescriptors, chunk: ChunkId, grant: Grant) -> bytes:
    """The CRC32C of each granule of a granted chunk, 4 bytes each.  Blocks.  StaleGrant."""
    vector = memoryview(bytearray(_vector_bytes(grant)))
    _read_granted(descriptors, chunk, grant, grant.stored_bytes, vector)
    return _checked_vector(vector, chunk, grant)


def fetch_granules(
    descriptors: SegmentDescriptors, chunk: ChunkId, grant: Grant, crcs: bytes, begin: int, target: memoryview
) -> None:
    """Fill `target` with whole granules of a granted chunk, from `begin` on, and check each.  Blocks.  StaleGrant.

    `crcs` are those of the whole chunk.
    """
    _read_granted(descriptors, chunk, grant, begin, target)
    check_granules(chunk, target, _crcs_from(crcs, begin, len(target)))


def cached_crcs(descriptors: SegmentDescriptors, chunk: ChunkId, grant: Grant) -> bytes | None:
    """As `fetch_crcs`, without a wait: None when they are not in the page cache."""
    begin, vector = grant.stored_bytes, memoryview(bytearray(_vector_bytes(grant)))
    if vector and not (
        may_be_cached(descriptors, grant, begin, len(vector))
        and read_cached(descriptors, grant, begin, vector)
    ):
        return None
    return _checked_vector(vector, chunk, grant)


def cached_granules(
    descriptors: SegmentDescriptors, chunk: ChunkId, grant: Grant, crcs: bytes, begin: int, target: memoryview
) -> bool:
    """As `fetch_granules`, without a wait: False when the page cache lacks some."""
    if not read_cached(descriptors, grant, begin, target):
        return False
    check_granules(chunk, target, _crcs_from(crcs, begin, len(target)))
    return True


def may_be_cached(descriptors: SegmentDescriptors, grant: Grant, begin: int, length: int) -> bool:
    """Whether a place of the extent is in memory, or nobody knows; see `SegmentDescriptors.may_be_cached`."""
    return grant.medium == MEDIUM_DRAM or descriptors.may_be_cached(
        SegmentId(grant.segment), grant.offset + begin, length
    )


def read_cached(descriptors: SegmentDescriptors, grant: Grant, begin: int, target: memoryview) -> bool:
    """Fill `target` with bytes of the extent from `begin` on, unchecked; False: that would wait.  StaleGrant."""
    if grant.medium == MEDIUM_DRAM:
        descriptors.slabs.copy(grant, begin, target)
        return True
    return descriptors.read_cached(SegmentId(grant.segment), target, grant.offset + begin)


def _read_granted(
    descriptors: SegmentDescriptors, chunk: ChunkId, grant: Grant, begin: int, target: memoryview
) -> None:
    """Fill `target` with bytes of the extent from `begin` on, unchecked.  StaleGrant."""
    if grant.medium == MEDIUM_DRAM:
        descriptors.slabs.copy(grant, begin, target)
        return
    with descriptors.use(SegmentId(grant.segment)) as descriptor:
        _pread_full(descriptor, [target], grant.offset + begin, chunk)


def _crcs_from(crcs: bytes, begin: int, length: int) -> bytes:
    """Those of the granules that lie in [begin, begin + length) of a chunk."""
    return crcs[begin // GRANULE_BYTES * 4 : -(-(begin + length) // GRANULE_BYTES) * 4]


def bring_in_granules(descriptors: SegmentDescriptors, grant: Grant, begin: int, end: int) -> None:
    """`bring_in` for the granules [begin, end) of a granted chunk and its vector of CRCs.  Blocks.  StaleGrant."""
    if end - begin < BRING_IN_FROM or grant.medium == MEDIUM_DRAM:
        return
    with descriptors.use(SegmentId(grant.segment)) as descriptor:
        bring_in(descriptor, grant.offset + begin, end - begin)
        if vector_bytes := _vector_bytes(grant):
            # By itself it would be a single page, where the next chunk's folio then has no place.
            populate(descriptor, grant.offset + grant.stored_bytes, vector_bytes)


def bring_in(descriptor: int, offset: int, length: int) -> None:
    """Have the kernel read a place of a segment into its page cache, in folios as large as it has.  Blocks.

    Reads by several threads look random to the kernel, which then fills its cache page by page (so does
    posix_fadvise(WILLNEED)).  Single pages cost twice the CPU to fill, and are copied two to three times slower ever
    after.  See `lakefs.memory_advice`.  What fails here is left to the read that follows.  A short place is left to
    it, too.
    """
    if length >= BRING_IN_FROM:
        populate(descriptor, offset, length)


def read_ahead(descriptors: SegmentDescriptors, grant: Grant, begin: int, end: int) -> None:
    """Have [begin, end) of a granted chunk brought in behind the caller's back, with its vector of CRCs.

    As `bring_in_granules`, but it does not block, and it needs a descriptor that is held: else nothing happens.
    """
    if grant.medium == MEDIUM_SEGMENT and end - begin >= BRING_IN_FROM:
        stop = grant.stored_bytes + _vector_bytes(grant) if end >= grant.logical_bytes else end
        descriptors.ahead.want(SegmentId(grant.segment), grant.offset + begin, stop - begin)


def check_digest(chunk: ChunkId, payload: memoryview) -> None:
    """StaleGrant unless the payload hashes to the id."""
    if chunk_id_of(kind_of(chunk), payload) != chunk:
        raise StaleGrant(
            f"bytes read for chunk {id_text(chunk)} do not hash to its id", subject=id_text(chunk)
        )


def check_granules(chunk: ChunkId, payload: memoryview, crcs: bytes) -> None:
    """StaleGrant unless each granule of the payload has its CRC32C (4 bytes each, little-endian)."""
    starts = range(0, len(payload), GRANULE_BYTES)
    found = struct.pack(
        f"<{len(starts)}I", *[crc32c(payload[start : start + GRANULE_BYTES]) for start in starts]
    )
    if found != crcs:
        raise StaleGrant(
            f"a granule read for chunk {id_text(chunk)} does not match its CRC32C", subject=id_text(chunk)
        )


def require_present(chunk: ChunkId, grant: Grant, name: str) -> None:
    """ChunkNotFound when the engine answered that it does not have the chunk of an object."""
    if grant.medium == MEDIUM_NONE:
        raise ChunkNotFound(f"{name}: chunk {id_text(chunk)} is not in the store", subject=name)


def damaged(chunk: ChunkId, name: str, reason: str = "") -> ChunkDamaged:
    """The error for bytes that fail their check though their place is current; `reason` is the engine's."""
    why = f" ({reason})" if reason else ""
    return ChunkDamaged(
        f"{name} is damaged on disk and was not read: chunk {id_text(chunk)}{why}; other objects are served; "
        f"put it again with: lake put FILE {name}; see what else is damaged with: lake fsck --full",
        subject=name,
    )


def _vector_bytes(grant: Grant) -> int:
    """Length of the vector of CRCs behind the payload; a payload of one granule has none."""
    granules = -(-grant.stored_bytes // GRANULE_BYTES)
    return 4 * granules if granules > 1 else 0


def _checked_vector(vector: memoryview, chunk: ChunkId, grant: Grant) -> bytes:
    """The vector that was read, checked by the grant's CRC; for one granule the grant's CRC itself.  StaleGrant."""
    if not vector:
        return grant.crc.to_bytes(4, "little")
    if crc32c(vector) != grant.crc:
        raise StaleGrant(f"the checksums of chunk {id_text(chunk)} do not match", subject=id_text(chunk))
    return bytes(vector)


def _pread_full(descriptor: int, targets: Sequence[memoryview], offset: int, chunk: ChunkId) -> None:
    """Fill memory, one piece behind the other, from the bytes at `offset`.  StaleGrant."""
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
