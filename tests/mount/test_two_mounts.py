"""Several mounts of a store: what a handle sees while another mount changes its name, and when changes are seen.

Close-to-open: what was closed on one mount is what an open on another finds, at once.  Names and attributes that a
mount's kernel remembers follow within a second; the tests wait for that and do not time it.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from tests.mount.model import POLL_S, SETTLE_S
from tests.mount.posix_calls import Caller
from tests.mount.tools import catch_up, content

IN_DELETE_SELF: Final = 0x400
_RENAME_EXCHANGE: Final = 2
pytestmark = [pytest.mark.slow, pytest.mark.fuse]


def eventually(check: Callable[[], bool], what: str) -> None:
    """Wait until the condition holds."""
    until = time.monotonic() + SETTLE_S
    while not check():
        assert time.monotonic() < until, what
        time.sleep(POLL_S)


def test_an_open_finds_what_was_closed_elsewhere_before_it(here: Path, there: Path) -> None:
    (here / "file").write_bytes(b"first")
    eventually((there / "file").exists, "the new name is not seen")
    for number in range(30):
        text = f"version {number} " * (number + 1)
        (here / "file").write_text(text)
        descriptor = os.open(there / "file", os.O_RDONLY)
        got = os.pread(descriptor, 10_000, 0)
        os.close(descriptor)
        assert got == text.encode()


@pytest.mark.parametrize("is_looked_up_anew", [False, True])
def test_an_open_behind_a_change_by_a_descriptor_that_was_refused_finds_what_was_closed_elsewhere(
    here: Path, there: Path, *, is_looked_up_anew: bool
) -> None:
    """The kernel repeats what is refused by a path, not by a descriptor: the next open is no repeat."""
    for number in range(5):
        gone, file = f"gone {number}", f"file {number}"
        (here / gone).write_bytes(b"gone")
        (here / file).write_bytes(b"old")
        eventually((there / gone).exists, "the new name is not seen")
        if not is_looked_up_anew:
            eventually((there / file).exists, "the new name is not seen")
        descriptor = os.open(there / gone, os.O_RDONLY)
        kept: list[int] = []
        other = threading.Thread(target=lambda: kept.append(os.open(there / file, os.O_RDONLY)))  # noqa: B023
        (here / gone).unlink()
        with suppress(OSError):  # none if the mount has learned of it by then
            os.fchmod(descriptor, 0o600)
        other.start()
        other.join()
        (here / file).write_bytes(b"new")
        assert (there / file).read_bytes() == b"new"
        for opened in (descriptor, *kept):
            os.close(opened)


@pytest.mark.parametrize("size", [100, 70_000, (4 << 20) + 5])
def test_an_open_handle_reads_the_old_content_whole_after_an_overwrite_elsewhere(
    here: Path, there: Path, size: int
) -> None:
    old, new = content(size, 1), content(size + 10, 2)
    (here / "file").write_bytes(old)
    catch_up(here, there)
    with (there / "file").open("rb", buffering=0) as file:
        assert file.read(10) == old[:10]
        (here / "file").write_bytes(new)
        eventually(lambda: (there / "file").read_bytes() == new, "the new content is not seen")
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(file.fileno(), 2 * size, 0) == old
    assert (there / "file").read_bytes() == new


def test_an_open_handle_survives_rename_and_unlink_elsewhere(here: Path, there: Path) -> None:
    (here / "file").write_bytes(content(300_000))
    catch_up(here, there)
    descriptor = os.open(there / "file", os.O_RDONLY)
    (here / "file").rename(here / "renamed")
    eventually(lambda: not (there / "file").exists(), "the old name is still there")
    assert os.pread(descriptor, 300_000, 0) == content(300_000)
    (here / "renamed").unlink()
    eventually(lambda: not (there / "renamed").exists(), "the unlinked name is still there")
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    assert os.pread(descriptor, 300_000, 0) == content(300_000)
    os.close(descriptor)


def test_a_reader_never_sees_old_and_new_mixed(here: Path, there: Path) -> None:
    size, rounds = 300_000, 25
    (here / "file").write_bytes(b"\0" * size)
    catch_up(here, there)
    mixed: list[str] = []
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            with (there / "file").open("rb", buffering=0) as file:
                pieces = {os.pread(file.fileno(), 4096, offset)[:1] for offset in range(0, size, 4096)}
            if len(pieces) != 1:
                mixed.append(str(pieces))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(1, rounds):
            (here / "file").write_bytes(bytes([number]) * size)
    finally:
        ended.set()
        reader.join()
    assert mixed == []


def test_the_last_of_two_writers_wins_whole(here: Path, there: Path) -> None:
    (here / "file").write_bytes(b"base" * 1000)
    catch_up(here, there)
    one = os.open(here / "file", os.O_RDWR)
    two = os.open(there / "file", os.O_RDWR)
    os.pwrite(one, b"1" * 100, 0)
    os.pwrite(two, b"2" * 100, 2000)
    os.close(one)
    os.close(two)
    expected = bytearray(b"base" * 1000)
    expected[2000:2100] = b"2" * 100
    eventually(lambda: (here / "file").read_bytes() == expected, "the last close did not win whole")
    assert (there / "file").read_bytes() == expected


def test_names_that_are_not_there_are_found_when_they_are_made_elsewhere(here: Path, there: Path) -> None:
    for number in range(5):
        path = there / f"new {number}"
        assert not path.exists()
        (here / path.name).write_bytes(b"x")
        eventually(path.exists, "a name that was not there is never found")
        assert path.read_bytes() == b"x"


def test_exclusive_creation_is_exclusive_between_mounts(here: Path, there: Path) -> None:
    for number in range(10):
        won: list[Path] = []

        def create(folder: Path, number: int = number, won: list[Path] = won) -> None:
            try:
                os.close(os.open(folder / f"lock {number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                won.append(folder)
            except FileExistsError:
                pass

        threads = [threading.Thread(target=create, args=(folder,)) for folder in (here, there) * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1


def test_folders_removed_and_made_elsewhere(here: Path, there: Path) -> None:
    (here / "d" / "e").mkdir(parents=True)
    (here / "d" / "e" / "f").write_bytes(b"1")
    catch_up(here, there)
    with pytest.raises(OSError, match="not empty") as found:
        (there / "d" / "e").rmdir()
    assert found.value.errno == errno.ENOTEMPTY
    (there / "d").rename(there / "moved")
    eventually(lambda: not (here / "d").exists(), "the folder's old name is still there")
    assert (here / "moved" / "e" / "f").read_bytes() == b"1"
    (here / "moved" / "e" / "f").unlink()
    eventually(lambda: os.listdir(there / "moved" / "e") == [], "the file is still listed")
    (there / "moved" / "e").rmdir()
    eventually(lambda: os.listdir(here / "moved") == [], "the folder is still listed")
    (here / "moved").rmdir()
    catch_up(here, there)


def test_a_folders_times_follow_the_names_in_it(here: Path, there: Path) -> None:
    def times(folder: Path) -> tuple[int, int]:
        found = (folder / "d").stat()
        return (found.st_mtime_ns, found.st_ctime_ns)

    (here / "d").mkdir()
    eventually((there / "d").exists, "the new folder is not seen")
    changes: list[Callable[[], object]] = [
        lambda: (here / "d" / "file").write_bytes(b"x"),
        lambda: (here / "d" / "file").rename(here / "d" / "other"),
        lambda: (here / "d" / "folder").mkdir(),
        lambda: (here / "d" / "other").unlink(),
    ]
    for change in changes:
        before = times(here)
        assert times(there) == before
        change()
        assert times(here) > before
        eventually(lambda: times(there) == times(here), "the folder's times are not seen")
    os.utime(here / "d", ns=(10**18, 10**18 + 1))
    eventually(lambda: times(there) == times(here), "the times that were set are not seen")


@pytest.mark.parametrize("look", ["for what is there", "for what is not there", "at all names"])
def test_a_folders_times_follow_though_a_look_into_it_found_them_first(here: Path, there: Path, look: str) -> None:
    """A look at a name in a folder also finds the folder's own times, some 20 ms before the notice of a change does."""
    for number in range(3):
        folder, seen = here / f"d{number}", there / f"d{number}"
        folder.mkdir()
        catch_up(here, there)
        before = seen.stat()
        (folder / "new").write_bytes(b"x")
        if look == "at all names":
            os.listdir(seen)
        else:
            os.path.exists(seen / ("new" if look == "for what is there" else "none"))
        assert folder.stat().st_mtime_ns > before.st_mtime_ns
        eventually(
            lambda: seen.stat().st_mtime_ns == folder.stat().st_mtime_ns,  # noqa: B023
            "the folder's times are not seen",
        )


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_mode_follows_though_an_open_found_it_first(here: Path, there: Path, size: int) -> None:
    for number in range(3):
        file, seen = here / f"f{number}", there / f"f{number}"
        file.write_bytes(content(size))
        catch_up(here, there)
        assert seen.read_bytes() == content(size)
        before = seen.stat().st_mode
        os.chmod(file, 0o600)
        assert seen.read_bytes() == content(size)
        assert file.stat().st_mode != before
        eventually(lambda: seen.stat().st_mode == file.stat().st_mode, "the mode is not seen")  # noqa: B023


