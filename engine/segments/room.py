"""Disk room of segments: measures it, and frees the room of dead extents.

The caller knows which extents are live.  Rules kept here:
- A freed extent reads as its old bytes or as zeros, never as others: whole pages are punched, without a sync, and
  nothing is written there again.  A segment id is never used again.
- No extent in flight or pinned is freed, nor the header.

Atomicity: between two awaits of a method no other method runs; every decision on places is made in one such step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import trio

from engine.format.extents import Extent, Span, coalesced, gaps, owned_spans, whole_pages, without
from engine.format.layouts import SegmentKind
from engine.host.failpoints import reached
from engine.segments.files import SEGMENTS_FOLDER, ReadFiles, segment_path
from engine.segments.large import LargeWriter
from engine.segments.maker import SegmentMaker
from engine.segments.pins import Pins
from engine.segments.small import SmallWriter
from lakefs.errors import LakeError
from lakefs.ids import SegmentId
from lakefs.limits import PAGE_BYTES
from lakefs.ports import Disk, FileStat


class SegmentRoom:
    """The room that one store's segments take, and the room left for payload."""

    def __init__(
        self, maker: SegmentMaker, large: LargeWriter, small: SmallWriter, pins: Pins, read_files: Sequence[ReadFiles]
    ) -> None:
        self._maker = maker
        self._disk = maker.disk
        self._offload = maker.offload
        self._register = maker.register
        self._in_flight = maker.in_flight
        self._large = large
        self._small = small
        self._pins = pins
        self._read_files = read_files
        self.punch_count = 0
        """Incremented before anything is freed: while it is unchanged, no place that was read has become zeros."""

    # --- how much ------------------------------------------------------------------------------------

    def sealed(self) -> list[SegmentId]:
        """Return segments that are no longer written, ascending; their extents may still be in flight."""
        return sorted(self._register.kinds.keys() - self._being_written())

    async def size(self, segment: SegmentId) -> int:
        """Return the length of the segment's file in bytes."""
        return (await self._offload.run(_stat_of, self._disk, self._register.path(segment))).size_bytes

    async def allocated_bytes(self, segments: Collection[SegmentId] | None = None) -> int:
        """Return the bytes that the segments (all by default) take on the medium; stats every file."""
        chosen = self._register.kinds if segments is None else segments
        paths = [segment_path(segment, self._register.kinds[segment]) for segment in chosen]
        return await self._offload.run(lambda: sum(_stat_of(self._disk, path).allocated_bytes for path in paths))

    async def free_bytes(self, *, into_headroom: bool = False) -> int:
        """Return the bytes of disk that payload may take; `into_headroom`: for callers that at once free more."""
        return await self._offload.run(self._disk.free_bytes) - self._maker.left_free_bytes(into_headroom=into_headroom)

    # --- freeing room --------------------------------------------------------------------------------

    async def punch(self, extents: Iterable[Extent]) -> None:
        """Free the whole pages inside the extents, neighbours taken together.  Their frees are durable in the journal.

        Punches are not synced: after a power loss some pages may hold bytes again, and `punch_gaps` frees them.  It
        also frees extents skipped here: pinned ones, and ones still in flight, as when record and free were in one
        group, whose waiters wake at the same moment.
        """
        settled = [extent for extent in extents if not self._in_flight.touches(*extent)]
        for segment, spans in coalesced(settled).items():
            kind = self._register.kinds.get(segment)
            if kind is not None:
                await self._punch_pages(segment, self._unpinned_pages(segment, kind, owned_spans(kind, spans)))

    async def punch_gaps(self, segment: SegmentId, live: Sequence[Span]) -> None:
        """Free all pages of a sealed segment that hold no live or pinned extent; `live` ascends."""
        self._check_reclaimable(segment)
        kind = self._register.kinds[segment]
        size = await self.size(segment)
        self._check_reclaimable(segment)
        await self._punch_pages(segment, self._unpinned_pages(segment, kind, gaps(owned_spans(kind, live), size)))

    async def remove(self, segment: SegmentId) -> bool:
        """Punch a sealed segment whole, then unlink it; durable on return.  Readers get StaleGrant.

        Descriptors that clients still hold read zeros.  Returns False if a place in it is pinned: then only the
        unpinned pages were punched.
        """
        self._check_reclaimable(segment)
        await self._large.close_settled()
        self._check_reclaimable(segment)
        if self._pins.has(segment):
            await self.punch_gaps(segment, [])
            return False
        path = self._register.path(segment)
        kind = self._register.kinds.pop(segment)
        self.punch_count += 1
        try:
            with trio.CancelScope(shield=True):
                await self._offload.run(_remove_file, self._disk, path)
        except LakeError:
            self._register.kinds[segment] = kind
            raise
        for files in self._read_files:
            files.drop(segment)
        return True

    def _unpinned_pages(self, segment: SegmentId, kind: SegmentKind, spans: Sequence[Span]) -> list[Span]:
        """Return the whole pages of the spans that touch no pinned place."""
        pinned = owned_spans(kind, self._pins.touching(segment, spans))
        return whole_pages(without(spans, pinned) if pinned else spans)

    async def _punch_pages(self, segment: SegmentId, pages: list[Span]) -> None:
        self.punch_count += 1
        for offset, length in pages:
            assert not (offset | length) % PAGE_BYTES, "whole pages are punched"
            assert not self._in_flight.touches(segment, offset, length), f"live bytes of {segment} freed"
        if pages:
            await self._offload.run(_punch_file, self._disk, self._register.path(segment), pages)

    def _check_reclaimable(self, segment: SegmentId) -> None:
        assert segment not in self._being_written(), f"segment {segment} is not sealed"
        assert not self._in_flight.count(segment), f"segment {segment} has extents in flight"

    def _being_written(self) -> set[SegmentId]:
        large = self._large.current
        return self._small.being_written if large is None else {*self._small.being_written, large}


def _punch_file(disk: Disk, path: str, pages: list[Span]) -> None:
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return  # removed since: its room is free already
    try:
        for offset, length in pages:
            file.punch(offset, length)
            reached("segment.page-punched")
    finally:
        file.close()


def _remove_file(disk: Disk, path: str) -> None:
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return
    try:
        if size := file.size():  # 0 when the process that made the file was killed before it wrote
            file.punch(0, -(-size // PAGE_BYTES) * PAGE_BYTES)
    finally:
        file.close()
    reached("gc.segment-punched")
    disk.unlink(path)
    reached("gc.segment-unlinked")
    disk.sync_folder(SEGMENTS_FOLDER)
    reached("gc.segment-removed")


def _stat_of(disk: Disk, path: str) -> FileStat:
    """Stat a file; all zeros if it was removed since, by the store or by hand."""
    try:
        return disk.stat(path)
    except FileNotFoundError:
        return FileStat(0, 0, 0)
