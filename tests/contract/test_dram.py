"""The DRAM tier in an engine: chunks read again are read from it, the same bytes; freed or rotten ones are not."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
import trio.testing

from engine.chunks.chunk_store import find_chunk
from engine.format.sizes import StoreSizes
from engine.host.clock import SystemClock
from engine.host.local_disk import LocalDisk
from engine.process.embedded import EmbeddedEngine
from engine.process.shared_index_life import run_shared_index
from engine.requests.table import Service
from engine.store.opening import open_store
from engine.store.store import Store
from engine.tiers.arena import Arena
from engine.tiers.dram_tier import DramTier
from lakefs.client.facade import driver_of
from lakefs.client.trio.lake import TrioLake
from lakefs.content.verify import Check
from lakefs.errors import ChunkDamaged, EngineBusy, InvalidArgument, LakeError, PermissionDenied
from lakefs.host.offload import ThreadOffload
from lakefs.ids import ChunkId, data_chunk_id
from lakefs.limits import KIB, MIB
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from lakefs.wire.media import MEDIA_DRAM, MEDIUM_DRAM, MEDIUM_NONE, MEDIUM_SEGMENT
from tests.store_rig import SMALL_SIZES, read, session_of, store_chunks

SLAB = 9 * MIB
MEMORY_FOLDER = Path("/dev/shm")
LENGTHS = [20 * KIB, 64 * KIB, 300 * KIB, 4 * MIB, 4 * MIB + 100 * KIB]


@dataclass
class World:
    """A store on a real folder with a tier of three small slabs, and clients of it."""

    store: Store
    tier: DramTier
    offload: ThreadOffload
    folder: Path
    admitted: dict[ChunkId, trio.Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tier.on_admitted.append(lambda chunk, *_: self.event(chunk).set())

    def event(self, chunk: ChunkId) -> trio.Event:
        return self.admitted.setdefault(chunk, trio.Event())

    def client(self, *, descriptors: bool = True) -> EmbeddedEngine:
        return EmbeddedEngine(Service(self.store), descriptors=descriptors)

    @asynccontextmanager
    async def lake(self, *, descriptors: bool = True, check: Check = Check.BLAKE3) -> AsyncIterator[TrioLake]:
        client = self.client(descriptors=descriptors)
        lake = TrioLake(client, self.offload, check=check)
        try:
            yield lake
        finally:
            await lake.aclose()
            await client.aclose()

    async def warm(self, content: bytes, name: str = "bkt/object") -> ChunkId:
        """Store content of one chunk, and read it until the tier has it."""
        chunk = data_chunk_id(content)
        async with self.lake() as lake:
            await lake.put(name, content, create_bucket=True)
            for _ in range(2):
                assert await lake.get(name) == content
        await self.event(chunk).wait()
        return chunk


def run(body: Callable[[World], Awaitable[None]], slabs: int = 3, sizes: StoreSizes = SMALL_SIZES) -> None:
    async def main(folder: Path) -> None:
        tier = DramTier(Arena(slabs, SLAB))
        async with ThreadOffload(3, "dram") as offload:
            disk = LocalDisk(folder / "store")
            async with open_store(
                disk, SystemClock(), offload, grace_s=0.0, verify_index=False, sizes=sizes, tier=tier
            ) as store:
                with trio.fail_after(60):
                    await body(World(store, tier, offload, folder / "store"))
                assert tier.statistics()["pinned_bytes"] == 0, "a pin was not taken back"
        tier.close()

    with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None) as name:
        trio.run(main, Path(name))


def punch_everything(world: World) -> None:
    """Make all payload on the disk read as zeros from now on."""
    for path in (world.folder / "segments").iterdir():
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(bytes(size - 4096))


@pytest.mark.parametrize("check", list(Check))
@pytest.mark.parametrize("length", LENGTHS)
def test_what_is_read_again_comes_from_memory_also_when_the_disk_has_it_no_more(length: int, check: Check) -> None:
    async def body(world: World) -> None:
        content = os.urandom(length)
        async with world.lake(check=check) as lake:
            await lake.put("bkt/object", content, create_bucket=True)
            for _ in range(2):
                assert await lake.get("bkt/object") == content
            for at in range(0, length, 4 * MIB):
                await world.event(data_chunk_id(content[at : at + 4 * MIB])).wait()
            punch_everything(world)
            assert await lake.get("bkt/object") == content
            begin, end = length // 3, length // 2
            driver = driver_of(lake)
            opened = await driver.run(driver.steps.open("bkt/object"))
            part = await driver.run(driver.steps.read(opened, begin, end - begin))
            assert part == content[begin:end]
            await driver.run(driver.steps.close(opened))

    run(body)


def test_clients_without_descriptors_are_served_from_memory() -> None:
    async def body(world: World) -> None:
        content = os.urandom(300 * KIB)
        await world.warm(content)
        punch_everything(world)
        async with world.lake(descriptors=False) as lake:
            assert await lake.get("bkt/object") == content
            driver = driver_of(lake)
            opened = await driver.run(driver.steps.open("bkt/object"))
            assert await driver.run(driver.steps.read(opened, 70_000, 9)) == content[70_000:70_009]
            await driver.run(driver.steps.close(opened))

    run(body)


@pytest.mark.parametrize("length", [20 * KIB, 64 * KIB, 300 * KIB, 4 * MIB])
def test_what_a_read_has_just_brought_comes_in_without_another_read(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: World) -> None:
        async def refuse(*_: object) -> memoryview:
            raise AssertionError("the segment is read again")

        contents = [os.urandom(length) for _ in range(2)]  # the first one needs a slab
        with monkeypatch.context() as strict:
            strict.setattr(world.store.segments.reader, "read_chunk", refuse)
            async with world.lake(descriptors=False) as lake:
                for number, content in enumerate(contents):
                    await lake.put(f"bkt/{number}", content, create_bucket=True)
                    for _ in range(2):
                        assert await lake.get(f"bkt/{number}") == content
                    await world.event(data_chunk_id(content)).wait()
                punch_everything(world)
                for number, content in enumerate(contents):
                    assert await lake.get(f"bkt/{number}") == content
        assert world.store.dram.statistics()["offered"] == 2

    run(body)


def test_what_was_read_in_part_comes_in_whole() -> None:
    async def body(world: World) -> None:
        content = os.urandom(300 * KIB)
        chunk = data_chunk_id(content)
        async with world.lake() as lake:
            await lake.put("bkt/object", content, create_bucket=True)
        for _ in range(2):
            await world.client(descriptors=False).call(m.ReadChunks([chunk], [0], [9]))
        await world.event(chunk).wait()
        punch_everything(world)
        async with world.lake() as lake:
            assert await lake.get("bkt/object") == content
        assert world.store.dram.statistics()["offered"] == 0

    run(body)


def test_payload_that_waits_for_its_place_is_bounded_and_read_again_beyond_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.tiers.dram_filler.DRAM_HELD_BYTES_MAX", 300 * KIB)

    async def body(world: World) -> None:
        contents = [os.urandom(200 * KIB) for _ in range(4)]
        chunks: list[bytes] = [data_chunk_id(content) for content in contents]
        async with world.lake() as lake:
            for number, content in enumerate(contents):
                await lake.put(f"bkt/{number}", content, create_bucket=True)
        client = world.client(descriptors=False)
        for _ in range(2):
            await client.call(m.ReadChunks(chunks, [0] * 4, [0] * 4))
        for content in contents:
            await world.event(data_chunk_id(content)).wait()
        await trio.testing.wait_all_tasks_blocked()
        assert 1 <= world.store.dram.statistics()["offered"] < 4
        assert world.store.dram._held_bytes == 0
        assert not world.store.dram._held

    run(body)


def test_small_payloads_come_inline_from_memory() -> None:
    async def body(world: World) -> None:
        content = os.urandom(20 * KIB)
        await world.warm(content)
        await world.store.metadata.sync()
        punch_everything(world)
        client = world.client()
        for names in ([("bkt", "object")], [("bkt", "object"), ("bkt", "object")]):
            reply = await client.call(m.OpenObjects(names))
            assert reply.body.joined() == content * len(names)

    run(body)


async def _located(world: World, chunk: ChunkId, media: int, *, descriptors: bool = True) -> m.Grant:
    reply: Reply = await world.client(descriptors=descriptors).call(m.Locate([chunk], media))
    assert isinstance(reply.message, m.Located)
    return reply.message.grants[0]


def test_places_in_memory_are_told_only_to_those_who_understand_and_can_read_them() -> None:
    async def body(world: World) -> None:
        chunk = await world.warm(os.urandom(64 * KIB))
        assert (await _located(world, chunk, MEDIA_DRAM)).medium == MEDIUM_DRAM
        assert (await _located(world, chunk, 0)).medium == MEDIUM_SEGMENT
        assert (await _located(world, chunk, MEDIA_DRAM, descriptors=False)).medium == MEDIUM_SEGMENT
        with pytest.raises(PermissionDenied):
            await world.client(descriptors=False).call(m.OpenSlabs([0]))

    run(body)


def test_a_chunk_that_is_freed_is_forgotten_before_gc_is_done() -> None:
    async def body(world: World) -> None:
        chunk = await world.warm(os.urandom(64 * KIB))
        place = world.tier.find(chunk)
        assert place is not None
        client = world.client()
        await client.call(m.DeleteNames([("bkt", "object")]))
        await world.store.collect()
        with world.store.metadata.view() as view:
            assert find_chunk(view, chunk) is None
        assert chunk not in world.tier
        assert (await _located(world, chunk, MEDIA_DRAM)).medium == MEDIUM_NONE

    run(body)


def test_a_reader_with_an_old_grant_falls_back_when_its_cell_was_given_up() -> None:
    async def body(world: World) -> None:
        content = os.urandom(300 * KIB)
        chunk = await world.warm(content)
        async with world.lake() as lake:
            driver = driver_of(lake)
            opened = await driver.run(driver.steps.open("bkt/object"))
            assert opened.grants[chunk].medium == MEDIUM_DRAM
            world.tier.forget(chunk)
            assert await driver.run(driver.steps.read(opened, 0, len(content))) == content
            assert await driver.run(driver.steps.read(opened, 70_000, 9)) == content[70_000:70_009]
            await driver.run(driver.steps.close(opened))

    run(body)


def test_compaction_keeps_what_is_in_memory() -> None:
    async def body(world: World) -> None:
        content = os.urandom(64 * KIB)
        chunk = await world.warm(content)
        await world.store.collect(0.97)
        assert chunk in world.tier
        async with world.lake() as lake:
            assert await lake.get("bkt/object") == content

    run(body)


def test_a_damaged_chunk_is_not_kept_in_memory(caplog: pytest.LogCaptureFixture) -> None:
    async def body(world: World) -> None:
        content = os.urandom(64 * KIB)
        chunk = await world.warm(content)
        punch_everything(world)
        with world.store.metadata.view() as view:
            record = find_chunk(view, chunk)
        assert record is not None
        with pytest.raises(ChunkDamaged):
            await world.store.chunks.read(chunk, record)
        assert chunk not in world.tier
        async with world.lake() as lake:
            for _ in range(3):
                with pytest.raises(ChunkDamaged):
                    await lake.get("bkt/object")
        assert chunk not in world.tier

    run(body)


@pytest.mark.parametrize("length", [20 * KIB, 300 * KIB])
def test_bits_that_flip_in_memory_are_noticed_and_the_disk_is_read(length: int) -> None:
    async def body(world: World) -> None:
        content = os.urandom(length)
        chunk = await world.warm(content)
        place = world.tier.find(chunk)
        assert place is not None
        world.tier.extent(place)[5] ^= 1
        async with world.lake(descriptors=False) as stranger, world.lake() as lake:
            assert await lake.get("bkt/object") == content
            assert await stranger.get("bkt/object") == content
        assert world.tier.statistics()["forgotten"] == 1

    run(body)


def test_a_tier_without_memory_stops_growing_and_everything_is_served_from_the_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(world: World) -> None:
        refused = trio.Event()
        token = trio.lowlevel.current_trio_token()

        def refuse(name: str, size: int) -> None:
            token.run_sync_soon(refused.set)
            raise EngineBusy("there is no memory")

        monkeypatch.setattr(world.tier.arena, "_make_memory", refuse)
        content = os.urandom(64 * KIB)
        async with world.lake() as lake:
            await lake.put("bkt/object", content, create_bucket=True)
            for _ in range(2):
                await lake.get("bkt/object")
            await refused.wait()
            assert await lake.get("bkt/object") == content
        assert world.tier.statistics()["memory_bytes"] == 0

    run(body)


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")])
def test_a_machine_that_is_short_of_memory_costs_a_place_in_the_tier_and_not_the_engine(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: World) -> None:
        failed = trio.Event()

        async def fail(*_: object) -> memoryview:
            failed.set()
            raise error

        content = os.urandom(64 * KIB)
        with monkeypatch.context() as short:
            short.setattr(world.store.segments.reader, "read_chunk", fail)
            async with world.lake() as lake:
                await lake.put("bkt/object", content, create_bucket=True)
                for _ in range(2):
                    await lake.get("bkt/object")
            await failed.wait()
            await trio.testing.wait_all_tasks_blocked()
        assert len(world.tier) == 0
        await world.warm(content)

    run(body)


def test_slabs_are_described_and_strange_ones_left_out() -> None:
    async def body(world: World) -> None:
        await world.warm(os.urandom(64 * KIB))
        reply = await world.client().call(m.OpenSlabs([7, 0, 0]))
        assert reply.message == m.SlabsOpened([0], SLAB)
        assert len(reply.descriptors) == 2
        assert os.fstat(reply.descriptors[0]).st_size == SLAB
        for descriptor in reply.descriptors:
            os.close(descriptor)
        with pytest.raises(LakeError, match="at most 63"):
            await world.client().call(m.OpenSlabs(list(range(64))))

    run(body)


def test_noted_reads_count_and_odd_ones_are_refused() -> None:
    async def body(world: World) -> None:
        content = os.urandom(64 * KIB)
        chunk = data_chunk_id(content)
        async with world.lake() as lake:
            await lake.put("bkt/object", content, create_bucket=True)
        await world.client().call(m.NoteReads([chunk, chunk, data_chunk_id(b"elsewhere")]))
        await world.event(chunk).wait()
        await world.client().call(m.NoteReads([chunk]))
        figures = world.store.dram.statistics()
        assert (figures["client_reads"], figures["client_hits"]) == (3, 1)
        with pytest.raises(InvalidArgument):
            await world.client().call(m.NoteReads([b"odd"]))

    run(body)


def test_the_tier_is_shown_in_the_status() -> None:
    async def body(world: World) -> None:
        await world.warm(os.urandom(64 * KIB))
        shown = (await world.store.status())["dram"]
        assert (shown["chunks"], shown["limit_bytes"], shown["memory_bytes"]) == (1, 3 * SLAB, SLAB)

    run(body)


@pytest.mark.parametrize("is_indexed", [False, True])
def test_every_streamed_read_of_what_is_long_enough_is_a_hit_or_a_miss(is_indexed: bool) -> None:
    count, rounds = 40, 3

    async def body(world: World) -> None:
        client = world.client()
        session = await session_of(client)
        chunks = await store_chunks(client, session, [os.urandom(20 * KIB) for _ in range(count)])
        (short,) = await store_chunks(client, session, [os.urandom(1 * KIB)])
        async with trio.open_nursery() as nursery:
            if is_indexed:
                await nursery.start(run_shared_index, world.store, "memory", 100)
            for number in range(rounds):
                for chunk in (*chunks, short):
                    await read(client, chunk)
                if number == rounds - 2:
                    await world.event(ChunkId(chunks[0])).wait()
            nursery.cancel_scope.cancel()
        shown = world.tier.statistics()
        assert shown["hits"] + shown["misses"] == count * rounds
        assert shown["hits"] > 0

    run(body)
