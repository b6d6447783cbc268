"""A DRAM tier and its index over chunks that come from elsewhere: without metadata and without segments."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import pytest
import trio
from crc32c import crc32c

from engine.format.checksums import vector_of
from engine.format.layouts import ChunkRecord
from engine.memory.backing import open_backing
from engine.process.embedded import EmbeddedEngine
from engine.requests import table
from engine.requests.dispatch import Dispatch, Group
from engine.requests.handlers import handles
from engine.sessions.references import Client
from engine.tiers.arena import Arena
from engine.tiers.dram_filler import Dram
from engine.tiers.dram_tier import DramTier
from engine.tiers.shared_index import NO_GRANT
from engine.tiers.tier_index import TierIndex
from lakefs.client.facade import driver_of
from lakefs.client.trio.lake import TrioLake
from lakefs.content.verify import vector_bytes
from lakefs.errors import ChunkNotFound, EngineUnreachable
from lakefs.host.offload import ThreadOffload
from lakefs.ids import Birth, ChunkId, SegmentId, data_chunk_id
from lakefs.limits import KIB, MIB
from lakefs.shared_index.table import SharedTable
from lakefs.shared_index.table_format import capacity_for, table_bytes
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from tests.names_rig import names_store
from tests.store_rig import ask

SLAB: Final = 9 * MIB
LENGTHS: Final = [20 * KIB, 64 * KIB, 300 * KIB, 4 * MIB]


@dataclass
class Chunks:
    """Chunks that come from elsewhere: a `DramSource`."""

    contents: dict[ChunkId, bytes] = field(default_factory=dict)
    forgets: list[Callable[[ChunkId], None]] = field(default_factory=list)
    reads: int = 0
    failure: Exception | None = None

    def add(self, content: bytes) -> ChunkId:
        chunk = data_chunk_id(content)
        self.contents[chunk] = content
        return chunk

    def record(self, chunk: ChunkId) -> ChunkRecord:
        content = self.contents[chunk]
        vector = vector_of(content)
        crc = crc32c(vector) if vector_bytes(len(content)) else int.from_bytes(vector, "little")
        return ChunkRecord(Birth(0), SegmentId(0), 0, len(content), len(content), crc)

    def find(self, chunk: ChunkId) -> ChunkRecord | None:
        return self.record(chunk) if chunk in self.contents else None

    async def read(self, chunk: ChunkId, record: ChunkRecord, memory: memoryview) -> int:
        await trio.lowlevel.checkpoint()
        self.reads += 1
        if self.failure is not None:
            raise self.failure
        content = self.contents[chunk]
        memory[: len(content)] = content
        if vector_bytes(len(content)):
            memory[len(content) : len(content) + vector_bytes(len(content))] = vector_of(content)
        return record.crc

    def on_gone(self, forget: Callable[[ChunkId], None]) -> None:
        self.forgets.append(forget)

    def lose(self, chunk: ChunkId) -> None:
        del self.contents[chunk]
        for forget in self.forgets:
            forget(chunk)


@dataclass
class Tier:
    """A tier over such chunks, and its index: what `TierRequests` are served from."""

    source: Chunks
    dram: Dram
    shared_index: TierIndex
    tier: DramTier

    async def warm(self, *chunks: ChunkId) -> None:
        """Have chunks read until the tier has them."""
        for chunk in chunks:
            for _ in range(2):
                if self.dram.note_read(chunk, len(self.source.contents[chunk])):
                    self.dram.want(chunk)
        with trio.fail_after(10):
            while not all(chunk in self.tier for chunk in chunks):
                await trio.lowlevel.checkpoint()


class Places:
    """Answers Locate from the tier alone."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self.asked = 0

    @handles(m.Locate)
    async def locate(self, client: Client, request: m.Locate) -> Reply:
        self.asked += 1
        found: Sequence[m.Grant | None] = [self._tier.tier.grant(ChunkId(chunk)) for chunk in request.chunks]
        return Reply(m.Located([grant or NO_GRANT for grant in found]))


@asynccontextmanager
async def tier_of(entries: int = 1000) -> AsyncIterator[Tier]:
    source, tier = Chunks(), DramTier(Arena(3, SLAB))
    async with ThreadOffload(2, "tier") as offload, names_store() as names, trio.open_nursery() as nursery:
        capacity = capacity_for(entries)
        backing = open_backing("memory", table_bytes(capacity))
        index = TierIndex(tier, offload, names.superblock.identity, backing, SharedTable(backing.memory, capacity))
        dram = Dram(tier, source, offload)
        nursery.start_soon(dram.run)
        nursery.start_soon(index.run)
        yield Tier(source, dram, index, tier)
        nursery.cancel_scope.cancel()
    index.close()
    tier.close()


