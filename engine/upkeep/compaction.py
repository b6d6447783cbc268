"""Compaction: moves the live chunks of segments that are mostly garbage to new places, then removes the segments.

gc punches whole pages.  Small chunks share pages, so a segment with few live chunks may keep most of its room.
One run, beside readers, writers and gc:
1. *Choose.*  All records are walked once, and the live bytes of each segment are added up.  A segment is chosen if it
   was sealed with nothing in flight before the walk, so that the walk met all its records, and if at most `share` of
   its room is live.  The open small segment is sealed first if it qualifies.  The emptiest come first.
2. *Move.*  The records of some of them are walked again, now that no record can be added there.  Segment by segment,
   in the order of offsets and in small batches: payloads are read and checked, hashed, and written like those of a put,
   to segments with new ids.  One decision changes the places of those records that have not changed since.
3. *Free.*  When the batch's group is durable, its old places are punched, with the dead bytes behind each, so that a
   batch gives back more than it took.  A segment is removed when none of its records is left there, and every group
   that this was read from is durable.

Rules kept here:
- An old place is freed only when the group that names the new one is durable, and that group is appended only behind
  the payload.  So at every moment the record that a crash leaves names valid bytes.  A crash may also leave copies
  without record, or places without one: garbage that the next cycle of gc removes.
- Birth, lengths and checksum of a chunk stay: sessions, gc's marks and leases hold it by birth or id.
- A record that was freed, stored anew or quarantined during the copy is not touched; its copy is given up.
- A chunk that does not match its checksum or its id is quarantined and stays in place, and so does its segment.
- A reader with the old place sees the bytes, or zeros, which do not match; it asks again and gets the new place.
- A batch is moved only if it finds room: up to half of the headroom that payload leaves free, with half of the reserve
  held.  So a full disk whose dead chunks share pages with live ones is emptied step by step.

A run may be cancelled at every `await`.  Memory: `COMPACT_RECORDS_MAX` records, and one batch of payload.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Final

import msgspec
import trio

from engine.chunks.chunk_store import Chunks, hash_wrong
from engine.chunks.payload import Hashed, Payload, PayloadMemory, Written, is_small
from engine.chunks.shards import seal
from engine.format.extents import large_extent_bytes
from engine.format.layouts import ChunkRecord, Table, chunk_id_of_key, unpack_chunk_record
from engine.format.shards import shard_of_key
from engine.host.failpoints import reached
from engine.metadata.metadata_store import Metadata
from engine.metadata.pacing import REST_AFTER_WRITING, Pacing
from engine.segments.segment_store import Segments
from engine.superblock.reserve import Reserve
from engine.tables.views import Transaction
from lakefs.errors import CorruptionError, LakeError, OperationalError, StoreFull
from lakefs.ids import WHOLE_CHUNK, ChunkId, SegmentId, Sequence, ShardNumber, kind_of
from lakefs.limits import (
    COMPACT_BATCH,
    COMPACT_BATCH_BESIDE_WRITERS,
    COMPACT_BATCH_BYTES,
    COMPACT_BYTES_PER_S,
    COMPACT_RECORDS_MAX,
    COMPACT_SHARE,
    GC_BATCH,
    MIB,
    PAGE_BYTES,
)

_STRETCH_BYTES: Final = MIB


@dataclass
class CompactionReport:
    """The result of one run.  Byte counts are of stored payload and vectors."""

    moved_chunks: int = 0
    moved_bytes: int = 0
    removed_segments: int = 0
    changed_meanwhile: int = 0
    """Chunks that were freed, stored anew, or found damaged while they were copied."""
    unreadable_chunks: int = 0
    """Chunks that could not be read: freed during the run, or damaged; damaged ones stay in place."""
    stopped: str = ""
    """Reason why some eligible segments were not compacted; empty if there are none."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A chunk, and its record when it was found."""

    key: bytes
    record: ChunkRecord
    vacated_bytes: int = 0
    """Bytes from its offset on that are dead once it has been moved."""

    @property
    def chunk(self) -> ChunkId:
        return chunk_id_of_key(self.key)

    @property
    def shard(self) -> ShardNumber:
        return shard_of_key(self.key)


