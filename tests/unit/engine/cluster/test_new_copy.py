"""A copy made anew while the mirror is written to: equal to the others when it is good, harmless when it fails."""

from __future__ import annotations

import random

import pytest

from engine.mirror.equal_names import tree
from engine.mirror.mirror_bounds import PIECE_BYTES
from engine.mirror.mirrored_disk import MirroredDisk, is_mirrored
from engine.mirror.new_copy import add_copy
from lakefs.errors import DiskFailed, StoreFull, StoreUnusable
from lakefs.limits import MIB
from lakefs.ports import DiskFile
from tests.sim.world.disk import SimCrashed, SimDisk
from tests.unit.engine.cluster.mirror_rig import Devices, content, good, put

SIZE = 3 * PIECE_BYTES // 2


def check_equal(one: SimDisk, other: SimDisk) -> None:
    """Both have the same mirrored names, and each file has the same bytes."""
    names = tree(one, is_mirrored)
    assert tree(other, is_mirrored) == names
    for path, size in names.items():
        if size is not None:
            assert content(one, path) == content(other, path), path


class Writer:
    """Changes a mirror at random, and whenever a piece was copied."""

    def __init__(self, mirror: MirroredDisk, seed: int) -> None:
        self.rng = random.Random(seed)
        self.mirror = mirror
        self.count = 0
        mirror.make_folder("journal")
        for number in range(3):
            put(mirror, f"journal/old-{number}", self.rng.randbytes(SIZE))
        self.files: list[DiskFile] = [mirror.open("journal/current", create=True)]
        self.files[0].pwrite(self.rng.randbytes(SIZE), 0)

    def change(self, _: int = 0) -> None:
        """Make some changes, each durable at once."""
        for _ in range(self.rng.randrange(4)):
            self.count += 1
            file = self.rng.choice(self.files)
            names = self.mirror.list_folder("journal")
            match self.rng.randrange(8):
                case 0 | 1 | 2:
                    file.pwrite(self.rng.randbytes(self.rng.randrange(9000)), self.rng.randrange(SIZE))
                case 3:
                    file.truncate(self.rng.randrange(SIZE))
                case 4:
                    file.punch(self.rng.randrange(SIZE), 8192)
                case 5:
                    self.files.append(self.mirror.open(f"journal/new-{self.count}", create=True))
                case 6:
                    self.mirror.rename(f"journal/{self.rng.choice(names)}", f"journal/{self.rng.choice(names)}")
                case 7 if len(names) > 1:
                    self.mirror.unlink(f"journal/{self.rng.choice(names)}")
            file.sync_data()
            if self.rng.randrange(4) == 0:
                self.files.append(self.mirror.open(f"journal/{self.mirror.list_folder('journal')[0]}"))
        self.mirror.sync_folder("journal")


@pytest.mark.parametrize("seed", range(15))
def test_a_copy_made_while_files_are_written_renamed_and_removed_is_equal_and_durable(seed: int) -> None:
    devices = Devices(2, seed)
    mirror = devices.open()
    writer = Writer(mirror, seed)
    mirror.lock("lock")
    add_copy(mirror, "c", devices.replace("c"), writer.change)
    assert good(mirror) == "abc"
    check_equal(devices.disks["a"], devices.disks["c"])
    number = mirror.stat("lock").inode
    writer.change()
    check_equal(devices.disks["b"], devices.disks["c"])
    for name in "ab":
        devices.disks[name].fail_next("sync_folder", DiskFailed("planted"))
        mirror.sync_folder("journal")
    assert mirror.stat("lock").inode == number
    expected = {path: content(mirror, path) for path, size in tree(mirror, is_mirrored).items() if size is not None}
    devices.crash()
    mirror = devices.open("c")
    assert {
        path: content(mirror, path) for path, size in tree(mirror, is_mirrored).items() if size is not None
    } == expected


@pytest.mark.parametrize("operation", ["open", "pwrite", "sync_data", "rename", "sync_folder"])
@pytest.mark.parametrize("skip", [0, 1, 4])
def test_a_new_copy_that_fails_harms_nothing_and_its_folder_can_be_given_again(operation: str, skip: int) -> None:
    devices = Devices(2)
    mirror = devices.open()
    writer = Writer(mirror, skip)
    disk = devices.replace("c")
    disk.fail_next(operation, DiskFailed("planted"), skip=skip)
    try:
        add_copy(mirror, "c", disk, writer.change)
    except DiskFailed:
        assert good(mirror) == "ab"
        writer.change()
        check_equal(devices.disks["a"], devices.disks["b"])
        disk.forget_failures()
        add_copy(mirror, "c", disk, writer.change)
    disk.forget_failures()
    assert good(mirror) == "abc"
    check_equal(devices.disks["a"], disk)


@pytest.mark.parametrize("crashing", "ac")
def test_a_kill_while_a_copy_is_made_leaves_a_mirror_that_opens(crashing: str) -> None:
    for step in range(1, 45, 2):
        devices = Devices(2, step)
        mirror = devices.open()
        put(mirror, "f", b"1" * 100)
        put(mirror, "g", b"2" * 100)
        disk = devices.replace("c")
        devices.disks[crashing].crash_at = devices.disks[crashing].operation_count + step
        try:
            add_copy(mirror, "c", disk)
            put(mirror, "h", b"3")
        except SimCrashed:
            pass
        devices.crash()
        mirror = devices.open()
        assert good(mirror) in ("ab", "abc")
        if good(mirror) == "ab":
            add_copy(mirror, "c", devices.replace("c"))
        for name in devices.disks:
            assert content(devices.disks[name], "g") == b"2" * 100


def test_a_folder_that_is_used_or_too_small_is_refused_and_the_mirror_goes_on() -> None:
    devices = Devices(1)
    mirror = devices.open()
    put(mirror, "f", bytes(MIB))
    used = SimDisk(1)
    put(used, "somebody's", b"")
    with pytest.raises(StoreUnusable, match="c is not empty"):
        add_copy(mirror, "c", used)
    with pytest.raises(StoreFull):
        add_copy(mirror, "c", SimDisk(1, capacity_bytes=MIB // 2))

    def given_up(_: int) -> None:
        with pytest.raises(StoreUnusable, match="being made already"):
            add_copy(mirror, "e", SimDisk(2))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        add_copy(mirror, "d", SimDisk(3), given_up)
    assert good(mirror) == "a"
    add_copy(mirror, "f", SimDisk(4))
    assert good(mirror) == "af"


def test_a_stale_copy_is_not_made_good_again_but_anew_in_an_empty_folder() -> None:
    devices = Devices(2)
    mirror = devices.open()
    devices.disks["b"].fail_next("open", DiskFailed("planted"))
    put(mirror, "f", b"1")
    devices.kill()
    mirror = devices.open()
    with pytest.raises(StoreUnusable, match="not empty"):
        add_copy(mirror, "b", devices.disks["b"])
    add_copy(mirror, "b", devices.replace("b"))
    devices.disks["a"].fail_next("open", DiskFailed("planted"))
    put(mirror, "g", b"2")
    devices.crash()
    mirror = devices.open("b")
    assert (content(mirror, "f"), content(mirror, "g")) == (b"1", b"2")
