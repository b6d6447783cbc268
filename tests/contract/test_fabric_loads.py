"""Loads into a pool by RDMA: the engine writes the right bytes to their slots, and nothing anywhere else."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trio

from engine.fabric import bounce_memory
from engine.requests import fabric_loads
from lakefs.client.blocking.lake import Lake
from lakefs.content.verify import Check
from lakefs.errors import ChunkNotFound, InvalidArgument, LakeError, SessionLost
from lakefs.get.pools import Pool
from lakefs.ids import EMPTY_CHUNK, ChunkId, data_chunk_id
from lakefs.limits import BOUNCE_BYTES, KIB, MIB
from lakefs.transport.fabric import Remote
from lakefs.wire import messages as m
from lakefs.wire.fabric_messages import FabricMemory
from tests.fabric_liar import liar
from tests.fabric_rig import KINDS, FabricWorld, RiggedLake, Run, posted
from tests.simulated_fabric import SimulatedLink, Weather

SIZES = (1, 4000, 64 * KIB - 1, 64 * KIB, 300_000, MIB, 4 * MIB)
POOL = 16 * MIB
both_kinds = pytest.mark.parametrize("kind", KINDS)


class Written:
    """Counts what links have posted."""

    def __init__(self) -> None:
        self.bytes = 0


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Written:
    found = Written()
    begin = SimulatedLink.begin

    def counted(link: SimulatedLink, operation: Any) -> None:
        found.bytes += operation.length if operation.is_write else 0
        begin(link, operation)

    monkeypatch.setattr(SimulatedLink, "begin", counted)
    return found


@asynccontextmanager
async def pool_of(lake: RiggedLake, size_bytes: int = POOL) -> AsyncIterator[Pool]:
    if not isinstance(lake.lake, Lake):
        async with lake.lake.pool(size_bytes=size_bytes) as pool:
            yield pool
        return
    made = lake.lake.pool(size_bytes=size_bytes)
    pool = await trio.to_thread.run_sync(made.__enter__)
    try:
        yield pool
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(made.__exit__, None, None, None)


def laid_out(contents: list[bytes], gap: int = 100) -> list[int]:
    """Return offsets with gaps between."""
    offsets, at = [], gap
    for content in contents:
        offsets.append(at)
        at += len(content) + gap
    return offsets


def expected(size: int, before: int, contents: list[bytes], offsets: list[int]) -> bytes:
    """Return the whole memory as it should be: filled with one byte, and the contents in their slots."""
    memory = bytearray([before]) * size
    for content, offset in zip(contents, offsets, strict=True):
        memory[offset : offset + len(content)] = content
    return bytes(memory)


async def put_all(lake: RiggedLake, contents: list[bytes]) -> list[ChunkId]:
    for number, content in enumerate(contents):
        await lake.put(f"bkt/{number}", content)
    return [data_chunk_id(content) for content in contents]


@both_kinds
@pytest.mark.parametrize("check", list(Check))
def test_chunks_and_objects_arrive_in_their_slots_and_nowhere_else(
    kind: str, check: Check, written: Written, run: Run
) -> None:
    async def body(world: FabricWorld) -> None:
        contents = [os.urandom(size) for size in SIZES]
        async with world.lake(kind, check=check) as lake, pool_of(lake) as pool:
            chunks = await put_all(lake, contents)
            long = os.urandom(5 * MIB)
            await lake.put("bkt/long", long)
            offsets = laid_out([*contents, long])
            pool.buffer[:] = b"\xaa" * POOL
            lengths = await lake.call("load_many", [*chunks, "bkt/long"], pool, offsets)
            assert lengths == [*SIZES, len(long)]
            assert bytes(pool.buffer) == expected(POOL, 0xAA, [*contents, long], offsets)
            assert written.bytes == sum(lengths)

    run(body, weather=Weather(loss=0.02, shuffle=True))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Chunks of each request to load over RDMA, in the order of their arrival."""
    found: list[int] = []
    begin = fabric_loads.FabricLoad.__init__

    def counted(load: Any, request: m.LoadSlots, *args: Any) -> None:
        found.append(len(request.chunks))
        begin(load, request, *args)

    monkeypatch.setattr(fabric_loads.FabricLoad, "__init__", counted)
    return found


