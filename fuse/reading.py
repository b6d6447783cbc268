"""Ranges of one opened object for the kernel: from the page cache at once, else in a thread, each granule checked.

What is in the page cache of the segment's file is read in the loop (`RWF_NOWAIT`: a copy, no wait); a thread's round
trip would cost more than the copy.  What is not, is read in a thread, with the next chunk asked for ahead when the
reads follow each other.  The checksums of each chunk are read once and kept while the object is open.

When a check fails, or the place is gone, `read_range` takes over: it locates again, and has the engine read when that
does not help, which knows what damage is.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Final

from lakefs.client.trio_lake import TrioLake
from lakefs.errors import StaleGrant
from lakefs.getting import Access, Opened, Piece, locate, read_range
from lakefs.ids import Buffer, ChunkId, SegmentId
from lakefs.movers import fetch_crcs, fetch_granules
from lakefs.ports import Offload

_VECTORS_MAX: Final = 1024
"""Chunks of one object whose checksums are kept: 256 bytes each."""


class BlobReader:
    """Reads one opened object.  Safe for many tasks at once."""

    def __init__(self, lake: TrioLake, offload: Offload, opened: Opened) -> None:
        self.opened = opened
        self._lake = lake
        self._offload = offload
        self._access: Access = lake.steps.access(None)
        self._vectors: OrderedDict[ChunkId, bytes] = OrderedDict()
        self._expected = 0  # where a reader that goes on would read next
        self._asked_ahead: ChunkId | None = None

    async def read(self, offset: int, length: int) -> Buffer:
        """The bytes [offset, offset + length), cut at the end.  ChunkDamaged, EngineUnreachable, ..."""
        length = max(0, min(length, self.opened.stat.size_bytes - offset))
        parts: list[Buffer] = []
        for piece in self.opened.overlapping(offset, length):
            begin = max(offset, piece.offset)
            end = min(offset + length, piece.offset + piece.length)
            parts.append(await self._part(piece, begin - piece.offset, end - begin))
        self._expected = offset + length
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _part(self, piece: Piece, offset: int, length: int) -> Buffer:
        inline = self.opened.inline.get(piece.chunk)
        if inline is not None:
            return memoryview(inline)[offset : offset + length]
        if self._access.can_use_descriptors:
            try:
                return await self._granted(piece, offset, length)
            except StaleGrant:
                self._vectors.pop(piece.chunk, None)
        return await self._lake.run(read_range(self._access, self.opened, piece.offset + offset, length))

    async def _granted(self, piece: Piece, offset: int, length: int) -> Buffer:
        chunk = piece.chunk
        crcs = self._vectors.get(chunk)
        if crcs is None:
            await self._lake.run(locate(self._access, self.opened, [chunk]))
            grant = self.opened.grants[chunk]
            crcs = await self._offload.run(fetch_crcs, self._access.descriptors, chunk, grant)
            self._vectors[chunk] = crcs
            if len(self._vectors) > _VECTORS_MAX:
                self._vectors.popitem(last=False)
        grant = self.opened.grants[chunk]
        held = (self._access.descriptors, chunk, grant, crcs, offset, length)
        found = fetch_granules(*held, wait=False)
        if found is None:
            if piece.offset + offset == self._expected:
                self._ask_ahead(piece)
            found = await self._offload.run(fetch_granules, *held)
        assert found is not None, "a read that waits gives bytes or an error"
        return found

    def _ask_ahead(self, piece: Piece) -> None:
        """Have the disk fetch the rest of this chunk and the next one."""
        if self._asked_ahead == piece.chunk:
            return
        self._asked_ahead = piece.chunk
        for following in self.opened.overlapping(piece.offset, piece.length + 1):
            grant = self.opened.grants.get(following.chunk)
            if grant is None:
                continue
            try:
                with self._access.descriptors.use(SegmentId(grant.segment)) as descriptor:
                    os.posix_fadvise(descriptor, grant.offset, grant.stored_bytes, os.POSIX_FADV_WILLNEED)
            except (StaleGrant, OSError):
                return  # the read itself will tell
