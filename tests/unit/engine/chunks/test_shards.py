"""Shards on a member's disk: over crashes and restarts, scrub, compaction, fsck, the engine's own gc, and features."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final
from unittest import mock

import pytest
import trio

from engine.chunks.chunk_store import find_shard
from engine.chunks.ingest import Ingest, Seal
from engine.chunks.payload import Payload, Written
from engine.format.features import Feature
from engine.format.layouts import ChunkRecord, Table, chunk_key
from engine.format.shards import is_whole, partition_of_key, ranges_between, shard_key, shard_of_key, shards_of
from engine.store.store import Store
from engine.superblock import superblock as superblocks
from engine.superblock.superblock import NO_CLUSTER, read_superblock
from engine.tiers.shared_index import WATCHED, SharedIndex
from engine.upkeep.compaction import Compactor
from lakefs.errors import ChunkDamaged, LakeError, PreconditionFailed, StaleEpoch, StoreFull, StoreUnusable
from lakefs.ids import WHOLE_CHUNK, ChunkId, ShardNumber, data_chunk_id, shard_text
from lakefs.limits import COMPACT_SHARE_MOST, KIB, MIB
from lakefs.wire import messages as m
from tests.contract.engines import LAKE
from tests.shards import Shard, chunk_at, collect, listed, offer, read, set_epoch, store
from tests.sim.world.disk import SimCrashed, SimDisk
from tests.store_rig import SMALL_SIZES, ask, client_of, fsck, gc, in_flight, put, run, simulated_store

SIZES: Final = (1, 1000, 64 * KIB - 1, 64 * KIB, 300 * KIB)
EAGER: Final = replace(SMALL_SIZES, compact_won_bytes=1)


def some(count: int, seed: int = 1) -> list[Shard]:
    """Return shards of every kind of place, some of one chunk."""
    rng = random.Random(seed)
    return [
        Shard(chunk_at(index // 2), index % 2, rng.randbytes(SIZES[index % len(SIZES)]), MIB + index // 2)
        for index in range(count)
    ]


def record_of(opened: Store, shard: Shard) -> ChunkRecord:
    with opened.metadata.view() as view:
        record = find_shard(view, *shard.name)
    assert record is not None
    return record


def spoil(opened: Store, shard: Shard, at: int) -> None:
    """Flip a bit of a shard on the medium."""
    record = record_of(opened, shard)
    path = opened.segments.register.path(record.segment)
    file = opened.disk.open(path)
    byte = bytearray(1)
    file.pread_into(memoryview(byte), record.offset + at)
    file.pwrite(bytes([byte[0] ^ 0x10]), record.offset + at)
    file.close()


# --- keys ----------------------------------------------------------------------------------------------------


def test_keys_of_shards_are_neighbours_before_their_chunk() -> None:
    chunk = ChunkId(data_chunk_id(b"chunk"))
    keys = [shard_key(chunk, ShardNumber(number)) for number in (0, 1, 254)]
    assert [*keys, chunk_key(chunk)] == sorted([*keys, chunk_key(chunk)])
    assert [shard_of_key(key) for key in keys] == [0, 1, 254]
    low, high = shards_of(chunk)
    assert all(low <= key < high and not is_whole(key) for key in keys)
    assert shard_key(chunk, WHOLE_CHUNK) == high == chunk_key(chunk)
    assert shard_text(chunk, ShardNumber(3)) == f"c:{chunk[1:].hex()}/3"


@pytest.mark.parametrize("partition", [0, 1, 300, 4095])
def test_a_slot_is_the_first_bits_of_a_digest_and_one_range_of_keys_a_kind(partition: int) -> None:
    for kind in (1, 2):
        chunk = chunk_at(partition, kind, b"\xff" * 30)
        assert partition_of_key(chunk_key(chunk), 12) == partition
        assert partition_of_key(chunk_key(chunk), 14) >> 2 == partition
        begin, end = (partition << 4).to_bytes(2, "big"), ((partition + 1) << 4).to_bytes(3, "big")[-2:]
        low, high = ranges_between(begin, b"" if partition == 4095 else end)[kind - 1]
        assert low <= chunk_key(chunk) < high


# --- lives ---------------------------------------------------------------------------------------------------


def test_shards_and_the_epoch_are_kept_over_restarts_and_the_table_is_not() -> None:
    async def main() -> None:
        disk, shards = SimDisk(), some(10)
        async with simulated_store(disk, cluster_id=LAKE) as opened:
            await store(client_of(opened), *shards)
            await set_epoch(client_of(opened), 5, b"table")
        async with simulated_store(disk, cluster_id=LAKE) as opened:
            client = client_of(opened)
            assert await read(client, *shards) == [shard.payload for shard in shards]
            assert [record_of(opened, shard).logical_bytes for shard in shards] == [one.chunk_bytes for one in shards]
            known = await set_epoch(client)
            assert (known.epoch, known.table) == (5, b"")
            assert (await set_epoch(client, 5, b"table")).table == b"table"
            assert (await fsck(client))["findings"] == []

    run(main)


def test_an_acknowledged_shard_survives_a_crash_at_any_step() -> None:
    async def life(disk: SimDisk, acknowledged: list[Shard]) -> None:
        async with simulated_store(disk, cluster_id=LAKE) as opened:
            client = client_of(opened)
            for index in range(0, 12, 3):
                shards = some(12)[index : index + 3]
                await store(client, *shards)
                acknowledged += shards

    async def main() -> None:
        whole = SimDisk(random.Random(0))
        await life(whole, [])
        for step in range(40, whole.operation_count, 7):
            disk, acknowledged = SimDisk(random.Random(step), crash_at=step), list[Shard]()
            with suppress(SimCrashed, BaseExceptionGroup):
                await life(disk, acknowledged)
            async with simulated_store(disk.crash(), cluster_id=LAKE) as opened:
                client = client_of(opened)
                assert await read(client, *acknowledged) == [shard.payload for shard in acknowledged]
                assert (await fsck(client))["damage"] == 0
                shards = some(12)
                await store(client, *shards)
                await gc(client)
                assert await read(client, *shards) == [shard.payload for shard in shards]

    run(main)


# --- damage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_scrub_finds_a_flipped_bit_in_a_shard_which_is_absent_until_it_is_stored_again(size: int) -> None:
    async def main() -> None:
        disk = SimDisk()
        spoilt = Shard(chunk_at(7), 1, random.Random(size).randbytes(size))
        sibling = Shard(chunk_at(7), 2, random.Random(size + 1).randbytes(size))
        async with simulated_store(disk, cluster_id=LAKE) as opened:
            client = client_of(opened)
            await store(client, spoilt, sibling)
            await put(client, "whole", b"w" * 100_000)
            await opened.scrubber.advance(1e6)
            assert opened.scrubber.state.last_damaged == 0, "shards do not hash to their chunks' ids, and are good"
            spoil(opened, spoilt, size - 1)
            await opened.scrubber.advance(1e6)
            assert opened.scrubber.state.last_damaged == 1
            (found,) = await opened.damaged()
            assert (found["chunk"], found["objects"]) == (shard_text(*spoilt.name), [])
        async with simulated_store(disk, cluster_id=LAKE) as opened:
            client = client_of(opened)
            assert await offer(client, spoilt, sibling) == [0, size]
            assert [shard.number for shard in await listed(client)] == [2]
            with pytest.raises(ChunkDamaged):
                await read(client, spoilt)
            assert await read(client, sibling) == [sibling.payload]
            codes = [finding["code"] for finding in (await fsck(client))["findings"]]
            assert codes == ["chunk-quarantined"]
            assert await store(client, spoilt, sibling) == [True, False]
            assert await read(client, spoilt) == [spoilt.payload]
            assert (await fsck(client))["findings"] == []
            await opened.scrubber.advance(1e6)
            assert await opened.damaged() == []

    run(main)


def test_a_read_that_fails_quarantines_the_shard_and_scrub_releases_it_when_it_is_good_again() -> None:
    async def main() -> None:
        async with simulated_store(cluster_id=LAKE) as opened:
            client = client_of(opened)
            shard = Shard(chunk_at(7), 1, bytes(100_000))
            await store(client, shard)
            spoil(opened, shard, 5)
            with pytest.raises(ChunkDamaged):
                await read(client, shard)
            assert await offer(client, shard) == [0]
            spoil(opened, shard, 5)
            await opened.scrubber.advance(1e6)
            assert await offer(client, shard) == [100_000]
            assert await read(client, shard) == [shard.payload]

    run(main)


# --- room ----------------------------------------------------------------------------------------------------


def test_compaction_moves_shards_and_they_are_read_as_before() -> None:
    async def main() -> None:
        async with simulated_store(sizes=EAGER, cluster_id=LAKE) as opened:
            client = client_of(opened)
            shards = some(60)
            chunks = list(dict.fromkeys(shard.chunk for shard in shards))
            await store(client, *shards, generation=1)
            await put(client, "whole", bytes(range(256)) * 1000)
            await store(client, Shard(chunk_at(99), 0, bytes(SMALL_SIZES.segments.large_segment // 2)))
            spoilt = shards[1]
            spoil(opened, spoilt, 0)
            left = [shard for shard in shards if shard.chunk in chunks[::3]]
            assert (await collect(client, 3, chunks[::3])).freed_shards == len(shards) + 1 - len(left)
            before = {shard: record_of(opened, shard) for shard in left}
            fast = mock.patch("engine.upkeep.compaction.COMPACT_BYTES_PER_S", 1e12)
            with fast, mock.patch.object(Compactor, "_is_worth_it", return_value=True):
                report = await opened.collect(COMPACT_SHARE_MOST)
            assert report.freed_chunks == 0
            assert report.compaction.unreadable_chunks == (spoilt in left)
            moved = [shard for shard in left if record_of(opened, shard).segment != before[shard].segment]
            assert {len(shard.payload) for shard in moved} == set(SIZES)
            assert len(moved) == len(left) - (spoilt in left)
            assert all(record_of(opened, shard).birth == before[shard].birth for shard in left)
            assert all(record_of(opened, shard).logical_bytes == shard.chunk_bytes for shard in left)
            good = [shard for shard in left if shard != spoilt]
            assert await read(client, *good) == [shard.payload for shard in good]
            assert await offer(client, spoilt) == [0]
            await opened.scrubber.advance(1e6)
            assert opened.scrubber.state.last_damaged == 1
            assert [finding["code"] for finding in (await fsck(client))["findings"]] == ["chunk-quarantined"]

    run(main)


def test_room_of_freed_and_dropped_shards_comes_back() -> None:
    async def main() -> None:
        async with simulated_store(sizes=EAGER, cluster_id=LAKE) as opened:
            client = client_of(opened)
            shards = [Shard(chunk_at(index), 0, random.Random(index).randbytes(256 * KIB)) for index in range(40)]
            for begin in range(0, 40, 10):
                await store(client, *shards[begin : begin + 10], generation=1)
            full = await opened.segments.room.allocated_bytes()
            swept = await collect(client, 3, [shard.chunk for shard in shards[:4]])
            assert swept.freed_bytes >= 36 * 256 * KIB
            assert full - await opened.segments.room.allocated_bytes() >= 36 * 256 * KIB
            with mock.patch("engine.upkeep.compaction.COMPACT_BYTES_PER_S", 1e12):
                await opened.collect(COMPACT_SHARE_MOST)
            assert await read(client, *shards[:4]) == [shard.payload for shard in shards[:4]]

    run(main)


def test_a_full_disk_takes_no_shards_and_gives_room_by_gc() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk, cluster_id=LAKE) as opened:
            client = client_of(opened)
            stored = some(20)
            await store(client, *stored)
            with mock.patch.object(disk, "free_bytes", return_value=0):
                with pytest.raises(StoreFull):
                    for index in range(50):  # the room that a segment was given is used up first
                        await store(client, Shard(chunk_at(100 + index), 0, bytes(300 * KIB)), generation=4)
                assert await offer(client, *stored) == [len(shard.payload) for shard in stored]
                assert await store(client, *stored) == [False] * len(stored)
                assert (await collect(client, 4)).freed_shards == len(stored)
            await store(client, *stored, generation=4)

    run(main)


# --- roles ---------------------------------------------------------------------------------------------------


def features(disk: SimDisk) -> int:
    return read_superblock(disk).incompat_features


def test_a_member_says_so_and_that_it_has_shards_before_it_has_any() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk, cluster_id=LAKE) as opened:
            assert features(disk) == Feature.CLUSTER
            assert opened.superblock.cluster_id == LAKE
            await offer(client_of(opened), *some(2))
            assert features(disk) == Feature.CLUSTER
            begun = opened.features.begin_to_keep_shards
            with mock.patch.object(Ingest, "seal_and_write", side_effect=AssertionError), suppress(AssertionError):
                await store(client_of(opened), *some(2))
            assert features(disk) == Feature.CLUSTER | Feature.ERASURE_SHARDS, "durable before a record is decided"
            await begun()
        assert features(disk) == Feature.CLUSTER | Feature.ERASURE_SHARDS

    run(main)


def test_an_earlier_release_refuses_a_member_by_name() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk, cluster_id=LAKE) as opened:
            await store(client_of(opened), *some(1))
        with mock.patch.object(superblocks, "KNOWN_INCOMPAT", 0), pytest.raises(StoreUnusable) as raised:
            async with simulated_store(disk, cluster_id=LAKE):
                pass
        assert "erasure_shards, cluster" in raised.value.message

    run(main)


@pytest.mark.parametrize(
    ("made_as", "opened_as", "told"),
    [
        (LAKE, NO_CLUSTER, "is a member of the lake"),
        (LAKE, b"another lake    ", "a member of another lake"),
        (NO_CLUSTER, LAKE, "the store of one engine"),
    ],
)
def test_a_folder_is_opened_in_its_own_role_only(made_as: bytes, opened_as: bytes, told: str) -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk, cluster_id=made_as):
            pass
        before = read_superblock(disk)
        with pytest.raises(StoreUnusable, match=told):
            async with simulated_store(disk, cluster_id=opened_as):
                pass
        assert read_superblock(disk) == before
        async with simulated_store(disk, cluster_id=made_as) as opened:
            assert (opened.member is None) == (made_as == NO_CLUSTER)

    run(main)


def test_the_shared_index_has_no_shards_and_loses_no_chunk_by_them() -> None:
    async def main() -> None:
        async with simulated_store(cluster_id=LAKE) as opened:
            client = client_of(opened)
            stat = await put(client, "whole", b"w" * 70_000)
            parts = [Shard(ChunkId(stat.blob), number, b"part") for number in (0, 3)]
            removed: list[bytes] = []
            index = mock.Mock()
            index.remove = removed.append
            opened.metadata.on_durable_records(WATCHED, lambda found: SharedIndex.records_durable(index, found))
            await store(client, *parts)
            await collect(client, 5)
            assert await offer(client, *parts) == [0, 0]
            assert removed == [], "a shard's record says nothing of the chunk"
            puts = [call.args[0] for call in index._put_record.call_args_list]
            assert all(not is_whole(key) for key in puts)
            with opened.metadata.view() as view:
                assert view.get(Table.CHUNKS, chunk_key(ChunkId(stat.blob))) is not None

    run(main)


# --- races ---------------------------------------------------------------------------------------------------


def test_a_store_that_is_overtaken_by_a_newer_epoch_is_refused_and_leaves_nothing() -> None:
    async def main() -> None:
        async with simulated_store(cluster_id=LAKE) as opened:
            client, written, go_on = client_of(opened), trio.Event(), trio.Event()
            write = opened.chunks.ingest.seal_and_write

            async def slow(payloads: Sequence[Payload], seal: Seal) -> list[Written]:
                done = await write(payloads, seal)
                written.set()
                await go_on.wait()
                return done

            refused: list[LakeError] = []

            async def old_head() -> None:
                try:
                    await store(client, *some(5), epoch=5)
                except LakeError as error:
                    refused.append(error)

            with mock.patch.object(opened.chunks.ingest, "seal_and_write", slow):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(old_head)
                    await written.wait()
                    await set_epoch(client, 6)
                    go_on.set()
            assert [type(error) for error in refused] == [StaleEpoch]
            assert await listed(client) == {}
            assert in_flight(opened) == 0

    run(main)


@pytest.mark.parametrize("what", ["offered", "stored"])
def test_what_is_touched_while_a_sweep_is_under_way_stays(what: str) -> None:
    async def main() -> None:
        async with simulated_store(cluster_id=LAKE) as opened:
            assert opened.member is not None
            client, shards = client_of(opened), some(6)
            await store(client, *shards, generation=1)
            collector = opened.member.collector
            free = collector._free

            async def touched_first(*arguments: Any) -> None:
                await (offer if what == "offered" else store)(client, *shards[:3], generation=4)
                await free(*arguments)

            with mock.patch.object(collector, "_free", touched_first):
                assert (await collect(client, 5)).freed_shards == 3
            assert await read(client, *shards[:3]) == [shard.payload for shard in shards[:3]]

    run(main)


def test_two_heads_that_store_one_shard_at_once_are_both_answered() -> None:
    async def main() -> None:
        async with simulated_store(cluster_id=LAKE) as opened:
            fresh: list[bool] = []

            async def head() -> None:
                for shard in some(6):
                    fresh.extend(await store(client_of(opened), shard))

            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(head)
            assert sum(fresh) == 6
            client = client_of(opened)
            assert await read(client, *some(6)) == [shard.payload for shard in some(6)]
            assert (await fsck(client))["findings"] == []
            assert in_flight(opened) == 0

    run(main)


def test_a_sweep_that_another_walk_replaces_frees_nothing_more() -> None:
    async def main() -> None:
        async with simulated_store(cluster_id=LAKE) as opened:
            assert opened.member is not None
            client, shards = client_of(opened), some(6)
            await store(client, *shards, generation=1)
            collector = opened.member.collector
            free = collector._free

            async def replaced_first(*arguments: Any) -> None:
                await ask(client, m.GcBegin(5, b"another walk    "), m.Done)
                await free(*arguments)

            with mock.patch.object(collector, "_free", replaced_first), pytest.raises(PreconditionFailed):
                await collect(client, 5)
            assert await offer(client, *shards) == [len(shard.payload) for shard in shards]
            await ask(client, m.GcMark(b"another walk    ", 0, []), m.Done)

    run(main)
