"""The segments of a store: writes payloads, reads them, and frees room.

A segment is a file that one boot fills from front to back.  Segments of earlier boots are sealed: they are read, their
dead extents are punched, and each is removed when nothing in it lives.  This package knows extents and checksums; its
callers know which extents are live.

Rules kept by the parts:
- An offset is written once; so a freed extent reads as its old bytes or zeros.  A segment id is never used again.
- Payload survives power loss once `large.sync` has returned, or once the small batch that holds it is written.
- No extent in flight or pinned is freed.
- A method that may block is async and works through `Offload`; only `files.lend` opens a file on the loop.

Atomicity: between two awaits of a method no other method runs; every decision on places is made in one such step.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from engine.format.layouts import StoreIdentity
from engine.format.sizes import SegmentSizes
from engine.host.io_queue import OffloadQueue
from engine.segments.batch_reader import BatchReader
from engine.segments.files import SEGMENTS_FOLDER, ReadFiles, parse_segment_name
from engine.segments.large import LargeWriter
from engine.segments.lent_reader import SlotReader
from engine.segments.maker import SegmentMaker
from engine.segments.pins import Pins
from engine.segments.reader import SegmentReader
from engine.segments.room import SegmentRoom
from engine.segments.small import SmallWriter
from engine.segments.stored_check import StoredCheck
from lakefs.errors import StoreDamaged
from lakefs.findings import Finding
from lakefs.ids import SegmentId
from lakefs.ports import Disk, IoQueue, Offload


class Segments:
    """All segments of one store, opened for writing.

    `allocate_segment_id` returns an id only when it is durable that the id is never returned again.
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
        """`owed_bytes`: bytes of disk that payload leaves free, beside the headroom of `sizes`; called in any thread.

        `io_queue` reads many places at once; by default `offload` does.
        """
        self._disk = disk
        self._offload = offload
        maker = SegmentMaker(disk, offload, identity, allocate_segment_id, sizes or SegmentSizes(), owed_bytes)
        self.register = maker.register
        """The segments that exist."""
        self.in_flight = maker.in_flight
        """Extents given out whose record is not durable yet."""
        self.gate = maker.gate
        """Shut by the first write or sync that fails: nothing is written from then on."""
        self.large = LargeWriter(maker)
        self.small = SmallWriter(maker)
        """The small writer; each of its batches is written before the journal's group."""
        self.pins = Pins()
        """Places that are not freed, even when nothing lives there."""
        self.files = ReadFiles(disk, self.register, identity.store_id)
        self._direct_files = ReadFiles(disk, self.register, identity.store_id, direct=True)
        queue = io_queue or OffloadQueue(offload)
        self.reader = SegmentReader(disk, offload, self.register, self.files, self.small.unwritten)
        self.batches = BatchReader(self.reader, self.files, queue, offload)
        self.lent = SlotReader(offload, queue, self.files, self._direct_files)
        """Reads into memory that clients lend."""
        self.medium = StoredCheck(disk, offload, self.register, self.small.unwritten)
        self.room = SegmentRoom(maker, self.large, self.small, self.pins, (self.files, self._direct_files))

    async def open(self) -> None:
        """List the segments on disk; all of them are sealed.  Headers are checked at first use.

        Raises StoreDamaged when two files claim one id.  Files that are not segments are ignored.
        """
        for name in await self._offload.run(_open_folder, self._disk):
            parsed = parse_segment_name(name)
            if parsed is None:
                continue
            segment, kind = parsed
            if segment in self.register.kinds:
                raise StoreDamaged(
                    f"two files claim to be segment {segment:016x} in {SEGMENTS_FOLDER}: remove the foreign one",
                    subject=name,
                    finding=Finding.SEGMENT_DUPLICATE,
                )
            self.register.kinds[segment] = kind

    async def close(self) -> None:
        """Stop cleanly: trim the tails of open segments, close all files.  No call is under way.

        After a failed write or sync nothing is trimmed.  Raises DiskFailed; all files are closed even then.
        """
        try:
            with trio.CancelScope(shield=True):
                await self.large.close()
        finally:
            try:
                with trio.CancelScope(shield=True):
                    await self.small.close()
            finally:
                self._close_read_files()

    def abandon(self) -> None:
        """Close all descriptors; leave the files as a crash would.  No call is under way.  No effect after `close`."""
        self.large.abandon()
        self.small.abandon()
        self._close_read_files()

    def _close_read_files(self) -> None:
        self.files.close()
        self._direct_files.close()


def _open_folder(disk: Disk) -> list[str]:
    if not disk.exists(SEGMENTS_FOLDER):
        disk.make_folder(SEGMENTS_FOLDER)
        disk.sync_folder("")
    return disk.list_folder(SEGMENTS_FOLDER)
