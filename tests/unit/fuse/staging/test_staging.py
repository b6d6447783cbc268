"""A staging folder: private, locked, bounded, and cheap to use again."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fuse.staging import room
from fuse.staging.folder import EMPTIED_BESIDE_BYTES, EMPTYING_MAX, Base, Kind, StagedFile, StagingFolder, open_staging
from fuse.staging.leftovers import FOLDERS_MAX, find_leftovers, is_in_use, staging_folders
from fuse.staging.room import Emptying
from fuse.staging.sidecar import replay
from lakefs.errors import InvalidArgument, LakeError, LocalFileError, StoreFull, StoreLocked

LIMIT = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[StagingFolder]:
    staging = StagingFolder(tmp_path / "staging", LIMIT)
    yield staging
    staging.close()


def test_the_folder_and_its_files_are_private(tmp_path: Path) -> None:
    path = tmp_path / "staging"
    path.mkdir(mode=0o755)
    folder = StagingFolder(path, LIMIT)
    folder.new("b/k", None).write(0, b"secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(found.stat().st_mode) for found in path.iterdir()} == {0o600}
    folder.close()


def test_a_folder_is_one_mounts_at_a_time(tmp_path: Path) -> None:
    folder = StagingFolder(tmp_path, LIMIT)
    with pytest.raises(StoreLocked, match=str(tmp_path)):
        StagingFolder(tmp_path, LIMIT)
    folder.close()
    StagingFolder(tmp_path, LIMIT).close()


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LocalFileError, match="file/staging"):
        StagingFolder(tmp_path / "file" / "staging", LIMIT)


def test_the_limit_counts_staged_bytes_of_all_files(tmp_path: Path) -> None:
    folder = StagingFolder(tmp_path, 100)
    first, second = folder.new("b/1", None), folder.new("b/2", Base(1000))
    first.write(0, bytes(60))
    first.write(10, bytes(50))  # only 60 bytes are staged still
    second.truncate(5000)
    second.write(4000, bytes(40))
    assert folder.used_bytes == 100
    with pytest.raises(StoreFull, match=str(tmp_path)) as raised:
        second.write(3999, b"xx")
    assert raised.value.subject == "b/2"
    with pytest.raises(StoreFull):
        second.write(0, bytes(1))
    assert second.spans(3000, 1001) == [(Kind.HOLE, 3000, 1000), (Kind.STAGED, 4000, 1)]
    first.truncate(50)
    second.write(0, bytes(10))
    assert folder.used_bytes == 100
    first.discard()
    second.discard()
    assert folder.used_bytes == 0
    folder.close()


def test_the_number_of_ranges_is_bounded(folder: StagingFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "RANGES_MAX", 10)
    file = folder.new("b/k", Base(1000))
    for at in range(10):
        file.write(at * 10, b"x")
    with pytest.raises(StoreFull, match="places"):
        file.write(500, b"x")
    file.write(1, bytes(8))
    file.write(9, b"x")  # joins two places
    file.write(500, b"x")
    file.discard()


def test_a_full_disk_is_said_with_the_folders_name(folder: StagingFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder.new("b/k", None)
    file.write(0, b"there")

    def failing(number: int) -> Any:
        def pwrite(descriptor: int, data: Any, offset: int) -> int:
            raise OSError(number, os.strerror(number))

        return pwrite

    kinds: list[tuple[int, type[LakeError]]] = [
        (errno.ENOSPC, StoreFull),
        (errno.EDQUOT, StoreFull),
        (errno.EFBIG, InvalidArgument),
        (errno.EIO, LocalFileError),
    ]
    for number, kind in kinds:
        with monkeypatch.context() as patched:
            patched.setattr("os.pwrite", failing(number))
            with pytest.raises(kind, match=f"b/k.*{folder.path}"):
                file.write(5, b"more")
            with pytest.raises(kind, match=f"b/x.*{folder.path}"):
                folder.new("b/x", None)
    assert file.read(0, 100) == b"there"
    assert folder.used_bytes == 5
    file.discard()


def test_many_changes_do_not_make_a_sidecar_long(folder: StagingFolder) -> None:
    file = folder.new("b/k", Base(100))
    for number in range(5000):
        file.write(50 + number % 2, b"x")
        file.truncate(50)
        file.truncate(100)
    (sidecar,) = folder.path.glob("*.json")
    assert sidecar.stat().st_size < 100_000
    file.write(60, b"y")
    state = replay(sidecar.read_bytes(), 61)
    assert state is not None
    assert list(state.ranges) == [(60, 61)]
    assert (state.size, state.base_bytes) == (100, 50)
    file.discard()


def test_writing_on_at_the_end_costs_one_line_in_the_sidecar(folder: StagingFolder) -> None:
    file = folder.new("b/k", None)
    for number in range(200):
        file.write(number * 100, bytes(100))
    (sidecar,) = folder.path.glob("*.json")
    assert len(sidecar.read_bytes().splitlines()) == 2
    file.discard()


def test_staging_files_are_used_again(folder: StagingFolder) -> None:
    for number in range(300):
        file = folder.new(f"b/{number}", None)
        file.write(0, b"x" * number)
        file.discard()
        file.discard()
    assert len(os.listdir(folder.path)) == 3
    several = [folder.new(f"b/{number}", None) for number in range(100)]
    for file in several:
        file.discard()
    assert len(os.listdir(folder.path)) == 1 + 2 * 64


def test_a_change_during_a_store_is_not_taken_for_stored(folder: StagingFolder) -> None:
    file = folder.new("b/k", None)
    file.write(0, b"first")
    file.begin_storing()
    file.write(0, b"later")
    assert not file.mark_stored(Base(5))
    assert file.changed
    assert file.read(0, 5) == b"later"
    file.begin_storing()
    assert file.mark_stored(Base(5))
    assert file.spans(0, 5) == [(Kind.BASE, 0, 5)]
    file.discard()


def test_base_bytes_are_not_read_from_the_staging_file(folder: StagingFolder) -> None:
    file = folder.new("b/k", Base(10))
    file.write(5, b"x")
    with pytest.raises(AssertionError):
        file.read(4, 2)
    assert file.read(5, 1) == b"x"
    assert file.read(100, 5) == b""
    file.discard()


def long_file(folder: StagingFolder, name: str) -> StagedFile:
    """Return a file whose staging file is emptied beside the loop."""
    file = folder.new(name, None)
    file.write(EMPTIED_BESIDE_BYTES, b"x")
    return file


def stored(file: StagedFile) -> None:
    file.begin_storing()
    assert file.mark_stored(Base(file.size))


def test_a_long_file_that_was_stored_is_written_on_while_its_staged_bytes_are_removed(folder: StagingFolder) -> None:
    waiting: list[Emptying] = []
    folder.empty_beside = waiting.append
    file = long_file(folder, "b/k")
    before = os.dup(file.descriptor)
    stored(file)
    assert os.fstat(before).st_size > EMPTIED_BESIDE_BYTES, "nothing waits for it"
    assert folder.used_bytes == 0
    file.write(5, b"new")
    (emptying,) = waiting
    emptying.run()
    folder.emptied(emptying)
    assert os.fstat(before).st_size == 0
    assert file.read(5, 3) == b"new"
    again = folder.new("b/2", None)
    assert os.path.sameopenfile(again.descriptor, before), "its slot is used again"
    os.close(before)


def test_a_disk_that_is_full_of_what_is_being_removed_is_not_full(
    folder: StagingFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[Emptying] = []
    folder.empty_beside = waiting.append
    stored(long_file(folder, "b/k"))
    real = os.pwrite

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        if not waiting[0].is_empty:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    monkeypatch.setattr("os.pwrite", pwrite)
    folder.new("b/2", None).write(0, b"there")
    assert waiting[0].is_empty
    other = folder.new("b/3", None)
    waiting[0].is_empty = False
    real_truncate = os.ftruncate

    def ftruncate(descriptor: int, length: int) -> None:
        if descriptor == waiting[0].slot.descriptor:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real_truncate(descriptor, length)

    monkeypatch.setattr("os.ftruncate", ftruncate)
    with pytest.raises(StoreFull):
        other.write(0, b"there")
    assert folder.used_bytes == len(b"there")


def test_on_a_full_disk_no_more_files_are_emptied_at_once_than_it_takes(
    folder: StagingFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of some GiB takes a second, in which the mount answers nothing."""
    waiting: list[Emptying] = []
    folder.empty_beside = waiting.append
    other = folder.new("b/other", None)
    for number in range(4):
        stored(long_file(folder, f"b/{number}"))
    real = os.pwrite

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        if not waiting[1].is_empty:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    monkeypatch.setattr("os.pwrite", pwrite)
    other.write(0, b"there")
    assert [each.is_empty for each in waiting] == [True, True, False, False]


