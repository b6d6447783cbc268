"""Replicas of names over one coordinator, each on a simulated disk, in one process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from unittest import mock

import trio

from engine.coordinator.coordinator import Coordinator, Put
from engine.format.group_parts import FIRST_SHARD, LogKeys
from engine.format.layouts import Table
from engine.format.sizes import DEFAULT_SIZES, MetadataSizes
from engine.group_log.replica import ReplicaPlace, leading
from engine.host.tasks import plain_errors
from engine.metadata.metadata_store import Metadata
from lakefs.errors import LakeError
from lakefs.ids import ReplicaId
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimDisk
from tests.unit.support.metadata_rig import NAMES_OF, contents, opened

KEYS = LogKeys(FIRST_SHARD)


def place_of(coordinator: Coordinator, number: int) -> ReplicaPlace:
    """Return the surroundings of a replica with a number from 1 on."""
    replica = ReplicaId(bytes([number]) * 16)
    return ReplicaPlace(
        coordinator, SimClock(), NAMES_OF, replica, f"machine {number}", replica, lambda value: ReplicaId(value)
    )


class Replica:
    """A place of a replica: one process at a time runs on its disk."""

    def __init__(self, coordinator: Coordinator, number: int, sizes: MetadataSizes = DEFAULT_SIZES) -> None:
        self.place = place_of(coordinator, number)
        self.make_room: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        self.disk = SimDisk(number)
        self.metadata: Metadata | None = None
        """The open one's, from its opening on."""
        self.leads = trio.Event()
        self.ended = trio.Event()
        self.error: LakeError | None = None
        self._sizes = sizes
        self._scope = trio.CancelScope()
        self._stop = trio.Event()

    @property
    def led(self) -> Metadata:
        """The metadata of the one that leads."""
        assert self.metadata is not None
        assert self.leads.is_set()
        return self.metadata

    def contents(self) -> dict[tuple[Table, bytes], bytes]:
        """Return all records that it has, whether it leads or not."""
        assert self.metadata is not None
        return contents(self.metadata)

    async def run(self) -> None:
        """Open the store, follow, and lead until `stop`, `kill` or the end of the term."""
        try:
            with self._scope, plain_errors():
                async with opened(self.disk, has_names=True, clean=False, sizes=self._sizes) as self.metadata:
                    async with leading(self.metadata, replace(self.place, make_room=self.make_room)):
                        self.leads.set()
                        await self._stop.wait()
                        await self.metadata.close()
        except LakeError as error:
            self.error = error
        finally:
            self.metadata = None
            self.ended.set()

    def again(self) -> Replica:
        """Return the same place for another process."""
        found = Replica(self.place.coordinator, self.place.replica[0], self._sizes)
        found.disk = self.disk
        return found

    async def stop(self) -> None:
        """Stop cleanly."""
        self._stop.set()
        await self.ended.wait()

    async def kill(self) -> None:
        """End at once, as SIGKILL would; the coordinator learns nothing, and the lease runs on."""
        with _no_revoking(self.place):
            self._scope.cancel()
            await self.ended.wait()
        self.disk = self.disk.kill()


@contextmanager
def _no_revoking(place: ReplicaPlace) -> Iterator[None]:
    async def nothing(lease: object) -> None:
        await trio.lowlevel.checkpoint()

    with mock.patch.object(place.coordinator, "revoke", nothing):
        yield


@asynccontextmanager
async def replicas_on(
    coordinator: Coordinator, count: int, sizes: MetadataSizes = DEFAULT_SIZES
) -> AsyncIterator[list[Replica]]:
    """Run so many replicas; the first leads.  They end with the block."""
    await coordinator.transact([], [Put(KEYS.origin, place_of(coordinator, 1).replica)])
    places = [Replica(coordinator, number, sizes) for number in range(1, count + 1)]
    async with trio.open_nursery() as nursery:
        for place in places:
            nursery.start_soon(place.run)
            while place.metadata is None:  # noqa: ASYNC110 - on a clock that jumps
                await trio.sleep(0.01)
            await places[0].leads.wait()
        yield places
        nursery.cancel_scope.cancel()
