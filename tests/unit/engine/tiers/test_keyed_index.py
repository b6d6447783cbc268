"""The keyed index's owner: filled after start-up, right after every durable group, and never ahead of one."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final
from unittest import mock

import pytest
import trio

from engine.format.keyed import value_key
from engine.format.layouts import Mutation, Table
from engine.keyed.values import Values
from engine.process.embedded import EmbeddedEngine
from engine.process.shared_index_life import run_keyed_index, run_shared_index
from engine.store.store import Store
from engine.tables.views import Transaction
from engine.tiers.keyed_index import KEYED_WATCHED, KeyedIndex
from lakefs.errors import ChunkDamaged
from lakefs.ids import data_chunk_id
from lakefs.shared_index.key_format import (
    DOUBTFUL,
    KEYED_MAGIC,
    PLACED,
    SOME_EXPIRE,
    UNPLACED,
    id_of_record,
    id_of_space,
)
from lakefs.shared_index.table import SharedIndexReader
from lakefs.shared_index.table_format import Found, table_bytes
from lakefs.wire import messages as m
from tests.keyed_index_check import check_keyed_index
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimDisk
from tests.store_rig import ask, client_of, gc, put, records, run, simulated_store

SECOND: Final = 10**9


@pytest.fixture(autouse=True)
def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin with small tables, which a check goes through in a moment."""
    monkeypatch.setattr("engine.process.shared_index_life.KEYED_INDEX_ENTRIES_MIN", 800)


@asynccontextmanager
async def keyed_store(
    disk: SimDisk | None = None, *, clock: SimClock | None = None
) -> AsyncIterator[tuple[Store, KeyedIndex, EmbeddedEngine]]:
    """Start a store with both indexes, whose filling has begun."""
    async with simulated_store(disk, clock=clock) as store, trio.open_nursery() as nursery:
        await nursery.start(run_shared_index, store, "memory", 5_000)
        await nursery.start(run_keyed_index, store)
        assert store.keyed_index is not None
        yield store, store.keyed_index, client_of(store)
        nursery.cancel_scope.cancel()


async def filled(index: KeyedIndex) -> None:
    while index.state == "filling":  # noqa: ASYNC110 (time is simulated)
        await trio.sleep(0.01)


async def space_of(client: EmbeddedEngine, name: str = "space", ttl_s: int | None = None) -> int:
    return (await ask(client, m.SpaceOpen(name, ttl_s=ttl_s), m.SpaceStat)).number


async def put_values(client: EmbeddedEngine, space: int, values: Mapping[bytes, Sequence[bytes]]) -> None:
    parts = [part for value in values.values() for part in value]
    counts = [len(value) for value in values.values()]
    request = m.KeyedPut(space, list(values), counts, [len(part) for part in parts])
    answer = await ask(client, request, m.KeyedOutcomes, *parts)
    assert not answer.failures


def entry_of(index: KeyedIndex, space: int, key: bytes) -> Found | None:
    return index.table.find(id_of_record(value_key(space, key)))


def test_a_value_has_an_entry_when_its_group_is_durable_and_not_before() -> None:
    async def main() -> None:
        async with keyed_store() as (store, index, client):
            await filled(index)
            space = await space_of(client)
            before: list[int] = []

            def observe(mutations: list[Mutation]) -> None:
                before.append(index.table.count)
                index.records_durable(mutations)

            store.metadata.off_durable_records(index.records_durable)
            store.metadata.on_durable_records(KEYED_WATCHED, observe)
            await put_values(client, space, {b"a": [b"first"]})
            await put_values(client, space, {b"b": [b"second" * 20_000]})
            assert before == [1, 2]
            assert index.table.count == 3
            for key, payload in ((b"a", b"first"), (b"b", b"second" * 20_000)):
                record = records(store)[data_chunk_id(payload)]
                place = (PLACED, record.segment, record.offset, record.stored_bytes, record.crc)
                assert entry_of(index, space, key) == place
            assert check_keyed_index(store, after_moves=False)

    run(main)


