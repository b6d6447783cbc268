"""A lake moves to the etcd that its operator gave, or back, at a start of the machine with its names.

Before anything else of the lake runs there: the names are opened for their table alone, and serve nobody.  Which way,
the machine's record says; that it is done, is recorded behind it (`engine.coordinator.moving` has the steps).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import msgspec
import structlog

from engine.coordinator.coordinator import Coordinator
from engine.coordinator.moving import Side, charge_of, move, take_charge
from engine.coordinator.records import Charge, ChargeRecord
from engine.lake.etcd_place import EtcdPlace
from engine.lake.lake_etcd import LakeEtcd, open_lake_etcd, pause
from engine.lake.machine import keep_machine, with_etcd
from engine.lake.names_here import TABLE, open_names, open_table
from engine.lake.plan import LakePlan
from lakefs.errors import EngineBusy, EngineUnreachable

_log: Final = structlog.get_logger(__name__)


async def moved_over(plan: LakePlan) -> LakePlan:
    """Let the lake's coordinator be where the machine's record wants it; returns the plan with the record as it is now.

    Waits for an etcd that cannot be reached.  Errors of `open_names`, `open_lake_etcd`, `LakeEtcd.reach` and `move`.
    """
    place = plan.machine.etcd
    if place is None or place.is_settled:
        return plan
    async with open_names(plan) as names, open_table(names.store) as table:
        await take_charge(table, plan.lake_id)
        settled = await (_moved_back if place.leaves else _moved_there)(plan, table, place)
    machine = with_etcd(plan.machine, settled)
    keep_machine([folder for folder in plan.folders if plan.is_wanted(folder)], machine, plan.token)
    _log.info("the lake's coordinator was moved", to=TABLE if settled is None else settled.words)
    return replace(plan, machine=machine)


async def _moved_there(plan: LakePlan, table: Coordinator, place: EtcdPlace) -> EtcdPlace:
    """Move the lake to the etcd; return its place, with what it must be from now on."""
    async with open_lake_etcd(place, plan.lake_id) as etcd:
        served = await _moved(Side(table, TABLE), etcd.side, etcd, plan)
        return msgspec.structs.replace(place, cluster=etcd.cluster, incarnation=served.incarnation.hex())


async def _moved_back(plan: LakePlan, table: Coordinator, place: EtcdPlace) -> None:
    """Move the lake to the table.  An etcd is not asked if the table is in charge, and nothing was being moved."""
    found = await charge_of(table)
    if found is not None and found.state is Charge.SERVES:
        return
    async with open_lake_etcd(place, plan.lake_id) as etcd:
        await _moved(etcd.side, Side(table, TABLE), etcd, plan)


async def _moved(source: Side, destination: Side, etcd: LakeEtcd, plan: LakePlan) -> ChargeRecord:
    """Move, as soon as the etcd can be reached."""
    while True:
        try:
            await etcd.reach()
            return await move(source, destination, plan.lake_id)
        except (EngineUnreachable, EngineBusy) as error:
            await pause(error)
