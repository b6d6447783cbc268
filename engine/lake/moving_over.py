"""A lake moves to the etcd that its operator gave, or back, at a start of the machine with its names.

Before anything else of the lake runs there: the names are opened for their table alone, and serve nobody.  Which way,
the machine's record says; that it is done, is recorded behind it (`engine.coordinator.moving` has the steps).

The log of the names moves too.  On the way there this machine's replica is named as the one from which it begins.  On
the way back this replica leads once more: so it has all groups, and its journal is the log from then on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

import msgspec
import structlog

from engine.coordinator.coordinator import IsAbsent, Put
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
from engine.metadata.metadata_store import Metadata
from engine.superblock.superblock import Superblock
from lakefs.errors import PreconditionFailed
from lakefs.ids import ReplicaId

_KEYS: Final = LogKeys(FIRST_SHARD)
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
        await _name_origin(etcd, ReplicaId(names.store.superblock.store_id))
    return msgspec.structs.replace(etcd.place, cluster=etcd.cluster, incarnation=served.incarnation.hex())


async def _name_origin(etcd: LakeEtcd, replica: ReplicaId) -> None:
    """Let the log of the names begin behind all that this replica has, unless it has begun."""
    await etcd.side.coordinator.transact([IsAbsent(_KEYS.log)], [Put(_KEYS.origin, replica)])


async def _moved_back(plan: LakePlan, etcd: LakeEtcd) -> None:
    """Move the lake to the table.  An etcd is not asked if the table is in charge, and nothing was being moved.

    PreconditionFailed for a lake of several names shards.
    """

    @asynccontextmanager
    async def led(metadata: Metadata, superblock: Superblock) -> AsyncIterator[None]:
        with metadata.view() as view:
            entry = entry_of(view, CHARGE_KEY)
        is_here = entry is None or decode(ChargeRecord, entry.value).state is Charge.SERVES
        if is_here:
            yield
            return
        await when_reached(etcd.reach)
        if (count := await shards_of(etcd.side.coordinator)) > 1:
            raise PreconditionFailed(f"the names of this lake are in {count} shards, and without etcd there is one")
        place = machine_place(plan, etcd.side.coordinator, superblock)
        async with asking_to_lead(place.coordinator, place.clock, _KEYS, place.replica), leading(metadata, place):
            yield

    async with open_names(plan, led) as names, open_table(names.store) as table:
        found = await charge_of(table)
        if found is None or found.state is not Charge.SERVES:
            await _moved(etcd.side, Side(table, TABLE), etcd, plan)


async def _moved(source: Side, destination: Side, etcd: LakeEtcd, plan: LakePlan) -> ChargeRecord:
    """Move, as soon as the etcd can be reached."""

    async def reach_and_move() -> ChargeRecord:
        await etcd.reach()
        return await move(source, destination, plan.lake_id)

    return await when_reached(reach_and_move)
