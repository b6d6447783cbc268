"""The names of a lake over a simulated etcd: one shard or several, each with two replicas on machines of its own.

Shards may be there from the beginning, or be added later, by the product's request: their machines begin when the
record says that there is such a shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import trio

from engine.coordinator.coordinator import Coordinator, IsAbsent, Put
from engine.coordinator.lake_state import LakeState
from engine.coordinator.moving import Side, move, take_charge
from engine.coordinator.names_leader import NamesLeaders, open_names_leaders
from engine.coordinator.names_shards import open_names_shards
from engine.coordinator.records import (
    EPOCH_KEY,
    EPOCHS,
    SHARDS_KEY,
    BucketShardRecord,
    EpochRecord,
    LogRecord,
    ShardsRecord,
    bucket_key,
    decode,
    encode,
    epoch_of_key,
)
from engine.format.generation import JOINED_KEY, unpack_joined
from engine.format.group_parts import FIRST_SHARD, LogKeys
from engine.format.layouts import Table
from engine.head.names_link import ConnectNames
from engine.host.tasks import plain_errors
from engine.lake.names_here import TABLE, open_table
from engine.lake.shard_replicas import WayToNames
from engine.lake_upkeep.lake_upkeep import LakeUpkeep
from engine.metadata.metadata_store import Metadata
from engine.store.metadata_life import always_leading
from lakefs.ids import NamesShard
from tests.sim.cluster.etcd_machine import ETCD_WORDS, LakeReplica, fenced
from tests.sim.cluster.etcd_nodes import EtcdNodes, etcd_nodes
from tests.sim.cluster.far_etcd import far_etcd
from tests.sim.cluster.lake_records import keep_registered, make_lake
from tests.sim.cluster.places import LAKE, REPLICA_HOSTS, REPLICAS_A_SHARD, MemberPlace, Surroundings
from tests.sim.cluster.process import SimProcess
from tests.sim.judges.history import SimFailure
from tests.sim.replicas.faults import watch_caught_up
from tests.sim.replicas.places import Surroundings as Machines
from tests.sim.replicas.quiet import heal, wait_equal, wait_trimmed
from tests.sim.world.stopped_tasks import StoppedTasks, stopping_tasks

BESIDE: Final = "beside"
"""The host that makes the lake, and records its members, as each machine does for its own."""
_KEYS: Final = b"/lake/lake/keys/"


class ShardPlaces:
    """The machines of one names shard."""

    def __init__(self, machines: Machines, replicas: Sequence[LakeReplica]) -> None:
        self.machines = machines
        self.replicas = replicas
        machines.places += replicas

    @property
    def leader(self) -> LakeReplica | None:
        """The replica that leads; where one does not know yet that it leads no more, the other one."""
        leading = [each for each in self.replicas if each.is_served and each.leads and not each.is_stopped]
        return max(leading, key=lambda each: each.led_since, default=None)


class EtcdNames:
    """`Names` of a lake over an etcd.  Made by `open_etcd_names`."""

    def __init__(self, lake: Surroundings, shards: Sequence[ShardPlaces], begun: int, nursery: trio.Nursery) -> None:
        """`shards`: the machines of all that there may ever be; `begun` of them are there from the beginning."""
        self.places: Final = shards
        self.machines: Final = shards[0].machines
        self.replicas: Final = shards[0].replicas
        """The first shard's."""
        self.met: Counter[str] = Counter()
        """The faults of the names that have happened."""
        self._lake = lake
        self._begun = begun
        self._nursery = nursery

    async def make(self, members: list[MemberPlace]) -> None:
        """Make the lake, move it to the etcd as a start does (`engine.lake.moving_over`), and let its machines run."""
        first = self.replicas[0]
        keys = LogKeys(FIRST_SHARD)
        async with (
            first.open_names(always_leading, None, is_new=True) as names,
            open_table(names.store) as table,
            far_etcd(self.machines.nodes, BESIDE) as etcd,
        ):
            await make_lake(LakeState(table), self._lake.protection, members)
            await take_charge(table, LAKE)
            served = await move(Side(table, TABLE), Side(etcd, ETCD_WORDS), LAKE)
            await etcd.transact([IsAbsent(keys.log)], [Put(keys.origin, names.store.superblock.store_id)])
            if self._begun > 1:
                logs = [Put(LogKeys(each).log, encode(LogRecord(LAKE))) for each in self._numbers[1 : self._begun]]
                await etcd.transact([], [Put(SHARDS_KEY, encode(ShardsRecord(self._begun))), *logs])
        first.is_caught_up = True
        for place in self.places:
            place.machines.incarnation = served.incarnation
        self._nursery.start_soon(self._keep_registered, members)
        self._nursery.start_soon(self._keep_shards)

    @property
    def _numbers(self) -> list[NamesShard]:
        return [place.machines.shard for place in self.places]

    async def _keep_registered(self, members: list[MemberPlace]) -> None:
        async with far_etcd(self.machines.nodes, BESIDE) as etcd:
            await keep_registered(LakeState(etcd), members, self._lake.log)

    async def _keep_shards(self) -> None:
        """Run the machines of each shard that there is."""
        begun = 0
        while True:
            for place in self.places[begun : self.count]:
                for replica in place.replicas:
                    self._nursery.start_soon(replica.keep)
            begun = self.count
            await trio.sleep(0.2)

    # --- the etcd as it is -----------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """The number of names shards that there are."""
        value = self._record(SHARDS_KEY)
        return 1 if value is None else decode(ShardsRecord, value).count

    def shard_of(self, bucket: str) -> NamesShard | None:
        """Return the names shard that a bucket is assigned to; None: to none."""
        value = self._record(bucket_key(bucket))
        return None if value is None else decode(BucketShardRecord, value).shard

    @property
    def epoch(self) -> int:
        """See `Names`."""
        value = self._record(EPOCH_KEY)
        return 0 if value is None else decode(EpochRecord, value).number

    def _record(self, key: bytes) -> bytes | None:
        found = self.machines.nodes.state.current(_KEYS + key)
        return None if found is None else found.value

    # --- names -----------------------------------------------------------------------------------------

    @property
    def present(self) -> Sequence[ShardPlaces]:
        """The machines of the shards that there are."""
        return self.places[: self.count]

    @property
    def hosts(self) -> Sequence[str]:
        """See `Names`."""
        return REPLICA_HOSTS[: len(self.places) * REPLICAS_A_SHARD]

    @property
    def is_up(self) -> bool:
        """See `Names`."""
        return all(place.leader is not None for place in self.present)

    @property
    def upkeep(self) -> LakeUpkeep | None:
        """See `Names`."""
        leader = self.places[0].leader
        return None if leader is None else leader.upkeep

    @property
    def metadata(self) -> Metadata | None:
        """See `Names`."""
        leader = self.places[0].leader
        return None if leader is None else leader.metadata

    @asynccontextmanager
    async def reached(self, near: str, process: SimProcess) -> AsyncIterator[tuple[Coordinator, WayToNames]]:
        """See `Names`."""
        async with (
            fenced(self.machines, near, process) as (_, coordinator),
            open_names_leaders(coordinator) as leaders,
            open_names_shards(coordinator) as shards,
        ):

            def connect(shard: NamesShard) -> ConnectNames:
                return self.connect_shard(near, leaders, shard)

            yield coordinator, WayToNames(connect(FIRST_SHARD), shards, connect)

    def connect_shard(self, near: str, leaders: NamesLeaders, shard: NamesShard) -> ConnectNames:
        """Return what connects a host to the leader of a shard."""
        return self.places[shard].machines.names_from(near, leaders.of(shard))

    async def watch(self) -> None:
        """See `Names`."""
        async with trio.open_nursery() as nursery:
            for place in self.places:
                nursery.start_soon(watch_caught_up, place.machines)

    def heal(self) -> None:
        """See `Names`."""
        for place in self.places:
            heal(place.machines)

    async def settle(self) -> None:
        """See `Names`."""
        await self._wait_equal()
        self._check_refusals()
        for place in self.present:
            await wait_trimmed(place.machines)
        power = self.machines.rng.random() < 0.7
        for place in self.present:
            for replica in place.replicas:
                replica.crash(power=power)
        await self._wait_equal(" behind a crash of all")

    def _check_refusals(self) -> None:
        """Check that the log of each shard but the first refuses answers of retired epochs: those have no table."""
        begin, end = _KEYS + EPOCHS[0], _KEYS + EPOCHS[1]
        state = self.machines.nodes.state
        tables = [
            epoch_of_key(key.removeprefix(_KEYS)) for key in state._keys if begin <= key < end and state.current(key)
        ]
        for place in self.present[1:]:
            contents = place.replicas[0].contents()
            assert contents is not None, "replicas are equal"
            joined = contents.get((Table.COUNTERS, JOINED_KEY))
            oldest = 0 if joined is None else unpack_joined(joined).oldest_epoch
            if oldest < min(tables):
                raise SimFailure(
                    f"names shard {place.machines.shard} refuses answers below epoch {oldest}, and there are {tables}"
                )

    async def _wait_equal(self, when: str = "") -> None:
        for place in self.present:
            await wait_equal(place.machines, when)


