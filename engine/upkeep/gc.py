"""Garbage collection: mark from sessions, names, uploads and leases, free old unmarked chunks, give back room.

One cycle, beside readers and writers:

1.  *Mark.* Expired uploads are removed first.  The mark set is a bitmap over births.  Marked are the chunks held by
   sessions, then every node's blob, then every upload's parts, then every keyed value's parts, then every leased blob
   (`engine.upkeep.roots`); a manifest's children with it.  A chunk that a writer refers to, or finds present, during
   the cycle is marked by the barrier (`References.keep`), no matter how that writer's name came about, or which session
   holds it.
2. *Sweep.*  Whole chunks born before the cycle and not marked are proposed, in batches.  The commit that frees them
   looks again, in one synchronous step: a chunk that has been marked since, or has another record, stays.
3. *Reclaim.*  After the sweep, in segments that were sealed with nothing in flight before the cycle, every gap
   between live extents is punched: freed chunks, and leftovers of crashes and interrupted puts.  A segment without
   live extents is removed.  Chunks freed elsewhere are punched after the sweep too, stretch by stretch, so that
   neighbours are one punch: a punch costs more than all other work for a small chunk.  Only if the disk has little
   room, freed chunks are punched as soon as the commit is durable.  Extents are never used again, so punching late
   or twice does no harm; a pinned extent is punched by the first cycle that finds it a gap and no longer pinned.

Rules kept here:
- Damage stops the cycle before it frees anything: a manifest that cannot be read hides its children.
- No view is held across an `await`; the walk reads page by page, resuming behind the last key.
- Memory: the bitmap, and 16 bytes for each live extent of at most `EXTENTS_PER_CYCLE` (segments past that wait for
  the next cycle) and for each of at most `_UNPUNCHED_MAX` freed ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import trio

from engine.chunks.chunk_store import ChunkFreed, find_chunk
from engine.chunks.manifests import Manifests
from engine.chunks.quarantine import Quarantine
from engine.format.extents import Extent
from engine.format.keyed import VALUES_BEGIN, VALUES_END, chunks_of
from engine.format.layouts import ChunkRecord, Table, chunk_id_of_key, unpack_chunk_record
from engine.host.failpoints import reached
from engine.metadata.metadata_store import Metadata
from engine.metadata.pacing import Pacing
from engine.namespace.walk import pages
from engine.segments.segment_store import Segments
from engine.sessions.references import References
from engine.tables.number_set import NumberSet
from engine.tables.views import Transaction, View
from engine.upkeep.compaction import CompactionReport
from engine.upkeep.roots import Root, Roots, Visit
from engine.uploads.expiry import UploadExpiry
from lakefs.ids import (
    EMPTY_CHUNK,
    WHOLE_CHUNK,
    Birth,
    BlobId,
    ChunkId,
    ChunkKind,
    SegmentId,
    Sequence,
    chunk_of,
    kind_of,
)
from lakefs.limits import GC_BATCH, GC_GRACE_S, MIB
from lakefs.ports import Clock

EXTENTS_PER_CYCLE = 4_000_000
"""64 MiB of places."""
_ROOM_SHARE: Final = 16
"""Freed room is given back during the sweep if free room is below 1/16 of the segments' room."""
_UNPUNCHED_MAX: Final = 262_144
"""4 MiB of places."""
_STRETCH_BYTES: Final = 16 * MIB
"""At most some thousand chunks of a page: a few milliseconds of the loop."""


@dataclass
class GcReport:
    """The result of one cycle.  Byte counts are of stored payload and vectors."""

    expired_uploads: int = 0
    marked_blobs: int = 0
    live_chunks: int = 0
    live_bytes: int = 0
    freed_chunks: int = 0
    freed_bytes: int = 0
    kept_young: int = 0
    removed_segments: int = 0
    disk_bytes_before: int = 0
    disk_bytes_after: int = 0


