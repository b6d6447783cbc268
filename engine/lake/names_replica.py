"""The replica of a names shard on this machine, in a lake with etcd: it follows, leads and serves, and begins anew.

    follow      the names are open, and take what the leader commits                (`engine.group_log`)
    lead        they serve: heads of this process, and all others at the plan's addresses; the lake's upkeep runs
    deposed     all that ends; the names are opened anew, and follow
    behind      the log does not reach down to what they have: they begin anew from the leader's checkpoint

Rules kept here:
- A machine with names keeps its replica.  One without becomes a replica while the shard has fewer than REPLICAS_WANTED.
- Nothing that ends a term ends the process: members and heads go on, and reach whoever leads.
- A replica that is lost with its disk is forgotten when its machine has another one.
- A replica that is of another time of the lake begins anew: before it was moved to this coordinator, or rescued, the
  groups of the same numbers may have been others.  The table in the names says of which it is (`moving`); a shard that
  was added has no such word before its first term ends, and its log begins empty.
- Names that were copied from a machine which is present, with its replica in them, are set aside: two replicas of one
  id would take the lead from each other, and count as one.
- The service of a term is its own, with its gate, upkeep and connections: another leader is a restarted engine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

import structlog
import trio

from engine.coordinator.coordinator import Coordinator
from engine.coordinator.coordinator_table import entry_of
from engine.coordinator.lake_state import pages
from engine.coordinator.names_leader import NamesLeader
from engine.coordinator.records import CHARGE_KEY, ChargeRecord, LeaderRecord, ReplicaRecord, decode
from engine.format.group_parts import FIRST_SHARD, LogKeys
from engine.group_log.assembly import ReplicaIsBehind
from engine.group_log.checkpoint_requests import checkpoint_group
from engine.group_log.new_replica import CheckpointSource, holding_log
from engine.group_log.replica import leading
from engine.group_log.reports import ReplicaRemoved
from engine.group_log.spread_leads import SpreadLeads
from engine.head.leader_link import names_led_by
from engine.head.names_link import ConnectNames
from engine.host.tasks import plain_errors
from engine.lake.embedded_names import embedded_names
from engine.lake.replica_host import ReplicaHost, replica_place
from engine.metadata.metadata_store import Metadata
from engine.process.mirrored_names import LocalNames
from engine.requests.dispatch import Group
from engine.store.names_opening import BeginAnew
from engine.superblock.superblock import Superblock
from lakefs.errors import EngineBusy, EngineUnreachable, LakeError, StoreUnusable
from lakefs.ids import NamesShard, ReplicaId
from lakefs.wire.engine_port import EngineService

REPLICAS_WANTED: Final = 3
_PAUSE_S: Final = 0.2
_FAILED_PAUSE_S: Final = 5.0
_LOOK_S: Final = 30.0
"""A machine without names looks so often whether they have fewer replicas than wanted."""
_TURN_S: Final = 2.0
"""A machine leaves a new replica to each machine that is to have it first for so long."""
_log: Final = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Term:
    """The service during one term: a service, and what keeps the lake whole beside it."""

    service: EngineService
    upkeep: Callable[[], Awaitable[None]]
    begin: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
    """Awaited before anybody is served."""


class ReplicaIsCopy(StoreUnusable):
    """The replica here is one of another machine, whose folder was copied."""


async def no_other_machine(replica: ReplicaId) -> str:
    """Return "": a replica is no other machine's."""
    await trio.lowlevel.checkpoint()
    return ""


async def none_before() -> int:
    """Return 0: a new replica is left to no other machine."""
    await trio.lowlevel.checkpoint()
    return 0


