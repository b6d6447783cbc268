"""A store's segments on a disk, with the little that they need from the rest of an engine.

`World` hands out segment ids, remembers a record for every payload stored (as the index would), and reopens the
segments after a stop, a crash or a kill.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import trio
from crc32c import crc32c

from engine.format.checksums import seal_payload, vector_of
from engine.format.extents import Place
from engine.format.layouts import ChunkRecord, SegmentKind, StoreIdentity
from engine.format.sizes import SegmentSizes
from engine.segments.large import IsLast, not_last
from engine.segments.segment_store import Segments
from lakefs.host.buffers import BufferPool
from lakefs.host.offload import InlineOffload, ThreadOffload
from lakefs.ids import Birth, BootId, SegmentId
from lakefs.limits import KIB, MIB
from lakefs.ports import Disk, Offload
from tests.sim.world.determinism import run_seeded
from tests.sim.world.disk import SimDisk

STORE_ID = bytes(range(16))
SMALL_SIZES = SegmentSizes(large_segment=1 * MIB, small_segment=256 * KIB, large_extend=256 * KIB, small_fill=64 * KIB)
"""Sizes at which a test meets the end of segments and steps soon."""
BIG_SIZES = replace(SMALL_SIZES, large_segment=16 * MIB, large_extend=8 * MIB)
"""Sizes that take the largest chunks."""


def lies_at(segments: Segments, segment: SegmentId, offset: int, length: int) -> bytes:
    """The bytes at a place of a segment's file, unchecked."""
    found = bytearray(length)
    with segments.files.using(segment) as file:
        assert file.pread_into(memoryview(found), offset) == length
    return bytes(found)


class World:
    """Segments, and a record of every payload that was stored and not given up."""

    def __init__(
        self, disk: Disk, offload: Offload | None = None, sizes: SegmentSizes = SMALL_SIZES, *, seed: int = 0
    ) -> None:
        self.disk = disk
        self.offload = offload or InlineOffload()
        self.sizes = sizes
        self.pool = BufferPool(64 * MIB)
        self.rng = random.Random(seed)
        self.boots = 0
        self.last_segment = 0
        self.last_birth = 0
        self.stored: dict[ChunkRecord, bytes] = {}
        """Payloads whose storing has returned: they survive whatever happens."""
        self.segments = self._new_segments()

    def _new_segments(self) -> Segments:
        self.boots += 1
        identity = StoreIdentity(STORE_ID, BootId(self.boots.to_bytes(16, "big")))
        return Segments(self.disk, self.offload, identity, self.allocate, self.sizes)

    async def allocate(self) -> SegmentId:
        """Return the next segment id; a checkpoint, as a commit is."""
        self.last_segment += 1
        segment = SegmentId(self.last_segment)
        await trio.lowlevel.checkpoint()
        return segment

    async def reopen(self, disk: Disk | None = None) -> None:
        """Start again, after a stop or on the disk that a crash left."""
        self.disk = disk or self.disk
        self.segments = self._new_segments()
        await self.segments.open()

    def payload(self, length: int, tag: int = 0) -> bytes:
        """Return bytes that no other payload has; the first four are the tag."""
        return (tag.to_bytes(4, "big") + self.rng.randbytes(length))[:length]

    def record(self, place: Place, length: int, crc: int) -> ChunkRecord:
        """Return the chunk record that an index would hold."""
        self.last_birth += 1
        return ChunkRecord(Birth(self.last_birth), place.segment, place.offset, length, length, crc)

    async def store_small(self, payloads: Sequence[bytes]) -> list[ChunkRecord]:
        """Append payloads, record and settle them."""
        places = await self.segments.small.place(payloads)
        try:
            await self.segments.small.sync()
        except BaseException:
            for place in places:
                self.segments.in_flight.settle(place)
            raise
        records = []
        for place, payload in zip(places, payloads, strict=True):
            records.append(self.record(place, len(payload), crc32c(payload)))
            self.stored[records[-1]] = payload
            self.segments.in_flight.settle(place)
        return records

    async def store_large(self, payload: bytes) -> ChunkRecord:
        """Write, sync, record and settle a payload."""
        place, crc = await self.write_large(payload)
        try:
            await self.segments.large.sync({place.segment})
        finally:
            self.segments.in_flight.settle(place)
        record = self.record(place, len(payload), crc)
        self.stored[record] = payload
        return record

    async def write_large(self, payload: bytes, is_last: IsLast = not_last) -> tuple[Place, int]:
        """Only write: the payload is not settled, and durable only as the last write of a caller may be."""
        buffer = await self.pool.acquire()
        try:
            buffer.view[: len(payload)] = payload
            crc = seal_payload(buffer.view, len(payload), vector_of(payload))
            (place,) = await self.segments.large.write([(buffer.view, len(payload))], is_last=is_last)
            return place, crc
        finally:
            buffer.release()

    def live(self, segment: SegmentId) -> list[tuple[int, int]]:
        """Return the extents of recorded payloads in a segment, ascending."""
        return sorted((r.offset, r.extent_bytes) for r in self.stored if r.segment == segment)

    async def collect(self) -> None:
        """Do what gc does when nothing is being freed: punch gaps, remove empty segments."""
        for segment in self.segments.room.sealed():
            if self.segments.in_flight.count(segment):
                continue
            live = self.live(segment)
            if live:
                await self.segments.room.punch_gaps(segment, live)
            else:
                await self.segments.room.remove(segment)

    async def check(self) -> None:
        """Check that every stored payload is there, and that extents do not overlap and lie where they may."""
        for record, payload in self.stored.items():
            found = await self.segments.reader.read_chunk(record)
            assert found == payload, f"{record} reads as other bytes"
            if self.segments.register.kinds[record.segment] is SegmentKind.LARGE:
                assert record.offset % 4096 == 0
        for segment in sorted(self.segments.register.kinds):
            end = 4096
            for offset, length in self.live(segment):
                assert offset >= end, "two extents overlap, or one lies in the header"
                end = offset + length


def drive(body: Callable[[World], Awaitable[None]], *, seed: int = 0, sizes: SegmentSizes = SMALL_SIZES) -> SimDisk:
    """Run `body` on a simulated disk, inline; return the disk as it is then."""
    disk = SimDisk(seed)
    disk.make_folder("segments")
    disk.sync_folder("")

    async def main() -> None:
        world = World(disk, sizes=sizes, seed=seed)
        await world.segments.open()
        await body(world)

    run_seeded(main, seed)
    return disk


def drive_threads(disk: Disk, body: Callable[[World], Awaitable[None]]) -> None:
    """Run `body` with real threads, whatever the disk, then stop cleanly."""

    async def main() -> None:
        with trio.fail_after(120):
            async with ThreadOffload(4, "test") as offload:
                world = World(disk, offload, BIG_SIZES)
                await world.segments.open()
                await body(world)
                await world.segments.close()

    trio.run(main)
