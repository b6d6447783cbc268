"""Segments: places, durability, sharing of syncs, failures, room, and what is given back."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import trio
import trio.testing

from engine import segment_files
from engine.disk import LocalDisk
from engine.format import ChunkRecord, SegmentKind, StoreIdentity
from engine.segment_files import pack_segment_header, parse_segment_name, segment_path
from lakefs.errors import (
    ChunkDamaged,
    DiskFailed,
    EngineBusy,
    LakeError,
    StaleGrant,
    StoreDamaged,
    StoreFull,
    StoreReadOnly,
    StoreUnusable,
)
from lakefs.ids import BootId, SegmentId
from lakefs.limits import CHUNK_BYTES, GRANULE_BYTES, KIB, MIB
from lakefs.offload import InlineOffload, ThreadOffload
from lakefs.ports import Disk
from tests.sim.determinism import run_seeded
from tests.sim.disk import SimCrashed, SimDisk
from tests.sim.segment_world import SMALL_SIZES, STORE_ID, World, drive

PAGE = 4096
T = TypeVar("T")
BIG_SIZES = replace(SMALL_SIZES, large_segment=16 * MIB, large_extend=8 * MIB)
EDGE_LENGTHS = [
    64 * KIB,
    64 * KIB + 1,
    68 * KIB - 4,
    128 * KIB - 8,
    128 * KIB - 7,
    128 * KIB,
    CHUNK_BYTES - 1,
    CHUNK_BYTES,
]


@pytest.fixture(params=["temporary folder", "tmpfs", "simulated"])
def any_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    if request.param == "temporary folder":
        yield LocalDisk(tmp_path)
    elif request.param == "tmpfs":
        if not os.path.isdir("/dev/shm"):
            pytest.skip("no tmpfs here")
        folder = tempfile.mkdtemp(dir="/dev/shm")
        yield LocalDisk(Path(folder))
        shutil.rmtree(folder)
    else:
        yield SimDisk(1)


def drive_threads(disk: Disk, body: Callable[[World], Awaitable[None]]) -> None:
    """Run `body` with real threads, whatever the disk."""

    async def main() -> None:
        with trio.fail_after(120):
            async with ThreadOffload(4, "test") as offload:
                world = World(disk, offload, BIG_SIZES)
                await world.segments.open()
                await body(world)
                await world.segments.close()

    trio.run(main)


# --- what is stored is read back -------------------------------------------------------------------------


def test_payloads_of_every_edge_length_are_read_back_on_every_disk(any_disk: Disk) -> None:
    async def body(world: World) -> None:
        await world.store_small(
            [world.payload(length, length % 250) for length in (1, 2, 4095, 4096, 4097, 65_535)]
        )
        for length in EDGE_LENGTHS:
            await world.store_large(world.payload(length))
        await world.check()
        await world.segments.close()
        await world.reopen()
        await world.check()

    drive_threads(any_disk, body)


def test_many_writers_at_once_get_places_of_their_own(any_disk: Disk) -> None:
    async def body(world: World) -> None:
        async def writer(tag: int) -> None:
            for step in range(5):
                await world.store_small([world.payload(1000 * tag + step + 1, tag), world.payload(10, tag)])
                await world.store_large(world.payload(64 * KIB + tag * 1000, tag))

        async with trio.open_nursery() as nursery:
            for tag in range(10):
                nursery.start_soon(writer, tag)
        assert len(world.stored) == 150
        await world.check()
        await world.segments.close()
        await world.reopen()
        await world.check()

    drive_threads(any_disk, body)


def test_a_batch_larger_than_a_segment_goes_on_in_the_next() -> None:
    async def body(world: World) -> None:
        records = await world.store_small([world.payload(60_000, tag) for tag in range(12)])
        assert len({record.segment for record in records}) >= 3
        assert [world.stored[record][0:4] for record in records] == [t.to_bytes(4, "big") for t in range(12)]
        await world.check()

    drive(body)


def test_the_file_holds_what_the_format_says() -> None:
    async def body(world: World) -> None:
        record = await world.store_large(world.payload(64 * KIB + 100))
        raw = await world.segments.read(record.segment, record.offset, 72 * KIB)
        assert raw[: record.stored_bytes] == world.stored[record]
        assert raw[record.stored_bytes + 8 :] == bytes(72 * KIB - record.stored_bytes - 8)
        small = (await world.store_small([b"first", b"second"]))[1]
        assert small.offset == PAGE + 5, "packed without gaps"
        assert await world.segments.read(small.segment, PAGE, 11) == b"firstsecond"

    drive(body)


def test_ranges_come_widened_to_granules_with_their_checksums() -> None:
    async def body(world: World) -> None:
        record = await world.store_large(world.payload(3 * GRANULE_BYTES + 10))
        payload = world.stored[record]
        start, found, crcs = await world.segments.read_range(record, GRANULE_BYTES + 5, GRANULE_BYTES)
        assert start == GRANULE_BYTES
        assert found == payload[GRANULE_BYTES : 3 * GRANULE_BYTES]
        assert len(crcs) == 8
        start, found, crcs = await world.segments.read_range(record, 3 * GRANULE_BYTES + 9, 1)
        assert (start, bytes(found), len(crcs)) == (3 * GRANULE_BYTES, payload[3 * GRANULE_BYTES :], 4)
        small = (await world.store_small([b"hello"]))[0]
        start, found, crcs = await world.segments.read_range(small, 1, 2)
        assert (start, bytes(found), crcs) == (0, b"hello", small.crc.to_bytes(4, "little"))

    drive(body, sizes=BIG_SIZES)


def test_a_chunk_can_be_read_into_memory_of_the_caller() -> None:
    async def body(world: World) -> None:
        record = await world.store_large(world.payload(100_000))
        buffer = world.pool.try_acquire()
        assert buffer is not None
        found = await world.segments.read_chunk(record, buffer.view)
        assert found == world.stored[record]
        assert buffer.view[:100_000] == world.stored[record]

    drive(body)


# --- durability ------------------------------------------------------------------------------------------


async def _script(world: World) -> None:
    """Work that meets new segments, extensions, fills, shared groups, removal and a clean stop."""

    async def writer(tag: int) -> None:
        for step in range(3):
            await world.store_small([world.payload(20_000 + step, tag), world.payload(7, tag)])
            await world.store_large(world.payload(150_000 + tag, tag))

    async with trio.open_nursery() as nursery:
        for tag in range(3):
            nursery.start_soon(writer, tag)
    for record in list(world.stored)[::3]:
        del world.stored[record]
        await world.segments.punch([(record.segment, record.offset, record.extent_bytes)])
    await world.collect()
    await world.segments.close()


def _crash_and_continue(seed: int, crash_at: int) -> bool:
    """Run the script until the power fails; whether it did.  Then the next boot checks, collects and writes."""
    disk = SimDisk(seed)
    disk.make_folder("segments")
    disk.sync_folder("")
    disk.crash_at = disk.operation_count + crash_at
    crashed = False

    async def main() -> None:
        nonlocal crashed
        world = World(disk, seed=seed)
        try:
            await world.segments.open()
            await _script(world)
        except* SimCrashed:
            crashed = True
        await world.reopen(disk.crash())
        await world.check()
        await world.collect()
        await world.check()
        await world.store_small([b"life goes on"])
        await world.store_large(world.payload(100_000))
        await world.check()

    run_seeded(main, seed)
    return crashed


@pytest.mark.parametrize("seed", range(3))
def test_whatever_was_stored_survives_power_loss_at_every_operation(seed: int) -> None:
    crash_at = 1
    while _crash_and_continue(seed, crash_at):
        crash_at += 1
    assert crash_at > 50, "the script ended before it did anything"


def test_payload_that_was_not_synced_may_be_lost_but_is_never_mistaken() -> None:
    outcomes = set()
    for seed in range(40):

        async def body(world: World) -> None:
            payload = world.payload(100_000)
            place, crc = await world.write_large(payload)
            assert isinstance(world.disk, SimDisk)
            await world.reopen(world.disk.crash())
            try:
                found = await world.segments.read_chunk(world.record(place, len(payload), crc))
            except ChunkDamaged as error:
                outcomes.add("lost" if f"{place.segment:016x}" in error.message else error.message)
            else:
                assert found == payload
                outcomes.add("kept")

        drive(body, seed=seed)
    assert outcomes == {"lost", "kept"}


def test_appends_of_many_callers_share_syncs() -> None:
    async def body(world: World) -> None:
        await world.store_small([b"first"])
        assert isinstance(world.disk, SimDisk)
        before = world.disk.operation_count
        async with trio.open_nursery() as nursery:
            for tag in range(50):
                nursery.start_soon(world.store_small, [bytes([tag]) * 100])
        assert world.disk.operation_count - before <= 2 * 3, "a write and a sync for each of a few groups"
        await world.check()

    drive(body)


def test_writers_of_large_payloads_share_syncs_that_began_after_their_writes() -> None:
    async def body(world: World) -> None:
        await world.store_large(world.payload(70_000))
        places = [(await world.write_large(world.payload(70_000, tag)))[0] for tag in range(3)]
        assert isinstance(world.disk, SimDisk)
        before = world.disk.operation_count
        async with trio.open_nursery() as nursery:
            for place in places:
                nursery.start_soon(world.segments.sync, {place.segment})
        assert world.disk.operation_count == before + 1

    drive(body)


class HeldOffload(InlineOffload):
    """Runs calls inline, but returns from syncs only when let go."""

    def __init__(self) -> None:
        self.go_on = trio.Event()
        self.syncs = 0

    async def run(self, call: Callable[..., T], *args: object) -> T:
        result = await super().run(call, *args)
        if getattr(call, "__name__", "") == "sync_data":
            self.syncs += 1
            await self.go_on.wait()
        return result


def test_a_sync_that_began_before_a_write_ended_does_not_count_for_it() -> None:
    async def main() -> None:
        offload = HeldOffload()
        disk = SimDisk(1)
        world = World(disk, offload)
        await world.segments.open()
        first, _ = await world.write_large(world.payload(70_000))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.segments.sync, {first.segment})
            await trio.testing.wait_all_tasks_blocked()
            assert offload.syncs == 1
            late = await world.write_large(world.payload(70_000))
            for _ in range(2):
                nursery.start_soon(world.segments.sync, {late[0].segment})
            await trio.testing.wait_all_tasks_blocked()
            assert offload.syncs == 1, "one at a time"
            offload.go_on.set()
        assert offload.syncs == 2, "the late write had a sync of its own, and its callers shared it"
        await world.segments.sync({first.segment})
        assert offload.syncs == 2, "nothing was written since"

    trio.run(main)


def test_a_segment_removed_stays_removed_after_power_loss() -> None:
    for seed in range(10):

        async def body(world: World) -> None:
            record = await world.store_large(world.payload(70_000))
            await world.segments.close()
            await world.reopen()
            del world.stored[record]
            await world.segments.remove(record.segment)
            assert isinstance(world.disk, SimDisk)
            await world.reopen(world.disk.crash())
            assert world.segments.all_ids() == []

        drive(body, seed=seed)


def test_the_folder_of_a_new_store_is_durable_before_anything_in_it() -> None:
    for seed in range(10):
        disk = SimDisk(seed)

        async def main(disk: SimDisk = disk) -> None:
            world = World(disk)
            await world.segments.open()
            await world.store_small([b"first"])
            await world.reopen(disk.crash())
            await world.check()

        trio.run(main)


# --- failures --------------------------------------------------------------------------------------------


def test_after_a_failed_sync_nothing_is_written_and_nothing_is_retried() -> None:
    async def body(world: World) -> None:
        disk = world.disk
        assert isinstance(disk, SimDisk)
        kept = await world.store_large(world.payload(70_000))
        place, _ = await world.write_large(world.payload(70_000))
        disk.fail_next("sync_data", DiskFailed("planted"), path="large")
        with pytest.raises(DiskFailed, match="planted"):
            await world.segments.sync({place.segment})
        assert world.segments.failed
        before = disk.operation_count
        with pytest.raises(StoreReadOnly, match="planted"):
            await world.segments.sync({place.segment})
        with pytest.raises(StoreReadOnly):
            await world.store_large(world.payload(70_000))
        with pytest.raises(StoreReadOnly):
            await world.store_small([b"x"])
        assert disk.operation_count == before
        assert await world.segments.read_chunk(kept) == world.stored[kept], "reading goes on"
        await world.segments.close()

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
        assert not any(world.segments.inflight(segment) for segment in world.segments.all_ids())
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
        assert not any(world.segments.inflight(segment) for segment in world.segments.all_ids())
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
        assert not any(world.segments.inflight(segment) for segment in world.segments.all_ids())
        await world.check()
        for record in list(world.stored):
            if record.segment in world.segments.sealed():
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
        assert not world.segments.failed

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
        size = await world.segments.size(record.segment)
        disk.fail_next("pwrite", DiskFailed("planted"), path="small")
        with pytest.raises(DiskFailed):
            await world.store_small([b"second"])
        with pytest.raises(StoreReadOnly):
            await world.store_small([b"third"])
        await world.segments.close()
        await world.reopen()
        assert await world.segments.size(record.segment) == size
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
            await world.segments.remove(record.segment)
        assert world.segments.all_ids() == [record.segment]
        await world.segments.remove(record.segment)
        assert world.segments.all_ids() == []

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


# --- cancellation ----------------------------------------------------------------------------------------


def test_callers_cancelled_at_any_checkpoint_leave_nothing_in_flight_and_harm_nobody() -> None:
    for after in range(40):

        async def body(world: World, after: int = after) -> None:
            async def doomed(scope: trio.CancelScope, tag: int) -> None:
                with scope:
                    await world.store_small([world.payload(50_000, tag), world.payload(50_000, tag)])
                    await world.store_large(world.payload(150_000, tag))

            scopes = [trio.CancelScope() for _ in range(3)]
            async with trio.open_nursery() as nursery:
                for tag, scope in enumerate(scopes):
                    nursery.start_soon(doomed, scope, tag)
                nursery.start_soon(world.store_small, [world.payload(40_000), world.payload(9)])
                nursery.start_soon(world.store_large, world.payload(70_000))
                for _ in range(after):
                    await trio.lowlevel.checkpoint()
                scopes[after % 3].cancel()
                scopes[(after + 1) % 3].cancel()
            assert len(world.stored) >= 3 + 3
            assert not any(world.segments.inflight(segment) for segment in world.segments.all_ids())
            await world.check()
            await world.segments.close()

        drive(body, seed=after)


def test_of_two_callers_with_the_same_bytes_only_the_cancelled_one_is_withdrawn() -> None:
    async def body(world: World) -> None:
        await world.store_small([b"first"])
        scope = trio.CancelScope()

        async def doomed() -> None:
            with scope:
                await world.store_small([b"same"])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.store_small, [world.payload(60_000)] * 2)
            await trio.lowlevel.checkpoint()
            nursery.start_soon(world.store_small, [b"same"])
            await trio.lowlevel.checkpoint()
            nursery.start_soon(doomed)
            await trio.lowlevel.checkpoint()
            scope.cancel()
        assert sorted(world.stored.values(), key=len)[:2] == [b"same", b"first"]
        await world.check()

    for seed in range(20):
        drive(body, seed=seed)


def test_files_of_full_segments_do_not_stay_open() -> None:
    async def body(world: World) -> None:
        for tag in range(30):
            await world.store_small([world.payload(60_000, tag)])
            await world.store_large(world.payload(300_000, tag))
        assert isinstance(world.disk, SimDisk)
        assert len(world.segments.all_ids()) > 15
        assert world.disk.open_files <= 3

    drive(body)


# --- damage ----------------------------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_in_payload_or_vector_is_found() -> None:
    async def body(world: World) -> None:
        disk = world.disk
        assert isinstance(disk, SimDisk)
        large = await world.store_large(world.payload(2 * GRANULE_BYTES + 50))
        small = (await world.store_small([world.payload(500)]))[0]
        for record in (large, small):
            path = segment_path(record.segment, world.segments.kind(record.segment))
            for at in (0, record.stored_bytes // 2, record.stored_bytes - 1, record.extent_bytes - 1):
                disk.flip_bit(path, record.offset + at, 3)
                with pytest.raises(ChunkDamaged) as caught:
                    await world.segments.read_chunk(record)
                assert f"{record.segment:016x}" in caught.value.message
                assert str(record.offset) in caught.value.message
                disk.flip_bit(path, record.offset + at, 3)
        await world.check()

    drive(body)


def test_sound_bytes_of_another_chunk_are_not_taken_for_this_one() -> None:
    """As when a record was mixed up: payload and vector agree with each other, not with the record."""

    async def body(world: World) -> None:
        records = [await world.store_large(world.payload(3 * GRANULE_BYTES, tag)) for tag in range(2)]
        records += await world.store_small([b"mine", b"yours"])
        for mine, other in (records[:2], records[2:]):
            mixed_up = ChunkRecord(
                mine.birth, other.segment, other.offset, mine.stored_bytes, mine.logical_bytes, mine.crc
            )
            with pytest.raises(ChunkDamaged):
                await world.segments.read_chunk(mixed_up)
            with pytest.raises(ChunkDamaged):
                await world.segments.read_range(mixed_up, 0, 1)

    drive(body)


def test_a_range_is_refused_only_when_its_own_granules_or_the_vector_are_damaged() -> None:
    async def body(world: World) -> None:
        disk = world.disk
        assert isinstance(disk, SimDisk)
        record = await world.store_large(world.payload(3 * GRANULE_BYTES))
        path = segment_path(record.segment, SegmentKind.LARGE)
        disk.flip_bit(path, record.offset + GRANULE_BYTES + 1, 0)
        await world.segments.read_range(record, 0, GRANULE_BYTES)
        with pytest.raises(ChunkDamaged):
            await world.segments.read_range(record, 0, GRANULE_BYTES + 1)
        disk.flip_bit(path, record.offset + GRANULE_BYTES + 1, 0)
        disk.flip_bit(path, record.offset + record.stored_bytes + 11, 0)
        with pytest.raises(ChunkDamaged):
            await world.segments.read_range(record, 0, 10)

    drive(body)


def test_rot_in_memory_is_healed_by_a_read_past_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def body(world: World) -> None:
        record = await world.store_large(world.payload(2 * GRANULE_BYTES + 3))
        small = (await world.store_small([world.payload(70, 1), world.payload(5000, 2)]))[1]
        original = type(world.disk.open(segment_path(record.segment, SegmentKind.LARGE))).pread_into

        def rotten(file: object, buffer: memoryview, offset: int) -> int:
            count: int = original(file, buffer, offset)  # type: ignore[arg-type]
            if not file.direct:  # type: ignore[attr-defined]
                buffer[count // 2] ^= 1
            return count

        monkeypatch.setattr("tests.sim.disk.SimFile.pread_into", rotten)
        assert await world.segments.read_chunk(record) == world.stored[record]
        assert await world.segments.read_chunk(small) == world.stored[small]
        assert (await world.segments.read_range(record, 5, 5))[1] == world.stored[record][:GRANULE_BYTES]
        assert world.segments.healed_reads == 3

    drive(body)


def test_each_payload_of_a_batch_comes_or_says_why_not() -> None:
    async def body(world: World) -> None:
        disk = world.disk
        assert isinstance(disk, SimDisk)
        records = await world.store_small([b"good", b"rotten", b"good too"])
        disk.flip_bit(segment_path(records[1].segment, SegmentKind.SMALL), records[1].offset, 0)
        found = await world.segments.read_small(records)
        assert (found[0], found[2]) == (b"good", b"good too")
        assert isinstance(found[1], ChunkDamaged)
        assert await world.segments.read_small([]) == []

    drive(body)


def test_reading_past_the_end_or_from_a_missing_file_is_damage() -> None:
    async def body(world: World) -> None:
        record = (await world.store_small([b"hello"]))[0]
        with pytest.raises(StoreDamaged, match="ends at"):
            await world.segments.read(record.segment, 1 << 30, 10)
        await world.segments.close()
        world.disk.unlink(segment_path(record.segment, SegmentKind.SMALL))
        await world.reopen()
        with pytest.raises(StaleGrant):
            await world.segments.read_chunk(record)

    drive(body)


def test_a_file_taken_away_from_a_running_store_is_damage() -> None:
    async def body(world: World) -> None:
        record = (await world.store_small([b"hello"]))[0]
        world.disk.unlink(segment_path(record.segment, SegmentKind.SMALL))
        with pytest.raises(StoreDamaged, match="missing"):
            await world.segments.read_chunk(record)

    drive(body)


@pytest.mark.parametrize(
    ("store_id", "segment", "version", "error"),
    [
        (bytes(16), 1, 1, StoreDamaged),
        (STORE_ID, 2, 1, StoreDamaged),
        (STORE_ID, 1, 2, StoreUnusable),
    ],
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
            await world.segments.read_chunk(record)

    drive(body)


def test_a_rotten_header_is_noted_and_the_payloads_are_read_all_the_same() -> None:
    async def body(world: World) -> None:
        record = (await world.store_small([b"hello"]))[0]
        assert isinstance(world.disk, SimDisk)
        world.disk.flip_bit(segment_path(record.segment, SegmentKind.SMALL), 20, 1)
        await world.check()
        assert world.segments.damaged_headers == {record.segment}

    drive(body)


# --- giving room back ------------------------------------------------------------------------------------


def test_punching_frees_dead_extents_and_no_byte_of_their_neighbours(any_disk: Disk) -> None:
    async def body(world: World) -> None:
        small = await world.store_small([world.payload(3000, tag) for tag in range(30)])
        large = [await world.store_large(world.payload(70_000, tag)) for tag in range(6)]
        before = await world.segments.allocated_bytes()
        dead = [*small[3:20], large[1], large[2], large[4]]
        for record in dead:
            del world.stored[record]
        await world.segments.punch([(r.segment, r.offset, r.extent_bytes) for r in dead])
        await world.check()
        for record in (large[1], large[2], large[4]):
            assert not any(await world.segments.read(record.segment, record.offset, record.extent_bytes))
            with pytest.raises(ChunkDamaged):
                await world.segments.read_chunk(record)
        freed = before - await world.segments.allocated_bytes()
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
        before = await world.segments.allocated_bytes()
        await world.collect()
        await world.check()
        after = await world.segments.allocated_bytes()
        live = sum(record.extent_bytes for record in world.stored)
        assert live <= after < min(before, live + len(world.stored) * 3 * PAGE)

    drive_threads(any_disk, body)


def test_a_removed_segment_is_gone_and_readers_are_told_to_locate_again(any_disk: Disk) -> None:
    async def body(world: World) -> None:
        record = await world.store_large(world.payload(70_000))
        await world.segments.read_chunk(record)
        await world.segments.close()
        await world.reopen()
        stays_open = world.disk.open(segment_path(record.segment, SegmentKind.LARGE), read_only=True)
        world.stored.clear()
        await world.segments.remove(record.segment)
        assert world.segments.all_ids() == []
        assert world.disk.list_folder("segments") == []
        with pytest.raises(StaleGrant):
            await world.segments.read_chunk(record)
        seen = bytearray(b"x" * 70_000)
        assert stays_open.pread_into(memoryview(seen), record.offset) == 70_000
        assert not any(seen), "what somebody still has open reads as zeros"
        stays_open.close()

    drive_threads(any_disk, body)


def test_a_segment_being_written_or_with_extents_in_flight_is_not_reclaimed() -> None:
    async def body(world: World) -> None:
        place, _ = await world.write_large(world.payload(500_000))
        with pytest.raises(AssertionError):
            await world.segments.punch_gaps(place.segment, [])
        await world.store_large(world.payload(600_000))
        assert place.segment in world.segments.sealed()
        assert world.segments.inflight(place.segment) == 1
        with pytest.raises(AssertionError):
            await world.segments.remove(place.segment)
        with pytest.raises(AssertionError):
            await world.segments.punch([(place.segment, place.offset, 500_000)])
        await world.segments.sync({place.segment})
        world.segments.settle(place)
        with pytest.raises(AssertionError):
            world.segments.settle(place)
        await world.segments.remove(place.segment)

    drive(body)


def test_a_write_in_an_earlier_segment_can_still_be_synced() -> None:
    async def body(world: World) -> None:
        payload = world.payload(500_000)
        place, crc = await world.write_large(payload)
        await world.store_large(world.payload(600_000))
        await world.store_large(world.payload(600_000))
        await world.segments.sync({place.segment})
        world.stored[world.record(place, len(payload), crc)] = payload
        world.segments.settle(place)
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
        assert await world.segments.size(small.segment) == 3 * PAGE
        assert await world.segments.size(large.segment) == PAGE + 72 * KIB
        assert await world.segments.allocated_bytes([large.segment]) <= 80 * KIB
        await world.check()

    drive_threads(any_disk, body)


# --- many segments, descriptors --------------------------------------------------------------------------


def test_opening_a_store_opens_no_segment() -> None:
    async def body(world: World) -> None:
        for tag in range(3):
            await world.store_small([world.payload(60_000, tag)] * 5)
        await world.segments.close()
        assert isinstance(world.disk, SimDisk)
        world.disk.fail_next("open", DiskFailed("a segment was opened"))
        await world.reopen()
        assert len(world.segments.sealed()) == 4

    drive(body)


def test_foreign_files_are_left_alone_and_two_files_of_one_id_are_damage() -> None:
    async def body(world: World) -> None:
        await world.store_small([b"hello"])
        await world.segments.close()
        for name in ("README", "1.small", "zzzzzzzzzzzzzzzz.large", "0000000000000001.tiny"):
            world.disk.open(f"segments/{name}", create=True).close()
        await world.reopen()
        assert world.segments.all_ids() == [1]
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
        open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in _descriptors()]
        assert len([path for path in open_files if path.startswith(str(tmp_path))]) == 2

    drive_threads(LocalDisk(tmp_path), body)


def _descriptors() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


def test_a_descriptor_handed_out_reads_the_segment_and_cannot_write_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(segment_files, "LENT_FILES_MAX", 1)

    async def body(world: World) -> None:
        record = await world.store_large(world.payload(70_000))
        descriptor = world.segments.descriptor(record.segment)
        assert world.segments.descriptor(record.segment) == descriptor
        assert os.pread(descriptor, 70_000, record.offset) == world.stored[record]
        with pytest.raises(OSError):
            os.pwrite(descriptor, b"x", 0)
        other = (await world.store_small([b"hello"]))[0]
        with pytest.raises(EngineBusy):
            world.segments.descriptor(other.segment)
        await world.segments.close()
        await world.reopen()
        descriptor = world.segments.descriptor(record.segment)
        world.stored.pop(record)
        await world.segments.remove(record.segment)
        assert not any(os.pread(descriptor, 70_000, record.offset)), "open still: it may be on its way"
        with pytest.raises(StaleGrant):
            world.segments.descriptor(record.segment)

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
