"""The DRAM tier of a head: what is read again is in its memory, checked; only whole, proven chunks enter."""

from __future__ import annotations

import os
from contextlib import ExitStack
from unittest import mock

import pytest
import trio
import trio.testing

from engine.host.clock import SystemClock
from engine.members.ports import Wanted
from engine.process.embedded import EmbeddedEngine
from lakefs.client.facade import driver_of
from lakefs.client.trio.driver import TrioDriver
from lakefs.content.verify import Check
from lakefs.errors import InvalidArgument, PermissionDenied, SpaceNotFound
from lakefs.host.descriptors import close_all
from lakefs.host.offload import ThreadOffload
from lakefs.ids import ChunkId, data_chunk_id
from lakefs.limits import CHUNK_BYTES, KIB
from lakefs.wire import messages as m
from lakefs.wire.media import MEDIA_DRAM, MEDIUM_DRAM, MEDIUM_STREAMED
from tests.head_rig import head_over
from tests.store_rig import ask, read, session_of, store_chunks
from tests.unit.engine.cluster import stripe_rig
from tests.unit.engine.cluster.head_tier_rig import LENGTHS, SLABS, World, in_tier, run, tier_of
from tests.unit.engine.cluster.stripe_rig import Fault


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


def test_a_read_by_name_counts_once_also_for_clients_that_get_grants() -> None:
    async def body(world: World) -> None:
        content = os.urandom(300 * KIB)
        async with world.connected() as lake:
            await lake.put("bkt/object", content, create_bucket=True)
            assert await lake.get("bkt/object") == content
            await trio.testing.wait_all_tasks_blocked()
            assert world.lake.head.parts.tier.dram._queued == set()
            assert len(world.tier) == 0
            assert await lake.get("bkt/object") == content
            await in_tier(world.tier, [data_chunk_id(content)])

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
        with ExitStack() as releases:  # as when it entered the tier since the request was planned
            for offset, length in zip(request.offsets[:2], request.lengths[:2], strict=True):
                (found,) = await world.lake.head.parts.tier.read([Wanted(chunk, 0, offset, length)], releases)
                assert isinstance(found, InvalidArgument)
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


def test_notes_of_reads_count_and_those_of_keys_need_their_space() -> None:
    async def body(world: World) -> None:
        client = world.client(descriptors=False)
        (chunk,) = await store_chunks(client, await session_of(client), [os.urandom(100 * KIB)])
        await read(client, chunk)
        await ask(client, m.NoteReads([chunk, data_chunk_id(b"elsewhere")]), m.Done)
        await in_tier(world.tier, [ChunkId(chunk)])
        await ask(client, m.NoteReads([chunk]), m.Done)
        figures = world.lake.head.parts.tier.dram.statistics()
        assert (figures["client_reads"], figures["client_hits"]) == (2, 1)
        with pytest.raises(InvalidArgument):
            await client.call(m.NoteReads([b"odd"]))
        with pytest.raises(SpaceNotFound):
            await client.call(m.NoteReads([], 1, [b"key"]))
        await client.aclose()

    run(body)
