"""Names in several shards, asked through a head: requests find their buckets, whatever the head knows of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from engine.coordinator.names_shards import NamesShards
from engine.process.embedded import EmbeddedEngine
from lakefs.errors import (
    AcrossShards,
    AlreadyExists,
    BucketElsewhere,
    BucketNotFound,
    ChunkNotFound,
    EngineUnreachable,
    KeyNotFound,
    LakeError,
)
from lakefs.ids import GcGeneration
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body
from tests.head_rig import store_blob
from tests.shards_rig import ShardedLake, with_shards
from tests.store_rig import PLAIN, ask, change, good, put, session_of


@asynccontextmanager
async def client_at(lake: ShardedLake, shard: int) -> AsyncIterator[EmbeddedEngine]:
    """Yield a client of one shard, which is asked as by another head."""
    client = EmbeddedEngine(lake.all_names[shard].service, descriptors=False)
    try:
        yield client
    finally:
        await client.aclose()


async def make(lake: ShardedLake, shard: int, *buckets: str) -> None:
    """Make buckets in a shard, as another head would."""
    async with client_at(lake, shard) as client:
        for bucket in buckets:
            await ask(client, m.BucketCreate(bucket), m.Buckets)


async def move(lake: ShardedLake, source: int, target: int, bucket: str) -> None:
    """Remove an empty bucket, and make it anew in another shard."""
    async with client_at(lake, source) as client:
        await ask(client, m.BucketRemove(bucket), m.Done)
    await make(lake, target, bucket)


@asynccontextmanager
async def unaware_head(lake: ShardedLake, *known: str) -> AsyncIterator[EmbeddedEngine]:
    """Yield a client of a head that knows the places of some buckets as they are now, and hears of no change.

    Without any it does not know of more than one shard either.
    """
    shards = NamesShards(lake.coordinator)
    if known:
        await shards.read_count()
    for bucket in known:
        await shards.read(bucket)
    async with lake.more_heads(shards) as head:
        client = EmbeddedEngine(head, descriptors=False)
        try:
            yield client
        finally:
            await client.aclose()


async def buckets_of(client: EmbeddedEngine) -> list[str]:
    return [stat.name for stat in (await ask(client, m.BucketList(), m.Buckets)).buckets]


async def folder(client: EmbeddedEngine, bucket: str, key: str = "f/") -> None:
    good(await ask(client, m.MakeFolder(bucket, key), m.NameResults))


async def stat_of(client: EmbeddedEngine, bucket: str, key: str = "f/") -> m.ObjectStat:
    (stat,) = good(await ask(client, m.StatNames([(bucket, key)]), m.NameResults))
    return stat


def failures(answer: m.NameResults | m.OpenResults) -> list[type[LakeError] | None]:
    return [None if result.failure is None else type(result.failure.as_error()) for result in answer.results]


# --- what a head knows is out of date ----------------------------------------------------------------------


def test_a_bucket_that_was_made_anew_in_another_shard_is_found_by_a_head_that_knows_the_old_place() -> None:
    async def body(lake: ShardedLake, other: EmbeddedEngine) -> None:
        for bucket in ("one", "two", "batch", "set", "moved"):
            await make(lake, 1, bucket)
        async with unaware_head(lake, "one", "two", "batch", "set", "moved") as client:
            for bucket in ("one", "two", "batch", "set", "moved"):
                await move(lake, 1, 2, bucket)
            await folder(client, "one")
            assert (await stat_of(client, "one")).key
            assert (await ask(client, m.ListNames("two", folders=True), m.Listed)).entries == []
            answer = await ask(client, m.StatNames([("one", "f/"), ("batch", "x"), ("none", "x")]), m.NameResults)
            assert failures(answer) == [None, KeyNotFound, BucketNotFound]
            await ask(client, m.BucketSet("set", anonymous_read=True), m.Buckets)
            good(await ask(client, m.Rename("one", "f/", "moved", "f/"), m.NameResults))
            assert (await stat_of(client, "moved")).key

    with_shards(3, body)


def test_a_head_that_knows_of_one_shard_finds_buckets_in_others() -> None:
    async def body(lake: ShardedLake, other: EmbeddedEngine) -> None:
        await make(lake, 1, "bbb")
        await make(lake, 0, "aaa")
        async with unaware_head(lake) as client:
            assert await buckets_of(client) == ["aaa", "bbb"]
        async with unaware_head(lake) as client:
            await folder(client, "bbb")
        async with unaware_head(lake) as client:
            with pytest.raises(AlreadyExists):
                await ask(client, m.BucketCreate("bbb"), m.Buckets)
        async with unaware_head(lake) as client:
            answer = await ask(client, m.StatNames([("aaa", "f/"), ("bbb", "f/"), ("ccc", "f/")]), m.NameResults)
            assert failures(answer) == [KeyNotFound, None, BucketNotFound]
        async with unaware_head(lake) as client:
            assert (await ask(client, m.BucketList("bbb"), m.Buckets)).buckets[0].name == "bbb"
        async with unaware_head(lake) as client:
            with pytest.raises(AcrossShards):
                await ask(client, m.Rename("bbb", "f/", "aaa", "f/"), m.NameResults)
        async with unaware_head(lake) as client, client.watch("bbb") as events:
            await folder(other, "bbb", "g/")
            assert (await anext(events)).key == "g/"

    with_shards(2, body)


def test_a_batch_with_a_bucket_elsewhere_is_done_once() -> None:
    """The part that the first shard has done is not repeated when the rest is asked for elsewhere."""

    async def body(lake: ShardedLake, other: EmbeddedEngine) -> None:
        await make(lake, 0, "aaa")
        await make(lake, 1, "bbb")
        await folder(other, "aaa")
        await folder(other, "bbb")
        for key in ("x", "y"):
            for bucket in ("aaa", "bbb"):
                await put(other, key, b"content", bucket=bucket)
        async with unaware_head(lake) as client:
            names = [("bbb", "x"), ("aaa", "x"), ("ccc", "x"), ("bbb", "missing"), ("aaa", "y")]
            answer = await ask(client, m.DeleteNames(names), m.NameResults)
            assert failures(answer) == [None, None, BucketNotFound, None, None]
            assert [bool(result.stat) for result in answer.results] == [True, True, False, False, True]
            assert [result.stat.key for result in answer.results if result.stat] == ["x", "x", "y"]
        assert failures(await ask(other, m.StatNames(names), m.NameResults)).count(KeyNotFound) == 4

    with_shards(2, body)


def test_a_bucket_that_another_shard_is_given_first_is_used_there() -> None:
    async def body(lake: ShardedLake, other: EmbeddedEngine) -> None:
        async with unaware_head(lake) as client:  # it would make it in the first shard
            await make(lake, 1, "bbb")
            made = await put(client, "k", b"content", bucket="bbb")
            assert made.bucket == "bbb"
            await make(lake, 1, "ccc")
            results = await ask(client, m.MakeFolder("ccc", "f/", create_bucket=True), m.NameResults)
            assert failures(results) == [None]
        async with client_at(lake, 0) as first, client_at(lake, 1) as second:
            with pytest.raises(BucketElsewhere):
                await ask(first, m.BucketCreate("bbb"), m.Buckets)
            assert await buckets_of(first) == []
            assert await buckets_of(second) == ["bbb", "ccc"]

    with_shards(2, body)


def test_a_missing_bucket_is_missing_for_every_request() -> None:
    async def body(lake: ShardedLake, client: EmbeddedEngine) -> None:
        await make(lake, 1, "bbb")
        for request in (
            m.ListNames("none"),
            m.ListVersions("none"),
            m.MakeFolder("none", "f/"),
            m.RemoveFolder("none", "f/"),
            m.MakeSymlink("none", "s", b"to", PLAIN),
            m.SetAttributes("none", "f/"),
            m.BucketSet("none", anonymous_read=True),
            m.BucketRemove("none"),
            m.BucketList("none"),
            m.UploadCreate("none", "k", PLAIN),
            m.UploadList("none"),
            m.UploadAbort("none", "k", b"1" * 16),
            m.Rename("none", "aaa", "bbb", "aaa"),
            m.Rename("bbb", "aaa", "none", "aaa"),
            m.Copy("none", "aaa", "bbb", "aaa"),
            m.Copy("bbb", "aaa", "none", "aaa"),
        ):
            with pytest.raises(BucketNotFound) as raised:
                await client.call(request)
            assert raised.value.subject == "none", request

    with_shards(2, body)


# --- shards that are away ----------------------------------------------------------------------------------


def test_while_a_shard_is_away_the_buckets_of_others_go_on() -> None:
    async def body(lake: ShardedLake, other: EmbeddedEngine) -> None:
        await make(lake, 0, "aaa")
        await make(lake, 1, "bbb")
        await trio.testing.wait_all_tasks_blocked()
        lake.lose(1)
        client = lake.client()
        await folder(client, "aaa")
        with pytest.raises(EngineUnreachable):
            await folder(client, "bbb")
        answer = await ask(client, m.StatNames([("bbb", "f/"), ("aaa", "f/")]), m.NameResults)
        assert failures(answer) == [EngineUnreachable, None]
        with pytest.raises(EngineUnreachable):
            await ask(client, m.StatNames([("bbb", "f/"), ("bbb", "g/")]), m.NameResults)
        lake.away.clear()
        await folder(client, "bbb")
        answer = await ask(client, m.StatNames([("bbb", "f/"), ("aaa", "f/")]), m.NameResults)
        assert failures(answer) == [None, None]
        await client.aclose()

    with_shards(2, body)


def test_one_connection_serves_a_shard_that_was_away_when_it_was_first_asked() -> None:
    async def body(lake: ShardedLake, other: EmbeddedEngine) -> None:
        await make(lake, 1, "bbb")
        await trio.testing.wait_all_tasks_blocked()
        lake.lose(1)
        client = lake.head.connected("test", descriptors=False, trusted=True)
        answers = []
        for is_away in (True, False):
            if not is_away:
                lake.away.clear()
            request = m.StatNames([("bbb", "f/"), ("none", "f/")])
            answers.append((await lake.head.serve(client, request, Body(), ())).message)
        assert [failures(answer) for answer in answers if isinstance(answer, m.NameResults)] == [
            [EngineUnreachable, BucketNotFound],
            [KeyNotFound, BucketNotFound],
        ]
        await lake.head.disconnected(client)

    with_shards(2, body)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_client_that_loses_one_of_its_shards_is_ended(lost: int) -> None:
    async def body(lake: ShardedLake, other: EmbeddedEngine) -> None:
        await make(lake, 0, "aaa")
        await make(lake, 1, "bbb")
        ended = trio.Event()
        client = lake.head.connected("test", descriptors=False, trusted=True, end=ended.set)
        request = m.StatNames([("aaa", "f/"), ("bbb", "f/")])
        await lake.head.serve(client, request, Body(), ())
        lake.lose(lost)
        with trio.fail_after(1):
            await ended.wait()
        await lake.head.disconnected(client)

    with_shards(2, body)


# --- leases, moves, watches ----------------------------------------------------------------------------------


def test_leases_are_ended_in_the_shards_that_gave_them() -> None:
    async def body(lake: ShardedLake, client: EmbeddedEngine) -> None:
        for shard, bucket in enumerate(("aaa", "bbb", "ccc")):
            await make(lake, shard, bucket)
            await put(client, "k", b"content", bucket=bucket)
        request = m.OpenObjects([("ccc", "k"), ("aaa", "k"), ("bbb", "k"), ("bbb", "k")], lease_inline=True)
        answer = await ask(client, request, m.OpenResults)
        leases = [result.opened.lease for result in answer.results if result.opened is not None]
        assert len(set(leases)) == 4
        assert [lease >> 48 for lease in leases] == [2, 0, 1, 1]
        assert _leases(lake) == [1, 2, 1]
        await ask(client, m.CloseLeases([leases[0], leases[2], 5 << 48, -7]), m.Done)
        assert _leases(lake) == [1, 1, 0]
        await ask(client, m.CloseLeases(leases), m.Done)
        assert _leases(lake) == [0, 0, 0]

    with_shards(3, body)


def test_a_move_between_shards_is_refused_and_changes_nothing() -> None:
    async def body(lake: ShardedLake, client: EmbeddedEngine) -> None:
        await make(lake, 0, "aaa")
        await make(lake, 1, "bbb")
        await put(client, "k", b"content", bucket="aaa")
        with pytest.raises(AcrossShards, match="copy it, then remove it"):
            await ask(client, m.Rename("aaa", "k", "bbb", "k"), m.NameResults)
        assert (await stat_of(client, "aaa", "k")).key
        with pytest.raises(KeyNotFound):
            await stat_of(client, "bbb", "k")

    with_shards(2, body)


def test_a_bucket_that_a_move_makes_is_in_the_shard_of_its_source() -> None:
    async def body(lake: ShardedLake, client: EmbeddedEngine) -> None:
        for bucket in ("aaa", "bbb", "ccc"):  # new buckets are made in turn
            await ask(client, m.BucketCreate(bucket), m.Buckets)
        for bucket in ("bbb", "ccc", "aaa"):
            await folder(client, bucket)
            request = m.Rename(bucket, "f/", f"new-{bucket}", "f/", create_bucket=True)
            good(await ask(client, request, m.NameResults))
            await trio.testing.wait_all_tasks_blocked()
            assert lake.shard_of(f"new-{bucket}") == lake.shard_of(bucket) is not None
        assert len({lake.shard_of(bucket) for bucket in ("aaa", "bbb", "ccc")}) == 3

    with_shards(3, body)


def test_a_watch_of_all_buckets_has_the_events_of_all_shards() -> None:
    async def body(lake: ShardedLake, client: EmbeddedEngine) -> None:
        await make(lake, 0, "aaa")
        await make(lake, 1, "bbb")
        async with client.watch("") as events:
            for bucket in ("aaa", "bbb"):
                await folder(client, bucket)
                with trio.fail_after(1):
                    event = await anext(events)
                assert (event.kind, event.bucket, event.key) == ("put", bucket, "f/")

    with_shards(2, body)


def test_a_watch_follows_its_bucket_into_another_shard() -> None:
    async def body(lake: ShardedLake, client: EmbeddedEngine) -> None:
        await make(lake, 1, "bbb")
        async with client.watch("bbb") as events:
            await move(lake, 1, 2, "bbb")
            with trio.fail_after(5):
                assert [(await anext(events)).kind for _ in range(2)] == ["delete", "resync"]
                await folder(client, "bbb")
                assert (await anext(events)).key == "f/"

    with_shards(3, body)


def test_a_watch_of_a_missing_bucket_is_refused() -> None:
    async def body(lake: ShardedLake, client: EmbeddedEngine) -> None:
        with pytest.raises(BucketNotFound):
            async with client.watch("none"):
                raise AssertionError("there is nothing to watch")

    with_shards(2, body)


def _leases(lake: ShardedLake) -> list[int]:
    return [names.store.references.statistics()["leases"] for names in lake.all_names]


# --- what members answered is too old in one shard only --------------------------------------------------------


@pytest.mark.parametrize("small", [True, False], ids=["PutObjects", "Commit"])
def test_names_that_one_shard_does_not_accept_yet_are_bound_again_and_no_others(small: bool) -> None:
    async def body(lake: ShardedLake, client: EmbeddedEngine) -> None:
        for shard, bucket in enumerate(("aaa", "bbb")):
            await make(lake, shard, bucket)
        lake.all_names[1].gate.join(GcGeneration(7))
        names = [(bucket, key) for key in ("x", "y") for bucket in ("aaa", "bbb")]
        async with client.watch("") as events:
            if small:
                changes = [change(key, bucket=bucket) for bucket, key in names]
                results = await ask(client, m.PutObjects([1] * 4, changes), m.NameResults, b"wxyz")
            else:
                session = await session_of(client)
                blob = await store_blob(client, session, b"some", b"content")
                changes = [change(key, blob, bucket=bucket) for bucket, key in names]
                changes.insert(1, change("k", b"\2" + b"n" * 32, bucket="aaa"))
                results = await ask(client, m.Commit(session, changes, end_session=True), m.NameResults)
                assert failures(m.NameResults([results.results[1]])) == [ChunkNotFound]
                results = m.NameResults([*results.results[:1], *results.results[2:]])
                await ask(client, m.SessionEnd(session), m.Done)
            assert [(stat.bucket, stat.key) for stat in good(results)] == names
            with trio.fail_after(1):
                told = sorted([((await anext(events)).bucket) for _ in names])
            assert told == ["aaa", "aaa", "bbb", "bbb"]
            with trio.move_on_after(1):
                raise AssertionError(await anext(events))

    with_shards(2, body)


# --- status --------------------------------------------------------------------------------------------------


def test_the_status_has_the_figures_of_all_shards_that_can_be_reached() -> None:
    async def body(lake: ShardedLake, client: EmbeddedEngine) -> None:
        for shard, bucket in enumerate(("aaa", "bbb", "ccc")):
            await make(lake, shard, bucket)
            await put(client, "k", b"content", bucket=bucket)
        request = m.OpenObjects([("aaa", "k"), ("bbb", "k"), ("bbb", "k"), ("ccc", "k")])
        await ask(client, request, m.OpenResults)
        status = await status_of(client)
        assert status["clients"]["leases"] == 4
        assert [shard["shard"] for shard in status["names_shards"]] == [1, 2]
        assert [shard["clients"]["leases"] for shard in status["names_shards"]] == [2, 1]
        assert all(shard["metadata"]["overlay_entries"] for shard in status["names_shards"])
        lake.lose(2)
        status = await status_of(client)
        first, second = status["names_shards"]
        assert "metadata" in first
        assert "cannot be reached" in second["unreachable"]

    with_shards(3, body)


async def status_of(client: EmbeddedEngine) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((await ask(client, m.Status(), m.StatusReply)).status_json)
    return found
