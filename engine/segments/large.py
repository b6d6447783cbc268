"""Writes large segments: page-aligned payloads, several at once, made durable by a shared sync.

Rules kept here:
- A place is taken by moving the segment's cursor, before the write begins.  An extent whose write failed or was
  cancelled is given up: it is never used again.
- A sync covers every write that ended before it began; later callers wait for the next one.
- A caller's last write is synced in the same call if no other write is under way: waiting would save no other sync.
  That sync counts only if no other write ended during the call.
- Room is preallocated in steps; a smaller step is tried before a payload is refused.
- A segment's file stays open for syncs until nothing in it is in flight, even after the next segment was begun.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import trio

from engine.format.extents import Place, large_extent_bytes
from engine.format.layouts import PAGE, SEGMENT_DATA_OFFSET, SegmentKind
from engine.host.failpoints import reached
from engine.segments.files import grow
from engine.segments.maker import OpenSegment, SegmentMaker
from lakefs.errors import LakeError
from lakefs.ids import SegmentId
from lakefs.ports import DiskFile

Coming = Callable[[], Iterable[int]]
"""Iterator, run in a thread: waits for the bytes of a run and yields how many leading ones are ready.  Each value is a
whole number of pages, larger than the last; the final one is the run's length.  Its errors end the write."""
IsLast = Callable[[], bool]
"""Called in a thread when a run is written: True if its caller writes no more before its next sync."""


def not_last() -> bool:
    """Return False: the default for callers that do not know."""
    return False


def _write(file: DiskFile, extents: Sequence[memoryview], offset: int, coming: Coming | None) -> None:
    """Write the extents; with `coming`, each part as soon as it is ready.  Blocks."""
    if coming is None:
        file.pwritev(extents, offset)
        return
    done = 0
    for ready in coming():
        assert ready > done, "each count of ready bytes is larger than the last"
        file.pwritev(_between(extents, done, ready), offset + done)
        done = ready
    assert done == sum(map(len, extents)), "a run arrives whole"


def _between(extents: Sequence[memoryview], begin: int, end: int) -> list[memoryview]:
    """Return the bytes [begin, end) of the extents, taken back to back."""
    parts: list[memoryview] = []
    for extent in extents:
        if begin < len(extent) and end > 0:
            parts.append(extent[max(begin, 0) : end])
        begin -= len(extent)
        end -= len(extent)
    return parts


class _Sync:
    """One fdatasync under way: the number of writes it covers, and its error."""

    def __init__(self, covers: int) -> None:
        self.covers = covers
        self.ended = trio.Event()
        self.error: LakeError | None = None


class _LargeSegment:
    """A large segment that is or was being written, and how many of its writes are durable."""

    def __init__(self, room: OpenSegment) -> None:
        self.room = room
        self.writes_under_way = 0
        self.writes_ended = 0
        self.writes_synced = 0
        self.syncing: _Sync | None = None


