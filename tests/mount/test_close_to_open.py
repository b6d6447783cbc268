"""A mount acts only on what stands: each change carries what it was decided upon, the engine refuses what is stale.

`here` and `there` are one folder on two mounts.  What one of them does rests on what it knew a moment ago; the other
has changed that in between.  Nothing that was closed is lost, nothing that was removed comes back, and no error is one
that the same calls on one mount would not give.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from lakefs import connect
from tests.mount.shared.ground import OVER, SharedMounts, shared_mounts
from tests.mount.shared.worker import Worker
from tests.mount.test_two_mounts import eventually
from tests.mount.tools import catch_up

pytestmark = [pytest.mark.slow, pytest.mark.fuse]
ROUNDS: Final = 25


@pytest.fixture(scope="module", params=OVER)
def mounts(request: pytest.FixtureRequest) -> Iterator[SharedMounts]:
    """An engine, two mounts by Unix socket or TCP, and a process that works on each."""
    with shared_mounts(request.param) as mounted:
        yield mounted


def write(path: Path, content: bytes, flags: int = os.O_CREAT | os.O_TRUNC) -> None:
    """Open for writing, write, close."""
    descriptor = os.open(path, os.O_WRONLY | flags)
    try:
        os.write(descriptor, content)
    finally:
        os.close(descriptor)


def seen(path: Path) -> None:
    """Wait until the kernel of a mount knows of a name: for a second it may still be absent there."""
    eventually(lambda: os.path.lexists(path), f"{path} is not seen")


def append(path: Path, content: bytes) -> None:
    """Open for appending, append, close."""
    write(path, content, os.O_CREAT | os.O_APPEND)


# --- checks, each of a folder on two mounts --------------------------------------------------------------


def an_append_keeps_what_was_closed_elsewhere(here: Path, there: Path) -> None:
    for number in range(ROUNDS):
        (here / f"job {number}").mkdir()
        seen(there / f"job {number}")
        write(there / f"job {number}" / "log", b"there\n")
        append(here / f"job {number}" / "log", b"here\n")
        assert (there / f"job {number}" / "log").read_bytes() == b"there\nhere\n"


def an_open_for_writing_finds_what_was_closed_elsewhere(here: Path, there: Path) -> None:
    for number in range(ROUNDS):
        (here / f"part {number}").mkdir()
        seen(there / f"part {number}")
        write(there / f"part {number}" / "file", b"0123456789")
        descriptor = os.open(here / f"part {number}" / "file", os.O_RDWR | os.O_CREAT)
        os.pwrite(descriptor, b"x", 4)
        os.close(descriptor)
        assert (there / f"part {number}" / "file").read_bytes() == b"0123x56789"


def an_open_finds_what_was_closed_elsewhere(here: Path, there: Path) -> None:
    (here / "file").write_bytes(b"first")
    seen(there / "file")
    for number in range(ROUNDS):
        for content in (b"short %d" % number, b"long %d" % number * 9000):
            (there / "file").write_bytes(content)
            assert (here / "file").read_bytes() == content
        os.rename(there / "file", there / "old")
        (there / "file").write_bytes(b"other")
        assert (here / "file").read_bytes() == b"other"


def a_listing_finds_what_was_closed_elsewhere(here: Path, there: Path) -> None:
    for number in range(ROUNDS):
        names = {path.name for path in here.iterdir()}
        descriptor = os.open(there / f"named first {number}", os.O_CREAT | os.O_WRONLY)
        (there / f"named then {number}").mkdir()
        assert set(os.listdir(here)) - {f"named first {number}"} == names | {f"named then {number}"}
        os.close(descriptor)  # its name was made before the folder's last change
        assert set(os.listdir(here)) == names | {f"named first {number}", f"named then {number}"}


def a_first_close_moves_the_folder_s_change_time_alone(here: Path, there: Path) -> None:
    for number in range(ROUNDS):
        descriptor = os.open(here / f"named first {number}", os.O_CREAT | os.O_WRONLY)
        (here / f"named then {number}").mkdir()
        before = here.stat()
        eventually(lambda before=before: folder_times(there) == times_of(before), "the other mount is late")  # type: ignore[misc]
        os.close(descriptor)  # the other mount sees another name, so its folder has changed
        eventually(lambda before=before: there.stat().st_ctime_ns > before.st_ctime_ns, "its folder stays")  # type: ignore[misc]
        after = folder_times(there)
        assert 0 <= after[1] - before.st_ctime_ns < 1000
        assert after[0] == before.st_mtime_ns
        assert folder_times(here) in (after, times_of(before))  # at the next change at the latest it is the same


def folder_times(folder: Path) -> tuple[int, int]:
    return times_of(folder.stat())


def times_of(found: os.stat_result) -> tuple[int, int]:
    return found.st_mtime_ns, found.st_ctime_ns


MAKES: Final[dict[str, Callable[[Path], object]]] = {
    "mkdir": os.mkdir,
    "O_EXCL": lambda path: os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)),
    "symlink": lambda path: os.symlink("target", path),
    "create": lambda path: write(path, b"x"),
}


def what_was_made_elsewhere_exists(here: Path, there: Path) -> None:
    for made in MAKES:
        for tried in ("mkdir", "O_EXCL", "symlink"):
            for number in range(4):
                folder = f"{made} {tried} {number}"
                (here / folder).mkdir()
                seen(there / folder)
                MAKES[made](there / folder / "name")
                with pytest.raises(FileExistsError):
                    MAKES[tried](here / folder / "name")
                assert (here / folder / "name").lstat().st_mode == (there / folder / "name").lstat().st_mode


def make_folder_anew(path: Path) -> None:
    """Rename the folder of a path, and make another of its name."""
    os.rename(path.parent, f"{path.parent} old")
    os.mkdir(path.parent)


GONE: Final[dict[str, Callable[[Path], object]]] = {
    "removed": os.unlink,
    "renamed": lambda path: os.rename(path, path.with_name("renamed")),
    "moved": lambda path: os.rename(path, path.parent.parent / "moved"),
    "its folder anew": make_folder_anew,
}


def what_is_gone_elsewhere_is_made_anew(here: Path, there: Path) -> None:
    for way, gone in GONE.items():
        for number, flags in enumerate((0, os.O_TRUNC, os.O_APPEND, os.O_TRUNC | os.O_APPEND)):
            name = Path(f"{way} {number}", "name")
            (here / name).parent.mkdir()
            (here / name).write_bytes(b"old")
            seen(there / name)
            assert (here / name).read_bytes() == b"old"
            gone(there / name)
            write(here / name, b"new", os.O_CREAT | flags)
            assert (there / name).read_bytes() == b"new"
    for number in range(8):
        (here / f"to {number}").write_bytes(b"old")
        os.symlink(f"to {number}", here / f"link {number}")
        seen(there / f"link {number}")
        assert (here / f"link {number}").read_bytes() == b"old"
        os.unlink(there / (f"to {number}" if number % 2 else f"link {number}"))
        write(here / f"link {number}", b"new")
        assert (there / f"link {number}").read_bytes() == b"new"
        assert (there / f"to {number}").read_bytes() == (b"new" if number % 2 else b"old")


def a_symlink_leads_where_it_was_put_elsewhere(here: Path, there: Path) -> None:
    for number in range(2):
        (here / f"step {number}").mkdir()
        (here / f"step {number}" / "model").write_bytes(b"%d" % number)
    os.symlink("step 0", here / "latest")
    os.symlink("latest/model", here / "model")
    for number in range(1, ROUNDS):
        seen(there / "model")
        os.symlink(f"step {number % 2}", there / "latest~")
        os.rename(there / "latest~", there / "latest")
        if number % 3:
            assert (here / "model").read_bytes() == b"%d" % (number % 2)
        else:
            assert (here / "latest" / "model").read_bytes() == b"%d" % (number % 2)
        assert os.readlink(here / "latest") == f"step {number % 2}"
    os.unlink(there / "latest")
    (there / "latest").mkdir()
    (there / "latest" / "model").write_bytes(b"of a folder")
    assert (here / "model").read_bytes() == b"of a folder"
    os.unlink(there / "model")
    with pytest.raises(FileNotFoundError):
        os.readlink(here / "model")


INTO: Final[dict[str, Callable[[Path, Path], object]]] = {
    **{name: lambda path, _, make=make: make(path) for name, make in MAKES.items()},  # type: ignore[misc]
    "rename": lambda path, source: os.rename(source, path),
    "rename a folder": lambda path, source: os.rename(source.parent / "source folder", path),
}


def nothing_is_made_in_a_folder_that_is_gone(here: Path, there: Path) -> None:
    (here / "source").write_bytes(b"source")
    (here / "source folder").mkdir()
    for way in ("renamed", "removed"):
        for name, into in INTO.items():
            for number in range(4):
                old, new = f"{name} {number}", f"{name} {number} {way}"
                (here / old).mkdir()
                MAKES["mkdir"](here / old / "sub")
                os.rmdir(here / old / "sub")
                seen(there / old)
                os.rename(there / old, there / new) if way == "renamed" else os.rmdir(there / old)
                with pytest.raises(FileNotFoundError):
                    into(here / old / "name", here / "source")
                assert not os.path.lexists(there / old), f"{old} is back"
                assert way == "removed" or os.listdir(there / new) == []
    eventually(lambda: sorted(os.listdir(here)) == sorted(os.listdir(there)), "the mounts differ")
    assert (there / "source").read_bytes() == b"source"


IN_HELD: Final[tuple[Callable[[int], object], ...]] = (
    lambda folder: os.mkdir("new", dir_fd=folder),
    lambda folder: os.close(os.open("new", os.O_CREAT | os.O_EXCL | os.O_WRONLY, dir_fd=folder)),
    lambda folder: os.close(os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=folder)),
    lambda folder: os.symlink("target", "new", dir_fd=folder),
    lambda folder: os.unlink("file", dir_fd=folder),
    lambda folder: os.rmdir("sub", dir_fd=folder),
    lambda folder: os.rename("file", "new", src_dir_fd=folder, dst_dir_fd=folder),
    lambda folder: os.close(os.open("sub", os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)),
    lambda folder: os.close(os.open("file", os.O_RDONLY, dir_fd=folder)),
    lambda folder: os.chmod("file", 0o600, dir_fd=folder),
    lambda folder: os.stat("other", dir_fd=folder),
)
"""Calls in a folder that the program holds open."""


def a_folder_held_open_that_another_has_replaced_is_gone(here: Path, there: Path) -> None:
    for number, tried in enumerate(IN_HELD):
        place = here / f"{number}"
        (place / "sub").mkdir(parents=True)
        (place / "file").write_bytes(b"x")
        seen(there / place.name / "file")
        folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.rename(there / place.name, there / f"{number} away")
            (there / place.name).mkdir()
            for _ in range(2):
                with pytest.raises(FileNotFoundError):
                    tried(folder)
        finally:
            os.close(folder)
        catch_up(there, here)
        assert os.listdir(place) == []
        assert sorted(os.listdir(there / f"{number} away")) == ["file", "sub"]


def what_was_removed_elsewhere_stays_removed(here: Path, there: Path) -> None:
    for number in range(8):
        (here / f"removed {number}").write_bytes(b"old" * 100)
        catch_up_if(number % 2 == 0, here, there)
        descriptor = os.open(here / f"removed {number}", os.O_RDWR)
        if number < 4:
            os.pwrite(descriptor, b"new", 0)
        seen(there / f"removed {number}")
        os.unlink(there / f"removed {number}")
        os.pwrite(descriptor, b"newer", 3)
        with pytest.raises(OSError, match="Stale") as stale:
            os.close(descriptor)
        assert stale.value.errno == errno.ESTALE
        assert not os.path.lexists(there / f"removed {number}")
        eventually(lambda: not os.path.lexists(here / f"removed {number}"), "it is still shown")  # noqa: B023


def what_was_renamed_elsewhere_exists_once(here: Path, there: Path) -> None:
    (here / "folder").mkdir()
    for number in range(8):
        name = f"folder/old {number}" if number % 2 else f"old {number}"
        new = name.replace("old ", "new ")
        (here / name).write_bytes(b"old" * 100)
        descriptor = os.open(here / name, os.O_RDWR)
        os.pwrite(descriptor, b"written", 0)
        seen(there / name)
        if number == 7:
            new = "folder there/old 7"
            os.rename(there / "folder", there / "folder there")
        else:
            os.rename(there / name, there / new)
        with pytest.raises(OSError, match="Stale"):
            os.close(descriptor)
        assert not os.path.lexists(there / name)
        assert (there / new).read_bytes() == b"old" * 100


def what_was_replaced_elsewhere_is_what_is_changed(here: Path, there: Path) -> None:
    for number in range(8):
        (here / "file").write_bytes(b"first")
        assert (here / "file").stat().st_size == 5
        seen(there / "file")
        (there / "file~").write_bytes(b"another")
        os.rename(there / "file~", there / "file")
        if number % 2:
            os.unlink(here / "file")
        else:
            os.rename(here / "file", here / f"moved {number}")
            seen(there / f"moved {number}")
            assert (there / f"moved {number}").read_bytes() == b"another"
        eventually(lambda: not os.path.lexists(there / "file"), "it is still shown")


def handles_of_both_append_to_one_file(here: Path, there: Path) -> None:
    (here / "both").write_bytes(b"")
    seen(there / "both")
    for _ in range(3):
        handles = [os.open(folder / "both", os.O_WRONLY | os.O_APPEND) for folder in (here, there)]
        for number in range(6):
            os.write(handles[number % 2], b"%d\n" % number)
            if number % 3 == 2:
                os.fsync(handles[number % 2])
        for descriptor in handles:
            os.close(descriptor)
    assert sorted((there / "both").read_bytes().split()) == sorted(
        b"%d" % number for number in range(6) for _ in range(3)
    )


def a_cut_at_open_replaces_all(here: Path, there: Path) -> None:
    for number in range(ROUNDS):
        (here / "cut").write_bytes(b"here" * number)
        (there / "cut").write_bytes(b"there" * 100)
        write(here / "cut", b"new", os.O_TRUNC)
        assert (there / "cut").read_bytes() == b"new"
    os.unlink(there / "cut")
    with pytest.raises(FileNotFoundError):
        write(here / "cut", b"new", os.O_TRUNC)
    assert not os.path.lexists(there / "cut")


def attributes_changed_elsewhere_are_no_new_content(here: Path, there: Path) -> None:
    (here / "file").write_bytes(b"0123456789")
    (here / "log").write_bytes(b"first\n")
    catch_up(here, there)
    changing = os.open(here / "file", os.O_RDWR)
    appending = os.open(here / "log", os.O_WRONLY | os.O_APPEND)
    os.pwrite(changing, b"x", 4)
    os.write(appending, b"second\n")
    for name in ("file", "log"):
        os.chmod(there / name, 0o600)
        os.utime(there / name, ns=(10**18, 10**18))
        os.setxattr(there / name, "user.note", b"there")
    os.close(changing)
    os.close(appending)
    assert (there / "file").read_bytes() == b"0123x56789"
    assert (there / "log").read_bytes() == b"first\nsecond\n"


def attributes_changed_elsewhere_stay(here: Path, there: Path) -> None:
    for number in range(ROUNDS):
        (here / f"mode {number}").write_bytes(b"first\n")
        seen(there / f"mode {number}")
        os.chmod(there / f"mode {number}", 0o600)
        append(here / f"mode {number}", b"second\n")
        assert (there / f"mode {number}").stat().st_mode & 0o777 == 0o600


def catch_up_if(wanted: bool, here: Path, there: Path) -> None:
    """Wait until the other mount has seen all, or give it no time to."""
    if wanted:
        catch_up(here, there)


Check = Callable[[Path, Path], None]
CHECKS: Final[tuple[Check, ...]] = (
    an_append_keeps_what_was_closed_elsewhere,
    an_open_for_writing_finds_what_was_closed_elsewhere,
    an_open_finds_what_was_closed_elsewhere,
    a_listing_finds_what_was_closed_elsewhere,
    a_first_close_moves_the_folder_s_change_time_alone,
    what_was_made_elsewhere_exists,
    what_is_gone_elsewhere_is_made_anew,
    a_symlink_leads_where_it_was_put_elsewhere,
    nothing_is_made_in_a_folder_that_is_gone,
    a_folder_held_open_that_another_has_replaced_is_gone,
    what_was_removed_elsewhere_stays_removed,
    what_was_renamed_elsewhere_exists_once,
    what_was_replaced_elsewhere_is_what_is_changed,
    handles_of_both_append_to_one_file,
    a_cut_at_open_replaces_all,
    attributes_changed_elsewhere_are_no_new_content,
    attributes_changed_elsewhere_stay,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_two_mounts_as_one_folder(here: Path, there: Path, check: Check) -> None:
    check(here, there)


# --- work on both mounts -----------------------------------------------------------------------------------


def both(here: Path, there: Path) -> list[str]:
    """Return the folder as each rank sees it."""
    return [str(here), str(there)]


@contextmanager
def beside(worker: Worker, function: Callable[..., object], folders: list[str], stop: Path) -> Iterator[list[Any]]:
    """Context manager: the worker of rank 0 calls a function until the block ends; then its result is in the list."""
    results: list[Any] = []
    worker.start(function, 0, folders, str(stop))
    try:
        yield results
    finally:
        stop.touch()
        results.append(worker.result())


# --- what could not be stored ----------------------------------------------------------------------------


def test_bytes_of_a_removed_file_stay_in_the_staging_folder(mounts: SharedMounts, here: Path, there: Path) -> None:
    (here / "lost").write_bytes(b"old")
    descriptor = os.open(here / "lost", os.O_WRONLY | os.O_TRUNC)
    os.write(descriptor, b"written and not stored")
    seen(there / "lost")
    os.unlink(there / "lost")
    with pytest.raises(OSError, match="Stale"):
        os.close(descriptor)
    staging, name = mounts.staging(0), f"bucket/{here.name}/lost"
    eventually(lambda: "ready" in _staged(mounts, name), "it stays in use")
    mounts.served.good("staged", "restore", name, "--to", "bucket/restored", "--staging", str(staging))
    with connect(mounts.served.server) as client:
        assert client.get("bucket/restored") == b"written and not stored"


def _staged(mounts: SharedMounts, name: str) -> str:
    """Return the line that `lake staged ls` has for a name."""
    lines = mounts.served.good("staged", "ls", "--staging", str(mounts.staging(0))).lines
    return next((line for line in lines if line.endswith(name)), "")
