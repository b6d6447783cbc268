"""Segments when the disk fails, is full, or has rotted."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing

from engine.format.layouts import ChunkRecord, SegmentKind, StoreIdentity
from engine.segments import files as segment_files
from engine.segments.files import pack_segment_header, segment_path
from lakefs.errors import (
    ChunkDamaged,
    DiskFailed,
    LakeError,
    StaleGrant,
    StoreDamaged,
    StoreFull,
    StoreReadOnly,
    StoreUnusable,
)
from lakefs.ids import BootId, SegmentId
from lakefs.limits import GRANULE_BYTES, KIB, MIB
from tests.sim.world.disk import SimDisk
from tests.sim.world.segment_world import SMALL_SIZES, STORE_ID, World, drive

# --- failures ------------------------------------------------------------------------------------------


def test_after_a_failed_sync_nothing_is_written_and_nothing_is_retried() -> None:
    async def body(world: World) -> None:
        disk = world.disk
        assert isinstance(disk, SimDisk)
        kept = await world.store_large(world.payload(70_000))
        place, _ = await world.write_large(world.payload(70_000))
        disk.fail_next("sync_data", DiskFailed("planted"), path="large")
        with pytest.raises(DiskFailed, match="planted"):
            await world.segments.large.sync({place.segment})
        assert world.segments.gate.reason
        before = disk.operation_count
        with pytest.raises(StoreReadOnly, match="planted"):
            await world.segments.large.sync({place.segment})
        with pytest.raises(StoreReadOnly):
            await world.store_large(world.payload(70_000))
        with pytest.raises(StoreReadOnly):
            await world.store_small([b"x"])
        assert disk.operation_count == before
        assert await world.segments.reader.read_chunk(kept) == world.stored[kept], "reading goes on"
        await world.segments.close()

    drive(body)


def test_a_read_that_the_disk_fails_once_gives_the_payload_and_one_that_it_fails_twice_an_error() -> None:
    async def body(world: World) -> None:
        disk = world.disk
        assert isinstance(disk, SimDisk)
        (small,) = await world.store_small([b"small"])
        large = await world.store_large(world.payload(70_000))
        for record in (small, large):
            path = segment_path(record.segment, world.segments.register.kinds[record.segment])
            disk.fail_next("pread_into", DiskFailed("planted"), path=path)
            assert await world.segments.reader.read_chunk(record) == world.stored[record]
            for _ in range(2):
                disk.fail_next("pread_into", DiskFailed("planted"), path=path)
            with pytest.raises(DiskFailed, match="planted"):
                await world.segments.reader.read_chunk(record)

    drive(body)


def test_all_who_shared_a_failed_group_are_told() -> None:
    async def body(world: World) -> None:
        disk = world.disk
        assert isinstance(disk, SimDisk)
        await world.store_small([b"first"])
        disk.fail_next("sync_data", DiskFailed("planted"), path="small")
        errors: list[LakeError] = []

        async def writer(tag: int) -> None:
            try:
                await world.store_small([bytes([tag])])
            except LakeError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            for tag in range(10):
                nursery.start_soon(writer, tag)
        assert len(errors) == 10
        assert len({id(error) for error in errors}) == 10
        assert any(isinstance(error, DiskFailed) for error in errors)
        assert not any(world.segments.in_flight.count(segment) for segment in world.segments.register.kinds)
        await world.check()

    drive(body)


def test_a_failed_write_gives_its_extent_up_and_shuts_the_store_for_writing() -> None:
    async def body(world: World) -> None:
        disk = world.disk
        assert isinstance(disk, SimDisk)
        await world.store_large(world.payload(70_000))
        disk.fail_next("pwrite", DiskFailed("planted"), path="large")
        with pytest.raises(DiskFailed):
            await world.store_large(world.payload(70_000))
        assert not any(world.segments.in_flight.count(segment) for segment in world.segments.register.kinds)
        with pytest.raises(StoreReadOnly):
            await world.store_large(world.payload(70_000))

    drive(body)


@pytest.mark.parametrize("headroom", [0, 200 * KIB])
def test_a_full_disk_refuses_payload_keeps_the_headroom_and_works_again_after_removal(headroom: int) -> None:
    async def body(world: World) -> None:
        disk = world.disk
        assert isinstance(disk, SimDisk)
        disk.capacity_bytes = 3 * MIB
        refused = 0
        for tag in range(100):
            try:
                if tag % 2:
                    await world.store_large(world.payload(150_000, tag))
                else:
                    await world.store_small([world.payload(30_000, tag)])
            except StoreFull:
                refused += 1
            assert disk.free_bytes() >= headroom
        assert 0 < refused < 100
        assert disk.free_bytes() < headroom + 200_000, "smaller steps are tried before a payload is refused"
        assert not any(world.segments.in_flight.count(segment) for segment in world.segments.register.kinds)
        await world.check()
        for record in list(world.stored):
            if record.segment in world.segments.room.sealed():
                del world.stored[record]
        await world.collect()
        await world.store_large(world.payload(150_000))
        await world.store_small([world.payload(30_000)])
        await world.check()

    drive(body, sizes=replace(SMALL_SIZES, headroom=headroom))


def test_a_disk_that_runs_full_in_the_middle_of_filling_loses_nothing() -> None:
    async def body(world: World) -> None:
        disk = world.disk
        assert isinstance(disk, SimDisk)
        for operation in ("pwrite", "allocate", "open"):
            await world.store_small([world.payload(60_000)])
            disk.fail_next(operation, StoreFull("planted"))
            for tag in range(8):
                with suppress(StoreFull):
                    await world.store_small([world.payload(60_000, tag)])
                with suppress(StoreFull):
                    await world.store_large(world.payload(150_000, tag))
            await world.check()
        assert not world.segments.gate.reason

    drive(body)


def test_a_smaller_step_is_tried_before_a_payload_is_refused() -> None:
    async def body(world: World) -> None:
        disk = world.disk
        assert isinstance(disk, SimDisk)
        disk.fail_next("allocate", StoreFull("planted"))
        await world.store_large(world.payload(100_000))
        await world.store_small([world.payload(60_000)])
        disk.fail_next("pwrite", StoreFull("planted"), path="small")
        await world.store_small([world.payload(10_000)])
        await world.check()

    drive(body)


def test_an_append_refused_for_want_of_room_takes_no_place() -> None:
    async def body(world: World) -> None:
        disk = world.disk
        assert isinstance(disk, SimDisk)
        first = (await world.store_small([world.payload(100)]))[0]
        room, disk.capacity_bytes = disk.capacity_bytes, disk.capacity_bytes - disk.free_bytes()
        refused = 0
        while not refused:
            try:
                last = (await world.store_small([world.payload(1000)]))[0]
            except StoreFull:
                refused += 1
        with pytest.raises(StoreFull):
            await world.store_small([world.payload(1000)])
        disk.capacity_bytes = room
        later = (await world.store_small([world.payload(1000)]))[0]
        assert first.segment == last.segment == later.segment
        assert later.offset == last.offset + last.stored_bytes
        await world.check()

    drive(body)


def test_a_failed_append_shuts_the_store_for_writing_and_nothing_is_trimmed() -> None:
    async def body(world: World) -> None:
        disk = world.disk
        assert isinstance(disk, SimDisk)
        record = (await world.store_small([b"first"]))[0]
        size = await world.segments.room.size(record.segment)
        disk.fail_next("pwrite", DiskFailed("planted"), path="small")
        with pytest.raises(DiskFailed):
            await world.store_small([b"second"])
        with pytest.raises(StoreReadOnly):
            await world.store_small([b"third"])
        await world.segments.close()
        await world.reopen()
        assert await world.segments.room.size(record.segment) == size
        await world.check()

    drive(body)


def test_a_removal_that_fails_can_be_tried_again() -> None:
    async def body(world: World) -> None:
        disk = world.disk
        assert isinstance(disk, SimDisk)
        record = await world.store_large(world.payload(70_000))
        await world.segments.close()
        await world.reopen()
        disk.fail_next("unlink", DiskFailed("planted"))
        with pytest.raises(DiskFailed):
            await world.segments.room.remove(record.segment)
        assert sorted(world.segments.register.kinds) == [record.segment]
        await world.segments.room.remove(record.segment)
        assert sorted(world.segments.register.kinds) == []

    drive(body)


def test_a_segment_that_cannot_be_made_leaves_no_file() -> None:
    async def body(world: World) -> None:
        disk = world.disk
        assert isinstance(disk, SimDisk)
        disk.fail_next("pwrite", StoreFull("planted"))
        with pytest.raises(StoreFull):
            await world.store_small([b"x"])
        assert disk.list_folder("segments") == []
        await world.store_small([b"x"])
        await world.check()

    drive(body)


# --- damage --------------------------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_in_payload_or_vector_is_found() -> None:
    async def body(world: World) -> None:
        disk = world.disk
        assert isinstance(disk, SimDisk)
        large = await world.store_large(world.payload(2 * GRANULE_BYTES + 50))
        small = (await world.store_small([world.payload(500)]))[0]
        for record in (large, small):
            path = segment_path(record.segment, world.segments.register.kinds[record.segment])
            for at in (0, record.stored_bytes // 2, record.stored_bytes - 1, record.extent_bytes - 1):
                disk.flip_bit(path, record.offset + at, 3)
                with pytest.raises(ChunkDamaged) as caught:
                    await world.segments.reader.read_chunk(record)
                assert f"{record.segment:016x}" in caught.value.message
                assert str(record.offset) in caught.value.message
                disk.flip_bit(path, record.offset + at, 3)
        await world.check()

    drive(body)


def test_sound_bytes_of_another_chunk_are_not_taken_for_this_one() -> None:
    """This is like a record mixed up: payload and vector agree with each other, not with the record."""

    async def body(world: World) -> None:
        records = [await world.store_large(world.payload(3 * GRANULE_BYTES, tag)) for tag in range(2)]
        records += await world.store_small([b"mine", b"yours"])
        for mine, other in (records[:2], records[2:]):
            mixed_up = ChunkRecord(
                mine.birth, other.segment, other.offset, mine.stored_bytes, mine.logical_bytes, mine.crc
            )
            with pytest.raises(ChunkDamaged):
                await world.segments.reader.read_chunk(mixed_up)
            with pytest.raises(ChunkDamaged):
                await world.segments.reader.read_range(mixed_up, 0, 1)

    drive(body)


def test_a_range_is_refused_only_when_its_own_granules_or_the_vector_are_damaged() -> None:
    async def body(world: World) -> None:
        disk = world.disk
        assert isinstance(disk, SimDisk)
        record = await world.store_large(world.payload(3 * GRANULE_BYTES))
        path = segment_path(record.segment, SegmentKind.LARGE)
        disk.flip_bit(path, record.offset + GRANULE_BYTES + 1, 0)
        await world.segments.reader.read_range(record, 0, GRANULE_BYTES)
        with pytest.raises(ChunkDamaged):
            await world.segments.reader.read_range(record, 0, GRANULE_BYTES + 1)
        disk.flip_bit(path, record.offset + GRANULE_BYTES + 1, 0)
        disk.flip_bit(path, record.offset + record.stored_bytes + 11, 0)
        with pytest.raises(ChunkDamaged):
            await world.segments.reader.read_range(record, 0, 10)

    drive(body)


def test_rot_in_memory_is_healed_by_a_read_past_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def body(world: World) -> None:
        record = await world.store_large(world.payload(2 * GRANULE_BYTES + 3))
        small = (await world.store_small([world.payload(70, 1), world.payload(5000, 2)]))[1]
        original = type(world.disk.open(segment_path(record.segment, SegmentKind.LARGE))).pread_into

        def rotten(file: object, buffer: memoryview, offset: int) -> int:
            count: int = original(file, buffer, offset)  # type: ignore[arg-type]
            if not file.direct:  # type: ignore[attr-defined]
                buffer[count // 2] ^= 1
            return count

        monkeypatch.setattr("tests.sim.world.file.SimFile.pread_into", rotten)
        assert await world.segments.reader.read_chunk(record) == world.stored[record]
        assert await world.segments.reader.read_chunk(small) == world.stored[small]
        assert (await world.segments.reader.read_range(record, 5, 5))[1] == world.stored[record][:GRANULE_BYTES]
        assert world.segments.reader.healed_reads == 3

    drive(body)


def test_each_payload_of_a_batch_comes_or_says_why_not() -> None:
    async def body(world: World) -> None:
        disk = world.disk
        assert isinstance(disk, SimDisk)
        records = await world.store_small([b"good", b"rotten", b"good too"])
        disk.flip_bit(segment_path(records[1].segment, SegmentKind.SMALL), records[1].offset, 0)
        found = await world.segments.batches.read_small(records)
        assert (found[0], found[2]) == (b"good", b"good too")
        assert isinstance(found[1], ChunkDamaged)
        assert await world.segments.batches.read_small([]) == []

    drive(body)


def test_reading_past_the_end_or_from_a_missing_file_is_damage() -> None:
    async def body(world: World) -> None:
        record = (await world.store_small([b"hello"]))[0]
        with pytest.raises(ChunkDamaged, match="does not match"):
            await world.segments.reader.read_chunk(msgspec.structs.replace(record, offset=1 << 30))
        await world.segments.close()
        world.disk.unlink(segment_path(record.segment, SegmentKind.SMALL))
        await world.reopen()
        with pytest.raises(StaleGrant):
            await world.segments.reader.read_chunk(record)

    drive(body)


def test_a_file_taken_away_from_a_running_store_is_damage() -> None:
    async def body(world: World) -> None:
        record = (await world.store_small([b"hello"]))[0]
        world.disk.unlink(segment_path(record.segment, SegmentKind.SMALL))
        with pytest.raises(StoreDamaged, match="missing"):
            await world.segments.reader.read_chunk(record)

    drive(body)


@pytest.mark.parametrize(
    ("store_id", "segment", "version", "error"),
    [(bytes(16), 1, 1, StoreDamaged), (STORE_ID, 2, 1, StoreDamaged), (STORE_ID, 1, 2, StoreUnusable)],
)
def test_a_sound_header_of_another_store_segment_or_version_is_refused(
    store_id: bytes, segment: int, version: int, error: type[LakeError], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: World) -> None:
        record = (await world.store_small([b"hello"]))[0]
        assert record.segment == 1
        monkeypatch.setattr(segment_files, "FORMAT_VERSION", version)
        identity = StoreIdentity(store_id, BootId(bytes(16)))
        header = pack_segment_header(identity, SegmentId(segment), SegmentKind.SMALL)
        monkeypatch.undo()
        file = world.disk.open(segment_path(record.segment, SegmentKind.SMALL))
        file.pwrite(header, 0)
        file.close()
        with pytest.raises(error):
            await world.segments.reader.read_chunk(record)

    drive(body)


def test_a_rotten_header_is_noted_and_the_payloads_are_read_all_the_same() -> None:
    async def body(world: World) -> None:
        record = (await world.store_small([b"hello"]))[0]
        assert isinstance(world.disk, SimDisk)
        world.disk.flip_bit(segment_path(record.segment, SegmentKind.SMALL), 20, 1)
        await world.check()
        assert world.segments.files.damaged_headers == {record.segment}

    drive(body)
