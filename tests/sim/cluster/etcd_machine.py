"""A machine of a lake over a simulated etcd: a replica of one names shard, and what it serves while that leads.

A replica is `tests.sim.replicas.places.ReplicaPlace`, with what a machine's process has beside one
(`engine.lake.parts`): links to members, stripes, and the upkeep while its names lead.  Every process has the etcd
behind its fence.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import trio

from engine.coordinator.bucket_shards import BucketShards
from engine.coordinator.coordinator_requests import coordinator_group
from engine.coordinator.fenced_coordinator import FencedCoordinator, open_fenced_coordinator
from engine.coordinator.lake_state import LakeState
from engine.coordinator.names_leader import NamesLeaders, open_names_leaders
from engine.coordinator.reads_only_coordinator import ReadsOnlyCoordinator
from engine.coordinator.records import Charge, ChargeRecord
from engine.coordinator.shard_requests import shards_group
from engine.coordinator.term_coordinator import TermCoordinator
from engine.etcd.etcd_coordinator import EtcdCoordinator
from engine.format.group_parts import FIRST_SHARD
from engine.head.names_link import ConnectNames
from engine.lake.names_replica import NamesReplica, Term
from engine.lake.names_terms import begin_shard, buckets_of, keep_lake
from engine.lake_gc.joined_generation import JoinedGeneration
from engine.lake_upkeep.lake_upkeep import LakeUpkeep
from engine.lake_upkeep.other_shards import shards_by_requests
from engine.lake_upkeep.shard_upkeep import ShardUpkeep
from engine.members.member_links import MemberLinks, open_member_links
from engine.process.mirrored_names import LocalNames
from engine.requests.bind import BindGate
from engine.requests.dispatch import Group
from engine.requests.table import NamesService
from engine.stripes.stripes import LakeStripes
from lakefs.ids import NamesShard
from tests.sim.cluster.far_etcd import far_etcd
from tests.sim.cluster.places import LAKE, MemberPlace, Surroundings, connecting
from tests.sim.cluster.process import SimProcess
from tests.sim.replicas.places import DriftingClock, ReplicaPlace, Surroundings as Machines, running_replica

ETCD_WORDS: Final = "the simulated etcd"
ConnectShard = Callable[[str, NamesLeaders, NamesShard], ConnectNames]
"""Returns what connects a host to the leader of a shard, which those of the process know."""


class _TickingClock(DriftingClock):
    """It moves with each look, as any clock does: what waits for less than a float can say ends."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self._last = 0.0

    def monotonic(self) -> float:
        self._last = max(super().monotonic(), self._last + 1e-9)
        return self._last


@dataclass(frozen=True)
class _Ways:
    """The ways of one process of a machine."""

    coordinator: FencedCoordinator
    links: MemberLinks
    stripes: LakeStripes
    connect: Callable[[NamesShard], ConnectNames]


