"""The names of a lake over a simulated etcd: two replicas, each on a machine with the lake's upkeep beside it.

A replica is `tests.sim.replicas.places.ReplicaPlace`, with what a machine's process has beside one
(`engine.lake.parts`): links to members, stripes, and the upkeep while its names lead.  Every process has the etcd
behind its fence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import trio

from engine.coordinator.coordinator import Coordinator, IsAbsent, Put
from engine.coordinator.coordinator_requests import coordinator_group
from engine.coordinator.fenced_coordinator import FencedCoordinator, open_fenced_coordinator
from engine.coordinator.lake_state import LakeState
from engine.coordinator.moving import Side, move, take_charge
from engine.coordinator.names_leader import open_names_leader
from engine.coordinator.reads_only_coordinator import ReadsOnlyCoordinator
from engine.coordinator.records import EPOCH_KEY, EpochRecord, decode
from engine.coordinator.term_coordinator import TermCoordinator
from engine.etcd.etcd_coordinator import EtcdCoordinator
from engine.head.names_link import ConnectNames
from engine.host.tasks import plain_errors
from engine.lake.names_here import TABLE, open_table
from engine.lake.names_replica import NamesReplica, Term
from engine.lake.names_terms import keep_lake
from engine.lake_gc.joined_generation import JoinedGeneration
from engine.lake_upkeep.lake_upkeep import LakeUpkeep
from engine.members.member_links import MemberLinks, open_member_links
from engine.metadata.metadata_store import Metadata
from engine.process.mirrored_names import LocalNames
from engine.requests.bind import BindGate
from engine.requests.dispatch import Group
from engine.requests.table import NamesService
from engine.store.metadata_life import always_leading
from engine.stripes.stripes import LakeStripes
from tests.sim.cluster.etcd_nodes import etcd_nodes
from tests.sim.cluster.far_etcd import far_etcd
from tests.sim.cluster.lake_records import keep_registered, make_lake
from tests.sim.cluster.places import LAKE, REPLICA_HOSTS, MemberPlace, Surroundings, connecting
from tests.sim.cluster.process import SimProcess
from tests.sim.replicas.faults import KEYS, watch_caught_up
from tests.sim.replicas.places import DriftingClock, ReplicaPlace, Surroundings as Machines, running_replica
from tests.sim.replicas.quiet import heal, wait_equal, wait_trimmed
from tests.sim.world.stopped_tasks import stopping_tasks

BESIDE: Final = "beside"
"""The host that makes the lake, and records its members, as each machine does for its own."""
_EPOCH_KEY: Final = b"/lake/lake/keys/" + EPOCH_KEY
_WORDS: Final = "the simulated etcd"


class _TickingClock(DriftingClock):
    """It moves with each look, as any clock does: what waits for less than a float can say ends."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self._last = 0.0

    def monotonic(self) -> float:
        self._last = max(super().monotonic(), self._last + 1e-9)
        return self._last


class LakeReplica(ReplicaPlace):
    """A machine with a replica of the names, and what keeps the lake whole while these lead."""

    def __init__(self, lake: Surroundings, machines: Machines, number: int, members: list[MemberPlace]) -> None:
        super().__init__(machines, number)
        self.clock = _TickingClock(self.clock.rate)
        self.upkeep: LakeUpkeep | None = None
        self.led_since = 0.0
        self._lake = lake
        self._members = members
        self._content: tuple[FencedCoordinator, MemberLinks, LakeStripes]

    async def _live(self, process: SimProcess) -> None:
        connect = connecting(self.world.network, self.machine, self._members, hears_lies=False)
        async with (
            _fenced(self.world, self.machine, process) as (etcd, coordinator),
            open_member_links(coordinator, connect) as links,
            open_names_leader(coordinator) as leader,
        ):
            self._content = coordinator, links, LakeStripes(links, LakeState(coordinator), self.offload)
            replica = NamesReplica(
                self,
                LAKE,
                coordinator,
                leader,
                self._open_term,
                failure=lambda: coordinator.failure,
                make_room=etcd.make_room,
                incarnation=coordinator.incarnation,
            )
            async with running_replica(replica):
                await process.serve_until_stopped()

    def _open_term(self, names: LocalNames, checkpoints: Group) -> Term:
        coordinator, links, stripes = self._content
        store, gate = names.store, BindGate()
        upkeep = LakeUpkeep(
            TermCoordinator(coordinator, store.superblock.store_id),
            links,
            stripes,
            store,
            gate,
            JoinedGeneration(store.metadata, gate),
            self.offload,
            self._lake.settings,
            names_state=names.state,
            etcd_state=_etcd_state,
            on_change=links.view.on_change,
        )
        service = NamesService(
            store,
            gate=gate,
            upkeep=upkeep.requests,
            more_status=upkeep.status,
            coordinator=coordinator_group(ReadsOnlyCoordinator(coordinator)),
            checkpoints=checkpoints,
        )

        async def keep_whole() -> None:
            self.upkeep, self.led_since = upkeep, trio.current_time()
            try:
                await keep_lake(upkeep, coordinator, store)
            finally:
                self.upkeep = None

        return Term(service, keep_whole, upkeep.begin)


