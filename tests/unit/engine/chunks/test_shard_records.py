"""The record of a shard: its bytes, the length of its chunk in it, and what fsck says of one that is impossible."""

from __future__ import annotations

import pytest
from msgspec import structs

from engine.chunks.chunk_store import find_shard
from engine.format.layouts import ChunkRecord, Table
from engine.format.shards import shard_key, unpack_columns
from lakefs.content.verify import granule_crcs
from lakefs.errors import StoreUnusable
from lakefs.ids import Birth, SegmentId
from tests.contract.engines import LAKE
from tests.shards import Shard, chunk_at, offer, store
from tests.store_rig import client_of, fsck, run, simulated_store

SHARDS = [Shard(chunk_at(number), number, bytes(1000), 300_000) for number in range(3)]


def test_the_record_of_a_shard_has_the_length_of_its_chunk() -> None:
    async def main() -> None:
        async with simulated_store(cluster_id=LAKE) as opened:
            shard = Shard(chunk_at(7), 1, b"nine bytes"[:9], 300_000)
            await store(client_of(opened), shard)
            with opened.metadata.view() as view:
                value = view.get(Table.CHUNKS, shard_key(*shard.name))
        assert value is not None
        assert value[:8].hex() == "0100000100000000"
        assert value[32:].hex() == "09000000" + "e0930400" + granule_crcs(shard.payload).hex()

    run(main)


def test_the_record_of_a_whole_chunk_has_its_length_twice_as_ever() -> None:
    record = ChunkRecord(Birth(1), SegmentId(2), 4096, 70_000, 70_000, 0xAABBCCDD)
    assert record.pack().hex() == (
        "01000001000000000100000000000000020000000000000000100000000000007011010070110100ddccbbaa"
    )


def test_many_records_are_unpacked_as_each_by_itself_is() -> None:
    records = [ChunkRecord(Birth(n), SegmentId(2 * n), 4096 * n, n, 3 * n, 0xAABBCCDD - n) for n in range(1, 300)]
    columns = unpack_columns([record.pack() for record in records])
    assert list(zip(*columns, strict=True)) == [(r.birth, r.stored_bytes, r.logical_bytes, r.crc) for r in records]


@pytest.mark.parametrize("at", [0, 1, 2, 3, 43])
def test_one_of_many_records_that_a_later_release_wrote_is_refused(at: int) -> None:
    values = [ChunkRecord(Birth(n), SegmentId(1), 0, 5, 5, 7).pack() for n in range(1, 4)]
    later = bytearray(values[1])
    later[at] += 1
    if at == 43:
        later += b"\0"
    values[1] = bytes(later)
    with pytest.raises(StoreUnusable):
        unpack_columns(values)


def test_a_record_with_a_length_that_no_chunk_has_is_reported_and_the_shard_is_absent() -> None:
    async def main() -> None:
        async with simulated_store(cluster_id=LAKE) as opened:
            client = client_of(opened)
            await store(client, *SHARDS)
            with opened.metadata.view() as view:
                record = find_shard(view, *SHARDS[1].name)
            assert record is not None
            impossible = structs.replace(record, logical_bytes=999)
            await opened.metadata.commit(
                lambda txn: txn.put(Table.CHUNKS, shard_key(*SHARDS[1].name), impossible.pack())
            )
            report = await fsck(client)
            assert [finding["code"] for finding in report["findings"]] == ["chunk-record-wrong"]
            assert await offer(client, *SHARDS) == [len(SHARDS[0].payload), 0, len(SHARDS[2].payload)]
            assert await store(client, *SHARDS) == [False, True, False]
            assert (await fsck(client))["findings"] == []

    run(main)
