"""Upkeep of keyed blobs: eviction to quotas, expiry in time, purging of removed spaces; usage stays exact."""

from __future__ import annotations

import random
from dataclasses import replace as replace_sizes
from typing import Any

import pytest
import trio
from msgspec.structs import replace

from engine.format.keyed import SPACES_BEGIN, VALUES_END, expiry_key, space_key, unpack_value, value_key, values_range
from engine.format.layouts import Table
from engine.format.sizes import MetadataSizes
from engine.keyed import spaces as spaces_module
from engine.keyed.spaces import EVICT_ABOVE, KEYED_PART_CHARGE, find_space
from engine.metadata.pacing import Pacing
from engine.store.store import Store
from engine.tables.merged_tables import TableView
from engine.tables.views import Transaction
from lakefs.ids import Sequence
from lakefs.limits import CHUNK_BYTES, KEYED_QUOTA_BYTES_MIN, KEYED_ROOM_WAIT_S, MIB
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.contract.test_requests_keyed import put_keys, space_of, stat_of, value_of
from tests.sim.world.clock import SimClock
from tests.store_rig import SMALL_SIZES, ask, client_of, fsck, gc, run, session_of, simulated_store, store_chunks

QUOTA = KEYED_QUOTA_BYTES_MIN
VALUES = QUOTA // CHUNK_BYTES  # of a chunk each, one more than fit
NS = 10**9


def key_of(index: int) -> bytes:
    """Return a key as clients have them: a hash."""
    return random.Random(index).randbytes(32)


async def commit_keys(
    client: EngineClient, session: bytes, space: int, chunk: bytes, depths: dict[bytes, int]
) -> m.KeyedOutcomes:
    """Give keys, with their depths, the same chunk as value."""
    count = len(depths)
    request = m.KeyedCommit(session, space, list(depths), [1] * count, [chunk] * count, list(depths.values()))
    return await ask(client, request, m.KeyedOutcomes)


def values_in(store: Store, space: int) -> list[bytes]:
    with store.metadata.view() as view:
        return [key[5:] for key, _ in view.scan(Table.KEYED, *values_range(space))]


def test_a_space_over_its_quota_is_evicted_and_never_holds_more() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client = client_of(store)
            space, session = await space_of(client, quota_bytes=QUOTA), await session_of(client)
            (chunk,) = await store_chunks(client, session, [b"v" * CHUNK_BYTES])
            for index in range(4 * VALUES):
                answer = await commit_keys(client, session, space, chunk, {key_of(index): 0})
                assert answer.outcomes == [m.KEYED_STORED]
                assert (await stat_of(client)).value_bytes <= QUOTA
            await trio.sleep(11)
            stat = await stat_of(client)
            assert 0.75 * QUOTA <= stat.value_bytes <= 0.99 * QUOTA
            assert stat.entries == len(values_in(store, space)) == stat.value_bytes // CHUNK_BYTES
            assert store.keyed.counts.evicted == 4 * VALUES - stat.entries
            assert store.keyed.garbage.is_set()
            report = await fsck(client)
            assert not report["damage"]
            assert not report["notes"]

    run(main)


