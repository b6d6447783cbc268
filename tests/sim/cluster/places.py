"""The places of a simulated lake's processes: members on devices, names on three, heads on hosts.

A place outlives its processes: it has the devices, and starts the next process when one has ended.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import trio

from engine.coordinator.coordinator_requests import coordinator_group
from engine.coordinator.lake_state import NO_EPOCH, NO_GENERATION, LakeState
from engine.coordinator.names_coordinator import NamesCoordinator, open_names_coordinator
from engine.coordinator.records import LakeRecord, MemberRecord
from engine.format.layouts import Table
from engine.format.shards import shards_of
from engine.format.sizes import StoreSizes
from engine.head.head import Head, open_head
from engine.head.names_link import NamesConnection
from engine.lake_gc.joined_generation import JoinedGeneration
from engine.lake_upkeep.lake_upkeep import LakeUpkeep, UpkeepSettings
from engine.members.member_link import Connect, MemberClient
from engine.members.member_links import open_member_links
from engine.mirror.copy_calls import InTurn
from engine.process.mirrored_names import LocalNames, NamesHost, open_names_in
from engine.requests.bind import BindGate
from engine.requests.table import NamesService, Service
from engine.store.opening import open_store
from engine.store.store import Opening, Store
from engine.stripes.stripes import LakeStripes
from engine.walker.membership import members_of_records
from lakefs.cluster.placing import first_table
from lakefs.cluster.protection import Protection
from lakefs.cluster.table_format import pack
from lakefs.errors import DiskFailed, EngineUnreachable, LakeError, StoreUnusable
from lakefs.host.buffers import BufferPool
from lakefs.ids import ChunkId, CopyId, MemberId
from lakefs.limits import GIB, MIB
from lakefs.wire import messages as m
from tests.sim.cluster.clients import SimClient, client_of
from tests.sim.cluster.devices import Device, new_device
from tests.sim.cluster.far_coordinator import far_coordinator
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


class NamesPlace(Place):
    """The names' three devices, and the lake's upkeep beside them."""

    def __init__(self, world: Surroundings, members: list[MemberPlace]) -> None:
        super().__init__(world, "names", NAMES_HOST)
        self.members = members
        self.coordinator: NamesCoordinator | None = None
        self.service: NamesService | None = None
        self.upkeep: LakeUpkeep | None = None
        self.local: LocalNames | None = None
        self.is_made = False
        self.is_breaking = False
        """One of the devices is broken, or a new copy is not yet made."""
        self.lost: set[CopyId] = set()
        """Copies on devices that are lost for ever: the operator gives one up when a start waits for it."""
        self._without: frozenset[CopyId] = frozenset()
        self.disks = {name: self.new_disk() for name in ("a", "b", "c")[: world.protection.parity + 1]}
        self._power_fails = True

    def new_disk(self) -> SimDisk:
        """Return an empty device."""
        return new_device(self.world.rng, NAMES_BYTES)

    def good_copies(self) -> list[str]:
        """Return the devices with a good copy; none while the names are away."""
        return [*self._good()]

    def copy_in(self, folder: str) -> CopyId:
        """Return the good copy that lies on a device, while the names are here."""
        return self._good()[folder]

    def _good(self) -> dict[str, CopyId]:
        copies = [] if self.local is None else self.local.state()["copies"]
        good = [copy for copy in copies if copy["state"] in ("good", "suspect")]
        return {copy["folder"]: CopyId(bytes.fromhex(copy["copy"])) for copy in good}

    async def live(self, process: SimProcess) -> None:
        """Open names and coordinator, make the lake if it is new, and keep it."""
        try:
            await self._live(process)
        except StoreUnusable as error:
            self._without = frozenset(copy for copy in self.lost if f"--without {copy.hex()}" in error.message)
            raise

    async def _live(self, process: SimProcess) -> None:
        world, offload = self.world, self.offload()
        host = NamesHost(
            world.clock, offload, offload, InTurn(), index_committed=self._note_index, copy_bytes_per_s=float("inf")
        )
        async with open_names_in(
            [DeviceFolder(self, name) for name in sorted(self.disks)],
            host,
            lake_id=LAKE,
            protection_losses=world.protection.parity,
            is_new=not self.is_made,
            without=self._without,
            verify_index=False,
            sizes=world.sizes,
        ) as self.local:
            self._without = frozenset()
            store, gate = self.local.store, BindGate()
            joined = JoinedGeneration(store.metadata, gate)
            features = store.superblock.incompat_features
            async with open_names_coordinator(store.metadata, world.clock, features) as self.coordinator:
                state = LakeState(self.coordinator)
                await self._make_lake(state)
                connect = connecting(world.network, self.host, self.members)
                async with open_member_links(self.coordinator, connect) as links, trio.open_nursery() as nursery:
                    stripes = LakeStripes(links, state, offload)
                    upkeep = LakeUpkeep(self.coordinator, links, stripes, store, gate, joined, offload, world.settings)
                    self.upkeep = upkeep
                    self.service = NamesService(
                        store,
                        gate=gate,
                        upkeep=upkeep.requests,
                        more_status=upkeep.status,
                        coordinator=coordinator_group(self.coordinator),
                    )
                    nursery.start_soon(upkeep.run)
                    nursery.start_soon(self._register, state)
                    await process.serve_until_stopped()
                    nursery.cancel_scope.cancel()

    async def _make_lake(self, state: LakeState) -> None:
        """Make records and the first table when there are none."""
        protection = self.world.protection
        await state.make_lake(LakeRecord(LAKE, protection.data, protection.parity))
        await state.advance_generation(NO_GENERATION)
        if await state.epoch() == NO_EPOCH:
            while not all(member.is_up for member in self.members):  # noqa: ASYNC110 - on a clock that jumps
                await trio.sleep(0.1)
            for member in self.members:
                await state.register(_record(member))
            table = first_table(protection, members_of_records(await state.members()), accept_loss=True)
            await state.next_epoch(NO_EPOCH, pack(table))
        self.is_made = True

    async def _register(self, state: LakeState) -> None:
        """Record members that were not seen before."""
        known: set[MemberId] = set()
        while True:
            for member in self.members:
                if member.is_up and member.id is not None and member.id not in known:
                    known.add(member.id)
                    try:
                        await state.register(_record(member))
                    except LakeError as error:
                        self.world.log(f"{member.name} is not recorded: {error!r}")
            await trio.sleep(1.0)

    def end(self, process: SimProcess) -> None:
        """Go on with what the media have."""
        self.coordinator, self.service, self.upkeep, self.local = None, None, None, None
        dead = any(disk.is_dead for disk in self.disks.values())
        if dead or process.error is not None:
            self.disks = {name: self._survived(disk) for name, disk in self.disks.items()}

    def _survived(self, disk: SimDisk) -> SimDisk:
        """Return what a crash leaves of a disk; a broken device stays so."""
        is_broken = isinstance(disk, Device) and disk.is_broken
        left = disk.crash() if self._power_fails else disk.kill()
        if isinstance(left, Device):
            left.is_broken = is_broken
        return left

    def crash(self, *, power: bool, at_operation: int = 0) -> None:
        """Let the process, or the power, fail: now, or at one of the next operations of one of its disks."""
        if self.process is None or self.process.ended.is_set():
            return
        self._power_fails = self.process.dies_silently = power
        disk = self.disks[self.world.rng.choice(sorted(self.disks))]
        if at_operation:
            disk.crash_at = disk.operation_count + at_operation
        else:
            disk._dead = True
            self.process.kill()

    def _note_index(self) -> None:
        for disk in self.disks.values():
            if isinstance(disk, Device) and disk.is_broken:
                continue
            if os.path.exists(disk.local_path("index/data.mdb")):
                disk.note_index_sync()


class DeviceFolder:
    """A folder on a device of the names (`engine.mirror.copy_folders.CopyFolder`)."""

    def __init__(self, place: NamesPlace, name: str) -> None:
        self._place = place
        self.name = name

    def device(self) -> int | None:
        """See `CopyFolder`."""
        disk = self._place.disks[self.name]
        return None if isinstance(disk, Device) and disk.is_broken else ord(self.name)

    def disk(self) -> SimDisk:
        """See `CopyFolder`."""
        return self._place.disks[self.name]

    def set_aside(self) -> None:
        """See `CopyFolder`."""
        if isinstance(old := self._place.disks[self.name], Device) and old.is_broken:
            raise DiskFailed("the device does not work")
        self._place.disks[self.name] = self._place.new_disk()


class HeadPlace(Place):
    """A host with a head, and the clients beside it."""

    def __init__(self, world: Surroundings, number: int, names: NamesPlace) -> None:
        super().__init__(world, f"head {number}", f"h{number}")
        self.names = names
        self.head: Head | None = None

    async def live(self, process: SimProcess) -> None:
        """Reach names and members, and serve."""
        world, names, offload = self.world, self.names, self.offload()
        connect = connecting(world.network, self.host, names.members)
        async with (
            far_coordinator(world.network, self.host, names, LAKE) as coordinator,
            open_member_links(coordinator, connect) as links,
        ):
            stripes = LakeStripes(links, LakeState(coordinator), offload)
            async with open_head(
                self._connect_names, stripes, links, offload=offload, clock=world.clock, buffers=BufferPool(64 * MIB)
            ) as self.head:
                await process.serve_until_stopped()

    @asynccontextmanager
    async def _connect_names(self) -> AsyncIterator[NamesConnection]:
        names = self.names
        async with client_of(self.world.network, self.host, names.process, names.service) as client:
            hello = (await client.call(m.Hello(1, "head"))).message
            assert isinstance(hello, m.HelloReply)
            yield NamesConnection(client, hello, client.wait_ended)

    def end(self, process: SimProcess) -> None:
        """Forget the head."""
        self.head = None

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[SimClient]:
        """Connect a client of this host.  EngineUnreachable."""
        async with client_of(self.world.network, self.host, self.process, self.head) as client:
            yield client


def connecting(network: Network, near: str, members: list[MemberPlace]) -> Connect:
    """Return what connects a host to members."""

    @asynccontextmanager
    async def connect(record: MemberRecord) -> AsyncIterator[MemberClient]:
        place = next((member for member in members if member.id == record.member), None)
        if place is None:
            await trio.sleep(0.001)
            raise EngineUnreachable("nothing listens there")
        async with client_of(network, near, place.process, place.service) as client:
            yield client if near == NAMES_HOST else LyingClient(client, place)

    return connect


def _record(member: MemberPlace) -> MemberRecord:
    assert member.id is not None
    return MemberRecord(member.id, (member.host,), GIB, (f"device {member.id.hex()}", member.host))
