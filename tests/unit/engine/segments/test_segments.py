"""Segments: what is stored is read back and survives power loss; cancelled calls leave nothing behind."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from lakefs.errors import ChunkDamaged, StoreReadOnly
from lakefs.limits import CHUNK_BYTES, GRANULE_BYTES, KIB
from lakefs.ports import Disk
from tests.sim.world.determinism import run_seeded
from tests.sim.world.disk import SimCrashed, SimDisk
from tests.sim.world.segment_world import BIG_SIZES, World, drive, drive_threads, lies_at

PAGE = 4096
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


# --- what is stored is read back -----------------------------------------------------------------------


def test_payloads_of_every_edge_length_are_read_back_on_every_disk(any_disk: Disk) -> None:
    async def body(world: World) -> None:
        await world.store_small([world.payload(length, length % 250) for length in (1, 2, 4095, 4096, 4097, 65_535)])
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
        raw = lies_at(world.segments, record.segment, record.offset, 72 * KIB)
        assert raw[: record.stored_bytes] == world.stored[record]
        assert raw[record.stored_bytes + 8 :] == bytes(72 * KIB - record.stored_bytes - 8)
        small = (await world.store_small([b"first", b"second"]))[1]
        assert small.offset == PAGE + 5, "packed without gaps"
        assert lies_at(world.segments, small.segment, PAGE, 11) == b"firstsecond"

    drive(body)


def test_ranges_come_widened_to_granules_with_their_checksums() -> None:
    async def body(world: World) -> None:
        record = await world.store_large(world.payload(3 * GRANULE_BYTES + 10))
        payload = world.stored[record]
        start, found, crcs = await world.segments.reader.read_range(record, GRANULE_BYTES + 5, GRANULE_BYTES)
        assert start == GRANULE_BYTES
        assert found == payload[GRANULE_BYTES : 3 * GRANULE_BYTES]
        assert len(crcs) == 8
        start, found, crcs = await world.segments.reader.read_range(record, 3 * GRANULE_BYTES + 9, 1)
        assert (start, bytes(found), len(crcs)) == (3 * GRANULE_BYTES, payload[3 * GRANULE_BYTES :], 4)
        small = (await world.store_small([b"hello"]))[0]
        start, found, crcs = await world.segments.reader.read_range(small, 1, 2)
        assert (start, bytes(found), crcs) == (0, b"hello", small.crc.to_bytes(4, "little"))

    drive(body, sizes=BIG_SIZES)


def test_a_chunk_can_be_read_into_memory_of_the_caller() -> None:
    async def body(world: World) -> None:
        record = await world.store_large(world.payload(100_000))
        buffer = world.pool.try_acquire()
        assert buffer is not None
        found = await world.segments.reader.read_chunk(record, buffer.view)
        assert found == world.stored[record]
        assert buffer.view[:100_000] == world.stored[record]

    drive(body)


# --- durability ----------------------------------------------------------------------------------------


async def _script(world: World) -> None:
    """Do work that meets new segments, extensions, fills, shared groups, removal and a clean stop."""

    async def writer(tag: int) -> None:
        for step in range(3):
            await world.store_small([world.payload(20_000 + step, tag), world.payload(7, tag)])
            await world.store_large(world.payload(150_000 + tag, tag))

    async with trio.open_nursery() as nursery:
        for tag in range(3):
            nursery.start_soon(writer, tag)
    for record in list(world.stored)[::3]:
        del world.stored[record]
        await world.segments.room.punch([(record.segment, record.offset, record.extent_bytes)])
    await world.collect()
    await world.segments.close()


def _crash_and_continue(seed: int, crash_at: int) -> bool:
    """Run the script until the power fails; return whether it did.  Then start again, check, collect and write."""
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
        except* StoreReadOnly:
            assert disk.operation_count >= crash_at, "those whose payload another was writing are told, too"
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
                found = await world.segments.reader.read_chunk(world.record(place, len(payload), crc))
            except ChunkDamaged as error:
                outcomes.add("lost" if f"{place.segment:016x}" in error.message else error.message)
            else:
                assert found == payload
                outcomes.add("kept")

        drive(body, seed=seed)
    assert outcomes == {"lost", "kept"}


def test_a_segment_removed_stays_removed_after_power_loss() -> None:
    for seed in range(10):

        async def body(world: World) -> None:
            record = await world.store_large(world.payload(70_000))
            await world.segments.close()
            await world.reopen()
            del world.stored[record]
            await world.segments.room.remove(record.segment)
            assert isinstance(world.disk, SimDisk)
            await world.reopen(world.disk.crash())
            assert sorted(world.segments.register.kinds) == []

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


def test_an_extent_that_is_freed_before_its_owner_has_settled_it_is_left_for_the_next_cycle() -> None:
    async def body(world: World) -> None:
        place, _ = await world.write_large(world.payload(100_000))
        await world.store_large(world.payload(70_000))
        before = await world.segments.room.allocated_bytes()
        await world.segments.room.punch([(place.segment, place.offset, 100_000)])
        assert await world.segments.room.allocated_bytes() == before
        world.segments.in_flight.settle(place)
        await world.segments.room.punch([(place.segment, place.offset, 100_000)])
        assert await world.segments.room.allocated_bytes() == before - 102_400
        await world.check()

    drive(body)


# --- cancellation --------------------------------------------------------------------------------------


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
            assert not any(world.segments.in_flight.count(segment) for segment in world.segments.register.kinds)
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
        assert len(world.segments.register.kinds) > 15
        assert world.disk.open_files <= 3

    drive(body)
