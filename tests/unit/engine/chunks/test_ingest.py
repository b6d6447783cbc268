"""Ingest: a payload written while it is hashed is as safe as one written afterwards, and takes no more room."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import trio

from engine.chunks.payload import Payload
from engine.chunks.write_ahead import PIECE_BYTES, AheadRun, Filling
from engine.format.checksums import seal_payload, vector_of
from engine.format.extents import large_extent_bytes
from engine.format.sizes import StoreSizes
from engine.segments.large import Coming, IsLast, LargeWriter, not_last
from engine.store.store import Store
from lakefs.errors import DiskFailed, SourceChanged, StoreFull, StoreReadOnly
from lakefs.ids import ChunkKind, data_chunk_id
from lakefs.limits import KIB
from lakefs.wire import messages as m
from tests.sim.world.disk import SimDisk
from tests.store_rig import (
    SMALL_SIZES,
    ask,
    client_of,
    fsck,
    in_flight,
    put,
    read,
    records,
    run,
    session_of,
    simulated_store,
    store_chunks,
)

AHEAD = replace(SMALL_SIZES, write_ahead_bytes=64 * KIB)
HASHED_FIRST = replace(SMALL_SIZES, write_ahead_bytes=1 << 40)
LONG = b"long" * 40_000


def payloads(count: int, length: int = 70_000) -> list[bytes]:
    return [bytes([number]) * length for number in range(count)]


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the payloads of each write to a large segment."""
    counts: list[int] = []
    original = LargeWriter.write

    async def write(
        self: LargeWriter,
        run: Sequence[tuple[memoryview, int]],
        coming: Coming | None = None,
        is_last: IsLast = not_last,
    ) -> object:
        counts.append(len(run))
        return await original(self, run, coming, is_last)

    monkeypatch.setattr(LargeWriter, "write", write)
    return counts


async def settled(store: Store) -> None:
    assert in_flight(store) == 0
    assert store.buffers.in_use == 0


@pytest.mark.parametrize("sizes", [AHEAD, HASHED_FIRST])
def test_payloads_are_written_in_runs_and_read_as_they_were(writes: list[int], sizes: StoreSizes) -> None:
    async def main() -> None:
        async with simulated_store(sizes=sizes) as store:
            client = client_of(store)
            stored = payloads(40)
            chunks = await store_chunks(client, await session_of(client), [*stored, b"small", stored[3]])
            assert [bytes(chunk) for chunk in chunks[:40]] == [data_chunk_id(each) for each in stored]
            assert [await read(client, chunk) for chunk in chunks] == [*stored, b"small", stored[3]]
            assert sum(writes) == (41 if sizes is AHEAD else 40), "ahead of its hash one is written in vain"
            assert len(records(store)) == 41
            assert len(writes) < 6
            await settled(store)
            assert (await fsck(client))["damage"] == 0

    run(main)


def test_a_long_payload_that_comes_alone_is_on_its_way_before_its_id_is_known(writes: list[int]) -> None:
    async def main() -> None:
        async with simulated_store(sizes=AHEAD) as store:
            client = client_of(store)
            await put(client, "first", LONG)
            assert writes == [1]
            await put(client, "again", LONG)  # written for nothing: the chunk exists, and the new extent is given up
            assert writes == [1, 1]
            assert len(records(store)) == 1
            await settled(store)
            await put(client, "yet again", LONG)  # so the next ones are hashed before they are written
            assert writes == [1, 1]
            for number in range(8):
                await put(client, f"new {number}", LONG + bytes([number]))
            await put(client, "again", LONG)
            assert writes == [1] * 11, "written ahead again once such payloads have been new"
            assert (await fsck(client))["damage"] == 0

    run(main)


def test_a_payload_that_is_there_needs_no_room() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk, sizes=AHEAD) as store:
            client = client_of(store)
            await put(client, "first", LONG)
            disk.fail_next("pwrite", StoreFull("planted"), path=".large")
            await put(client, "again", LONG)
            disk.fail_next("pwrite", StoreFull("planted"), path=".large")
            with pytest.raises(StoreFull):
                await put(client, "other", LONG + b"1")
            await settled(store)
            await put(client, "other", LONG + b"1")

    run(main)


def test_what_is_wanted_of_a_request_is_stored_where_there_is_no_room_for_all_of_it() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk, sizes=AHEAD) as store:
            client = client_of(store)
            session = await session_of(client)
            [there] = await store_chunks(client, session, [LONG])
            disk.fail_next("pwrite", StoreFull("planted"), path=".large")
            chunks = await store_chunks(client, session, [LONG, LONG + b"1"])
            assert chunks[0] == there
            assert await read(client, chunks[1]) == LONG + b"1"
            assert not disk.faults_to_come
            await settled(store)
            assert (await fsck(client))["damage"] == 0

    run(main)


def test_payloads_of_several_pieces_go_in_one_run_and_are_read_as_they_were(writes: list[int]) -> None:
    async def main() -> None:
        async with simulated_store(sizes=AHEAD) as store:
            client = client_of(store)
            content = random.Random(5)
            stored = [content.randbytes(length) for length in (PIECE_BYTES * 2 + 1, 70_000, PIECE_BYTES + 65_536)]
            chunks = await store_chunks(client, await session_of(client), stored)
            assert writes == [3]
            assert [await read(client, chunk) for chunk in chunks] == stored
            assert (await fsck(client))["damage"] == 0
            await settled(store)

    run(main)


