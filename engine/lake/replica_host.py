"""The surroundings of a replica of the names: a port, and a machine with folders as its implementation.

`engine.lake.names_replica` has the life of a replica, whatever it stands on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, Protocol

import trio

from engine.coordinator.coordinator import Coordinator
from engine.coordinator.records import LeaderRecord, decode, encode
from engine.format.group_parts import FIRST_SHARD
from engine.group_log.replica import ReplicaPlace
from engine.head.leader_link import leader_at
from engine.head.names_link import ConnectNames
from engine.host.clock import BoottimeClock
from engine.lake.folders import holds_names, names_folder
from engine.lake.names_here import open_names
from engine.lake.plan import UNIX, LakePlan
from engine.process.mirrored_names import LocalNames
from engine.process.names_place import LocalFolder
from engine.process.running import connections_limit
from engine.server.listener import Server
from engine.store.metadata_life import Leading
from engine.store.names_opening import BeginAnew
from engine.superblock.superblock import Superblock
from lakefs.ids import NamesShard, ReplicaId
from lakefs.limits import STRANGERS_MAX
from lakefs.ports import Clock, Offload
from lakefs.transport.streams import TrioNetwork
from lakefs.wire.engine_port import EngineService

DRAIN_S: Final = 5.0
"""Time that requests in flight have when the names stop."""

Drain = Callable[[], Awaitable[None]]
"""Returns when requests in flight have ended, or had their time."""


class ReplicaHost(Protocol):
    """The surroundings of one replica.  `clock` measures spans, also while the machine is suspended."""

    @property
    def shard(self) -> NamesShard:
        """The names shard that it is a replica of."""
        ...

    @property
    def clock(self) -> Clock: ...

    @property
    def offload(self) -> Offload: ...

    @property
    def machine(self) -> str:
        """The id of the machine; it has one replica of a shard, or none."""
        ...

    def has_names(self) -> bool:
        """Return True if there is a store of the shard's names.  Blocks."""
        ...

    def set_aside(self) -> None:
        """Move the store of the shard's names away, which is not open.  Blocks.  DiskFailed."""
        ...

    def open_names(
        self, leading: Leading, begin_anew: BeginAnew | None, *, is_new: bool
    ) -> AbstractAsyncContextManager[LocalNames]:
        """Open the names; they are made with `is_new`.  See `engine.store.names_opening.open_names_store`."""
        ...

    def leader_record(self, superblock: Superblock) -> LeaderRecord:
        """Return the record of this replica while it leads."""
        ...

    def connect_to(self, record: LeaderRecord) -> ConnectNames:
        """Return what connects to a leader elsewhere."""
        ...

    def serving(self, service: EngineService) -> AbstractAsyncContextManager[Drain]:
        """Serve the names to others during the block; at its end all connections end."""
        ...


class MachineHost:
    """`ReplicaHost` of a machine: its folders, and addresses that are listened on."""

    def __init__(self, plan: LakePlan, offload: Offload, shard: NamesShard = FIRST_SHARD) -> None:
        self.shard: Final = shard
        self.clock: Final = BoottimeClock()
        self.offload: Final = offload
        self.machine: Final = plan.machine.machine
        self._plan = plan
        self._led_elsewhere = leader_at(plan.machine.machine, token=plan.token)

    def has_names(self) -> bool:
        """See `ReplicaHost`."""
        return any(holds_names(folder, self.shard) for folder in self._plan.folders)

    def set_aside(self) -> None:
        """See `ReplicaHost`."""
        for folder in self._plan.folders:
            if holds_names(folder, self.shard):
                LocalFolder(names_folder(folder, self.shard)).set_aside()

    def open_names(
        self, leading: Leading, begin_anew: BeginAnew | None, *, is_new: bool
    ) -> AbstractAsyncContextManager[LocalNames]:
        """See `ReplicaHost`."""
        return open_names(self._plan, leading, begin_anew, shard=self.shard, is_new=is_new)

    def leader_record(self, superblock: Superblock) -> LeaderRecord:
        """See `ReplicaHost`."""
        return _leader_record(self._plan, superblock, self.shard)

    def connect_to(self, record: LeaderRecord) -> ConnectNames:
        """See `ReplicaHost`."""
        return self._led_elsewhere(record)

    @asynccontextmanager
    async def serving(self, service: EngineService) -> AsyncIterator[Drain]:
        """See `ReplicaHost`."""
        servers: list[Server] = []

        async def drain() -> None:
            async with trio.open_nursery() as nursery:
                for server in servers:
                    nursery.start_soon(server.drain, DRAIN_S)

        async with trio.open_nursery() as nursery:
            for address in self._plan.names_addresses(self.shard):
                servers.append(self._server(service, address))
                await nursery.start(servers[-1].listen_and_serve, address)
            yield drain
            nursery.cancel_scope.cancel()

    def _server(self, service: EngineService, address: str) -> Server:
        token = None if address.startswith(UNIX) else self._plan.token
        connections = connections_limit(STRANGERS_MAX)
        return Server(service, TrioNetwork(), token=token, connections_max=connections, of_the_lake=True)


def replica_place(
    coordinator: Coordinator, clock: Clock, lake: bytes, record: LeaderRecord, shard: NamesShard = FIRST_SHARD
) -> ReplicaPlace:
    """Return the surroundings of a replica's log; `record`: its own, while it leads."""
    replica = ReplicaId(record.replica)
    return ReplicaPlace(coordinator, clock, lake, replica, record.machine, encode(record), _holder, shard)


def machine_place(
    plan: LakePlan, coordinator: Coordinator, superblock: Superblock, shard: NamesShard = FIRST_SHARD
) -> ReplicaPlace:
    """Return the surroundings of the log of a shard's replica in a store of this machine."""
    record = _leader_record(plan, superblock, shard)
    return replica_place(coordinator, BoottimeClock(), plan.lake_id, record, shard)


def _leader_record(plan: LakePlan, superblock: Superblock, shard: NamesShard) -> LeaderRecord:
    return LeaderRecord(ReplicaId(superblock.store_id), plan.machine.machine, plan.names_addresses(shard))


def _holder(value: bytes) -> ReplicaId:
    return ReplicaId(decode(LeaderRecord, value).replica)
