"""The names' metadata, and a whole store, on a mirrored disk: crashes and lost devices lose nothing answered."""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path

import pytest
import trio

from engine.format.layouts import GROUP_HEADER, Table
from engine.host.clock import SystemClock
from engine.host.local_disk import LocalDisk
from engine.metadata.metadata_store import Metadata
from engine.mirror.copy_calls import AtOnce, InTurn
from engine.mirror.mirror_opening import make_mirror, open_mirror
from engine.mirror.mirrored_disk import MirroredDisk
from engine.mirror.new_copy import add_copy
from engine.store.opening import open_store
from lakefs.client.trio.lake import TrioLake
from lakefs.errors import CorruptionError, DiskFailed, StoreReadOnly, StoreUnusable
from lakefs.host.offload import InlineOffload, ThreadOffload
from tests.sim.world.disk import SimCrashed, SimDisk
from tests.store_rig import SMALL_SIZES, client_of
from tests.unit.engine.cluster.mirror_rig import Devices, good
from tests.unit.support.metadata_rig import SMALL, contents, opened, put, run, wait_applied

State = dict[tuple[Table, bytes], bytes]
OPERATIONS = ("pwrite", "sync_data", "open", "rename", "unlink", "sync_folder", "allocate", "pread_into", "list_folder")


