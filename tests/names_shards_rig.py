"""A small lake whose names are in several shards, all led in this process; asked by requests, or as they are.

Each shard is a `SmallLake` of its own (`tests.lake_rig`) as far as names go, over the members and the coordinator of
the first one, which drives gc.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from copy import copy
from enum import Enum
from random import Random
from traceback import format_exception
from typing import Any, Final

import pytest
import trio

from engine.coordinator.coordinator import Put
from engine.coordinator.records import SHARDS_KEY, ShardsRecord, encode
from engine.head.names_link import NamesConnection, names_at
from engine.lake.embedded_names import embedded_names
from engine.lake_gc.joined_generation import JoinedGeneration
from engine.lake_gc.lake_gc import LakeGcReport
from engine.lake_upkeep.other_shards import OtherShards, shards_by_requests, shards_in_process
from engine.lake_upkeep.shard_upkeep import ShardUpkeep
from engine.process.embedded import EmbeddedEngine
from engine.requests.bind import BindGate
from engine.requests.table import NamesService
from engine.server.listener import Server
from lakefs.errors import EngineUnreachable
from lakefs.ids import NamesShard
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from tests.held_open import Process
from tests.lake_rig import SmallLake, small_lake
from tests.names_rig import names_store
from tests.sim.world.disk import SimDisk
from tests.sim.world.network import SimulatedNetwork


class Reach(Enum):
    """The way in which the names of other shards are asked."""

    BY_REQUESTS = "by requests"
    OVER_NETWORK = "by requests over a simulated network"
    IN_PROCESS = "in one process"


NEAR: Final = Reach.BY_REQUESTS, Reach.IN_PROCESS
"""Ways without a network between: the steps of a cycle are checkpoints of trio."""
WAYS: Final = (
    *((Reach.BY_REQUESTS, count) for count in (2, 3)),
    *((Reach.IN_PROCESS, count) for count in (2, 3)),
    (Reach.OVER_NETWORK, 2),
)
"""Ways and numbers of shards: parameters of tests."""
_TOKEN: Final = "token of the lake"


@contextmanager
def noticed(message: str) -> Iterator[None]:
    """Make sure that the block fails, with an assertion of this message among its errors."""
    with pytest.raises((AssertionError, ExceptionGroup)) as failed:
        yield
    assert message in "".join(format_exception(failed.value)), f"it failed otherwise than by: {message}"


class LedShard(SmallLake):
    """The names of a shard other than the first, and their leader, on the members of a lake.  Made by `of`."""

    shard: NamesShard
    upkeep_of_shard: ShardUpkeep
    service: NamesService | None
    ended: trio.Event
    expiry_s: float
    network: SimulatedNetwork | None
    _serving: Process

    @classmethod
    def of(cls, lake: SmallLake, shard: int, network: SimulatedNetwork | None = None) -> LedShard:
        """Return the names of a shard, on a new disk; they are not started.  `network`: they listen there."""
        made = copy(lake)
        made.__class__ = cls
        assert isinstance(made, LedShard)
        made.shard = NamesShard(shard)
        made.names_disk = SimDisk()
        made.service = None
        made.expiry_s = 0.0
        made.network = network
        return made

    @property
    def address(self) -> str:
        """The address at which the leader listens."""
        return f"tcp://names-{self.shard}:7000"

    async def start_names(self) -> None:
        """Start a leader on the disk."""
        self._names_process = Process()
        self.names = await self._nursery.start(self._names_process.run, names_store(self.names_disk))
        self.gate = BindGate()
        self.joined = JoinedGeneration(self.names.metadata, self.gate)
        self.upkeep_of_shard = ShardUpkeep(
            self.shard,
            self.coordinator,
            self.members,
            self.stripes,
            self.names,
            self.joined,
            upload_expiry_s=self.expiry_s,
            batch=self._batch,
        )
        await self.upkeep_of_shard.begin()
        self.service = NamesService(self.names, gate=self.gate, upkeep=self.upkeep_of_shard.requests)
        self.client = EmbeddedEngine(self.service, descriptors=False)
        self.ended = trio.Event()
        if self.network is not None:
            self._serving = Process()
            await self._nursery.start(self._serving.run, self._served(self.service, self.network))

    @asynccontextmanager
    async def _served(self, service: NamesService, network: SimulatedNetwork) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            await nursery.start(Server(service, network, token=_TOKEN).listen_and_serve, self.address)
            yield
            nursery.cancel_scope.cancel()

    async def stop_names(self, *, crash: bool = False) -> None:
        """Stop the leader; connections to it end."""
        if self.network is not None and self.service is not None:
            await self._serving.stop(crash=True)
        self.service = None
        self.ended.set()
        await super().stop_names(crash=crash)

    def connect(self) -> AbstractAsyncContextManager[NamesConnection]:
        """Connect to the leader.  EngineUnreachable while there is none."""
        if self.service is None:
            raise EngineUnreachable("no replica of the names leads")
        if self.network is not None:
            return names_at(self.address, token=_TOKEN, network=self.network)()
        return embedded_names(self.service, self.ended.wait)()


async def nothing_happens(shard: LedShard, request: m.Request) -> None:
    """Let a request reach the leader of a shard."""


class _Hooked:
    """A connection of shard 0's leader: `hook` runs before each request, and ends the connection when it raises."""

    def __init__(self, shard: LedShard, connection: NamesConnection, lake: ShardedLake) -> None:
        self._shard = shard
        self._client = connection.client
        self._lake = lake

    async def call(self, request: m.Request) -> Reply:
        await self._lake.hook(self._shard, request)
        return await self._client.call(request)


