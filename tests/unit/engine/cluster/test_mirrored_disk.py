"""A mirrored disk whose copies fail: at each operation, by each kind of failure, one at a time or all at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.mirror.copy_list import read_list
from engine.mirror.mirrored_disk import MirroredDisk
from engine.mirror.new_copy import add_copy
from lakefs.errors import DiskFailed, EngineBusy, LakeError, StoreFull, StoreReadOnly
from lakefs.limits import MIB
from lakefs.ports import DiskFile
from tests.unit.engine.cluster.mirror_rig import Devices, content, good, put

FAILURES = [DiskFailed("planted"), StoreReadOnly("planted"), FileNotFoundError("planted")]


def begun(count: int = 2) -> tuple[Devices, MirroredDisk, DiskFile]:
    """Open a mirror with a file that is being written."""
    devices = Devices(count)
    mirror = devices.open()
    mirror.make_folder("journal")
    put(mirror, "journal/old", b"old")
    file = mirror.open("journal/f", create=True)
    file.pwrite(b"first", 0)
    return devices, mirror, file


CHANGES: dict[str, Callable[[MirroredDisk, DiskFile], object]] = {
    "pwrite": lambda _, file: file.pwritev([b"sec", b"ond"], 5),
    "sync_data": lambda _, file: file.sync_data(),
    "allocate": lambda _, file: file.allocate(0, 8192),
    "punch": lambda _, file: file.punch(0, 4096),
    "truncate": lambda _, file: file.truncate(3),
    "open": lambda mirror, _: mirror.open("journal/new", create=True),
    "rename": lambda mirror, _: mirror.rename("journal/f", "journal/old"),
    "unlink": lambda mirror, _: mirror.unlink("journal/old"),
    "make_folder": lambda mirror, _: mirror.make_folder("folder"),
    "sync_folder": lambda mirror, _: mirror.sync_folder("journal"),
}
"""Each change, by the operation of the disk that is made to fail."""


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("victim", "abc")
@pytest.mark.parametrize("change", CHANGES)
def test_a_copy_that_fails_at_a_change_is_out_of_the_list_before_the_answer(
    change: str, victim: str, error: Exception
) -> None:
    devices, mirror, file = begun(3)
    devices.disks[victim].fail_next(change, error)
    CHANGES[change](mirror, file)
    left = "abc".replace(victim, "")
    assert good(mirror) == left
    for name in left:
        listed = read_list(devices.disks[name])
        assert set(listed.members) == {devices.copy_id(other) for other in left}
    assert [state.state for state in mirror.state()] == ["good", "good", "out"]
    file.sync_data()
    devices.crash()  # the list was durable
    assert good(devices.open()) == left


@pytest.mark.parametrize("change", CHANGES)
def test_what_fails_on_all_copies_is_answered_as_a_disk_does_and_throws_nothing_out(change: str) -> None:
    devices, mirror, file = begun()
    for disk in devices.disks.values():
        disk.fail_next(change, DiskFailed("planted"))
    with pytest.raises(DiskFailed, match="planted"):
        CHANGES[change](mirror, file)
    assert good(mirror) == "ab"


@pytest.mark.parametrize("change", ["pwrite", "allocate", "open"])
def test_one_full_device_makes_the_mirror_full_and_the_change_can_be_repeated(change: str) -> None:
    devices, mirror, file = begun()
    devices.disks["b"].fail_next(change, StoreFull("planted"))
    with pytest.raises(StoreFull):
        CHANGES[change](mirror, file)
    assert good(mirror) == "ab"
    CHANGES[change](mirror, file)
    assert good(mirror) == "ab"
    assert devices.disks["a"].list_folder("journal") == devices.disks["b"].list_folder("journal")


@pytest.mark.parametrize("change", ["sync_data", "rename", "unlink", "sync_folder"])
def test_a_full_device_that_cannot_take_what_cannot_be_repeated_is_thrown_out(change: str) -> None:
    devices, mirror, file = begun()
    devices.disks["b"].fail_next(change, StoreFull("planted"))
    CHANGES[change](mirror, file)
    assert good(mirror) == "a"


def test_a_process_without_descriptors_is_not_the_copys_fault() -> None:
    devices, mirror, _ = begun()
    devices.disks["b"].fail_next("open", EngineBusy("planted"))
    with pytest.raises(EngineBusy):
        mirror.open("journal/new", create=True)
    mirror.open("journal/new", create=True).close()
    assert good(mirror) == "ab"


def test_a_copy_that_fails_at_the_list_of_a_new_one_is_thrown_out_by_the_next_list() -> None:
    devices, mirror, _ = begun(2)
    devices.disks["b"].fail_next("rename", DiskFailed("planted"), path="mirror.list")
    add_copy(mirror, "c", devices.replace("c"))
    assert good(mirror) == "ac"
    devices.kill()
    assert good(devices.open()) == "ac"


@pytest.mark.parametrize("second", ["sync_data", "rename"])
def test_two_copies_of_three_that_fail_at_once_stop_all_writing(second: str) -> None:
    """At the same change, or one at the list without the other."""
    devices, mirror, file = begun(3)
    devices.disks["a"].fail_next("sync_data", DiskFailed("planted"))
    devices.disks["b"].fail_next(second, DiskFailed("planted"), path="mirror.list" if second == "rename" else "")
    with pytest.raises(DiskFailed, match="too many copies failed at once"):
        file.sync_data()
    with pytest.raises(DiskFailed, match="too many"):
        mirror.unlink("journal/old")
    devices.kill()
    assert good(devices.open()) == "abc", "nothing was answered without them"


def test_copies_that_differ_in_a_name_are_thrown_out_and_the_one_that_can_do_it_is_right() -> None:
    devices, mirror, _ = begun()
    devices.disks["a"].unlink("journal/old")  # behind the mirror's back
    mirror.rename("journal/old", "journal/older")
    assert good(mirror) == "b"
    assert content(mirror, "journal/older") == b"old"


def test_reads_fall_back_to_another_copy_and_throw_nothing_out() -> None:
    devices, mirror, _ = begun()
    for operation in ("pread_into", "size", "list_folder", "open"):
        devices.disks["a"].fail_next(operation, DiskFailed("planted"))
    assert content(mirror, "journal/old") == b"old"
    assert mirror.list_folder("journal") == ["f", "old"]
    assert content(mirror, "journal/old") == b"old"
    assert good(mirror) == "ab"
    assert [(state.name, state.state) for state in mirror.state()] == [("a", "suspect"), ("b", "good")]
    for disk in devices.disks.values():
        disk.forget_failures()
        disk.fail_next("pread_into", DiskFailed("planted"))
    with pytest.raises(DiskFailed, match="planted"):
        content(mirror, "journal/old")


def test_a_reader_that_finds_wrong_bytes_reads_the_other_copy() -> None:
    devices, mirror, _ = begun()
    devices.disks["a"].flip_bit("journal/old", 0, 0)
    assert content(mirror, "journal/old") != b"old"
    assert mirror.distrust("journal/old")
    assert content(mirror, "journal/old") == b"old"
    assert not mirror.distrust("journal/old"), "all have been tried"
    mirror.rename("journal/f", "journal/old")  # other bytes
    assert content(mirror, "journal/old") == b"first"


def test_the_fullest_copy_says_what_room_is_left() -> None:
    devices = Devices(2)
    mirror = devices.open()
    devices.disks["b"].capacity_bytes = 8 * MIB
    assert mirror.total_bytes() == 8 * MIB
    assert mirror.free_bytes() < 8 * MIB < devices.disks["a"].free_bytes()


def test_a_file_keeps_its_inode_number_whichever_copy_answers() -> None:
    devices, mirror, file = begun()
    devices.disks["b"].open("other", create=True).close()  # inode numbers differ from now on
    held = mirror.lock("lock")
    mirror.open("journal/new", create=True).close()
    numbers = {path: mirror.stat(path).inode for path in ("journal/f", "journal/new", "lock")}
    devices.disks["a"].fail_next("sync_data", DiskFailed("planted"))
    file.sync_data()
    assert good(mirror) == "b"
    assert {path: mirror.stat(path).inode for path in numbers} == numbers
    mirror.check_lock()
    held.close()
    devices.kill()
    reopened = devices.open("b")
    reopened.lock("lock")
    assert reopened.stat("lock").inode == numbers["lock"], "the store is not a copied one"
    devices.disks["b"].unlink("lock")
    put(devices.disks["b"], "lock", b"")
    with pytest.raises(StoreReadOnly):
        reopened.check_lock()


def test_the_index_lies_on_the_first_copy_alone_and_stays_there() -> None:
    devices, mirror, file = begun()
    assert mirror.local_path("index") == devices.disks["a"].local_path("index")
    put(mirror, "crash", b"note")
    assert not devices.disks["b"].exists("crash")
    devices.disks["a"].fail_next("sync_data", DiskFailed("planted"))
    file.sync_data()
    assert mirror.local_path("index") == devices.disks["a"].local_path("index")
    assert mirror.exists("crash")


@pytest.mark.parametrize("path", ["mirror.list", "mirror.new", "../f", "a//b"])
def test_the_mirrors_own_names_are_not_to_be_had(path: str) -> None:
    devices = Devices(1)
    mirror = devices.open()
    for use in (lambda: mirror.open(path, create=True), lambda: mirror.unlink(path), lambda: mirror.rename("f", path)):
        with pytest.raises(LakeError):
            use()
    assert mirror.list_folder("") == []


def test_room_that_one_copy_lacks_is_not_held() -> None:
    devices = Devices(2)
    mirror = devices.open()
    reserve = mirror.open("reserve", create=True)
    devices.disks["a"].open("reserve").allocate(0, 8192)  # a power loss has undone it on the other
    assert reserve.size() == 8192
    assert reserve.allocated_bytes() == 0
    reserve.allocate(0, 8192)
    assert reserve.allocated_bytes() == 8192


def test_a_mirror_that_was_closed_is_not_used() -> None:
    _, mirror, file = begun()
    mirror.close()
    for use in (file.sync_data, file.size, lambda: mirror.unlink("journal/old"), mirror.free_bytes):
        with pytest.raises(DiskFailed, match="closed"):
            use()
    file.close()
    mirror.close()