@dataclass
class CollectReport(GcReport):
    """The result of a cycle of gc and the compaction behind it."""

    compaction: CompactionReport = field(default_factory=CompactionReport)


@dataclass
class CollectTotals:
    """Sums over all cycles of this process; they only grow."""

    cycles: int = 0
    freed_bytes: int = 0
    moved_bytes: int = 0
    last_ended_ns: int = 0

    def add(self, report: CollectReport, now_ns: int) -> None:
        """Count a cycle that has ended."""
        self.cycles += 1
        self.freed_bytes += report.freed_bytes
        self.moved_bytes += report.compaction.moved_bytes
        self.last_ended_ns = now_ns


class Collector:
    """Runs one cycle at a time."""

    def __init__(
        self,
        metadata: Metadata,
        segments: Segments,
        manifests: Manifests,
        references: References,
        quarantine: Quarantine,
        clock: Clock,
        expiry: UploadExpiry,
        *,
        grace_s: float = GC_GRACE_S,
        batch: int = GC_BATCH,
    ) -> None:
        self._metadata = metadata
        self._segments = segments
        self._manifests = manifests
        self._references = references
        self._quarantine = quarantine
        self._clock = clock
        self._expiry = expiry
        self._batch = batch
        self._not_before = clock.monotonic() + grace_s
        self.reclaiming = self._lock = trio.Lock()
        """Held during a cycle, and by every other remover of segments."""
        self._roots = Roots(metadata, references, batch=batch)

    @property
    def running(self) -> bool:
        """True while a cycle is under way."""
        return self._lock.locked()

    async def run(self) -> GcReport:
        """Run one full cycle.  A second caller waits first.  Raises StoreDamaged, IndexDamaged, StoreReadOnly."""
        async with self._lock:
            await trio.sleep(max(0.0, self._not_before - self._clock.monotonic()))
            report = GcReport(disk_bytes_before=await self._segments.room.allocated_bytes())
            report.expired_uploads = await self._expiry.run()
            self._references.expire()
            settled = {s for s in self._segments.room.sealed() if not self._segments.in_flight.count(s)}
            cycle = _Cycle(self._metadata.next_birth, NumberSet(), report, settled, Pacing(self._metadata))
            assert self._references.barrier is None, "one cycle at a time"
            self._references.barrier = cycle.marked
            try:
                with self._roots.noting():
                    await self._mark_held(cycle)
                    await self._mark(cycle)
                    reached("gc.marked")
                    await self._sweep(cycle)
                await self._punch_stretches(cycle)
                reached("gc.swept")
            finally:
                self._references.barrier = None
            # Frees by others that this walk has seen: an earlier cycle may have ended before they were durable.
            await self._metadata.wait_durable(cycle.rests_on)
            await self._reclaim(cycle)
            report.disk_bytes_after = await self._segments.room.allocated_bytes()
            return report

    # --- mark --------------------------------------------------------------------------------------

    async def _mark_held(self, cycle: _Cycle) -> None:
        """Mark the chunks that sessions held when the barrier was set, in the same step; it marks their later holds."""
        for count, held in enumerate(self._references.held_sets(), 1):
            cycle.marked.update(held)
            if count % self._batch == 0:
                await cycle.pacing.rest()

    async def _mark(self, cycle: _Cycle) -> None:
        async def visit(roots: Iterable[Root]) -> None:
            for blob, _ in roots:
                await self._mark_blob(cycle, blob)

        await self._roots.nodes(cycle.pacing, visit)
        await self._mark_parts(cycle, visit)
        await self._mark_values(cycle)
        await self._roots.leases(cycle.pacing, visit)
        await self._roots.rebound(visit)

    async def _mark_parts(self, cycle: _Cycle, visit: Visit) -> None:
        await self._roots.parts(cycle.pacing, visit)

    async def _mark_values(self, cycle: _Cycle) -> None:
        """Mark the parts of keyed values.  The barrier marks those of a value that is put behind this walk."""
        for page in pages(
            self._metadata, Table.KEYED, VALUES_BEGIN, VALUES_END, lambda: cycle.pacing.step(self._batch)
        ):
            left = [chunks_of(record) for _, record in page]
            left.reverse()
            while left:
                count = 0
                with self._metadata.view() as view:
                    while left and count < cycle.pacing.step(self._batch):  # parts; a value has 256 at most
                        for chunk in left.pop():
                            self._mark_in(cycle, view, chunk)
                            count += 1
                cycle.report.marked_blobs += count
                await cycle.pacing.rest()

    async def _mark_blob(self, cycle: _Cycle, blob: BlobId) -> None:
        cycle.report.marked_blobs += 1
        pending = [chunk_of(blob)]
        while pending:
            chunk = pending.pop()
            if chunk == EMPTY_CHUNK or not self._mark_chunk(cycle, chunk):
                continue
            if kind_of(chunk) is ChunkKind.MANIFEST:
                manifest = await self._manifests.read(chunk)
                pending.extend(entry.chunk for entry in manifest.entries)

    def _mark_chunk(self, cycle: _Cycle, chunk: ChunkId) -> bool:
        """Mark one chunk; returns False if this walk marked it before, or if it was freed with a name removed since."""
        with self._metadata.view() as view:
            return self._mark_in(cycle, view, chunk)

    def _mark_in(self, cycle: _Cycle, view: View, chunk: ChunkId) -> bool:
        record = find_chunk(view, chunk)
        if record is None or record.birth in cycle.walked:
            return False
        cycle.walked.add(record.birth)
        cycle.marked.add(record.birth)
        return True

    # --- sweep -------------------------------------------------------------------------------------

    async def _sweep(self, cycle: _Cycle) -> None:
        assert self._roots.all_visited, "every blob is marked before the sweep"
        after = b""
        while page := self._chunk_page(cycle, after):
            after = page[-1][0]
            proposed: list[tuple[bytes, ChunkRecord]] = []
            for key, record in page:
                if key[-1] != WHOLE_CHUNK:  # names of this store do not say who refers to a shard
                    cycle.note_live(record)
                elif record.birth >= cycle.born_before:
                    cycle.report.kept_young += 1
                    cycle.note_live(record)
                elif record.birth in cycle.marked:
                    cycle.note_live(record)
                else:
                    proposed.append((key, record))
            await self._free(cycle, proposed)
            await cycle.pacing.rest()

    def _chunk_page(self, cycle: _Cycle, after: bytes) -> list[tuple[bytes, ChunkRecord]]:
        with self._metadata.view() as view:
            scan = view.scan(Table.CHUNKS, after + b"\x00" if after else b"", b"\xff")
            page = [(key, unpack_chunk_record(value)) for key, value in islice(scan, cycle.pacing.step(self._batch))]
            cycle.rests_on = max(cycle.rests_on, view.sequence)
            return page

    async def _free(self, cycle: _Cycle, proposed: list[tuple[bytes, ChunkRecord]]) -> None:
        if not proposed:
            return

        def decide(txn: Transaction) -> list[ChunkRecord]:
            assert self._references.barrier is cycle.marked, "nothing is freed without the barrier"
            freed: list[ChunkRecord] = []
            for key, record in proposed:
                value = txn.get(Table.CHUNKS, key)
                if value is None or unpack_chunk_record(value) != record:
                    continue
                if record.birth in cycle.marked:
                    cycle.note_live(record)
                    continue
                assert record.birth < cycle.born_before, "only chunks born before the cycle are freed"
                txn.delete(Table.CHUNKS, key)
                chunk = chunk_id_of_key(key)
                self._quarantine.drop_in(txn, chunk)
                txn.note(ChunkFreed(chunk))
                freed.append(record)
            return freed

        freed, sequence = await self._metadata.commit(decide)
        await self._metadata.wait_durable(sequence)
        cycle.report.freed_chunks += len(freed)
        cycle.report.freed_bytes += sum(record.extent_bytes for record in freed)
        reached("gc.freed")
        await self._give_back(cycle, freed)

    async def _give_back(self, cycle: _Cycle, freed: list[ChunkRecord]) -> None:
        """Punch durably freed chunks, or leave them for later: see step 3."""
        has_room = await self._segments.room.free_bytes() * _ROOM_SHARE > cycle.report.disk_bytes_before
        if has_room:
            for record in freed:
                if record.segment not in cycle.live_extents:
                    cycle.note_unpunched(record)
        else:
            await self._punch([(r.segment, r.offset, r.extent_bytes) for r in freed])
        if not has_room or cycle.unpunched_count >= _UNPUNCHED_MAX:
            await self._punch_stretches(cycle)

    async def _punch_stretches(self, cycle: _Cycle) -> None:
        """Punch the chunks freed so far that lie outside the segments of `_reclaim`."""
        cycle.unpunched_count = 0
        while cycle.unpunched:
            (segment, _), places = cycle.unpunched.popitem()
            await self._punch([(segment, offset, length) for offset, length in _pairs(places)])
            await cycle.pacing.rest()

    async def _punch(self, extents: list[Extent]) -> None:
        await self._segments.room.punch(extents)
        reached("gc.punched")

    # --- reclaim -----------------------------------------------------------------------------------

    async def _reclaim(self, cycle: _Cycle) -> None:
        """Punch gaps of segments that were sealed and settled before the cycle: the walk has met all their records."""
        for segment in sorted(cycle.live_extents):
            live = cycle.live_extents[segment]
            if live:
                await self._segments.room.punch_gaps(segment, sorted(_pairs(live)))
                await cycle.pacing.rest()
            else:
                cycle.report.removed_segments += await self._segments.room.remove(segment)


