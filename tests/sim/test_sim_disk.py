"""The simulated disk forgets what was not synced, keeps what was, and fails when a test plants a failure."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lakefs.errors import DiskFailed, StoreFull, StoreReadOnly
from tests.sim.world.disk import SimCrashed, SimDisk

PAGE = 4096


def read(disk: SimDisk, path: str) -> bytes:
    file = disk.open(path, read_only=True)
    buffer = bytearray(file.size())
    file.pread_into(memoryview(buffer), 0)
    file.close()
    return bytes(buffer)


def write(disk: SimDisk, path: str, payload: bytes) -> None:
    file = disk.open(path, create=True)
    file.pwrite(payload, 0)
    file.sync_data()
    file.close()


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
        sectors = [read(after, "f")[at : at + 512] for after in [disk.crash()] for at in range(0, 2 * PAGE, 512)]
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
        disk.lying_sync = 1.0
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