class LakeReplica(ReplicaPlace):
    """A machine with a replica of a names shard, and what keeps the lake whole while the first shard leads here."""

    def __init__(
        self, lake: Surroundings, machines: Machines, number: int, members: list[MemberPlace], connect: ConnectShard
    ) -> None:
        super().__init__(machines, number)
        self.clock = _TickingClock(self.clock.rate)
        self.upkeep: LakeUpkeep | None = None
        """The lake's upkeep, while the first shard leads here."""
        self.led_since = 0.0
        self.is_served = False
        """The names of its shard are served here, as this process believes."""
        self._lake = lake
        self._members = members
        self._connect = connect
        self._ways: _Ways

    async def _live(self, process: SimProcess) -> None:
        connect = connecting(self.world.network, self.machine, self._members, hears_lies=False)
        async with (
            fenced(self.world, self.machine, process) as (etcd, coordinator),
            open_member_links(coordinator, connect) as links,
            open_names_leaders(coordinator) as leaders,
        ):
            stripes = LakeStripes(links, LakeState(coordinator), self.offload)

            def connect_shard(shard: NamesShard) -> ConnectNames:
                return self._connect(self.machine, leaders, shard)

            self._ways = _Ways(coordinator, links, stripes, connect_shard)
            replica = NamesReplica(
                self,
                LAKE,
                coordinator,
                leaders.of(self.shard),
                self._open_term,
                failure=lambda: coordinator.failure,
                make_room=etcd.make_room,
                incarnation=coordinator.incarnation,
            )
            async with running_replica(replica):
                await process.serve_until_stopped()

    def _open_term(self, names: LocalNames, checkpoints: Group) -> Term:
        """Return what serves, as `engine.lake.names_terms` does."""
        gate = BindGate()
        joined = JoinedGeneration(names.store.metadata, gate)
        open_term = self._first if self.shard == FIRST_SHARD else self._other
        return open_term(names, checkpoints, gate, joined)

    def _first(self, names: LocalNames, checkpoints: Group, gate: BindGate, joined: JoinedGeneration) -> Term:
        ways, store = self._ways, names.store
        coordinator = TermCoordinator(ways.coordinator, store.superblock.store_id)
        buckets = BucketShards(coordinator, FIRST_SHARD)
        upkeep = LakeUpkeep(
            coordinator,
            ways.links,
            ways.stripes,
            store,
            gate,
            joined,
            self.offload,
            self._lake.settings,
            names_state=names.state,
            etcd_state=_etcd_state,
            on_change=ways.links.view.on_change,
            others=shards_by_requests(ways.connect),
        )
        service = NamesService(
            store,
            gate=gate,
            upkeep=upkeep.requests,
            more_status=upkeep.status,
            coordinator=coordinator_group(ReadsOnlyCoordinator(ways.coordinator)),
            checkpoints=checkpoints,
            buckets=buckets,
            more=[shards_group(coordinator, LAKE)],
        )

        async def begin() -> None:
            await upkeep.begin()
            await buckets.begin(buckets_of(store))

        async def keep_whole() -> None:
            self.upkeep, self.led_since, self.is_served = upkeep, trio.current_time(), True
            try:
                await keep_lake(upkeep, ways.coordinator, store)
            finally:
                self.upkeep, self.is_served = None, False

        return Term(service, keep_whole, begin)

    def _other(self, names: LocalNames, checkpoints: Group, gate: BindGate, joined: JoinedGeneration) -> Term:
        ways, store, shard = self._ways, names.store, self.shard
        coordinator = TermCoordinator(ways.coordinator, store.superblock.store_id, self.world.keys.leader)
        buckets = BucketShards(coordinator, shard)
        batch = self._lake.settings.gc_batch
        upkeep = ShardUpkeep(shard, coordinator, ways.links, ways.stripes, store, joined, batch=batch)
        service = NamesService(store, gate=gate, upkeep=upkeep.requests, checkpoints=checkpoints, buckets=buckets)

        async def begin() -> None:
            charge = ChargeRecord(LAKE, Charge.LEFT, 0, self.world.incarnation)
            await begin_shard(shard, store, charge)
            await upkeep.begin()
            await buckets.begin(buckets_of(store))

        async def be_served() -> None:
            self.led_since, self.is_served = trio.current_time(), True
            try:
                await trio.sleep_forever()
            finally:
                self.is_served = False

        return Term(service, be_served, begin)


def _etcd_state() -> dict[str, Any]:
    return {"reachable": True, "reason": ""}


@asynccontextmanager
async def fenced(
    machines: Machines, near: str, process: SimProcess
) -> AsyncIterator[tuple[EtcdCoordinator, FencedCoordinator]]:
    """Yield a process's etcd, and the coordinator behind its fence, as `open_lake_etcd` does."""
    async with (
        far_etcd(machines.nodes, near, process=process) as etcd,
        open_fenced_coordinator(etcd, LAKE, ETCD_WORDS, machines.incarnation) as coordinator,
    ):
        await coordinator.check()
        yield etcd, coordinator
