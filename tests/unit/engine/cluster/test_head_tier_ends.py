"""Cells of a head's DRAM tier that are given up, and heads that start again: what clients hold stays what it was."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import trio
import trio.testing

from engine.head.head import Head, open_head
from engine.host.clock import SystemClock
from engine.server.listener import Server
from lakefs.client.blocking.driver import BlockingDriver
from lakefs.client.blocking.engine import connect_blocking
from lakefs.client.blocking.lake import Lake as BlockingLake
from lakefs.client.facade import driver_of
from lakefs.errors import ChunkNotFound, UnsupportedVersion
from lakefs.host.offload import ThreadOffload
from lakefs.ids import ChunkId, data_chunk_id
from lakefs.limits import KIB, MIB
from lakefs.transport.streams import TrioNetwork
from lakefs.wire import messages as m
from lakefs.wire.media import MEDIUM_DRAM
from tests.head_rig import SLAB_BYTES, lake_of, tier_of as rig_tier
from tests.store_rig import ask, read, session_of, store_chunks
from tests.unit.engine.cluster.head_tier_rig import SLABS, World, in_tier, run, tier_of


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


@asynccontextmanager
async def served(head: Head, folder: Path) -> AsyncIterator[None]:
    server = Server(head, TrioNetwork(), token=None)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.listen_and_serve, f"unix:{folder}/socket")
        yield
        await server.drain(5)
        nursery.cancel_scope.cancel()


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

    async def body(world: World) -> None:
        await world.warm(*contents)
        async with served(world.lake.head, tmp_path):
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
            served(head, tmp_path),
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
