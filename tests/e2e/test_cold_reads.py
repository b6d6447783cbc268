"""Small chunks that are not in memory, read in batches from a real disk, through io_uring and through threads."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from crc32c import crc32c

from engine.host.io_queue import SWITCHED_OFF, opened_ring
from engine.process.embedded import EmbeddedEngine, open_lake
from engine.requests.table import Service
from engine.store.local_store import open_local_store
from engine.store.store import Store
from lakefs.errors import ChunkDamaged, InvalidArgument, StoreLocked
from lakefs.ids import Buffer, ChunkId, data_chunk_id
from lakefs.limits import GRANULE_BYTES
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body

KIB = 1 << 10
SIZES = [1, 100, 4 * KIB, 30 * KIB, 63 * KIB] * 8
LARGE_BYTES = 300 * KIB
WAYS = ["io_uring", "threads"]


@pytest.fixture
def payloads() -> list[bytes]:
    generator = random.Random(3)
    return [generator.randbytes(size) for size in [*SIZES, LARGE_BYTES]]


@pytest.fixture
def folder(tmp_path: Path, payloads: list[bytes]) -> Path:
    with open_lake(tmp_path / "store") as lake:
        lake.put_many([(f"bkt/k{index}", payload) for index, payload in enumerate(payloads)], create_bucket=True)
    return tmp_path / "store"


def names_of(payloads: Sequence[bytes]) -> list[tuple[str, str]]:
    return [("bkt", f"k{index}") for index in range(len(payloads))]


def drop_pages(folder: Path) -> None:
    for path in (folder / "segments").iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@asynccontextmanager
async def cold(folder: Path, way: str) -> AsyncIterator[tuple[Store, EmbeddedEngine]]:
    """Open the store with nothing of its segments in memory."""
    wanted = way == "io_uring"
    if wanted:
        ring = opened_ring()
        if isinstance(ring, str):
            pytest.skip(ring)
        ring.close()
    drop_pages(folder)
    async with open_local_store(folder, io_uring=wanted) as store:
        yield store, EmbeddedEngine(Service(store))


async def read_chunks(
    client: EmbeddedEngine, chunks: Sequence[ChunkId], offset: int = 0, length: int = 0
) -> list[tuple[m.ReadPiece, bytes]]:
    reply = await client.call(
        m.ReadChunks([bytes(chunk) for chunk in chunks], [offset] * len(chunks), [length] * len(chunks))
    )
    assert isinstance(reply.message, m.ReadChunksReply)
    body = b"".join(bytes(part) for part in reply.body.parts)
    found: list[tuple[m.ReadPiece, bytes]] = []
    for piece in reply.message.pieces:
        found.append((piece, body[: piece.length]))
        body = body[piece.length :]
    assert not body
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_of_cold_chunks_comes_with_its_checksums(way: str, folder: Path, payloads: list[bytes]) -> None:
    async def main() -> None:
        async with cold(folder, way) as (store, client):
            chunks = [data_chunk_id(payload) for payload in payloads]
            for (piece, found), payload in zip(await read_chunks(client, chunks), payloads, strict=True):
                assert found == payload
                granules = [found[at : at + GRANULE_BYTES] for at in range(0, len(found), GRANULE_BYTES)]
                assert piece.crcs == b"".join(crc32c(granule).to_bytes(4, "little") for granule in granules)
            reads = (await store.status())["reads"]
            assert reads["through"] == way
            assert reads["reason"] == ("" if way == "io_uring" else SWITCHED_OFF)
            assert reads["queue"] == len(payloads)
            assert reads["threads"] == 0

    trio.run(main)


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_of_cold_objects_comes_inline(way: str, folder: Path, payloads: list[bytes]) -> None:
    async def main() -> None:
        async with cold(folder, way) as (store, client):
            for count in (1, len(SIZES)):
                asked = m.OpenObjects(names_of(payloads)[:count], inline_bytes=16 << 20)
                reply = await client.call(asked)
                assert isinstance(reply.message, m.OpenResults)
                body = b"".join(bytes(part) for part in reply.body.parts)
                assert body == b"".join(payloads[:count])
                assert [result.failure for result in reply.message.results] == [None] * count
            assert store.segments.batches.statistics()["threads"] == 0

    trio.run(main)


@pytest.mark.parametrize("way", WAYS)
def test_a_range_of_a_larger_chunk_is_widened_to_granules(way: str, folder: Path, payloads: list[bytes]) -> None:
    async def main() -> None:
        async with cold(folder, way) as (_, client):
            large = payloads[-1]
            [(piece, found)] = await read_chunks(client, [data_chunk_id(large)], GRANULE_BYTES + 5, 2 * GRANULE_BYTES)
            assert piece.offset == GRANULE_BYTES
            assert found == large[GRANULE_BYTES : 4 * GRANULE_BYTES]
            assert len(piece.crcs) == 3 * 4
            [(piece, _)] = await read_chunks(client, [data_chunk_id(large)], LARGE_BYTES, 1)
            assert piece.failure is not None
            assert piece.failure.wire_code == InvalidArgument.wire_code

    trio.run(main)


@pytest.mark.parametrize("way", WAYS)
def test_what_rotted_on_the_disk_fails_alone_and_by_name(way: str, folder: Path, payloads: list[bytes]) -> None:
    victims = {7, len(payloads) - 1}

    async def main() -> None:
        async with cold(folder, way):
            pass
        for path in (folder / "segments").iterdir():
            content = bytearray(path.read_bytes())
            for victim in victims:
                at = content.find(payloads[victim])
                if at >= 0:
                    content[at + len(payloads[victim]) // 2] ^= 4
            path.write_bytes(content)
        chunks = [data_chunk_id(payload) for payload in payloads]
        async with cold(folder, way) as (store, client):
            for index, (piece, found) in enumerate(await read_chunks(client, chunks)):
                if index in victims:
                    assert piece.failure is not None
                    assert piece.failure.wire_code == ChunkDamaged.wire_code
                else:
                    assert found == payloads[index]
            damaged = str(await store.damaged())
            assert all(f"k{victim}" in damaged for victim in victims)

    trio.run(main)


@pytest.mark.parametrize("way", WAYS)
def test_what_rotted_in_the_page_cache_only_is_read_past_it(
    way: str, folder: Path, payloads: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with cold(folder, way) as (store, client):
            checks: list[int] = []

            def wrong(payload: Buffer) -> int:
                """Stand in for the checksum of what the queue read; it is never right."""
                checks.append(len(payload))
                return -1

            chunk = data_chunk_id(payloads[2])
            monkeypatch.setattr("engine.segments.batch_reader.crc32c", wrong)
            [(piece, found)] = await read_chunks(client, [chunk])
            assert found == payloads[2]
            assert piece.failure is None
            assert checks == [len(payloads[2])]
            assert store.segments.batches.statistics()["threads"] == 1

    trio.run(main)


@pytest.mark.parametrize("way", WAYS)
def test_cold_chunks_are_loaded_into_lent_memory_and_memory_that_shrinks_is_an_error(
    way: str, folder: Path, payloads: list[bytes]
) -> None:
    loaded = [payloads[-1], payloads[4], payloads[3]]
    pool_bytes = 1 << 20
    offsets = [0, 512 * KIB, 768 * KIB]

    async def main() -> None:
        async with cold(folder, way) as (store, _):
            service = Service(store)
            client = service.connected("test", descriptors=True, trusted=True)
            descriptor = os.memfd_create("pool", os.MFD_CLOEXEC)
            os.truncate(descriptor, pool_bytes)
            lent = await service.serve(client, m.LendMemory(pool_bytes, True), Body(), [os.dup(descriptor)])
            assert isinstance(lent.message, m.MemoryLent)
            request = m.LoadSlots(lent.message.memory, [bytes(data_chunk_id(payload)) for payload in loaded], offsets)
            reply = await service.serve(client, request, Body(), ())
            assert isinstance(reply.message, m.SlotsLoaded)
            assert reply.message.lengths == [len(payload) for payload in loaded]
            for payload, offset in zip(loaded, offsets, strict=True):
                assert os.pread(descriptor, len(payload), offset) == payload
            os.truncate(descriptor, 0)
            drop_pages(folder)
            reply = await service.serve(client, request, Body(), ())
            assert isinstance(reply.message, m.SlotsLoaded)
            assert [failure is not None for failure in reply.message.failures] == [True] * 3
            assert (await store.status())["state"] == "serving"
            os.close(descriptor)

    trio.run(main)


@pytest.mark.parametrize("way", WAYS)
def test_a_store_that_cannot_be_opened_says_so_plainly(way: str, folder: Path) -> None:
    async def main() -> None:
        async with cold(folder, way):
            with pytest.raises(StoreLocked):
                async with cold(folder, way):
                    pass

    trio.run(main)
