"""Answers of all names shards have stamps at a head; one that says that a bucket is missing has none."""

from __future__ import annotations

import trio

from engine.process.embedded import EmbeddedEngine
from lakefs.host.descriptors import close_all
from lakefs.stamps.stamps import StampReader
from lakefs.wire import messages as m
from tests.shards_rig import ShardedLake, with_shards
from tests.store_rig import ask, put
from tests.unit.engine.cluster.test_client_names import client_at, make, unaware_head

NAMES = [("aaa", "k"), ("bbb", "k"), ("none", "k"), ("aaa", "no such"), ("bbb", "no such")]


async def reader_of(client: EmbeddedEngine) -> StampReader:
    reply = await client.call(m.OpenStamps())
    [descriptor] = reply.descriptors
    reader = StampReader(descriptor)
    close_all([descriptor])
    return reader


async def stamps_of(client: EmbeddedEngine) -> list[list[bytes]]:
    looked_up = await ask(client, m.StatNames(NAMES, stamps=True), m.NameResults)
    opened = await ask(client, m.OpenObjects(NAMES, lease=False, stamps=True), m.OpenResults)
    return [[result.stamps for result in looked_up.results], [result.stamps for result in opened.results]]


def test_answers_of_every_shard_stand_until_that_shard_changes_them() -> None:
    async def body(lake: ShardedLake, other: EmbeddedEngine) -> None:
        for shard, bucket in enumerate(("aaa", "bbb")):
            await make(lake, shard, bucket)
            await put(other, "k", b"content", bucket=bucket)
        await trio.sleep(1)  # turns are followed then
        client = lake.client(descriptors=True)
        reader = await reader_of(client)
        for stamps in await stamps_of(client):
            assert [bool(each) for each in stamps] == [True, True, False, True, True]
            assert all(reader.stand(each) for each in stamps if each)
        for changed, shard in ((1, 1), (0, 0)):
            stamps, _ = await stamps_of(client)
            async with client_at(lake, shard) as another:
                bucket, key = NAMES[changed]
                await ask(another, m.SetAttributes(bucket, key, mode=0o600), m.NameResults)
            assert not reader.stand(stamps[changed])
            assert reader.stand(stamps[1 - changed])
        await client.aclose()

    with_shards(2, body)


def test_a_missing_bucket_is_not_repeated_by_a_head_that_knows_of_one_shard() -> None:
    async def body(lake: ShardedLake, other: EmbeddedEngine) -> None:
        await make(lake, 0, "aaa")
        async with unaware_head(lake) as client:
            await trio.sleep(1)
            looked_up, opened = await stamps_of(client)
            for stamps in (looked_up, opened):
                assert [bool(each) for each in stamps] == [True, False, False, True, False]

    with_shards(2, body)
