"""The service of a names shard during a term of the replica that leads it, and what runs beside it.

    first shard     names, access keys, spaces; upkeep of the lake; its records are repeated in the names
    other shards    names of their buckets; the leader of the first shard drives the upkeep of all

Rules kept here:
- Buckets are assigned to the shard before anything is decided in a term (`engine.coordinator.bucket_shards`).
- In the first term of a shard that was added its numbers of nodes begin at the shard's number << NODE_BITS, so they are
  unique over shards.
- Before it serves it binds no answers that members may forget, or of epochs that are retired (`ShardUpkeep`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio

from engine.coordinator.bucket_shards import BucketShards
from engine.coordinator.coordinator import Coordinator
from engine.coordinator.coordinator_requests import coordinator_group
from engine.coordinator.reads_only_coordinator import ReadsOnlyCoordinator
from engine.coordinator.records import Charge, ChargeRecord, checkpoints_key
from engine.coordinator.repeating import Repeating
from engine.coordinator.shard_requests import shards_group
from engine.coordinator.term_coordinator import TermCoordinator
from engine.format.group_parts import FIRST_SHARD, LogKeys
from engine.group_log.spread_leads import SpreadLeads
from engine.lake.lake_content import Content
from engine.lake.lake_etcd import LakeEtcd
from engine.lake.names_checkpoints import NamesCheckpoints
from engine.lake.names_here import open_table
from engine.lake.names_replica import Term
from engine.lake.plan import LakePlan
from engine.lake.shards_here import note, noted_in
from engine.lake_gc.joined_generation import JoinedGeneration
from engine.lake_gc.shard_links import ConnectShard
from engine.lake_upkeep.lake_upkeep import LakeUpkeep, UpkeepSettings
from engine.lake_upkeep.other_shards import NO_OTHER_SHARDS, OtherShards, shards_by_requests
from engine.lake_upkeep.shard_upkeep import ShardUpkeep
from engine.namespace.buckets import list_buckets
from engine.process.mirrored_names import LocalNames
from engine.requests.bind import BindGate
from engine.requests.dispatch import Group
from engine.requests.table import NamesService
from engine.store.keyed_store import KeyedStore
from lakefs.ids import NamesShard
from lakefs.ports import Offload

_Run = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class NamesTerms:
    """The surroundings of the terms of this machine's replicas."""

    plan: LakePlan
    etcd: LakeEtcd
    content: Content
    offload: Offload
    connect: ConnectShard
    """Returns what connects to the leader of a shard."""
    leads: SpreadLeads = field(default_factory=SpreadLeads)

    def open(self, shard: NamesShard, names: LocalNames, checkpoints: Group) -> Term:
        """Return what serves on names of a shard that lead; `checkpoints`: requests of other replicas."""
        return self._first(names, checkpoints) if shard == FIRST_SHARD else self._other(shard, names, checkpoints)

    def _first(self, names: LocalNames, checkpoints: Group) -> Term:
        store, gate, etcd = names.store, BindGate(), self.etcd
        joined = JoinedGeneration(store.metadata, gate)
        coordinator = TermCoordinator(etcd.coordinator, store.superblock.store_id)
        buckets = BucketShards(coordinator, FIRST_SHARD)
        others = shards_by_requests(self.connect)
        upkeep = lake_upkeep(self.plan, names, coordinator, etcd, gate, joined, self.content, self.offload, others)
        service = NamesService(
            store,
            gate=gate,
            upkeep=upkeep.requests,
            more_status=upkeep.status,
            coordinator=coordinator_group(ReadsOnlyCoordinator(etcd.coordinator)),
            checkpoints=checkpoints,
            buckets=buckets,
            more=[shards_group(coordinator, self.plan.lake_id)],
        )
        in_lake = self._in_lake(FIRST_SHARD, names, gate)

        async def begin() -> None:
            await upkeep.begin()
            await in_lake.begin()
            await buckets.begin(buckets_of(store))

        return Term(service, partial(keep_lake, upkeep, etcd.coordinator, store, in_lake.run), begin)

    def _other(self, shard: NamesShard, names: LocalNames, checkpoints: Group) -> Term:
        store, gate, etcd = names.store, BindGate(), self.etcd
        joined = JoinedGeneration(store.metadata, gate)
        coordinator = TermCoordinator(etcd.coordinator, store.superblock.store_id, LogKeys(shard).leader)
        buckets = BucketShards(coordinator, shard)
        links, stripes, expiry_s = self.content.links, self.content.stripes, self.plan.upload_expiry_s
        in_lake = self._in_lake(shard, names, gate)
        upkeep = ShardUpkeep(shard, coordinator, links, stripes, store, joined, upload_expiry_s=expiry_s)
        service = NamesService(store, gate=gate, upkeep=upkeep.requests, checkpoints=checkpoints, buckets=buckets)

        async def begin() -> None:
            charge = ChargeRecord(self.plan.lake_id, Charge.LEFT, 0, bytes.fromhex(etcd.place.incarnation))
            await begin_shard(shard, store, charge)
            await upkeep.begin()
            await in_lake.begin()
            await buckets.begin(buckets_of(store))

        return Term(service, in_lake.run, begin)

    def _in_lake(self, shard: NamesShard, names: LocalNames, gate: BindGate) -> NamesCheckpoints:
        content, every_s = self.content, self.plan.names_checkpoint_s
        return NamesCheckpoints(
            self.etcd.coordinator,
            content.links,
            content.stripes,
            names.store,
            names.disk,
            gate,
            self.offload,
            every_s,
            checkpoints_key(shard),
        )


async def begin_shard(shard: NamesShard, store: KeyedStore, charge: ChargeRecord) -> None:
    """Do what the first term of a shard does before it serves; nothing in later ones.  Durable on return.

    `charge`: says in the names of which incarnation of the coordinator they are; it is written last, so a term that was
    cut off is gone on with.
    """
    if await noted_in(store.metadata) is None:
        await note(store.metadata, shard, charge)


def lake_upkeep(
    plan: LakePlan,
    names: LocalNames,
    coordinator: Coordinator,
    etcd: LakeEtcd | None,
    gate: BindGate,
    joined: JoinedGeneration,
    content: Content,
    offload: Offload,
    others: OtherShards = NO_OTHER_SHARDS,
    names_state: Callable[[], dict[str, Any]] | None = None,
) -> LakeUpkeep:
    """Return the upkeep of the lake beside the names of its first shard.

    `others`, `names_state`: see `LakeUpkeep`; without the latter it is that of `names`.
    """
    return LakeUpkeep(
        coordinator,
        content.links,
        content.stripes,
        names.store,
        gate,
        joined,
        offload,
        UpkeepSettings(name=plan.machine.name, upload_expiry_s=plan.upload_expiry_s),
        names_state=names_state or names.state,
        etcd_state=None if etcd is None else etcd.state,
        on_change=content.links.view.on_change,
        take=content.take,
        others=others,
    )


def buckets_of(store: KeyedStore) -> list[str]:
    """Return the buckets that a shard has."""
    with store.metadata.view() as view:
        return [bucket.name for bucket in list_buckets(view)]


async def keep_lake(upkeep: LakeUpkeep, coordinator: Coordinator, store: KeyedStore, *beside: _Run) -> None:
    """Keep the lake whole, and its records in the names, until cancelled; run what is given beside that."""
    async with open_table(store) as table, trio.open_nursery() as nursery:
        nursery.start_soon(Repeating(coordinator, table, store.clock).run)
        for run in beside:
            nursery.start_soon(run)
        await upkeep.run()
