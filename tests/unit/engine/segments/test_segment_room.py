"""Segments: room given back, many files, and descriptors handed out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio
import trio.testing

from engine.format.layouts import SegmentKind
from engine.host.local_disk import LocalDisk
from engine.segments import files as segment_files
from engine.segments.files import parse_segment_name, segment_path
from lakefs.errors import ChunkDamaged, DiskFailed, EngineBusy, StaleGrant, StoreDamaged
from lakefs.ids import SegmentId
from lakefs.limits import KIB
from lakefs.ports import Disk
from tests.descriptors import open_descriptors
from tests.sim.world.disk import SimDisk
from tests.sim.world.segment_world import World, drive, drive_threads, lies_at

PAGE = 4096


# --- giving room back ----------------------------------------------------------------------------------


def test_punching_frees_dead_extents_and_no_byte_of_their_neighbours(any_disk: Disk) -> None:
    async def body(world: World) -> None:
        small = await world.store_small([world.payload(3000, tag) for tag in range(30)])
        large = [await world.store_large(world.payload(70_000, tag)) for tag in range(6)]
        before = await world.segments.room.allocated_bytes()
        dead = [*small[3:20], large[1], large[2], large[4]]
        for record in dead:
            del world.stored[record]
        await world.segments.room.punch([(r.segment, r.offset, r.extent_bytes) for r in dead])
        await world.check()
        for record in (large[1], large[2], large[4]):
            assert not any(lies_at(world.segments, record.segment, record.offset, record.extent_bytes))
            with pytest.raises(ChunkDamaged):
                await world.segments.reader.read_chunk(record)
        freed = before - await world.segments.room.allocated_bytes()
        assert freed >= 3 * 72 * KIB + 10 * PAGE - PAGE, "ten whole pages at least, less a block of metadata"

    drive_threads(any_disk, body)


def test_gaps_left_by_a_crash_are_punched_and_the_living_stay(any_disk: Disk) -> None:
    async def body(world: World) -> None:
        for tag in range(10):
            await world.store_small([world.payload(3000, tag)])
            await world.store_large(world.payload(70_000, tag))
        for record in list(world.stored)[2::3]:
            del world.stored[record]
        await world.reopen()  # without closing: preallocated tails and fills stay
        before = await world.segments.room.allocated_bytes()
        await world.collect()
        await world.check()
        after = await world.segments.room.allocated_bytes()
        live = sum(record.extent_bytes for record in world.stored)
        assert live <= after < min(before, live + len(world.stored) * 3 * PAGE)

    drive_threads(any_disk, body)


def test_a_removed_segment_is_gone_and_readers_are_told_to_locate_again(any_disk: Disk) -> None:
    async def body(world: World) -> None:
        record = await world.store_large(world.payload(70_000))
        await world.segments.reader.read_chunk(record)
        await world.segments.close()
        await world.reopen()
        stays_open = world.disk.open(segment_path(record.segment, SegmentKind.LARGE), read_only=True)
        world.stored.clear()
        await world.segments.room.remove(record.segment)
        assert sorted(world.segments.register.kinds) == []
        assert world.disk.list_folder("segments") == []
        with pytest.raises(StaleGrant):
            await world.segments.reader.read_chunk(record)
        seen = bytearray(b"x" * 70_000)
        assert stays_open.pread_into(memoryview(seen), record.offset) == 70_000
        assert not any(seen), "what somebody still has open reads as zeros"
        stays_open.close()

    drive_threads(any_disk, body)


def test_a_segment_being_written_or_with_extents_in_flight_is_not_reclaimed() -> None:
    async def body(world: World) -> None:
        place, _ = await world.write_large(world.payload(500_000))
        with pytest.raises(AssertionError):
            await world.segments.room.punch_gaps(place.segment, [])
        await world.store_large(world.payload(600_000))
        assert place.segment in world.segments.room.sealed()
        assert world.segments.in_flight.count(place.segment) == 1
        with pytest.raises(AssertionError):
            await world.segments.room.remove(place.segment)
        await world.segments.large.sync({place.segment})
        world.segments.in_flight.settle(place)
        with pytest.raises(AssertionError):
            world.segments.in_flight.settle(place)
        await world.segments.room.remove(place.segment)

    drive(body)


def test_a_write_in_an_earlier_segment_can_still_be_synced() -> None:
    async def body(world: World) -> None:
        payload = world.payload(500_000)
        place, crc = await world.write_large(payload)
        await world.store_large(world.payload(600_000))
        await world.store_large(world.payload(600_000))
        await world.segments.large.sync({place.segment})
        world.stored[world.record(place, len(payload), crc)] = payload
        world.segments.in_flight.settle(place)
        assert isinstance(world.disk, SimDisk)
        await world.reopen(world.disk.crash())
        await world.check()

    drive(body)


def test_a_clean_stop_trims_what_was_taken_ahead(any_disk: Disk) -> None:
    async def body(world: World) -> None:
        small = (await world.store_small([world.payload(5000)]))[0]
        large = await world.store_large(world.payload(70_000))
        await world.segments.close()
        await world.reopen()
        assert await world.segments.room.size(small.segment) == 3 * PAGE
        assert await world.segments.room.size(large.segment) == PAGE + 72 * KIB
        assert await world.segments.room.allocated_bytes([large.segment]) <= 80 * KIB
        await world.check()

    drive_threads(any_disk, body)


# --- many segments, descriptors ------------------------------------------------------------------------


def test_opening_a_store_opens_no_segment() -> None:
    async def body(world: World) -> None:
        for tag in range(3):
            await world.store_small([world.payload(60_000, tag)] * 5)
        await world.segments.close()
        assert isinstance(world.disk, SimDisk)
        world.disk.fail_next("open", DiskFailed("a segment was opened"))
        await world.reopen()
        assert len(world.segments.room.sealed()) == 4

    drive(body)


def test_foreign_files_are_left_alone_and_two_files_of_one_id_are_damage() -> None:
    async def body(world: World) -> None:
        await world.store_small([b"hello"])
        await world.segments.close()
        for name in ("README", "1.small", "zzzzzzzzzzzzzzzz.large", "0000000000000001.tiny"):
            world.disk.open(f"segments/{name}", create=True).close()
        await world.reopen()
        assert sorted(world.segments.register.kinds) == [1]
        await world.check()
        world.disk.open(segment_path(SegmentId(1), SegmentKind.LARGE), create=True).close()
        with pytest.raises(StoreDamaged):
            await world.reopen()

    drive(body)


def test_names_of_segments_are_parsed_as_they_are_made() -> None:
    for kind in SegmentKind:
        for number in (0, 1, 0xFFFF_FFFF_FFFF_FFFF):
            name = segment_path(SegmentId(number), kind).removeprefix("segments/")
            assert parse_segment_name(name) == (number, kind)
    assert parse_segment_name("00000000000000AA.large") is None


def test_read_descriptors_are_bounded_and_none_is_closed_under_a_reader(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(segment_files, "READ_FILES_MAX", 2)

    async def body(world: World) -> None:
        for tag in range(6):
            await world.store_small([world.payload(2000, tag)])
            await world.segments.close()
            await world.reopen()

        async def reader() -> None:
            for _ in range(10):
                await world.check()

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(reader)
        assert sum(f":{tmp_path}/" in descriptor for descriptor in open_descriptors()) == 2

    drive_threads(LocalDisk(tmp_path), body)


def test_a_descriptor_handed_out_reads_the_segment_and_cannot_write_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(segment_files, "LENT_FILES_MAX", 1)

    async def body(world: World) -> None:
        record = await world.store_large(world.payload(70_000))
        descriptor = world.segments.files.lend(record.segment)
        assert world.segments.files.lend(record.segment) == descriptor
        assert os.pread(descriptor, 70_000, record.offset) == world.stored[record]
        with pytest.raises(OSError):
            os.pwrite(descriptor, b"x", 0)
        other = (await world.store_small([b"hello"]))[0]
        with pytest.raises(EngineBusy):
            world.segments.files.lend(other.segment)
        await world.segments.close()
        await world.reopen()
        descriptor = world.segments.files.lend(record.segment)
        world.stored.pop(record)
        await world.segments.room.remove(record.segment)
        assert not any(os.pread(descriptor, 70_000, record.offset)), "open still: it may be on its way"
        with pytest.raises(StaleGrant):
            world.segments.files.lend(record.segment)

    drive_threads(LocalDisk(tmp_path), body)


def test_a_counter_that_lies_behind_the_files_is_caught_up() -> None:
    async def body(world: World) -> None:
        await world.store_small([b"hello"])
        await world.store_large(world.payload(70_000))
        await world.segments.close()
        world.last_segment = 0
        await world.reopen()
        record = (await world.store_small([b"again"]))[0]
        assert record.segment == 3
        await world.check()

    drive(body)


def test_a_store_without_direct_writes_works_the_same() -> None:
    async def main() -> None:
        world = World(SimDisk(0, supports_direct=False))
        await world.segments.open()
        await world.store_large(world.payload(150_000))
        await world.check()
        await world.segments.close()

    trio.run(main)


def test_abandoned_segments_hold_no_descriptor_and_leave_the_files_as_they_are(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        record = await world.store_large(world.payload(70_000))
        await world.store_small([b"hello"])
        world.segments.files.lend(record.segment)
        await world.check()
        size = await world.segments.room.size(record.segment)
        world.segments.abandon()
        assert not [descriptor for descriptor in open_descriptors() if f":{tmp_path}/" in descriptor]
        await world.reopen()
        assert await world.segments.room.size(record.segment) == size
        await world.check()

    drive_threads(LocalDisk(tmp_path), body)
