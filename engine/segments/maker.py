"""Making segments: their sizes, their files, and the gate that the first failure shuts.

What the writers of large and of small segments share.  Rules kept here:
- A cursor only moves forward: `OpenSegment.take` gives a byte out once.
- The first failed write or sync shuts the gate for good: nothing is retried, everything later is StoreReadOnly.
- No room is not a failure: nothing is lost, and the next call tries again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from engine.format.extents import InFlight, Place, page_up
from engine.format.layouts import SEGMENT_DATA_OFFSET, SegmentKind, StoreIdentity
from engine.format.sizes import SegmentSizes
from engine.host.failpoints import reached
from engine.segments.files import SegmentRegister, create_segment_file
from lakefs.errors import DiskFailed, LakeError, StoreReadOnly
from lakefs.ids import SegmentId
from lakefs.ports import Disk, DiskFile, Offload


class WriteGate:
    """Whether payload may be written: shut by the first failed write or sync, until restart."""

    def __init__(self) -> None:
        self.reason = ""
        """What failed first; empty while the gate is open."""

    @property
    def failed(self) -> bool:
        """Whether a write or sync has failed."""
        return bool(self.reason)

    def check(self) -> None:
        """StoreReadOnly once shut."""
        if self.reason:
            raise StoreReadOnly(f"no write is accepted until restart, because: {self.reason}")

    def shut(self, error: LakeError) -> None:
        """A sync failed, for whatever reason: what was written since the last may be gone.  The first one stays."""
        self.reason = self.reason or error.message

    def note(self, error: BaseException) -> None:
        """A write failed: shut, unless there was merely no room."""
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
    """First byte that nobody was given."""
    extended: int = SEGMENT_DATA_OFFSET
    """End of the room taken: preallocated, or filled with zeros."""
    is_closed: bool = False

    def take(self, length: int) -> Place:
        """Give the next `length` bytes out, once."""
        assert self.cursor + length <= self.limit
        place = Place(self.segment, self.cursor)
        self.cursor += length
        return place


@dataclass
class SegmentMaker:
    """Makes and closes segment files; what both writers share."""

    disk: Disk
    offload: Offload
    identity: StoreIdentity
    allocate_segment_id: Callable[[], Awaitable[SegmentId]]
    sizes: SegmentSizes
    owed_bytes: Callable[[], int]
    """Room of the disk that the metadata will still take, which payload leaves beside the headroom."""
    register: SegmentRegister = field(default_factory=SegmentRegister)
    in_flight: InFlight = field(default_factory=InFlight)
    gate: WriteGate = field(default_factory=WriteGate)

    def left_free_bytes(self, *, into_headroom: bool = False) -> int:
        """Room of the disk that payload leaves.  From any thread.

        `into_headroom`: half of it may be taken, for who gives more room back at once than it takes.
        """
        left_free = self.owed_bytes() + self.sizes.headroom
        return left_free // 2 if into_headroom else left_free

    async def create(self, kind: SegmentKind, *, into_headroom: bool = False) -> OpenSegment:
        """A new, empty segment, durable with its name.  StoreFull leaves nothing behind but a skipped id.

        `into_headroom`: half of what payload leaves free may be taken.
        """
        segment = await self.allocate_segment_id()
        while segment in self.register.kinds:  # the counter lies behind the files, as after a rebuild
            segment = await self.allocate_segment_id()
        left_free = self.left_free_bytes(into_headroom=into_headroom)
        try:
            file = await self.offload.run(
                create_segment_file, self.disk, self.identity, segment, kind, left_free
            )
        except LakeError as error:
            self.gate.note(error)
            raise
        assert segment not in self.register.kinds, f"segment id {segment} was given out twice"
        self.register.kinds[segment] = kind
        limit = self.sizes.large_segment if kind is SegmentKind.LARGE else self.sizes.small_segment
        return OpenSegment(segment, kind, file, limit)

    async def close(self, segment: OpenSegment) -> None:
        """Cut the tail that holds nothing off, and close the file.  Nothing of it is being written."""
        cut = 0 if self.gate.failed else page_up(segment.cursor)
        try:
            with trio.CancelScope(shield=True):
                await self.offload.run(close_segment_file, segment.file, cut)
        except LakeError as error:
            self.gate.shut(error)
            raise


def close_segment_file(file: DiskFile, size: int) -> None:
    """Cut a file to `size` (0: leave it) and close it; blocks."""
    try:
        if size and size < file.size():
            file.truncate(size)
            reached("segment.cut")
            file.sync_data()
    finally:
        file.close()
