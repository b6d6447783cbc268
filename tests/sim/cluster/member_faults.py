"""Faults of members that pass: crashes, ways that are bad, slow and full disks, lies."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from lakefs.errors import DiskFailed
from tests.sim.cluster.lake import SimLake, until
from tests.sim.cluster.liars import Lie
from tests.sim.cluster.network import Way
from tests.sim.cluster.places import MEMBER_BYTES, Place

HEARD_S = 6.0
"""A link that was away has been tried again by then."""


class MemberFaults:
    """Each method is an event: it begins a fault, and returns when that has ended."""

    def __init__(self, lake: SimLake) -> None:
        self._lake = lake

    async def crash_member(self) -> None:
        """Let a member crash, or its host lose power; it comes back."""
        place = self._lake.victim()
        if place is None:
            return
        power, at_operation = self._lake.rng.random() < 0.6, self._lake.rng.choice((0, 0, 1, 5, 20, 60))
        lives = place.lives
        self._lake.health.begin(place.name)
        self._lake.log(f"{place.name} crashes: {'power' if power else 'process'}, at operation {at_operation}")
        self._lake.met["crashes"] += 1
        is_kept_away = self._lake.rng.random() < 0.5
        place.is_wanted = not is_kept_away
        place.crash(power=power, at_operation=at_operation)
        await trio.sleep(self._lake.rng.choice((1.0, 10.0, 25.0, 40.0)))
        place.is_wanted = True
        if place.lives == lives:
            place.crash(power=power)
        await until(lambda: place.is_up and place.lives > lives)
        self._lake.health.end(place.name)

    async def cut_off(self) -> None:
        """Cut a member off from some of the others: one way, both ways, silently or not."""
        place = self._lake.victim()
        if place is None:
            return
        others = [*self._lake.names.hosts, *(head.host for head in self._lake.heads)]
        others = self._lake.rng.sample(others, self._lake.rng.randint(1, len(others)))
        way, is_one_way = (
            self._lake.rng.choice((Way.SILENT, Way.SILENT, Way.CUT, Way.LATE)),
            self._lake.rng.random() < 0.4,
        )
        self._lake.health.begin(place.name)
        self._lake.met[f"cut off: {way.name}"] += 1
        self._lake.log(f"{place.name} is cut off from {others}: {way.name}{' one way' if is_one_way else ''}")
        pairs = [pair for other in others for pair in ((other, place.host), (place.host, other))]
        if is_one_way:
            pairs = pairs[self._lake.rng.randint(0, 1) :: 2]
        await with_ways(self._lake, pairs, way, self._lake.rng.choice((2.0, 8.0, 25.0, 40.0)))
        self._lake.health.end(place.name)

    async def trouble_way(self) -> None:
        """Let the way between one head and one member be bad."""
        place = self._lake.victim()
        if place is None:
            return
        head = self._lake.rng.choice(self._lake.heads)
        way = self._lake.rng.choice((Way.SILENT, Way.CUT, Way.LATE))
        self._lake.health.begin(place.name)
        self._lake.met[f"way: {way.name}"] += 1
        self._lake.log(f"{head.name} and {place.name}: {way.name}")
        pairs = [(head.host, place.host), (place.host, head.host)]
        if self._lake.rng.random() < 0.4:
            pairs = pairs[self._lake.rng.randint(0, 1) :][:1]
        await with_ways(self._lake, pairs, way, self._lake.rng.choice((2.0, 8.0, 25.0, 40.0)))
        self._lake.health.end(place.name)

    async def slow_member(self) -> None:
        """Let a member's threads be slow, from its next life on, or its disk fill up."""
        place = self._lake.victim()
        if place is None:
            return
        self._lake.health.begin(place.name)
        self._lake.met["slow"] += 1
        self._lake.log(f"{place.name} is slow")
        place.slowest_s = self._lake.rng.choice((0.3, 2.0))
        await self._restart(place)
        await trio.sleep(self._lake.rng.choice((10.0, 30.0)))
        place.slowest_s = 0.001
        await self._restart(place)
        self._lake.health.end(place.name)

    async def _restart(self, place: Place) -> None:
        """Stop a place's process cleanly, and let the next one start."""
        lives = place.lives
        if place.process is not None:
            place.process.stop()
        await until(lambda: place.is_up and place.lives > lives)

    async def fill_member(self) -> None:
        """Let others take all room of a member's disk."""
        place = self._lake.victim()
        if place is None or place.disk.is_dead:
            return
        self._lake.health.begin(place.name)
        self._lake.met["full"] += 1
        self._lake.log(f"{place.name} is full")
        disk = place.disk
        disk.capacity_bytes = max(0, MEMBER_BYTES - disk.free_bytes())
        await trio.sleep(self._lake.rng.choice((5.0, 25.0)))
        place.disk.capacity_bytes = disk.capacity_bytes = MEMBER_BYTES
        await trio.sleep(HEARD_S)
        self._lake.health.end(place.name)

    async def lie(self) -> None:
        """Let a member lie to heads."""
        place = self._lake.victim()
        if place is None:
            return
        self._lake.health.begin(place.name)
        place.lies = self._lake.rng.choice((Lie.BYTES, Lie.LENGTH, Lie.LONGER))
        self._lake.met[f"lies: {place.lies.name}"] += 1
        self._lake.log(f"{place.name} lies: {place.lies.name}")
        await trio.sleep(self._lake.rng.choice((5.0, 25.0)))
        place.lies = Lie.NONE
        self._lake.log(f"{place.name} lies no more")
        self._lake.health.end(place.name)

    async def fail_disk(self) -> None:
        """Let one operation of a member's disk fail; the member is started again."""
        place = self._lake.victim()
        if place is None or place.disk.is_dead:
            return
        self._lake.health.begin(place.name)
        operation = self._lake.rng.choice(("sync_data", "pwrite", "pread_into"))
        self._lake.met[f"disk failed: {operation}"] += 1
        self._lake.log(f"{operation} of {place.name} fails")
        error = DiskFailed(f"planted failure of {operation}")
        place.disk.fail_next(
            operation, error, path=self._lake.rng.choice(("segments/", "journal/")), skip=self._lake.rng.randint(0, 3)
        )
        await trio.sleep(self._lake.rng.choice((3.0, 15.0)))
        place.disk.forget_failures()
        await self._restart(place)
        self._lake.health.end(place.name)


async def with_ways(lake: SimLake, pairs: Sequence[tuple[str, str]], way: Way, seconds: float) -> None:
    """Let ways be bad for so long, and return when those who use them have heard that they are good again."""
    for pair in pairs:
        lake.world.network.set_way(*pair, way)
    await trio.sleep(seconds)
    for pair in pairs:
        lake.world.network.set_way(*pair, Way.GOOD)
    await trio.sleep(HEARD_S)
