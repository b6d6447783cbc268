"""The replica of the names on this machine, in a lake with etcd: it follows, leads and serves, and begins anew.

    follow      the names are open, and take what the leader commits                (`engine.group_log`)
    lead        they serve: heads of this process, and all others at the plan's addresses; the lake's upkeep runs
    deposed     all that ends; the names are opened anew, and follow
    behind      the log does not reach down to what they have: they begin anew from the leader's checkpoint

Rules kept here:
- A machine with names keeps its replica.  One without becomes a replica while others have fewer than REPLICAS_WANTED;
  so does one whose replica's folder was lost.  A replica that an operator has removed ends, and says so in the log.
- Nothing that ends a term ends the process: members and heads go on, and reach whoever leads.
- The service of a term is its own, with its gate, upkeep and connections: another leader is a restarted engine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

import structlog
import trio

from engine.coordinator.coordinator import Coordinator
from engine.coordinator.lake_state import pages
from engine.coordinator.names_leader import NamesLeader
from engine.coordinator.records import LeaderRecord, ReplicaRecord, decode, encode
from engine.format.group_parts import LogKeys
from engine.group_log.assembly import ReplicaIsBehind
from engine.group_log.checkpoint_requests import checkpoint_group
from engine.group_log.new_replica import CheckpointSource, holding_log
from engine.group_log.replica import FIRST_SHARD, ReplicaPlace, leading
from engine.group_log.reports import ReplicaRemoved
from engine.head.leader_link import leader_at, names_led_by
from engine.head.names_link import ConnectNames
from engine.host.clock import BoottimeClock
from engine.lake.embedded_names import embedded_names
from engine.lake.folders import holds_names
from engine.lake.lake_etcd import LakeEtcd
from engine.lake.names_here import open_names
from engine.lake.plan import LakePlan
from engine.metadata.metadata_store import Metadata
from engine.process.mirrored_names import LocalNames
from engine.process.running import connections_limit
from engine.requests.dispatch import Group
from engine.server.listener import Server
from engine.store.names_opening import BeginAnew
from engine.superblock.superblock import Superblock
from lakefs.errors import EngineBusy, EngineUnreachable, LakeError
from lakefs.ids import ReplicaId
from lakefs.limits import STRANGERS_MAX
from lakefs.ports import Offload
from lakefs.transport.streams import TrioNetwork
from lakefs.wire.engine_port import EngineService

REPLICAS_WANTED: Final = 3
DRAIN_S: Final = 5.0
"""Time that requests in flight have when the names stop."""
_PAUSE_S: Final = 0.2
_FAILED_PAUSE_S: Final = 5.0
_LOOK_S: Final = 30.0
"""A machine without names looks so often whether the lake has fewer replicas than it wants."""
_KEYS: Final = LogKeys(FIRST_SHARD)
_UNIX: Final = "unix:"
_log: Final = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Term:
    """The service of one term, and the upkeep that keeps the lake whole beside it."""

    service: EngineService
    upkeep: Callable[[], Awaitable[None]]


class NamesReplica:
    """The replica of one machine.  `run` it; used on the loop."""

    def __init__(
        self,
        plan: LakePlan,
        etcd: LakeEtcd,
        leader: NamesLeader,
        offload: Offload,
        open_term: Callable[[LocalNames, Group], Term],
    ) -> None:
        """`open_term` makes what serves on names that lead, with the handlers of other replicas' requests."""
        self._plan = plan
        self._etcd = etcd
        self._coordinator = etcd.coordinator
        self._offload = offload
        self._open_term = open_term
        self._led_elsewhere = leader_at(plan.machine.machine, token=plan.token)
        self._here: ConnectNames | None = None
        self._replica: ReplicaId | None = None
        self._metadata: Metadata | None = None
        """The open replica's."""
        self._servers: list[Server] = []
        self._leads = False
        self._scope = trio.CancelScope()
        self._stopping = trio.Event()
        self._ended = trio.Event()
        self.connect: Final = names_led_by(leader, self._connect_to, lambda: etcd.failure)
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
                async with AsyncExitStack() as stack:
                    begin_anew = await self._begin_anew(stack) if is_behind else None
                    is_behind = False
                    await self._live(begin_anew)
            except ReplicaRemoved as error:
                _log.error("this machine has no part in the names", reason=error.message)
                await self._stopping.wait()
                return
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

    async def _drain(self, timeout_s: float) -> None:
        async with trio.open_nursery() as nursery:
            for server in self._servers:
                nursery.start_soon(server.drain, timeout_s)

    async def _live(self, begin_anew: BeginAnew | None) -> None:
        """Follow, and serve while this replica leads."""
        is_new = not await self._offload.run(self._has_names)
        async with open_names(self._plan, self._leading, begin_anew, is_new=is_new) as names:
            checkpoints = checkpoint_group(names.store.metadata, names.disk, self._offload)
            term = self._open_term(names, checkpoints)
            self._leads, ended = True, trio.Event()
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(term.upkeep)
                    for address in self._plan.names_listen:
                        await nursery.start(self._serve, term.service, address)
                    self._here = embedded_names(term.service, ended.wait)
                    await self._stopping.wait()
                    await self._drain(DRAIN_S)
                    nursery.cancel_scope.cancel()
            finally:
                ended.set()
                self._here, self._leads = None, False
                self._servers.clear()

    async def _serve(
        self, service: EngineService, address: str, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED
    ) -> None:
        token = None if address.startswith(_UNIX) else self._plan.token
        connections = connections_limit(STRANGERS_MAX)
        server = Server(service, TrioNetwork(), token=token, connections_max=connections, of_the_lake=True)
        self._servers.append(server)
        await server.listen_and_serve(address, task_status=task_status)

    @asynccontextmanager
    async def _leading(self, metadata: Metadata, superblock: Superblock) -> AsyncIterator[None]:
        place = replace(replica_place(self._plan, self._coordinator, superblock), make_room=self._etcd.make_room)
        self._replica, self._metadata = place.replica, metadata
        try:
            async with leading(metadata, place):
                yield
        finally:
            self._metadata = None

    def _connect_to(self, record: LeaderRecord) -> ConnectNames:
        if record.replica == self._replica and self._here is not None:
            return self._here
        return self._led_elsewhere(record)

    async def _begin_anew(self, stack: AsyncExitStack) -> BeginAnew:
        """Return what replaces the names here by a copy of those that lead; nothing is trimmed until the stack ends."""
        hold = self._replica or ReplicaId(bytes(16))
        await stack.enter_async_context(holding_log(self._coordinator, BoottimeClock(), _KEYS, hold))
        connection = await stack.enter_async_context(self.connect())
        return CheckpointSource(connection.client, BoottimeClock(), self._offload).begin_anew

    async def _until_wanted(self) -> None:
        """Return when this machine has names, or the lake wants more replicas."""
        while not await self._offload.run(self._has_names):
            begin, end = _KEYS.replicas
            others = 0
            async for page in pages(self._coordinator, begin, end):
                records = [decode(ReplicaRecord, entry.value) for entry in page.entries]
                others += sum(not each.is_removed and each.machine != self._plan.machine.machine for each in records)
            if others < REPLICAS_WANTED:
                return
            await trio.sleep(_LOOK_S)

    def _has_names(self) -> bool:
        return any(holds_names(folder) for folder in self._plan.folders)


@asynccontextmanager
async def running_replica(replica: NamesReplica) -> AsyncIterator[None]:
    """Run a replica during the block, and stop it cleanly at its end."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(replica.run)
        yield
        await replica.stop()


def replica_place(plan: LakePlan, coordinator: Coordinator, superblock: Superblock) -> ReplicaPlace:
    """Return the surroundings of the replica in a store of this machine."""
    replica, machine = ReplicaId(superblock.store_id), plan.machine.machine
    record = LeaderRecord(replica, machine, plan.names_listen)
    return ReplicaPlace(coordinator, BoottimeClock(), plan.lake_id, replica, machine, encode(record), _holder)


def _holder(value: bytes) -> ReplicaId:
    return ReplicaId(decode(LeaderRecord, value).replica)
