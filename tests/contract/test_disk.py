"""One suite for every `Disk`: ext4 or whatever holds the temporary folder, tmpfs, simulated and mirrored ones."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.host.local_disk import LocalDisk, LocalFile
from lakefs.errors import DiskFailed, StoreFull, StoreLocked, StoreReadOnly
from lakefs.ports import Disk
from tests.contract.disks import KINDS, disk_of
from tests.e2e.small_disk import tmpfs

PAGE = 4096


@pytest.fixture(params=KINDS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    with disk_of(request.param, tmp_path) as opened:
        yield opened


def read(disk: Disk, path: str) -> bytes:
    file = disk.open(path, read_only=True)
    buffer = bytearray(file.size())
    assert file.pread_into(memoryview(buffer), 0) == len(buffer)
    file.close()
    return bytes(buffer)


def write(disk: Disk, path: str, payload: bytes) -> None:
    file = disk.open(path, create=True)
    file.pwrite(payload, 0)
    file.sync_data()
    file.close()


def test_bytes_written_are_read_back(disk: Disk) -> None:
    file = disk.open("f", create=True)
    file.pwrite(b"abc", 0)
    file.pwritev([b"de", bytearray(b"f"), memoryview(b"gh")], 3)
    buffer = bytearray(6)
    assert file.pread_into(memoryview(buffer), 1) == 6
    assert buffer == b"bcdefg"
    assert file.size() == 8
    file.sync_data()
    file.close()


def test_a_read_is_short_only_at_the_end_of_the_file(disk: Disk) -> None:
    write(disk, "f", b"abc")
    file = disk.open("f", read_only=True)
    buffer = bytearray(b"xxxx")
    assert file.pread_into(memoryview(buffer), 1) == 2
    assert buffer == b"bcxx"
    assert file.pread_into(memoryview(buffer), 3) == 0
    assert file.pread_into(memoryview(buffer), 1000) == 0
    file.close()


def test_what_is_cached_is_read_whole_or_not_at_all(disk: Disk) -> None:
    write(disk, "f", b"abc")
    file = disk.open("f", read_only=True)
    found = bytearray(2)
    assert any(file.preadv_cached_into([memoryview(found)], 1) for _ in range(1000)), "it was written just now"
    assert found == b"bc"
    several = [memoryview(bytearray(1)), memoryview(bytearray(2))]
    assert any(file.preadv_cached_into(several, 0) for _ in range(1000))
    assert several == [b"a", b"bc"]
    assert not any(file.preadv_cached_into(several, 1) for _ in range(2)), "the file ends before"
    assert not file.preadv_cached_into([memoryview(found)], 2), "the file ends before"
    assert not file.preadv_cached_into([memoryview(found)], 3)
    file.close()


def test_a_vector_of_thousands_of_payloads_is_written_in_order(disk: Disk) -> None:
    payloads = [index.to_bytes(2, "big") for index in range(3000)]
    file = disk.open("f", create=True)
    file.pwritev(payloads, 5)
    file.close()
    assert read(disk, "f") == bytes(5) + b"".join(payloads)


def test_a_gap_reads_as_zeros(disk: Disk) -> None:
    file = disk.open("f", create=True)
    file.pwrite(b"a", 10_000)
    file.close()
    assert read(disk, "f") == bytes(10_000) + b"a"


def test_allocating_extends_with_zeros_and_takes_room(disk: Disk) -> None:
    file = disk.open("f", create=True)
    file.pwrite(b"abc", 0)
    file.allocate(0, 64 * PAGE)
    assert file.size() == 64 * PAGE
    assert file.allocated_bytes() >= 64 * PAGE
    assert disk.stat("f")[1:] == (file.size(), file.allocated_bytes())
    file.allocate(0, PAGE)
    assert file.size() == 64 * PAGE, "allocating never shortens"
    file.close()
    assert read(disk, "f") == b"abc" + bytes(64 * PAGE - 3)


def test_punching_zeroes_the_range_frees_whole_pages_and_keeps_the_size(disk: Disk) -> None:
    file = disk.open("f", create=True)
    file.pwrite(b"x" * 64 * PAGE, 0)
    file.sync_data()
    before = file.allocated_bytes()
    file.punch(PAGE, 32 * PAGE)
    file.sync_data()
    assert file.allocated_bytes() <= before - 32 * PAGE
    file.punch(40 * PAGE + 10, 100)
    file.close()
    expected = bytearray(b"x" * 64 * PAGE)
    expected[PAGE : 33 * PAGE] = bytes(32 * PAGE)
    expected[40 * PAGE + 10 : 40 * PAGE + 110] = bytes(100)
    assert read(disk, "f") == expected


def test_punching_past_the_end_does_not_grow_the_file(disk: Disk) -> None:
    file = disk.open("f", create=True)
    file.pwrite(b"x" * PAGE, 0)
    file.punch(0, 100 * PAGE)
    assert file.size() == PAGE
    file.close()


def test_truncating_cuts_and_extends_with_zeros(disk: Disk) -> None:
    file = disk.open("f", create=True)
    file.pwrite(b"abcdef", 0)
    file.truncate(2)
    file.truncate(4)
    file.close()
    assert read(disk, "f") == b"ab\0\0"


def test_direct_writes_take_aligned_memory_and_refuse_other_offsets(disk: Disk) -> None:
    file = disk.open("f", create=True, direct=True)
    aligned = memoryview(mmap.mmap(-1, 2 * PAGE))
    aligned[:] = os.urandom(2 * PAGE)
    file.allocate(0, 8 * PAGE)
    file.pwrite(aligned, 2 * PAGE)
    file.sync_data()
    if file.direct and not _is_tmpfs(disk):
        with pytest.raises(DiskFailed):
            file.pwrite(aligned[:100], 0)
    other = memoryview(mmap.mmap(-1, 2 * PAGE))
    assert file.pread_into(other, 2 * PAGE) == 2 * PAGE
    assert other == aligned
    file.close()
    assert read(disk, "f")[2 * PAGE : 4 * PAGE] == aligned


def _is_tmpfs(disk: Disk) -> bool:
    """tmpfs accepts O_DIRECT and any alignment with it."""
    return isinstance(disk, LocalDisk) and disk.local_path("").startswith("/dev/shm")


def test_creating_a_file_that_exists_is_refused(disk: Disk) -> None:
    write(disk, "f", b"1")
    with pytest.raises(FileExistsError):
        disk.open("f", create=True)
    assert read(disk, "f") == b"1"


def test_missing_files_are_named_as_missing(disk: Disk) -> None:
    with pytest.raises(FileNotFoundError):
        disk.open("f")
    with pytest.raises(FileNotFoundError):
        disk.unlink("f")
    with pytest.raises(FileNotFoundError):
        disk.rename("f", "g")
    with pytest.raises(FileNotFoundError):
        disk.stat("f")
    with pytest.raises(FileNotFoundError):
        disk.open("nowhere/f", create=True)
    assert not disk.exists("f")
    assert disk.list_folder("nowhere") == []


@pytest.mark.parametrize("path", ["../f", "a/../../f", "/etc/passwd", "a//b", "./f", "a/./b"])
def test_no_path_leaves_the_folder(disk: Disk, path: str) -> None:
    with pytest.raises(DiskFailed):
        disk.open(path, create=True)


def test_a_file_opened_read_only_is_not_written(disk: Disk) -> None:
    write(disk, "f", b"1")
    file = disk.open("f", read_only=True)
    with pytest.raises(DiskFailed):
        file.pwrite(b"2", 0)
    file.close()
    assert read(disk, "f") == b"1"


def test_a_closed_file_is_not_used_and_may_be_closed_again(disk: Disk) -> None:
    file = disk.open("f", create=True)
    file.close()
    file.close()
    with pytest.raises(DiskFailed):
        file.pwrite(b"2", 0)


def test_folders_list_their_names_in_order(disk: Disk) -> None:
    disk.make_folder("d")
    disk.make_folder("d")
    for name in ("d/b", "d/a", "c"):
        write(disk, name, b"")
    disk.sync_folder("d")
    disk.sync_folder("")
    assert disk.list_folder("d") == ["a", "b"]
    assert disk.list_folder("") == ["c", "d"]
    assert disk.exists("d")
    assert disk.exists("d/a")
    assert disk.is_folder("d")
    assert disk.is_folder("")
    assert not disk.is_folder("d/a")
    assert not disk.is_folder("nowhere")


def test_renaming_replaces_and_keeps_the_inode(disk: Disk) -> None:
    write(disk, "old", b"old")
    write(disk, "new", b"new")
    inode = disk.stat("new").inode
    disk.rename("new", "old")
    disk.sync_folder("")
    assert read(disk, "old") == b"new"
    assert disk.stat("old").inode == inode
    assert not disk.exists("new")


def test_a_removed_file_can_be_read_through_what_is_open(disk: Disk) -> None:
    write(disk, "f", b"abc")
    file = disk.open("f", read_only=True)
    disk.unlink("f")
    assert not disk.exists("f")
    buffer = bytearray(3)
    assert file.pread_into(memoryview(buffer), 0) == 3
    assert buffer == b"abc"
    file.close()


def test_the_lock_is_exclusive_until_it_is_closed(disk: Disk) -> None:
    held = disk.lock("lock")
    with pytest.raises(StoreLocked):
        disk.lock("lock")
    inode = disk.stat("lock").inode
    held.close()
    disk.lock("lock").close()
    assert disk.stat("lock").inode == inode


def test_a_lock_whose_file_was_removed_is_held_still_and_nothing_new_is_begun_under_it(disk: Disk) -> None:
    disk.check_lock()  # nothing is locked yet
    write(disk, "before", b"x")
    held = disk.lock("lock")
    disk.check_lock()
    disk.unlink("lock")
    for change in (
        disk.check_lock,
        lambda: disk.open("new", create=True),
        lambda: disk.rename("before", "new"),
        lambda: disk.unlink("before"),
        lambda: disk.make_folder("new"),
    ):
        with pytest.raises(StoreReadOnly, match="removed or replaced"):
            change()
    with pytest.raises(StoreLocked):
        disk.lock("lock")
    assert not disk.exists("lock")
    assert read(disk, "before") == b"x"
    held.close()
    disk.check_lock()
    disk.lock("lock").close()
    disk.unlink("before")


def test_the_room_left_is_known(disk: Disk) -> None:
    assert 0 < disk.free_bytes() <= disk.total_bytes()


# --- the real disk only ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["moved", "replaced", "lock file replaced"])
def test_another_folder_or_lock_file_in_place_of_the_locked_one_is_left_alone(tmp_path: Path, how: str) -> None:
    root = tmp_path / "store"
    disk = LocalDisk(root)
    disk.make_folder("")
    write(disk, "f", b"mine")
    held = disk.lock("lock")
    if how == "lock file replaced":
        (root / "lock").rename(root / "earlier")
        (root / "lock").touch()
    else:
        root.rename(tmp_path / "moved")
    if how == "replaced":
        root.mkdir()
        (root / "lock").touch()
    before = sorted(tmp_path.rglob("*"))
    for change in (disk.check_lock, lambda: disk.open("new", create=True), lambda: disk.make_folder("")):
        with pytest.raises(StoreReadOnly, match="removed or replaced"):
            change()
    assert sorted(tmp_path.rglob("*")) == before
    if how == "lock file replaced":
        assert read(disk, "f") == b"mine"
    else:
        with pytest.raises(StoreReadOnly, match="moved"):
            disk.open("f", read_only=True)  # a missing file would be another error
        with pytest.raises(StoreLocked):
            LocalDisk(tmp_path / "moved").lock("lock")
    assert 0 < disk.free_bytes() <= disk.total_bytes()
    held.close()
    held.close()


def test_files_and_folders_are_private_to_their_owner(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path / "new" / "store")
    disk.make_folder("")
    disk.make_folder("d")
    write(disk, "d/f", b"")
    disk.lock("lock").close()
    assert stat.S_IMODE(os.stat(disk.local_path("")).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(disk.local_path("d")).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(disk.local_path("d/f")).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(disk.local_path("lock")).st_mode) == 0o600


def test_descriptors_do_not_pass_to_child_processes(tmp_path: Path) -> None:
    file = LocalDisk(tmp_path).open("f", create=True)
    assert not os.get_inheritable(file.fileno())
    file.close()


def test_a_symlink_in_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    root = tmp_path / "store"
    root.mkdir()
    (root / "f").symlink_to(outside)
    with pytest.raises(DiskFailed):
        LocalDisk(root).open("f")


def test_a_full_device_is_store_full_and_a_bad_descriptor_is_disk_failed() -> None:
    disk = LocalDisk(Path("/dev"))
    full = disk.open("full")
    with pytest.raises(StoreFull, match="full"):
        full.pwrite(b"x", 0)
    full.close()
    with pytest.raises(DiskFailed):
        full.sync_data()


CALLS: dict[str, Callable[[LocalFile], object]] = {
    "preadv": lambda file: file.pread_into(memoryview(bytearray(3)), 0),
    "pwritev": lambda file: file.pwrite(b"x", 0),
    "fdatasync": lambda file: file.sync_data(),
    "ftruncate": lambda file: file.truncate(1),
    "fstat": lambda file: (file.size(), file.allocated_bytes()),
}
"""Each system call on an open file that Python makes, and what makes it."""
ODD_CODES = sorted({code for code in errno.errorcode if type(OSError(code, "")) is not OSError} | {errno.EIO})
"""Codes that Python gives a class of its own, such as ENOENT, EACCES, ETIMEDOUT and EPIPE."""


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("code", ODD_CODES, ids=errno.errorcode.__getitem__)
def test_whatever_a_call_on_an_open_file_says_is_a_failure_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    disk = LocalDisk(tmp_path)
    file = disk.open("f", create=True)

    def failing(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing)
        with pytest.raises(DiskFailed, match="f: "):
            CALLS[call](file)
    file.close()


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES, errno.EIO], ids=errno.errorcode.__getitem__)
def test_what_is_asked_of_a_folder_or_of_the_file_system_fails_as_the_disk_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    disk = LocalDisk(tmp_path)
    disk.make_folder("d")
    write(disk, "d/f", b"1")

    def failing(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    @contextmanager
    def opened(*_: object) -> Iterator[Iterator[object]]:
        yield iter(failing, 0)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", opened)
        with pytest.raises(DiskFailed):  # not "there is no such folder": that would be an empty journal
            disk.list_folder("d")
    calls: dict[str, Callable[[], object]] = {
        "fsync": lambda: disk.sync_folder("d"),
        "statvfs": disk.free_bytes,
        "mkdir": lambda: disk.make_folder("e"),
    }
    for call, ask in calls.items():
        with monkeypatch.context() as patched:
            patched.setattr(os, call, failing)
            with pytest.raises(DiskFailed):
                ask()
    if code == errno.EACCES:
        with monkeypatch.context() as patched:
            patched.setattr(os, "open", failing)
            with pytest.raises(DiskFailed, match="who owns it"):
                disk.open("d/f")


def test_a_file_system_without_inodes_says_so(tmp_path: Path) -> None:
    with tmpfs(tmp_path, 16 << 20, inodes=20) as place:
        disk = LocalDisk(place)
        held = disk.lock("lock")
        assert 0 < (disk.free_inodes() or 0) < 20
        count = 0
        with pytest.raises(StoreFull, match="no inode left to create f"):
            while True:
                write(disk, f"f{count}", b"1")
                count += 1
        with pytest.raises(StoreFull, match="no inode left to create folder d"):
            disk.make_folder("d")
        assert disk.free_inodes() == 0
        disk.unlink("f0")
        write(disk, "f0", b"2")
        held.close()
