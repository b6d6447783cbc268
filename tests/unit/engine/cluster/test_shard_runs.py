"""The run that a head says in its greeting is that of the names in all shards: none may have lost what was visible."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from engine.process.embedded import EmbeddedEngine
from lakefs.errors import EngineUnreachable
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, ServedClient
from tests.shards_rig import ShardedLake, with_shards
from tests.store_rig import ask, good, put
from tests.unit.engine.cluster.test_client_names import failures, make


class Connection:
    """One connection to the head, which ends when the head ends it."""

    def __init__(self, lake: ShardedLake) -> None:
        self.ended = trio.Event()
        self._head = lake.head
        self._client: ServedClient = self._head.connected("test", descriptors=False, trusted=True, end=self.ended.set)

    async def call(self, request: m.Request) -> m.Message:
        return (await self._head.serve(self._client, request, Body(), ())).message

    async def run_id(self) -> bytes:
        hello = await self.call(m.Hello(1, "test"))
        assert isinstance(hello, m.HelloReply)
        return hello.boot_id

    async def aclose(self) -> None:
        await self._head.disconnected(self._client)


@asynccontextmanager
async def connected(lake: ShardedLake) -> AsyncIterator[Connection]:
    made = Connection(lake)
    try:
        yield made
    finally:
        await made.aclose()


async def run_id(lake: ShardedLake) -> bytes:
    async with connected(lake) as connection:
        return await connection.run_id()


def restart(lake: ShardedLake, shard: int) -> None:
    """End the connections to a shard, which is another run from now on."""
    lake.paths.runs[shard] = lake.paths.runs.get(shard, 0) + 1
    lake.all_names[shard].lose()


def test_a_lake_of_one_shard_has_the_run_of_its_names() -> None:
    async def body(lake: ShardedLake, client: EmbeddedEngine) -> None:
        assert await run_id(lake) == lake.names.store.superblock.boot_id

    with_shards(1, body)


@pytest.mark.parametrize("restarted", [0, 1, 2])
def test_the_run_is_another_one_when_the_names_of_any_shard_were_started_again(restarted: int) -> None:
    async def body(lake: ShardedLake, client: EmbeddedEngine) -> None:
        before = await run_id(lake)
        assert len(before) == 16
        assert await run_id(lake) == before
        restart(lake, restarted)
        after = await run_id(lake)
        assert after != before
        assert await run_id(lake) == after

    with_shards(3, body)


def test_a_connection_made_while_a_shard_is_away_is_a_run_of_its_own() -> None:
    """Names may have lost what was visible before or behind it, and nobody can know."""

    async def body(lake: ShardedLake, client: EmbeddedEngine) -> None:
        before = await run_id(lake)
        lake.lose(1)
        away = [await run_id(lake) for _ in range(2)]
        lake.away.clear()
        assert len({before, *away}) == 3
        assert await run_id(lake) == before

    with_shards(2, body)


def test_a_client_is_greeted_while_a_shard_does_not_answer() -> None:
    async def body(lake: ShardedLake, client: EmbeddedEngine) -> None:
        before = await run_id(lake)
        lake.paths.silent.add(1)
        async with connected(lake) as connection:
            with trio.fail_after(2):
                assert await connection.run_id() != before

    with_shards(2, body)


def test_while_the_first_shard_is_away_clients_are_greeted_and_other_buckets_go_on() -> None:
    async def body(lake: ShardedLake, client: EmbeddedEngine) -> None:
        await make(lake, 0, "aaa")
        await make(lake, 1, "bbb")
        before = await run_id(lake)
        lake.lose(0)
        async with connected(lake) as connection:
            hello = await connection.call(m.Hello(1, "test"))
            assert isinstance(hello, m.HelloReply)
            assert hello.store_id == lake.names.store.superblock.identity.store_id
            assert hello.boot_id != before
            made = await connection.call(m.MakeFolder("bbb", "f/", durable=False))
            assert isinstance(made, m.NameResults)
            good(made)
            looked = await connection.call(m.StatNames([("aaa", "f/"), ("bbb", "f/")]))
            assert isinstance(looked, m.NameResults)
            assert failures(looked) == [EngineUnreachable, None]
            assert await connection.call(m.Sync()) == m.Done(), "it has changed nothing in the first shard"
            lake.away.clear()
            made = await connection.call(m.MakeFolder("aaa", "f/"))
            assert isinstance(made, m.NameResults)
            good(made)
            assert not connection.ended.is_set()

    with_shards(2, body)


def test_a_sync_covers_the_shards_that_the_client_has_changed() -> None:
    async def body(lake: ShardedLake, client: EmbeddedEngine) -> None:
        for shard, bucket in enumerate(("aaa", "bbb", "ccc")):
            await make(lake, shard, bucket)
        for bucket in ("aaa", "bbb", "ccc"):
            good(await ask(client, m.MakeFolder(bucket, "f/", durable=False), m.NameResults))
        asked = lake.paths.asked
        asked.clear()
        await ask(client, m.Sync(), m.Done)
        assert sorted(asked) == [(0, "Sync"), (1, "Sync"), (2, "Sync")]

    with_shards(3, body)


def test_leases_of_a_request_that_is_cancelled_before_all_shards_have_answered_are_ended() -> None:
    async def body(lake: ShardedLake, client: EmbeddedEngine) -> None:
        for shard, bucket in enumerate(("aaa", "bbb")):
            await make(lake, shard, bucket)
            await put(client, "k", b"content", bucket=bucket)

        async def slow(shard: int) -> None:
            await trio.sleep(shard)

        lake.paths.delay = slow
        with trio.move_on_after(0.5):
            await ask(client, m.OpenObjects([("aaa", "k"), ("bbb", "k"), ("aaa", "k")]), m.OpenResults)
            raise AssertionError("one shard answers late")
        assert lake.leases() == 0

    with_shards(2, body)
