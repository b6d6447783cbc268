"""Pins: pinned chunks stay where they are, byte for byte; their room is given back by the next cycle afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final
from unittest import mock

import pytest
from hypothesis import given, strategies as st

from engine.format.extents import Span, owned_spans, page_up, without
from engine.format.layouts import SegmentKind
from engine.process.embedded import EmbeddedEngine
from engine.segments import pins as pins_module
from engine.segments.pins import PinnedPlaces
from engine.store.store import Store
from engine.upkeep.compaction import Compactor
from lakefs.errors import EngineBusy
from lakefs.ids import ChunkId, SegmentId, data_chunk_id
from lakefs.limits import COMPACT_SHARE_MOST, PAGE_BYTES
from lakefs.wire import messages as m
from lakefs.wire.media import MEDIUM_NONE, MEDIUM_SEGMENT
from tests.sim.world.disk import SimDisk
from tests.sim.world.segment_world import lies_at
from tests.store_rig import SMALL_SIZES, ask, change, client_of, delete, fsck, gc, put, read, run, simulated_store
from tests.unit.engine.upkeep.test_compaction import payload

EAGER: Final = replace(SMALL_SIZES, compact_won_bytes=1)
LENGTHS: Final = (3000, 5000, 60_000, 65_536, 150_000)


@asynccontextmanager
async def filled(count: int = 40) -> AsyncIterator[tuple[Store, dict[str, bytes]]]:
    """Make a store whose segments are sealed, with objects of small and large segments."""
    disk = SimDisk()
    contents = {f"k{number}": payload(number, LENGTHS[number % len(LENGTHS)]) for number in range(count)}
    async with simulated_store(disk, sizes=EAGER) as store:
        for key, content in contents.items():
            await put(client_of(store), key, content)
    async with simulated_store(disk, sizes=EAGER) as store:
        yield store, contents


async def pinned(client: EmbeddedEngine, contents: Sequence[bytes]) -> list[m.Grant]:
    return (await ask(client, m.PinChunks([data_chunk_id(c) for c in contents]), m.Pinned)).grants


def lies_there(store: Store, grant: m.Grant) -> bytes:
    """Return the bytes that a mapping of the place shows."""
    return lies_at(store.segments, SegmentId(grant.segment), grant.offset, grant.stored_bytes)


def test_what_is_pinned_stays_though_its_name_goes_and_is_freed_by_the_cycle_after() -> None:
    async def main() -> None:
        async with filled() as (store, contents):
            client, reader = client_of(store), client_of(store)
            kept = list(contents.values())[3:9]
            grants = await pinned(reader, kept)
            assert [grant.medium for grant in grants] == [MEDIUM_SEGMENT] * len(kept)
            await delete(client, *contents)
            report = await gc(client)
            assert report["freed_chunks"] == len(contents)
            assert [lies_there(store, grant) for grant in grants] == kept
            pages = sum(grant.stored_bytes for grant in grants)
            held = await store.segments.room.allocated_bytes()
            assert pages <= held < 3 * pages
            assert (await fsck(client))["damage"] == 0
            await ask(reader, m.UnpinChunks([data_chunk_id(content) for content in kept]), m.Done)
            assert (await gc(client))["removed_segments"] == 2
            assert await store.segments.room.allocated_bytes() == 0
            assert (await store.status())["pins"] == {"chunks": 0, "bytes": 0, "segments": 0}

    run(main)


def test_compaction_leaves_segments_alone_in_which_something_is_pinned() -> None:
    async def main() -> None:
        async with filled() as (store, contents):
            client, reader = client_of(store), client_of(store)
            (kept,) = grants = await pinned(reader, [contents["k0"]])
            stays = {key: contents[key] for key in ("k0", "k5", "k10")}
            await delete(client, *(key for key in contents if key not in stays))
            assert (await store.collect(COMPACT_SHARE_MOST)).compaction.moved_chunks == 0
            assert lies_there(store, kept) == contents["k0"]
            assert await pinned(reader, [contents["k0"]]) == grants
            await reader.aclose()
            assert (await store.collect(COMPACT_SHARE_MOST)).compaction.moved_chunks == 3
            assert SegmentId(kept.segment) not in store.segments.register.kinds
            for content in stays.values():
                assert await read(client, data_chunk_id(content)) == content

    run(main)


@pytest.mark.parametrize("key", ["k0", "k2"])
def test_a_pin_that_comes_while_compaction_moves_the_chunk_keeps_the_old_place(key: str) -> None:
    async def main() -> None:
        async with filled() as (store, contents):
            client, reader = client_of(store), client_of(store)
            await delete(client, *(other for other in contents if other != key))
            taken: list[m.Grant] = []
            original = Compactor._move

            async def move(*args: object) -> int:
                taken.extend(await pinned(reader, [contents[key]]))
                return await original(*args)  # type: ignore[arg-type]

            with mock.patch.object(Compactor, "_move", move):
                report = (await store.collect(COMPACT_SHARE_MOST)).compaction
            assert report.moved_chunks == len(taken) == 1
            assert lies_there(store, taken[0]) == contents[key]
            found = (await ask(client, m.Locate([data_chunk_id(contents[key])]), m.Located)).grants[0]
            assert (found.segment, found.offset) != (taken[0].segment, taken[0].offset)
            assert await pinned(reader, [contents[key]]) == taken
            for _ in range(2):
                await ask(reader, m.UnpinChunks([data_chunk_id(contents[key])]), m.Done)
            await gc(client)
            assert SegmentId(taken[0].segment) not in store.segments.register.kinds
            assert await read(client, data_chunk_id(contents[key])) == contents[key]

    run(main)


def test_pins_are_counted_and_end_with_their_connection() -> None:
    async def main() -> None:
        async with filled(10) as (store, contents):
            client, first, second = client_of(store), client_of(store), client_of(store)
            some = list(contents.values())[:3]
            await pinned(first, [*some, some[0]])
            await pinned(second, some[:1])
            assert store.segments.pins.statistics()["chunks"] == 4
            await ask(first, m.UnpinChunks([data_chunk_id(content) for content in some]), m.Done)
            assert store.segments.pins.statistics()["chunks"] == 2
            await second.aclose()
            assert store.segments.pins.statistics()["chunks"] == 1
            await delete(client, *contents)
            await gc(client)
            assert len(store.segments.register.kinds) == 1
            await first.aclose()
            await gc(client)
            assert sorted(store.segments.register.kinds) == []

    run(main)


def test_a_chunk_that_is_not_there_is_not_pinned() -> None:
    async def main() -> None:
        async with filled(5) as (store, contents):
            reader = client_of(store)
            grants = await pinned(reader, [b"never stored", contents["k1"]])
            assert [grant.medium for grant in grants] == [MEDIUM_NONE, MEDIUM_SEGMENT]
            await ask(reader, m.UnpinChunks([data_chunk_id(b"never stored")] * 2), m.Done)
            assert store.segments.pins.statistics()["chunks"] == 1

    run(main)


@pytest.mark.parametrize("limit", ["PINS_MAX", "PINS_PER_CONNECTION_MAX"])
def test_too_many_pins_are_refused_and_none_of_them_taken(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins_module, limit, 4)

    async def main() -> None:
        async with filled(10) as (store, contents):
            reader = client_of(store)
            all_of_them = list(contents.values())
            await pinned(reader, all_of_them[:3])
            with pytest.raises(EngineBusy, match="pinned"):
                await pinned(reader, all_of_them[2:5])
            assert store.segments.pins.statistics()["chunks"] == 3
            await pinned(reader, [*all_of_them[:3], all_of_them[3], all_of_them[3]])
            assert store.segments.pins.statistics()["chunks"] == 4

    run(main)


def test_a_pin_of_what_is_not_durable_yet_is_answered_when_it_is() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client, reader = client_of(store), client_of(store)
            content = payload(1)
            request = m.PutObjects([len(content)], [change("k")], durable=False)
            await ask(client, request, m.NameResults, content)
            before = store.metadata.durable_sequence
            (grant,) = await pinned(reader, [content])
            assert store.metadata.durable_sequence > before
            assert not store.segments.small.unwritten
            assert lies_there(store, grant) == content

    run(main)


_PAGES = st.sets(st.integers(0, 30))


def _spans(places: set[int]) -> list[Span]:
    return [(place, 1) for place in sorted(places)]


def _runs(places: set[int]) -> list[Span]:
    """Return the same places, neighbours as one span."""
    runs: list[Span] = []
    for place in sorted(places):
        if runs and sum(runs[-1]) == place:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((place, 1))
    return runs


@given(_PAGES, _PAGES, st.booleans(), st.booleans())
def test_what_is_left_of_spans_is_what_no_kept_one_has(
    some: set[int], kept: set[int], some_runs: bool, kept_runs: bool
) -> None:
    left = without((_runs if some_runs else _spans)(some), (_runs if kept_runs else _spans)(kept))
    assert sorted(place for offset, length in left for place in range(offset, offset + length)) == sorted(some - kept)


_PLACES = st.lists(st.tuples(st.integers(0, 3 * PAGE_BYTES), st.integers(1, 3 * PAGE_BYTES)), min_size=1, max_size=20)
"""Room before each place, and its length."""


def _laid_out(places: list[tuple[int, int]], kind: SegmentKind) -> list[Span]:
    """Return places of a segment of that kind, one after the other."""
    laid: list[Span] = []
    end = PAGE_BYTES
    for room, length in places:
        begin = end + room if kind is SegmentKind.SMALL else page_up(end + room)
        laid.append((begin, length))
        end = begin + length
    return laid


@given(
    _PLACES,
    _PLACES,
    st.sampled_from(SegmentKind),
    st.lists(st.tuples(st.integers(0, 19), st.integers(0, 2), st.booleans()), max_size=80),
)
def test_what_a_punch_leaves_is_what_all_pins_sorted_each_time_would_have_it_leave(
    places: list[tuple[int, int]], punched: list[tuple[int, int]], kind: SegmentKind, steps: list[tuple[int, int, bool]]
) -> None:
    laid, spans = _laid_out(places, kind), owned_spans(kind, _laid_out(punched, kind))
    pinned, naive = PinnedPlaces(), dict.fromkeys(range(len(laid)), 0)
    for number, connections, looked_at in steps:
        index = number % len(laid)
        while naive[index] != connections:
            if naive[index] < connections:
                pinned.enter(*laid[index])
                naive[index] += 1
            else:
                pinned.leave(laid[index][0])
                naive[index] -= 1
        all_of_them = [laid[index] for index, count in sorted(naive.items()) if count]
        assert bool(pinned) == bool(all_of_them)
        if looked_at:
            assert pinned.touching([(0, 1 << 40)]) == all_of_them
            found = pinned.touching(spans)
            assert set(found) <= set(all_of_them)
            assert without(spans, owned_spans(kind, found)) == without(spans, owned_spans(kind, all_of_them))


def test_a_punch_looks_at_the_pins_that_it_touches_and_not_at_all_of_them() -> None:
    pinned = PinnedPlaces()
    for number in range(10_000):
        pinned.enter(number * 2 * PAGE_BYTES, 100)
    before = pinned.touching([(0, 1)])
    with mock.patch.object(pins_module, "page_up", wraps=page_up) as looked_at:
        found = pinned.touching([(PAGE_BYTES * 5000, PAGE_BYTES * 4), (PAGE_BYTES * 9001, PAGE_BYTES)])
    assert before == [(0, 100)]
    assert [offset // PAGE_BYTES for offset, _ in found] == [5000, 5002]
    assert looked_at.call_count <= 5


def test_ids_that_are_none_are_refused() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            for request in (m.PinChunks([b"x"]), m.UnpinChunks([ChunkId(b"y")])):
                with pytest.raises(Exception, match="33 bytes"):
                    await ask(client_of(store), request, m.Done)

    run(main)
