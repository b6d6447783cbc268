"""Faults of the names on one machine, of heads, and of the ways between them."""

from __future__ import annotations

import trio

from tests.sim.cluster.devices import Device
from tests.sim.cluster.lake import SimLake, until
from tests.sim.cluster.member_faults import with_ways
from tests.sim.cluster.names_place import NamesPlace
from tests.sim.cluster.network import Way


class NamesFaults:
    """Each method is an event: it begins a fault, and returns when that has ended."""

    def __init__(self, lake: SimLake, names: NamesPlace) -> None:
        self._lake = lake
        self._names = names

    async def crash_names(self) -> None:
        """Let the names crash, or their host lose power."""
        names, lives = self._names, self._names.lives
        power, at_operation = self._lake.rng.random() < 0.6, self._lake.rng.choice((0, 1, 5, 30))
        self._lake.health.begin_elsewhere()
        self._lake.met["names crashed"] += 1
        self._lake.log(f"names crash: {'power' if power else 'process'}, at operation {at_operation}")
        names.crash(power=power, at_operation=at_operation)
        await trio.sleep(self._lake.rng.choice((1.0, 10.0)))
        if names.lives == lives:
            names.crash(power=power)
        await until(lambda: names.is_up and names.lives > lives)
        self._lake.health.end_elsewhere()

    async def break_names_device(self) -> None:
        """Let one of the names' devices break: for ever, so that an empty one takes its place, or for a while."""
        names = self._names
        if names.is_breaking or len(names.good_copies()) < len(names.disks) or len(names.disks) < 2:
            return
        names.is_breaking = True
        name = self._lake.rng.choice(sorted(names.disks))
        disk, copy = names.disks[name], names.copy_in(name)
        assert isinstance(disk, Device)
        self._lake.met["names' device broken"] += 1
        self._lake.log(f"the names' device {name} breaks")
        disk.is_broken = True
        await trio.sleep(self._lake.rng.choice((0.1, 5.0, 20.0)))
        if self._lake.rng.random() < 0.5:
            self._lake.log(f"an empty device takes the place of the names' device {name}")
            names.disks[name] = names.new_disk()
            names.lost.add(copy)
        else:
            self._lake.log(f"the names' device {name} works again")
            now = names.disks[name]
            assert isinstance(now, Device)
            now.is_broken = False
        await until(lambda: len(names.good_copies()) == len(names.disks))
        names.is_breaking = False

    async def trouble_names(self) -> None:
        """Let the way between names and a head be bad."""
        head = self._lake.rng.choice(self._lake.heads)
        way = self._lake.rng.choice((Way.SILENT, Way.CUT, Way.LATE))
        self._lake.health.begin_elsewhere()
        self._lake.met["names cut off"] += 1
        self._lake.log(f"{head.name} and names: {way.name}")
        pairs = [(head.host, self._names.host), (self._names.host, head.host)]
        if self._lake.rng.random() < 0.4:
            pairs = pairs[self._lake.rng.randint(0, 1) :][:1]
        await with_ways(self._lake, pairs, way, self._lake.rng.choice((2.0, 8.0, 30.0)))
        self._lake.health.end_elsewhere()


class HeadFaults:
    """The faults of heads, as `NamesFaults`."""

    def __init__(self, lake: SimLake) -> None:
        self._lake = lake

    async def kill_head(self) -> None:
        """Kill a head."""
        head = self._lake.rng.choice(self._lake.heads)
        lives = head.lives
        self._lake.health.begin_elsewhere()
        self._lake.met["head killed"] += 1
        self._lake.log(f"{head.name} is killed")
        head.kill()
        await until(lambda: head.is_up and head.lives > lives)
        self._lake.health.end_elsewhere()