def test_a_store_that_was_there_before_is_walked_behind_the_start() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk) as store:
            client = client_of(store)
            space, gone = await space_of(client), await space_of(client, "gone")
            for number in range(0, 700, 50):
                values = {b"%06d" % at: [b"value %d" % at] for at in range(number, number + 50)}
                await put_values(client, space, values)
            await put_values(client, gone, {b"k": [b"of a space that goes"]})
        async with keyed_store(disk) as (store, index, client):
            assert index.state == "filling"
            assert index.table.count < 700
            await put_values(client, space, {b"beside": [b"put beside the walk"], b"parts": [b"one", b"two"]})
            await ask(client, m.KeyedRemove(space, [b"000001", b"000650"]), m.KeyedOutcomes)
            await ask(client, m.SpaceRemove("gone"), m.Done)
            new = await space_of(client, "new")
            await put_values(client, new, {b"k": [b"put in a space that is new"]})
            await filled(index)
            assert index.state == "ready"
            assert check_keyed_index(store, after_moves=False)
            assert index.table.count == 700 + 1 + 1 + 2, "values, those of the gone and the new space, and two spaces"
            assert entry_of(index, space, b"parts") == (UNPLACED, 0, 0, len(b"onetwo"), 0)

    run(main)


def test_the_entry_of_a_removed_value_is_gone_before_its_place_is_punched(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with keyed_store() as (store, index, client):
            space = await space_of(client)
            await put_values(client, space, {b"stays": [b"stays"], b"goes": [b"goes" * 30_000]})
            await filled(index)
            punch = store.segments.room.punch
            seen: list[Found | None] = []

            async def looked_at(extents: list[object]) -> None:
                seen.append(entry_of(index, space, b"goes"))
                await punch(extents)  # type: ignore[arg-type]

            monkeypatch.setattr(store.segments.room, "punch", looked_at)
            await ask(client, m.KeyedRemove(space, [b"goes"]), m.KeyedOutcomes)
            assert entry_of(index, space, b"goes") is None
            await gc(client)
            assert seen == [None]
            assert check_keyed_index(store)

    run(main)


def test_a_removed_space_has_no_entry_although_its_values_are_removed_later() -> None:
    async def main() -> None:
        async with keyed_store() as (store, index, client):
            await filled(index)
            space = await space_of(client)
            await put_values(client, space, {b"%d" % number: [b"value %d" % number] for number in range(5)})
            await ask(client, m.SpaceRemove("space"), m.Done)
            assert index.table.count == 5
            assert check_keyed_index(store)
            again = await space_of(client)
            assert again != space
            assert entry_of(index, again, b"1") is None
            assert check_keyed_index(store)
            await store.keyed_upkeep.round()
            await ask(client, m.Sync(), m.Done)
            assert index.table.count == 1
            assert check_keyed_index(store)

    run(main)


def test_a_moved_value_is_found_at_its_new_place_once_somebody_has_asked() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk) as store:
            client = client_of(store)
            space = await space_of(client)
            keys = [b"%d" % number for number in range(40)]
            for number, key in enumerate(keys):
                await put_values(client, space, {key: [b"%05d" % number * 6_000]})
            await ask(client, m.KeyedRemove(space, [key for n, key in enumerate(keys) if n % 3]), m.KeyedOutcomes)
        async with keyed_store(disk) as (store, index, client):
            await filled(index)
            assert check_keyed_index(store, after_moves=False)
            done = await store.collect(0.97)
            assert done.compaction.moved_chunks > 0
            assert check_keyed_index(store)
            with pytest.raises(AssertionError, match="was moved"):
                check_keyed_index(store, after_moves=False)
            await ask(client, m.KeyedMatch(space, keys), m.KeyedMatched)
            assert index.corrected > 0
            assert check_keyed_index(store, after_moves=False)
            corrected = index.corrected
            await ask(client, m.KeyedMatch(space, keys), m.KeyedMatched)
            assert index.corrected == corrected, "right entries are left alone"

    run(main)


