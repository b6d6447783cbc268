"""A file that grows elsewhere, beside its readers here: `tail`, handles, mappings; and one that changes otherwise.

A handle follows what is appended to its file on another mount.  After any other change it keeps its content.  `st_ino`
stays that of the name's node.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lakefs.limits import MIB
from tests.mount.commits import Mapped
from tests.mount.mounts import LakeMounts, lake
from tests.mount.test_two_mounts import eventually
from tests.mount.tools import catch_up, content, need

pytestmark = [pytest.mark.slow, pytest.mark.fuse]
SIZES = [0, 1, 100, 4095, 4096, 65_536, 70_000, 3 * MIB + 5, 4 * MIB, 9 * MIB + 7]


@contextmanager
def tailing(*command: str | Path) -> Iterator[Path]:
    """Run `tail` in the block; give the file that it prints to."""
    output = Path(os.environ.get("TMPDIR", "/tmp")) / f"tail-{os.getpid()}-{time.monotonic_ns()}"
    with output.open("wb") as printed:
        process = subprocess.Popen(["tail", *map(str, command)], stdout=printed, stderr=printed)
    try:
        yield output
    finally:
        process.kill()
        process.wait()
        output.unlink()


def append(path: Path, data: bytes) -> None:
    """Append to a file, and close it."""
    with path.open("ab", buffering=0) as file:
        file.write(data)


def wait_for_length(file: Path | int, length: int) -> None:
    """Wait until a file, or a handle, has this length."""
    eventually(lambda: os.stat(file).st_size == length, "the new length is not seen")


def wait_for_content(file: Path, expected: bytes) -> None:
    """Wait until a file has this content."""
    eventually(lambda: file.read_bytes() == expected, "the new content is not seen")


@pytest.mark.parametrize("way", ["-F", "-f"])
@pytest.mark.parametrize("size", [0, 20, 70_000, 5 * MIB])
def test_tail_prints_what_is_appended_elsewhere_once(here: Path, there: Path, way: str, size: int) -> None:
    need("tail")
    log, seen = here / "log", there / "log"
    log.write_bytes(content(size))
    catch_up(here, there)
    first = seen.stat()
    with tailing(way, "-c", "+1", "-s", "0.1", seen) as output:
        expected = content(size)
        wait_for_content(output, expected)
        for number in range(8):
            append(log, b"line %d\n" % number)
            expected += b"line %d\n" % number
            if number % 2:
                os.listdir(there)
                wait_for_length(seen, len(expected))
            wait_for_content(output, expected)
        time.sleep(1.5)  # tail compares name and descriptor after some looks
        assert output.read_bytes() == expected
    last = seen.stat()
    assert (last.st_ino, last.st_size) == (first.st_ino, len(expected))
    assert last.st_mtime_ns > first.st_mtime_ns


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
def test_a_handle_follows_what_is_appended_elsewhere(here: Path, there: Path, size: int, flags: int) -> None:
    file, expected = here / "file", content(size)
    file.write_bytes(expected)
    catch_up(here, there)
    descriptor = os.open(there / "file", flags)
    try:
        before = os.fstat(descriptor)
        assert os.pread(descriptor, 10 * MIB, 0) == expected
        for number, length in enumerate((3, 5000, 70_000, 2 * MIB)):
            added = content(length, number + 2)
            append(file, added)
            expected += added
            wait_for_length(descriptor, len(expected))
            assert os.pread(descriptor, 20 * MIB, 0) == expected
            assert os.fstat(descriptor).st_mtime_ns == file.stat().st_mtime_ns
        assert os.fstat(descriptor).st_ino == before.st_ino == (there / "file").stat().st_ino
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("size", [100, 70_000, 5 * MIB])
def test_a_handle_keeps_its_content_after_any_other_change(here: Path, there: Path, size: int) -> None:
    old = content(size)
    file = here / "file"

    def changed_last(data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1])

    changes = [old[:-1], content(size, 2) + b"longer", changed_last(old) + b"longer", changed_last(old), b""]
    for number, new in enumerate(changes):
        file.write_bytes(old)
        catch_up(here, there)
        descriptor = os.open(there / "file", os.O_RDONLY)
        number_before = os.fstat(descriptor).st_ino
        assert os.pread(descriptor, 10, 0) == old[:10]
        if number % 2:
            with file.open("r+b") as opened:  # the same node, and no other in between
                opened.write(new)
                opened.truncate()
        else:
            file.write_bytes(new)
        wait_for_content(there / "file", new)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(descriptor, 2 * size, 0) == old
        assert os.fstat(descriptor).st_size == size
        assert (there / "file").stat().st_ino == number_before == os.fstat(descriptor).st_ino
        os.close(descriptor)


def test_another_node_of_the_name_has_another_number(here: Path, there: Path) -> None:
    file = here / "file"
    file.write_bytes(b"first")
    catch_up(here, there)
    with (there / "file").open("rb") as opened:
        number = os.fstat(opened.fileno()).st_ino
        (here / "other").write_bytes(b"first and more")
        (here / "other").rename(file)
        wait_for_content(there / "file", b"first and more")
        assert (there / "file").stat().st_ino != number
        assert opened.read() == b"first"


def test_a_file_made_here_and_grown_elsewhere_keeps_its_number(here: Path, there: Path) -> None:
    file = here / "file"
    with file.open("w+b", buffering=0) as opened:
        opened.write(b"first, ")
        number = os.fstat(opened.fileno()).st_ino
        os.fsync(opened.fileno())
        eventually((there / "file").exists, "the new name is not seen")
        append(there / "file", b"second, ")
        wait_for_length(opened.fileno(), 15)
        assert os.pread(opened.fileno(), 100, 0) == b"first, second, "
        os.pwrite(opened.fileno(), b"third", 15)
    assert file.read_bytes() == b"first, second, third"
    assert file.stat().st_ino == number
    wait_for_content(there / "file", b"first, second, third")
    with file.open("rb") as opened:
        (there / "file").write_bytes(b"anew")
        wait_for_content(file, b"anew")
        assert file.stat().st_ino == number == os.fstat(opened.fileno()).st_ino


def test_a_mapping_and_cached_pages_follow(here: Path, there: Path) -> None:
    file, expected = here / "file", content(5000)
    file.write_bytes(expected)
    catch_up(here, there)
    with (there / "file").open("rb", buffering=0) as opened:
        assert opened.read() == expected
        for number in range(30):
            added = content(300, number)
            append(file, added)
            expected += added
            wait_for_length(opened.fileno(), len(expected))
            assert os.pread(opened.fileno(), 20_000, 0) == expected
            with mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapping:
                assert mapping[:] == expected


@pytest.mark.parametrize("length", [7, 5000])
def test_a_reader_beside_appends_elsewhere_reads_every_byte_once(here: Path, there: Path, length: int) -> None:
    file, lines = here / "file", [content(length, number) for number in range(100)]
    file.write_bytes(b"")
    catch_up(here, there)
    expected, found = b"".join(lines), bytearray()

    def write() -> None:
        for line in lines:
            append(file, line)

    with (there / "file").open("rb", buffering=0) as opened:
        writer = threading.Thread(target=write)
        writer.start()
        until = time.monotonic() + 60
        while len(found) < len(expected) and time.monotonic() < until:
            found += opened.read(3000)
            assert expected.startswith(found)
            assert os.pread(opened.fileno(), len(expected), 0)[: len(found)] == found
        writer.join()
    assert found == expected


@pytest.fixture(scope="module")
def hot(short_folder: Path) -> Iterator[LakeMounts]:
    """Run two mounts on which every file is hot at its first open."""
    folder = short_folder / "hot"
    folder.mkdir()
    with lake(folder, "-o", "hot_forced", mounts=2, any_way=False) as mounted:
        yield mounted


@pytest.mark.parametrize("size", [100, 70_000, 5 * MIB])
def test_a_hot_file_follows_too_unless_a_mapping_may_have_written_to_it(hot: LakeMounts, size: int) -> None:
    here, there = (folder / f"folder {size}" for folder in hot.folders)
    here.mkdir()
    file, expected = here / "file", content(size)
    file.write_bytes(expected)
    catch_up(here, there)
    with (there / "file").open("rb"), (there / "file").open("rb", buffering=0) as opened:
        for number in range(5):
            added = content(30_000, number)
            append(file, added)
            expected += added
            wait_for_length(opened.fileno(), len(expected))
            assert os.pread(opened.fileno(), 10 * MIB, 0) == expected
            with mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapping:
                assert mapping[:] == expected
        with (there / "file").open("r+b") as writer:
            mapped = Mapped(writer.fileno(), 4096)
            append(file, b"more")
            wait_for_content(there / "file", expected + b"more")
            assert os.pread(opened.fileno(), 10 * MIB, 0) == expected
            mapped.close()


@pytest.mark.parametrize("size", [100, 70_000, 5 * MIB])
def test_what_is_appended_to_a_hot_file_goes_behind_what_was_appended_elsewhere(hot: LakeMounts, size: int) -> None:
    here, there = (folder / f"both {size}" for folder in hot.folders)
    here.mkdir()
    file, expected = here / "file", content(size)
    file.write_bytes(expected)
    catch_up(here, there)
    with (there / "file").open("rb"), (there / "file").open("rb", buffering=0) as opened:
        for number in range(5):
            with (there / "file").open("ab", buffering=0) as writer:
                writer.write(b"mine %d" % number)
                theirs = content(30_000, number)
                append(file, theirs)
            expected += theirs + b"mine %d" % number
            assert (there / "file").read_bytes() == expected
            assert os.pread(opened.fileno(), 10 * MIB, 0) == expected
            assert os.fstat(opened.fileno()).st_size == len(expected)
            wait_for_content(file, expected)


def test_what_is_appended_to_a_hot_file_that_is_overwritten_elsewhere_stays_staged(hot: LakeMounts) -> None:
    here, there = (folder / "overwritten" for folder in hot.folders)
    here.mkdir()
    file, before = here / "file", content(100_000)
    file.write_bytes(before)
    catch_up(here, there)
    with (there / "file").open("rb"), (there / "file").open("rb", buffering=0) as opened:
        writer = os.open(there / "file", os.O_WRONLY | os.O_APPEND)
        os.write(writer, b"mine")
        file.write_bytes(b"other")
        with pytest.raises(OSError, match="Stale"):
            os.close(writer)
        assert os.pread(opened.fileno(), MIB, 0) == before + b"mine"
    wait_for_content(there / "file", b"other")
    wait_for_content(file, b"other")
