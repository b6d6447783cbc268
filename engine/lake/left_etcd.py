"""An etcd that was given up for lost is closed to everybody when it returns.

Machines that have not learned of the rescue have it in their records, and their replicas would lead by it.  So the
machine from which the lake was rescued looks for it until it is found, and notes there that another coordinator is in
charge: each transaction of a lake with etcd compares that note (`engine.coordinator.fenced_coordinator`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import msgspec
import structlog
import trio

from engine.coordinator.coordinator import Coordinator, HasValue, Put
from engine.coordinator.moving import charge_of
from engine.coordinator.records import CHARGE_KEY, Charge, encode
from engine.host.tasks import plain_errors
from engine.lake.etcd_place import EtcdPlace
from engine.lake.folders import records_in
from engine.lake.lake_etcd import open_lake_etcd
from engine.lake.machine import keep_machine, machine_of, without_left
from engine.lake.names_here import TABLE
from engine.lake.plan import LakePlan
from lakefs.errors import EngineBusy, EngineUnreachable, LakeError, StoreUnusable

LOOK_S: Final = 1.0
_log: Final = structlog.get_logger(__name__)


@asynccontextmanager
async def closing_left_etcd(plan: LakePlan) -> AsyncIterator[None]:
    """Look during the block for the etcd that the lake has left, and close it."""
    place = plan.machine.left
    if place is None:
        yield
        return
    with plain_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_close, plan, place)
            yield
            nursery.cancel_scope.cancel()


async def close_left(coordinator: Coordinator, lake: bytes, turn: int) -> bool:
    """Let a lake's former coordinator say that another one is in charge since `turn`.

    False if it has nothing of the lake, or was changed just then.  Errors of `Coordinator`.
    """
    found = await charge_of(coordinator)
    if found is None or found.lake != lake:
        return False
    if found.turn >= turn:  # the lake has moved there again
        return True
    left = msgspec.structs.replace(found, state=Charge.LEFT, turn=turn, place=TABLE)
    compare = HasValue(CHARGE_KEY, encode(found))
    return (await coordinator.transact([compare], [Put(CHARGE_KEY, encode(left))])).succeeded


async def _close(plan: LakePlan, place: EtcdPlace) -> None:
    try:
        async with open_lake_etcd(place, plan.lake_id) as etcd:
            while True:
                with suppress(EngineUnreachable, EngineBusy, StoreUnusable):  # it is looked for again
                    await etcd.reach()
                    if await close_left(etcd.side.coordinator, plan.lake_id, place.left_turn):
                        break
                await trio.sleep(LOOK_S)
    except LakeError as error:  # the files of its user, or the client, are gone
        _log.error("the etcd that the lake has left cannot be looked for", reason=error.message)
        return
    _log.warning("the etcd that was given up for lost is back, and is not the lake's any more", etcd=place.words)
    record = machine_of(records_in(plan.folders, plan.lake_id))
    if record is not None and record.left == place:
        keep_machine([folder for folder in plan.folders if plan.is_wanted(folder)], without_left(record), plan.token)
