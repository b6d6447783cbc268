"""A lake moves to the etcd that its operator gave, or back, at a start of the machine with its names.

Before anything else of the lake runs there: the names are opened for their table alone, and serve nobody.  Which way,
the machine's record says; that it is done, is recorded behind it (`engine.coordinator.moving` has the steps).

The log of the names moves too.  On the way there this machine's replica is named as the one from which it begins.  On
the way back this replica leads once more: so it has all groups, and its journal is the log from then on.  It is the
same for each names shard.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec
import structlog

from engine.coordinator.coordinator import Coordinator, IsAbsent, Put
from engine.coordinator.coordinator_table import entry_of
from engine.coordinator.moving import Side, charge_of, move, take_charge
from engine.coordinator.names_shards import shards_of
from engine.coordinator.records import CHARGE_KEY, Charge, ChargeRecord, decode
from engine.format.group_parts import FIRST_SHARD, LogKeys
from engine.group_log.handing_over import asking_to_lead
from engine.group_log.replica import leading
from engine.lake.etcd_place import EtcdPlace
from engine.lake.lake_etcd import LakeEtcd, open_lake_etcd, when_reached
from engine.lake.machine import keep_machine, with_etcd
from engine.lake.names_here import TABLE, open_names, open_table
from engine.lake.plan import LakePlan
from engine.lake.replica_host import machine_place
from engine.lake.rescued_shards import is_here, note_time
from engine.metadata.metadata_store import Metadata
from engine.superblock.superblock import Superblock
from lakefs.errors import PreconditionFailed
from lakefs.ids import NamesShard, ReplicaId

_log: Final = structlog.get_logger(__name__)


async def moved_over(plan: LakePlan) -> LakePlan:
    """Let the lake's coordinator be where the machine's record wants it; returns the plan with the record as it is now.

    Waits for an etcd that cannot be reached.  Errors of `open_names`, `open_lake_etcd`, `LakeEtcd.reach` and `move`.
    """
    place = plan.machine.etcd
    if place is None or place.is_settled:
        return plan
    async with open_lake_etcd(place, plan.lake_id) as etcd:
        settled = await (_moved_back if place.leaves else _moved_there)(plan, etcd)
    machine = with_etcd(plan.machine, settled)
    keep_machine([folder for folder in plan.folders if plan.is_wanted(folder)], machine, plan.token)
    _log.info("the lake's coordinator was moved", to=TABLE if settled is None else settled.words)
    return replace(plan, machine=machine)


async def _moved_there(plan: LakePlan, etcd: LakeEtcd) -> EtcdPlace:
    """Move the lake to the etcd; return its place, with what it must be from now on."""
    async with open_names(plan) as names, open_table(names.store) as table:
        await take_charge(table, plan.lake_id)
        served = await _moved(Side(table, TABLE), etcd.side, etcd, plan)
        await _name_origin(etcd, FIRST_SHARD, ReplicaId(names.store.superblock.store_id))
        others = [NamesShard(number) for number in range(1, await shards_of(table))]
    for shard in others:
        async with open_names(plan, shard=shard, is_new=False) as names:
            await note_time(names.store.metadata, msgspec.structs.replace(served, state=Charge.LEFT))
            await _name_origin(etcd, shard, ReplicaId(names.store.superblock.store_id))
    return msgspec.structs.replace(etcd.place, cluster=etcd.cluster, incarnation=served.incarnation.hex())


async def _name_origin(etcd: LakeEtcd, shard: NamesShard, replica: ReplicaId) -> None:
    """Let the log of a names shard begin behind all that this replica has, unless it has begun."""
    keys = LogKeys(shard)
    await etcd.side.coordinator.transact([IsAbsent(keys.log)], [Put(keys.origin, replica)])


async def _moved_back(plan: LakePlan, etcd: LakeEtcd) -> None:
    """Move the lake to the table.  An etcd is not asked if the table is in charge, and nothing was being moved.

    PreconditionFailed unless this machine has replicas of all names shards.
    """
    coordinator = etcd.side.coordinator

    @asynccontextmanager
    async def led(metadata: Metadata, superblock: Superblock) -> AsyncIterator[None]:
        with metadata.view() as view:
            entry = entry_of(view, CHARGE_KEY)
        is_in_charge = entry is None or decode(ChargeRecord, entry.value).state is Charge.SERVES
        if is_in_charge:
            yield
            return
        await when_reached(etcd.reach)
        async with AsyncExitStack() as stack:  # so each has all groups, and no other machine leads meanwhile
            for shard in map(NamesShard, range(1, await shards_of(coordinator))):
                if not is_here(plan, shard):
                    raise PreconditionFailed(
                        f"this machine has no replica of names shard {shard} yet, and the names of all are to be here; "
                        "start it with its etcd until it has one: lake cluster init with --etcd"
                    )
                lead = partial(_led, plan, coordinator, shard)
                await stack.enter_async_context(open_names(plan, lead, shard=shard, is_new=False))
            await stack.enter_async_context(_led(plan, coordinator, FIRST_SHARD, metadata, superblock))
            yield

    async with open_names(plan, led) as names, open_table(names.store) as table:
        found = await charge_of(table)
        if found is None or found.state is not Charge.SERVES:
            await _moved(etcd.side, Side(table, TABLE), etcd, plan)


@asynccontextmanager
async def _led(
    plan: LakePlan, coordinator: Coordinator, shard: NamesShard, metadata: Metadata, superblock: Superblock
) -> AsyncIterator[None]:
    """Lead a names shard during the block, whoever has led it."""
    place = machine_place(plan, coordinator, superblock, shard)
    async with asking_to_lead(place.coordinator, place.clock, LogKeys(shard), place.replica), leading(metadata, place):
        yield


async def _moved(source: Side, destination: Side, etcd: LakeEtcd, plan: LakePlan) -> ChargeRecord:
    """Move, as soon as the etcd can be reached."""

    async def reach_and_move() -> ChargeRecord:
        await etcd.reach()
        return await move(source, destination, plan.lake_id)

    return await when_reached(reach_and_move)
