"""Buckets that several heads make, remove and look for at once, in several names shards: each is one register.

Answers are late, what heads know of the shards is later still, and a bucket is in another shard each time it is made.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
import trio

from engine.coordinator.names_shards import NamesShards
from engine.process.embedded import EmbeddedEngine
from lakefs.errors import AlreadyExists, BucketNotFound, EngineBusy
from lakefs.ids import NamesShard
from lakefs.wire import messages as m
from tests.linear import NOTHING, PRESENT, Found, Nothing, Operation, Value, contradiction
from tests.memory_coordinator import MemoryCoordinator
from tests.shards_rig import InTurn, ShardedLake, sharded_lake
from tests.store_rig import ask, change, good, run
from tests.unit.engine.cluster.test_client_names import make

BUCKETS = ("aaa", "bbb")
CLIENTS, OPERATIONS, SHARDS = 6, 30, 3


class Late(InTurn):
    """Shards as a head knows them, which reads them slowly."""

    def __init__(self, coordinator: MemoryCoordinator, chance: random.Random) -> None:
        super().__init__(coordinator)
        self.chance = chance

    async def read(self, bucket: str) -> NamesShard | None:
        """Read a bucket's record, late; the answer is late, too."""
        await trio.sleep(self.chance.random() / 20)
        found = await super().read(bucket)
        await trio.sleep(self.chance.random() / 20)
        return found


@dataclass
class History:
    """The operations of all clients, and what they came across."""

    lake: ShardedLake
    chance: random.Random
    of_bucket: dict[str, list[Operation]] = field(default_factory=lambda: {bucket: [] for bucket in BUCKETS})
    seen: Counter[str] = field(default_factory=Counter)

    def note(self, who: str, bucket: str, called: float, found: Found, writes: Value | Nothing = NOTHING) -> None:
        self.of_bucket[bucket].append(Operation(called, trio.current_time(), found, writes, who))

    async def use(self, client: EmbeddedEngine) -> None:
        for _ in range(OPERATIONS):
            await trio.sleep(self.chance.random() / 10)
            step = self.chance.choice((self.make, self.make, self.remove, self.list_all, self.look, self.look_at))
            try:
                await step(client, self.chance.choice(BUCKETS))
            except EngineBusy:
                self.seen["busy"] += 1

    async def make(self, client: EmbeddedEngine, bucket: str) -> None:
        called = trio.current_time()
        try:
            (stat,) = (await ask(client, m.BucketCreate(bucket), m.Buckets)).buckets
        except AlreadyExists:
            self.note("make", bucket, called, PRESENT)
        else:
            self.note("make", bucket, called, None, stat.node)
            self.seen[f"made in {stat.node >> 40}"] += 1

    async def remove(self, client: EmbeddedEngine, bucket: str) -> None:
        called = trio.current_time()
        try:
            await ask(client, m.BucketRemove(bucket), m.Done)
        except BucketNotFound:
            self.note("remove", bucket, called, None)
            self.seen["missing"] += 1
        else:
            self.note("remove", bucket, called, PRESENT, None)

    async def list_all(self, client: EmbeddedEngine, _: str) -> None:
        called = trio.current_time()
        found = {stat.name: stat.node for stat in (await ask(client, m.BucketList(), m.Buckets)).buckets}
        for bucket in BUCKETS:
            self.note("list", bucket, called, found.get(bucket))

    async def look(self, client: EmbeddedEngine, _: str) -> None:
        called = trio.current_time()
        answer = await ask(client, m.StatNames([(bucket, "") for bucket in BUCKETS]), m.NameResults)
        for bucket, result in zip(BUCKETS, answer.results, strict=True):
            if result.failure is not None and not isinstance(result.failure.as_error(), BucketNotFound):
                assert isinstance(result.failure.as_error(), EngineBusy)
                continue
            self.note("stat", bucket, called, None if result.stat is None else result.stat.node)

    async def look_at(self, client: EmbeddedEngine, bucket: str) -> None:
        called = trio.current_time()
        try:
            (stat,) = (await ask(client, m.BucketList(bucket), m.Buckets)).buckets
        except BucketNotFound:
            self.note("look", bucket, called, None)
        else:
            self.note("look", bucket, called, stat.node)


async def history(seed: int) -> History:
    """Return the history of clients at three heads: one follows the shards, one late, one not at all."""
    chance = random.Random(seed)
    async with sharded_lake(SHARDS) as lake, trio.open_nursery() as followers:

        async def late(_: int) -> None:
            await trio.sleep(chance.random() / 20)

        lake.paths.delay = late
        made = History(lake, chance)
        known: list[NamesShards] = [lake.shards, Late(lake.coordinator, chance), Late(lake.coordinator, chance)]
        followers.start_soon(known[1].follow)
        heads = [lake.more_heads(shards) for shards in known]
        async with heads[0] as first, heads[1] as second, heads[2] as third:
            clients = [EmbeddedEngine(head, descriptors=False) for head in (first, second, third) * 2]
            assert len(clients) == CLIENTS
            async with trio.open_nursery() as nursery:
                for client in clients:
                    nursery.start_soon(made.use, client)
            for client in clients:
                await client.aclose()
        followers.cancel_scope.cancel()
    return made


class Behind(NamesShards):
    """Shards as a head knows them that hears of a bucket only when it has asked twice."""

    def __init__(self, coordinator: MemoryCoordinator) -> None:
        super().__init__(coordinator)
        self.asked: set[str] = set()

    async def read(self, bucket: str) -> NamesShard | None:
        """Return nothing for the first time."""
        if bucket in self.asked:
            return await super().read(bucket)
        self.asked.add(bucket)
        return None


def test_names_of_a_bucket_that_is_assigned_elsewhere_meanwhile_are_bound_there() -> None:
    async def main() -> None:
        async with sharded_lake(SHARDS) as lake:
            await make(lake, 2, "aaa")
            await make(lake, 1, "bbb")
            shards = Behind(lake.coordinator)
            await shards.read_count()
            async with lake.more_heads(shards) as head:
                client = EmbeddedEngine(head, descriptors=False)
                names = [(bucket, key) for key in "xy" for bucket in ("aaa", "new", "bbb")]
                changes = [change(key, bucket=bucket) for bucket, key in names]
                made = good(await ask(client, m.PutObjects([1] * 6, changes), m.NameResults, b"uvwxyz"))
                assert [(stat.bucket, stat.key) for stat in made] == names
                assert [stat.node >> 40 for stat in made if stat.bucket != "new"] == [2, 1, 2, 1]
                await client.aclose()

    run(main)


@pytest.mark.parametrize("seed", range(10))
def test_each_bucket_is_one_whichever_shard_has_it(seed: int) -> None:
    async def main() -> None:
        made = await history(seed)
        for bucket, operations in made.of_bucket.items():
            assert contradiction(operations) is None, bucket
        assert made.seen["busy"] < 5

    run(main)


def test_the_histories_come_across_all_shards_and_missing_buckets() -> None:
    async def main() -> None:
        seen: Counter[str] = Counter()
        for seed in range(4):
            seen += (await history(seed)).seen
        assert min(seen[f"made in {shard}"] for shard in range(SHARDS)) > 5
        assert seen["missing"] > 5

    run(main)
