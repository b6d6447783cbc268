"""The segments of a store: payloads in, payloads out, and room given back.

A segment is a file that one boot fills from front to back.  Those of earlier boots are sealed: they are read,
their dead extents are punched, and when nothing in them lives they are removed.  This module knows extents and
checksums, not chunks: which extents live is the business of its owner.

Rules kept here (and in `large_segments`, `small_segments`, `segment_maker`, `segment_reader`, `segment_files`):
- An offset is written once; a freed extent reads as zeros for ever; a segment id is never used again.
- What `sync` has returned from survives power loss, and what a small segment's batch has written.
- Room is given back only where nothing in flight or pinned lies, and never the header.
- Every method that may block is async and works through `Offload`; `descriptor` alone opens a file in place.

Atomicity: between two awaits of a method no other method runs; every decision on places is made in one such step.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

import trio

from engine.batch_reader import BatchReader, Range
from engine.checksums import check_payload, seal_payload
from engine.extents import Extent, Place, Span, coalesced, gaps, owned_spans, whole_pages, without
from engine.failpoints import reached
from engine.format import SEGMENT_DATA_OFFSET, ChunkRecord, SegmentKind, StoreIdentity
from engine.io_queue import OffloadQueue
from engine.large_segments import Coming, IsLast, LargeWriter, not_last
from engine.medium_check import MediumCheck, Mismatch, Stored
from engine.pins import Pins
from engine.segment_files import (
    SEGMENTS_FOLDER,
    ReadFiles,
    parse_segment_name,
    segment_path,
)
from engine.segment_maker import SegmentMaker
from engine.segment_reader import RangeRead, SegmentReader
from engine.sizes import SegmentSizes
from engine.slot_reader import SlotReader
from engine.small_segments import SmallWriter
from lakefs.errors import LakeError, StoreDamaged
from lakefs.hot_table_format import Found
from lakefs.ids import Buffer, SegmentId
from lakefs.limits import PAGE_BYTES
from lakefs.ports import Disk, FileStat, IoQueue, Offload

__all__ = [
    "Extent",
    "Place",
    "Range",
    "RangeRead",
    "SegmentSizes",
    "Segments",
    "check_payload",
    "seal_payload",
]


class Segments:
    """All segments of one store, opened for writing.

    `allocate_segment_id` gives an id that is durably never given again before it returns.
    """

    def __init__(
        self,
        disk: Disk,
        offload: Offload,
        identity: StoreIdentity,
        allocate_segment_id: Callable[[], Awaitable[SegmentId]],
        sizes: SegmentSizes | None = None,
        owed_bytes: Callable[[], int] = lambda: 0,
        io_queue: IoQueue | None = None,
    ) -> None:
        """`owed_bytes`: room of the disk that payload leaves, beside the headroom of `sizes`; from any thread.

        `io_queue` reads many places at once; by default `offload` does.
        """
        self._disk = disk
        self._offload = offload
        self._maker = SegmentMaker(
            disk, offload, identity, allocate_segment_id, sizes or SegmentSizes(), owed_bytes
        )
        self._register = self._maker.register
        self._in_flight = self._maker.in_flight
        self._large = LargeWriter(self._maker)
        self.small = SmallWriter(self._maker)
        """Whose batches are written before the journal's groups."""
        self.pins = Pins()
        """Places that are not given back, though nothing lives there."""
        self._files = ReadFiles(disk, self._register, identity.store_id)
        self._direct_files = ReadFiles(disk, self._register, identity.store_id, direct=True)
        queue = io_queue or OffloadQueue(offload)
        self.slots = SlotReader(offload, queue, self._files, self._direct_files)
        """Reads into memory that clients lend."""
        self.punch_count = 0
        """Goes up before anything is given back: while it stays, what was read is what lay there."""
        self._reader = SegmentReader(disk, offload, self._register, self._files, self.small.unwritten)
        self._batches = BatchReader(self._reader, self._files, queue, offload)
        self._medium = MediumCheck(disk, self._register, self.small.unwritten)

    async def open(self) -> None:
        """Learn which segments there are; all of them are sealed.  Headers are checked at first use.

        StoreDamaged when two files claim one id.  Files that are no segments are left alone.
        """
        for name in await self._offload.run(_open_folder, self._disk):
            parsed = parse_segment_name(name)
            if parsed is None:
                continue
            segment, kind = parsed
            if segment in self._register.kinds:
                raise StoreDamaged(
                    f"two files claim to be segment {segment:016x} in {SEGMENTS_FOLDER}: remove the foreign one",
                    subject=name,
                )
            self._register.kinds[segment] = kind

    async def close(self) -> None:
        """A clean stop: trim the tails of open segments, close everything.  No call is under way.

        After a failed write or sync nothing is trimmed.  DiskFailed; everything is closed even then.
        """
        try:
            with trio.CancelScope(shield=True):
                await self._large.close()
        finally:
            try:
                with trio.CancelScope(shield=True):
                    await self.small.close()
            finally:
                self._close_read_files()

    def abandon(self) -> None:
        """Close all descriptors and leave the files as a crash would.  No call is under way; after `close`, nothing."""
        self._large.abandon()
        self.small.abandon()
        self._close_read_files()

    def _close_read_files(self) -> None:
        self._files.close()
        self._direct_files.close()

    # --- writing -------------------------------------------------------------------------------------

    @property
    def run_bytes_max(self) -> int:
        """Most that the extents of one `write_large` add up to."""
        return self._maker.sizes.large_segment - SEGMENT_DATA_OFFSET

    async def write_large(
        self,
        run: Sequence[tuple[memoryview, int]],
        coming: Coming | None = None,
        is_last: IsLast = not_last,
    ) -> list[Place]:
        """Write sealed payloads (see `seal_payload`) one behind the other: (page-aligned memory that begins with one,
        its length).  At least one, and `run_bytes_max` with what is written behind each.  `coming`: they are not there
        yet, see `Coming`.  `is_last`: see `IsLast`.

        Durable after `sync` of the places' segment, for which nothing may be left to do.  The extents are in flight
        until `settle`.  StoreFull, StoreReadOnly, DiskFailed; then, and when cancelled, all of them are given up and
        never used again.  The memory is not touched any more on return, however it returns.
        """
        return await self._large.write(run, coming, is_last)

    async def place_small(self, payloads: Sequence[Buffer], *, into_headroom: bool = False) -> list[Place]:
        """Places for payloads of 1 to 65,535 bytes, packed, in order.  They can be read; their memory is not touched
        any more by anybody.

        Durable with the journal's next group: one batch of `small` is written before it.  The extents are in flight
        until `settle`.  StoreFull, StoreReadOnly, DiskFailed; then, and when cancelled, all of them are given up.
        `into_headroom`: half of what payload leaves free may be taken, for who gives more room back at once.
        """
        return await self.small.place(payloads, into_headroom=into_headroom)

    async def wait_written(self, places: Collection[Place]) -> None:
        """What a client with a descriptor reads at these places is there on return.  No checkpoint when it is."""
        await self.small.wait_written(places)

    async def sync(self, segments: Collection[SegmentId]) -> None:
        """Everything that `write_large` has returned for these segments is durable on return.

        Callers share a sync that began after their writes.  DiskFailed when it failed: it is never tried
        again, and every later write or sync is StoreReadOnly.
        """
        for segment in segments:
            await self._large.sync(segment)

    def settle(self, place: Place) -> None:
        """The extent's record is durable, or its owner gave it up.  Exactly once for each place."""
        self._in_flight.settle(place)

    def inflight(self, segment: SegmentId) -> int:
        """Extents of the segment that are given out and not settled."""
        return self._in_flight.count(segment)

    @property
    def failed(self) -> bool:
        """Whether a write or sync has failed, so that nothing is written any more."""
        return self._maker.gate.failed

    @property
    def failure(self) -> str:
        """What has failed; empty while all is well."""
        return self._maker.gate.reason

    # --- reading -------------------------------------------------------------------------------------

    async def read(self, segment: SegmentId, offset: int, length: int) -> bytes:
        """`length` bytes as they lie there, unchecked.  StaleGrant, StoreDamaged, DiskFailed."""
        return await self._reader.read(segment, offset, length)

    async def read_into(self, segment: SegmentId, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with bytes as they lie there, unchecked."""
        await self._reader.read_into(segment, offset, buffer)

    def pread_into_blocking(self, segment: SegmentId, offset: int, buffer: memoryview) -> None:
        """`read_into` for callers that are in a thread of the pool already."""
        self._reader.pread_into_blocking(segment, offset, buffer)

    async def read_chunk(self, record: ChunkRecord, buffer: memoryview | None = None) -> memoryview:
        """The whole payload, checked; in `buffer` when given (`record.extent_bytes` or longer).

        ChunkDamaged when it does not match, past the page cache either.  StaleGrant, StoreDamaged, DiskFailed.
        """
        return await self._reader.read_chunk(record, buffer)

    async def read_small(
        self, records: Sequence[ChunkRecord], *, tried: bool = False
    ) -> list[bytes | LakeError]:
        """The checked payload of each record, or its error as `read_chunk` raises it; one call for all.

        `tried`: `small_at_once` has just told that none is in memory.
        """
        return await self._batches.read_small(records, tried=tried)

    async def check_on_medium(self, runs: Sequence[Sequence[Stored]], area: memoryview) -> list[Mismatch]:
        """Compare a batch of `batches_of` with checksums and ids, past the page cache; what does not match."""
        return await self._offload.run(self._medium.check, runs, area)

    def small_at_once(self, record: ChunkRecord) -> bytes | None:
        """The checked payload of a small chunk, when it is in memory; does not wait."""
        return self._batches.read_at_once(record)

    async def read_range(self, record: ChunkRecord, offset: int, length: int) -> RangeRead:
        """A range of the payload, widened to granules and checked: (start, bytes, CRCs of the granules)."""
        return await self._reader.read_range(record, offset, length)

    async def read_packed(self, places: Sequence[Found]) -> memoryview | None:
        """Short payloads one behind the other, checked; see `BatchReader.read_packed`."""
        return await self._batches.read_packed(places)

    async def read_ranges(self, ranges: Sequence[Range]) -> list[RangeRead | LakeError]:
        """What `read_range` answers for each (record, offset, length), or its error; small ones are read at once."""
        return await self._batches.read_ranges(ranges)

    def descriptor(self, segment: SegmentId) -> int:
        """A read-only descriptor to hand out; stays ours.  StaleGrant, EngineBusy, DiskFailed in simulation."""
        return self._files.lend(segment)

    # --- giving room back ----------------------------------------------------------------------------

    async def punch(self, extents: Iterable[Extent]) -> None:
        """Free the whole pages inside the extents, neighbours taken together.  Their frees are durable.

        Not synced: after a power loss some may be there again, for `punch_gaps`.  So is what is pinned; and what its
        owner has not settled yet, as when record and free were one group, whose owners wake at the same moment.
        """
        settled = [extent for extent in extents if not self._in_flight.touches(*extent)]
        for segment, spans in coalesced(settled).items():
            kind = self._register.kinds.get(segment)
            if kind is not None:
                await self._punch_pages(
                    segment, self._unpinned_pages(segment, kind, owned_spans(kind, spans))
                )

    async def punch_gaps(self, segment: SegmentId, live: Sequence[Span]) -> None:
        """Free all pages of a sealed segment that touch no live or pinned extent; `live` ascends."""
        self._check_reclaimable(segment)
        path = self._register.path(segment)
        kind = self._register.kinds[segment]
        size = await self._offload.run(_size_of, self._disk, path)
        self._check_reclaimable(segment)
        await self._punch_pages(
            segment, self._unpinned_pages(segment, kind, gaps(owned_spans(kind, live), size))
        )

    async def remove(self, segment: SegmentId) -> bool:
        """Punch a sealed segment whole, then unlink it; durable on return.  Readers get StaleGrant.

        What clients still hold open of it reads as zeros.  False: something is pinned there, and only what is not was
        punched.
        """
        self._check_reclaimable(segment)
        await self._large.close_settled()
        self._check_reclaimable(segment)
        if self.pins.has(segment):
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
        self._files.drop(segment)
        self._direct_files.drop(segment)
        return True

    def _unpinned_pages(self, segment: SegmentId, kind: SegmentKind, spans: Sequence[Span]) -> list[Span]:
        """The whole pages of the spans that touch nothing pinned."""
        pinned = owned_spans(kind, self.pins.touching(segment, spans))
        return whole_pages(without(spans, pinned) if pinned else spans)

    async def _punch_pages(self, segment: SegmentId, pages: list[Span]) -> None:
        self.punch_count += 1
        for offset, length in pages:
            assert not self._in_flight.touches(segment, offset, length), f"live bytes of {segment} freed"
        if pages:
            await self._offload.run(_punch_file, self._disk, self._register.path(segment), pages)

    def _check_reclaimable(self, segment: SegmentId) -> None:
        assert segment not in self._being_written(), f"segment {segment} is not sealed"
        assert not self._in_flight.count(segment), f"segment {segment} has extents in flight"

    # --- what there is -------------------------------------------------------------------------------

    def all_ids(self) -> list[SegmentId]:
        """Every segment, ascending."""
        return sorted(self._register.kinds)

    def has(self, segment: SegmentId) -> bool:
        """Whether there is such a segment."""
        return segment in self._register.kinds

    def sealed(self) -> list[SegmentId]:
        """Segments to which nothing more is written, ascending; extents in them may still be in flight."""
        return sorted(self._register.kinds.keys() - self._being_written())

    def kind(self, segment: SegmentId) -> SegmentKind:
        """Large or small.  StaleGrant when it was removed."""
        self._register.path(segment)
        return self._register.kinds[segment]

    async def size(self, segment: SegmentId) -> int:
        """Length of the segment's file in bytes."""
        return await self._offload.run(_size_of, self._disk, self._register.path(segment))

    async def allocated_bytes(self, segments: Collection[SegmentId] | None = None) -> int:
        """Room that the segments (all by default) take on the medium; looks at every file."""
        chosen = self._register.kinds if segments is None else segments
        paths = [segment_path(segment, self._register.kinds[segment]) for segment in chosen]
        return await self._offload.run(_allocated_of, self._disk, paths)

    async def free_bytes(self, *, into_headroom: bool = False) -> int:
        """Room of the disk that payload may take; with `into_headroom` for who gives more back at once."""
        return await self._offload.run(self._disk.free_bytes) - self._maker.left_free_bytes(
            into_headroom=into_headroom
        )

    def read_statistics(self) -> dict[str, str | int]:
        """How the disk is read, why not through io_uring, and the count of small reads by the way they took."""
        return self._batches.statistics()

    @property
    def healed_reads(self) -> int:
        """Reads that matched their checksums only past the page cache."""
        return self._reader.healed_reads

    @property
    def damaged_headers(self) -> frozenset[SegmentId]:
        """Segments read so far whose header does not match its checksum."""
        return frozenset(self._files.damaged_headers)

    def _being_written(self) -> set[SegmentId]:
        large = self._large.current
        return self.small.being_written if large is None else {*self.small.being_written, large}


def _open_folder(disk: Disk) -> list[str]:
    if not disk.exists(SEGMENTS_FOLDER):
        disk.make_folder(SEGMENTS_FOLDER)
        disk.sync_folder("")
    return disk.list_folder(SEGMENTS_FOLDER)


def _punch_file(disk: Disk, path: str, pages: list[Span]) -> None:
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return  # removed meanwhile: its room is free already
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
        if size := file.size():  # none when the process that made the file was killed before it wrote
            file.punch(0, -(-size // PAGE_BYTES) * PAGE_BYTES)
    finally:
        file.close()
    reached("gc.segment-punched")
    disk.unlink(path)
    reached("gc.segment-unlinked")
    disk.sync_folder(SEGMENTS_FOLDER)
    reached("gc.segment-removed")


def _size_of(disk: Disk, path: str) -> int:
    return _stat_of(disk, path).size_bytes


def _allocated_of(disk: Disk, paths: Sequence[str]) -> int:
    return sum(_stat_of(disk, path).allocated_bytes for path in paths)


def _stat_of(disk: Disk, path: str) -> FileStat:
    """Of nothing, for a file that was removed meanwhile, or that somebody took away."""
    try:
        return disk.stat(path)
    except FileNotFoundError:
        return FileStat(0, 0, 0)
