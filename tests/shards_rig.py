"""A lake whose names are in several shards, in this process: each on a simulated disk of its own, heads over all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, cast

import msgspec
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
from engine.lake_upkeep.other_shards import shards_in_process
from engine.lake_upkeep.shard_upkeep import ShardUpkeep
from engine.process.embedded import EmbeddedEngine
from engine.requests.bind import BindGate
from engine.store.keyed_store import KeyedStore
from engine.tables.views import Transaction
from lakefs.errors import EngineUnreachable
from lakefs.host.buffers import BufferPool
from lakefs.host.offload import InlineOffload
from lakefs.ids import NamesShard
from lakefs.limits import NAMES_CONNECT_S
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient, Reply
from tests.head_rig import BUFFER_BYTES, KeysMember, Lake, Names, UpkeepOf, begin_records
from tests.memory_coordinator import MemoryCoordinator
from tests.memory_member import MemoryMember
from tests.memory_stripes import KnownState, MemoryStripes
from tests.names_rig import names_store
from tests.store_rig import run


@dataclass
class Paths:
    """The ways of all heads to the names shards."""

    away: set[NamesShard] = field(default_factory=set)
    """Shards that cannot be connected to."""
    silent: set[int] = field(default_factory=set)
    """Shards that do not answer those who connect."""
    runs: dict[int, int] = field(default_factory=dict)
    """Number of times that the names of a shard were started again."""
    asked: list[tuple[int, str]] = field(default_factory=list)
    """The shard and kind of each request."""
    delay: Callable[[int], Awaitable[None]] | None = None
    """Called with the shard before each request, and before its answer: one that is cancelled then may be done."""

    def around(self, shard: NamesShard, connection: NamesConnection) -> NamesConnection:
        """Return a connection to a shard that goes this way."""
        path = cast(EngineClient, LatePath(shard, connection.client, self))
        run = connection.hello.boot_id[:15] + bytes([self.runs[shard]]) if shard in self.runs else b""
        hello = msgspec.structs.replace(connection.hello, boot_id=run or connection.hello.boot_id)
        return NamesConnection(path, hello, connection.wait_ended)


class LatePath:
    """A client of a shard whose requests and answers may be late."""

    def __init__(self, shard: NamesShard, client: EngineClient, paths: Paths) -> None:
        self._shard = shard
        self._client = client
        self._paths = paths

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def call(self, request: m.Request, *rest: Any, **more: Any) -> Reply:
        """Send a request, late, and return its answer, late."""
        self._paths.asked.append((self._shard, type(request).__name__))
        if self._paths.delay is None:
            return await self._client.call(request, *rest, **more)
        await self._paths.delay(self._shard)
        try:
            return await self._client.call(request, *rest, **more)
        finally:
            await self._paths.delay(self._shard)


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
    paths: Paths
    """The ways of heads to the shards."""

    @property
    def away(self) -> set[NamesShard]:
        """Shards that cannot be connected to."""
        return self.paths.away

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


def _begin_nodes(shard: NamesShard, txn: Transaction) -> None:
    """Let a shard's ids of nodes be its own in the lake."""
    txn.new_node_ids(1 + (shard << 40))


@asynccontextmanager
async def _names(coordinator: MemoryCoordinator, shard: NamesShard, upkeep_of: UpkeepOf | None) -> AsyncIterator[Names]:
    async with names_store() as store:
        await store.metadata.commit(partial(_begin_nodes, shard))
        yield Names(store, upkeep_of, BucketShards(coordinator, shard))


def _connect(all_names: Sequence[Names], paths: Paths, shard: NamesShard) -> ConnectNames:
    """Return what connects to a shard."""

    @asynccontextmanager
    async def connect() -> AsyncIterator[NamesConnection]:
        if shard in paths.away:
            raise EngineUnreachable(f"nothing leads names shard {shard}")
        if shard in paths.silent:
            await trio.sleep(NAMES_CONNECT_S)
            raise EngineUnreachable(f"names shard {shard} does not answer")
        async with all_names[shard].connect() as connection:
            yield paths.around(shard, connection)

    return connect


def _upkeeps(
    all_names: Sequence[Names], coordinator: MemoryCoordinator, members: MemoryMember, stripes: MemoryStripes
) -> dict[NamesShard, ShardUpkeep]:
    """Return the upkeep of each shard but the first."""
    return {
        NamesShard(shard): ShardUpkeep(
            NamesShard(shard),
            coordinator,
            members,
            stripes,
            names.store,
            JoinedGeneration(names.store.metadata, names.gate),
        )
        for shard, names in enumerate(all_names)
        if shard
    }


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
        paths = Paths()
        upkeeps: dict[NamesShard, ShardUpkeep] = {}

        def upkeep_of(store: KeyedStore, gate: BindGate) -> LakeUpkeep:
            joined = JoinedGeneration(store.metadata, gate)
            others = shards_in_process(upkeeps)
            return LakeUpkeep(coordinator, members, stripes, store, gate, joined, InlineOffload(), others=others)

        async def keepers() -> Sequence[EmbeddedEngine]:
            return [await keys.reach()]

        all_names: list[Names] = []
        async with AsyncExitStack() as stack:
            for shard in map(NamesShard, range(shard_count)):
                made = _names(coordinator, shard, None if shard else upkeep_of)
                all_names.append(await stack.enter_async_context(made))
            upkeeps.update(_upkeeps(all_names, coordinator, members, stripes))

            connect_to = partial(_connect, all_names, paths)

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
                head, all_names[0], keepers, stripes, known, coordinator, all_names, shards, open_one, paths
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
