"""Movers: how a client gets a granted chunk's bytes into its own memory, checked.

`SegmentDescriptors` holds the read-only descriptors that the engine sent.  The fetch functions block and run as
`Work` in a client's threads: they `pread` from the segment file, check, and are done.  No mapping is read (an
I/O error under one would be SIGBUS).

Checks: `BLAKE3` hashes whole chunks and compares with their id, the default, and the only one that holds
against a lying engine; `CRC32C` compares granule checksums, which finds rot, torn and stale bytes.  A range of a
chunk is always checked by CRC32C.  A failed check is `StaleGrant`: the caller locates again, and when the place is
unchanged it reports `ChunkDamaged`.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from lakefs.crc import crc32c
from lakefs.errors import ChunkDamaged, ChunkNotFound, StaleGrant
from lakefs.ids import Buffer, ChunkId, SegmentId, chunk_id_of, id_text, kind_of
from lakefs.limits import GRANULE_BYTES
from lakefs.sockets import after
from lakefs.wire.messages import Grant

MEDIUM_NONE = 0
MEDIUM_SEGMENT = 1
MEDIUM_INLINE = 2
DESCRIPTORS_MAX = 512


class Check(Enum):
    """Which check a read makes; named wherever a figure says "verified"."""

    BLAKE3 = "blake3"
    CRC32C = "crc32c"


@dataclass
class _Held:
    """A descriptor, and how many fetches use it."""

    descriptor: int
    users: int = 0
    dropped: bool = False


class SegmentDescriptors:
    """Read-only descriptors of segments by id, at most 512; the least recently used idle one is closed first.

    Used from the client's threads; a descriptor is never closed while a fetch uses it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[SegmentId, _Held] = OrderedDict()

    def missing(self, segments: set[SegmentId]) -> list[SegmentId]:
        """Those of `segments` that no descriptor is held for."""
        with self._lock:
            return sorted(segment for segment in segments if segment not in self._open)

    def add(self, segment: SegmentId, descriptor: int) -> None:
        """Take over a descriptor; a second one for the same segment is closed at once."""
        with self._lock:
            if segment in self._open:
                os.close(descriptor)
                return
            self._open[segment] = _Held(descriptor)
            self._evict()

    @contextmanager
    def use(self, segment: SegmentId) -> Iterator[int]:
        """The descriptor, kept open meanwhile.  StaleGrant when it is not held."""
        with self._lock:
            held = self._open.get(segment)
            if held is None:
                raise StaleGrant(f"no descriptor of segment {segment:x} is held", subject=f"{segment:x}")
            self._open.move_to_end(segment)
            held.users += 1
        try:
            yield held.descriptor
        finally:
            with self._lock:
                held.users -= 1
                if held.dropped and not held.users:
                    os.close(held.descriptor)

    def close(self) -> None:
        """Close all; those that a fetch uses when it is done."""
        with self._lock:
            for held in self._open.values():
                held.dropped = True
                if not held.users:
                    os.close(held.descriptor)
            self._open.clear()

    def _evict(self) -> None:
        for segment, held in list(self._open.items()):
            if len(self._open) <= DESCRIPTORS_MAX:
                return
            if not held.users:
                os.close(held.descriptor)
                del self._open[segment]


def fetch_into(
    descriptors: SegmentDescriptors, chunk: ChunkId, grant: Grant, target: memoryview, check: Check
) -> None:
    """Read a whole granted chunk into `target` (its logical length) and check it.  Blocks.

    StaleGrant when the bytes are not the chunk's: freed, moved, or damaged.
    """
    assert len(target) == grant.logical_bytes
    vector = memoryview(bytearray(0 if check is Check.BLAKE3 else _vector_bytes(grant)))
    with descriptors.use(SegmentId(grant.segment)) as descriptor:
        _pread_full(descriptor, [target, vector], grant.offset, chunk)
    if check is Check.BLAKE3:
        check_digest(chunk, target)
    else:
        check_granules(chunk, target, _checked_vector(vector, chunk, grant))


def fetch_range(
    descriptors: SegmentDescriptors, chunk: ChunkId, grant: Grant, offset: int, length: int
) -> memoryview:
    """The bytes [offset, offset + length) of a granted chunk, checked by granule.  Blocks.  StaleGrant."""
    crcs = fetch_crcs(descriptors, chunk, grant)
    found = fetch_granules(descriptors, chunk, grant, crcs, offset, length)
    assert found is not None, "without RWF_NOWAIT a read waits"
    return found


def fetch_crcs(descriptors: SegmentDescriptors, chunk: ChunkId, grant: Grant) -> bytes:
    """The CRC32C of each granule of a granted chunk, 4 bytes each.  Blocks.  StaleGrant."""
    vector = memoryview(bytearray(_vector_bytes(grant)))
    with descriptors.use(SegmentId(grant.segment)) as descriptor:
        _pread_full(descriptor, [vector], grant.offset + grant.stored_bytes, chunk)
    return _checked_vector(vector, chunk, grant)


def fetch_granules(
    descriptors: SegmentDescriptors,
    chunk: ChunkId,
    grant: Grant,
    crcs: bytes,
    offset: int,
    length: int,
    *,
    wait: bool = True,
) -> memoryview | None:
    """As `fetch_range`, with the granules' CRCs known; without `wait` None when the page cache lacks the bytes."""
    begin = offset - offset % GRANULE_BYTES
    end = min(-(-(offset + length) // GRANULE_BYTES) * GRANULE_BYTES, grant.logical_bytes)
    target = memoryview(bytearray(end - begin))
    with descriptors.use(SegmentId(grant.segment)) as descriptor:
        if wait:
            _pread_full(descriptor, [target], grant.offset + begin, chunk)
        elif not _pread_cached(descriptor, target, grant.offset + begin):
            return None
    first = begin // GRANULE_BYTES
    check_granules(chunk, target, crcs[4 * first : 4 * -(-end // GRANULE_BYTES)])
    return target[offset - begin : offset - begin + length]


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


def require_present(chunk: ChunkId, grant: Grant) -> None:
    """ChunkNotFound when the engine answered that it does not have the chunk."""
    if grant.medium == MEDIUM_NONE:
        raise ChunkNotFound(f"chunk {id_text(chunk)} is not in the store", subject=id_text(chunk))


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


def _pread_cached(descriptor: int, target: memoryview, offset: int) -> bool:
    try:
        return os.preadv(descriptor, [target], offset, os.RWF_NOWAIT) == len(target)
    except OSError:
        return False  # not cached, or not to be had: a read that waits will tell


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