def test_a_write_takes_with_it_what_was_brought_while_the_one_before_was_on_its_way() -> None:
    lengths = [3 * PIECE_BYTES, 70_000, PIECE_BYTES]
    ends = [PIECE_BYTES, 2 * PIECE_BYTES]
    for length in lengths:
        ends.append((ends[-1] if len(ends) > 2 else 0) + large_extent_bytes(length))

    def fillings() -> list[Filling]:
        areas = [memoryview(bytearray(large_extent_bytes(length))) for length in lengths]
        return [Filling(Payload(ChunkKind.DATA, length, area)) for length, area in zip(lengths, areas, strict=True)]

    alone = AheadRun([0, 1, 2], fillings())
    assert list(alone.coming()) == ends
    helped = fillings()
    coming = AheadRun([0, 1, 2], helped).coming()
    assert next(coming) == ends[0]
    helped[0].bring_all()
    helped[1].bring_all()
    assert list(coming) == ends[3:]
    helped = fillings()
    for filling in helped:
        filling.bring_all()
    assert list(AheadRun([0, 1, 2], helped).coming()) == ends[4:]


def test_what_another_thread_is_at_is_left_to_it_while_there_is_more_to_bring() -> None:
    begun, go_on = threading.Event(), threading.Event()
    filled: list[int] = []

    def fill(target: memoryview, begin: int) -> None:
        filled.append(begin)
        if not begin:
            begun.set()
            assert go_on.wait(60)
        elif begin == 2 * PIECE_BYTES:
            go_on.set()

    payload = Payload(ChunkKind.DATA, 3 * PIECE_BYTES, memoryview(bytearray(4 << 20)), fill=fill)
    filling = Filling(payload)
    other = threading.Thread(target=filling.bring, args=(0,))
    other.start()
    assert begun.wait(60)
    filling.bring_all()
    other.join()
    assert filled == [0, PIECE_BYTES, 2 * PIECE_BYTES]


@pytest.mark.parametrize("sizes", [AHEAD, HASHED_FIRST])
@pytest.mark.parametrize("sent", [payloads(100), [LONG, LONG + b"1"]])
def test_a_failed_write_fails_its_request_and_gives_all_of_it_up(
    sizes: StoreSizes, sent: list[bytes], writes: list[int]
) -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk, sizes=sizes) as store:
            client = client_of(store)
            session = await session_of(client)
            disk.fail_next("pwrite", DiskFailed("planted"), path=".large", skip=1)
            with pytest.raises((DiskFailed, StoreReadOnly)):
                await store_chunks(client, session, sent[: len(sent) // 2])
                await store_chunks(client, session, sent[len(sent) // 2 :])
            assert len(writes) < 6, "nothing more is begun behind the failure"
            await settled(store)
            assert store.read_only_because

    run(main)


def test_the_same_payload_by_two_requests_at_once_is_stored_once() -> None:
    async def main() -> None:
        async with simulated_store(sizes=AHEAD) as store:
            client = client_of(store)
            session = await session_of(client)
            fresh: list[list[bool]] = []

            async def store_it() -> None:
                request = m.StoreChunks(session, [1, 1, 1], [len(LONG), 5, 5])
                fresh.append((await ask(client, request, m.Stored, LONG, b"small", b"small")).fresh)

            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(store_it)
            assert [sum(each) for each in zip(*fresh, strict=True)] == [1, 1, 0]
            assert len(records(store)) == 2
            await settled(store)

    run(main)


@pytest.mark.parametrize("length", [65_536, 70_000, PIECE_BYTES, 2 * PIECE_BYTES - 1, 4 * PIECE_BYTES])
def test_two_threads_bring_each_piece_once_and_seal_it_as_one_would(length: int) -> None:
    content = random.Random(length).randbytes(length)
    sealed = memoryview(bytearray(length + 8192))
    sealed[:length] = content
    crc = seal_payload(sealed, length, vector_of(sealed[:length]))
    for _ in range(20):
        filled: list[int] = []
        area = memoryview(bytearray(length + 8192))

        def fill(target: memoryview, begin: int, filled: list[int] = filled) -> None:
            filled.append(begin)
            target[:] = content[begin : begin + len(target)]

        filling = Filling(Payload(ChunkKind.DATA, length, area, fill=fill))
        there: list[int] = []
        other = threading.Thread(
            target=lambda filling=filling, there=there: there.extend(map(filling.bring, range(len(filling))))
        )
        other.start()
        hashed = filling.hash()
        other.join()
        assert sorted(filled) == [PIECE_BYTES * piece for piece in range(len(filling))]
        assert there == sorted(there)
        assert there[-1] == len(filling.extent)
        assert (hashed.chunk, hashed.crc) == (data_chunk_id(content), crc)
        assert filling.extent == sealed[: len(filling.extent)]


def test_a_fill_that_fails_is_an_error_of_whoever_needs_the_piece() -> None:
    def fill(target: memoryview, begin: int) -> None:
        if begin:
            raise SourceChanged("planted")

    filling = Filling(Payload(ChunkKind.DATA, 3 * PIECE_BYTES, memoryview(bytearray(4 << 20)), fill=fill))
    assert filling.bring(0) == PIECE_BYTES
    for _ in range(2):
        with pytest.raises(SourceChanged):
            filling.bring(2)
        with pytest.raises(SourceChanged):
            filling.hash()