def test_a_watch_with_inotify_is_told_that_what_it_watches_was_removed_elsewhere(here: Path, there: Path) -> None:
    (here / "file").write_bytes(b"x")
    (here / "folder").mkdir()
    catch_up(here, there)
    caller = Caller()
    try:
        for name in ("file", "folder"):
            caller.watch(name, str(there / name), IN_DELETE_SELF)
        (here / "file").unlink()
        (here / "folder").rmdir()
        for name in ("file", "folder"):
            eventually(lambda name=name: bool(caller.notices(name)), f"the watch of {name} is told nothing")  # type: ignore[misc]
    finally:
        caller.end()


def test_a_watch_with_inotify_is_told_of_a_removal_that_another_change_was_just_before(here: Path, there: Path) -> None:
    """The other mount looks at a name some 20 ms after the first change of it, so it may learn of both at once."""
    names = [f"file-{number}" for number in range(40)]
    for name in names:
        (here / name).write_bytes(b"x")
    catch_up(here, there)
    caller = Caller()
    try:
        for number, name in enumerate(names):
            caller.watch(name, str(there / name), IN_DELETE_SELF)
            os.utime(here / name, ns=(1, 1))
            time.sleep(0.018 + number % 7 / 1000)
            (here / name).unlink()
        for name in names:
            eventually(lambda name=name: bool(caller.notices(name)), f"the watch of {name} is told nothing")  # type: ignore[misc]
    finally:
        caller.end()


