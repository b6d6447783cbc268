"""A small lake whose names are in several shards, all led in this process; asked by requests, or as they are.

Each shard is a `SmallLake` of its own (`tests.lake_rig`) as far as names go, over the members and the coordinator of
the first one, which drives gc.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from copy import copy
from enum import Enum
from traceback import format_exception
from typing import Any, Final

import pytest
import trio

from engine.coordinator.coordinator import Put
from engine.coordinator.records import SHARDS_KEY, ShardsRecord, encode
from engine.head.names_link import NamesConnection
from engine.lake.embedded_names import embedded_names
from engine.lake_gc.joined_generation import JoinedGeneration
from engine.lake_gc.lake_gc import LakeGcReport
from engine.lake_gc.names_by_requests import names_by_requests
from engine.lake_gc.names_port import OtherNames, ShardNames
from engine.lake_upkeep.shard_upkeep import ShardUpkeep
from engine.process.embedded import EmbeddedEngine
from engine.requests.bind import BindGate
from engine.requests.table import NamesService
from lakefs.errors import EngineUnreachable
from lakefs.ids import NamesShard
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from tests.held_open import Process
from tests.lake_rig import SmallLake, small_lake
from tests.names_rig import names_store
from tests.sim.world.disk import SimDisk


class Reach(Enum):
    """The way in which the names of other shards are asked."""

    BY_REQUESTS = "by requests"
    IN_PROCESS = "in one process"


WAYS: Final = tuple((reach, count) for reach in Reach for count in (2, 3))
"""Ways and numbers of shards: parameters of tests."""


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

    @classmethod
    def of(cls, lake: SmallLake, shard: int) -> LedShard:
        """Return the names of a shard, on a new disk; they are not started."""
        made = copy(lake)
        made.__class__ = cls
        assert isinstance(made, LedShard)
        made.shard = NamesShard(shard)
        made.names_disk = SimDisk()
        made.service = None
        made.expiry_s = 0.0
        return made

    async def start_names(self) -> None:
        """Start a leader on the disk."""
        self._names_process = Process()
        self.names = await self._nursery.start(self._names_process.run, names_store(self.names_disk))
        self.gate = BindGate()
        self.joined = JoinedGeneration(self.names.metadata, self.gate)
        self.upkeep_of_shard = ShardUpkeep(
            self.coordinator, self.names, self.joined, upload_expiry_s=self.expiry_s, batch=self._batch
        )
        await self.upkeep_of_shard.begin()
        self.service = NamesService(self.names, gate=self.gate, upkeep=self.upkeep_of_shard.requests)
        self.client = EmbeddedEngine(self.service, descriptors=False)
        self.ended = trio.Event()

    async def stop_names(self, *, crash: bool = False) -> None:
        """Stop the leader; connections to it end."""
        self.service = None
        self.ended.set()
        await super().stop_names(crash=crash)

    def connect(self) -> AbstractAsyncContextManager[NamesConnection]:
        """Connect to the leader.  EngineUnreachable while there is none."""
        if self.service is None:
            raise EngineUnreachable("no replica of the names leads")
        return embedded_names(self.service, self.ended.wait)()


async def nothing_happens(shard: LedShard, request: m.Request) -> None:
    """Let a request reach the leader of a shard."""


class _Hooked:
    """A connection of the driver: `hook` runs before each request, and ends the connection when it raises."""

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
        """Runs before each request of the driver to another shard."""
        by_requests = names_by_requests(self._connect)

        def of(shard: NamesShard) -> ShardNames:
            if reach is Reach.BY_REQUESTS:
                return by_requests(shard)
            return self.others[shard - 1].upkeep_of_shard.names

        self.names_of: Final[OtherNames] = of

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
        made = LedShard.of(self.first, len(self.others) + 1)
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
        first.others = lake.names_of
        await first.stop_names()
        await first.start_names()
        for _ in range(count - 1):
            await lake.add()
        try:
            yield lake
        finally:
            for shard in lake.others:
                await shard.stop_names()
