"""Writing large segments: page-aligned payloads, several at once, durable after a sync that they share.

Rules kept here:
- A place is taken by moving the segment's cursor, before the write begins; an extent whose write failed or was
  cancelled is given up.
- A sync serves every write that ended before it began; callers that come later wait for the next one.
- The last write of a caller, when no other is under way, is synced by the call that writes it: nobody else's sync
  would be saved by waiting for him.  It counts only if no other write has ended meanwhile.
- Room is preallocated in steps; a smaller step is tried before a payload is refused.
- A segment's file stays open for syncs until nothing in it is in flight, also after the next one was begun.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import trio

from engine.format.extents import Place, large_extent_bytes
from engine.format.layouts import SEGMENT_DATA_OFFSET, SegmentKind
from engine.host.failpoints import reached
from engine.segments.files import grow
from engine.segments.maker import OpenSegment, SegmentMaker
from lakefs.errors import LakeError
from lakefs.ids import SegmentId
from lakefs.ports import DiskFile

Coming = Callable[[], Iterable[int]]
"""Waits for the bytes of a run, in a thread: gives how many of them are there, whole pages and ascending, all at last.
What it raises, the write raises."""
IsLast = Callable[[], bool]
"""Asked in a thread, when a run is written: whether its caller writes no more before he syncs."""


def not_last() -> bool:
    """A caller who does not say."""
    return False


def _write(file: DiskFile, extents: Sequence[memoryview], offset: int, coming: Coming | None) -> None:
    """Write what comes, as it comes; blocks."""
    if coming is None:
        file.pwritev(extents, offset)
        return
    done = 0
    for there in coming():
        file.pwritev(_between(extents, done, there), offset + done)
        done = there
    assert done == sum(map(len, extents)), "a run came as a whole"


def _between(extents: Sequence[memoryview], begin: int, end: int) -> list[memoryview]:
    """What the extents, one behind the other, have at [begin, end)."""
    parts: list[memoryview] = []
    for extent in extents:
        if begin < len(extent) and end > 0:
            parts.append(extent[max(begin, 0) : end])
        begin -= len(extent)
        end -= len(extent)
    return parts


class _Sync:
    """One fdatasync under way: how many writes it covers, and how it ended."""

    def __init__(self, covers: int) -> None:
        self.covers = covers
        self.ended = trio.Event()
        self.error: LakeError | None = None


class _LargeSegment:
    """A large segment that is or was being written, and which of its writes are durable."""

    def __init__(self, room: OpenSegment) -> None:
        self.room = room
        self.writes_under_way = 0
        self.writes_ended = 0
        self.writes_synced = 0
        self.syncing: _Sync | None = None


class LargeWriter:
    """Writes payloads of 64 KiB and more, past the page cache where that is possible."""

    def __init__(self, maker: SegmentMaker) -> None:
        self._maker = maker
        self._growing = trio.Lock()
        self._current: _LargeSegment | None = None
        self._open: dict[SegmentId, _LargeSegment] = {}

    @property
    def run_bytes_max(self) -> int:
        """Most that the extents of one `write` add up to."""
        return self._maker.sizes.large_segment - SEGMENT_DATA_OFFSET

    @property
    def current(self) -> SegmentId | None:
        """The segment that the next payload goes to."""
        return self._current.room.segment if self._current else None

    async def write(
        self,
        run: Sequence[tuple[memoryview, int]],
        coming: Coming | None = None,
        is_last: IsLast = not_last,
    ) -> list[Place]:
        """Write sealed payloads (see `seal_payload`) one behind the other: at least one, `run_bytes_max` at most.

        Each is (page-aligned memory that begins with the payload, the payload's length).  `coming`: the bytes arrive
        while they are written, see `Coming`.  `is_last`: see `IsLast`.

        Durable after `sync` of the places' segment.  The extents are in flight until `InFlight.settle`.  StoreFull,
        StoreReadOnly, DiskFailed; then, and when cancelled, all of them are given up and never used again.  The memory
        is not touched any more on return, however it returns.
        """
        extents = [buffer[: large_extent_bytes(stored_bytes)] for buffer, stored_bytes in run]
        segment = await self._segment_with_room(sum(map(len, extents)))
        places = [segment.room.take(len(extent)) for extent in extents]
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
        return places

    async def sync(self, segments: Collection[SegmentId]) -> None:
        """Make everything that `write` has returned for these segments durable.

        Callers share a sync that began after their writes.  DiskFailed when it failed: it is never tried again, and
        every later write or sync is StoreReadOnly.
        """
        for segment in segments:
            await self._sync(segment)

    async def _sync(self, segment_id: SegmentId) -> None:
        segment = self._open.get(segment_id)
        if segment is None:
            return
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
        """Close the files of earlier segments in which nothing is in flight any more."""
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
        """Close the files as they are."""
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
        self,
        segment: _LargeSegment,
        extents: Sequence[memoryview],
        offset: int,
        coming: Coming | None,
        is_last: IsLast,
    ) -> int | None:
        """Write; sync too when it is the last and alone: then how many writes had ended before the sync.  Blocks."""
        _write(segment.room.file, extents, offset, coming)
        reached("large.written")
        if not is_last() or segment.writes_under_way > 1 or segment.syncing is not None:
            return None
        ended = segment.writes_ended
        self._sync_blocking(segment)
        return ended

    def _sync_blocking(self, segment: _LargeSegment) -> None:
        """Blocks.  Whatever fails shuts the gate."""
        try:
            segment.room.file.sync_data()
        except LakeError as error:
            self._maker.gate.shut(error)
            raise
        reached("large.synced")

    async def _segment_with_room(self, extent: int) -> _LargeSegment:
        """The current segment once it has room.  No checkpoint between finding the room and returning."""
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