def test_attributes_follow(here: Path, there: Path) -> None:
    (here / "file").write_bytes(b"x")
    catch_up(here, there)
    os.chmod(here / "file", 0o640)
    os.utime(here / "file", ns=(10**18, 10**18 + 1))
    os.setxattr(here / "file", "user.note", b"seen")
    catch_up(here, there)
    status = (there / "file").stat()
    assert (status.st_mode & 0o7777, status.st_mtime_ns) == (0o640, 10**18 + 1)
    assert os.getxattr(there / "file", "user.note") == b"seen"


def test_an_exchange_keeps_what_is_open_and_written_and_is_seen_elsewhere(here: Path, there: Path) -> None:
    (here / "folder").mkdir()
    (here / "folder" / "in").write_bytes(b"in")
    (here / "file").write_bytes(b"file")
    catch_up(here, there)
    eventually((there / "folder" / "in").exists, "the new name is not seen")
    written = os.open(here / "file", os.O_RDWR)
    below = os.open(here / "folder" / "in", os.O_WRONLY | os.O_APPEND)
    os.write(written, b"FI")
    os.write(below, b"side")
    Caller().rename2(str(here / "file"), str(here / "folder"), _RENAME_EXCHANGE)
    assert os.pread(written, 9, 0) == b"FIle"
    assert (os.listdir(here / "file"), (here / "folder").read_bytes()) == (["in"], b"FIle")
    os.pwrite(written, b"!", 4)
    for opened in (written, below):
        os.close(opened)
    for place in (here, there):
        eventually((place / "folder").is_file, "the exchange is not seen")
        assert ((place / "folder").read_bytes(), (place / "file" / "in").read_bytes()) == (b"FIle!", b"inside")