class NamesReplica:
    """The replica of a names shard on one machine.  `run` it; used on the loop."""

    def __init__(
        self,
        host: ReplicaHost,
        lake: bytes,
        coordinator: Coordinator,
        leader: NamesLeader,
        open_term: Callable[[LocalNames, Group], Term],
        *,
        failure: Callable[[], str] = str,
        make_room: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
        incarnation: bytes = b"",
        leads: SpreadLeads | None = None,
        machines_before: Callable[[], Awaitable[int]] = none_before,
        copied_from: Callable[[ReplicaId], Awaitable[str]] = no_other_machine,
    ) -> None:
        """`open_term` makes what serves on names that lead, with the handlers of other replicas' requests.

        `failure`: why the coordinator cannot be asked now; empty: it can.  `make_room`: see `ReplicaPlace`.
        `incarnation`: of the lake's coordinator; empty: replicas are not asked of which they are.  `leads`: those of
        all shards on this machine.  `machines_before`: how many others a new replica is left to first.
        `copied_from`: the machine that is present with a replica, if that is another one than this; else empty.
        """
        self._keys: Final = LogKeys(host.shard)
        self._leads_here = leads or SpreadLeads()
        self._machines_before = machines_before
        self._copied_from = copied_from
        self._host = host
        self._lake = lake
        self._coordinator = coordinator
        self._open_term = open_term
        self._make_room = make_room
        self._incarnation = incarnation
        self._here: ConnectNames | None = None
        self._replica: ReplicaId | None = None
        self._metadata: Metadata | None = None
        """The open replica's."""
        self._leads = False
        self._caught_up = trio.Event()
        """Set when the names here, since they were opened, have had all that was in the log."""
        self._scope = trio.CancelScope()
        self._stopping = trio.Event()
        self._ended = trio.Event()
        self.connect: Final = names_led_by(leader, self._connect_to, failure)
        """Connects to the names that lead, wherever they are."""

    @property
    def leads(self) -> bool:
        """True while this replica serves the names."""
        return self._leads

    @property
    def kept_sequence(self) -> int:
        """The last group in the journal of this machine's replica; 0 while it is not open."""
        return 0 if self._metadata is None else self._metadata.kept_sequence

    async def run(self) -> None:
        """Be a replica, or wait until one is wanted here, until stopped or cancelled."""
        try:
            with self._scope:
                await self._run()
        finally:
            self._ended.set()

    async def _run(self) -> None:
        is_behind = False
        while not self._stopping.is_set():
            pause_s = _PAUSE_S
            try:
                await self._until_wanted()
                with plain_errors():
                    async with trio.open_nursery() as nursery:
                        self._caught_up = trio.Event()
                        begin_anew = await nursery.start(self._hold_log) if is_behind else None
                        is_behind = False
                        await self._live(begin_anew)
                        nursery.cancel_scope.cancel()
            except ReplicaRemoved as error:
                _log.error("this machine has no part in the names", reason=error.message)
                await self._stopping.wait()
                return
            except ReplicaIsCopy as error:
                _log.error("these names are set aside, and a replica is made anew", reason=error.message)
                await self._host.offload.run(self._host.set_aside)
            except ReplicaIsBehind as error:
                _log.warning("this replica of the names begins anew", reason=error.message)
                is_behind = True
            except (EngineUnreachable, EngineBusy) as error:
                _log.warning("this replica of the names does not lead", reason=error.message)
            except LakeError as error:
                _log.error("this replica of the names cannot be opened; it is tried again", reason=error.message)
                pause_s = _FAILED_PAUSE_S
            await trio.sleep(pause_s)

    async def stop(self) -> None:
        """Stop the names cleanly if they lead; else end at once, as the journal is whole.  `run` returns then."""
        self._stopping.set()
        if not self._leads:
            self._scope.cancel()
        await self._ended.wait()

    async def _live(self, begin_anew: BeginAnew | None) -> None:
        """Follow, and serve while this replica leads."""
        host = self._host
        is_new = not await host.offload.run(host.has_names)
        async with host.open_names(self._leading, begin_anew, is_new=is_new) as names:
            checkpoints = checkpoint_group(names.store.metadata, names.disk, host.offload)
            term = self._open_term(names, checkpoints)
            await term.begin()
            self._leads, ended = True, trio.Event()
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(term.upkeep)
                    async with host.serving(term.service) as drain:
                        self._here = embedded_names(term.service, ended.wait)
                        await self._stopping.wait()
                        await names.store.end_rights()
                        await drain()
                    nursery.cancel_scope.cancel()
            finally:
                ended.set()
                self._here, self._leads = None, False

    @asynccontextmanager
    async def _leading(self, metadata: Metadata, superblock: Superblock) -> AsyncIterator[None]:
        record = self._host.leader_record(superblock)
        place = replica_place(self._coordinator, self._host.clock, self._lake, record, self._host.shard)
        self._replica = place.replica
        if machine := await self._copied_from(place.replica):
            raise ReplicaIsCopy(f"they are a copy of those of machine {machine}, which is present", subject="names")
        refuse_other_time(metadata, self._incarnation, self._host.shard)
        self._metadata = metadata
        try:
            async with leading(
                metadata, replace(place, make_room=self._make_room, leads=self._leads_here), self._caught_up.set
            ):
                yield
        finally:
            self._metadata = None

    def _connect_to(self, record: LeaderRecord) -> ConnectNames:
        if record.replica == self._replica and self._here is not None:
            return self._here
        return self._host.connect_to(record)

    async def _hold_log(self, *, task_status: trio.TaskStatus[BeginAnew]) -> None:
        """Start with what replaces the names here by a copy of those that lead.

        Nothing is trimmed until the names here have caught up.
        """
        hold, clock = self._replica, self._host.clock
        assert hold is not None, "the names here were opened, and are behind"
        async with holding_log(self._coordinator, clock, self._keys, hold), self.connect() as connection:
            task_status.started(CheckpointSource(connection.client, clock, self._host.offload).begin_anew)
            await self._caught_up.wait()

    async def _until_wanted(self) -> None:
        """Return when this machine has names of the shard, or the shard wants more replicas.

        A machine has one replica: where it has none, its former one is lost, and counts no more.
        """
        turns = 0
        while not await self._host.offload.run(self._host.has_names):
            if await self._others() >= REPLICAS_WANTED:
                await trio.sleep(_LOOK_S)
                continue
            if turns > await self._machines_before() - REPLICAS_WANTED:
                return
            turns += 1
            await trio.sleep(_TURN_S)

    async def _others(self) -> int:
        """Return the number of replicas on other machines."""
        others = 0
        async for page in pages(self._coordinator, *self._keys.replicas):
            records = [decode(ReplicaRecord, entry.value) for entry in page.entries]
            others += sum(not each.is_removed and each.machine != self._host.machine for each in records)
        return others


def refuse_other_time(metadata: Metadata, incarnation: bytes, shard: NamesShard = FIRST_SHARD) -> None:
    """Raise ReplicaIsBehind unless names are of this incarnation of the lake's coordinator; empty: of any."""
    if not incarnation:
        return
    with metadata.view() as view:
        entry = entry_of(view, CHARGE_KEY)
    if entry is None and shard != FIRST_SHARD:
        return
    if entry is None or decode(ChargeRecord, entry.value).incarnation != incarnation:
        raise ReplicaIsBehind("this replica of the names is not of the time since the lake was moved to its etcd")