def test_a_quota_bounds_the_number_of_values_of_a_byte_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spaces_module, "KEYED_PART_CHARGE", MIB)  # so that few are enough

    async def main() -> None:
        async with simulated_store() as store:
            client = client_of(store)
            space = await space_of(client, quota_bytes=QUOTA)
            for index in range(3 * QUOTA // MIB):
                answer = await put_keys(client, space, {key_of(index): [b"%d" % index]})
                assert answer.outcomes == [m.KEYED_STORED]
                assert (await stat_of(client)).entries <= QUOTA // MIB
            await trio.sleep(11)
            assert 0.75 * QUOTA <= (await stat_of(client)).entries * MIB <= 0.99 * QUOTA
            assert store.keyed.garbage.is_set(), "values without many bytes are garbage too"

    run(main)


def test_used_values_stay_and_of_unused_ones_the_deepest_goes_first() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client = client_of(store)
            space, session = await space_of(client, quota_bytes=QUOTA), await session_of(client)
            (chunk,) = await store_chunks(client, session, [b"v" * CHUNK_BYTES])
            keys = [key_of(index) for index in range(VALUES - 1)]
            await commit_keys(client, session, space, chunk, {key: depth for depth, key in enumerate(keys)})
            used = keys[-3:]  # the deepest
            for _ in range(5):
                await ask(client, m.KeyedMatch(space, used), m.KeyedMatched)
            await commit_keys(client, session, space, chunk, {b"one more": 0})
            await trio.sleep(11)
            left = values_in(store, space)
            gone = [key for key in keys if key not in left]
            assert gone
            assert set(used) <= set(left)
            assert gone == [key for key in keys if key not in used][-len(gone) :]

    run(main)


def test_a_value_that_was_used_since_it_was_looked_at_stays_and_one_that_is_gone_is_passed_over() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client = client_of(store)
            space, session = await space_of(client, quota_bytes=QUOTA), await session_of(client)
            (chunk,) = await store_chunks(client, session, [b"v" * CHUNK_BYTES])
            keys = [key_of(index) for index in range(VALUES - 1)]
            await commit_keys(client, session, space, chunk, dict.fromkeys(keys, 5))
            await commit_keys(client, session, space, chunk, {b"deeper": 9})  # all are looked at, one is evicted
            await trio.sleep(11)
            left = [key for key in values_in(store, space) if key in keys]
            removed, used = left[0], left[1:4]
            await ask(client, m.KeyedRemove(space, [removed]), m.KeyedOutcomes)
            for _ in range(3):
                await ask(client, m.KeyedMatch(space, used), m.KeyedMatched)
            for index in range(100, 100 + VALUES - 5):
                await commit_keys(client, session, space, chunk, {key_of(index): 0})
            await trio.sleep(11)
            assert set(used) <= set(values_in(store, space))

    run(main)


def test_a_put_over_the_share_has_eviction_begin_before_one_must_wait() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client = client_of(store)
            space, session = await space_of(client, quota_bytes=QUOTA), await session_of(client)
            small, large = await store_chunks(client, session, [b"v" * (64 << 10), b"w" * CHUNK_BYTES])
            await commit_keys(client, session, space, large, {key_of(index): 0 for index in range(VALUES - 1)})
            await commit_keys(client, session, space, small, {b"%d" % index: 0 for index in range(60)})
            assert (await stat_of(client)).value_bytes > 0.99 * QUOTA
            await commit_keys(client, session, space, small, {b"one more": 0})
            await trio.sleep(1)
            assert (await stat_of(client)).value_bytes <= 0.98 * QUOTA, "not only with the next round"

    run(main)


def test_a_value_of_most_of_the_quota_finds_room_in_a_space_that_has_others() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client = client_of(store)
            space, session = await space_of(client, quota_bytes=QUOTA), await session_of(client)
            (chunk,) = await store_chunks(client, session, [b"v" * CHUNK_BYTES])
            others = VALUES * 3 // 8  # so much room is left that half of the quota would fit
            await commit_keys(client, session, space, chunk, {key_of(index): 0 for index in range(others)})
            parts = VALUES * 3 // 4
            request = m.KeyedCommit(session, space, [b"long"], [parts], [chunk] * parts)
            assert (await ask(client, request, m.KeyedOutcomes)).outcomes == [m.KEYED_STORED]
            stat = await stat_of(client)
            assert parts * CHUNK_BYTES < stat.value_bytes <= QUOTA
            assert b"long" in values_in(store, space)

    run(main)


@pytest.mark.parametrize("in_session", [False, True])
def test_bytes_are_counted_once_while_their_put_becomes_durable(
    monkeypatch: pytest.MonkeyPatch, *, in_session: bool
) -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client, rooms = client_of(store), []
            space, session = await space_of(client, quota_bytes=QUOTA), await session_of(client)
            chunks = await store_chunks(client, session, [b"v" * CHUNK_BYTES])
            wait = store.metadata.wait_durable

            async def look_and_wait(sequence: Sequence) -> None:
                with store.metadata.view() as view:
                    rooms.append(store.keyed.room(space, find_space(view, space)))
                await wait(sequence)

            monkeypatch.setattr(store.metadata, "wait_durable", look_and_wait)
            if in_session:
                await commit_keys(client, session, space, chunks[0], {b"k": 0})
            else:
                await put_keys(client, space, {b"k": [b"w" * CHUNK_BYTES]})
            assert rooms[0] == QUOTA
            assert rooms[-1] == QUOTA - CHUNK_BYTES - KEYED_PART_CHARGE

    run(main)


def test_a_present_key_waits_for_no_room() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client = client_of(store)
            space = await space_of(client, quota_bytes=QUOTA)
            await put_keys(client, space, {b"k": [b"value"]})
            with store.keyed.admitted(space, 2 * QUOTA):
                began = trio.current_time()
                assert (await put_keys(client, space, {b"k": [b"value"]})).outcomes == [m.KEYED_PRESENT]
                assert trio.current_time() - began < KEYED_ROOM_WAIT_S / 2

    run(main)


def test_a_value_is_removed_within_ten_seconds_of_its_time() -> None:
    async def main() -> None:
        clock = SimClock()
        async with simulated_store(clock=clock) as store:
            client = client_of(store)
            space = await space_of(client, ttl_s=30)
            await put_keys(client, space, {bytes([index]) * 8: [b"short lived", bytes([index])] for index in range(60)})
            await space_of(client, ttl_s=0)
            await put_keys(client, space, {b"for ever": [b"long lived"]})
            await trio.sleep(29)
            assert (await stat_of(client)).entries == 61
            await trio.sleep(11)
            stat = await stat_of(client)
            assert (stat.entries, stat.value_bytes) == (1, len(b"long lived"))
            assert values_in(store, space) == [b"for ever"]
            assert not (await fsck(client))["damage"]

    run(main)


def test_a_removed_space_loses_its_values_and_then_its_record() -> None:
    async def main() -> None:
        async with simulated_store(grace_s=0) as store:
            client = client_of(store)
            space = await space_of(client, ttl_s=1000)
            for start in range(0, 600, 100):
                await put_keys(client, space, {b"%d" % index: [b"%d" % index] for index in range(start, start + 100)})
            other = await space_of(client, "other")
            await put_keys(client, other, {b"kept": [b"1"]})
            await ask(client, m.SpaceRemove("space"), m.Done)
            await trio.sleep(11)
            with store.metadata.view() as view:
                left = [key for key, _ in view.scan(Table.KEYED, b"", b"\xff")]
            assert left == [b"\0", b"\x01other", value_key(other, b"kept"), SPACES_BEGIN + other.to_bytes(4, "big")]
            assert (await gc(client))["freed_chunks"] == 599  # the one of b"1" has another value
            assert await value_of(client, other, b"kept") == b"1"
            assert not (await fsck(client))["damage"]

    run(main)


@pytest.mark.parametrize(("entries", "size_bytes"), [(0, 0), (1, 3), (900, 1 << 30)])
def test_a_removed_space_goes_with_all_values_though_its_usage_is_wrong(entries: int, size_bytes: int) -> None:
    async def main() -> None:
        async with simulated_store(grace_s=0) as store:
            client = client_of(store)
            space = await space_of(client, ttl_s=1000)
            await put_keys(client, space, {b"%d" % index: [b"%d" % index] for index in range(100)})

            def spoil(txn: Transaction) -> None:
                record = replace(find_space(txn, space), entries=entries, value_bytes=size_bytes)
                txn.put(Table.KEYED, space_key(space), record.pack())

            await store.metadata.commit(spoil)
            assert (await fsck(client))["damage"] == 1
            await ask(client, m.SpaceRemove("space"), m.Done)
            await trio.sleep(11)
            with store.metadata.view() as view:
                assert {key for key, _ in view.scan(Table.KEYED, b"", b"\xff")} <= {b"\0"}
            assert not (await fsck(client))["damage"]

    run(main)


@pytest.mark.parametrize("over", ["expired", "purged"])
def test_very_many_values_that_are_over_at_once_are_walked_once(monkeypatch: pytest.MonkeyPatch, over: str) -> None:
    count = 6000
    looks = 0
    overlaid = TableView._overlaid

    def counted(*arguments: Any) -> bytes | None:
        nonlocal looks
        looks += 1
        return overlaid(*arguments)

    async def main() -> None:
        clock = SimClock()
        sizes = replace_sizes(SMALL_SIZES, metadata=MetadataSizes())  # the overlay keeps all of it for a while
        async with simulated_store(clock=clock, sizes=sizes) as store:
            client = client_of(store)
            space, session = await space_of(client, ttl_s=1000), await session_of(client)
            (chunk,) = await store_chunks(client, session, [b"value"])
            for start in range(0, count, 2000):
                await commit_keys(client, session, space, chunk, {key_of(start + n): 0 for n in range(2000)})
            monkeypatch.setattr(TableView, "_overlaid", counted)
            if over == "expired":
                clock.jump_wall(1001 * NS)
            else:
                await ask(client, m.SpaceRemove("space"), m.Done)
            await trio.sleep(11)
            assert getattr(store.keyed.counts, over) == count
            assert looks < 10 * count

    run(main)


def test_a_space_with_very_many_values_too_many_holds_up_no_put_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async def rest(self: Pacing, times: float = 0) -> None:
        await trio.sleep(0.01)

    async def main() -> None:
        async with simulated_store() as store:
            monkeypatch.setattr(Pacing, "rest", rest)
            client = client_of(store)
            many, session = await space_of(client, "many"), await session_of(client)
            chunk, small = await store_chunks(client, session, [b"v" * CHUNK_BYTES, b"v" * 60_000])
            for start in range(0, 6000, 2000):
                await commit_keys(client, session, many, small, {key_of(start + n): 0 for n in range(2000)})
            other = await space_of(client, "other", quota_bytes=QUOTA)
            await commit_keys(client, session, other, chunk, {key_of(index): 0 for index in range(VALUES - 1)})
            await space_of(client, "many", quota_bytes=QUOTA)
            store.keyed.round_wanted.set()
            await trio.sleep(0.5)
            assert 0 < store.keyed.counts.evicted < 4000, "it is under way"
            answer = await commit_keys(client, session, other, chunk, dict.fromkeys([b"1", b"2", b"3"], 0))
            assert answer.outcomes == [m.KEYED_STORED] * 3
            assert store.keyed.counts.evicted < 4800, "it is under way still"
            await trio.sleep(60)
            assert (await stat_of(client, "many")).value_bytes <= EVICT_ABOVE * QUOTA

    run(main)


@pytest.mark.parametrize("expire", [False, True])
def test_a_put_that_waits_for_room_does_not_wait_for_long_removals(
    monkeypatch: pytest.MonkeyPatch, *, expire: bool
) -> None:
    async def rest(self: Pacing, times: float = 0) -> None:
        await trio.sleep(0.1)

    async def main() -> None:
        clock = SimClock()
        async with simulated_store(clock=clock) as store:
            monkeypatch.setattr(Pacing, "rest", rest)
            client = client_of(store)
            space, session = await space_of(client, quota_bytes=QUOTA), await session_of(client)
            (chunk,) = await store_chunks(client, session, [b"v" * CHUNK_BYTES])
            await commit_keys(client, session, space, chunk, {key_of(index): 0 for index in range(VALUES)})
            many = await space_of(client, "many", ttl_s=60)
            for start in range(0, 15_000, 1000):
                await put_keys(client, many, {b"%d" % index: [b"x"] for index in range(start, start + 1000)})
            if expire:
                clock.jump_wall(61 * NS)
            else:
                await ask(client, m.SpaceRemove("many"), m.Done)
            store.keyed.round_wanted.set()
            await trio.sleep(1)
            removed = store.keyed.counts.expired + store.keyed.counts.purged
            assert 0 < removed < 15_000
            answer = await commit_keys(client, session, space, chunk, dict.fromkeys([b"1", b"2", b"3"], 0))
            assert answer.outcomes == [m.KEYED_STORED] * 3
            await trio.sleep(20)
            assert store.keyed.counts.expired + store.keyed.counts.purged == 15_000

    run(main)


def test_an_expiry_that_is_not_that_of_its_value_removes_no_value() -> None:
    async def main() -> None:
        clock = SimClock()
        async with simulated_store(clock=clock) as store:
            client = client_of(store)
            space = await space_of(client, ttl_s=1000)
            await put_keys(client, space, {b"k": [b"value"]})
            stray = expiry_key(clock.wall_ns(), space, b"k")
            await store.metadata.commit(lambda txn: txn.put(Table.KEYED, stray, b""))
            await trio.sleep(11)
            assert await value_of(client, space, b"k") == b"value"
            assert not (await fsck(client))["damage"]

    run(main)


def test_who_waits_for_garbage_is_woken_though_a_cycle_of_gc_began_meanwhile() -> None:
    async def main() -> None:
        async with simulated_store(grace_s=0) as store:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.keyed.garbage.wait)
                await trio.sleep(1)
                await store.collect()
                store.keyed.note_evicted(1, QUOTA, 1, QUOTA, QUOTA)
                await trio.sleep(1)
                is_woken = not nursery.child_tasks
                nursery.cancel_scope.cancel()
            assert is_woken
            await store.collect()
            assert not store.keyed.garbage.is_set()

    run(main)


@pytest.mark.parametrize("seconds", [-1000, 1000])
def test_a_clock_that_is_set_loses_no_value_before_its_time(seconds: int) -> None:
    async def main() -> None:
        clock = SimClock()
        async with simulated_store(clock=clock) as store:
            client = client_of(store)
            space = await space_of(client, ttl_s=2000)
            await put_keys(client, space, {b"k": [b"value"]})
            clock.jump_wall(seconds * NS)
            await trio.sleep(20)
            assert await value_of(client, space, b"k") == b"value"

    run(main)


def test_a_plain_value_is_read_back_from_the_table() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client = client_of(store)
            space = await space_of(client)
            await put_keys(client, space, {b"k": [b"a", b"bc"]})
            with store.metadata.view() as view:
                (record,) = (value for _, value in view.scan(Table.KEYED, values_range(space)[0], VALUES_END))
            assert unpack_value(record).lengths == (1, 2)

    run(main)
