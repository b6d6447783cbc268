"""Shards that a member knows to be damaged: listed apart from the others, and dropped like them."""

from __future__ import annotations

import pytest

from lakefs.wire import messages as m
from tests.contract.engines import LAKE
from tests.shards import drop, names_of, offer, store
from tests.store_rig import ask, client_of, fsck, run, simulated_store
from tests.unit.engine.chunks.test_shards import some, spoil


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_a_list_names_damaged_shards_apart_in_pages_of_any_length_and_a_drop_frees_them(limit: int) -> None:
    async def main() -> None:
        async with simulated_store(cluster_id=LAKE) as opened:
            client, shards = client_of(opened), some(9)
            await store(client, *shards)
            rotten = [shards[index] for index in (0, 3, 4, 8)]
            for shard in rotten:
                spoil(opened, shard, 0)
            await opened.scrubber.advance(1e6)
            good, damaged, after = list[tuple[bytes, int]](), list[tuple[bytes, int]](), b""
            while True:
                page = await ask(client, m.ListShards(after=after, limit=limit), m.ShardsListed)
                assert len(page.chunks) == len(page.lengths) == len(page.chunk_lengths)
                assert len(page.chunks) + len(page.damaged_chunks) <= limit
                good += zip(page.chunks, page.shards, strict=True)
                damaged += zip(page.damaged_chunks, page.damaged_shards, strict=True)
                after = page.next_after
                if not after:
                    break
            assert damaged == sorted(shard.name for shard in rotten)
            assert good == sorted(shard.name for shard in shards if shard not in rotten)
            await drop(client, *rotten, touched=m.GENERATION_MAX)
            assert (await ask(client, m.ListShards(), m.ShardsListed)).damaged_chunks == []
            assert (await fsck(client))["findings"] == []
            assert len(opened.quarantine) == 0

    run(main)


@pytest.mark.parametrize("limit", [1, 2, 100])
def test_damaged_shards_are_listed_alone_and_dropped_alone(limit: int) -> None:
    async def main() -> None:
        async with simulated_store(cluster_id=LAKE) as opened:
            client, shards = client_of(opened), some(9)
            await store(client, *shards)
            rotten = [shards[index] for index in (0, 3, 4, 8)]
            for shard in rotten:
                spoil(opened, shard, 0)
            await opened.scrubber.advance(1e6)
            found, after = list[tuple[bytes, int]](), b""
            while True:
                request = m.ListShards(after=after, limit=limit, only_damaged=True)
                page = await ask(client, request, m.ShardsListed)
                assert page.chunks == []
                assert len(page.damaged_chunks) <= limit
                found += zip(page.damaged_chunks, page.damaged_shards, strict=True)
                after = page.next_after
                if not after:
                    break
            assert found == sorted(shard.name for shard in rotten)
            ranged = await ask(client, m.ListShards(b"\0\x10", only_damaged=True), m.ShardsListed)
            assert ranged.damaged_chunks == [chunk for chunk, _ in found if chunk[1:] >= b"\0\x10"]
            await store(client, rotten[0])
            drops = m.DropShards(0, *names_of(shards), [m.GENERATION_MAX] * len(shards), only_damaged=True)
            kept = (await ask(client, drops, m.ShardsDropped)).touched
            assert [touched == 0 for touched in kept] == [shard in rotten[1:] for shard in shards]
            assert await offer(client, *shards) == [
                0 if shard in rotten[1:] else len(shard.payload) for shard in shards
            ]

    run(main)
