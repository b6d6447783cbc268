"""The names shards of a lake without etcd, behind the first one: on the same machine, and served by the same process.

A lake has several when it was moved here from an etcd, or rescued.  The table in the first shard's names says how many.
To clients and heads they are shards as with an etcd: a service each, at addresses of its own; buckets are assigned to
them in the table.

Rules kept here:
- All are opened before anybody is served, or the start ends (`engine.lake.shards_here`).
- A shard joins the generation of gc, and refuses what is retired, before it serves, as one that another process leads.
- A bucket that two shards have is that of the one in which it was made last: that was assigned when the other one's
  removal was durable, so what lost that removal is an older state.  It is hidden, and nothing of it is removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final

import structlog

from engine.coordinator.bucket_shards import BucketShards
from engine.coordinator.coordinator import Coordinator, Put
from engine.coordinator.names_coordinator import NamesCoordinator
from engine.coordinator.names_shards import NamesShards
from engine.coordinator.records import BucketShardRecord, ChargeRecord, bucket_key, encode
from engine.format.group_parts import FIRST_SHARD
from engine.head.names_link import ConnectNames
from engine.lake.embedded_names import embedded_names
from engine.lake.lake_content import Content
from engine.lake.names_here import open_names
from engine.lake.plan import LakePlan
from engine.lake.shard_replicas import WayToNames
from engine.lake.shards_here import other_shards, refuse_missing, refuse_other_note
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

_log: Final = structlog.get_logger(__name__)


@dataclass(frozen=True)
class LocalShard:
    """A names shard behind the first one: its names, and their service."""

    local: LocalNames
    service: EngineService


class LocalShards:
    """All of them.  Made by `open_other_shards`; empty where the lake has one shard."""

    def __init__(
        self,
        shards: Mapping[NamesShard, LocalShard],
        others: OtherShards = NO_OTHER_SHARDS,
        first: BucketShards | None = None,
    ) -> None:
        """`others`: the shards as the upkeep asks them.  `first`: the buckets of the first shard; None: it has all."""
        self.all: Final = shards
        self.others: Final = others
        self.first_buckets: Final = first

    def way(self, first: EngineService, shards: NamesShards) -> WayToNames:
        """Return the way to the names of all shards; `first`: the service of the first one."""
        connects: dict[NamesShard, ConnectNames] = {FIRST_SHARD: embedded_names(first)}
        connects |= {shard: embedded_names(each.service) for shard, each in self.all.items()}
        return WayToNames(connects[FIRST_SHARD], shards, connects.__getitem__)

    def state(self, first: LocalNames) -> dict[str, Any]:
        """Return where the names lie, for people and scripts; JSON-able."""
        others = [{"shard": shard, **each.local.state()} for shard, each in self.all.items()]
        return first.state() | ({"shards": others} if others else {})


async def open_other_shards(
    stack: AsyncExitStack,
    plan: LakePlan,
    first: KeyedStore,
    coordinator: NamesCoordinator,
    content: Content,
    charge: ChargeRecord | None,
    count: int,
) -> LocalShards:
    """Open all names shards of so many, but for the `first`, until the stack ends; they may be served on return.

    `charge`: of the coordinator, which is the table in the first one.  Errors of `refuse_missing`,
    `refuse_other_note` and `open_names`.
    """
    if count == 1:
        return LocalShards({})
    refuse_missing(plan, count)
    opened: dict[NamesShard, LocalNames] = {}
    for shard in other_shards(count):
        opened[shard] = await stack.enter_async_context(open_names(plan, shard=shard))
        await refuse_other_note(opened[shard].store.metadata, charge, shard)
    stores = {FIRST_SHARD: first} | {shard: names.store for shard, names in opened.items()}
    buckets = await assigned_buckets(coordinator, stores)
    shards: dict[NamesShard, LocalShard] = {}
    upkeeps: dict[NamesShard, ShardUpkeep] = {}
    for shard, names in opened.items():
        gate = BindGate()
        upkeep = upkeeps[shard] = ShardUpkeep(
            shard,
            coordinator,
            content.links,
            content.stripes,
            names.store,
            JoinedGeneration(names.store.metadata, gate),
            upload_expiry_s=plan.upload_expiry_s,
        )
        await upkeep.begin()
        service = NamesService(names.store, gate=gate, upkeep=upkeep.requests, buckets=buckets[shard])
        shards[shard] = LocalShard(names, service)
    return LocalShards(shards, shards_in_process(upkeeps), buckets[FIRST_SHARD])


async def assigned_buckets(
    coordinator: Coordinator, stores: Mapping[NamesShard, KeyedStore]
) -> dict[NamesShard, BucketShards]:
    """Let the coordinator's records say what buckets the shards have; returns those of each shard."""
    made: dict[str, list[tuple[int, NamesShard]]] = {}
    for shard, store in stores.items():
        with store.metadata.view() as view:
            for bucket in list_buckets(view):
                made.setdefault(bucket.name, []).append((bucket.created_ns, shard))
    for name, places in made.items():
        if len(places) > 1:
            _, shard = max(places)
            _log.error("two names shards have one bucket; the one made last is served", bucket=name, shard=shard)
            await coordinator.transact([], [Put(bucket_key(name), encode(BucketShardRecord(shard)))])
    found = {}
    for shard in stores:
        found[shard] = BucketShards(coordinator, shard)
        await found[shard].begin(name for name, places in made.items() if max(places)[1] == shard)
    return found