class _Cycle:
    """State of one cycle."""

    def __init__(
        self, born_before: Birth, marked: NumberSet, report: GcReport, settled: set[SegmentId], pacing: Pacing
    ) -> None:
        self.pacing = pacing
        self.born_before = born_before
        self.marked = marked
        self.walked = NumberSet()
        self.rests_on = Sequence(0)
        self.report = report
        self.live_extents: dict[SegmentId, array[int]] = {segment: array("Q") for segment in settled}
        self.unpunched: dict[tuple[SegmentId, int], array[int]] = {}
        """Durably freed chunks that are not punched yet, by the stretch that they begin in."""
        self.unpunched_count = 0
        self._extent_count = 0

    def note_unpunched(self, record: ChunkRecord) -> None:
        """Remember the place of a chunk that is freed durably and not punched yet."""
        stretch = (record.segment, record.offset // _STRETCH_BYTES)
        places = self.unpunched.setdefault(stretch, array("Q"))
        places.extend((record.offset, record.extent_bytes))
        self.unpunched_count += 1

    def note_live(self, record: ChunkRecord) -> None:
        """Count a chunk that stays, and remember its place if its segment may be reclaimed."""
        self.report.live_chunks += 1
        self.report.live_bytes += record.extent_bytes
        extents = self.live_extents.get(record.segment)
        if extents is None:
            return
        extents.extend((record.offset, record.extent_bytes))
        self._extent_count += 1
        if self._extent_count > EXTENTS_PER_CYCLE:
            fullest = max(self.live_extents, key=lambda segment: len(self.live_extents[segment]))
            self._extent_count -= len(self.live_extents.pop(fullest)) // 2
            assert 0 <= self._extent_count <= EXTENTS_PER_CYCLE, "the places in memory are bounded"


def _pairs(places: array[int]) -> Iterator[tuple[int, int]]:
    """Offsets and lengths."""
    return zip(places[::2], places[1::2], strict=True)
