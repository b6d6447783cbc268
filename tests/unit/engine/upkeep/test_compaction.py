"""Compaction: room that dead neighbours keep is given back, and no reader, writer or holder is harmed."""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final
from unittest import mock

import pytest
import trio
import trio.testing

from engine.format.layouts import SegmentKind
from engine.metadata.pacing import Pacing
from engine.segments.files import segment_path
from engine.store.store import Store
from engine.upkeep.compaction import CompactionReport, Compactor
from lakefs.errors import ChunkDamaged, ChunkNotFound, DiskFailed, StaleGrant
from lakefs.ids import data_chunk_id
from lakefs.limits import COMPACT_SHARE_MOST, KIB
from lakefs.wire import messages as m
from tests.sim.world.determinism import run_seeded
from tests.sim.world.disk import SimDisk
from tests.store_rig import (
    SMALL_SIZES,
    ask,
    change,
    client_of,
    delete,
    fsck,
    good,
    in_flight,
    put,
    read,
    records,
    run,
    session_of,
    simulated_store,
    store_chunks,
)

EAGER: Final = replace(SMALL_SIZES, compact_won_bytes=1)
STEPWISE: Final = replace(EAGER, gc_batch=1)
"""A checkpoint after every record, so that others run between any two."""


def payload(number: int, length: int = 3000) -> bytes:
    """Return bytes that no other number and length have."""
    return random.Random(f"{number} {length}").randbytes(length)


async def sparse(disk: SimDisk, *, count: int = 40, kept: int = 8) -> dict[str, bytes]:
    """Make a sealed small segment of which every `kept`th chunk has a name; return what they hold."""
    contents = {f"k{number}": payload(number) for number in range(count)}
    async with simulated_store(disk, sizes=EAGER) as store:
        client = client_of(store)
        for key, content in contents.items():
            await put(client, key, content)
        await delete(client, *(key for number, key in enumerate(contents) if number % kept))
    return {key: content for number, (key, content) in enumerate(contents.items()) if number % kept == 0}


async def check(store: Store, contents: dict[str, bytes]) -> None:
    """Check that everything reads as it was put, and that nothing is damaged or under way."""
    client = client_of(store)
    for content in contents.values():
        assert await read(client, data_chunk_id(content)) == content
    assert (await fsck(client))["damage"] == 0
    assert in_flight(store) == 0


async def collected(store: Store) -> CompactionReport:
    """Run gc, then compaction of all that is worth anything."""
    return (await store.collect(COMPACT_SHARE_MOST)).compaction


# --- what it is for ------------------------------------------------------------------------------------


@pytest.mark.parametrize("share_removed", [0.6, 0.9])
def test_one_cycle_gives_back_at_least_0_95_of_what_is_dead_in_a_store_of_mixed_sizes(share_removed: float) -> None:
    async def main() -> None:
        disk, rng = SimDisk(), random.Random(1)
        lengths = [100, 700, 3000, 9000, 30_000, 65_535, 65_536, 150_000]
        contents = {f"k{number}": payload(number, rng.choice(lengths)) for number in range(250)}
        async with simulated_store(disk) as store:
            for key, content in contents.items():
                await put(client_of(store), key, content)
            gone = [key for key in contents if rng.random() < share_removed]
            await delete(client_of(store), *gone)
        async with simulated_store(disk) as store:
            before = await store.segments.room.allocated_bytes()
            report = await store.collect(COMPACT_SHARE_MOST)
            assert report.compaction.stopped == ""
        async with simulated_store(disk) as store:
            reclaimed = before - await store.segments.room.allocated_bytes()
            assert reclaimed >= 0.95 * report.freed_bytes, (reclaimed, report)
            await check(store, {key: content for key, content in contents.items() if key not in gone})

    run(main)


def test_chunks_keep_their_births_and_get_places_in_segments_of_new_ids() -> None:
    async def main() -> None:
        disk = SimDisk()
        contents = await sparse(disk)
        async with simulated_store(disk, sizes=EAGER) as store:
            before, segments = records(store), sorted(store.segments.register.kinds)
            report = await collected(store)
            assert (report.moved_chunks, report.removed_segments) == (len(contents), 1)
            for chunk, record in records(store).items():
                old = before[chunk]
                assert record.segment not in segments
                assert replace_place(record, old) == old
            await check(store, contents)
            again = await collected(store)
            assert again.moved_chunks == 0, "what was moved is not moved again"
        async with simulated_store(disk, sizes=EAGER) as store:
            await check(store, contents)

    run(main)


