"""The places of a simulated lake's processes: members on devices, names on three, heads on hosts.

A place outlives its processes: it has the devices, and starts the next process when one has ended.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import trio

from engine.coordinator.coordinator import Coordinator
from engine.coordinator.lake_state import LakeState
from engine.coordinator.records import MemberRecord
from engine.format.layouts import Table
from engine.format.shards import shards_of
from engine.format.sizes import StoreSizes
from engine.head.head import Head, open_head
from engine.lake.shard_replicas import WayToNames
from engine.lake_upkeep.lake_upkeep import LakeUpkeep, UpkeepSettings
from engine.members.member_link import Connect, MemberClient
from engine.members.member_links import open_member_links
from engine.metadata.metadata_store import Metadata
from engine.requests.table import Service
from engine.store.opening import open_store
from engine.store.store import Opening, Store
from engine.stripes.stripes import LakeStripes
from lakefs.cluster.protection import Protection
from lakefs.errors import EngineUnreachable
from lakefs.host.buffers import BufferPool
from lakefs.ids import ChunkId, MemberId
from lakefs.limits import MIB
from tests.sim.cluster.clients import SimClient, client_of
from tests.sim.cluster.liars import Lie, LyingClient
from tests.sim.cluster.network import Network
from tests.sim.cluster.process import SimProcess
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimDisk
from tests.sim.world.offload import SimOffload

LAKE = b"a simulated lake"
MEMBER_BYTES = 96 * MIB
NAMES_BYTES = 96 * MIB
NAMES_HOST = "names"
REPLICAS_A_SHARD = 2
REPLICA_HOSTS = "r0", "r1", "r2", "r3", "r4", "r5"
"""Hosts of the names of a lake over an etcd: REPLICAS_A_SHARD for each names shard, the first one first."""


@dataclass
class Surroundings:
    """The surroundings of all places."""

    rng: random.Random
    network: Network
    clock: SimClock
    protection: Protection
    sizes: StoreSizes
    settings: UpkeepSettings
    log: Callable[[str], None]

    def new_random(self) -> random.Random:
        """Make a source of chance for a part, so that parts do not disturb each other."""
        return random.Random(self.rng.getrandbits(64))


class Place:
    """A place for one process at a time."""

    def __init__(self, world: Surroundings, name: str, host: str) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.process: SimProcess | None = None
        self.is_wanted = True
        """It is started again when it has ended."""
        self.slowest_s = 0.001
        self.lives = 0

    @property
    def is_up(self) -> bool:
        """True if it can be asked."""
        return self.process is not None and self.process.is_up

    def offload(self) -> SimOffload:
        """Return threads for one process."""
        return SimOffload(self.world.new_random(), slowest_s=self.slowest_s)

    async def keep(self) -> None:
        """Run processes, one after the other, as long as the world lasts."""
        rng = self.world.new_random()
        while True:
            while not self.is_wanted:  # noqa: ASYNC110 - on a clock that jumps
                await trio.sleep(0.2)
            self.begin()
            self.lives += 1
            process = self.process = SimProcess(self.name, self.host)
            self.world.log(f"{self.name} starts")
            await process.run(partial(self.live, process))
            self.world.log(f"{self.name} has ended" + (f": {process.error!r}" if process.error else ""))
            self.end(process)
            await trio.sleep(rng.choice((0.1, 0.5, 3.0)))

    def begin(self) -> None:
        """Prepare for a process."""

    async def live(self, process: SimProcess) -> None:
        """Be the process until it is asked to stop."""
        raise NotImplementedError

    def end(self, process: SimProcess) -> None:
        """Tidy up behind a process."""

    async def stop(self) -> None:
        """Stop the process cleanly, and start no other."""
        self.is_wanted = False
        process = self.process
        if process is not None and not process.ended.is_set():
            process.stop()
            await process.ended.wait()

    def kill(self) -> None:
        """Kill the process."""
        if self.process is not None:
            self.process.kill()


class MemberPlace(Place):
    """A member's device."""

    def __init__(self, world: Surroundings, number: int) -> None:
        super().__init__(world, f"member {number}", f"m{number}")
        self.disk = self._new_disk()
        self.store: Store | None = None
        self.service: Service | None = None
        self.id: MemberId | None = None
        """The present member's; None until it has served."""
        self.lies = Lie.NONE
        """To heads: the walker would take its word for shards that it moves."""
        self._next_disk: SimDisk | None = None
        self._power_fails = True

    def _new_disk(self) -> SimDisk:
        return SimDisk(self.world.new_random(), capacity_bytes=MEMBER_BYTES)

    async def live(self, process: SimProcess) -> None:
        """Open the store and serve."""
        async with open_store(
            self.disk,
            self.world.clock,
            self.offload(),
            sizes=self.world.sizes,
            verify_index=False,
            grace_s=0.0,
            index_committed=self.disk.note_index_sync,
            cluster_id=LAKE,
        ) as store:
            self.id = MemberId(store.features.superblock.store_id)
            self.store, self.service = store, Service(store)
            await process.serve_until_stopped()

    def end(self, process: SimProcess) -> None:
        """Go on with what the medium has."""
        self.store = self.service = None
        if self._next_disk is not None:
            self.disk, self._next_disk = self._next_disk, None
        elif self.disk.is_dead or process.error is not None:
            self.disk = self.disk.crash() if self._power_fails else self.disk.kill()
        self.disk.crash_at = None

    def crash(self, *, power: bool, at_operation: int = 0) -> None:
        """Let the process, or the power of its host, fail: now, or at one of the next operations of its disk."""
        if self.process is None or self.process.ended.is_set() or self.disk.is_dead:
            return
        self._power_fails = self.process.dies_silently = power
        if at_operation:
            self.disk.crash_at = self.disk.operation_count + at_operation
        else:
            self._next_disk = self.disk.crash() if power else self.disk.kill()
            self.process.kill()

    def replace_device(self, disk: SimDisk, *, power: bool = True) -> None:
        """Let the power of its host, or the process, fail; the next process finds this device."""
        if self.process is not None and not self.process.ended.is_set():
            self._power_fails = self.process.dies_silently = power
            if not self.disk.is_dead:
                self.disk.crash()
            self._next_disk = disk
            self.process.kill()
        else:
            self.disk = disk

    @property
    def opening(self) -> Opening | None:
        """The present opening of its store; None while it is away."""
        return None if self.store is None or self.store.member is None else self.store.member.opening

    def shard_count(self, chunk: ChunkId) -> int:
        """Return how many shards of a chunk the member has; none while it is away."""
        if self.store is None:
            return 0
        with self.store.metadata.view() as view:
            return sum(1 for _ in view.scan(Table.CHUNKS, *shards_of(chunk)))

    def lose(self) -> None:
        """Lose the device with all that is on it; an empty one takes its place."""
        self.replace_device(self._new_disk())
        self.id = None