@asynccontextmanager
async def open_etcd_names(
    lake: Surroundings, members: list[MemberPlace], shards: int = 1, begun: int = 1
) -> AsyncIterator[EtcdNames]:
    """Yield the names of a lake over an etcd, which is to be made; all ends with the block.

    `shards`: so many there may be; `begun` of them are there when the lake is made.
    """
    with stopping_tasks() as stopped, plain_errors():
        async with etcd_nodes(lake.network, lake.new_random()) as nodes, trio.open_nursery() as nursery:
            names: EtcdNames

            def connect(near: str, leaders: NamesLeaders, shard: NamesShard) -> ConnectNames:
                return names.connect_shard(near, leaders, shard)

            def places(number: int) -> ShardPlaces:
                machines = _machines(lake, nodes, stopped, NamesShard(number), shards)
                first = number * REPLICAS_A_SHARD
                hosts = range(first, first + REPLICAS_A_SHARD)
                return ShardPlaces(machines, [LakeReplica(lake, machines, host, members, connect) for host in hosts])

            names = EtcdNames(lake, [places(number) for number in range(shards)], begun, nursery)
            try:
                yield names
            finally:
                stopped.resume_all()  # else nothing ends them
            nursery.cancel_scope.cancel()


def _machines(lake: Surroundings, nodes: EtcdNodes, stopped: StoppedTasks, shard: NamesShard, shards: int) -> Machines:
    """Return the surroundings of a shard's machines."""
    own = range(shard * REPLICAS_A_SHARD, (shard + 1) * REPLICAS_A_SHARD)
    beside = [host for number, host in enumerate(REPLICA_HOSTS[: shards * REPLICAS_A_SHARD]) if number not in own]
    return Machines(lake.new_random(), lake.network, nodes, stopped, lake.sizes, lake.log, shard=shard, beside=beside)
