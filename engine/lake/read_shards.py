"""The other names shards of a machine whose names are only read: each from its replica here, if there is one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from engine.coordinator.coordinator import Coordinator
from engine.coordinator.names_shards import open_names_shards, shards_of
from engine.head.names_link import ConnectNames, NamesConnection
from engine.lake.embedded_names import embedded_names
from engine.lake.names_here import open_names
from engine.lake.plan import LakePlan
from engine.lake.reads_only import reading
from engine.lake.shard_replicas import WayToNames
from engine.lake.shards_here import other_shards, shards_with_names
from engine.requests.bind import BindGate
from engine.requests.table import NamesService
from lakefs.errors import EngineUnreachable
from lakefs.ids import NamesShard
from lakefs.ports import Offload


async def way_to_read(
    stack: AsyncExitStack, plan: LakePlan, table: Coordinator, first: ConnectNames, offload: Offload
) -> WayToNames:
    """Return the way to the names of all shards; they are open until the stack ends.

    `table`: the lake's records in the names of the first one.  Errors of `open_names`.
    """
    count = await shards_of(table)
    if count == 1:
        return WayToNames(first)
    connects: dict[NamesShard, ConnectNames] = {}
    here = await offload.run(shards_with_names, plan)
    for shard in other_shards(count):
        if shard in here:
            names = await stack.enter_async_context(open_names(plan, reading, shard=shard, is_new=False))
            connects[shard] = embedded_names(NamesService(names.store, gate=BindGate()))
    shards = await stack.enter_async_context(open_names_shards(table))
    return WayToNames(first, shards, lambda shard: _connecting(shard, connects.get(shard)))


def _connecting(shard: NamesShard, found: ConnectNames | None) -> ConnectNames:
    """Return what connects to the names of a shard.  EngineUnreachable where they are not here."""

    @asynccontextmanager
    async def connect() -> AsyncIterator[NamesConnection]:
        if found is None:
            raise EngineUnreachable(f"this machine has no replica of names shard {shard}, and names are only read here")
        async with found() as connection:
            yield connection

    return connect