class Names(Protocol):
    """The names of a lake and what is beside them, wherever they are served."""

    @property
    def hosts(self) -> Sequence[str]:
        """The hosts on which they may be served."""
        ...

    @property
    def is_up(self) -> bool:
        """True if they can be asked."""
        ...

    @property
    def upkeep(self) -> LakeUpkeep | None:
        """The upkeep beside the names that are served; None while they are away."""
        ...

    @property
    def metadata(self) -> Metadata | None:
        """The metadata of the names that are served; None while they are away."""
        ...

    @property
    def epoch(self) -> int:
        """The ring epoch of the newest table; 0 while nobody knows."""
        ...

    def reached(self, near: str, process: SimProcess) -> AbstractAsyncContextManager[tuple[Coordinator, WayToNames]]:
        """Open the ways of a process on a host to the coordinator and to the names."""
        ...

    async def watch(self) -> None:
        """Note what faults have to know, while there are any; until cancelled."""
        ...

    def heal(self) -> None:
        """End all faults."""
        ...

    async def settle(self) -> None:
        """Check the names of a quiet lake, and that they outlast a power loss; SimFailure."""
        ...


class HeadPlace(Place):
    """A host with a head, and the clients beside it."""

    def __init__(self, world: Surroundings, number: int, names: Names, members: list[MemberPlace]) -> None:
        super().__init__(world, f"head {number}", f"h{number}")
        self.names = names
        self.members = members
        self.head: Head | None = None

    async def live(self, process: SimProcess) -> None:
        """Reach names and members, and serve."""
        world, offload = self.world, self.offload()
        connect = connecting(world.network, self.host, self.members)
        async with (
            self.names.reached(self.host, process) as (coordinator, way),
            open_member_links(coordinator, connect) as links,
        ):
            stripes = LakeStripes(links, LakeState(coordinator), offload)
            async with open_head(
                way.connect,
                stripes,
                links,
                offload=offload,
                clock=world.clock,
                buffers=BufferPool(64 * MIB),
                shards=way.shards,
                connect_shard=way.connect_shard,
            ) as self.head:
                await process.serve_until_stopped()

    def end(self, process: SimProcess) -> None:
        """Forget the head."""
        self.head = None

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[SimClient]:
        """Connect a client of this host.  EngineUnreachable."""
        async with client_of(self.world.network, self.host, self.process, self.head) as client:
            yield client


def connecting(network: Network, near: str, members: list[MemberPlace], *, hears_lies: bool = True) -> Connect:
    """Return what connects a host to members."""

    @asynccontextmanager
    async def connect(record: MemberRecord) -> AsyncIterator[MemberClient]:
        place = next((member for member in members if member.id == record.member), None)
        if place is None:
            await trio.sleep(0.001)
            raise EngineUnreachable("nothing listens there")
        async with client_of(network, near, place.process, place.service) as client:
            yield LyingClient(client, place) if hears_lies else client

    return connect
