"""Events beside the workloads of a simulated store: upkeep, a disk that fills up, connections that break, clocks.

A life that ends badly may end in the middle of one kind of upkeep: the crash is then a few operations of the disk after
the moment at which that begins.  By chance alone it would hardly ever be between two steps of compaction.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from engine.store.store import Store
from lakefs.errors import LakeError
from lakefs.limits import COMPACT_SHARE, COMPACT_SHARE_MOST, KIB
from tests.sim.judges.history import SimFailure
from tests.sim.workloads.workloads import Weather
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimDisk
from tests.sim.world.network import SimulatedNetwork
from tests.sim.world.sim_time import pause

CLOCK_JUMPS_S = (0.5, 90.0, 3600.0, 2 * 86_400.0, 8 * 86_400.0, 400 * 86_400.0)
"""Jumps shorter and longer than sessions linger and than uploads are kept."""
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
    """Capacity of the disk when no other program takes any."""
    clock: SimClock
    sets_clock: bool
    fails_reads: bool
    ends_in: str
    """The kind of upkeep in which the power fails, or the process dies; "": the end is at a random operation"""

    async def run(self) -> None:
        """Do things at random moments."""
        kinds: list[Callable[[], Awaitable[None]]] = [
            self.checkpoint,
            self.verify,
            self.rebuild,
            self.compact,
            self.compact,
            self.collect,
            self.scrub,
        ]
        if self.sets_clock:
            kinds += [self.set_clock, self.set_clock]
        if self.fails_reads:
            kinds += [self.scrub] * 4
        if self.fills_up:
            kinds += [self.fill_up, self.fill_up]
        if self.weather.cuts:
            kinds += [self.cut, self.cut, self.cut]
        if self.disk.capacity_bytes < self.room_bytes:
            await self.give_room_back()
        while True:
            await pause(self.rng.uniform(0.0, max(self.pause_s, 0.5)))
            kind = self.rng.choice(kinds)
            if kind.__name__ == self.ends_in:
                kind = self.end_in(kind)
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
        """Compact, beside workloads, gc and itself (a second run waits)."""
        report = await self.store.compactor.run(self.rng.choice((COMPACT_SHARE, COMPACT_SHARE_MOST)))
        self.weather.met["chunks moved"] += report.moved_chunks
        self.weather.met["chunks changed while they were moved"] += report.changed_meanwhile
        self.weather.met["segments emptied"] += report.removed_segments

    async def collect(self) -> None:
        """Run one cycle of gc."""
        await self.store.collector.run()

    async def scrub(self) -> None:
        """Run a pass of scrub, or a part.  On a sound disk nothing is damaged, even when one read of it failed."""
        await self.store.scrubber.advance(self.rng.choice((0.0, 30.0)), restart=self.rng.random() < 0.3)
        check_unharmed(self.store, self.weather)

    async def set_clock(self) -> None:
        """Set the wall clock, as somebody else would."""
        by_s = self.rng.choice(CLOCK_JUMPS_S) * self.rng.choice((1, -1))
        self.clock.jump_wall(int(by_s * 1e9))
        self.weather.met["clock forward" if by_s > 0 else "clock back"] += 1

    def end_in(self, kind: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        """Return the same, with the end a few operations after its start, unless it does less than that."""
        self.ends_in = ""
        self.disk.crash_at = self.disk.operation_count + self.rng.randint(1, 16)
        self.weather.met[f"end in {kind.__name__}"] += 1
        return kind

    async def fill_up(self) -> None:
        """Take the disk's room, as another program would, and give it back."""
        self.weather.disk_full = True
        taken = self.disk.capacity_bytes - self.disk.free_bytes()
        self.disk.capacity_bytes = taken + self.rng.choice((0, 40 * KIB, 400 * KIB))
        await self.give_room_back()

    async def give_room_back(self) -> None:
        """Give room back after a while; then the store must work."""
        await pause(self.rng.uniform(0.0, 20 * self.pause_s))
        self.disk.capacity_bytes = self.room_bytes
        await self.store.offload.run(self.store.reserve.restore)
        await pause(SETTLING_S)
        self.weather.disk_full = False
        if self.store.metadata.failed is not None and not self.weather.disk_failing:
            raise SimFailure(f"a full disk made the store read-only: {self.store.metadata.failed}")

    async def cut(self) -> None:
        """Break all connections."""
        self.network.cut_all()


def check_unharmed(store: Store, weather: Weather) -> None:
    """Check that on a sound disk nothing is in quarantine."""
    if len(store.quarantine) and not weather.damaged:
        raise SimFailure(f"chunks are in quarantine on a sound disk: {store.quarantine.noted(5)}")
