"""Requests that load chunks into memory of the client; on every kind of client that can lend some."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from gc import collect as gc_collect

import msgspec
import pytest
import trio

from engine.format.checksums import seal_payload, vector_of
from engine.format.extents import large_extent_bytes
from engine.format.layouts import Table, chunk_key
from engine.requests import load_ranges as loads
from engine.segments import lent_reader as slot_reader
from engine.segments.lent_reader import SlotLoad, SlotReader
from engine.store.store import Store
from lakefs.errors import (
    ChunkDamaged,
    ChunkNotFound,
    EngineBusy,
    InvalidArgument,
    LakeError,
    RequestTooLarge,
    SessionLost,
    SourceChanged,
    StaleGrant,
)
from lakefs.ids import EMPTY_CHUNK, ChunkId, data_chunk_id
from lakefs.limits import BATCH_MAX, CHUNK_BYTES, KIB, MIB
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.contract.engines import Engine, Kind
from tests.contract.test_requests_chunks import refused
from tests.contract.test_requests_memory import lent, memory_of, on_a_socket
from tests.store_rig import ask, gc, read, records, session_of, store_chunks, tamper

POOL = 16 * MIB
SIZES = (1, 4000, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 300_000, MIB, CHUNK_BYTES)
BLANK = b"\xee"


def payload_of(size: int, seed: int = 0) -> bytes:
    return (bytes(range(251)) * (size // 251 + 2))[seed : seed + size]


@dataclass
class Pool:
    """Memory of the test's, lent to the engine."""

    client: EngineClient
    session: bytes
    descriptor: int
    number: int

    async def store(self, *payloads: bytes) -> list[bytes]:
        return await store_chunks(self.client, self.session, payloads)

    async def load(
        self, chunks: Sequence[bytes], offsets: Sequence[int], lengths: Sequence[int] = (), *, checksums: bool = True
    ) -> m.SlotsLoaded:
        request = m.LoadSlots(self.number, list(chunks), list(offsets), list(lengths), checksums)
        return await ask(self.client, request, m.SlotsLoaded)

    def at(self, offset: int, length: int) -> bytes:
        return os.pread(self.descriptor, length, offset)


@asynccontextmanager
async def pool_of(engine: Engine, size_bytes: int = POOL) -> AsyncIterator[Pool]:
    with memory_of(size_bytes) as descriptor:
        os.pwrite(descriptor, BLANK * size_bytes, 0)
        number = await lent(engine.client, descriptor, size_bytes=size_bytes, writable=True)
        yield Pool(engine.client, await session_of(engine.client), descriptor, number)
        await ask(engine.client, m.ReturnMemory(number), m.Done)


def errors_of(loaded: m.SlotsLoaded) -> list[type[LakeError] | None]:
    return [None if failure is None else type(failure.as_error()) for failure in loaded.failures]


