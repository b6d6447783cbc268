"""Makes segments for both writers: creates and closes files, gives out their bytes, refuses writes after a failure.

Rules kept here:
- A cursor only moves forward: `OpenSegment.take` gives a byte out once.
- The first failed write or sync shuts the gate (`WriteGate`) until restart: nothing is retried, later writes
  raise StoreReadOnly.
- A full disk is not a failure: nothing is lost, and the next call tries again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from engine.format.extents import InFlight, Place, page_up
from engine.format.layouts import PAGE, SEGMENT_DATA_OFFSET, SegmentKind, StoreIdentity
from engine.format.sizes import SegmentSizes
from engine.host.failpoints import reached
from engine.segments.files import SegmentRegister, create_segment_file
from lakefs.errors import DiskFailed, LakeError, StoreReadOnly
from lakefs.ids import SegmentId
from lakefs.ports import Disk, DiskFile, Offload


class WriteGate:
    """Refuses payload writes once a write or sync has failed, until restart."""

    def __init__(self) -> None:
        self.reason = ""
        """The first failure; empty while the gate is open."""

    def check(self) -> None:
        """Raise StoreReadOnly if the gate is shut."""
        if self.reason:
            raise StoreReadOnly(f"no write is accepted until restart, because: {self.reason}")

    def shut(self, error: LakeError) -> None:
        """Shut the gate after a failed sync: writes since the last sync may be lost.  The first reason is kept."""
        self.reason = self.reason or error.message
        assert self.reason, "a shut gate has a reason"

    def note(self, error: BaseException) -> None:
        """Shut the gate after a failed write, unless the disk was merely full."""
        if isinstance(error, (DiskFailed, StoreReadOnly)):
            self.shut(error)


@dataclass
class OpenSegment:
    """A segment that this boot created and may still write or sync."""

    segment: SegmentId
    kind: SegmentKind
    file: DiskFile
    limit: int
    cursor: int = SEGMENT_DATA_OFFSET
    """First byte not given out."""
    extended: int = SEGMENT_DATA_OFFSET
    """End of the room taken on disk: preallocated, or filled with zeros."""
    is_closed: bool = False

    def take(self, length: int) -> Place:
        """Give out the next `length` bytes, once."""
        assert not self.is_closed, "a closed segment takes no payload"
        assert self.cursor < self.cursor + length <= self.limit
        place = Place(self.segment, self.cursor)
        self.cursor += length
        return place


@dataclass
class SegmentMaker:
    """Makes and closes segment files for both writers."""

    disk: Disk
    offload: Offload
    identity: StoreIdentity
    allocate_segment_id: Callable[[], Awaitable[SegmentId]]
    sizes: SegmentSizes
    owed_bytes: Callable[[], int]
    """Bytes of disk that the metadata will still take; payload leaves them free, beside the headroom."""
    register: SegmentRegister = field(default_factory=SegmentRegister)
    in_flight: InFlight = field(default_factory=InFlight)
    gate: WriteGate = field(default_factory=WriteGate)

    def left_free_bytes(self, *, into_headroom: bool = False) -> int:
        """Return the bytes of disk that payload leaves free.  Callable from any thread.

        `into_headroom`: only half as much, for callers that at once free more room than they take.
        """
        left_free = self.owed_bytes() + self.sizes.headroom
        return left_free // 2 if into_headroom else left_free

    async def create(self, kind: SegmentKind, *, into_headroom: bool = False) -> OpenSegment:
        """Create an empty segment, durable with its name.  StoreFull leaves nothing behind but a skipped id.

        `into_headroom`: half of the room that payload leaves free may be taken.
        """
        segment = await self.allocate_segment_id()
        while segment in self.register.kinds:  # the counter is behind the files, as after a rebuild
            segment = await self.allocate_segment_id()
        left_free = self.left_free_bytes(into_headroom=into_headroom)
        try:
            file = await self.offload.run(create_segment_file, self.disk, self.identity, segment, kind, left_free)
        except LakeError as error:
            self.gate.note(error)
            raise
        assert segment not in self.register.kinds, f"segment id {segment} was given out twice"
        self.register.kinds[segment] = kind
        limit = self.sizes.large_segment if kind is SegmentKind.LARGE else self.sizes.small_segment
        return OpenSegment(segment, kind, file, limit)

    async def close(self, segment: OpenSegment) -> None:
        """Cut off the unused tail and close the file.  No write to it is under way."""
        cut = 0 if self.gate.reason else page_up(segment.cursor)
        try:
            with trio.CancelScope(shield=True):
                await self.offload.run(close_segment_file, segment.file, cut)
        except LakeError as error:
            self.gate.shut(error)
            raise


def close_segment_file(file: DiskFile, size: int) -> None:
    """Cut a file to `size` (0: leave it) and close it; blocks."""
    assert size % PAGE == 0, "a segment ends at a page"
    try:
        if size and size < file.size():
            file.truncate(size)
            reached("segment.cut")
            file.sync_data()
    finally:
        file.close()
