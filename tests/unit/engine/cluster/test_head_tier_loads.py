"""Loads from the DRAM tier of a head, and bits that flip in it: never other bytes."""

from __future__ import annotations

import logging
import os
from unittest import mock

import pytest
import trio
import trio.testing

from lakefs.content.verify import Check, granule_crcs
from lakefs.errors import InvalidArgument
from lakefs.host.descriptors import close_all
from lakefs.host.new_memory import new_memory
from lakefs.limits import KIB, MIB
from lakefs.wire import messages as m
from tests.store_rig import ask
from tests.unit.engine.cluster.head_tier_rig import World, run


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
        lengths = [64 * KIB, 300 * KIB, 20 * KIB]
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
                assert loaded.lengths == lengths[some]
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
