"""Loads of short chunks whose places a shared index knows; on every kind of client that can lend memory."""

from __future__ import annotations

import os
from typing import Any

import pytest

from engine.chunks.chunk_store import find_chunk
from engine.format.checksums import vector_of
from engine.format.layouts import ChunkRecord
from engine.requests import load_ranges as loads
from engine.segments.lent_reader import SlotReader
from engine.store.store import Store
from engine.tables.views import View
from lakefs.errors import InvalidArgument, SourceChanged
from lakefs.ids import ChunkId
from lakefs.limits import KIB, MIB
from lakefs.shared_index.table_format import Found
from lakefs.wire import messages as m
from tests.contract.engines import Engine, Kind
from tests.contract.test_requests_loads import BLANK, POOL, errors_of, payload_of, pool_of
from tests.contract.test_requests_memory import on_a_socket
from tests.store_rig import records


class DramEntries:
    """A shared index that knows every chunk."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.asked = 0

    def find_many(self, chunks: list[ChunkId]) -> list[Found | None]:
        self.asked += 1
        known = records(self._store)
        found = [known.get(chunk) for chunk in chunks]
        return [None if r is None else (1, r.segment, r.offset, r.stored_bytes, r.crc) for r in found]

    def statistics(self) -> dict[str, int]:
        return {}


@pytest.mark.parametrize("checksums", [True, False])
def test_what_a_shared_index_knows_is_loaded_from_there(
    kind: Kind, checksums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    payloads = [payload_of(size, seed) for seed, size in enumerate((64 * KIB, 64 * KIB, 1000, 50_000))]

    async def body(engine: Engine) -> None:
        if engine.store is None:
            return
        shared = DramEntries(engine.store)
        monkeypatch.setattr(engine.store, "shared_index", shared)
        async with pool_of(engine) as pool:
            chunks = await pool.store(*payloads)
            places = [0, 64 * KIB, 999_999, 600_001]
            looked_up: list[object] = []
            for attempt in range(3):
                if attempt == 2:  # the files are open by now
                    monkeypatch.setattr(loads, "find_chunk", lambda *found: looked_up.append(found))
                os.pwrite(pool.descriptor, BLANK * POOL, 0)
                loaded = await pool.load(chunks, places, [64 * KIB] * 4, checksums=checksums)
                crcs = [vector_of(payload) for payload in payloads] if checksums else []
                assert loaded == m.SlotsLoaded([len(payload) for payload in payloads], crcs)
                for place, payload in zip(places, payloads, strict=True):
                    assert pool.at(place, len(payload) + 1) == payload + (payloads[1][:1] if place == 0 else BLANK)
            assert (shared.asked, looked_up) == (3, [])
            monkeypatch.setattr(loads, "find_chunk", find_chunk)
            for offsets, rooms, error in (
                ([0, 100, 999_999, 600_001], [], InvalidArgument),
                (places, [64 * KIB, 1, 64 * KIB, 64 * KIB], InvalidArgument),
                ([0, POOL - 1, 999_999, 600_001], [], InvalidArgument),
                ([0, -1, 999_999, 600_001], [], InvalidArgument),
            ):
                assert errors_of(await pool.load(chunks, offsets, rooms)) == [None, error, None, None]
            os.ftruncate(pool.descriptor, 70_000)
            loaded = await pool.load(chunks, places)
            assert errors_of(loaded) == [None, SourceChanged, SourceChanged, SourceChanged]

    on_a_socket(kind, body)


def test_a_place_that_was_given_back_under_way_is_not_taken_from_the_shared_index(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(engine: Engine) -> None:
        if engine.store is None:
            return
        store = engine.store
        monkeypatch.setattr(store, "shared_index", DramEntries(store))
        async with pool_of(engine) as pool:
            chunks = await pool.store(payload_of(64 * KIB), payload_of(64 * KIB, 1))
            await pool.load(chunks, [0, MIB])
            original = SlotReader.read_cached_run

            def read_later(*arguments: Any, **named: Any) -> bool:
                store.segments.room.punch_count += 1
                return original(*arguments, **named)

            monkeypatch.setattr(SlotReader, "read_cached_run", read_later)
            looked_up: list[bytes] = []

            def look(view: View, chunk: ChunkId) -> ChunkRecord | None:
                looked_up.append(chunk)
                return find_chunk(view, chunk)

            monkeypatch.setattr(loads, "find_chunk", look)
            assert (await pool.load(chunks, [0, MIB])).lengths == [64 * KIB] * 2
            assert looked_up[:2] == chunks

    on_a_socket(kind, body)


def test_more_neighbours_than_one_read_may_have_pieces_are_loaded_by_more_of_them(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = loads.RUN_CHUNKS_MAX + 100
    payloads = [b"%05d" % number for number in range(count)]

    async def body(engine: Engine) -> None:
        if engine.store is None:
            return
        async with pool_of(engine) as pool:
            chunks = await pool.store(*payloads)
            places = range(0, 8 * count, 8)
            await pool.load(chunks[:1], [0])
            monkeypatch.setattr(engine.store, "shared_index", DramEntries(engine.store))
            lengths_of_reads: list[int] = []
            original = SlotReader.read_cached_run

            def read(*arguments: Any, **named: Any) -> bool:
                lengths_of_reads.append(len(arguments[3]))
                return original(*arguments, **named)

            monkeypatch.setattr(SlotReader, "read_cached_run", read)
            loaded = await pool.load(chunks, places, checksums=False)
            assert loaded == m.SlotsLoaded([5] * count, [])
            assert pool.at(0, 8 * count) == b"".join(payload + BLANK * 3 for payload in payloads)
            assert sum(lengths_of_reads) == count
            assert max(lengths_of_reads) == loads.RUN_CHUNKS_MAX

    on_a_socket(kind, body)
