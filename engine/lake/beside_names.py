"""The ways by which a process without names reaches the lake: by the names of another process, or by the lake's etcd.

    without etcd    coordinator and names are at one address, that of the machine with the names, or of its process
    with etcd       the coordinator is the etcd, which says where the names are that lead

Rules kept here:
- A machine that has joined asks the names at each start if the lake has an etcd, once.  While they cannot be reached,
  its record says so.
- A lake that turns out to have moved in the meantime ends the start with EngineUnreachable; the next one follows it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Final

import structlog
import trio

from engine.coordinator.coordinator import Coordinator
from engine.coordinator.lake_state import NO_EPOCH, LakeState
from engine.coordinator.names_leader import NamesLeaders, open_names_leaders
from engine.coordinator.names_shards import open_names_shards, shards_of
from engine.coordinator.records import EtcdRecord, LakeRecord
from engine.coordinator.remote_coordinator import open_remote_coordinator
from engine.format.group_parts import FIRST_SHARD
from engine.head.leader_link import leader_at, names_led_by
from engine.head.names_link import ConnectNames, names_at
from engine.lake.etcd_place import joined_place, place_in
from engine.lake.lake_etcd import WAITING_FOR_ETCD, open_lake_etcd
from engine.lake.machine import keep_machine, with_etcd
from engine.lake.plan import LakePlan, shard_address
from engine.lake.shard_replicas import WayToNames
from lakefs.errors import EngineBusy, EngineUnreachable, LakeError, StoreUnusable
from lakefs.ids import NamesShard

NAMES_PAUSE_S: Final = 2.0
WAITING_FOR_NAMES: Final = "waiting for the names of the lake"
_log: Final = structlog.get_logger(__name__)


@dataclass(frozen=True)
class BesideNames:
    """The lake as a process without names reaches it."""

    plan: LakePlan
    coordinator: Coordinator
    connect_shard: Callable[[NamesShard], ConnectNames]
    reach: Callable[[], Awaitable[None]]
    """Asks if the coordinator answers, and is this lake's."""
    leaders: NamesLeaders | None = None
    """Say which names lead, in a lake with etcd."""

    async def way(self, stack: AsyncExitStack) -> WayToNames:
        """Return the way to the names, until the stack ends, when the lake was waited for.  Errors of `Coordinator`.

        Without etcd the number of names shards never changes.
        """
        first = self.connect_shard(FIRST_SHARD)
        if self.plan.machine.etcd is None and await shards_of(self.coordinator) == 1:
            return WayToNames(first)
        shards = await stack.enter_async_context(open_names_shards(self.coordinator))
        return WayToNames(first, shards, self.connect_shard)

    async def wait_for_lake(self) -> LakeRecord:
        """Return the lake's record, when the coordinator can be reached and the lake was made.

        EngineUnreachable when the lake has moved to an etcd, or back; errors of `reach`.
        """
        state = LakeState(self.coordinator)
        while True:
            try:
                await self.reach()
                record = await state.lake()
                if record is not None and await state.epoch() != NO_EPOCH:
                    break
                reason = "the lake has not been made yet"
            except (EngineUnreachable, EngineBusy) as error:
                reason = error.message
            except StoreUnusable:
                if self.plan.machine.etcd != (await learned(self.plan)).machine.etcd:
                    raise _moved() from None
                raise
            self._log_wait(reason)
            await trio.sleep(NAMES_PAUSE_S)
        if self.plan.machine.etcd is None and await state.etcd() is not None:
            raise _moved()
        return record

    def _log_wait(self, reason: str) -> None:
        if self.plan.machine.etcd is None:
            _log.warning(WAITING_FOR_NAMES, address=self.plan.names_at, reason=reason)
        else:
            _log.warning(WAITING_FOR_ETCD, reason=reason)


async def open_beside_names(stack: AsyncExitStack, plan: LakePlan) -> BesideNames:
    """Open the ways to the lake until the stack ends; nothing is waited for."""
    place = plan.machine.etcd
    if place is None:
        address = plan.names_at
        remote = await stack.enter_async_context(open_remote_coordinator(address, token=plan.token, lake=plan.lake_id))

        def connect_at(shard: NamesShard) -> ConnectNames:
            return names_at(shard_address(address, shard), token=plan.token)

        return BesideNames(plan, remote, connect_at, remote.connect)
    etcd = await stack.enter_async_context(open_lake_etcd(place, plan.lake_id))
    leaders = await stack.enter_async_context(open_names_leaders(etcd.coordinator))
    connect_to = leader_at(plan.machine.machine, token=plan.token)

    def connect_shard(shard: NamesShard) -> ConnectNames:
        return names_led_by(leaders.of(shard), connect_to, lambda: etcd.failure)

    return BesideNames(plan, etcd.coordinator, connect_shard, etcd.ready, leaders)


async def learned(plan: LakePlan) -> LakePlan:
    """Return the plan with the etcd that the names say, and record that; as it is while they do not answer."""
    if plan.names_socket or not plan.machine.names_at:
        return plan
    try:
        etcd = await _asked(plan)
    except LakeError as error:
        _log.info("the names were not asked for the lake's etcd", reason=error.message)
        return plan
    wanted = None if etcd is None else joined_place(place_in(etcd), plan.machine.etcd)
    if wanted == plan.machine.etcd:
        return plan
    machine = with_etcd(plan.machine, wanted)
    keep_machine([folder for folder in plan.folders if plan.is_wanted(folder)], machine, plan.token)
    return replace(plan, machine=machine)


async def _asked(plan: LakePlan) -> EtcdRecord | None:
    """Return the lake's etcd, as the names say.  LakeError."""
    address = f"tcp://{plan.machine.names_at}"
    async with open_remote_coordinator(address, token=plan.token, lake=plan.lake_id) as coordinator:
        await coordinator.connect()
        return await LakeState(coordinator).etcd()


def _moved() -> EngineUnreachable:
    return EngineUnreachable("the lake's coordinator was moved while this machine started: start it again")
