"""A lake whose names are in several shards, in this process: each on a simulated disk of its own, heads over all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

import trio

from engine.coordinator.bucket_shards import BucketShards
from engine.coordinator.coordinator import Put
from engine.coordinator.lake_state import LakeState
from engine.coordinator.names_shards import NamesShards
from engine.coordinator.records import SHARDS_KEY, ShardsRecord, encode
from engine.head.head import Head, open_head
from engine.head.names_link import ConnectNames, NamesConnection
from engine.lake_gc.joined_generation import JoinedGeneration
from engine.lake_upkeep.lake_upkeep import LakeUpkeep
from engine.process.embedded import EmbeddedEngine
from engine.requests.bind import BindGate
from engine.store.keyed_store import KeyedStore
from lakefs.errors import EngineUnreachable
from lakefs.host.buffers import BufferPool
from lakefs.host.offload import InlineOffload
from lakefs.ids import NamesShard
from tests.head_rig import BUFFER_BYTES, KeysMember, Lake, Names, begin_records
from tests.memory_coordinator import MemoryCoordinator
from tests.memory_member import MemoryMember
from tests.memory_stripes import KnownState, MemoryStripes
from tests.names_rig import names_store
from tests.store_rig import run


class InTurn(NamesShards):
    """Shards as a head knows them; new buckets are made in one after the other."""

    def __init__(self, coordinator: MemoryCoordinator) -> None:
        super().__init__(coordinator)
        self._turns = count()

    def emptiest(self) -> NamesShard:
        """Return the next shard."""
        return NamesShard(next(self._turns) % self.count)


@dataclass
class ShardedLake(Lake):
    """A head over several names shards."""

    coordinator: MemoryCoordinator
    all_names: list[Names]
    shards: NamesShards
    """They are known to the first head so."""
    more_heads: Callable[[NamesShards], AbstractAsyncContextManager[Head]]
    """Opens another head, which knows shards as given."""
    away: set[NamesShard] = field(default_factory=set)
    """Shards that cannot be connected to."""

    def leases(self) -> int:
        """Return the number of leases that the names keep."""
        return sum(names.store.references.statistics()["leases"] for names in self.all_names)

    def lose(self, shard: int) -> None:
        """End the connections to a shard, and let nobody connect to it until it is taken out of `away`."""
        self.away.add(NamesShard(shard))
        self.all_names[shard].lose()

    def shard_of(self, bucket: str) -> NamesShard | None:
        """Return the shard of a bucket as the first head knows it."""
        return self.shards.known(bucket)


@asynccontextmanager
async def sharded_lake(shard_count: int) -> AsyncIterator[ShardedLake]:
    """A lake whose names are in several shards; its upkeep is at the first.  At the end nothing is held."""
    async with trio.open_nursery() as nursery:
        stripes, keys = MemoryStripes(), KeysMember(nursery)
        known = KnownState(reach=keys.reach)
        coordinator = MemoryCoordinator()
        await begin_records(LakeState(coordinator), known.tables[0])
        await coordinator.transact([], [Put(SHARDS_KEY, encode(ShardsRecord(shard_count)))])
        members = MemoryMember(stripes, known)
        away: set[NamesShard] = set()

        def upkeep_of(store: KeyedStore, gate: BindGate) -> LakeUpkeep:
            joined = JoinedGeneration(store.metadata, gate)
            return LakeUpkeep(coordinator, members, stripes, store, gate, joined, InlineOffload())

        async def keepers() -> Sequence[EmbeddedEngine]:
            return [await keys.reach()]

        async with AsyncExitStack() as stack:
            all_names = []
            for shard in map(NamesShard, range(shard_count)):
                store = await stack.enter_async_context(names_store())
                buckets = BucketShards(coordinator, shard)
                all_names.append(Names(store, upkeep_of if not shard else None, buckets))

            def connect_to(shard: NamesShard) -> ConnectNames:
                @asynccontextmanager
                async def connect() -> AsyncIterator[NamesConnection]:
                    if shard in away:
                        raise EngineUnreachable(f"nothing leads names shard {shard}")
                    async with all_names[shard].connect() as connection:
                        yield connection

                return connect

            @asynccontextmanager
            async def open_one(shards: NamesShards) -> AsyncIterator[Head]:
                async with open_head(
                    connect_to(NamesShard(0)),
                    stripes,
                    known,
                    offload=InlineOffload(),
                    clock=all_names[0].store.clock,
                    buffers=BufferPool(BUFFER_BYTES),
                    shards=shards,
                    connect_shard=connect_to,
                ) as head:
                    yield head
                    assert head.parts.buffers.in_use == 0, "a request's memory was not given back"
                    assert head.parts.answers.held_bytes == 0, "an answer's room was not given back"

            shards = InTurn(coordinator)
            await shards.read_count()
            nursery.start_soon(shards.follow)
            head = await stack.enter_async_context(open_one(shards))
            yield ShardedLake(
                head, all_names[0], keepers, stripes, known, coordinator, all_names, shards, open_one, away
            )
        await keys.stop()
        nursery.cancel_scope.cancel()


def with_shards(shard_count: int, body: Callable[[ShardedLake, EmbeddedEngine], Awaitable[None]]) -> None:
    """Run with a lake of so many shards and a client of its head."""

    async def main() -> None:
        async with sharded_lake(shard_count) as lake:
            client = lake.client()
            try:
                await body(lake, client)
            finally:
                await client.aclose()

    run(main)