def replace_place(record: Any, place_of: Any) -> Any:
    """Return the record, at the place of another."""
    return type(record)(
        record.birth, place_of.segment, place_of.offset, record.stored_bytes, record.logical_bytes, record.crc
    )


def test_the_segment_that_is_open_for_writing_is_compacted_too() -> None:
    async def main() -> None:
        async with simulated_store(sizes=EAGER) as store:
            client = client_of(store)
            contents = {f"k{number}": payload(number) for number in range(40)}
            for key, content in contents.items():
                await put(client, key, content)
            await delete(client, *list(contents)[1:])
            report = await collected(store)
            assert (report.moved_chunks, report.removed_segments) == (1, 1)
            await check(store, {"k0": contents["k0"]})

    run(main)


def test_segments_that_are_filled_while_compaction_looks_around_stay() -> None:
    async def main() -> None:
        disk = SimDisk()
        contents = await sparse(disk)
        rests = 0

        async def rest(pacing: Pacing, times: float = 0.0) -> None:
            nonlocal rests
            rests += 1
            if rests == len(contents):  # every record has been walked
                for number in range(200):  # two segments and more
                    contents[f"new{number}"] = payload(2000 + number)
                    await put(client_of(store), f"new{number}", contents[f"new{number}"])

        async with simulated_store(disk, sizes=STEPWISE) as store:
            await store.collector.run()
            with mock.patch.object(Pacing, "rest", rest):
                report = await store.compactor.run(COMPACT_SHARE_MOST)
            assert len(contents) > 200
            assert report.moved_chunks <= len(contents) - 200, "what came meanwhile lives, and is not copied"
            await check(store, contents)

    run(main)


def test_a_segment_that_is_mostly_alive_stays() -> None:
    async def main() -> None:
        disk = SimDisk()
        contents = {f"k{number}": payload(number) for number in range(80)}
        async with simulated_store(disk) as store:
            for key, content in contents.items():
                await put(client_of(store), key, content)
            await delete(client_of(store), "k0")
        async with simulated_store(disk) as store:
            before = records(store)
            report = await store.collect()
            assert report.compaction == CompactionReport()
            assert records(store) == {
                chunk: record for chunk, record in before.items() if chunk != data_chunk_id(contents["k0"])
            }

    run(main)


# --- readers and holders -------------------------------------------------------------------------------


def test_an_old_place_is_stale_and_a_file_kept_open_shows_zeros() -> None:
    async def main() -> None:
        disk = SimDisk()
        contents = await sparse(disk)
        async with simulated_store(disk, sizes=EAGER) as store:
            old = records(store)[data_chunk_id(contents["k8"])]
            kept_open = disk.open(segment_path(old.segment, SegmentKind.SMALL), read_only=True)
            await collected(store)
            with pytest.raises(StaleGrant):
                await store.segments.reader.read_chunk(old)
            found = bytearray(old.stored_bytes)
            kept_open.pread_into(memoryview(found), old.offset)
            kept_open.close()
            assert not any(found)
            await check(store, contents)

    run(main)


def test_what_a_session_holds_is_held_after_it_was_moved() -> None:
    async def main() -> None:
        disk = SimDisk()
        contents = await sparse(disk)
        async with simulated_store(disk, sizes=EAGER) as store:
            client = client_of(store)
            session = await session_of(client)
            (chunk,) = await store_chunks(client, session, [contents["k0"]])
            await delete(client, *contents)
            assert (await collected(store)).moved_chunks == 1
            await collected(store)
            commit = m.Commit(session, [change("again", chunk)], end_session=True)
            good(await ask(client, commit, m.NameResults))
            await check(store, {"again": contents["k0"]})

    run(main)


# --- damage and want of room ---------------------------------------------------------------------------


