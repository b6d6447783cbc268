"""Byte ranges of one opened object for the kernel: from the page cache in the loop, else in a thread; each is checked.

Bytes in the page cache of the segments' files are read in the loop (`RWF_NOWAIT`: a copy, no wait); a round trip to a
thread would cost more than the copy.  Other bytes are read in a thread, with as many requests at once as there are
threads: the kernel asks ahead of its reader.  The checksums of each chunk are read once and kept while the object is
open.  Bytes are checked on every read; pages of a granule that was checked before, by `PageSums`.

Rules kept here:
- Read buffers are reused: the kernel has to clear fresh memory, and fresh memory displaces the caches.  So the result
  of `read_nowait` and `read` is valid until the caller's next checkpoint, or its next call of either.
- Whole granules of neighbouring chunks lie one behind the other in a buffer: all granules of a range but the first
  begin where asked bytes begin, and all but the last end where asked bytes end.  So a range is one piece of memory.

A page that is read again is checked without reading its whole granule (`PageSums`).  The store has one CRC32C for each
granule of 64 KiB.  When a granule is read for a few of its pages, its CRC is computed page by page.  If the result is
the store's, the CRC after each page is kept.  A run of those pages that is read later is checked alone: from the CRC
before the run, its bytes must lead to the CRC behind it.
- CRCs are kept only of bytes that matched the store's checksum.  No bytes are kept, and nothing counts as good
  because it was good before: a reader checks the bytes that it has read.
- A chunk is named by its content, so its CRCs stay true at any place and for any opener.

When a check fails, or a place is no longer valid, `read_range` takes over: it locates the chunk again.  If that does
not help, the engine reads it, and the engine decides what is damaged.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from fuse.reading.native_reads import NativeReads
from lakefs.client.trio.driver import TrioDriver
from lakefs.content.verify import granules_around
from lakefs.errors import StaleGrant
from lakefs.get.fetch import locate
from lakefs.get.objects import read_range
from lakefs.get.opened import Access, Opened, Piece
from lakefs.grants.descriptors import SegmentDescriptors
from lakefs.grants.grant_reads import (
    BRING_IN_FROM,
    bring_in_granules,
    cached_crcs,
    cached_granules,
    fetch_crcs,
    fetch_granules,
    may_be_cached,
    missing_for,
    read_cached,
)
from lakefs.host.crc import crc32c
from lakefs.ids import Buffer, ChunkId
from lakefs.limits import GRANULE_BYTES, MIB, PAGE_BYTES, PAGE_SUMS_MAX
from lakefs.ports import Offload
from lakefs.wire.messages import Grant

_VECTORS_MAX: Final = 1024
"""Chunks of one object whose checksums are kept: 256 bytes each."""
_BUFFER_BYTES: Final = 1 * MIB + 2 * GRANULE_BYTES
"""The kernel asks for at most 1 MiB, which may begin and end inside granules."""
_BUFFERS_KEPT: Final = 6
"""Free buffers kept for threads: a few more than there are threads."""


class PageSums:
    """CRCs after each page, for the granules that were last read in part; keyed by chunk and granule number."""

    def __init__(self, granules_max: int = PAGE_SUMS_MAX) -> None:
        self._granules_max = granules_max
        self._sums: OrderedDict[tuple[ChunkId, int], array[int]] = OrderedDict()

    def learn(self, chunk: ChunkId, number: int, granule: memoryview, crc: int) -> bool:
        """Check a whole granule against the store's checksum and keep its CRCs; False, keeping none, if it differs."""
        pages = (granule[at : at + PAGE_BYTES] for at in range(0, len(granule), PAGE_BYTES))
        sums = array("I", accumulate(pages, lambda crc, page: crc32c(page, crc), initial=0))
        if sums[-1] != crc:
            return False
        self._sums[chunk, number] = sums
        if len(self._sums) > self._granules_max:
            self._sums.popitem(last=False)
        return True

    def of(self, chunk: ChunkId, number: int) -> array[int] | None:
        """Return the CRC after none, one, two, ... all pages of a granule; None if they are not kept."""
        return self._sums.get((chunk, number))


class ReadBuffers:
    """Shared by all readers of a mount: memory to read into, and page checksums of chunks."""

    def __init__(self) -> None:
        self.own = memoryview(bytearray(_BUFFER_BYTES))
        """For reads whose result is used before anything else runs in the loop."""
        self.page_sums = PageSums()
        self._free: deque[memoryview] = deque(maxlen=_BUFFERS_KEPT)
        self._handed_out: memoryview | None = None

    def take(self, length: int) -> memoryview:
        """Return a buffer of at least `length` bytes.  Callable in any thread."""
        if length > _BUFFER_BYTES:
            return memoryview(bytearray(length))
        try:
            return self._free.pop()
        except IndexError:
            return memoryview(bytearray(_BUFFER_BYTES))

    def hand_out(self, buffer: memoryview) -> None:
        """Note that a taken buffer now belongs to a reader, until that reader's next checkpoint.  Called in the loop.

        The buffer handed out before it becomes free: its reader has passed a checkpoint.
        """
        before, self._handed_out = self._handed_out, buffer
        if before is not None and len(before) == _BUFFER_BYTES:
            self._free.append(before)


