"""A lake moves to the etcd that its operator gave, or back, at a start of the machine with its names.

Before anything else of the lake runs there: the names are opened for their table alone, and serve nobody.  Which way,
the machine's record says; that it is done, is recorded behind it (`engine.coordinator.moving` has the steps).

The logs of all names shards move too.  On the way there this machine's replica of each is named as the one from which
its log begins.  On the way back these replicas lead once more: so they have all groups, and their journals are the logs
from then on.
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
from engine.coordinator.lake_state import LakeState, pages
from engine.coordinator.moving import Side, charge_of, move, take_charge
from engine.coordinator.names_shards import shards_of
from engine.coordinator.records import Charge, ChargeRecord, ReplicaRecord, decode
from engine.format.group_parts import FIRST_SHARD, LogKeys
from engine.group_log.handing_over import asking_to_lead
from engine.group_log.replica import leading
from engine.lake.etcd_place import EtcdPlace
from engine.lake.lake_etcd import LakeEtcd, open_lake_etcd, when_reached
from engine.lake.machine import keep_machine, with_etcd
from engine.lake.names_here import TABLE, open_names, open_table
from engine.lake.plan import LakePlan
from engine.lake.replica_host import machine_place
from engine.lake.shards_here import (
    hosts_of,
    how_to_copy,
    note,
    noted_in,
    other_shards,
    refuse_missing,
    shards_with_names,
)
from engine.metadata.metadata_store import Metadata
from engine.process.mirrored_names import LocalNames
from engine.store.metadata_life import always_leading
from engine.superblock.superblock import Superblock
from lakefs.errors import PreconditionFailed
from lakefs.ids import NamesShard

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
        count = await shards_of(table)
        refuse_missing(plan, count)
        await take_charge(table, plan.lake_id)
        served = await _moved(Side(table, TABLE), etcd.side, etcd, plan)
        left = msgspec.structs.replace(served, state=Charge.LEFT)
        for shard in other_shards(count):
            async with open_names(plan, shard=shard) as others:
                await note(others.store.metadata, shard, left)
                await _name_origin(etcd, shard, others)
        await _name_origin(etcd, FIRST_SHARD, names)
    return msgspec.structs.replace(etcd.place, cluster=etcd.cluster, incarnation=served.incarnation.hex())


async def _name_origin(etcd: LakeEtcd, shard: NamesShard, names: LocalNames) -> None:
    """Let the log of a shard begin behind all that its replica here has, unless it has begun."""
    keys, replica = LogKeys(shard), names.store.superblock.store_id
    await etcd.side.coordinator.transact([IsAbsent(keys.log)], [Put(keys.origin, replica)])


async def _moved_back(plan: LakePlan, etcd: LakeEtcd) -> None:
    """Move the lake to the table.  An etcd is not asked if the table is in charge, and nothing was being moved.

    While the first shard's table is filled, the replicas here lead all shards: so they have all groups, in their
    journals.  PreconditionFailed where a shard has no replica here: nothing is changed.
    """

    @asynccontextmanager
    async def led_unless_here(metadata: Metadata, superblock: Superblock) -> AsyncIterator[None]:
        charge = await noted_in(metadata)
        if charge is None or charge.state is Charge.SERVES:
            yield
            return
        await when_reached(etcd.reach)
        await _refuse_missing(plan, etcd.side.coordinator)
        async with _led(plan, etcd, FIRST_SHARD, metadata, superblock):
            yield

    async with AsyncExitStack() as stack:
        names = await stack.enter_async_context(open_names(plan, led_unless_here))
        table = await stack.enter_async_context(open_table(names.store))
        found = await charge_of(table)
        is_here = found is None or found.state is Charge.SERVES
        count = await shards_of(table if is_here else etcd.side.coordinator)
        refuse_missing(plan, count)
        others: dict[NamesShard, LocalNames] = {}
        for shard in other_shards(count):
            leads = always_leading if is_here else partial(_led, plan, etcd, shard)
            others[shard] = await stack.enter_async_context(open_names(plan, leads, shard=shard))
        if found is None or found.state is not Charge.SERVES:
            found = await _moved(etcd.side, Side(table, TABLE), etcd, plan)
        for shard, each in others.items():
            await note(each.store.metadata, shard, found)


@asynccontextmanager
async def _led(
    plan: LakePlan, etcd: LakeEtcd, shard: NamesShard, metadata: Metadata, superblock: Superblock
) -> AsyncIterator[None]:
    """Lead a shard from this machine's replica during the block, in the place of whoever leads it now."""
    place, keys = machine_place(plan, etcd.side.coordinator, superblock, shard), LogKeys(shard)
    async with asking_to_lead(place.coordinator, place.clock, keys, place.replica), leading(metadata, place):
        yield


async def _refuse_missing(plan: LakePlan, coordinator: Coordinator) -> None:
    """Raise PreconditionFailed if a shard has no replica here, with the machine whose replica has most of its log."""
    here = shards_with_names(plan)
    for shard in other_shards(await shards_of(coordinator)):
        if shard in here:
            continue
        known = [page.entries async for page in pages(coordinator, *LogKeys(shard).replicas)]
        replicas = [decode(ReplicaRecord, entry.value) for entries in known for entry in entries]
        elsewhere = [each for each in replicas if not each.is_removed and each.machine != plan.machine.machine]
        last = max(elsewhere, key=lambda each: each.kept, default=None)
        hosts = hosts_of(await LakeState(coordinator).members())
        raise PreconditionFailed(
            f"this machine has no replica of names shard {shard}, and a lake without etcd has all of them on one; "
            + how_to_copy(shard, None if last is None else last.machine, hosts)
            + " lake serve --restored",
            subject=f"names shard {shard}",
        )


async def _moved(source: Side, destination: Side, etcd: LakeEtcd, plan: LakePlan) -> ChargeRecord:
    """Move, as soon as the etcd can be reached."""

    async def reach_and_move() -> ChargeRecord:
        await etcd.reach()
        return await move(source, destination, plan.lake_id)

    return await when_reached(reach_and_move)