def test_a_damaged_chunk_stays_where_it_is_and_is_never_copied_as_good() -> None:
    async def main() -> None:
        disk = SimDisk()
        contents = await sparse(disk)
        async with simulated_store(disk, sizes=EAGER) as store:
            bad = data_chunk_id(contents["k8"])
            old = records(store)[bad]
            disk.flip_bit(segment_path(old.segment, SegmentKind.SMALL), old.offset + 5, 1)
            report = await collected(store)
            assert report.unreadable_chunks == 1
            assert report.moved_chunks == len(contents) - 1
            assert records(store)[bad] == old
            assert store.chunks.is_quarantined(bad)
            with pytest.raises(ChunkDamaged):
                await read(client_of(store), bad)
            assert (await collected(store)).moved_chunks == 0
            assert records(store)[bad] == old, "nor is it given up later"
            await put(client_of(store), "healed", contents["k8"])
            await collected(store)
            await check(store, contents)

    run(main)


def test_on_a_disk_without_room_gc_frees_and_nothing_is_moved() -> None:
    async def main() -> None:
        disk = SimDisk()
        contents = await sparse(disk)
        async with simulated_store(disk, sizes=EAGER) as store:
            capacity = disk.capacity_bytes
            disk.capacity_bytes -= disk.free_bytes()
            assert (await store.collector.run()).freed_chunks == 35
            disk.capacity_bytes -= disk.free_bytes()  # other programs take what was freed
            places = records(store)
            report = await collected(store)
            assert report.stopped
            assert records(store) == places
            disk.capacity_bytes = capacity
            report = await collected(store)
            assert (report.moved_chunks, report.stopped) == (len(contents), "")
            await check(store, contents)

    run(main)


def test_a_disk_with_room_for_a_few_chunks_is_emptied_in_steps_that_give_back_what_they_took() -> None:
    async def main() -> None:
        disk = SimDisk()
        contents = await sparse(disk, count=70, kept=2)
        async with simulated_store(disk, sizes=EAGER) as store:
            await store.collector.run()
            room = await store.segments.room.free_bytes(into_headroom=True)
            disk.capacity_bytes -= room - 24 * KIB  # 35 chunks of 3,000 bytes live
            report = await collected(store)
            assert (report.moved_chunks, report.removed_segments, report.stopped) == (len(contents), 1, "")
            assert await store.segments.room.free_bytes(into_headroom=True) > 64 * KIB
            await check(store, contents)
        async with simulated_store(disk, sizes=EAGER) as store:
            await check(store, contents)

    run(main)


def test_nothing_is_moved_while_more_than_half_of_the_reserve_is_used() -> None:
    async def main() -> None:
        disk = SimDisk()
        await sparse(disk)
        async with simulated_store(disk, sizes=EAGER) as store:
            await store.collector.run()
            places = records(store)
            while store.reserve.release():
                pass
            disk.capacity_bytes -= disk.free_bytes() - store.reserve.target_bytes
            report = await store.compactor.run(COMPACT_SHARE_MOST)
            assert "reserve" in report.stopped
            assert records(store) == places

    run(main)


@pytest.mark.parametrize("operation", ["pwrite", "sync_data"])
def test_a_write_that_fails_leaves_the_old_places_alone(operation: str) -> None:
    async def main() -> None:
        disk = SimDisk()
        contents = await sparse(disk)
        with pytest.raises(DiskFailed):
            async with simulated_store(disk, sizes=EAGER) as store:
                await store.collector.run()
                disk.fail_next(operation, DiskFailed("planted"), path=".small")
                await store.compactor.run(COMPACT_SHARE_MOST)
        disk.forget_failures()
        async with simulated_store(disk, sizes=EAGER) as store:
            await check(store, contents)

    run(main)


# --- beside others -------------------------------------------------------------------------------------

Act = Callable[[Store, dict[str, bytes]], Awaitable[None]]


def at_every_step(act: Act, *, stride: int = 3) -> None:
    """Compact, with `act` beginning at each checkpoint in turn; after two gc cycles nothing may be damaged."""
    delay = 0
    beside = True

    async def main() -> None:
        nonlocal beside
        disk = SimDisk()
        contents = await sparse(disk, count=16, kept=4)
        async with simulated_store(disk, sizes=STEPWISE) as store:
            await store.collector.run()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.compactor.run, COMPACT_SHARE_MOST)
                for _ in range(delay + 1):
                    await trio.lowlevel.checkpoint()
                beside = store.compactor.running
                await act(store, contents)
            for _ in range(2):
                await check(store, contents)
                await collected(store)

    while beside:
        with mock.patch("engine.upkeep.compaction.COMPACT_BYTES_PER_S", math.inf):  # without pauses for others
            run_seeded(main, delay, clock=trio.testing.MockClock(autojump_threshold=0))
        delay += stride
    assert delay > 10, "the run is walked in steps"


