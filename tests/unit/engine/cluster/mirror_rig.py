"""Simulated devices of a mirrored disk, which fail, crash, are lost and replaced."""

from __future__ import annotations

import random

from engine.mirror.copy_calls import InTurn
from engine.mirror.copy_list import read_copy_file
from engine.mirror.mirror_opening import make_mirror, open_mirror
from engine.mirror.mirrored_disk import MirroredDisk
from lakefs.ids import CopyId
from lakefs.ports import Disk
from tests.sim.world.disk import SimDisk

NAMES = "abcdefgh"


class Devices:
    """The devices of one machine by name, each a simulated disk with a copy."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.disks = {name: SimDisk(self.rng) for name in NAMES[:count]}
        make_mirror(self.disks)

    def open(self, *names: str, without: str = "", restored: bool = False) -> MirroredDisk:
        """Open the mirror with these devices, all by default; `without` are names of devices."""
        disks = {name: disk for name, disk in self.disks.items() if name in (names or self.disks)}
        given_up = frozenset(self.copy_id(name) for name in without)
        return open_mirror(disks, InTurn(), without=given_up, restored=restored)

    def copy_id(self, name: str) -> CopyId:
        return read_copy_file(self.disks[name]).copy_id

    def crash(self) -> None:
        """Fail the power of the machine."""
        self.disks = {name: disk.crash() for name, disk in self.disks.items()}

    def kill(self) -> None:
        """Kill the process."""
        self.disks = {name: disk.kill() for name, disk in self.disks.items()}

    def replace(self, name: str) -> SimDisk:
        """Put an empty device in the place of one."""
        self.disks[name] = SimDisk(self.rng)
        return self.disks[name]


def good(mirror: MirroredDisk) -> str:
    """Return the names of the good copies."""
    return "".join(copy.name for copy in mirror.copies.good)


def put(disk: Disk, path: str, payload: bytes) -> None:
    """Write a new file, durable with its name."""
    file = disk.open(path, create=True)
    file.pwrite(payload, 0)
    file.sync_data()
    file.close()
    disk.sync_folder(path.rpartition("/")[0])


def content(disk: Disk, path: str) -> bytes:
    """Return a file's bytes."""
    file = disk.open(path, read_only=True)
    buffer = bytearray(file.size())
    assert file.pread_into(memoryview(buffer), 0) == len(buffer)
    file.close()
    return bytes(buffer)