class _Span(NamedTuple):
    """Whole granules of a chunk, [begin, end) in it."""

    chunk: ChunkId
    grant: Grant
    begin: int
    end: int


class BlobReader:
    """Reads one opened object.  Safe for many tasks at once."""

    def __init__(self, driver: TrioDriver, offload: Offload, buffers: ReadBuffers, opened: Opened) -> None:
        self.opened = opened
        self._driver = driver
        self._offload = offload
        self._buffers = buffers
        self._page_sums = buffers.page_sums
        self._access: Access = driver.steps.access(None)
        self._starts = [piece.offset for piece in opened.pieces]
        covered = opened.pieces[-1].offset + opened.pieces[-1].length if opened.pieces else 0
        self._size = min(opened.stat.size_bytes, covered)
        self._vectors: OrderedDict[ChunkId, bytes] = OrderedDict()
        self._native: NativeReads | None = None
        self._may_be_native = len(opened.inline) < len(opened.pieces)

    def teach(self, handle: int, offset: int, length: int) -> None:
        """Have native threads answer reads of the handle, as far as they can read the pieces of this range.

        Call it when a read of the range was answered here: then the places and checksums of its chunks are known.
        """
        end = min(offset + length, self._size)
        if not self._may_be_native or offset >= end or not self._access.offers.segments:
            return
        if self._native is None:
            self._native = NativeReads.of(self._access.descriptors, self.opened, self._size)
            self._may_be_native = self._native is not None
            if self._native is None:
                return
        self._native.add(handle)
        first = bisect_right(self._starts, offset) - 1
        for index in range(first, first + len(self._pieces(offset, end))):
            if not self._native.knows(index):
                piece = self.opened.pieces[index]
                self._native.teach(index, self.opened.grants.get(piece.chunk), self._known_crcs)

    def close(self) -> None:
        """End native reads of this content; none runs on return.  Others still work."""
        native, self._native = self._native, None
        self._may_be_native = False
        if native is not None:
            native.close()

    def read_nowait(self, offset: int, length: int) -> Buffer | None:
        """Return the bytes [offset, offset + length), cut at the end, if they are in memory; None: use `read`."""
        end = min(offset + length, self._size)
        if offset >= end:
            return b""
        try:
            if end - offset < GRANULE_BYTES:
                return self._cached_pages(offset, end)
            return self._cached(offset, end)
        except StaleGrant:
            return None  # `read` sorts it out

    async def read(self, offset: int, length: int) -> Buffer:
        """Return the bytes [offset, offset + length), cut at the end.  Raises ChunkDamaged, EngineUnreachable, ..."""
        end = min(offset + length, self._size)
        if offset >= end:
            return b""
        pieces = self._pieces(offset, end)
        if self._access.offers.segments and not any(piece.chunk in self.opened.inline for piece in pieces):
            try:
                return await self._granted(pieces, offset, end)
            except StaleGrant:
                for piece in pieces:
                    self._vectors.pop(piece.chunk, None)
        return await self._driver.run(read_range(self._access, self.opened, offset, end - offset))

    # --- bytes in memory -----------------------------------------------------------------------------

    def _cached(self, offset: int, end: int) -> Buffer | None:
        """Read from the page cache; None if the bytes are not all there.  Raises StaleGrant."""
        if end - offset > _BUFFER_BYTES - 2 * GRANULE_BYTES:
            return None
        buffer, filled, skipped = self._buffers.own, 0, 0
        for piece in self._pieces(offset, end):
            first, last = max(offset - piece.offset, 0), min(end - piece.offset, piece.length)
            inline = self.opened.inline.get(piece.chunk)
            if inline is not None and last - first == end - offset:
                return memoryview(inline)[first:last]
            grant = self.opened.grants.get(piece.chunk)
            if inline is not None or grant is None or grant.logical_bytes != piece.length:
                return None
            begin, stop = granules_around(first, last - first, piece.length)
            if stop - begin >= BRING_IN_FROM and not may_be_cached(
                self._access.descriptors, grant, begin, stop - begin
            ):
                return None
            crcs = self._known_crcs(piece.chunk, grant)
            if crcs is None:
                return None
            target = buffer[filled : filled + stop - begin]
            if not cached_granules(self._access.descriptors, piece.chunk, grant, crcs, begin, target):
                return None
            if not filled:
                skipped = first - begin
            filled += stop - begin
        return buffer[skipped : skipped + end - offset]

    def _cached_pages(self, offset: int, end: int) -> Buffer | None:
        """Like `_cached`, for part of one granule: once the whole granule was checked, reads only the asked pages."""
        piece = self.opened.pieces[bisect_right(self._starts, offset) - 1]
        grant = self.opened.grants.get(piece.chunk)
        first, last = offset - piece.offset, end - piece.offset
        number, at = divmod(first, GRANULE_BYTES)
        granule = first - at
        stop = min(granule + GRANULE_BYTES, piece.length)
        if last > stop or grant is None or grant.logical_bytes != piece.length:
            return self._cached(offset, end)
        sums = self._page_sums.of(piece.chunk, number)
        if sums is None:
            crcs = self._known_crcs(piece.chunk, grant)
            target = self._buffers.own[: stop - granule]
            if crcs is None or not read_cached(self._access.descriptors, grant, granule, target):
                return None
            crc = int.from_bytes(crcs[4 * number : 4 * number + 4], "little")
            return target[at : last - granule] if self._page_sums.learn(piece.chunk, number, target, crc) else None
        before, behind = at // PAGE_BYTES, -(-(last - granule) // PAGE_BYTES)
        begin = granule + before * PAGE_BYTES
        target = self._buffers.own[: min(granule + behind * PAGE_BYTES, stop) - begin]
        if read_cached(self._access.descriptors, grant, begin, target) and crc32c(target, sums[before]) == sums[behind]:
            return target[first - begin : last - begin]
        return None

    def _known_crcs(self, chunk: ChunkId, grant: Grant) -> bytes | None:
        crcs = self._vectors.get(chunk)
        if crcs is None:
            crcs = cached_crcs(self._access.descriptors, chunk, grant)
            if crcs is not None:
                self._keep_crcs(chunk, crcs)
        return crcs

    def _keep_crcs(self, chunk: ChunkId, crcs: bytes) -> None:
        self._vectors[chunk] = crcs
        if len(self._vectors) > _VECTORS_MAX:
            self._vectors.popitem(last=False)

    # --- bytes that the disk must fetch --------------------------------------------------------------

    async def _granted(self, pieces: Sequence[Piece], offset: int, end: int) -> Buffer:
        await self._locate(pieces)
        spans: list[_Span] = []
        for piece in pieces:
            first, last = max(offset - piece.offset, 0), min(end - piece.offset, piece.length)
            grant = self.opened.grants[piece.chunk]
            if grant.logical_bytes != piece.length:
                raise StaleGrant("the grant's length is not the chunk's")
            spans.append(_Span(piece.chunk, grant, *granules_around(first, last - first, piece.length)))
        known = {span.chunk: self._vectors.get(span.chunk) for span in spans}
        buffer, vectors = await self._offload.run(_fetch, self._access.descriptors, self._buffers, spans, known)
        for chunk, crcs in vectors.items():
            self._keep_crcs(chunk, crcs)
        self._buffers.hand_out(buffer)
        skipped = offset - pieces[0].offset - spans[0].begin
        return buffer[skipped : skipped + end - offset]

    async def _locate(self, pieces: Sequence[Piece]) -> None:
        """Get the grants of these pieces, and descriptors of their segments, where they are missing."""
        grants = self.opened.grants
        chunks = [piece.chunk for piece in pieces]
        if all(chunk in grants for chunk in chunks):
            missing = missing_for(self._access.descriptors, (grants[chunk] for chunk in chunks))
            if not any(missing):
                return
        await self._driver.run(locate(self._access, self.opened, chunks))

    def _pieces(self, offset: int, end: int) -> Sequence[Piece]:
        """Return the pieces that hold bytes of [offset, end)."""
        first = bisect_right(self._starts, offset) - 1
        pieces = self.opened.pieces
        piece = pieces[first]
        if end <= piece.offset + piece.length:
            return (piece,)
        return pieces[first : bisect_right(self._starts, end - 1, lo=first)]


def _fetch(
    descriptors: SegmentDescriptors, buffers: ReadBuffers, spans: Sequence[_Span], known: dict[ChunkId, bytes | None]
) -> tuple[memoryview, dict[ChunkId, bytes]]:
    """Read the granules of the spans, one behind the other, and their chunks' checksums.  In a thread.  StaleGrant."""
    buffer = buffers.take(sum(span.end - span.begin for span in spans))
    vectors: dict[ChunkId, bytes] = {}
    filled = 0
    for span in spans:
        bring_in_granules(descriptors, span.grant, span.begin, span.end)
        crcs = known[span.chunk] or fetch_crcs(descriptors, span.chunk, span.grant)
        vectors[span.chunk] = crcs
        target = buffer[filled : filled + span.end - span.begin]
        fetch_granules(descriptors, span.chunk, span.grant, crcs, span.begin, target)
        filled += len(target)
    return buffer, vectors
