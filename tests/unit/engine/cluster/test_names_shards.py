"""Buckets are assigned to one names shard each, by the leader of that shard, and processes find out which it is."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from engine.coordinator.bucket_shards import BucketShards
from engine.coordinator.coordinator import Put
from engine.coordinator.names_shards import NamesShards, open_names_shards
from engine.coordinator.records import (
    SHARDS_KEY,
    BucketShardRecord,
    LeaderRecord,
    ShardsRecord,
    bucket_key,
    decode,
    encode,
)
from engine.coordinator.term_coordinator import TermCoordinator
from engine.format.group_parts import LogKeys
from engine.tables.views import BucketUnassigned
from lakefs.errors import BucketElsewhere, CoordinatorLost, EngineUnreachable
from lakefs.ids import NamesShard
from tests.memory_coordinator import MemoryCoordinator, memory_coordinator
from tests.unit.support.metadata_rig import run

FIRST, SECOND, THIRD = map(NamesShard, range(3))
Main = Callable[[MemoryCoordinator], Awaitable[None]]


def with_coordinator(main: Main) -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator:
            await main(coordinator)

    run(scenario)


def shard_of(coordinator: MemoryCoordinator, bucket: str) -> NamesShard | None:
    entry = coordinator.entries.get(bucket_key(bucket))
    return None if entry is None else decode(BucketShardRecord, entry.value).shard


def may_make(buckets: BucketShards, bucket: str) -> bool:
    try:
        buckets.making(bucket)
    except BucketUnassigned:
        return False
    return True


# --- the leader of a shard -----------------------------------------------------------------------------


def test_a_bucket_is_made_only_where_it_is_assigned() -> None:
    async def main(coordinator: MemoryCoordinator) -> None:
        first, second = BucketShards(coordinator, FIRST), BucketShards(coordinator, SECOND)
        assert not may_make(first, "b")
        await first.assign("b")
        assert may_make(first, "b")
        assert shard_of(coordinator, "b") == FIRST
        with pytest.raises(BucketElsewhere, match="names shard 0"):
            await second.assign("b")
        assert not may_make(second, "b")

    with_coordinator(main)


def test_a_removed_bucket_may_be_made_in_another_shard() -> None:
    async def main(coordinator: MemoryCoordinator) -> None:
        first, second = BucketShards(coordinator, FIRST), BucketShards(coordinator, SECOND)
        await first.assign("b")
        first.removed("b")
        assert not may_make(first, "b"), "its record may be gone in a moment"
        with pytest.raises(BucketElsewhere):
            await second.assign("b")
        await first.release("b")
        await second.assign("b")
        assert (may_make(first, "b"), may_make(second, "b")) == (False, True)

    with_coordinator(main)


def test_a_bucket_that_is_made_again_before_its_release_stays_assigned() -> None:
    async def main(coordinator: MemoryCoordinator) -> None:
        first = BucketShards(coordinator, FIRST)
        await first.assign("b")
        first.removed("b")
        await first.assign("b")
        await first.release("b")
        assert may_make(first, "b")
        assert shard_of(coordinator, "b") == FIRST

    with_coordinator(main)


def test_a_term_begins_with_the_buckets_that_the_shard_has() -> None:
    async def main(coordinator: MemoryCoordinator) -> None:
        before = BucketShards(coordinator, FIRST)
        for bucket in ("kept", "removed"):
            await before.assign(bucket)
        other = BucketShards(coordinator, SECOND)
        await other.assign("elsewhere")
        many = [f"old-{number}" for number in range(120)]
        term = BucketShards(coordinator, FIRST)
        await term.begin(["kept", *many])
        assert all(may_make(term, bucket) for bucket in ["kept", *many])
        assert not may_make(term, "removed")
        assert shard_of(coordinator, "removed") is None
        assert shard_of(coordinator, "elsewhere") == SECOND
        assert {shard_of(coordinator, bucket) for bucket in many} == {FIRST}

    with_coordinator(main)


def test_a_bucket_in_two_shards_is_logged_and_the_term_begins(capsys: pytest.CaptureFixture[str]) -> None:
    async def main(coordinator: MemoryCoordinator) -> None:
        await BucketShards(coordinator, SECOND).assign("both")
        term = BucketShards(coordinator, FIRST)
        await term.begin(["both", "own"])
        assert (may_make(term, "both"), may_make(term, "own")) == (False, True)

    with_coordinator(main)
    assert "two names shards have one bucket" in capsys.readouterr().out


def test_a_leader_that_was_deposed_assigns_and_releases_nothing() -> None:
    async def main(coordinator: MemoryCoordinator) -> None:
        key = LogKeys(SECOND).leader
        await coordinator.transact([], [Put(key, encode(LeaderRecord(b"first", "machine", ())))])
        old = BucketShards(TermCoordinator(coordinator, b"first", key), SECOND)
        await old.assign("b")
        await coordinator.transact([], [Put(key, encode(LeaderRecord(b"second", "machine", ())))])
        with pytest.raises(CoordinatorLost):
            await old.assign("c")
        old.removed("b")
        await old.release("b")
        assert (shard_of(coordinator, "b"), shard_of(coordinator, "c")) == (SECOND, None)

    with_coordinator(main)


class Shards:
    """Shards that make and remove buckets; what each of them has."""

    def __init__(self, coordinator: MemoryCoordinator, choose: random.Random) -> None:
        self.coordinator = coordinator
        self.choose = choose
        self.there: dict[NamesShard, set[str]] = {FIRST: set(), SECOND: set(), THIRD: set()}

    async def make(self, shard: NamesShard, buckets: BucketShards, bucket: str) -> None:
        for _ in range(3):
            try:
                buckets.making(bucket)
            except BucketUnassigned:
                try:
                    await buckets.assign(bucket)
                except BucketElsewhere:
                    return
                continue
            self.there[shard].add(bucket)  # the step of the decision
            assert sum(bucket in some for some in self.there.values()) == 1
            assert shard_of(self.coordinator, bucket) == shard
            return

    async def remove(self, shard: NamesShard, buckets: BucketShards, bucket: str) -> None:
        if bucket in self.there[shard]:
            self.there[shard].discard(bucket)
            buckets.removed(bucket)
            await trio.sleep(self.choose.random() / 20)  # until it is durable
            await buckets.release(bucket)

    async def use(self, shard: NamesShard) -> None:
        for _ in range(3):
            buckets = BucketShards(self.coordinator, shard)
            await buckets.begin(self.there[shard])
            async with trio.open_nursery() as nursery:
                for _ in range(25):
                    step = self.choose.choice((self.make, self.make, self.remove))
                    nursery.start_soon(step, shard, buckets, self.choose.choice("abc"))
                    await trio.sleep(self.choose.random() / 60)
                if self.choose.random() < 0.5:
                    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("seed", range(20))
def test_no_bucket_is_ever_in_two_shards(seed: int) -> None:
    """Shards make and remove the same few buckets at once; some calls are cancelled, and terms begin anew."""

    async def main(coordinator: MemoryCoordinator) -> None:
        shards = Shards(coordinator, random.Random(seed))
        async with trio.open_nursery() as nursery:
            for shard in shards.there:
                nursery.start_soon(shards.use, shard)

    with_coordinator(main)


# --- processes that ask ----------------------------------------------------------------------------------


def test_shards_and_buckets_are_followed() -> None:
    async def main(coordinator: MemoryCoordinator) -> None:
        buckets = BucketShards(coordinator, SECOND)
        await buckets.assign("early")
        async with open_names_shards(coordinator) as shards:
            await trio.testing.wait_all_tasks_blocked()
            assert (shards.count, shards.known("early"), shards.known("late")) == (1, SECOND, None)
            await buckets.assign("late")
            await coordinator.transact([], [Put(SHARDS_KEY, encode(ShardsRecord(3)))])
            assert await shards.wait_count(1) == 3
            await trio.testing.wait_all_tasks_blocked()
            assert shards.known("late") == SECOND
            buckets.removed("early")
            await buckets.release("early")
            await trio.testing.wait_all_tasks_blocked()
            assert shards.known("early") is None
            assert shards.emptiest() == FIRST

    with_coordinator(main)


def test_what_is_read_is_as_the_coordinator_has_it_now() -> None:
    async def main(coordinator: MemoryCoordinator) -> None:
        shards = NamesShards(coordinator)  # it follows nothing
        assert await shards.read("b") is None
        await BucketShards(coordinator, THIRD).assign("b")
        assert shards.known("b") is None
        assert await shards.with_buckets() == [FIRST, THIRD]
        assert await shards.read("b") == shards.known("b") == THIRD

    with_coordinator(main)


def test_what_was_read_stays_known_while_the_coordinator_is_away() -> None:
    async def main(coordinator: MemoryCoordinator) -> None:
        await BucketShards(coordinator, SECOND).assign("b")
        async with open_names_shards(coordinator) as shards:
            await trio.testing.wait_all_tasks_blocked()
            coordinator.close()
            await trio.sleep(30)
            assert shards.known("b") == SECOND
            with pytest.raises(EngineUnreachable):
                await shards.read("b")

    with_coordinator(main)
