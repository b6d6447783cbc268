"""A small file is replaced as a whole: a reader after a crash finds the old content or the new one."""

from __future__ import annotations

from contextlib import closing

import pytest

from engine.host.small_file import replace_small_file
from lakefs.errors import DiskFailed
from lakefs.ports import Disk
from tests.sim.world.disk import SimDisk


class StoppedDisk(SimDisk):
    """A disk that fails at one call of `replace_small_file`, counted from 1; 0: at none."""

    left = 0

    def _reach(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise DiskFailed("the disk is stopped here")

    def rename(self, old: str, new: str) -> None:
        self._reach()
        super().rename(old, new)

    def sync_folder(self, path: str) -> None:
        self._reach()
        super().sync_folder(path)


def content(disk: Disk, path: str) -> bytes:
    with closing(disk.open(path, read_only=True)) as file:
        found = bytearray(file.size())
        file.pread_into(memoryview(found), 0)
    return bytes(found)


def test_what_is_replaced_is_durable_and_a_rest_of_an_earlier_try_does_not_matter() -> None:
    disk = SimDisk()
    replace_small_file(disk, "record", b"old")
    with closing(disk.open("record.new", create=True)) as rest:
        rest.pwrite(b"a rest that is longer", 0)
    replace_small_file(disk, "record", b"new")
    found = disk.crash()
    assert (content(found, "record"), found.exists("record.new")) == (b"new", False)


@pytest.mark.parametrize("step", [1, 2])
def test_a_replacement_that_fails_at_any_step_leaves_the_old_file_or_the_new_one(step: int) -> None:
    disk = StoppedDisk()
    replace_small_file(disk, "record", b"old")
    disk.left = step
    with pytest.raises(DiskFailed):
        replace_small_file(disk, "record", b"new")
    after = disk.crash()
    assert content(after, "record") in (b"old", b"new")
    replace_small_file(after, "record", b"newer")
    assert content(after.crash(), "record") == b"newer"