_Copies = dict[int, tuple[_Found, Hashed]]  # copies in memory, by the identity of the payload
_FoundByPlace = dict[int, list[_Found]]  # chunks of one segment, by the stretch of it that they begin in


@dataclass
class _Living:
    """The live chunks of one segment."""

    chunk_count: int = 0
    room_bytes: int = 0
    """Room that they would take in segments of their own."""


class Compactor:
    """Compacts one store; one run at a time.  `reclaiming` is the lock held by each remover of segments."""

    def __init__(
        self,
        metadata: Metadata,
        segments: Segments,
        chunks: Chunks,
        memory: PayloadMemory,
        reserve: Reserve,
        reclaiming: trio.Lock,
        *,
        won_bytes_min: int,
        batch: int = GC_BATCH,
    ) -> None:
        self._metadata = metadata
        self._segments = segments
        self._chunks = chunks
        self._memory = memory
        self._reserve = reserve
        self._reclaiming = reclaiming
        self._won_bytes_min = won_bytes_min
        self._batch = batch
        self._lock = trio.Lock()
        self._pacing = Pacing(metadata)
        self._rests_on = Sequence(0)

    @property
    def running(self) -> bool:
        """True while a run is under way."""
        return self._lock.locked()

    async def run(self, share: float = COMPACT_SHARE) -> CompactionReport:
        """Compact every segment with at most `share` of its room live.  A second caller waits for the first.

        Every move in the report is durable.  Lack of room ends the run early and is in the report.  A cancelled run
        keeps its moves, and may leave garbage for gc.  Raises StoreReadOnly, DiskFailed, IndexDamaged.
        """
        async with self._lock:
            report = CompactionReport()
            self._pacing = Pacing(self._metadata)
            try:
                chosen = await self._choose(share)
                while chosen:
                    await self._compact(_next_round(chosen), report)
            except StoreFull as error:
                report.stopped = error.message
            return report

    # --- choosing ----------------------------------------------------------------------------------

    async def _choose(self, share: float) -> dict[SegmentId, _Living]:
        """Return the segments worth compacting, the emptiest first."""
        settled = {s for s in self._segments.room.sealed() if not self._segments.in_flight.count(s)}
        filled_before = self._segments.small.filled
        living: dict[SegmentId, _Living] = {}
        after = b""
        while page := self._page(after):
            after = page[-1].key
            for found in page:
                entry = living.setdefault(found.record.segment, _Living())
                entry.chunk_count += 1
                entry.room_bytes += _room_of(found.record)
            await self._pacing.rest()
        if filled_before and await self._is_retired(*filled_before, living, share):
            settled.add(filled_before[0])
        worth: list[tuple[float, SegmentId]] = []
        for segment in settled:
            if self._segments.in_flight.count(segment) or segment not in self._segments.register.kinds:
                continue  # gc may have removed it during the walk
            if self._segments.pins.has(segment):
                continue  # a pinned segment keeps its room, so a move would use it twice
            # The header's page is only given back with the file.
            room = await self._segments.room.allocated_bytes([segment]) - PAGE_BYTES
            lives = living.setdefault(segment, _Living()).room_bytes
            if not lives or self._is_worth_it(lives, room, share):
                worth.append((lives / room if lives else 0.0, segment))
        return {segment: living[segment] for _, segment in sorted(worth)}

    def _is_worth_it(self, lives: int, room: int, share: float) -> bool:
        """Return True if moving `lives` bytes gives enough of `room` back."""
        return lives <= share * room and room - lives >= self._won_bytes_min

    async def _is_retired(
        self, segment: SegmentId, placed_before: int, living: dict[SegmentId, _Living], share: float
    ) -> bool:
        """Seal the open small segment if it is worth it; True if sealed.  Chunks added during the walk are live."""
        filled = self._segments.small.filled
        if filled is None or filled[0] != segment:
            return False
        lives = living.setdefault(segment, _Living())
        lives.room_bytes += filled[1] - placed_before
        if not self._is_worth_it(lives.room_bytes, filled[1], share):
            return False
        await self._segments.small.retire(segment)
        reached("compaction.sealed")
        return True

    # --- moving ------------------------------------------------------------------------------------

    async def _compact(self, chosen: dict[SegmentId, _Living], report: CompactionReport) -> None:
        """Move the segments' chunks out, and remove the segments."""
        is_complete = False
        while not is_complete:
            found, is_complete = await self._find(chosen)
            moved_before = report.moved_chunks
            for segment in chosen:
                if segment not in self._segments.register.kinds:
                    continue
                left = await self._empty(segment, found[segment], is_complete, report)
                if is_complete and not left:
                    await self._remove(segment, report)
            if report.moved_chunks == moved_before:
                break  # the rest cannot be moved

    async def _find(self, chosen: dict[SegmentId, _Living]) -> tuple[dict[SegmentId, _FoundByPlace], bool]:
        """Return the chunks in the segments, and True if these are all; then no other is, or ever will be, there."""
        found: dict[SegmentId, _FoundByPlace] = {segment: defaultdict(list) for segment in chosen}
        count = 0
        after = b""
        while page := self._page(after):
            after = page[-1].key
            for item in page:
                there = found.get(item.record.segment)
                if there is not None:
                    there[_offset_of(item) // _STRETCH_BYTES].append(item)
                    count += 1
            if count > COMPACT_RECORDS_MAX:
                return found, False
            await self._pacing.rest()
        return found, True

    async def _empty(
        self, segment: SegmentId, found: _FoundByPlace, is_complete: bool, report: CompactionReport
    ) -> int:
        """Move chunks of one segment; returns how many stay.  Raises StoreFull without room for the next batch."""
        if not is_complete:  # the dead bytes in between are unknown: little comes back before all are moved
            await self._room_for(await self._segments.room.allocated_bytes([segment]))
        ordered = _by_offset(found, is_complete)
        good = (item for item in ordered if not self._chunks.is_damaged(item.chunk, item.shard))
        pending = deque(islice(good, COMPACT_BATCH))
        left = sum(map(len, found.values()))
        while pending:
            began = trio.current_time()
            room = await self._room_for(_room_of(pending[0].record))
            count_max = COMPACT_BATCH_BESIDE_WRITERS if self._pacing.somebody_writes else COMPACT_BATCH
            batch = _next_batch(pending, count_max, room)
            left -= await self._move(batch, report)
            assert left >= 0, "no chunk is moved twice"
            pending.extend(islice(good, len(batch)))
            moved_bytes = sum(item.record.extent_bytes for item in batch)
            await self._pacing.rest(REST_AFTER_WRITING)
            await trio.sleep(max(0.0, began + moved_bytes / COMPACT_BYTES_PER_S - trio.current_time()))
        return left

    async def _room_for(self, needed_bytes: int) -> int:
        """Return the room that copies may take, at least `needed_bytes`.  Raises StoreFull.

        The reserve is filled first: every move writes journal and index, which must not use what removals and gc need.
        """
        await self._chunks.offload.run(self._reserve.restore)
        if self._reserve.held_bytes < self._reserve.target_bytes // 2:
            raise StoreFull("the disk is full and the reserve is used: nothing is moved until there is more room")
        # One page for the header of a new segment, one for a last partial page.
        room = await self._segments.room.free_bytes(into_headroom=True) - 2 * PAGE_BYTES
        if room < needed_bytes:
            raise StoreFull(
                f"no room to move {needed_bytes} bytes out of a segment; what gc freed is free all the same"
            )
        return room

    async def _move(self, batch: Seq[_Found], report: CompactionReport) -> int:
        """Move a batch; returns how many chunks were moved."""
        large = [item for item in batch if not is_small(item.record.stored_bytes)]
        kinds = [kind_of(item.chunk) for item in large]
        body = await self._memory.take(kinds, [item.record.stored_bytes for item in large])
        try:
            read = await self._read_large(large, body.payloads)
            read += await self._read_small([item for item in batch if is_small(item.record.stored_bytes)])
            copies = await self._matching(read)
            report.unreadable_chunks += len(batch) - len(copies)
            return await self._record(copies, report) if copies else 0
        finally:
            body.release()

    async def _read_large(self, items: Seq[_Found], payloads: Seq[Payload]) -> list[tuple[_Found, Payload]]:
        read: list[tuple[_Found, Payload]] = []
        for item, payload in zip(items, payloads, strict=True):
            try:
                await self._segments.reader.read_chunk(item.record, payload.area)
            except (CorruptionError, OperationalError) as error:
                await self._chunks.judged(item.chunk, item.record, error, item.shard)
            else:
                read.append((item, payload))
        return read

    async def _read_small(self, items: Seq[_Found]) -> list[tuple[_Found, Payload]]:
        read: list[tuple[_Found, Payload]] = []
        payloads = await self._segments.batches.read_small([item.record for item in items])
        for item, payload in zip(items, payloads, strict=True):
            if isinstance(payload, LakeError):
                await self._chunks.judged(item.chunk, item.record, payload, item.shard)
            else:
                read.append((item, Payload(kind_of(item.chunk), len(payload), small=memoryview(payload))))
        return read

    async def _matching(self, read: Seq[tuple[_Found, Payload]]) -> _Copies:
        """Return the chunks whose bytes hash to their ids (a checksum is not enough), and the shards that match."""
        whole = [each for each in read if each[0].shard == WHOLE_CHUNK]
        shards = [each for each in read if each[0].shard != WHOLE_CHUNK]
        hashed = await self._chunks.ingest.hash([payload for _, payload in whole])
        copies: _Copies = {}
        for (item, _), copy in zip(whole, hashed, strict=True):
            if copy.chunk == item.chunk and copy.crc == item.record.crc:
                copies[id(copy.payload)] = item, copy
            else:
                await self._chunks.judged(item.chunk, item.record, hash_wrong(item.chunk))
        crcs = await self._chunks.offload.run(lambda: [seal(payload)[1] for _, payload in shards]) if shards else []
        for (item, payload), crc in zip(shards, crcs, strict=True):
            if crc == item.record.crc:
                copies[id(payload)] = item, Hashed(payload, item.chunk, crc)
        return copies

    async def _record(self, copies: _Copies, report: CompactionReport) -> int:
        """Write the copies, set the records' places to them, and free the old places; returns how many were moved."""
        written = await self._chunks.ingest.write([copy for _, copy in copies.values()], into_headroom=True)
        reached("compaction.copied")

        def decide(txn: Transaction) -> list[_Found]:
            return [item for copy in written if (item := self._move_in(txn, copies, copy)) is not None]

        try:
            moved, sequence = await self._metadata.commit(decide)
            await self._free(moved, sequence)
        finally:
            self._chunks.ingest.settle(written)
        report.moved_chunks += len(moved)
        report.moved_bytes += sum(item.record.extent_bytes for item in moved)
        report.changed_meanwhile += len(copies) - len(moved)
        return len(moved)

    def _move_in(self, txn: Transaction, copies: _Copies, copy: Written) -> _Found | None:
        """Set one record's new place; returns None if the record has changed since the copy."""
        item, _ = copies[id(copy.hashed.payload)]
        if not self._is_unchanged(txn, item):
            return None
        assert copy.place.segment != item.record.segment, "a sealed segment gets no more payload"
        record = msgspec.structs.replace(item.record, segment=copy.place.segment, offset=copy.place.offset)
        txn.put(Table.CHUNKS, item.key, record.pack())
        return item

    def _is_unchanged(self, txn: Transaction, item: _Found) -> bool:
        """Return True if the record is unchanged (same birth, same place) and the chunk is not quarantined."""
        value = txn.get(Table.CHUNKS, item.key)
        if value is None or self._chunks.is_damaged(item.chunk, item.shard):
            return False
        return unpack_chunk_record(value) == item.record

    # --- freeing -----------------------------------------------------------------------------------

    async def _free(self, moved: Seq[_Found], sequence: Sequence) -> None:
        """Punch the old places, once the new ones are durable."""
        await self._metadata.wait_durable(sequence)
        assert self._metadata.durable_sequence >= sequence, "old places are freed behind the durable new ones"
        places = [(item.record.segment, item.record.offset, item.vacated_bytes) for item in moved]
        reached("compaction.moved")
        await self._segments.room.punch(places)
        reached("compaction.punched")

    async def _remove(self, segment: SegmentId, report: CompactionReport) -> None:
        """Remove a segment without live chunks, once every group that this was read from is durable."""
        await self._metadata.wait_durable(self._rests_on)
        assert not self._segments.in_flight.count(segment), "nothing is written to a sealed segment"
        async with self._reclaiming:
            if segment in self._segments.register.kinds:  # else gc has removed it
                report.removed_segments += await self._segments.room.remove(segment)
                reached("compaction.segment-removed")

    # --- records -----------------------------------------------------------------------------------

    def _page(self, after: bytes) -> list[_Found]:
        """Return the next records in the order of their keys."""
        with self._metadata.view() as view:
            scan = view.scan(Table.CHUNKS, after + b"\0" if after else b"", b"\xff")
            page = [
                _Found(key, unpack_chunk_record(value)) for key, value in islice(scan, self._pacing.step(self._batch))
            ]
            self._rests_on = max(self._rests_on, view.sequence)
        return page


def _next_round(chosen: dict[SegmentId, _Living]) -> dict[SegmentId, _Living]:
    """Take segments off the front whose records fit into memory together; at least one."""
    taken: dict[SegmentId, _Living] = {}
    count = 0
    while chosen:
        segment = next(iter(chosen))
        count += chosen[segment].chunk_count
        if taken and count > COMPACT_RECORDS_MAX:
            break
        taken[segment] = chosen.pop(segment)
    return taken


def _by_offset(found: _FoundByPlace, is_complete: bool) -> Iterator[_Found]:
    """Yield chunks by offset, with the bytes each vacates: up to the next one if these are all of the segment.

    Sorted stretch by stretch, on demand: sorting a hundred thousand at once would block the loop.
    """
    ordered = chain.from_iterable(sorted(found[stretch], key=_offset_of) for stretch in sorted(found))
    previous = next(ordered, None)
    for item in chain(ordered, (None,)):
        if previous is not None:
            end = _offset_of(item) if is_complete and item is not None else 0
            extent_bytes = previous.record.extent_bytes
            yield replace(previous, vacated_bytes=end - _offset_of(previous) if end else extent_bytes)
        previous = item


def _offset_of(found: _Found) -> int:
    return found.record.offset


def _next_batch(pending: deque[_Found], count_max: int, room_bytes: int) -> list[_Found]:
    """Take chunks off the front that are copied together; at least one."""
    batch = [pending.popleft()]
    room = min(room_bytes, COMPACT_BATCH_BYTES) - _room_of(batch[0].record)
    while pending and len(batch) < count_max and (room := room - _room_of(pending[0].record)) >= 0:
        batch.append(pending.popleft())
    return batch


def _room_of(record: ChunkRecord) -> int:
    """Return the room that the chunk takes in a segment of its own kind."""
    length = record.stored_bytes
    return length if is_small(length) else large_extent_bytes(length)