@pytest.mark.parametrize("presence", [False, True])
def test_an_expired_or_damaged_value_is_doubtful_once_somebody_has_asked(presence: bool) -> None:
    async def main() -> None:
        clock = SimClock()
        async with keyed_store(clock=clock) as (store, index, client):
            await filled(index)
            space = await space_of(client, ttl_s=60)
            await put_values(client, space, {b"expires": [b"soon"]})
            await space_of(client, ttl_s=0)
            await put_values(client, space, {b"rots": [b"rotten"]})
            chunk = data_chunk_id(b"rotten")
            await store.quarantine.note(chunk, records(store)[chunk], ChunkDamaged("rot"))
            clock.jump_wall(61 * SECOND)
            for key in (b"expires", b"rots"):
                entry = entry_of(index, space, key)
                assert entry is not None
                assert entry[0] == PLACED
            asked = m.KeyedMatch(space, [b"expires", b"rots", b"none"], presence=presence)
            matched = await ask(client, asked, m.KeyedMatched)
            assert matched.counts == [0, 0, 0]
            for key in (b"expires", b"rots"):
                assert entry_of(index, space, key) == (DOUBTFUL, 0, 0, 0, 0)
            assert entry_of(index, space, b"none") is None
            await put_values(client, space, {b"expires": [b"later"], b"rots": [b"sound"]})
            assert check_keyed_index(store, after_moves=False)
            assert entry_of(index, space, b"rots") != (DOUBTFUL, 0, 0, 0, 0)

    run(main)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_presence_is_looked_up_in_the_index_alone_while_nothing_is_damaged(is_damaged: bool) -> None:
    async def main() -> None:
        async with keyed_store() as (store, index, client):
            await filled(index)
            space = await space_of(client)
            await put_values(client, space, {b"here": [b"value"], b"rots": [b"rotten"]})
            if is_damaged:
                chunk = data_chunk_id(b"rotten")
                await store.quarantine.note(chunk, records(store)[chunk], ChunkDamaged("rot"))
            asked = m.KeyedMatch(space, [b"here", b"rots", b"none"], presence=True, sizes=[5, 6, 0])
            with mock.patch.object(Values, "find", autospec=True, side_effect=Values.find) as found:
                assert (await ask(client, asked, m.KeyedMatched)).counts == [1, int(not is_damaged), 0]
            assert found.called == is_damaged

    run(main)


def test_a_space_says_that_values_expire_from_the_first_that_does_until_the_table_is_filled_anew() -> None:
    def flag(index: KeyedIndex, space: int) -> int:
        entry = index.table.find(id_of_space(space))
        assert entry is not None
        return entry[3]

    async def main() -> None:
        disk = SimDisk()
        async with keyed_store(disk) as (store, index, client):
            await filled(index)
            space, other = await space_of(client, ttl_s=60), await space_of(client, "other")
            assert (flag(index, space), flag(index, other)) == (0, 0)
            await put_values(client, space, {b"expires": [b"soon"]})
            await put_values(client, other, {b"stays": [b"for ever"]})
            assert (flag(index, space), flag(index, other)) == (SOME_EXPIRE, 0)
            await space_of(client, ttl_s=0)
            assert flag(index, space) == SOME_EXPIRE
            assert check_keyed_index(store)
        async with keyed_store(disk) as (store, index, client):
            await filled(index)
            assert (flag(index, space), flag(index, other)) == (SOME_EXPIRE, 0)
            await ask(client, m.KeyedRemove(space, [b"expires"]), m.KeyedOutcomes)
            assert flag(index, space) == SOME_EXPIRE
        async with keyed_store(disk) as (store, index, client):
            await filled(index)
            assert (flag(index, space), flag(index, other)) == (0, 0)
            assert check_keyed_index(store)

    run(main)


def test_what_is_visible_and_not_durable_is_not_entered_by_a_request() -> None:
    async def main() -> None:
        async with keyed_store() as (store, index, client):
            await filled(index)
            space = await space_of(client)
            await put_values(client, space, {b"k": [b"old"]})
            old = entry_of(index, space, b"k")

            def replace(txn: Transaction) -> None:
                place = value_key(space, b"k")
                value = txn.get(Table.KEYED, place)
                assert value is not None
                txn.put(Table.KEYED, place, value[:8] + b"\1" + value[9:])

            await store.metadata.commit(replace, durable=False)
            index.correct(space, [(b"k", [])])
            assert entry_of(index, space, b"k") == old
            assert index.corrected == 0

    run(main)


def test_a_full_table_is_replaced_and_its_readers_are_told() -> None:
    async def main() -> None:
        async with keyed_store() as (store, index, client):
            await filled(index)
            assert index.backing.descriptor is not None
            reader = SharedIndexReader(index.backing.descriptor, KEYED_MAGIC)
            space = await space_of(client)
            for number in range(0, 1000, 100):
                await put_values(client, space, {b"%d" % at: [b"value %d" % at] for at in range(number, number + 100)})
                assert check_keyed_index(store, after_moves=False)
            await trio.sleep(1)
            assert (index.counts.grown, index.state) == (1, "ready")
            assert not reader.is_current
            index.counts.refused = 0
            assert check_keyed_index(store, after_moves=False)
            assert index.table.count == 1001

    run(main)


