"""RDMA at heads over six members: the right bytes when members are lost in the midst of it, when a head is started
again, and by several heads at once, which divide the memory that is registered.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
import trio

from engine.fabric.engine_fabric import EngineFabric
from engine.head.head import Head, open_head
from engine.host.clock import SystemClock
from engine.server.listener import Server
from engine.tiers.arena import Arena
from engine.tiers.dram_tier import DramTier
from lakefs.content.verify import Check
from lakefs.errors import LakeError
from lakefs.get.pools import Pool
from lakefs.host.buffers import BufferPool
from lakefs.host.offload import ThreadOffload
from lakefs.ids import ChunkId, data_chunk_id
from lakefs.limits import ANSWER_CLIENT_BYTES, BOUNCE_BYTES, CHUNK_BYTES, KIB, MIB
from lakefs.transport.streams import TrioNetwork
from lakefs.wire import messages as m
from tests.contract.test_fabric_keyed import space_of
from tests.contract.test_fabric_loads import both_kinds, expected, laid_out, pool_of, put_all
from tests.fabric_liar import Liar, liar
from tests.fabric_rig import TOKEN, Asked, FabricWorld, RiggedLake, posted, run_at
from tests.head_rig import BUFFER_BYTES, HeadAndNames, head_over, tier_of
from tests.simulated_fabric import SimulatedFabric, Weather
from tests.unit.engine.cluster import stripe_rig
from tests.unit.engine.cluster.stripe_rig import Fault, Rig

POOL: Final = 24 * MIB
FAULTS: Final = {"away": Fault.AWAY, "lost": Fault.LOST, "lying": Fault.LYING}
HeadBody = Callable[[FabricWorld, Rig, HeadAndNames], Awaitable[None]]


def run_over_members(
    body: HeadBody, *, weather: Weather | None = None, sharers: int = 1, has_tier: bool = True
) -> None:
    """Run a test with a head over six members at 4+2; without a tier the world's is another one, which stays empty."""
    made: list[tuple[Rig, HeadAndNames]] = []

    @asynccontextmanager
    async def opens(_: Path, fabric: EngineFabric, slabs: int, offload: ThreadOffload) -> AsyncIterator[Asked]:
        async with stripe_rig.lake("4+2", 6) as rig:
            opening = head_over(
                rig.stripes,
                rig.members,
                rig.upkeep_of,
                clients=rig.members.clients,
                offload=offload,
                clock=SystemClock(),
                slabs=slabs if has_tier else 0,
                fabric=fabric,
            )
            async with opening as lake:
                made.append((rig, lake))
                tier = lake.head.parts.tier.dram.tier
                assert has_tier == (tier is not None)
                if tier is None:
                    tier = DramTier(Arena(1))
                yield Asked(lake.head, tier, lake.head.parts.buffers, lambda chunk: None)

    run_at(opens, lambda world: body(world, *made[0]), weather=weather, sharers=sharers)


async def is_loaded(lake: RiggedLake, pool: Pool, chunks: list[ChunkId], contents: list[bytes]) -> None:
    """Check that chunks are loaded right."""
    offsets = laid_out(contents)
    pool.buffer[:] = bytes(POOL)
    await lake.call("load_many", chunks, pool, offsets)
    assert bytes(pool.buffer) == expected(POOL, 0, contents, offsets)


@both_kinds
@pytest.mark.parametrize("check", list(Check))
def test_what_members_have_is_got_put_and_loaded_by_rdma(kind: str, check: Check) -> None:
    async def body(world: FabricWorld, rig: Rig, head: HeadAndNames) -> None:
        contents = [os.urandom(size) for size in (1, 64 * KIB, 64 * KIB + 1, MIB, CHUNK_BYTES)]
        long = os.urandom(9 * MIB)
        async with world.lake(kind, check=check) as lake, pool_of(lake, POOL) as pool:
            chunks = await put_all(lake, contents)
            await lake.put("bkt/long", long)
            put = lake.rdma.bytes
            assert put >= 8 * MIB
            await is_loaded(lake, pool, chunks, contents)
            assert lake.rdma.bytes == put + sum(map(len, contents))
            assert await lake.get("bkt/long") == long
            assert lake.rdma.bytes == put + sum(map(len, contents)) + len(long)
            assert not lake.rdma.reason

    run_over_members(body, weather=Weather(loss=0.02, shuffle=True))