@both_kinds
@pytest.mark.parametrize("check", list(Check))
@pytest.mark.parametrize("has_rooms", [False, True])
def test_a_load_of_less_than_a_buffer_is_one_request(
    kind: str, check: Check, has_rooms: bool, asked: list[int], run: Run
) -> None:
    async def body(world: FabricWorld) -> None:
        contents = [os.urandom(64 * KIB) for _ in range(40)]
        async with world.lake(kind, check=check) as lake, pool_of(lake) as pool:
            chunks = await put_all(lake, contents)
            offsets = laid_out(contents, 10)
            rooms = [64 * KIB] * 40 if has_rooms else []
            await lake.call("load_many", chunks, pool, offsets, rooms)
            assert bytes(pool.buffer) == expected(POOL, 0, contents, offsets)
            assert asked == [40]
            backwards = offsets[::-1]
            await lake.call("load_many", chunks, pool, backwards, rooms)
            assert bytes(pool.buffer) == expected(POOL, 0, contents, backwards)
            assert asked == [40, 40]

    run(body)


@both_kinds
def test_a_long_load_is_a_request_for_each_buffer(kind: str, asked: list[int], run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        contents = [os.urandom(size) for size in (MIB, MIB, MIB, 5, 2 * MIB, 4 * MIB, *[1] * 300)]
        async with world.lake(kind) as lake, pool_of(lake) as pool:
            chunks = await put_all(lake, contents[:6])
            chunks += [chunks[3]] * 300
            contents[6:] = [contents[3]] * 300
            offsets = laid_out(contents, 0)
            await lake.call("load_many", chunks, pool, offsets)
            assert bytes(pool.buffer) == expected(POOL, 0, contents, offsets)
            assert sorted(asked) == sorted([4, 1, 1, 256, 44])

    run(body)


@both_kinds
def test_an_empty_chunk_and_an_unknown_one(kind: str, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        async with world.lake(kind) as lake, pool_of(lake) as pool:
            (known,) = await put_all(lake, [b"known"])
            assert await lake.call("load_many", [EMPTY_CHUNK, known], pool, [0, 10]) == [0, 5]
            with pytest.raises(ChunkNotFound):
                await lake.call("load_many", [known, data_chunk_id(b"never stored")], pool, [0, 100])

    run(body)


@both_kinds
def test_many_loads_at_once_share_few_buffers(
    kind: str, monkeypatch: pytest.MonkeyPatch, written: Written, run: Run
) -> None:
    """Each load has the bytes that it asked for, though all wait for the same two buffers of the engine."""
    monkeypatch.setattr(bounce_memory, "BOUNCE_BUFFERS", 2)

    async def body(world: FabricWorld) -> None:
        contents = [os.urandom(MIB + number) for number in range(10)]
        async with world.lake("trio") as first:
            chunks = await put_all(first, contents)
        total = 0

        async def load(number: int) -> None:
            nonlocal total
            async with world.lake(kind, check=Check.NONE) as lake, pool_of(lake) as pool:
                for turn in range(3):
                    order = [(number + turn + step) % 10 for step in range(10)]
                    offsets = laid_out([contents[at] for at in order])
                    await lake.call("load_many", [chunks[at] for at in order], pool, offsets)
                    for at, offset in zip(order, offsets, strict=True):
                        assert bytes(pool.buffer[offset : offset + len(contents[at])]) == contents[at]
                total += sum(map(len, contents)) * 3

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(load, number)
        assert written.bytes == total
        statistics = world.fabric.statistics()
        assert statistics["registered_bytes"] <= world.tier.arena.memory_bytes + 2 * BOUNCE_BYTES

    run(body, weather=Weather(delay_s=0.002))


@both_kinds
def test_a_wire_that_is_cut_in_a_load_leaves_the_way_over_tcp(kind: str, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        contents = [os.urandom(size) for size in SIZES]
        async with world.lake(kind) as lake, pool_of(lake) as pool:
            chunks = await put_all(lake, contents)
            offsets = laid_out(contents)
            await lake.call("load_many", chunks, pool, offsets)
            world.wire.cut()
            for _ in range(2):
                pool.buffer[:] = bytes(POOL)
                await lake.call("load_many", chunks, pool, offsets)
                assert bytes(pool.buffer) == expected(POOL, 0, contents, offsets)
            assert lake.rdma.reason

    run(body)


@pytest.mark.parametrize("who", ["client", "engine"])
@both_kinds
def test_memory_that_may_not_be_registered_is_streamed_to(kind: str, who: str, written: Written, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        contents = [os.urandom(size) for size in SIZES]
        less = POOL - 1 if who == "client" else 1 << 40
        async with (
            world.lake(kind, open_fabric=lambda name: world.wire.fabric(registered_bytes_max=less)) as lake,
            pool_of(lake) as pool,
        ):
            chunks = await put_all(lake, contents)
            offsets = laid_out(contents)
            await lake.call("load_many", chunks, pool, offsets)
            assert bytes(pool.buffer) == expected(POOL, 0, contents, offsets)
            assert "registered" in lake.rdma.reason
            assert not written.bytes

    run(body, registered_bytes_max=64 * KIB if who == "engine" else 1 << 40)


def test_a_cancelled_load_leaves_the_pool_alone_and_the_next_one_works(run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        contents = [os.urandom(MIB) for _ in range(4)]
        async with world.lake("trio") as lake, pool_of(lake) as pool:
            chunks = await put_all(lake, contents)
            offsets = laid_out(contents)
            await lake.call("load_many", chunks, pool, offsets)
            for _ in range(3):  # a cancellation is no failure of the queue pair
                pool.buffer[:] = b"\x55" * POOL
                world.wire.hold()
                with trio.CancelScope() as scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(lake.call, "load_many", chunks, pool, offsets)
                        await posted(world)
                        scope.cancel()
                world.wire.release()
                await lake.call("get", "bkt/0")
                assert bytes(pool.buffer) == b"\x55" * POOL, "the engine wrote behind the load's end"
                await lake.call("load_many", chunks, pool, offsets)
                assert bytes(pool.buffer) == expected(POOL, 0x55, contents, offsets)
            assert not lake.rdma.reason

    run(body)


@both_kinds
def test_a_connection_lost_in_a_load_writes_no_more_and_the_load_is_begun_again(kind: str, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        contents = [os.urandom(MIB) for _ in range(4)]
        async with world.lake(kind) as lake, pool_of(lake) as pool:
            chunks = await put_all(lake, contents)
            offsets = laid_out(contents)
            await lake.call("load_many", chunks, pool, offsets)
            pool.buffer[:] = bytes(POOL)
            world.wire.hold()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lake.call, "load_many", chunks, pool, offsets)
                await posted(world)
                for connection in list(world.server._connections):
                    connection.close()
                world.wire.release()
            assert bytes(pool.buffer) == expected(POOL, 0, contents, offsets)

    run(body)


# --- clients that lie, and clients that die ----------------------------------------------------------


async def stored(world: FabricWorld, *contents: bytes) -> list[ChunkId]:
    async with world.lake("trio") as lake:
        return await put_all(lake, list(contents))


def test_slots_outside_the_memory_and_over_each_other_fail_alone(run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        contents = [os.urandom(1000), os.urandom(70_000), os.urandom(500), os.urandom(2000)]
        chunks = await stored(world, *contents)
        async with liar(world) as client:
            await client.connect()
            loaded = await client.load(
                chunks, [0, 1000, MIB - 499, 500], client.named(), lengths=[1000, 70_000, 500, 2000]
            )
            assert [failure is None for failure in loaded.failures] == [True, True, False, False]
            assert loaded.lengths == [1000, 70_000, 0, 0]
            assert bytes(client.memory) == contents[0] + contents[1] + bytes(MIB - 71_000)
            for offset in (-1, MIB, 1 << 62):
                failed = await client.load(chunks[:1], [offset], client.named())
                assert failed.failures[0] is not None
            short = await client.load(chunks[:1], [0], client.named(), lengths=[999])
            assert short.failures[0] is not None
            assert world.fabric.statistics()["queue_pairs"] == 1

    run(body)


@pytest.mark.parametrize(
    "change",
    [
        {"key": -1},
        {"key": 1 << 32},
        {"address": 0},
        {"address": (1 << 64) - 5},
        {"size_bytes": 0},
        {"size_bytes": 1 << 50},
    ],
    ids=str,
)
def test_memory_that_cannot_be_is_refused_before_anything_is_posted(change: dict[str, int], run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        chunks = await stored(world, b"x" * 1000)
        async with liar(world) as client:
            await client.connect()
            with pytest.raises(InvalidArgument):
                await client.load(chunks, [0], client.named(**change))
            assert (await client.load(chunks, [0], client.named())).lengths == [1000]

    run(body)


def test_without_a_queue_pair_there_is_no_load(run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        chunks = await stored(world, b"x" * 1000)
        async with liar(world) as client:
            with pytest.raises(SessionLost):
                await client.load(chunks, [0], client.named())

    run(body)


def test_the_key_of_another_client_writes_nothing_and_ends_only_the_liar_s_queue_pair(run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        chunks = await stored(world, os.urandom(1000))
        async with liar(world) as one, liar(world) as other:
            await one.connect()
            await other.connect()
            stolen = FabricMemory(other.region.remote_key, other.region.address, MIB)
            with pytest.raises(SessionLost):
                await one.load(chunks, [0], stolen)
            assert bytes(other.memory) == bytes(MIB)
            with pytest.raises(SessionLost):
                await one.load(chunks, [0], one.named())
            assert (await other.load(chunks, [0], other.named())).lengths == [1000]
            await one.connect()
            assert (await one.load(chunks, [0], one.named())).lengths == [1000]

    run(body)


@pytest.mark.parametrize("way", ["unregisters", "announces too much", "registers for reading"])
def test_a_client_that_announces_memory_it_does_not_have_gets_an_error(way: str, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        chunks = await stored(world, os.urandom(4 * MIB))
        async with liar(world) as client:
            await client.connect()
            if way == "unregisters":
                client.region.close()
            if way == "registers for reading":
                client.region = client.fabric.register(client.memory, Remote.READ)
            with pytest.raises(SessionLost):
                await client.load(chunks, [0], client.named(size_bytes=4 * MIB))
        async with world.lake("trio") as lake, pool_of(lake) as pool:
            assert await lake.call("load_many", chunks, pool, [0]) == [4 * MIB]

    run(body)


@pytest.mark.parametrize("moment", ["before", "during"])
def test_a_client_that_dies_in_a_load_keeps_no_buffer(moment: str, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(bounce_memory, "BOUNCE_BUFFERS", 1)

    async def body(world: FabricWorld) -> None:
        chunks = await stored(world, os.urandom(MIB))
        async with liar(world) as client:
            await client.connect()
            async with trio.open_nursery() as nursery:
                if moment == "during":
                    world.wire.hold()

                async def load() -> None:
                    with suppress(LakeError):
                        await client.load(chunks, [0], client.named())

                nursery.start_soon(load)
                if moment == "during":
                    await posted(world)
                world.wire.kill(client.fabric)
                world.wire.release()
        async with world.lake("trio") as lake, pool_of(lake) as pool:
            assert await lake.call("load_many", chunks, pool, [0]) == [MIB]
            assert not lake.rdma.reason

    run(body)


def test_a_client_that_does_not_answer_keeps_others_from_no_turn(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """Its requests wait for its own two turns; the third buffer is free for others."""
    monkeypatch.setattr(bounce_memory, "BOUNCE_BUFFERS", 3)

    async def body(world: FabricWorld) -> None:
        chunks = await stored(world, *[os.urandom(MIB) for _ in range(8)])
        async with liar(world) as client, trio.open_nursery() as nursery:
            link = client.fabric.open_link(Remote.WRITE)
            await client.engine.call(m.FabricOpen(link.end))  # and never joins its own end

            async def load(chunk: ChunkId) -> None:
                with suppress(LakeError):
                    await client.load([chunk], [0], client.named())

            for chunk in chunks:
                nursery.start_soon(load, chunk)
            await posted(world)
            with trio.fail_after(10):
                async with world.lake("trio") as lake, pool_of(lake) as pool:
                    assert await lake.call("load_many", chunks[:1], pool, [0]) == [MIB]
                    assert not lake.rdma.reason
            nursery.cancel_scope.cancel()

    run(body, weather=Weather(silence_s=30.0))