@pytest.mark.parametrize("offset", [0, 4096, 12_345])
@pytest.mark.parametrize(
    ("cached", "checksums"), [(True, True), (False, True), (False, False)], ids=["cached", "cold", "cold-plain"]
)
def test_chunks_of_all_sizes_arrive_in_their_slots_and_nowhere_else(
    kind: Kind, offset: int, cached: bool, checksums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cached:
        monkeypatch.setattr(slot_reader, "_may_be_cached", lambda *_: False)
    payloads = [payload_of(size, seed) for seed, size in enumerate(SIZES)]

    async def body(engine: Engine) -> None:
        async with pool_of(engine) as pool:
            chunks = await pool.store(*payloads)
            places = [offset]
            for payload in payloads[:-1]:
                places.append(places[-1] + -(-len(payload) // 4096) * 4096 + 4096)
            loaded = await pool.load(chunks, places, checksums=checksums)
            vectors = [vector_of(payload) for payload in payloads] if checksums else []
            assert loaded == m.SlotsLoaded(list(SIZES), vectors)
            end = 0
            for place, payload in zip(places, payloads, strict=True):
                assert pool.at(end, place - end) == BLANK * (place - end)
                assert pool.at(place, len(payload)) == payload
                end = place + len(payload)
            assert pool.at(end, POOL - end) == BLANK * (POOL - end)

    on_a_socket(kind, body)


def test_checksums_are_left_out_when_nobody_wants_them(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        async with pool_of(engine) as pool:
            (chunk,) = await pool.store(payload_of(MIB))
            loaded = await pool.load([chunk, EMPTY_CHUNK], [0, 5], checksums=False)
            assert loaded == m.SlotsLoaded([MIB, 0], [])
            assert pool.at(0, MIB + 1) == payload_of(MIB) + BLANK

    on_a_socket(kind, body)


def test_one_chunk_goes_to_many_slots(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        async with pool_of(engine) as pool:
            (chunk,) = await pool.store(payload_of(MIB))
            loaded = await pool.load([chunk] * 3, [0, 4 * MIB, 2 * MIB])
            assert loaded.lengths == [MIB] * 3
            assert [pool.at(at * MIB, MIB) for at in (0, 2, 4)] == [payload_of(MIB)] * 3

    on_a_socket(kind, body)


def test_each_slot_that_cannot_be_filled_has_its_own_failure(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        async with pool_of(engine) as pool:
            small, large = await pool.store(payload_of(1000), payload_of(100_000))
            missing = data_chunk_id(b"never stored")
            asked = (
                (small, 100, 1000, None),
                (missing, 5000, 1000, ChunkNotFound),
                (large, 10_000, 99_999, InvalidArgument),  # longer than its slot
                (small, POOL - 999, 1000, InvalidArgument),
                (small, -1, 1000, InvalidArgument),
                (small, (1 << 63) - 1, 1000, InvalidArgument),
                (large, 1 * MIB, 100_000, None),
                (small, 1 * MIB + 99_999, 1000, InvalidArgument),  # over the end of the one before
                (small, 1 * MIB + 100_000, 1000, None),
            )
            chunks, offsets, lengths, expected = map(list, zip(*asked, strict=True))
            loaded = await pool.load(chunks, offsets, lengths)
            assert errors_of(loaded) == expected
            assert [bool(length) for length in loaded.lengths] == [error is None for error in expected]
            assert pool.at(MIB, 101_000) == payload_of(100_000) + payload_of(1000)
            assert pool.at(POOL - 999, 999) == BLANK * 999

    on_a_socket(kind, body)


def test_requests_that_make_no_sense_are_refused(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        async with pool_of(engine) as pool:
            (chunk,) = await pool.store(payload_of(1000))
            for request in (
                m.LoadSlots(pool.number, [chunk], []),
                m.LoadSlots(pool.number, [chunk], [0], [1000, 1000]),
                m.LoadSlots(pool.number, [b"no id"], [0]),
            ):
                await refused(engine.client, InvalidArgument, request)
            await refused(engine.client, SessionLost, m.LoadSlots(pool.number + 1, [chunk], [0]))
            many = m.LoadSlots(pool.number, [chunk] * (BATCH_MAX + 1), [0] * (BATCH_MAX + 1))
            await refused(engine.client, RequestTooLarge, many)
            reading = await lent(engine.client, pool.descriptor)
            await refused(engine.client, InvalidArgument, m.LoadSlots(reading, [chunk], [0]))
            async with engine.connect() as other:
                if other is not engine.client:
                    await refused(other, SessionLost, m.LoadSlots(pool.number, [chunk], [0]))

    on_a_socket(kind, body)


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "cold"])
def test_memory_that_shrank_fails_its_slots_and_harms_nobody(
    kind: Kind, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cached:
        monkeypatch.setattr(slot_reader, "_may_be_cached", lambda *_: False)

    async def body(engine: Engine) -> None:
        async with pool_of(engine) as pool:
            chunks = await pool.store(payload_of(MIB), payload_of(MIB + 5), payload_of(70_000), payload_of(9))
            os.ftruncate(pool.descriptor, 2 * MIB)
            loaded = await pool.load(chunks, [0, 2 * MIB, 2 * MIB - 4096, 5 * MIB])
            assert errors_of(loaded) == [None, InvalidArgument, SourceChanged, SourceChanged]
            loaded = await pool.load(chunks, [0, 2 * MIB - 4096, 5 * MIB, 6 * MIB])
            assert errors_of(loaded) == [None, SourceChanged, SourceChanged, SourceChanged]
            assert os.fstat(pool.descriptor).st_size == 2 * MIB, "the engine made it no longer"
            assert pool.at(0, MIB) == payload_of(MIB)
            assert await read(engine.client, chunks[1]) == payload_of(MIB + 5)

    on_a_socket(kind, body)


def test_memory_that_shrinks_and_grows_under_load_harms_nobody(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        async with pool_of(engine) as pool:
            chunks = await pool.store(*(payload_of(300_000, seed) for seed in range(16)))
            places = [index * 400_000 for index in range(16)]
            outcomes: set[type[LakeError] | None] = set()

            async def hammer() -> None:
                for _ in range(12):
                    loaded = await pool.load(chunks, places)
                    outcomes.update(errors_of(loaded) or [None])

            async with trio.open_nursery() as nursery:
                nursery.start_soon(hammer)
                nursery.start_soon(hammer)
                for _ in range(60):
                    for size in (0, 3 * MIB + 7, POOL):
                        await trio.to_thread.run_sync(os.ftruncate, pool.descriptor, size)
            assert outcomes <= {None, SourceChanged}
            os.ftruncate(pool.descriptor, POOL)
            loaded = await pool.load(chunks, places)
            assert loaded.lengths == [300_000] * 16
            for seed, place in enumerate(places):
                assert pool.at(place, 300_000) == payload_of(300_000, seed)

    on_a_socket(kind, body)


# --- chunks that change under a load -------------------------------------------------------------------


def before_reads(monkeypatch: pytest.MonkeyPatch, *steps: object) -> None:
    """Run one of the steps between the look at the records and each of the first reads."""
    waiting = list(steps)
    original = SlotReader.read

    async def read_later(reader: SlotReader, wanted: Sequence[SlotLoad]) -> None:
        if waiting:
            step = waiting.pop(0)
            assert callable(step)
            await step()
        await original(reader, wanted)

    monkeypatch.setattr(SlotReader, "read", read_later)
    monkeypatch.setattr(SlotReader, "read_cached", lambda *_, **__: False)


async def move(store: Store, chunk: bytes) -> None:
    """Store the chunk at another place, and give the old one back, as compaction does."""
    before = records(store)[ChunkId(chunk)]
    payload = await store.segments.reader.read_chunk(before)
    area = memoryview(mmap.mmap(-1, large_extent_bytes(len(payload))))
    area[: len(payload)] = payload
    assert seal_payload(area, len(payload), vector_of(payload)) == before.crc
    (place,) = await store.segments.large.write([(area, len(payload))])
    await store.segments.large.sync({place.segment})
    after = msgspec.structs.replace(before, segment=place.segment, offset=place.offset)
    await tamper(store, lambda txn: txn.put(Table.CHUNKS, chunk_key(ChunkId(chunk)), after.pack()))
    store.segments.in_flight.settle(place)
    await store.segments.room.punch([(before.segment, before.offset, before.extent_bytes)])


def test_a_chunk_that_moves_while_it_is_read_is_loaded_from_its_new_place(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(engine: Engine) -> None:
        if engine.store is None:
            return
        store = engine.store
        async with pool_of(engine) as pool:
            moved, still = await pool.store(payload_of(MIB), payload_of(64 * KIB))

            async def step() -> None:
                await move(store, moved)

            before_reads(monkeypatch, step)
            for checksums in (True, False):
                loaded = await pool.load([moved, still], [0, 2 * MIB], checksums=checksums)
                assert loaded.lengths == [MIB, 64 * KIB]
                assert pool.at(0, MIB) == payload_of(MIB)

    on_a_socket(kind, body)


def test_a_chunk_that_moves_each_time_is_a_stale_grant(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: Engine) -> None:
        if engine.store is None:
            return
        store = engine.store
        async with pool_of(engine) as pool:
            (chunk,) = await pool.store(payload_of(MIB))

            async def step() -> None:
                await move(store, chunk)

            before_reads(monkeypatch, *([step] * loads.LOAD_ATTEMPTS))
            assert errors_of(await pool.load([chunk], [0])) == [StaleGrant]
            assert (await pool.load([chunk], [0])).lengths == [MIB]

    on_a_socket(kind, body)


@pytest.mark.parametrize("checksums", [True, False])
def test_a_chunk_that_is_freed_while_it_is_read_is_not_found(
    kind: Kind, checksums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind.need_segments()

    async def body(engine: Engine) -> None:
        async with pool_of(engine) as pool:
            chunks = await pool.store(payload_of(MIB), payload_of(1000))

            async def step() -> None:
                await ask(engine.client, m.SessionEnd(pool.session), m.Done)
                assert (await gc(engine.client))["freed_chunks"] == 2

            before_reads(monkeypatch, step)
            loaded = await pool.load(chunks, [0, 2 * MIB], checksums=checksums)
            assert errors_of(loaded) == [ChunkNotFound, ChunkNotFound]
            assert loaded.lengths == [0, 0]

    on_a_socket(kind, body)


def test_a_chunk_whose_checksums_do_not_hold_is_damaged_and_noted(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        if engine.store is None:
            return
        async with pool_of(engine) as pool:
            bad, good = await pool.store(payload_of(MIB), payload_of(64 * KIB))
            record = records(engine.store)[ChunkId(bad)]
            path = engine.folder / "store" / "segments" / f"{record.segment:016x}.large"
            with path.open("r+b") as file:
                file.seek(record.offset + record.stored_bytes)
                file.write(b"\xff\xff")
            for _ in range(2):
                loaded = await pool.load([bad, good], [0, 2 * MIB])
                assert errors_of(loaded) == [ChunkDamaged, None]
            assert engine.store.chunks.is_quarantined(ChunkId(bad))

    on_a_socket(kind, body)


@pytest.mark.parametrize("checksums", [True, False])
def test_a_chunk_that_is_known_to_be_damaged_is_never_told_to_be_loaded(kind: Kind, checksums: bool) -> None:
    async def body(engine: Engine) -> None:
        if engine.store is None:
            return
        async with pool_of(engine) as pool:
            bad, good = await pool.store(payload_of(64 * KIB), payload_of(1000))
            record = records(engine.store)[ChunkId(bad)]
            path = engine.folder / "store" / "segments" / f"{record.segment:016x}.large"
            with path.open("r+b") as file:
                file.seek(record.offset + 10)
                file.write(b"rot")
            with pytest.raises(ChunkDamaged):
                await read(engine.client, bad)
            assert engine.store.chunks.is_quarantined(ChunkId(bad))
            loaded = await pool.load([bad, good], [0, MIB], checksums=checksums)
            assert errors_of(loaded) == [ChunkDamaged, None]
            assert loaded.lengths == [0, 1000]

    on_a_socket(kind, body)


def test_a_load_that_is_cancelled_writes_nothing_more_once_it_is_answered(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(engine: Engine) -> None:
        async with pool_of(engine) as pool:
            chunks = await pool.store(payload_of(MIB), payload_of(MIB, 1))
            scope = trio.CancelScope()

            async def step() -> None:
                scope.cancel()

            before_reads(monkeypatch, step)
            with scope:
                await pool.load(chunks, [0, 2 * MIB])
            number = pool.number
            await ask(engine.client, m.ReturnMemory(number), m.Done)
            seen = pool.at(0, POOL)
            assert pool.at(0, POOL) == seen
            assert seen[:MIB] in (BLANK * MIB, payload_of(MIB))

    on_a_socket(kind, body)


def test_without_a_descriptor_for_last_pages_the_engine_is_busy_and_goes_on(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_reader, "_may_be_cached", lambda *_: False)

    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def body(engine: Engine) -> None:
        if engine.store is None:
            return
        async with pool_of(engine) as pool:
            chunks = await pool.store(payload_of(300_000))
            assert (await pool.load(chunks, [0])).lengths == [300_000]
            with monkeypatch.context() as patched:
                patched.setattr(mmap, "mmap", none_left)
                await refused(engine.client, EngineBusy, m.LoadSlots(pool.number, chunks, [0]))
            gc_collect()  # the traceback of the expected error refers to the pool
            assert (await pool.load(chunks, [4096])).lengths == [300_000]
            assert pool.at(4096, 300_000) == payload_of(300_000)

    on_a_socket(kind, body)
