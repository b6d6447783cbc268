"""The DRAM tier of a head: what is read again is in its memory, checked; only whole, proven chunks enter."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import trio
import trio.testing

from engine.head.head import Head, open_head
from engine.host.clock import SystemClock
from engine.process.embedded import EmbeddedEngine
from engine.server.listener import Server
from engine.tiers.dram_tier import DramTier
from lakefs.client.blocking.driver import BlockingDriver
from lakefs.client.blocking.engine import connect_blocking
from lakefs.client.blocking.lake import Lake as BlockingLake
from lakefs.client.facade import driver_of
from lakefs.client.trio.driver import TrioDriver
from lakefs.client.trio.lake import TrioLake
from lakefs.content.verify import Check, granule_crcs
from lakefs.errors import ChunkNotFound, ClusterDegraded, InvalidArgument, PermissionDenied, UnsupportedVersion
from lakefs.host.descriptors import close_all
from lakefs.host.new_memory import new_memory
from lakefs.host.offload import ThreadOffload
from lakefs.ids import ChunkId, data_chunk_id
from lakefs.limits import CHUNK_BYTES, KIB, MIB
from lakefs.transport.streams import TrioNetwork
from lakefs.wire import messages as m
from lakefs.wire.media import MEDIA_DRAM, MEDIUM_DRAM, MEDIUM_STREAMED
from tests.head_rig import SLAB_BYTES, Lake, head_over, lake_of, tier_of as rig_tier
from tests.store_rig import ask, read, session_of, store_chunks
from tests.unit.engine.cluster import stripe_rig
from tests.unit.engine.cluster.stripe_rig import Fault

SLABS: Final = 3
LENGTHS: Final = [20 * KIB, 64 * KIB, 300 * KIB, 4 * MIB, 4 * MIB + 100 * KIB]
FEATURES: Final = m.FEATURE_EACH | m.FEATURE_SLABS | m.FEATURE_SHARED_INDEX | m.FEATURE_LENT_MEMORY
AWAY: Final = ClusterDegraded("too few members are up")


@dataclass
class World:
    """A head with a tier of small slabs over chunks in memory, and clients of it."""

    lake: Lake
    offload: ThreadOffload

    @property
    def tier(self) -> DramTier:
        return tier_of(self.lake.head)

    def client(self, *, descriptors: bool = True) -> EmbeddedEngine:
        return EmbeddedEngine(self.lake.head, descriptors=descriptors, features=FEATURES)

    @asynccontextmanager
    async def connected(self, *, descriptors: bool = True, check: Check = Check.BLAKE3) -> AsyncIterator[TrioLake]:
        client = self.client(descriptors=descriptors)
        lake = TrioLake(client, self.offload, check=check)
        try:
            yield lake
        finally:
            await lake.aclose()
            await client.aclose()

    async def warm(self, *contents: bytes) -> list[ChunkId]:
        """Store contents of one chunk each as objects, and read them until the tier has them."""
        async with self.connected(descriptors=False) as lake:
            for number, content in enumerate(contents):
                await lake.put(f"bkt/{number}", content, create_bucket=True)
                for _ in range(2):
                    assert await lake.get(f"bkt/{number}") == content
        chunks = [data_chunk_id(content) for content in contents]
        await in_tier(self.tier, chunks)
        return chunks

    def lose_members(self) -> None:
        """Have no chunk be read over members from now on."""
        self.lake.stripes.read_error = AWAY


def tier_of(head: Head) -> DramTier:
    tier = head.parts.tier.dram.tier
    assert tier is not None
    return tier


async def in_tier(tier: DramTier, chunks: Sequence[ChunkId]) -> None:
    with trio.fail_after(20):
        while not all(chunk in tier for chunk in chunks):
            await trio.lowlevel.checkpoint()


def run(body: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with ThreadOffload(2, "head tier") as offload:
            async with lake_of(offload=offload, clock=SystemClock(), slabs=SLABS) as lake:
                with trio.fail_after(60):
                    await body(World(lake, offload))

    trio.run(main)


# --- reads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", list(Check))
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("descriptors", [True, False])
def test_what_is_read_again_comes_from_memory_also_when_no_member_is_up(
    length: int, check: Check, descriptors: bool
) -> None:
    async def body(world: World) -> None:
        content = os.urandom(length)
        async with world.connected(descriptors=descriptors, check=check) as lake:
            await lake.put("bkt/object", content, create_bucket=True)
            for _ in range(2):
                assert await lake.get("bkt/object") == content
            pieces = [content[at : at + CHUNK_BYTES] for at in range(0, length, CHUNK_BYTES)]
            await in_tier(world.tier, [data_chunk_id(piece) for piece in pieces])
            world.lose_members()
            assert await lake.get("bkt/object") == content
            begin, end = length // 3, length // 2
            driver = driver_of(lake)
            opened = await driver.run(driver.steps.open("bkt/object"))
            assert await driver.run(driver.steps.read(opened, begin, end - begin)) == content[begin:end]
            await driver.run(driver.steps.close(opened))
            for piece in pieces:
                assert await lake.chunks.get(data_chunk_id(piece)) == piece

    run(body)


def test_one_read_brings_nothing_in_and_the_second_brings_its_own_bytes() -> None:
    async def body(world: World) -> None:
        contents = [os.urandom(length) for length in (20 * KIB, 300 * KIB)]
        client = world.client(descriptors=False)
        session = await session_of(client)
        chunks = await store_chunks(client, session, contents)
        reads = len(world.lake.stripes.reads)
        for chunk in chunks:
            await read(client, chunk)
        await trio.testing.wait_all_tasks_blocked()
        assert len(world.tier) == 0
        for chunk in chunks:
            await read(client, chunk)
        await in_tier(world.tier, [ChunkId(chunk) for chunk in chunks])
        assert len(world.lake.stripes.reads) == reads + 4, "what was read was read again"
        assert world.tier.statistics()["misses"] == 4
        await client.aclose()

    run(body)


def test_clients_on_this_machine_ask_for_nothing_that_the_index_names() -> None:
    async def body(world: World) -> None:
        contents = [os.urandom(length) for length in (20 * KIB, 64 * KIB, 200 * KIB)]
        chunks = await world.warm(*contents)
        async with world.connected() as lake:
            for chunk in chunks:
                await lake.chunks.get(chunk)
            buffers = [bytearray(len(content)) for content in contents]
            with mock.patch.object(TrioDriver, "run", side_effect=AssertionError("the head was asked")):
                for chunk, content, buffer in zip(chunks, contents, buffers, strict=True):
                    assert await lake.chunks.get_into(chunk, buffer) == len(content)
            assert [bytes(buffer) for buffer in buffers] == contents
            world.tier.forget(chunks[1])
            assert await lake.chunks.get_into(chunks[1], buffers[1]) == len(contents[1])
            assert bytes(buffers[1]) == contents[1]

    run(body)


def test_a_read_in_parts_counts_once_and_brings_the_whole_chunk_in() -> None:
    async def body(world: World) -> None:
        content = os.urandom(300 * KIB)
        client = world.client(descriptors=False)
        (chunk,) = await store_chunks(client, await session_of(client), [content])
        for at in range(0, len(content), 100 * KIB):
            await ask(client, m.ReadChunks([chunk], [at], [100 * KIB]), m.ReadChunksReply)
        await trio.testing.wait_all_tasks_blocked()
        assert len(world.tier) == 0
        await ask(client, m.ReadChunks([chunk], [0], [9]), m.ReadChunksReply)
        await in_tier(world.tier, [ChunkId(chunk)])
        world.lose_members()
        assert await read(client, chunk) == content
        await client.aclose()

    run(body)


def test_ranges_outside_a_chunk_are_refused_as_without_a_tier() -> None:
    async def body(world: World) -> None:
        (chunk,) = await world.warm(os.urandom(64 * KIB))
        client = world.client(descriptors=False)
        world.lake.head.parts.chunks.lengths._lengths.clear()
        request = m.ReadChunks([chunk] * 3, [0, 64 * KIB, 10], [64 * KIB + 1, 1, 0])
        pieces = (await ask(client, request, m.ReadChunksReply)).pieces
        assert [type(piece.failure.as_error()) for piece in pieces[:2] if piece.failure] == [InvalidArgument] * 2
        assert pieces[2].failure is None
        await client.aclose()

    run(body)


def test_places_are_named_to_those_alone_who_can_read_them() -> None:
    async def body(world: World) -> None:
        (chunk,) = await world.warm(os.urandom(100 * KIB))
        stranger, local = world.client(descriptors=False), world.client()

        async def located(client: EmbeddedEngine, media: int) -> m.Grant:
            return (await ask(client, m.Locate([chunk], media), m.Located)).grants[0]

        assert await located(local, MEDIA_DRAM) == world.tier.grant(chunk)
        for client, media in ((local, 0), (stranger, MEDIA_DRAM)):
            grant = await located(client, media)
            assert (grant.medium, grant.logical_bytes) == (MEDIUM_STREAMED, 100 * KIB)
        opened = await ask(local, m.OpenObjects([("bkt", "0")], media=MEDIA_DRAM), m.OpenResults)
        assert opened.results[0].opened is not None
        assert [grant.medium for grant in opened.results[0].opened.grants] == [MEDIUM_DRAM]
        for request in (m.OpenSlabs([0]), m.OpenSharedIndex()):
            with pytest.raises(PermissionDenied):
                await stranger.call(request)
            reply = await local.call(request)
            assert reply.descriptors
            close_all(reply.descriptors)
        await stranger.aclose()
        await local.aclose()

    run(body)


# --- what enters, and what it answers ------------------------------------------------------------------------


def test_the_tier_never_answers_an_offer_and_may_keep_what_is_freed() -> None:
    async def body(world: World) -> None:
        content = os.urandom(100 * KIB)
        (chunk,) = await world.warm(content)
        client = world.client(descriptors=False)
        world.lake.stripes.free(chunk)
        session = await session_of(client)
        offered = await ask(client, m.Offer(session, [chunk]), m.Offered)
        assert offered.present == [False]
        assert await read(client, chunk) == content
        await store_chunks(client, session, [content])
        assert chunk in world.lake.stripes.chunks, "the tier was taken for the members"
        await client.aclose()

    run(body)


@pytest.mark.parametrize("length", [64 * KIB, 300 * KIB])
def test_wrong_bytes_of_a_member_never_enter(length: int) -> None:
    async def main() -> None:
        content = stripe_rig.payload_of(length, 5)
        chunk = data_chunk_id(content)
        async with ThreadOffload(2, "head tier") as offload, stripe_rig.lake("4+2", 6) as rig:
            await rig.store(content)
            rig.forget()  # so that nothing is known of the chunk but what members say
            over = head_over(rig.stripes, rig.members, offload=offload, clock=SystemClock(), slabs=SLABS)
            async with over as lake:
                client = lake.client()
                rig.members.faults[rig.members.tables[0].homes(chunk)[0]] = Fault.LYING
                for _ in range(3):  # a range is checked by what the member says, so it may be wrong
                    await ask(client, m.ReadChunks([chunk], [0], [9]), m.ReadChunksReply)
                await in_tier(tier_of(lake.head), [chunk])
                place = tier_of(lake.head).find(chunk)
                assert place is not None
                assert bytes(tier_of(lake.head).extent(place)[:length]) == content
                rig.lose(0, 1, 2, 3, 4, 5)
                assert await read(client, chunk) == content
                await client.aclose()

    trio.run(main)


def test_what_cannot_be_read_now_does_not_enter_and_costs_nothing() -> None:
    async def body(world: World) -> None:
        client = world.client(descriptors=False)
        chunks = await store_chunks(client, await session_of(client), [os.urandom(100 * KIB)])
        await read(client, chunks[0])
        world.lose_members()
        await ask(client, m.NoteReads(chunks), m.Done)
        while world.lake.head.parts.tier.dram._queued:
            await trio.lowlevel.checkpoint()
        assert len(world.tier) == 0
        world.lake.stripes.read_error = None
        await ask(client, m.NoteReads(chunks), m.Done)
        await in_tier(world.tier, [ChunkId(chunks[0])])
        await client.aclose()

    run(body)


def test_notes_of_reads_count_and_those_of_keys_are_refused() -> None:
    async def body(world: World) -> None:
        client = world.client(descriptors=False)
        (chunk,) = await store_chunks(client, await session_of(client), [os.urandom(100 * KIB)])
        await read(client, chunk)
        await ask(client, m.NoteReads([chunk, data_chunk_id(b"elsewhere")]), m.Done)
        await in_tier(world.tier, [ChunkId(chunk)])
        await ask(client, m.NoteReads([chunk]), m.Done)
        status = await world.lake.head.parts.tier.note_reads(m.NoteReads([]))
        assert status.message == m.Done()
        figures = world.lake.head.parts.tier.dram.statistics()
        assert (figures["client_reads"], figures["client_hits"]) == (2, 1)
        with pytest.raises(InvalidArgument):
            await client.call(m.NoteReads([b"odd"]))
        with pytest.raises(UnsupportedVersion):
            await client.call(m.NoteReads([], 1, [b"key"]))
        await client.aclose()

    run(body)


# --- flipped bytes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [20 * KIB, 300 * KIB])
@pytest.mark.parametrize("descriptors", [True, False])
def test_bits_that_flip_in_memory_are_noticed_and_the_members_are_asked(
    length: int, descriptors: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(world: World) -> None:
        content = os.urandom(length)
        (chunk,) = await world.warm(content)
        async with world.connected(descriptors=descriptors) as lake:
            await lake.chunks.get(chunk)
            place = world.tier.find(chunk)
            assert place is not None
            world.tier.extent(place)[5] ^= 1
            assert await lake.chunks.get(chunk) == content
            assert await lake.get("bkt/0") == content
        assert world.tier.statistics()["forgotten"] == 1

    with caplog.at_level(logging.ERROR):
        run(body)


def test_loads_come_from_memory_with_the_checksums_of_what_was_read() -> None:
    async def body(world: World) -> None:
        lengths = (64 * KIB, 300 * KIB, 20 * KIB)
        contents = [os.urandom(length) for length in lengths]
        chunks = await world.warm(*contents)
        world.lose_members()
        client = world.client()
        descriptor = new_memory(MIB)
        try:
            lent = await client.call(m.LendMemory(MIB, True), descriptors=[descriptor])
            assert isinstance(lent.message, m.MemoryLent)
            offsets = [0, 400_000, 100_000]
            for some in (slice(0, 3), slice(0, 3, 2)):  # with a long one, and all short
                request = m.LoadSlots(lent.message.memory, [*chunks[some]], offsets[some], checksums=True)
                loaded = await ask(client, request, m.SlotsLoaded)
                assert loaded.lengths == [*lengths[some]]
                assert loaded.crcs == [granule_crcs(content) for content in contents[some]]
                for offset, content in zip(offsets[some], contents[some], strict=True):
                    assert os.pread(descriptor, len(content), offset) == content
                    os.pwrite(descriptor, bytes(len(content)), offset)
            for slots in ([0, 60_000], [0, MIB - 10_000]):  # overlapping, outside
                request = m.LoadSlots(lent.message.memory, [chunks[0], chunks[2]], slots)
                loaded = await ask(client, request, m.SlotsLoaded)
                assert [failure and type(failure.as_error()) for failure in loaded.failures] == [None, InvalidArgument]
            os.ftruncate(descriptor, 0)
            for wanted in (chunks, chunks[:1]):
                request = m.LoadSlots(lent.message.memory, [*wanted], offsets[: len(wanted)])
                assert all((await ask(client, request, m.SlotsLoaded)).failures), "the memory was shrunk"
            await ask(client, m.ReturnMemory(lent.message.memory), m.Done)
        finally:
            close_all([descriptor])
            await client.aclose()

    run(body)


def test_a_cell_that_is_given_up_during_a_load_is_not_loaded_from() -> None:
    async def body(world: World) -> None:
        contents = [os.urandom(64 * KIB) for _ in range(12)]
        chunks = await world.warm(*contents)
        client = world.client()
        descriptor = new_memory(MIB)
        lent = await client.call(m.LendMemory(MIB, True), descriptors=[descriptor])
        assert isinstance(lent.message, m.MemoryLent)
        original = trio.lowlevel.checkpoint

        async def given_up() -> None:
            for chunk in chunks:
                place = world.tier.find(chunk)
                if place is not None:
                    world.tier.forget(chunk)
                    world.tier.extent(place)[:] = bytes(64 * KIB)
            await original()

        with mock.patch("engine.head.head_loads.trio.lowlevel.checkpoint", given_up):
            request = m.LoadSlots(lent.message.memory, [*chunks], [at * 64 * KIB for at in range(12)])
            assert (await ask(client, request, m.SlotsLoaded)).lengths == [64 * KIB] * 12
        for at, content in enumerate(contents):
            assert os.pread(descriptor, 64 * KIB, at * 64 * KIB) == content
        await ask(client, m.ReturnMemory(lent.message.memory), m.Done)
        close_all([descriptor])
        await client.aclose()

    run(body)


@pytest.mark.parametrize("check", [Check.BLAKE3, Check.CRC32C])
@pytest.mark.parametrize("length", [64 * KIB, 300 * KIB])
def test_bits_that_flipped_before_a_load_are_noticed_by_the_client_then_by_the_head(check: Check, length: int) -> None:
    async def body(world: World) -> None:
        contents = [os.urandom(length) for _ in range(2)]
        chunks = await world.warm(*contents)
        place = world.tier.find(chunks[1])
        assert place is not None
        world.tier.extent(place)[length - 5] ^= 1
        async with world.connected(check=check) as lake, lake.pool(size_bytes=MIB) as pool:
            assert await lake.load_many(chunks, pool, [0, 400_000]) == [length] * 2
            assert bytes(pool.buffer[:length]) == contents[0]
            assert bytes(pool.buffer[400_000 : 400_000 + length]) == contents[1]
        assert world.tier.statistics()["forgotten"] == 1

    run(body)


# --- eviction, and the end -----------------------------------------------------------------------------------


def test_a_slow_client_gets_the_bytes_that_it_asked_for_whatever_replaces_them() -> None:
    async def body(world: World) -> None:
        cells = SLABS * (SLAB_BYTES // (4 * MIB + 4096))
        contents = [os.urandom(4 * MIB) for _ in range(cells)]
        chunks = await world.warm(*contents)
        slow = world.client(descriptors=False)
        reply = await slow.call(m.ReadChunks([chunks[0]], [0], [0]))
        granted = world.tier.grant(chunks[0])
        others = [os.urandom(4 * MIB) for _ in range(cells)]
        reader = world.client(descriptors=False)
        session = await session_of(reader)
        stored = [chunk for other in others for chunk in await store_chunks(reader, session, [other])]
        for chunk in stored:
            for _ in range(8):
                await read(reader, chunk)
        await trio.testing.wait_all_tasks_blocked()
        assert sum(ChunkId(chunk) in world.tier for chunk in stored) >= cells - 1, "nothing was replaced"
        assert reply.body.joined() == contents[0]
        assert world.tier.grant(chunks[0]) == granted, "a pinned cell was given up"
        reply.body.release()
        await read(reader, stored[0])
        world.tier.forget(chunks[0])
        async with world.connected() as lake:
            assert await lake.get("bkt/0") == contents[0]
        await slow.aclose()
        await reader.aclose()

    run(body)


def test_a_grant_of_a_cell_that_was_given_up_is_found_out() -> None:
    async def body(world: World) -> None:
        content = os.urandom(300 * KIB)
        (chunk,) = await world.warm(content)
        async with world.connected() as lake:
            driver = driver_of(lake)
            opened = await driver.run(driver.steps.open("bkt/0"))
            assert opened.grants[chunk].medium == MEDIUM_DRAM
            world.tier.forget(chunk)
            assert await driver.run(driver.steps.read(opened, 0, len(content))) == content
            await driver.run(driver.steps.close(opened))

    run(body)


def test_a_head_that_starts_again_has_another_tier_and_clients_use_nothing_of_the_first(tmp_path: Path) -> None:
    contents = [os.urandom(64 * KIB) for _ in range(4)]
    chunks = [data_chunk_id(content) for content in contents]

    def reads(lake: BlockingLake) -> None:
        for _ in range(3):  # behind the first ones the client has the index, and slabs
            for chunk, content in zip(chunks, contents, strict=True):
                assert lake.chunks.get(chunk) == content

    def reads_without_a_request(lake: BlockingLake) -> None:
        with mock.patch.object(BlockingDriver, "run", side_effect=AssertionError("the head was asked")):
            reads(lake)

    @asynccontextmanager
    async def served(head: Head) -> AsyncIterator[None]:
        server = Server(head, TrioNetwork(), token=None)
        async with trio.open_nursery() as nursery:
            await nursery.start(server.listen_and_serve, f"unix:{tmp_path}/socket")
            yield
            await server.drain(5)
            nursery.cancel_scope.cancel()

    async def body(world: World) -> None:
        await world.warm(*contents)
        async with served(world.lake.head):
            blocking = await trio.to_thread.run_sync(connect_blocking, f"unix:{tmp_path}/socket")
            lake = BlockingLake(blocking)
            await trio.to_thread.run_sync(reads, lake)
            await trio.to_thread.run_sync(reads_without_a_request, lake)
            first = driver_of(lake).shares.descriptors.slabs.arena
            assert first is not None
        identity = world.lake.names.store.superblock.identity
        async with (
            rig_tier(SLABS, world.offload, identity) as memory,
            open_head(
                world.lake.names.connect,
                world.lake.stripes,
                world.lake.known,
                offload=world.offload,
                clock=SystemClock(),
                buffers=world.lake.head.parts.buffers,
                memory=memory,
            ) as head,
            served(head),
        ):
            await trio.to_thread.run_sync(reads_without_a_request, lake)  # content is named by its hash
            for chunk in chunks:
                world.tier.forget(chunk)  # as when it is closed
            contents.reverse()  # so that the cells have other chunks than they had
            chunks.reverse()
            await trio.to_thread.run_sync(reads, lake)
            await in_tier(tier_of(head), chunks)
            await trio.to_thread.run_sync(reads, lake)
            await trio.to_thread.run_sync(reads_without_a_request, lake)
            now = driver_of(lake).shares.descriptors.slabs.arena
            assert now is not None
            assert now.file != first.file
            del now, first
            await trio.to_thread.run_sync(lake.close)

    run(body)


def test_a_head_without_a_tier_offers_none_of_it_and_one_with_a_tier_says_so() -> None:
    async def main() -> None:
        for slabs in (0, SLABS):
            async with ThreadOffload(2, "head tier") as offload:
                async with lake_of(offload=offload, clock=SystemClock(), slabs=slabs) as lake:
                    client = lake.client(descriptors=True)
                    hello = await ask(client, m.Hello(1, "test"), m.HelloReply)
                    shares = hello.features & (m.FEATURE_SLABS | m.FEATURE_SHARED_INDEX | m.FEATURE_SEGMENTS)
                    assert shares == ((m.FEATURE_SLABS | m.FEATURE_SHARED_INDEX) if slabs else 0)
                    reply = await ask(client, m.Status(), m.StatusReply)
                    status: dict[str, Any] = json.loads(reply.status_json)
                    assert status["dram"]["limit_bytes"] == slabs * SLAB_BYTES
                    assert (status["hot_index"]["state"] == "off") == (not slabs)
                    if not slabs:
                        with pytest.raises(UnsupportedVersion):
                            await client.call(m.OpenSharedIndex())
                    await client.aclose()

    trio.run(main)


def test_what_names_lead_nowhere_to_is_not_read_by_name() -> None:
    async def body(world: World) -> None:
        await world.warm(os.urandom(64 * KIB))
        client = world.client(descriptors=False)
        await ask(client, m.DeleteNames([("bkt", "0")]), m.NameResults)
        opened = await ask(client, m.OpenObjects([("bkt", "0")]), m.OpenResults)
        assert opened.results[0].opened is None
        pieces = (await ask(client, m.ReadChunks([data_chunk_id(b"x")], [0], [0]), m.ReadChunksReply)).pieces
        assert pieces[0].failure is not None
        assert isinstance(pieces[0].failure.as_error(), ChunkNotFound)
        await client.aclose()

    run(body)