def test_a_long_file_stays_in_its_slot_where_no_other_can_be_had(
    folder: StagingFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[Emptying] = []
    folder.empty_beside = waiting.append
    file = long_file(folder, "b/k")
    before = file.descriptor
    real = os.open

    def no_descriptors(path: Any, flags: int, mode: int = 0o777) -> int:
        if str(path).startswith(str(folder.path)):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, flags, mode)

    with monkeypatch.context() as patched:
        patched.setattr("os.open", no_descriptors)
        stored(file)
    assert file.descriptor == before
    assert os.fstat(before).st_size == 0
    assert not waiting


def test_only_so_many_files_are_emptied_beside_and_all_before_the_folder_is_closed(tmp_path: Path) -> None:
    folder = StagingFolder(tmp_path, 1 << 30)
    waiting: list[Emptying] = []
    folder.empty_beside = waiting.append
    for number in range(EMPTYING_MAX + 2):
        stored(long_file(folder, f"b/{number}"))
    assert len(waiting) == EMPTYING_MAX
    folder.close()
    assert [os.path.basename(found) for found in os.listdir(tmp_path)] == ["lock"]


@pytest.mark.parametrize("is_emptied", [True, False])
def test_a_slot_that_can_neither_be_emptied_nor_removed_is_closed_and_no_error(
    folder: StagingFolder, monkeypatch: pytest.MonkeyPatch, is_emptied: bool
) -> None:
    """A disk became one that only reads: in the background nobody could take the error, and it would end the mount."""
    waiting: list[Emptying] = []
    folder.empty_beside = waiting.append
    file = long_file(folder, "b/k")
    other = folder.new("b/2", None)
    other.write(0, b"other")
    before = file.descriptor
    stored(file)

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patched:
        patched.setattr("fuse.staging.folder.SPARE_MAX", 0)
        patched.setattr("os.ftruncate", read_only)
        patched.setattr("os.unlink", read_only)
        patched.setattr("pathlib.Path.unlink", read_only)
        waiting[0].run()
        waiting[0].is_empty = is_emptied
        folder.emptied(waiting[0])
        other.discard()
        for descriptor in (before, other.descriptor):
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(descriptor)


