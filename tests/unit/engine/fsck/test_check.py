"""fsck of an open store: records that change during the check are checked again, and what it finds can be repaired."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

from engine.chunks.chunk_store import Chunks
from engine.format.layouts import ChunkRecord
from engine.segments.files import segment_path
from lakefs.ids import ChunkId, ShardNumber, data_chunk_id, id_text
from lakefs.limits import COMPACT_SHARE_MOST
from tests.sim.world.disk import SimDisk
from tests.store_rig import SMALL_SIZES, client_of, delete, fsck, put, read, records, run, simulated_store

EAGER = replace(SMALL_SIZES, compact_won_bytes=1)
KEPT = b"kept" * 700
DEAD = b"dead" * 9000


def codes_of(report: dict[str, Any]) -> dict[str, str]:
    """Return each finding's code, by object."""
    return {finding["object"]: finding["code"] for finding in report["findings"]}


def test_a_chunk_that_compaction_moves_under_a_full_check_is_read_where_it_lies_now() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk, sizes=EAGER) as store:
            await put(client_of(store), "kept", KEPT)
            await put(client_of(store), "dead", DEAD)
            await delete(client_of(store), "dead")
        async with simulated_store(disk, sizes=EAGER) as store:
            verify = Chunks.verify
            looked: list[ChunkRecord] = []

            async def moved_first(chunks: Chunks, chunk: ChunkId, record: ChunkRecord, shard: ShardNumber) -> None:
                if chunk == data_chunk_id(KEPT) and not looked:
                    assert (await store.collect(COMPACT_SHARE_MOST)).compaction.moved_chunks == 1
                    now = records(store)[chunk]
                    disk.flip_bit(segment_path(now.segment, store.segments.register.kinds[now.segment]), now.offset, 3)
                if chunk == data_chunk_id(KEPT):
                    looked.append(record)
                await verify(chunks, chunk, record, shard)

            with mock.patch.object(Chunks, "verify", moved_first):
                report = await store.check(full=True)
            first, second = looked
            assert first.segment < second.segment
            assert {"bkt/kept": "content-chunk-damaged"}.items() <= codes_of(report).items()

    run(main)


def test_what_a_quick_check_finds_missing_is_whole_when_the_same_bytes_are_put_again() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk) as store:
            await put(client_of(store), "kept", KEPT)
            (record,) = records(store).values()
            path = segment_path(record.segment, store.segments.register.kinds[record.segment])
        disk.unlink(path)
        async with simulated_store(disk) as store:
            client = client_of(store)
            report = await fsck(client, full=False)
            assert codes_of(report) == {
                "bkt/kept": "content-chunk-damaged",
                id_text(data_chunk_id(KEPT)): "segment-missing",
            }
            await put(client, "kept", KEPT)
            assert await read(client, data_chunk_id(KEPT)) == KEPT
            assert (await fsck(client))["damage"] == 0

    run(main)


def test_a_report_on_an_empty_store_has_the_counts_of_one_that_is_used() -> None:
    async def main() -> None:
        async with simulated_store(SimDisk()) as store:
            empty = [await store.check(full=full) for full in (False, True)]
            await put(client_of(store), "kept", KEPT)
            used = [await store.check(full=full) for full in (False, True)]
        assert [each["checked"].keys() for each in empty] == [each["checked"].keys() for each in used]
        assert [each["checked"]["chunks"] for each in (empty[0], used[0])] == [0, 1]

    run(main)
