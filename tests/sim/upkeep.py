"""What happens to a simulated store beside its customers: upkeep, a disk that fills up, connections that break."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from engine.store import Store
from lakefs.errors import LakeError
from lakefs.limits import COMPACT_SHARE, COMPACT_SHARE_MOST, KIB
from tests.sim.customers import Weather
from tests.sim.disk import SimDisk
from tests.sim.history import SimFailure
from tests.sim.network import SimulatedNetwork

SETTLING_S = 10.0
"""After this the failures of a bad time are over: requests that met it have ended."""


@dataclass
class Upkeep:
    """One life's upkeep; `run` until cancelled."""

    store: Store
    disk: SimDisk
    network: SimulatedNetwork
    weather: Weather
    rng: random.Random
    pause_s: float
    fills_up: bool
    room_bytes: int
    """Capacity of the disk when nobody else takes any."""

    async def run(self) -> None:
        """Do things at random moments."""
        kinds: list[Callable[[], Awaitable[None]]] = [
            self.checkpoint,
            self.verify,
            self.rebuild,
            self.compact,
            self.compact,
        ]
        if self.fills_up:
            kinds += [self.fill_up, self.fill_up]
        if self.weather.cuts:
            kinds += [self.cut, self.cut, self.cut]
        if self.disk.capacity_bytes < self.room_bytes:
            await self.give_room_back()
        while True:
            await trio.sleep(self.rng.uniform(0.0, max(self.pause_s, 0.5)))
            kind = self.rng.choice(kinds)
            try:
                await kind()
                self.weather.met[kind.__name__] += 1
            except LakeError as error:
                if not self.weather.excuses(error, storing=True):
                    raise SimFailure(f"{kind.__name__}: {error!r}") from error

    async def checkpoint(self) -> None:
        await self.store.metadata.checkpoint()

    async def verify(self) -> None:
        await self.store.metadata.verify_index()

    async def rebuild(self) -> None:
        await self.store.metadata.rebuild_online()

    async def compact(self) -> None:
        """Beside customers, gc and itself (a second run waits)."""
        report = await self.store.compactor.run(self.rng.choice((COMPACT_SHARE, COMPACT_SHARE_MOST)))
        self.weather.met["chunks moved"] += report.moved_chunks
        self.weather.met["chunks changed while they were moved"] += report.changed_meanwhile
        self.weather.met["segments emptied"] += report.removed_segments

    async def fill_up(self) -> None:
        """Somebody else takes the room, and gives it back."""
        self.weather.disk_full = True
        taken = self.disk.capacity_bytes - self.disk.free_bytes()
        self.disk.capacity_bytes = taken + self.rng.choice((0, 40 * KIB, 400 * KIB))
        await self.give_room_back()

    async def give_room_back(self) -> None:
        """After a while there is room again, and the store must work."""
        await trio.sleep(self.rng.uniform(0.0, 20 * self.pause_s))
        self.disk.capacity_bytes = self.room_bytes
        await self.store.offload.run(self.store.reserve.restore)
        await trio.sleep(SETTLING_S)
        self.weather.disk_full = False
        if self.store.metadata.failed is not None and not self.weather.disk_failing:
            raise SimFailure(f"a full disk made the store read-only: {self.store.metadata.failed}")

    async def cut(self) -> None:
        """All connections break."""
        self.network.cut_all()