@pytest.mark.parametrize("is_stored", [True, False])
def test_bytes_of_a_length_that_could_not_be_cut_do_not_come_back_after_a_kill(
    folder: StagingFolder, monkeypatch: pytest.MonkeyPatch, is_stored: bool
) -> None:
    """A file system that copies on write needs room to cut a file; when there is room again the file is written on."""
    file = folder.new("b/k", None)
    file.write(0, b"old" * 100_000)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("os.ftruncate", full)
        if is_stored:
            stored(file)
        else:
            file.truncate(1000)
        with pytest.raises(StoreFull):
            file.write(1000, b"new")
    assert file.size == (300_000 if is_stored else 1000)
    file.write(1000, b"new")
    sidecar = next(found for found in folder.path.iterdir() if found.suffix == ".json")
    state = replay(sidecar.read_bytes(), os.fstat(file.descriptor).st_size)
    assert state is not None
    assert list(state.ranges) == list(file.written())
    assert state.size == file.size


# --- an earlier process of the place that goes on ---------------------------------------------------------


def test_a_place_whose_earlier_process_goes_on_gets_a_folder_of_its_own_and_later_the_first_again(
    tmp_path: Path,
) -> None:
    place = Path("/lake")
    first = open_staging(tmp_path, LIMIT, place)
    first.new("b/first", None).write(0, b"1")
    second = open_staging(tmp_path, LIMIT, place)
    second.new("b/second", None).write(0, b"2")
    assert (first.path, second.path) == (tmp_path, tmp_path / "2")
    assert staging_folders(tmp_path) == [tmp_path, tmp_path / "2"]
    first.close()
    again = open_staging(tmp_path, LIMIT, place)
    assert again.path == tmp_path
    assert [leftover.name for leftover in again.leftovers()] == ["b/first"]
    second.close()
    again.close()
    found = [leftover.name for folder in staging_folders(tmp_path) for leftover in find_leftovers(folder)]
    assert found == ["b/first", "b/second"]


def test_the_staging_folder_of_another_place_is_refused_whatever_goes_on_there(tmp_path: Path) -> None:
    folder = open_staging(tmp_path, LIMIT, Path("/lake"))
    with pytest.raises(StoreLocked, match="another mount's"):
        open_staging(tmp_path, LIMIT, Path("/other"))
    folder.close()
    open_staging(tmp_path, LIMIT, Path("/other")).close()


def test_processes_of_a_place_that_go_on_are_bounded(tmp_path: Path) -> None:
    folders = [open_staging(tmp_path, LIMIT, Path("/lake")) for _ in range(FOLDERS_MAX)]
    assert len({folder.path for folder in folders}) == FOLDERS_MAX
    with pytest.raises(StoreLocked, match="end those"):
        open_staging(tmp_path, LIMIT, Path("/lake"))
    for folder in folders:
        folder.close()


def test_a_file_that_its_mount_stores_while_it_is_listed_counts_as_in_use(tmp_path: Path) -> None:
    folder = StagingFolder(tmp_path, LIMIT)
    file = folder.new("b/k", None)
    file.write(0, b"x")
    (leftover,) = find_leftovers(tmp_path)
    assert is_in_use(leftover)
    leftover.path.unlink()
    assert is_in_use(leftover)
    file.discard()
    folder.close()
