"""One suite for every `Disk`: ext4 or whatever holds the temporary folder, tmpfs, and the simulated one."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.disk import LocalDisk
from lakefs.errors import DiskFailed, StoreFull, StoreLocked, StoreReadOnly
from lakefs.ports import Disk
from tests.sim.disk import SimCrashed, SimDisk

PAGE = 4096


@pytest.fixture(params=["local", "tmpfs", "simulated", "simulated without O_DIRECT"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    if request.param == "local":
        yield LocalDisk(tmp_path)
    elif request.param == "tmpfs":
        if not os.path.isdir("/dev/shm"):
            pytest.skip("no tmpfs here")
        folder = tempfile.mkdtemp(dir="/dev/shm")
        yield LocalDisk(Path(folder))
        shutil.rmtree(folder)
    else:
        yield SimDisk(1, supports_direct=request.param == "simulated")


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
        disk.inode("f")
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


def test_renaming_replaces_and_keeps_the_inode(disk: Disk) -> None:
    write(disk, "old", b"old")
    write(disk, "new", b"new")
    inode = disk.inode("new")
    disk.rename("new", "old")
    disk.sync_folder("")
    assert read(disk, "old") == b"new"
    assert disk.inode("old") == inode
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
    inode = disk.inode("lock")
    held.close()
    disk.lock("lock").close()
    assert disk.inode("lock") == inode


def test_the_room_left_is_known(disk: Disk) -> None:
    assert 0 < disk.free_bytes() <= disk.total_bytes()


# --- the real disk only ----------------------------------------------------------------------------------


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


# --- the simulated disk only -----------------------------------------------------------------------------


def created(disk: SimDisk, path: str, payload: bytes) -> None:
    write(disk, path, payload)
    disk.sync_folder("")


def test_synced_bytes_survive_every_power_loss() -> None:
    for seed in range(100):
        disk = SimDisk(seed)
        created(disk, "f", b"x" * 5000)
        file = disk.open("f")
        file.pwrite(b"y" * 5000, 5000)
        assert read(disk.crash(), "f")[:5000] == b"x" * 5000


def test_unsynced_bytes_may_survive_vanish_or_be_torn_at_sectors() -> None:
    seen: set[str] = set()
    for seed in range(200):
        disk = SimDisk(seed)
        created(disk, "f", bytes(PAGE * 2))
        file = disk.open("f")
        file.pwrite(b"y" * PAGE * 2, 0)
        sectors = [
            read(after, "f")[at : at + 512] for after in [disk.crash()] for at in range(0, 2 * PAGE, 512)
        ]
        assert set(sectors) <= {bytes(512), b"y" * 512}
        count = sectors.count(b"y" * 512)
        seen.add("none" if count == 0 else "all" if count == 16 else "torn")
    assert seen == {"none", "all", "torn"}


def test_a_later_write_may_survive_an_earlier_one() -> None:
    outcomes = set()
    for seed in range(100):
        disk = SimDisk(seed)
        created(disk, "f", bytes(2 * PAGE))
        file = disk.open("f")
        file.pwrite(b"1" * 512, 0)
        file.pwrite(b"2" * 512, PAGE)
        content = read(disk.crash(), "f")
        outcomes.add((content[0], content[PAGE]))
    assert outcomes == {(0, 0), (ord("1"), 0), (0, ord("2")), (ord("1"), ord("2"))}


def test_a_new_name_may_vanish_until_its_folder_is_synced() -> None:
    kept = 0
    for seed in range(50):
        disk = SimDisk(seed)
        write(disk, "f", b"abc")
        after = disk.crash()
        if after.exists("f"):
            kept += 1
            assert read(after, "f") == b"abc"
    assert 0 < kept < 50


def test_a_rename_is_the_old_file_or_the_new_one() -> None:
    seen = set()
    for seed in range(50):
        disk = SimDisk(seed)
        created(disk, "f", b"old")
        write(disk, "tmp", b"new")
        disk.rename("tmp", "f")
        seen.add(read(disk.crash(), "f"))
    assert seen == {b"old", b"new"}


def test_an_unsynced_removal_may_be_undone() -> None:
    outcomes = set()
    for seed in range(50):
        disk = SimDisk(seed)
        created(disk, "f", b"abc")
        disk.unlink("f")
        outcomes.add(disk.crash().exists("f"))
    assert outcomes == {True, False}


def test_a_folder_lost_takes_its_files_along() -> None:
    for seed in range(50):
        disk = SimDisk(seed)
        disk.make_folder("d")
        write(disk, "d/f", b"abc")
        disk.sync_folder("d")
        after = disk.crash()
        assert after.exists("d") == after.exists("d/f")


def test_nothing_works_after_the_crash_but_the_new_view_does() -> None:
    disk = SimDisk(3)
    created(disk, "f", b"abc")
    file = disk.open("f")
    after = disk.crash()
    with pytest.raises(SimCrashed):
        file.pwrite(b"x", 0)
    with pytest.raises(SimCrashed):
        file.sync_data()
    with pytest.raises(SimCrashed):
        disk.open("f")
    file.close()
    assert read(after, "f") == b"abc"


def test_the_power_fails_at_the_operation_named() -> None:
    whole = SimDisk(0)
    created(whole, "f", b"abc")
    assert whole.operation_count == 4
    for at in range(1, 5):
        disk = SimDisk(0, crash_at=at)
        with pytest.raises(SimCrashed):
            created(disk, "f", b"abc")
        with pytest.raises(SimCrashed):
            disk.open("f", create=True)
        disk.crash()


def test_the_same_seed_gives_the_same_disk() -> None:
    def run(seed: int) -> list[bytes]:
        disk = SimDisk(seed)
        for index in range(10):
            file = disk.open(f"f{index}", create=True)
            file.pwrite(random.Random(index).randbytes(10_000), 0)
        after = disk.crash()
        return [read(after, name) for name in after.list_folder("")]

    assert run(5) == run(5)
    assert run(5) != run(6)


def test_a_killed_process_loses_no_byte_but_makes_none_durable() -> None:
    disk = SimDisk(0)
    disk.open("f", create=True).pwrite(b"abc", 0)
    disk.lock("lock")
    after = disk.kill()
    assert read(after, "f") == b"abc"
    after.lock("lock")
    outcomes = set()
    for seed in range(30):
        disk = SimDisk(seed)
        disk.open("f", create=True).pwrite(b"abc", 0)
        outcomes.add(disk.kill().crash().exists("f"))
    assert outcomes == {True, False}


def test_a_full_simulated_disk_takes_no_more_until_something_is_removed() -> None:
    disk = SimDisk(0, capacity_bytes=10 * PAGE)
    file = disk.open("f", create=True)
    file.pwrite(bytes(8 * PAGE), 0)
    with pytest.raises(StoreFull):
        file.pwrite(bytes(8 * PAGE), 8 * PAGE)
    with pytest.raises(StoreFull):
        file.allocate(8 * PAGE, 3 * PAGE)
    file.punch(0, 4 * PAGE)
    file.allocate(9 * PAGE, PAGE)
    assert disk.free_bytes() <= 5 * PAGE
    file.close()
    disk.unlink("f")
    assert disk.free_bytes() == 10 * PAGE


def test_faults_hit_the_operation_and_file_they_are_meant_for() -> None:
    disk = SimDisk(0)
    disk.fail_next("sync_data", DiskFailed("planted"), path="g", skip=1)
    created(disk, "f", b"1")
    created(disk, "g", b"1")
    file = disk.open("g")
    file.pwrite(b"2", 0)
    with pytest.raises(DiskFailed, match="planted"):
        file.sync_data()
    file.sync_data()


def test_what_a_failed_sync_gave_up_is_not_written_by_the_next() -> None:
    outcomes = set()
    for seed in range(30):
        disk = SimDisk(seed)
        created(disk, "f", b"1")
        file = disk.open("f")
        file.pwrite(b"2", 0)
        disk.fail_next("sync_data", DiskFailed("planted"))
        with pytest.raises(DiskFailed):
            file.sync_data()
        file.sync_data()
        assert read(disk, "f") == b"2"
        outcomes.add(read(disk.crash(), "f"))
    assert outcomes == {b"1", b"2"}


def test_a_lying_sync_keeps_nothing() -> None:
    outcomes = set()
    for seed in range(30):
        disk = SimDisk(seed)
        disk.lying_sync = True
        created(disk, "f", b"1")
        outcomes.add(disk.crash().exists("f"))
    assert outcomes == {True, False}


def test_a_flipped_bit_is_seen_by_readers_and_survives() -> None:
    disk = SimDisk(0)
    created(disk, "f", b"abc")
    disk.flip_bit("f", 1, 0)
    assert read(disk, "f") == b"acc"
    assert read(disk.crash(), "f") == b"acc"


def test_the_index_comes_back_as_of_one_of_its_last_commits_or_not_at_all() -> None:
    seen = set()
    for seed in range(60):
        disk = SimDisk(seed)
        disk.make_folder("index")
        for commit in (b"1", b"2", b"3", b"4"):
            Path(disk.local_path("index/data.mdb")).write_bytes(commit)
            disk.note_index_sync()
        after = disk.crash()
        there = after.exists("index/data.mdb")
        seen.add(Path(after.local_path("index/data.mdb")).read_bytes() if there else None)
    assert seen == {b"4", b"3", None}


def test_read_only_disks_say_so() -> None:
    disk = SimDisk(0)
    disk.fail_next("open", StoreReadOnly("the file system is read-only"))
    with pytest.raises(StoreReadOnly):
        disk.open("f", create=True)