def test_a_head_without_a_tier_moves_bytes_by_rdma_too() -> None:
    async def body(world: FabricWorld, rig: Rig, head: HeadAndNames) -> None:
        content = os.urandom(6 * MIB)
        async with world.lake("trio") as lake, pool_of(lake, POOL) as pool:
            await lake.put("bkt/object", content)
            put = lake.rdma.bytes
            for turn in range(1, 4):
                assert await lake.get("bkt/object") == content
                assert lake.rdma.bytes == put + turn * len(content)
            await is_loaded(lake, pool, [data_chunk_id(content[:CHUNK_BYTES])], [content[:CHUNK_BYTES]])
            assert not lake.rdma.reason

    run_over_members(body, has_tier=False)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", [pytest.param("trio"), pytest.param("blocking", marks=pytest.mark.thorough)])
def test_members_that_are_lost_in_a_load_are_decoded_past(kind: str, fault: str) -> None:
    """The first buffer is under way when two of six go; the others are read without them."""

    async def body(world: FabricWorld, rig: Rig, head: HeadAndNames) -> None:
        contents = [os.urandom(CHUNK_BYTES) for _ in range(5)]
        async with world.lake(kind, check=Check.CRC32C) as lake, pool_of(lake, POOL) as pool:
            chunks = await put_all(lake, contents)
            world.wire.hold()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(is_loaded, lake, pool, chunks, contents)
                await posted(world)
                rig.lose(1, 4, fault=FAULTS[fault])
                world.wire.release()
            assert not lake.rdma.reason
            assert lake.rdma.bytes >= 5 * CHUNK_BYTES
            content = os.urandom(9 * MIB)
            if fault == "away":  # others are not known to be lost yet
                await lake.put("bkt/written-then", content)
                assert await lake.get("bkt/written-then") == content

    run_over_members(body)


def test_chunks_of_which_too_little_is_left_fail_alone() -> None:
    async def body(world: FabricWorld, rig: Rig, head: HeadAndNames) -> None:
        warm = os.urandom(MIB)
        (kept,) = await world.warm(warm)
        cold = os.urandom(300_000)
        async with world.lake("trio") as lake:
            await lake.put("bkt/cold", cold)
        rig.lose(0, 1, 2, 3, 4)
        async with liar(world) as client:
            await client.connect()
            chunks = [data_chunk_id(cold), kept, data_chunk_id(b"never stored")]
            loaded = await client.load(chunks[:1] + chunks[2:], [0, 400_000], client.named())
            assert loaded.lengths == [0, 0]
            assert all(failure is not None for failure in loaded.failures)
            assert (await client.load([kept], [0], client.named())).lengths == [MIB]
            assert bytes(client.memory) == warm

    run_over_members(body)


def test_a_client_that_dies_in_a_load_leaves_nothing_held_at_the_head() -> None:
    async def body(world: FabricWorld, rig: Rig, head: HeadAndNames) -> None:
        content = os.urandom(MIB)
        async with world.lake("trio") as lake:
            await lake.put("bkt/object", content)
        async with liar(world) as client:
            await client.connect()
            world.wire.hold()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_load_in_vain, client, data_chunk_id(content))
                await posted(world)
                world.wire.kill(client.fabric)
                for connection in list(world.server._connections):
                    connection.close()
                world.wire.release()
        with trio.fail_after(20):
            while world.fabric.statistics()["queue_pairs"]:  # noqa: ASYNC110 - closed behind the connection
                await trio.sleep(0.001)
        assert not world.held_bytes
        async with world.lake("trio") as lake:
            assert await lake.get("bkt/object") == content

    run_over_members(body)


async def _load_in_vain(client: Liar, chunk: ChunkId) -> None:
    with pytest.raises(LakeError):
        await client.load([chunk], [0], client.named())