def test_memory_that_allows_no_larger_table_leaves_its_spaces_partial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.tiers.owned_table.memory_bytes", lambda: 16 * table_bytes(1024))

    async def main() -> None:
        async with keyed_store() as (store, index, client):
            await filled(index)
            space, other = await space_of(client), await space_of(client, "other")
            await put_values(client, space, {b"%d" % at: [b"value %d" % at] for at in range(900)})
            await trio.sleep(1)
            assert (index.counts.grown, index.state) == (0, "full")
            assert check_keyed_index(store)
            assert index.statistics()["refused"] >= 80
            await ask(client, m.KeyedRemove(space, [b"%d" % at for at in range(0, 900, 2)]), m.KeyedOutcomes)
            await put_values(client, other, {b"k": [b"has room now"]})
            assert check_keyed_index(store)

    run(main)


def test_short_memory_means_no_keyed_index_and_everything_goes_on() -> None:
    async def main() -> None:
        with mock.patch("engine.process.shared_index_life.open_backing", side_effect=ChunkDamaged("planted")):
            async with simulated_store() as store, trio.open_nursery() as nursery:
                await nursery.start(run_shared_index, store, "memory", 100)
                await nursery.start(run_keyed_index, store)
                assert store.keyed_index is None
                await put(client_of(store), "k", b"payload")
                nursery.cancel_scope.cancel()

    run(main)


# --- whatever happens ------------------------------------------------------------------------------------


async def _everything(rng: random.Random) -> None:
    """Do all that changes keys and places, in any order, and check the table after each step."""
    clock = SimClock()
    async with keyed_store(clock=clock) as (store, _, client):
        for _ in range(60):
            name = rng.choice(("one", "two"))
            space = await space_of(client, name, ttl_s=rng.choice((0, 0, 20)))
            keys = [b"%s %d" % (rng.choice((b"k", b"key of more bytes")), rng.randrange(12)) for _ in range(3)]
            kind = rng.randrange(10)
            if kind < 4:
                sizes = (5, 70_000, 3_000)
                values = {
                    key: [b"%s %d " % (key, rng.randrange(3)) * rng.choice(sizes) for _ in range(rng.choice((1, 1, 2)))]
                    for key in keys
                }
                await put_values(client, space, {key: [p[:100_000] for p in value] for key, value in values.items()})
            elif kind < 6:
                await ask(client, m.KeyedRemove(space, keys), m.KeyedOutcomes)
            elif kind == 6:
                await ask(client, m.KeyedMatch(space, keys), m.KeyedMatched)
            elif kind == 7:
                await store.collect(0.97)
            elif kind == 8:
                clock.jump_wall(rng.choice((1, 15, 40)) * SECOND)
                await store.keyed_upkeep.round()
            elif rng.random() < 0.3:
                await ask(client, m.SpaceRemove(name), m.Done)
            else:
                chunks = list(records(store))
                if chunks:
                    chunk = rng.choice(chunks)
                    await store.quarantine.note(chunk, records(store)[chunk], ChunkDamaged("rot"))
            await ask(client, m.Sync(), m.Done)
            assert check_keyed_index(store)


@pytest.mark.parametrize("seed", range(12))
def test_after_every_step_the_table_says_what_is_durable(seed: int) -> None:
    run(lambda: _everything(random.Random(seed)))


def _removals_stay(index_class: type[KeyedIndex]) -> Callable[..., None]:
    original = index_class.records_durable

    def records_durable(self: KeyedIndex, mutations: list[Mutation]) -> None:
        original(self, [mutation for mutation in mutations if mutation[3] or mutation[2][:1] != b"\2"])

    return records_durable


def _spaces_stay(self: KeyedIndex, number: int, record: bytes | None) -> None:
    if record is not None and self._spaces is not None and number not in self._spaces:
        self._spaces[number] = True
        self._enter_space(number, 18)


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("records_durable", _removals_stay(KeyedIndex)),
        ("_space_durable", _spaces_stay),
        ("_note_expiry", lambda self, key, value: None),
    ],
    ids=["an entry stays after the removal", "a removed space stays", "it is not told that values expire"],
)
def test_a_planted_bug_is_noticed(name: str, planted: Callable[..., None]) -> None:
    for seed in range(12):
        try:
            with mock.patch.object(KeyedIndex, name, planted):
                run(lambda seed=seed: _everything(random.Random(seed)))  # type: ignore[misc]
        except (AssertionError, BaseExceptionGroup):
            return
    pytest.fail("not noticed")
