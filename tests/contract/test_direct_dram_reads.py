"""The shared index and the DRAM tier of one engine: entries name slabs while chunks are in them, and no longer."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import trio

from engine.chunks.chunk_store import find_chunk
from engine.process.embedded import EmbeddedEngine
from engine.process.shared_index_life import run_shared_index
from engine.tiers.shared_index import SharedIndex
from lakefs.client.facade import driver_of
from lakefs.client.trio.driver import TrioDriver
from lakefs.client.trio.lake import TrioLake
from lakefs.content.verify import Check
from lakefs.direct.batch_reads import DirectBatch
from lakefs.direct.chunk_reads import NOT_READ
from lakefs.errors import ChunkDamaged
from lakefs.ids import ChunkId, data_chunk_id
from lakefs.limits import KIB, MIB
from lakefs.wire import messages as m
from lakefs.wire.media import MEDIA_DRAM, MEDIUM_DRAM, MEDIUM_SEGMENT
from tests.contract.test_dram import World, punch_everything, run as run_with_tier
from tests.shared_index_check import check_shared_index, entries_of
from tests.store_rig import SMALL_SIZES

LENGTHS = [20 * KIB, 64 * KIB, 200 * KIB]
Body = Callable[[World, SharedIndex], Awaitable[None]]


def run(body: Body, setting: str = "memory", entries: int = 800) -> None:
    async def main(world: World) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(run_shared_index, world.store, setting, entries)
            assert world.store.shared_index is not None
            await body(world, world.store.shared_index)
            nursery.cancel_scope.cancel()

    run_with_tier(main, sizes=replace(SMALL_SIZES, compact_won_bytes=1))


async def _stored(lake: TrioLake, content: bytes, name: str = "bkt/object") -> ChunkId:
    await lake.put(name, content, create_bucket=True)
    return data_chunk_id(content)


async def _hot(world: World, lake: TrioLake, content: bytes, name: str = "bkt/object") -> ChunkId:
    """Store a chunk; read it until its entry names a slab, and once more, so that the client has that slab."""
    chunk = await _stored(lake, content, name)
    for _ in range(2):
        assert await lake.chunks.get(chunk) == content
    await world.event(chunk).wait()
    assert await lake.chunks.get(chunk) == content
    return chunk


def _tier_of(index: SharedIndex, chunk: ChunkId) -> int:
    found = index.table.find(chunk)
    return 0 if found is None else found[0]


@pytest.mark.parametrize("check", list(Check))
@pytest.mark.parametrize("length", LENGTHS)
def test_what_is_in_memory_is_read_from_there_without_a_request_also_when_the_disk_has_it_no_more(
    length: int, check: Check
) -> None:
    async def body(world: World, index: SharedIndex) -> None:
        content = os.urandom(length)
        async with world.lake(check=check) as lake:
            chunk = await _hot(world, lake, content)
            assert _tier_of(index, chunk) == MEDIUM_DRAM
            check_shared_index(world.store)
            punch_everything(world)
            buffer = bytearray(length)
            with mock.patch.object(TrioDriver, "run", side_effect=AssertionError("the engine was asked")):
                assert await lake.chunks.get_into(chunk, buffer) == length
            assert buffer == content

    run(body)


@pytest.mark.parametrize("check", list(Check))
@pytest.mark.parametrize("length", LENGTHS)
def test_a_batch_that_is_told_the_places_reads_nowhere_else(length: int, check: Check) -> None:
    """Check that memory which others can make shorter is filled from segments only."""

    async def body(world: World, index: SharedIndex) -> None:
        content = os.urandom(length)
        async with world.lake(check=check) as lake:
            chunk = await _hot(world, lake, content)
            assert _tier_of(index, chunk) == MEDIUM_DRAM
            shared = driver_of(lake).shares.index.at_hand()
            assert shared is not None
            punch_everything(world)
            for places in (None, [index.in_slabs[chunk]]):
                targets = [memoryview(bytearray(length))]
                with DirectBatch(shared, [chunk], targets, places) as batch:
                    for task in batch.tasks(is_shared=False):
                        task()
                assert batch.lengths == [NOT_READ if places else length]
                assert bytes(targets[0]) == (bytes(length) if places else content)

    run(body)


@pytest.mark.parametrize("check", [Check.BLAKE3, Check.CRC32C])
@pytest.mark.parametrize("length", [64 * KIB, 4 * MIB])
def test_bits_that_flip_in_memory_are_noticed_and_the_disk_is_read(length: int, check: Check) -> None:
    async def body(world: World, _: SharedIndex) -> None:
        content = os.urandom(length)
        async with world.lake(check=check) as lake:
            chunk = await _hot(world, lake, content)
            shared = driver_of(lake).shares.index.at_hand()
            place = world.tier.find(chunk)
            assert shared is not None
            assert place is not None
            target = bytearray(length)
            assert shared.read_into(chunk, memoryview(target)) == length
            assert target == content
            for at in (5, length - 1):
                world.tier.extent(place)[at] ^= 1
                assert shared.read_into(chunk, memoryview(target)) == NOT_READ
                assert await lake.chunks.get(chunk) == content
                world.tier.extent(place)[at] ^= 1

    run(body)


def test_the_table_tells_of_what_is_in_memory_just_what_the_tier_would() -> None:
    async def body(world: World, index: SharedIndex) -> None:
        async with world.lake() as lake:
            shared = await _hot(world, lake, os.urandom(64 * KIB))
            cold = await _stored(lake, os.urandom(64 * KIB), "bkt/cold")
        client = world.client()
        for media, expected in ((MEDIA_DRAM, [MEDIUM_DRAM, MEDIUM_SEGMENT]), (0, [MEDIUM_SEGMENT] * 2)):
            assert index.packed_grants([shared, cold], 1, understood=bool(media)) is not None
            packed = await _located(client, [shared, cold], media)
            with mock.patch.object(SharedIndex, "packed_grants", return_value=None):
                looked_up = await _located(client, [shared, cold], media)
            assert packed == looked_up
            assert [grant.medium for grant in packed] == expected
        assert (await _located(client, [shared], MEDIA_DRAM)) == [world.tier.grant(shared)]
        world.tier.forget(shared)
        assert [grant.medium for grant in await _located(client, [shared], MEDIA_DRAM)] == [MEDIUM_SEGMENT]

    run(body)


async def _located(client: EmbeddedEngine, chunks: list[ChunkId], media: int) -> list[m.Grant]:
    reply = await client.call(m.Locate([bytes(chunk) for chunk in chunks], media))
    assert isinstance(reply.message, m.Located)
    return reply.message.grants


def test_the_engine_itself_looks_at_places_in_segments() -> None:
    async def body(world: World, index: SharedIndex) -> None:
        content = os.urandom(64 * KIB)
        async with world.lake() as lake:
            chunk = await _hot(world, lake, content)
            cold = await _stored(lake, b"cold", "bkt/cold")
        assert _tier_of(index, chunk) == MEDIUM_DRAM
        with world.store.metadata.view() as view:
            record = find_chunk(view, chunk)
        assert record is not None
        found = index.find_many([chunk, cold, data_chunk_id(b"nobody put this")])
        assert found[0] == (MEDIUM_SEGMENT, record.segment, record.offset, record.stored_bytes, record.crc)
        assert [place and place[0] for place in found] == [MEDIUM_SEGMENT, MEDIUM_SEGMENT, None]
        reply = await world.client().call(m.Locate([chunk]))
        assert isinstance(reply.message, m.Located)
        assert (reply.message.grants[0].medium, reply.message.grants[0].offset) == (MEDIUM_SEGMENT, record.offset)

    run(body)


def test_an_entry_tells_its_segment_again_before_its_slot_is_given_up() -> None:
    async def body(world: World, index: SharedIndex) -> None:
        content = os.urandom(64 * KIB)
        async with world.lake() as lake:
            chunk = await _hot(world, lake, content)
            give_free = world.tier.arena.give_free
            told: list[int] = []

            def looked_at(slot: object) -> None:
                told.append(_tier_of(index, chunk))
                give_free(slot)  # type: ignore[arg-type]

            with mock.patch.object(world.tier.arena, "give_free", looked_at):
                world.tier.forget(chunk)
            assert told == [MEDIUM_SEGMENT]
            check_shared_index(world.store)
            assert await lake.chunks.get(chunk) == content

    run(body)


def test_a_chunk_that_is_freed_is_in_neither() -> None:
    async def body(world: World, index: SharedIndex) -> None:
        async with world.lake() as lake:
            chunk = await _hot(world, lake, os.urandom(64 * KIB))
            await world.client().call(m.DeleteNames([("bkt", "object")]))
            await world.store.collect()
            assert _tier_of(index, chunk) == 0
            check_shared_index(world.store)
            assert not index.in_slabs

    run(body)


def test_a_chunk_that_is_quarantined_is_in_neither() -> None:
    async def body(world: World, index: SharedIndex) -> None:
        async with world.lake() as lake:
            chunk = await _hot(world, lake, os.urandom(64 * KIB))
            with world.store.metadata.view() as view:
                record = find_chunk(view, chunk)
            assert record is not None
            await world.store.quarantine.note(chunk, record, ChunkDamaged("rot"))
            assert _tier_of(index, chunk) == 0
            assert not index.in_slabs
            check_shared_index(world.store)

    run(body)


def test_a_chunk_that_is_moved_stays_in_memory_and_its_segment_is_the_new_one_afterwards() -> None:
    async def body(world: World, index: SharedIndex) -> None:
        async with world.lake() as lake:
            shared = await _hot(world, lake, os.urandom(30 * KIB))
            for number in range(40):
                await _stored(lake, b"%05d" % number * 6_000, f"bkt/{number}")
            before = index.in_slabs[shared]
            client = world.client()
            await client.call(m.DeleteNames([("bkt", str(number)) for number in range(40)]))
            done = await world.store.collect(0.97)
            assert done.compaction.moved_chunks > 0
            assert _tier_of(index, shared) == MEDIUM_DRAM
            assert index.in_slabs[shared] != before
            check_shared_index(world.store)
            world.tier.forget(shared)
            check_shared_index(world.store)

    run(body)


def test_a_table_that_grows_tells_slabs_as_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.process.shared_index_life.HOT_INDEX_ENTRIES_MIN", 10)

    async def body(world: World, index: SharedIndex) -> None:
        async with world.lake() as lake:
            shared = await _hot(world, lake, os.urandom(64 * KIB))
            many = [(f"bkt/{number}", b"%05d" % number) for number in range(900)]
            await lake.put_many(many, create_bucket=True)
        while index.counts.grown == 0 or index.state == "filling":
            await trio.lowlevel.checkpoint()
        assert _tier_of(index, shared) == MEDIUM_DRAM
        index.counts.refused = 0
        check_shared_index(world.store)

    run(body, entries=0)


def test_a_table_that_is_kept_tells_no_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[dict[bytes, tuple[int, int, int, int, int]]] = []

    async def body(world: World, index: SharedIndex) -> None:
        async with world.lake() as lake:
            chunk = await _hot(world, lake, os.urandom(64 * KIB))
        assert _tier_of(index, chunk) == MEDIUM_DRAM
        save = index.backing.save

        def saved() -> None:
            kept.append(entries_of(world.store.shared_index))
            save()

        monkeypatch.setattr(index.backing, "save", saved)

    with tempfile.TemporaryDirectory() as folder:
        run(body, setting=str(Path(folder) / "hot-index"))
    assert [place[0] for place in kept[0].values()] == [MEDIUM_SEGMENT]


def test_the_status_tells_how_many_entries_tell_slabs_and_a_closed_index_hears_of_the_tier_no_more() -> None:
    async def body(world: World, index: SharedIndex) -> None:
        async with world.lake() as lake:
            chunk = await _hot(world, lake, os.urandom(64 * KIB))
        assert (await world.store.status())["hot_index"]["in_slabs"] == 1
        await world.store.leaving.aclose()
        assert world.store.shared_index is None
        world.tier.forget(chunk)
        assert chunk in index.in_slabs, "nothing was told"

    run(body)
