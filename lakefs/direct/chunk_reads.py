"""Chunks read without a request: the shared index says where, the page cache has the bytes, the check decides.

    find in the shared index  ->  preadv(RWF_NOWAIT) from the segment, or a copy from the slab  ->  check  ->  done

Whatever is odd (the index does not know, a page is not cached, no descriptor is held, the check fails) is no error:
the caller asks the engine, which knows.  Nothing here waits for a disk or talks to anybody.

Rules kept here:
- A hit is a hint.  Bytes are checked as the client's `Check` says; with `Check.NONE` the index is asked once more
  behind the read, and whether the engine still keeps it and is there, so that bytes of a place that was given up
  meanwhile are not taken.
- Bytes of a slab count when the slot's generation was the entry's before and after they were copied: then they are
  those for which the entry was made, also when the entry, the slot or the engine have gone since.
- What is no chunk's id is known nowhere: the engine says so.
- May be called from several threads; descriptors in use stay open.

Many chunks at once: `lakefs.direct.batch_reads`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from lakefs.content.verify import Check, matches, room_for_vector
from lakefs.grants.descriptors import SegmentDescriptors
from lakefs.grants.grant_reads import BRING_IN_FROM
from lakefs.host.new_bytes import NewBytes
from lakefs.ids import ChunkId, ChunkKind, SegmentId
from lakefs.shared_index.table_format import Found
from lakefs.wire.grants import MEDIUM_DRAM, MEDIUM_SEGMENT

NOT_READ: Final = -1
_DATA: Final = int(ChunkKind.DATA)


class SharedIndex(Protocol):
    """What is asked of a `lakefs.shared_index.reader.SharedIndexReader`."""

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
        """The same as numbers, a `lakefs.shared_index.table_format.PLACE` each; how many were found."""
        ...


class DirectReads:
    """Reads of data chunks that the shared index knows and the page cache has."""

    def __init__(
        self,
        index: SharedIndex,
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
        if chunk[0] != _DATA:
            return NOT_READ
        descriptors, check = self.descriptors, self.check
        vector = room_for_vector(length, check)
        if medium != MEDIUM_SEGMENT:
            if medium != MEDIUM_DRAM or len(target) != length:
                return NOT_READ
            is_read = descriptors.slabs.copy_place(segment, offset, target, vector)
            return length if is_read and matches(chunk, target, check, crc, vector) else NOT_READ
        if length >= BRING_IN_FROM and not descriptors.may_be_cached(SegmentId(segment), offset, length):
            return NOT_READ  # or the kernel would begin to fetch it, page by page
        held = descriptors.enter(SegmentId(segment))
        if held is None:
            return NOT_READ
        try:
            targets = [target, vector] if vector else [target]
            count = os.preadv(held.descriptor, targets, offset, held.nowait)
        except OSError:
            return NOT_READ  # not in the page cache, or not to be had
        finally:
            descriptors.leave(held)
        # Memory that another program shrank is not looked at past what arrived: that would be SIGBUS.
        if count != length + len(vector) or not matches(chunk, target, check, crc, vector):
            return NOT_READ
        if check is Check.NONE and not (self._find(chunk) == found and self.is_kept()):
            return NOT_READ
        return length