class History:
    """Commits of random records, and which of them were acknowledged."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.states: list[State] = [{}]
        self.acknowledged = 0

    async def commit(self, metadata: Metadata) -> None:
        """Commit one change, and note it when it was acknowledged."""
        key = b"key-%d" % self.rng.randrange(30)
        value = self.rng.randbytes(self.rng.choice((0, 10, 5000)))
        self.states.append({**self.states[-1], (Table.NAMES, key): value})
        number = len(self.states) - 1
        await put(metadata, (Table.NAMES, key, value))
        self.acknowledged = number

    def check(self, metadata: Metadata) -> None:
        """Check that the state found is one after some prefix of the commits, with all that was acknowledged."""
        found = contents(metadata)
        matches = [number for number, state in enumerate(self.states) if state == found]
        assert matches, "no prefix of the commits gives what was found"
        assert matches[-1] >= self.acknowledged, f"acknowledged {self.acknowledged}, found {matches}"
        del self.states[matches[-1] + 1 :]
        self.acknowledged = matches[-1]


class Machine:
    """A machine whose names lie on a mirror: its lives, one after the other, and at most one bad device in each."""

    def __init__(self, count: int, seed: int) -> None:
        self.history = History(seed)
        self.rng = self.history.rng
        self.count = count
        self.devices = Devices(count, seed)
        self.bad = ""
        """The device that fails in this life: the only one that may be lost behind it."""
        self.lost = ""

    async def live(self) -> None:
        """Open, check, commit, with a device that fails or a power loss at some operation."""
        mirror = self._opened()
        self.bad = ""
        index_on, clean = self.devices.disks[mirror.home.name], self.rng.randrange(4) == 0
        async with opened(mirror, sizes=SMALL, index_on=index_on, clean=clean) as metadata:
            self.history.check(metadata)
            self._replace_lost(mirror)
            self._plan()
            for _ in range(self.rng.randrange(12)):
                await self.history.commit(metadata)
                if self.rng.randrange(6) == 0:
                    await wait_applied(metadata)
                    await metadata.checkpoint()
        mirror.close()

    def end(self) -> None:
        """Lose the power, or only the process; then perhaps one device for ever."""
        (self.devices.crash if self.rng.randrange(3) else self.devices.kill)()
        for disk in self.devices.disks.values():
            disk.forget_failures()
            disk.crash_at = None
        if self.rng.randrange(2):
            self.lost = self.bad or self.rng.choice(sorted(self.devices.disks))
        if self.lost:
            self.lost_id = self.devices.copy_id(self.lost)
            del self.devices.disks[self.lost]

    def _opened(self) -> MirroredDisk:
        try:
            return open_mirror(self.devices.disks, InTurn())
        except StoreUnusable:
            assert self.lost, "nothing is missing"
            return open_mirror(self.devices.disks, InTurn(), without=frozenset([self.lost_id]))

    def _replace_lost(self, mirror: MirroredDisk) -> None:
        self.lost = ""
        for name in "abcdefgh":
            if name not in good(mirror) and len(good(mirror)) < self.count:
                self.devices.disks.pop(name, None)
                add_copy(mirror, name, self.devices.replace(name))
        for name in set(self.devices.disks) - set(good(mirror)):
            del self.devices.disks[name]

    def _plan(self) -> None:
        """Choose what will happen in this life: one bad device at most, which is the one that may be lost behind it."""
        name = self.rng.choice(sorted(self.devices.disks))
        disk = self.devices.disks[name]
        match self.rng.randrange(4):
            case 0:
                disk.crash_at = disk.operation_count + self.rng.randrange(1, 120)
            case 1 | 2:
                error = self.rng.choice((DiskFailed("planted"), StoreReadOnly("planted")))
                for _ in range(self.rng.choice((1, 2, 50))):
                    disk.fail_next(self.rng.choice(OPERATIONS), error, skip=self.rng.randrange(10))
                self.bad = name
                if self.rng.randrange(2):
                    crashing = self.devices.disks[self.rng.choice(sorted(self.devices.disks))]
                    crashing.crash_at = crashing.operation_count + self.rng.randrange(1, 60)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_no_history_of_crashes_failures_and_lost_devices_loses_what_was_acknowledged(count: int, seed: int) -> None:
    machine = Machine(count, seed)
    for _ in range(12):
        try:
            run(machine.live, seed)
        except* (SimCrashed, StoreReadOnly, DiskFailed):
            pass
        machine.end()


def test_each_copy_alone_has_all_that_was_acknowledged_after_a_power_loss() -> None:
    for seed in range(6):
        for left in "ab":
            devices, history = Devices(2, seed), History(seed)

            async def fill(devices: Devices = devices, history: History = history) -> None:
                mirror = devices.open()
                async with opened(mirror, sizes=SMALL, index_on=devices.disks["a"], clean=False) as metadata:
                    for _ in range(15):
                        await history.commit(metadata)
                    await wait_applied(metadata)
                    await metadata.checkpoint()
                    for _ in range(5):
                        await history.commit(metadata)

            async def look(left: str = left, devices: Devices = devices, history: History = history) -> None:
                mirror = devices.open(left, without="ab".replace(left, ""))
                async with opened(mirror, sizes=SMALL, index_on=devices.disks[left]) as metadata:
                    history.check(metadata)
                    await metadata.verify_index()

            run(fill, seed)
            devices.crash()
            run(look, seed)


@pytest.mark.parametrize("what", ["journal", "checkpoint"])
def test_recovery_reads_from_another_copy_where_one_is_damaged(what: str) -> None:
    """Damage is found by recovery, which names the file; the opening distrusts it and tries again."""
    devices = Devices(2)
    found: list[State] = []

    async def fill() -> None:
        mirror = devices.open()
        async with opened(mirror, index_on=devices.disks["a"], clean=False) as metadata:
            for number in range(10):
                await put(metadata, (Table.NAMES, b"%d" % number, b"value"))
                if number == 5:
                    await wait_applied(metadata)
                    await metadata.checkpoint()
            found.append(contents(metadata))

    async def look() -> None:
        mirror = devices.open("b", "a")
        for attempt in range(3):
            try:
                async with opened(mirror, index_on=devices.disks["a"]) as metadata:
                    assert contents(metadata) == found[0]
                    assert attempt == 1
                    return
            except* CorruptionError as group:
                (error,) = group.exceptions
                assert isinstance(error, CorruptionError)
                assert mirror.distrust(error.subject)

    run(fill)
    devices.crash()
    devices.disks["a"] = _without_index(devices.disks["a"])
    folder = f"{what}s" if what == "checkpoint" else what
    path = f"{folder}/{devices.disks['a'].list_folder(folder)[-1]}"
    devices.disks["a"].flip_bit(path, 7 * 4096 + GROUP_HEADER.size + 9 if what == "journal" else 100, 2)
    run(look)


def _without_index(disk: SimDisk) -> SimDisk:
    data = Path(disk.local_path("index/data.mdb"))
    if data.exists():
        data.unlink()
    return disk


def test_a_store_outlives_the_loss_of_a_folder_and_of_the_index_in_it(tmp_path: Path) -> None:
    """A whole store in real folders: one is lost while it works, then the machine starts with the others."""
    names = [f"bkt/{number}" for number in range(40)]

    async def store_on(mirror: MirroredDisk, first: int, lose: str | None) -> None:
        async with (
            ThreadOffload(2, "offload") as offload,
            open_store(mirror, SystemClock(), offload, grace_s=0.0, sizes=SMALL_SIZES) as store,
        ):
            lake = TrioLake(client_of(store), InlineOffload())
            for number in range(first):
                assert await lake.get(names[number]) == b"%d" % number * 3000
            for number in range(first, first + 10):
                await lake.put(names[number], b"%d" % number * 3000, create_bucket=True)
                if number == first + 4 and lose is not None:
                    await store.metadata.checkpoint()
                    os.rename(lose, f"{lose}-lost")
            assert store.metadata.failed is None

    disks = {name: LocalDisk(tmp_path / name) for name in "abc"}
    make_mirror(disks)
    mirror = open_mirror(disks, AtOnce())
    trio.run(store_on, mirror, 0, str(tmp_path / "a"))
    assert good(mirror) == "bc"
    mirror.close()

    disks = {name: LocalDisk(tmp_path / name) for name in "bc"}
    mirror = open_mirror(disks, AtOnce())
    trio.run(store_on, mirror, 10, None)
    add_copy(mirror, "d", LocalDisk(tmp_path / "d"))
    mirror.close()

    mirror = open_mirror({"d": LocalDisk(tmp_path / "d"), "c": LocalDisk(tmp_path / "c")}, AtOnce())
    assert good(mirror) == "cd"
    trio.run(partial(store_on, mirror, 20, None))
    mirror.close()
