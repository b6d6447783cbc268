"""Chunks read without a request: the shared index has their places, the page cache has their bytes.

    find in the shared index  ->  preadv(RWF_NOWAIT) from the segment, or a copy from the slab  ->  check  ->  done

A chunk that cannot be read here (the index does not have it, a page is not cached, no descriptor is held, the check
fails) is no error: the caller requests it from the engine.  Nothing here waits for a disk or sends anything.

Rules kept here:
- A hit is a hint.  Bytes are checked as the client's `Check` says.  With `Check.NONE` the index is looked up once more
  after the read, and the engine must still be connected and maintain it: so bytes of a place that was freed during the
  read are not used.
- Bytes of a slab are valid if the slot's generation was the entry's before and after the copy: then they are the bytes
  for which the entry was made, even if the entry, the slot or the engine is gone since.
- A malformed id is never found here: the engine reports the error.
- Functions may be called from several threads; descriptors in use stay open.

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
from lakefs.wire.media import IN_FILES, IN_SLABS

NOT_READ: Final = -1
_DATA: Final = int(ChunkKind.DATA)


class Places(Protocol):
    """Places of chunks, as something else maintains them; `lakefs.shared_index.table.SharedIndexReader` is one."""

    @property
    def find(self) -> Callable[[bytes], Found | None]:
        """Return the place of a chunk."""

    @property
    def find_many(self) -> Callable[[list[bytes]], list[Found | None]]:
        """Return the places of chunks, in order."""

    @property
    def find_packed(self) -> Callable[[Sequence[bytes], bytearray], int]:
        """Write the places of chunks to memory, packed; return how many were found."""

    @property
    def is_current(self) -> bool:
        """True while the places are maintained."""


class DirectReads:
    """Reads of data chunks that the shared index knows and the page cache has."""

    def __init__(
        self, index: Places, descriptors: SegmentDescriptors, check: Check, is_connected: Callable[[], bool]
    ) -> None:
        """Read by `index`; `is_connected` returns True while the engine that maintains it is connected."""
        self.index = index
        self.descriptors = descriptors
        self.check = check
        self._find = index.find
        self._is_connected = is_connected

    def is_kept(self) -> bool:
        """Return True if the engine still maintains the index: it was not replaced, and its engine is connected."""
        return self.index.is_current and self._is_connected()

    def places_of(self, chunks: Sequence[bytes]) -> list[Found | None]:
        """Return the places of chunks, in order; None: not known."""
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
        """Fill the beginning of `target` with a chunk, checked; return its length, or NOT_READ.

        After NOT_READ `target` may hold anything.
        """
        found = self._place_of(chunk)
        if found is None or found[3] > len(target):
            return NOT_READ
        return self.read_found(chunk, found, target[: found[3]])

    def read(self, chunk: ChunkId) -> bytes | None:
        """Return a chunk as bytes, checked; None when it was not read."""
        found = self._place_of(chunk)
        if found is None:
            return None
        new = NewBytes(found[3])
        length = self.read_found(chunk, found, new.view)
        content = new.take()
        return None if length == NOT_READ else content

    def read_found(self, chunk: ChunkId, found: Found, target: memoryview) -> int:
        """Like `read_into`, for a place that `find` returned; `target` is as long as the chunk."""
        medium, segment, offset, length, crc = found
        if chunk[0] != _DATA:
            return NOT_READ
        descriptors, check = self.descriptors, self.check
        vector = room_for_vector(length, check)
        if medium not in IN_FILES:
            if medium not in IN_SLABS or len(target) != length:
                return NOT_READ
            is_read = descriptors.slabs.copy_place(segment, offset, target, vector)
            return length if is_read and matches(chunk, target, check, crc, vector) else NOT_READ
        if length >= BRING_IN_FROM and not descriptors.may_be_cached(SegmentId(segment), offset, length):
            return NOT_READ  # a read would make the kernel fetch it, page by page
        held = descriptors.enter(SegmentId(segment))
        if held is None:
            return NOT_READ
        try:
            targets = [target, vector] if vector else [target]
            count = os.preadv(held.descriptor, targets, offset, held.nowait)
        except OSError:
            return NOT_READ  # not in the page cache, or an I/O error
        finally:
            descriptors.leave(held)
        # The target may be memory that another program shrank: bytes that did not arrive are not read (SIGBUS).
        if count != length + len(vector) or not matches(chunk, target, check, crc, vector):
            return NOT_READ
        if check is Check.NONE and not (self._find(chunk) == found and self.is_kept()):
            return NOT_READ
        return length