class LargeWriter:
    """Writes payloads of 64 KiB and more, past the page cache where possible."""

    def __init__(self, maker: SegmentMaker) -> None:
        self._maker = maker
        self._growing = trio.Lock()
        self._current: _LargeSegment | None = None
        self._open: dict[SegmentId, _LargeSegment] = {}

    @property
    def run_bytes_max(self) -> int:
        """Most bytes that the extents of one `write` may sum to."""
        return self._maker.sizes.large_segment - SEGMENT_DATA_OFFSET

    @property
    def current(self) -> SegmentId | None:
        """The segment that takes the next payload; None before the first."""
        return self._current.room.segment if self._current else None

    async def write(
        self, run: Sequence[tuple[memoryview, int]], coming: Coming | None = None, is_last: IsLast = not_last
    ) -> list[Place]:
        """Write sealed payloads (see `seal_payload`) back to back: at least one, `run_bytes_max` in all at most.

        Each is (page-aligned memory that begins with the payload, the payload's length).  `coming`: the bytes arrive
        during the write, see `Coming`.  `is_last`: see `IsLast`.

        Durable after `sync` of the places' segment.  The extents are in flight until `InFlight.settle`.  StoreFull,
        StoreReadOnly, DiskFailed; then, and when cancelled, all of them are given up and never used again.  However
        the call ends, it does not touch the memory afterwards.
        """
        extents = [buffer[: large_extent_bytes(stored_bytes)] for buffer, stored_bytes in run]
        segment = await self._segment_with_room(sum(map(len, extents)))
        places = [segment.room.take(len(extent)) for extent in extents]
        assert places[0].offset % PAGE == 0, "large payloads begin at a page"
        for place in places:
            self._maker.in_flight.begin(place)
        segment.writes_under_way += 1
        try:
            ended_before_sync = await self._maker.offload.run(
                self._write_blocking, segment, extents, places[0].offset, coming, is_last
            )
        except BaseException as error:
            for place in places:
                self._maker.in_flight.settle(place)
            self._maker.gate.note(error)
            raise
        finally:
            segment.writes_under_way -= 1
        if ended_before_sync == segment.writes_ended:
            segment.writes_synced = segment.writes_ended + 1
        segment.writes_ended += 1
        assert segment.writes_synced <= segment.writes_ended
        return places

    async def sync(self, segments: Collection[SegmentId]) -> None:
        """Make every write that has returned for these segments durable.

        Callers share a sync that began after their writes.  Raises DiskFailed when it failed: it is never retried, and
        every later write or sync raises StoreReadOnly.
        """
        for segment in filter(None, map(self._open.get, segments)):
            await self._sync(segment)

    async def _sync(self, segment: _LargeSegment) -> None:
        wanted = segment.writes_ended
        while segment.writes_synced < wanted:
            self._maker.gate.check()
            under_way = segment.syncing
            if under_way is None:
                await self._lead_sync(segment)
                continue
            await under_way.ended.wait()
            if under_way.error is not None and under_way.covers >= wanted:
                raise type(under_way.error)(under_way.error.message, subject=under_way.error.subject)

    async def close_settled(self) -> None:
        """Close the files of earlier segments that have nothing in flight."""
        for segment_id, segment in list(self._open.items()):
            settled = not self._maker.in_flight.count(segment_id) and segment.syncing is None
            if settled and segment is not self._current and segment_id in self._open:
                del self._open[segment_id]
                await self._maker.close(segment.room)

    async def close(self) -> None:
        """Trim and close all files.  No write or sync is under way."""
        self._current = None
        while self._open:
            _, segment = self._open.popitem()
            await self._maker.close(segment.room)

    def abandon(self) -> None:
        """Close the files as they are, untrimmed."""
        self._current = None
        while self._open:
            _, segment = self._open.popitem()
            segment.room.file.close()

    async def _lead_sync(self, segment: _LargeSegment) -> None:
        sync = segment.syncing = _Sync(segment.writes_ended)
        try:
            await self._maker.offload.run(self._sync_blocking, segment)
            segment.writes_synced = max(segment.writes_synced, sync.covers)
        except LakeError as error:
            sync.error = error
            raise
        finally:
            segment.syncing = None
            sync.ended.set()

    def _write_blocking(
        self, segment: _LargeSegment, extents: Sequence[memoryview], offset: int, coming: Coming | None, is_last: IsLast
    ) -> int | None:
        """Write; sync too if this write is the last and alone, and return the writes ended before the sync.  Blocks."""
        _write(segment.room.file, extents, offset, coming)
        reached("large.written")
        if not is_last() or segment.writes_under_way > 1 or segment.syncing is not None:
            return None
        ended = segment.writes_ended
        self._sync_blocking(segment)
        return ended

    def _sync_blocking(self, segment: _LargeSegment) -> None:
        """Sync the file.  Blocks.  Any error shuts the gate."""
        try:
            segment.room.file.sync_data()
        except LakeError as error:
            self._maker.gate.shut(error)
            raise
        reached("large.synced")

    async def _segment_with_room(self, extent: int) -> _LargeSegment:
        """Return the current segment once it has room.  No checkpoint between finding the room and returning."""
        while True:
            self._maker.gate.check()
            current = self._current
            if current is not None and current.room.cursor + extent <= current.room.extended:
                return current
            async with self._growing:
                current = self._current
                if current is None or current.room.cursor + extent > current.room.limit:
                    await self._begin_segment(extent)
                elif current.room.cursor + extent > current.room.extended:
                    await self._extend(current.room, extent)

    async def _begin_segment(self, extent: int) -> None:
        assert SEGMENT_DATA_OFFSET + extent <= self._maker.sizes.large_segment
        room = await self._maker.create(SegmentKind.LARGE)
        self._current = self._open[room.segment] = _LargeSegment(room)
        await self.close_settled()

    async def _extend(self, room: OpenSegment, extent: int) -> None:
        sizes = self._maker.sizes
        need = room.cursor + extent - room.extended
        want = max(need, min(sizes.large_extend, room.limit - room.extended))
        try:
            left_free = self._maker.left_free_bytes()
            room.extended += await self._maker.offload.run(
                grow, self._maker.disk, room.file.allocate, room.extended, need, want, left_free
            )
            reached("segment.extended")
        except LakeError as error:
            self._maker.gate.note(error)
            raise
