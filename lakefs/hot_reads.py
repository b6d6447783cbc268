"""Reading chunks without asking the engine: the hot index says where, the page cache has the bytes, the check decides.

    find in the hot index  ->  preadv(RWF_NOWAIT) from the segment  ->  CRC32C or BLAKE3  ->  done

What the engine has in memory is copied from there (`lakefs.hot_slabs`).

Whatever is odd (the index does not know, a page is not cached, no descriptor is held, the check fails) is no error:
the caller asks the engine, which knows.  Nothing here waits for a disk or talks to anybody.

Rules kept here:
- A hit is a hint.  Bytes are checked as the client's `Check` says; with `Check.NONE` the index is asked once more
  behind the read, and whether the engine still keeps it and is there, so that bytes of a place that was given up
  meanwhile are not taken.
- What is no chunk's id is known nowhere: the engine says so.
- May be called from several threads; descriptors in use stay open.

Many chunks at once: `lakefs.hot_batch`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from blake3 import blake3

from lakefs.crc import crc32c
from lakefs.errors import StaleGrant
from lakefs.hot_slabs import is_read_in_slab
from lakefs.ids import Buffer, ChunkId, ChunkKind, SegmentId
from lakefs.limits import GRANULE_BYTES
from lakefs.movers import BRING_IN_FROM, MEDIUM_DRAM, MEDIUM_SEGMENT, Check, check_granules
from lakefs.new_bytes import NewBytes
from lakefs.segment_descriptors import SegmentDescriptors

Found = tuple[int, int, int, int, int]
"""(medium, segment, offset, stored_bytes, crc) of a chunk, as in a grant."""
NOT_READ: Final = -1
_DATA: Final = int(ChunkKind.DATA)


class HotIndex(Protocol):
    """What is asked of a `lakefs.hot_index.HotIndexReader`."""

    @property
    def find(self) -> Callable[[bytes], Found | None]:
        """Where a chunk is; None: not known."""
        ...

    @property
    def is_current(self) -> bool:
        """Whether the engine still keeps it up to date."""
        ...

    def find_many(self, chunks: list[bytes]) -> list[Found | None]:
        """`find` of each, in order."""
        ...

    def find_packed(self, chunks: list[bytes], into: bytearray | memoryview) -> int:
        """The same as numbers, a `lakefs.hot_table_format.PLACE` each; how many were found."""
        ...


class HotReads:
    """Reads of data chunks that the hot index knows and the page cache has."""

    def __init__(
        self,
        index: HotIndex,
        descriptors: SegmentDescriptors,
        check: Check,
        is_connected: Callable[[], bool],
    ) -> None:
        """`is_connected`: whether the engine that keeps the index is there still."""
        self.index = index
        self.descriptors = descriptors
        self.check = check
        self._find = index.find
        self._is_connected = is_connected

    def is_kept(self) -> bool:
        """Whether the engine keeps the index still: it was neither replaced, nor has its engine gone."""
        return self.index.is_current and self._is_connected()

    def places_of(self, chunks: Sequence[bytes]) -> list[Found | None]:
        """Where chunks are, in order; None: not known."""
        try:
            return self.index.find_many(list(chunks))
        except ValueError:
            return [None] * len(chunks)

    def _place_of(self, chunk: ChunkId) -> Found | None:
        try:
            return self._find(chunk)
        except ValueError:
            return None

    def read_into(self, chunk: ChunkId, target: memoryview) -> int:
        """Fill the beginning of `target` with a chunk, checked; its length, or NOT_READ: then it may hold anything."""
        found = self._place_of(chunk)
        if found is None or found[3] > len(target):
            return NOT_READ
        return self.read_found(chunk, found, target[: found[3]])

    def read(self, chunk: ChunkId) -> bytes | None:
        """A chunk as bytes, checked; None when it was not read."""
        found = self._place_of(chunk)
        if found is None:
            return None
        new = NewBytes(found[3])
        length = self.read_found(chunk, found, new.view)
        content = new.take()
        return None if length == NOT_READ else content

    def read_found(self, chunk: ChunkId, found: Found, target: memoryview) -> int:
        """As `read_into`, of what `find` has answered; `target` is as long as the chunk."""
        medium, segment, offset, length, crc = found
        descriptors = self.descriptors
        if medium != MEDIUM_SEGMENT or chunk[0] != _DATA:
            if medium != MEDIUM_DRAM or chunk[0] != _DATA:
                return NOT_READ
            is_read = is_read_in_slab(descriptors.slabs, chunk, found, target, self.check)
            return length if is_read else NOT_READ
        if length >= BRING_IN_FROM and not descriptors.may_be_cached(SegmentId(segment), offset, length):
            return NOT_READ  # or the kernel would begin to fetch it, page by page
        check = self.check
        vector = _vector_of(length) if check is Check.CRC32C and length > GRANULE_BYTES else None
        held = descriptors.enter(SegmentId(segment))
        if held is None:
            return NOT_READ
        try:
            targets: list[Buffer] = [target] if vector is None else [target, vector]
            count = os.preadv(held.descriptor, targets, offset, held.nowait)
        except OSError:
            return NOT_READ  # not in the page cache, or not to be had
        finally:
            descriptors.leave(held)
        if vector is not None:
            is_right = count == length + len(vector) and _matches_vector(chunk, target, vector, crc)
        elif check is Check.BLAKE3:
            # Memory that another program shrank is not looked at past what arrived: that would be SIGBUS.
            is_right = count == length and blake3(target).digest() == chunk[1:]
        elif check is Check.CRC32C:
            is_right = count == length and crc32c(target) == crc
        else:
            is_right = count == length and self._find(chunk) == found and self.is_kept()
        return length if is_right else NOT_READ


def _vector_of(length: int) -> bytearray:
    return bytearray(4 * -(-length // GRANULE_BYTES))


def _matches_vector(chunk: ChunkId, payload: memoryview, vector: bytearray, crc: int) -> bool:
    """Whether the granules have the checksums behind them, and those their own."""
    if crc32c(vector) != crc:
        return False
    try:
        check_granules(chunk, payload, bytes(vector))
    except StaleGrant:
        return False
    return True