def test_values_read_for_a_client_that_does_not_answer_are_bounded() -> None:
    async def body(world: FabricWorld, rig: Rig, head: HeadAndNames) -> None:
        async with world.lake("trio") as lake:
            space = await space_of(lake)
            await lake.run(space.put_many([b"key"], [os.urandom(MIB)]))
        async with liar(world) as client, trio.open_nursery() as nursery:
            await client.engine.call(m.FabricOpen(client.fabric.open_link(client.region.remote).end))  # not joined
            request = m.KeyedLoad(0, space.number, [b"key"], [0], [MIB], fabric=client.named())
            for _ in range(32):
                nursery.start_soon(_ask_in_vain, client, request)
            await posted(world)
            await trio.sleep(0.1)
            assert head.head.parts.answers.held_bytes == ANSWER_CLIENT_BYTES
            assert rig.members.calls["KeyedRead"] == ANSWER_CLIENT_BYTES // MIB
            async with world.lake("trio") as lake, pool_of(lake, POOL) as pool:
                assert await lake.run(space.load([b"key"], pool, [0])) == [MIB]
            nursery.cancel_scope.cancel()

    run_over_members(body, weather=Weather(silence_s=30.0))


async def _ask_in_vain(client: Liar, request: m.Request) -> None:
    with pytest.raises(LakeError):
        await client.engine.call(request)


# --- several heads, and one that is started again --------------------------------------------------------


@asynccontextmanager
async def another_head(world: FabricWorld, rig: Rig, head: HeadAndNames) -> AsyncIterator[tuple[Head, SimulatedFabric]]:
    """One more head over the same members and names, with a device and a DRAM tier of its own."""
    device = world.wire.fabric()
    fabric = EngineFabric(device, sharers=2)
    identity = head.names.store.superblock.identity
    async with (
        tier_of(3, world.offload, identity, fabric) as memory,
        open_head(
            head.names.connect,
            rig.stripes,
            rig.members,
            offload=world.offload,
            clock=SystemClock(),
            buffers=BufferPool(BUFFER_BYTES),
            memory=memory,
            fabric=fabric,
        ) as other,
    ):
        yield other, device
    fabric.shutdown()
    assert not device.regions


@both_kinds
def test_a_client_goes_on_by_rdma_at_the_head_that_takes_the_place_of_its_own(kind: str) -> None:
    """A client that had grants and pools at a head is another one's when that head dies."""

    async def body(world: FabricWorld, rig: Rig, head: HeadAndNames) -> None:
        content = os.urandom(6 * MIB)
        await world.warm(content)
        contents = [os.urandom(MIB) for _ in range(3)]
        async with world.lake(kind) as lake, pool_of(lake, POOL) as pool:
            chunks = await put_all(lake, contents)
            assert await lake.get("bkt/object") == content
            await is_loaded(lake, pool, chunks, contents)
            async with another_head(world, rig, head) as (other, device), trio.open_nursery() as nursery:
                with trio.CancelScope(shield=True):
                    await world.server.drain(5)
                dead = world.fabric._fabric
                assert isinstance(dead, SimulatedFabric)
                for link in list(dead.links):
                    link.close()
                server = Server(other, TrioNetwork(), token=TOKEN)
                await nursery.start(server.listen_and_serve, world.address)
                moved = lake.rdma.bytes
                await is_loaded(lake, pool, [*chunks, chunks[0]], [*contents, contents[0]])  # of lengths not known here
                assert await lake.get("bkt/object") == content
                await lake.put("bkt/more", content)
                assert lake.rdma.bytes > moved
                assert not lake.rdma.reason
                assert device.links
                with trio.CancelScope(shield=True):
                    await server.drain(5)

    run_over_members(body)


def test_heads_of_a_machine_divide_what_is_registered_and_leave_a_buffer_to_others() -> None:
    """A head has a share of the buffers; a client that does not answer has one less at most."""

    async def body(world: FabricWorld, rig: Rig, head: HeadAndNames) -> None:
        contents = [os.urandom(MIB) for _ in range(8)]
        async with world.lake("trio") as lake, pool_of(lake, POOL) as pool:
            chunks = await put_all(lake, contents)
            async with liar(world) as client, trio.open_nursery() as nursery:
                await client.engine.call(m.FabricOpen(client.fabric.open_link(client.region.remote).end))  # not joined
                for chunk in chunks:
                    nursery.start_soon(_load_in_vain, client, chunk)
                await posted(world)
                with trio.fail_after(10):
                    for _ in range(3):
                        await is_loaded(lake, pool, chunks, contents)
                assert not lake.rdma.reason
                nursery.cancel_scope.cancel()
        registered = world.fabric.statistics()["registered_bytes"] - world.tier.arena.memory_bytes
        assert registered <= 2 * BOUNCE_BYTES

    run_over_members(body, weather=Weather(silence_s=30.0), sharers=8)