class EtcdNames:
    """`Names` of a lake over an etcd.  Made by `open_etcd_names`."""

    def __init__(
        self, lake: Surroundings, machines: Machines, members: list[MemberPlace], nursery: trio.Nursery
    ) -> None:
        self.machines: Final = machines
        self.replicas: Final = [LakeReplica(lake, machines, number, members) for number in range(len(REPLICA_HOSTS))]
        machines.places += self.replicas
        self.met: Counter[str] = Counter()
        """The faults of the names that have happened."""
        self._lake = lake
        self._members = members
        self._nursery = nursery

    async def make(self) -> None:
        """Make the lake, move it to the etcd as a start does (`engine.lake.moving_over`), and let its machines run."""
        first = self.replicas[0]
        async with (
            first.open_names(always_leading, None, is_new=True) as names,
            open_table(names.store) as table,
            far_etcd(self.machines.nodes, BESIDE) as etcd,
        ):
            await make_lake(LakeState(table), self._lake.protection, self._members)
            await take_charge(table, LAKE)
            served = await move(Side(table, TABLE), Side(etcd, _WORDS), LAKE)
            await etcd.transact([IsAbsent(KEYS.log)], [Put(KEYS.origin, names.store.superblock.store_id)])
        first.is_caught_up = True
        self.machines.incarnation = served.incarnation
        self._nursery.start_soon(self._keep_registered)
        for replica in self.replicas:
            self._nursery.start_soon(replica.keep)

    async def _keep_registered(self) -> None:
        async with far_etcd(self.machines.nodes, BESIDE) as etcd:
            await keep_registered(LakeState(etcd), self._members, self._lake.log)

    @property
    def hosts(self) -> Sequence[str]:
        """See `Names`."""
        return REPLICA_HOSTS

    @property
    def is_up(self) -> bool:
        """See `Names`."""
        return self._leader is not None

    @property
    def upkeep(self) -> LakeUpkeep | None:
        """See `Names`."""
        return None if self._leader is None else self._leader.upkeep

    @property
    def metadata(self) -> Metadata | None:
        """See `Names`."""
        return None if self._leader is None else self._leader.metadata

    @property
    def epoch(self) -> int:
        """See `Names`."""
        record = self.machines.nodes.state.current(_EPOCH_KEY)
        return 0 if record is None or record.value is None else decode(EpochRecord, record.value).number

    @property
    def _leader(self) -> LakeReplica | None:
        """The replica that leads; where one does not know yet that it leads no more, the other one."""
        leading = [each for each in self.replicas if each.upkeep is not None and each.leads and not each.is_stopped]
        return max(leading, key=lambda each: each.led_since, default=None)

    @asynccontextmanager
    async def reached(self, near: str, process: SimProcess) -> AsyncIterator[tuple[Coordinator, ConnectNames]]:
        """See `Names`."""
        async with _fenced(self.machines, near, process) as (_, coordinator), open_names_leader(coordinator) as leader:
            yield coordinator, self.machines.names_from(near, leader)

    async def watch(self) -> None:
        """See `Names`."""
        await watch_caught_up(self.machines)

    def heal(self) -> None:
        """See `Names`."""
        heal(self.machines)

    async def settle(self) -> None:
        """See `Names`."""
        await wait_equal(self.machines)
        await wait_trimmed(self.machines)
        power = self.machines.rng.random() < 0.7
        for replica in self.replicas:
            replica.crash(power=power)
        await wait_equal(self.machines, " behind a crash of all")


def _etcd_state() -> dict[str, Any]:
    return {"reachable": True, "reason": ""}


@asynccontextmanager
async def _fenced(
    machines: Machines, near: str, process: SimProcess
) -> AsyncIterator[tuple[EtcdCoordinator, FencedCoordinator]]:
    """Yield a process's etcd, and the coordinator behind its fence, as `open_lake_etcd` does."""
    async with (
        far_etcd(machines.nodes, near, process=process) as etcd,
        open_fenced_coordinator(etcd, LAKE, _WORDS, machines.incarnation) as coordinator,
    ):
        await coordinator.check()
        yield etcd, coordinator


@asynccontextmanager
async def open_etcd_names(lake: Surroundings, members: list[MemberPlace]) -> AsyncIterator[EtcdNames]:
    """Yield the names of a lake over an etcd, which is to be made; all ends with the block."""
    with stopping_tasks() as stopped, plain_errors():
        async with etcd_nodes(lake.network, lake.new_random()) as nodes, trio.open_nursery() as nursery:
            machines = Machines(lake.new_random(), lake.network, nodes, stopped, lake.sizes, lake.log)
            try:
                yield EtcdNames(lake, machines, members, nursery)
            finally:
                stopped.resume_all()  # else nothing ends them
            nursery.cancel_scope.cancel()
