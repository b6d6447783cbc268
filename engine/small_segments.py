"""Writing small segments: payloads under 64 KiB, packed, many callers' in one synced write.

Rules kept here:
- One group at a time, in one call to the pool: zero-fill when needed, all payloads, fdatasync.
- A task whose payloads wait leads the next group when nobody else does; there is no background task to die.
- Zeros are written ahead of the cursor before payload is placed there; without room for them nothing is placed.
- What is under way in a thread is never abandoned: a cancelled caller leaves only when its memory is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from engine.extents import Place, page_up
from engine.format import SEGMENT_DATA_OFFSET, SegmentKind
from engine.segment_files import grow
from engine.segment_maker import OpenSegment, SegmentMaker
from lakefs.errors import InternalError, LakeError
from lakefs.ids import Buffer, SegmentId
from lakefs.limits import MIB, PAGE_BYTES, SMALL_PAYLOAD_BYTES
from lakefs.ports import DiskFile

_ZEROS = bytes(MIB)


@dataclass(eq=False)
class _Append:
    """The payloads of one caller of `append`, and what has become of them."""

    payloads: Sequence[Buffer]
    places: list[Place] = field(default_factory=list)
    durable_count: int = 0
    taken: bool = False
    """Whether a group being written holds some of it."""
    error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self.durable_count == len(self.payloads)


class SmallWriter:
    """Packs payloads under 64 KiB, many callers' in one synced write."""

    def __init__(self, maker: SegmentMaker) -> None:
        self._maker = maker
        self._current: OpenSegment | None = None
        self._waiting: deque[_Append] = deque()
        self._group_ended: trio.Event | None = None
        """Set while a task leads: it makes room, then writes a group."""

    @property
    def current(self) -> SegmentId | None:
        """The segment that the next payload goes to."""
        return self._current.segment if self._current else None

    async def append(self, payloads: Sequence[Buffer]) -> list[Place]:
        """Write payloads; durable, and in flight, on return.  See `Segments.append_small`."""
        assert all(0 < len(payload) < SMALL_PAYLOAD_BYTES for payload in payloads)
        entry = _Append(payloads)
        if not payloads:
            return []
        self._waiting.append(entry)
        try:
            while not entry.done:
                self._maker.gate.check()
                if self._group_ended is None:
                    await self._lead()
                else:
                    await self._group_ended.wait()
                if entry.error is not None:
                    raise _copy_of(entry.error)
        except BaseException:
            await self._withdraw(entry)
            raise
        return entry.places

    async def _withdraw(self, entry: _Append) -> None:
        """Give up what was placed, once no thread reads the payloads any more."""
        while entry.taken:
            assert self._group_ended is not None
            with trio.CancelScope(shield=True):
                await self._group_ended.wait()
        if entry in self._waiting:
            self._waiting.remove(entry)
        for place in entry.places:
            self._maker.in_flight.settle(place)
        entry.places.clear()

    async def _lead(self) -> None:
        """Make room and write one group.  Until the group is taken this may be cancelled; another then leads."""
        ended = self._group_ended = trio.Event()
        try:
            segment = await self._segment_with_room(len(self._next_payload()))
            with trio.CancelScope(shield=True):
                await self._write_group(segment)
        finally:
            self._group_ended = None
            ended.set()

    def _next_payload(self) -> Buffer:
        first = self._waiting[0]
        return first.payloads[len(first.places)]

    async def _segment_with_room(self, length: int) -> OpenSegment:
        current = self._current
        if current is not None and current.cursor + length <= current.limit:
            return current
        assert SEGMENT_DATA_OFFSET + length <= self._maker.sizes.small_segment
        self._current = await self._maker.create(SegmentKind.SMALL)
        if current is not None:
            await self._maker.close(current)
        return self._current

    async def _write_group(self, segment: OpenSegment) -> None:
        start = segment.cursor
        group, parts = self._take_group(segment)
        if not parts:
            return  # the payload that room was made for was withdrawn, and the next one does not fit
        try:
            await self._maker.offload.run(self._write_blocking, segment, start, parts)
        except BaseException as error:
            self._maker.gate.note(error)
            self._fail(group, error)
            if not isinstance(error, LakeError):
                raise
            return
        for entry in group:
            entry.taken = False
            entry.durable_count = len(entry.places)
        self._waiting.extendleft(entry for entry in reversed(group) if not entry.done)

    def _take_group(self, segment: OpenSegment) -> tuple[list[_Append], list[Buffer]]:
        """Places for what waits, in order, as far as the segment and one step of filling go."""
        group: list[_Append] = []
        parts: list[Buffer] = []
        end = min(segment.limit, segment.cursor + max(self._maker.sizes.small_fill, SMALL_PAYLOAD_BYTES))
        while self._waiting:
            entry = self._waiting[0]
            for payload in entry.payloads[len(entry.places) :]:
                if segment.cursor + len(payload) > end:
                    break
                place = segment.take(len(payload))
                self._maker.in_flight.begin(place)
                entry.places.append(place)
                entry.taken = True
                parts.append(payload)
            if entry.taken:
                group.append(self._waiting.popleft())
            if len(entry.places) < len(entry.payloads):
                break  # taken in part or not at all: the rest goes to a later group
        return group, parts

    def _fail(self, group: list[_Append], error: BaseException) -> None:
        """Give the places of a group's callers up before another group can be given the same ones."""
        for entry in group:
            entry.taken = False
            entry.error = error
            for place in entry.places:
                self._maker.in_flight.settle(place)
            entry.places.clear()

    def _write_blocking(self, segment: OpenSegment, start: int, parts: list[Buffer]) -> None:
        """In a thread.  The segment is the group's alone until the call ends, so its fields may be changed here."""
        end = segment.cursor
        if end > segment.extended:
            segment.cursor = start  # nothing is written yet: without room the same places are given out again
            need = page_up(end) - segment.extended
            want = max(need, min(self._maker.sizes.small_fill, page_up(segment.limit) - segment.extended))
            segment.extended += grow(
                self._maker.disk,
                lambda offset, length: _fill(segment.file, offset, length),
                segment.extended,
                need,
                want,
                self._maker.sizes.headroom,
            )
            segment.cursor = end
        segment.file.pwritev(parts, start)
        try:
            segment.file.sync_data()
        except LakeError as error:
            self._maker.gate.shut(error)  # whatever the reason, the pages may be gone
            raise

    async def close(self) -> None:
        """Trim and close the file.  No append is under way."""
        current, self._current = self._current, None
        if current is not None:
            await self._maker.close(current)

    def abandon(self) -> None:
        """Close the file as it is."""
        current, self._current = self._current, None
        if current is not None:
            current.file.close()


def _fill(file: DiskFile, offset: int, length: int) -> None:
    """Write zeros ahead, so that later synced writes meet written blocks."""
    assert offset % PAGE_BYTES == 0
    for at in range(offset, offset + length, len(_ZEROS)):
        file.pwrite(memoryview(_ZEROS)[: min(len(_ZEROS), offset + length - at)], at)


def _copy_of(error: BaseException) -> BaseException:
    """A group's error for one of its callers: each raises an instance of its own."""
    if isinstance(error, LakeError):
        return type(error)(error.message, subject=error.subject)
    if isinstance(error, Exception):
        return InternalError(f"the task that wrote for several failed: {error!r}")
    return error  # the process is going down
