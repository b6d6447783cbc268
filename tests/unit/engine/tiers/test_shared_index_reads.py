"""Chunks that are streamed from where the shared index says they are; a wrong entry harms nobody."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import pytest
import trio
import trio.testing

from engine.process.embedded import EmbeddedEngine
from engine.process.shared_index_life import run_shared_index
from engine.requests import read_chunks as chunk_reads
from engine.store.store import Store
from engine.tiers.arena import Arena
from engine.tiers.dram_tier import DramTier
from lakefs.errors import ChunkNotFound, InvalidArgument, LakeError
from lakefs.ids import data_chunk_id
from lakefs.limits import GRANULE_BYTES, KIB, MIB
from lakefs.wire import messages as m
from lakefs.wire.media import MEDIUM_SEGMENT
from tests.sim.test_dram_tier import PlainMemory
from tests.store_rig import client_of, delete, gc, put, records, run, simulated_store

PAYLOADS: Final = [bytes([number]) * size for number, size in enumerate((1, 4 * KIB, 60_000, 65_536, 200_000))]
CHUNKS: Final = [data_chunk_id(payload) for payload in PAYLOADS]
SHORT: Final = 4
"""This many of them have no vector of checksums."""
Body = Callable[[Store, EmbeddedEngine], Awaitable[None]]


@asynccontextmanager
async def indexed_store(tier: DramTier | None = None) -> AsyncIterator[tuple[Store, EmbeddedEngine]]:
    """Start a store with the payloads, all of which its shared index knows."""
    async with simulated_store(tier=tier) as store, trio.open_nursery() as nursery:
        await nursery.start(run_shared_index, store, "memory", 500)
        client = client_of(store)
        for number, payload in enumerate(PAYLOADS):
            await put(client, f"k{number}", payload)
        assert store.shared_index is not None
        assert None not in store.shared_index.find_many([*CHUNKS])
        yield store, client
        nursery.cancel_scope.cancel()


def drive(body: Body, tier: DramTier | None = None) -> None:
    async def main() -> None:
        async with indexed_store(tier) as (store, client):
            await body(store, client)

    run(main)


async def streamed(
    client: EmbeddedEngine, count: int = len(CHUNKS), offset: int = 0, length: int = 0
) -> list[bytes | LakeError]:
    """Read the first chunks in one request; return the bytes of each, or the error."""
    reply = await client.call(m.ReadChunks([*CHUNKS[:count]], [offset] * count, [length] * count))
    assert isinstance(reply.message, m.ReadChunksReply)
    content = reply.body.joined()
    reply.body.release()
    told: list[bytes | LakeError] = []
    for piece in reply.message.pieces:
        assert len(piece.crcs) == 4 * -(-piece.length // GRANULE_BYTES)
        told.append(piece.failure.as_error() if piece.failure is not None else content[: piece.length])
        content = content[piece.length :]
    return told


def test_what_the_shared_index_knows_is_not_looked_for_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(store: Store, client: EmbeddedEngine) -> None:
        looked_up: list[object] = []
        monkeypatch.setattr(chunk_reads, "find_chunk", lambda *found: looked_up.append(found))
        assert await streamed(client) == PAYLOADS
        before = store.segments.batches.statistics()["queue"]
        assert await streamed(client, SHORT) == PAYLOADS[:SHORT]
        assert await streamed(client, SHORT, 0, 1) == PAYLOADS[:SHORT]
        assert store.segments.batches.statistics()["queue"] == int(before) + 2 * SHORT
        assert looked_up == []

    drive(body)


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, -1), (1, 0), (0, 2), (1, 1), (1 << 62, 1 << 62)])
def test_a_range_outside_of_a_short_chunk_is_refused(offset: int, length: int) -> None:
    async def body(store: Store, client: EmbeddedEngine) -> None:
        first, *others = await streamed(client, SHORT, offset, length)
        assert isinstance(first, InvalidArgument)
        inside = 0 <= offset < 2 and 0 <= length <= 2
        assert others == PAYLOADS[1:SHORT] if inside else all(isinstance(told, LakeError) for told in others)

    drive(body)


def test_what_is_read_again_comes_into_the_dram_tier_and_then_from_there() -> None:
    tier = DramTier(Arena(4, MIB, PlainMemory))

    async def body(store: Store, client: EmbeddedEngine) -> None:
        for _ in range(4):
            assert await streamed(client, SHORT) == PAYLOADS[:SHORT]
            await trio.testing.wait_all_tasks_blocked()
        assert [chunk in tier for chunk in CHUNKS[:SHORT]] == [False, True, True, True]
        before = store.segments.batches.statistics()["queue"]
        assert await streamed(client, SHORT) == PAYLOADS[:SHORT]
        assert store.segments.batches.statistics()["queue"] == int(before) + 1

    drive(body, tier)


def test_a_place_where_other_bytes_lie_is_looked_for_in_the_store() -> None:
    async def body(store: Store, client: EmbeddedEngine) -> None:
        shared = store.shared_index
        assert shared is not None
        for chunk, record in records(store).items():
            crc, length = record.crc, record.stored_bytes
            for place in (
                (MEDIUM_SEGMENT, record.segment, record.offset + 1, length, crc),
                (MEDIUM_SEGMENT, record.segment + 1000, record.offset, length, crc),
                (MEDIUM_SEGMENT, record.segment, record.offset, length, crc ^ 1),
                (MEDIUM_SEGMENT, record.segment, record.offset + (1 << 30), length, crc),
            ):
                shared.put(chunk, place)
                assert await streamed(client) == PAYLOADS
                assert await streamed(client, SHORT) == PAYLOADS[:SHORT]
            shared.put(chunk, (MEDIUM_SEGMENT, record.segment, record.offset, length, crc))
        assert not await store.damaged()

    drive(body)


def test_of_a_chunk_that_is_gone_no_other_bytes_come_whatever_the_shared_index_says() -> None:
    async def body(store: Store, client: EmbeddedEngine) -> None:
        shared = store.shared_index
        assert shared is not None
        places = shared.find_many([*CHUNKS])
        await delete(client, "k1", "k4")
        assert (await gc(client))["freed_chunks"] == 2
        assert [isinstance(told, ChunkNotFound) for told in await streamed(client)] == [False, True, False, False, True]
        for chunk, place in zip(CHUNKS, places, strict=True):
            assert place is not None
            shared.put(chunk, place)
        for index, (told, payload) in enumerate(zip(await streamed(client), PAYLOADS, strict=True)):
            assert told == payload or (index in (1, 4) and isinstance(told, LakeError))
        assert not await store.damaged()

    drive(body)
