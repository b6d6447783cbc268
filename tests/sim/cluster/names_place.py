"""The names of a lake on one machine, on three devices, with the coordinator's records and the upkeep beside them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import trio

from engine.coordinator.coordinator import Coordinator
from engine.coordinator.coordinator_requests import coordinator_group
from engine.coordinator.lake_state import LakeState
from engine.coordinator.names_coordinator import NamesCoordinator, open_names_coordinator
from engine.head.names_link import NamesConnection
from engine.lake.shard_replicas import WayToNames
from engine.lake_gc.joined_generation import JoinedGeneration
from engine.lake_upkeep.lake_upkeep import LakeUpkeep
from engine.members.member_links import open_member_links
from engine.metadata.metadata_store import Metadata
from engine.mirror.copy_calls import InTurn
from engine.process.mirrored_names import LocalNames, NamesHost, open_names_in
from engine.requests.bind import BindGate
from engine.requests.table import NamesService
from engine.stripes.stripes import LakeStripes
from lakefs.errors import DiskFailed, StoreUnusable
from lakefs.ids import CopyId
from lakefs.limits import MIB
from lakefs.wire import messages as m
from tests.sim.cluster.clients import client_of
from tests.sim.cluster.devices import Device, new_device
from tests.sim.cluster.far_coordinator import far_coordinator
from tests.sim.cluster.lake_records import keep_registered, make_lake
from tests.sim.cluster.places import LAKE, NAMES_HOST, MemberPlace, Place, Surroundings, connecting
from tests.sim.cluster.process import SimProcess
from tests.sim.world.disk import SimDisk

NAMES_BYTES = 96 * MIB


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

    @property
    def hosts(self) -> Sequence[str]:
        """See `Names`."""
        return (self.host,)

    @property
    def metadata(self) -> Metadata | None:
        """See `Names`."""
        return None if self.local is None else self.local.store.metadata

    @property
    def epoch(self) -> int:
        """See `Names`."""
        return 0 if self.upkeep is None else self.upkeep._members.tables[0].ring_epoch

    @asynccontextmanager
    async def reached(self, near: str, process: SimProcess) -> AsyncIterator[tuple[Coordinator, WayToNames]]:
        """See `Names`."""
        async with far_coordinator(self.world.network, near, self, LAKE) as coordinator:
            yield coordinator, WayToNames(partial(self._connected, near))

    @asynccontextmanager
    async def _connected(self, near: str) -> AsyncIterator[NamesConnection]:
        async with client_of(self.world.network, near, self.process, self.service) as client:
            hello = (await client.call(m.Hello(1, "head"))).message
            assert isinstance(hello, m.HelloReply)
            yield NamesConnection(client, hello, client.wait_ended)

    async def watch(self) -> None:
        """See `Names`."""
        await trio.sleep_forever()

    def heal(self) -> None:
        """See `Names`; events of the names have ended by themselves."""

    async def settle(self) -> None:
        """See `Names`."""
        await trio.lowlevel.checkpoint()

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
                await make_lake(state, world.protection, self.members)
                self.is_made = True
                connect = connecting(world.network, self.host, self.members, hears_lies=False)
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
                    nursery.start_soon(keep_registered, state, self.members, world.log)
                    await process.serve_until_stopped()
                    nursery.cancel_scope.cancel()

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