class ShardedLake:
    """A lake with several names shards; made by `sharded_lake`."""

    def __init__(self, lake: SmallLake, reach: Reach) -> None:
        self.first: Final = lake
        self.others: Final[list[LedShard]] = []
        self.hook: Callable[[LedShard, m.Request], Awaitable[None]] = nothing_happens
        """Runs before each request of shard 0's leader to another shard."""
        self.network = SimulatedNetwork(Random(1), latency_s=0.001) if reach is Reach.OVER_NETWORK else None
        self.reached: Final = self._in_process() if reach is Reach.IN_PROCESS else shards_by_requests(self._connect)

    def _in_process(self) -> OtherShards:
        def now() -> OtherShards:
            return shards_in_process({shard.shard: shard.upkeep_of_shard for shard in self.others})

        return OtherShards(lambda shard: now().names(shard), lambda shard, full: now().check(shard, full))

    @property
    def shards(self) -> Sequence[SmallLake]:
        """All shards, the first one too."""
        return self.first, *self.others

    def _connect(self, shard: NamesShard) -> Callable[[], AbstractAsyncContextManager[NamesConnection]]:
        @asynccontextmanager
        async def connect() -> AsyncIterator[NamesConnection]:
            led = self.others[shard - 1]
            async with led.connect() as connection:
                hooked: Any = _Hooked(led, connection, self)
                yield connection._replace(client=hooked)

        return connect

    async def add(self) -> LedShard:
        """Add a shard, and let it be led."""
        made = LedShard.of(self.first, len(self.others) + 1, self.network)
        self.others.append(made)
        await self.count(len(self.others) + 1)
        await made.start_names()
        return made

    async def count(self, count: int) -> None:
        """Record how many shards there are."""
        await self.first.coordinator.transact([], [Put(SHARDS_KEY, encode(ShardsRecord(count)))])

    async def collect(self) -> LakeGcReport:
        return await self.first.collect()


@asynccontextmanager
async def sharded_lake(reach: Reach, count: int, members: int = 3, *, batch: int = 4) -> AsyncIterator[ShardedLake]:
    """A lake of so many names shards and members; see `small_lake`."""
    async with small_lake(members, batch=batch) as first:
        lake = ShardedLake(first, reach)
        first.others = lake.reached
        await first.stop_names()
        await first.start_names()
        for _ in range(count - 1):
            await lake.add()
        try:
            yield lake
        finally:
            for shard in lake.others:
                await shard.stop_names()