def run(body: Callable[[Tier], Awaitable[None]], entries: int = 1000) -> None:
    async def main() -> None:
        async with tier_of(entries) as tier:
            await body(tier)

    trio.run(main)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_chunk_that_is_read_again_is_served_from_memory_checked(length: int) -> None:
    async def body(tier: Tier) -> None:
        content = os.urandom(length)
        chunk = tier.source.add(content)
        await tier.warm(chunk)
        assert tier.source.reads == 1
        found = await tier.dram.read_range(chunk, tier.source.record(chunk), 5, length - 5)
        assert found is not None
        assert bytes(found.payload[5 - found.begin : length - found.begin]) == content[5:]
        found.release()

    run(body)


def test_what_is_gone_or_cannot_be_read_is_not_in_the_tier_nor_in_the_index() -> None:
    async def body(tier: Tier) -> None:
        kept, lost = (tier.source.add(os.urandom(100 * KIB)) for _ in range(2))
        await tier.warm(kept, lost)
        tier.source.lose(lost)
        assert lost not in tier.tier
        assert tier.shared_index.table.find(lost) is None
        assert tier.shared_index.table.find(kept) is not None
        tier.source.failure = EngineUnreachable("the member does not answer")
        away = tier.source.add(os.urandom(100 * KIB))
        for _ in range(3):
            if tier.dram.note_read(away, 100 * KIB):
                tier.dram.want(away)
        with trio.fail_after(10):
            while tier.source.reads < 3:
                await trio.lowlevel.checkpoint()
        assert away not in tier.tier
        tier.source.failure = None
        await tier.warm(away)

    run(body)


def test_what_was_just_read_is_offered_and_not_read_again() -> None:
    async def body(tier: Tier) -> None:
        first = tier.source.add(os.urandom(20 * KIB))
        await tier.warm(first)  # makes a slab of its size
        content = os.urandom(20 * KIB)
        chunk, reads = tier.source.add(content), tier.source.reads
        assert [tier.dram.note_read(chunk, len(content)) for _ in range(2)] == [False, True]
        tier.dram.offer(chunk, tier.source.record(chunk), content)
        assert chunk in tier.tier
        assert tier.source.reads == reads

    run(body)


def test_clients_read_the_tier_without_a_request_and_nothing_that_has_left_it() -> None:
    async def body(tier: Tier) -> None:
        contents = [os.urandom(length) for length in LENGTHS[:3]]  # as many sizes as slabs
        chunks = [tier.source.add(content) for content in contents]
        await tier.warm(*chunks)
        async with names_store() as names, ThreadOffload(2, "client") as offload:
            places = Places(tier)
            service = Dispatch(names, [table.about(names), table.tier(tier), Group([places])])
            features = m.FEATURE_EACH | m.FEATURE_SLABS | m.FEATURE_SHARED_INDEX
            engine = EmbeddedEngine(service, features=features)
            assert (await ask(engine, m.Hello(1, "test"), m.HelloReply)).descriptors
            lake = TrioLake(engine, offload)
            for _ in range(2):
                assert [await lake.chunks.get(chunk) for chunk in chunks] == contents
            asked, buffers = places.asked, [bytearray(len(content)) for content in contents]
            short = slice(2)  # those that are copied at once
            assert await lake.chunks.get_many_into(chunks[short], buffers[short]) == [20 * KIB, 64 * KIB]
            assert [bytes(buffer) for buffer in buffers[short]] == contents[short]
            assert places.asked == asked, "the index was not used"
            assert driver_of(lake).shares.index.at_hand() is not None
            tier.source.lose(chunks[1])
            with pytest.raises(ChunkNotFound):
                await lake.chunks.get_into(chunks[1], buffers[1])
            assert await lake.chunks.get_into(chunks[2], buffers[2]) == len(contents[2])
            await lake.aclose()
            await engine.aclose()

    run(body)


def test_an_index_that_is_full_grows_and_has_every_chunk_of_the_tier() -> None:
    async def body(tier: Tier) -> None:
        small = tier.shared_index.table.capacity
        chunks = [tier.source.add(os.urandom(16 * KIB + number)) for number in range(40)]
        await tier.warm(*chunks)
        tier.shared_index.full.set()  # as when an entry was refused
        with trio.fail_after(10):
            while tier.shared_index.table.capacity == small or tier.shared_index.state != "ready":
                await trio.lowlevel.checkpoint()
        assert all(tier.shared_index.table.find(chunk) is not None for chunk in chunks if chunk in tier.tier)

    run(body)
