"""The replicas of all names shards on this machine, in a lake with etcd: one a shard, as far as it wants one here.

Rules kept here:
- Each replica is on its own: none ends with another.  One of a shard that was added begins when its record is seen.
- A new replica is left to machines that have fewer of them first: so replicas are spread over many machines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

import trio

from engine.coordinator.coordinator import Coordinator
from engine.coordinator.lake_state import LakeState, pages
from engine.coordinator.names_shards import NamesShards
from engine.coordinator.records import ReplicaRecord, decode
from engine.format.group_parts import FIRST_SHARD, LogKeys
from engine.head.names_link import ConnectNames
from engine.host.tasks import plain_errors
from engine.lake.names_replica import NamesReplica
from lakefs.ids import NamesShard, ReplicaId


class WayToNames(NamedTuple):
    """The way from a process to the names of its lake: `connect`, where all are in one shard, or to the first one."""

    connect: ConnectNames
    shards: NamesShards | None = None
    connect_shard: Callable[[NamesShard], ConnectNames] | None = None


class ShardReplicas:
    """The replicas of one machine.  `running_replicas` runs them; used on the loop."""

    def __init__(self, shards: NamesShards, make: Callable[[NamesShard], NamesReplica]) -> None:
        """`make` returns the replica of a shard, which does not run yet."""
        self._shards = shards
        self._make = make
        self._replicas: dict[NamesShard, NamesReplica] = {}
        self._nursery: trio.Nursery | None = None

    @property
    def way(self) -> WayToNames:
        """The way to the names that lead, wherever they are."""
        return WayToNames(self.connect(FIRST_SHARD), self._shards, self.connect)

    def connect(self, shard: NamesShard) -> ConnectNames:
        """Return what connects to the names of a shard that lead."""
        return self._of(shard).connect

    @property
    def all(self) -> Mapping[NamesShard, NamesReplica]:
        """The replicas by their shards, also those that wait until one is wanted here."""
        return self._replicas

    async def run(self) -> None:
        """Run a replica of each shard, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            for replica in self._replicas.values():
                self._nursery.start_soon(replica.run)
            count = 0
            while True:
                count = await self._shards.wait_count(count)
                for shard in range(count):
                    self._of(NamesShard(shard))

    async def stop(self) -> None:
        """Stop all cleanly, and begin no other one."""
        self._nursery = None
        async with trio.open_nursery() as nursery:
            for replica in self._replicas.values():
                nursery.start_soon(replica.stop)

    def _of(self, shard: NamesShard) -> NamesReplica:
        if shard not in self._replicas:
            self._replicas[shard] = self._make(shard)
            if self._nursery is not None:
                self._nursery.start_soon(self._replicas[shard].run)
        return self._replicas[shard]


@asynccontextmanager
async def running_replicas(replicas: ShardReplicas) -> AsyncIterator[None]:
    """Run replicas during the block, and stop them cleanly at its end."""
    with plain_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(replicas.run)
            yield
            await replicas.stop()
            nursery.cancel_scope.cancel()


async def machines_before(coordinator: Coordinator, shard: NamesShard, shards: NamesShards, machine: str) -> int:
    """Return how many machines are to have a new replica of a shard before this one.  Errors of the coordinator.

    Those are present, have none of it, and have fewer replicas of all shards; equal ones go by their ids.
    """
    replicas: Counter[str] = Counter()
    has_one: set[str] = set()
    for each in map(NamesShard, range(shards.count)):
        async for page in pages(coordinator, *LogKeys(each).replicas):
            found = [decode(ReplicaRecord, entry.value) for entry in page.entries]
            machines = [record.machine for record in found if not record.is_removed]
            replicas.update(machines)
            has_one |= set(machines) if each == shard else set()
    present = {head.machine for head in await LakeState(coordinator).heads() if head.has_members}
    own = replicas[machine], machine
    return sum((replicas[each], each) < own for each in present - has_one)


async def copied_from(coordinator: Coordinator, shard: NamesShard, machine: str, replica: ReplicaId) -> str:
    """Return the machine that has said last that a replica is its own, if that is another one, and is present.

    Else empty: a disk may have been brought here from a machine that is gone.  Errors of the coordinator.
    """
    entry = (await coordinator.get(LogKeys(shard).replica(replica))).entry
    owner = machine if entry is None else decode(ReplicaRecord, entry.value).machine
    if owner == machine:
        return ""
    return owner if owner in {head.machine for head in await LakeState(coordinator).heads()} else ""