def test_names_removed_and_put_again_while_their_chunks_are_moved_are_whole() -> None:
    async def act(store: Store, contents: dict[str, bytes]) -> None:
        client = client_of(store)
        await delete(client, *contents)
        await store.collector.run()
        for key, content in contents.items():
            await put(client, key, content)

    at_every_step(act)


def test_a_session_that_stores_again_what_is_moved_keeps_it() -> None:
    async def act(store: Store, contents: dict[str, bytes]) -> None:
        client = client_of(store)
        await delete(client, *contents)
        await store.collector.run()
        session = await session_of(client)
        chunks = await store_chunks(client, session, list(contents.values()))
        await store.collector.run()
        changes = [change(key, chunk) for key, chunk in zip(contents, chunks, strict=True)]
        good(await ask(client, m.Commit(session, changes, end_session=True), m.NameResults))

    at_every_step(act)


def test_reads_at_any_moment_of_a_move_get_the_bytes() -> None:
    async def act(store: Store, contents: dict[str, bytes]) -> None:
        for content in contents.values():
            assert await read(client_of(store), data_chunk_id(content)) == content

    at_every_step(act)


def test_cancelled_at_any_step_it_leaves_nothing_but_garbage_for_gc() -> None:
    steps = 0
    is_cancelled = True

    async def main() -> None:
        nonlocal is_cancelled
        disk = SimDisk()
        contents = await sparse(disk, count=16, kept=4)
        async with simulated_store(disk, sizes=STEPWISE) as store:
            await store.collector.run()
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(store.compactor.run, COMPACT_SHARE_MOST)
                    for _ in range(steps + 1):
                        await trio.lowlevel.checkpoint()
                    is_cancelled = store.compactor.running
                    scope.cancel()
            await check(store, contents)
            await collected(store)
            await check(store, contents)
        async with simulated_store(disk, sizes=EAGER) as store:
            await collected(store)
            assert await store.segments.room.allocated_bytes() < 64 * KIB + 4 * 8 * KIB
            await check(store, contents)

    while is_cancelled:
        with mock.patch("engine.upkeep.compaction.COMPACT_BYTES_PER_S", math.inf):
            run_seeded(main, steps, clock=trio.testing.MockClock(autojump_threshold=0))
        steps += 1
    assert steps > 20


async def store_again_between_copy_and_decision() -> None:
    """Free the chunks that are copied, and store them again in a session, before the records are changed."""
    disk = SimDisk()
    contents = await sparse(disk)
    chunks: list[bytes] = []
    original = Compactor._record

    async with simulated_store(disk, sizes=EAGER) as store:
        await store.collector.run()
        client = client_of(store)
        session = await session_of(client)

        async def record(self: Compactor, copies: Any, report: CompactionReport) -> int:
            await delete(client, *contents)
            await store.collector.run()
            chunks.extend(await store_chunks(client, session, list(contents.values())))
            return await original(self, copies, report)

        with mock.patch.object(Compactor, "_record", record):
            report = await store.compactor.run(COMPACT_SHARE_MOST)
        await store.collector.run()
        changes = [change(key, chunk) for key, chunk in zip(contents, chunks, strict=True)]
        good(await ask(client, m.Commit(session, changes, end_session=True), m.NameResults))
        assert (report.moved_chunks, report.changed_meanwhile) == (0, len(contents))
        await check(store, contents)


def test_a_chunk_freed_and_stored_again_while_it_was_copied_is_not_moved() -> None:
    run(store_again_between_copy_and_decision)


def test_moving_a_chunk_that_was_stored_again_is_noticed() -> None:
    with mock.patch.object(Compactor, "_is_unchanged", return_value=True), pytest.raises(ChunkNotFound):
        run(store_again_between_copy_and_decision)
