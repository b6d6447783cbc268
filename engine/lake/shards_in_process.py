"""All names shards of a lake in one process: a lake without etcd that was rescued from one with several.

Rules kept here:
- Buckets stay assigned as they were, in the coordinator's table, which lies in the names of the first shard.
- The upkeep of the lake reaches the names of the other shards in this process.
- Each shard serves other machines, and heads beside this process, at an address of its own (`shard_address`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import MappingProxyType

from engine.coordinator.bucket_shards import BucketShards
from engine.coordinator.coordinator import Coordinator
from engine.coordinator.names_shards import open_names_shards, shards_of
from engine.format.group_parts import FIRST_SHARD
from engine.head.names_link import ConnectNames
from engine.lake.embedded_names import embedded_names
from engine.lake.lake_content import Content
from engine.lake.names_here import open_names
from engine.lake.plan import LakePlan
from engine.lake.shard_replicas import WayToNames
from engine.lake_gc.joined_generation import JoinedGeneration
from engine.lake_upkeep.other_shards import NO_OTHER_SHARDS, OtherShards, shards_in_process
from engine.lake_upkeep.shard_upkeep import ShardUpkeep
from engine.namespace.buckets import list_buckets
from engine.process.mirrored_names import LocalNames
from engine.requests.bind import BindGate
from engine.requests.table import NamesService
from engine.store.keyed_store import KeyedStore
from lakefs.ids import NamesShard
from lakefs.wire.engine_port import EngineService


@dataclass(frozen=True)
class ShardsInProcess:
    """The services of the other shards, what the upkeep needs of them, and the buckets of the first one.

    `buckets` is None where there is one shard.
    """

    services: Mapping[NamesShard, EngineService] = field(default_factory=lambda: MappingProxyType({}))
    upkeep: OtherShards = NO_OTHER_SHARDS
    buckets: BucketShards | None = None

    async def way(self, stack: AsyncExitStack, table: Coordinator, first: ConnectNames) -> WayToNames:
        """Return the way to the names of all shards, until the stack ends; `first` connects to the first one."""
        if not self.services:
            return WayToNames(first)
        connects = {shard: embedded_names(service) for shard, service in self.services.items()}
        shards = await stack.enter_async_context(open_names_shards(table))
        return WayToNames(first, shards, connects.__getitem__)


async def open_other_shards(
    stack: AsyncExitStack, plan: LakePlan, table: Coordinator
) -> Mapping[NamesShard, LocalNames]:
    """Open the names of all shards but the first until the stack ends.  Errors of `open_names`."""
    found = {}
    for shard in map(NamesShard, range(1, await shards_of(table))):
        found[shard] = await stack.enter_async_context(open_names(plan, shard=shard, is_new=False))
    return found


async def served_here(
    plan: LakePlan, table: Coordinator, first: KeyedStore, others: Mapping[NamesShard, LocalNames], content: Content
) -> ShardsInProcess:
    """Return what serves on names of all other shards.  Errors of `ShardUpkeep.begin` and `BucketShards.begin`."""
    if not others:
        return ShardsInProcess()
    own = BucketShards(table, FIRST_SHARD)
    await own.begin(buckets_of(first))
    services: dict[NamesShard, EngineService] = {}
    upkeeps = {}
    for shard, names in others.items():
        store, gate, buckets = names.store, BindGate(), BucketShards(table, shard)
        joined, expiry_s = JoinedGeneration(store.metadata, gate), plan.upload_expiry_s
        upkeep = ShardUpkeep(shard, table, content.links, content.stripes, store, joined, upload_expiry_s=expiry_s)
        await upkeep.begin()
        await buckets.begin(buckets_of(store))
        services[shard] = NamesService(store, gate=gate, upkeep=upkeep.requests, buckets=buckets)
        upkeeps[shard] = upkeep
    return ShardsInProcess(services, shards_in_process(upkeeps), own)


def buckets_of(store: KeyedStore) -> list[str]:
    """Return the names of the buckets that a store has."""
    with store.metadata.view() as view:
        return [bucket.name for bucket in list_buckets(view)]
