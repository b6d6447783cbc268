"""Hot files on real mounts: what the kernel reads by itself is what the mount would have answered.

The model of system calls runs with every file hot at its first open (`hot_forced`); the other tests hold the rules of
the kernel, writers and mappings beside readers, and changes made elsewhere.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

from lakefs.client.connect import connect
from lakefs.host.page_cache import is_cached
from lakefs.limits import GRANULE_BYTES, MIB, PAGE_BYTES
from tests.lengths import repeated
from tests.mount.hot_mounts import FILLED, SIZE, asked, forced_mounts, passes_through
from tests.mount.hunt import hunt
from tests.mount.model import Ground
from tests.mount.mounts import LakeMounts, lake
from tests.mount.place import pattern
from tests.mount.shared import load
from tests.mount.tools import catch_up, place_of
from tests.served_devices import SEGMENTS

pytestmark = [pytest.mark.slow, pytest.mark.fuse]

SEQUENCES: Final = int(os.environ.get("MOUNT_SEQUENCES", "0")) or repeated(20, 60)
WAIT_S: Final = 20.0
_numbers = itertools.count()


@pytest.fixture(scope="module")
def forced() -> Iterator[LakeMounts]:
    """Two mounts on which every file is hot at its first open."""
    with forced_mounts(mounts=2) as mounted:
        yield mounted


@pytest.fixture(scope="module")
def plain_hot(forced: LakeMounts) -> Iterator[LakeMounts]:
    """One mount with the rules of every mount."""
    with TemporaryDirectory(prefix="lake-") as path, lake(Path(path), any_way=False) as mounted:
        yield mounted


@pytest.fixture
def here(forced: LakeMounts, request: pytest.FixtureRequest) -> Path:
    """A new folder on the first mount."""
    folder = forced.folders[0] / f"{next(_numbers)} {str(request.node.name)[:60]}"
    folder.mkdir()
    return folder


@pytest.fixture
def there(forced: LakeMounts, here: Path) -> Path:
    """The same folder on the second mount."""
    return forced.folders[1] / here.name


def eventually(true: Callable[[], bool]) -> bool:
    """Wait for it, not for ever."""
    until = time.monotonic() + WAIT_S
    while not true():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


# --- the model ---------------------------------------------------------------------------------------------


def test_a_mount_with_hot_files_is_as_a_local_disk(forced: LakeMounts, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    ground = Ground(tmp_path / "plain", (forced.folders[0],))
    found = [finding.script() for finding in hunt(range(20_000, 20_000 + SEQUENCES), ground, "h") if finding]
    assert found == []
    assert FILLED in forced.mounts[0].log.read_text()


def test_two_mounts_with_hot_files_show_what_was_closed_on_one(forced: LakeMounts, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    ground = Ground(tmp_path / "plain", tuple(forced.folders))
    found = [finding.script() for finding in hunt(range(30_000, 30_000 + SEQUENCES), ground, "h") if finding]
    assert found == []


# --- rules of the kernel -----------------------------------------------------------------------------------


def test_eight_first_opens_at_once_all_pass_through(forced: LakeMounts, here: Path) -> None:
    content = os.urandom(SIZE)
    (here / "x").write_bytes(content)

    def read(_: int) -> bool:
        with (here / "x").open("rb", buffering=0) as file:
            return b"".join(iter(lambda: file.read(MIB), b"")) == content

    with ThreadPoolExecutor(8) as threads:
        for _ in range(5):
            assert all(threads.map(read, range(8)))
    with (here / "x").open("rb") as file:
        assert passes_through(forced, file.fileno())


def test_an_open_of_a_hot_file_that_others_overwrite_finds_it_whole(
    forced: LakeMounts, here: Path, tmp_path: Path
) -> None:
    (here / "file").write_bytes(pattern(1, load.SAVED_BYTES))
    with ThreadPoolExecutor(1) as threads, connect(forced.served.server) as client:
        reading = threads.submit(load.read_beside, 0, [str(here)], str(tmp_path / "stop"))
        for number in range(repeated(100, 300)):
            client.put(f"bucket/{here.name}/file", pattern(number % 50 + 1, load.SAVED_BYTES))
            time.sleep(0.01)
        (tmp_path / "stop").touch()
        opened, wrong = reading.result()
    assert wrong == [], f"{len(wrong)} of {opened}"
    assert opened > 20, "there was something to fail"


def test_handles_that_are_opened_at_once_all_pass_through(forced: LakeMounts, here: Path) -> None:
    (here / "x").write_bytes(bytes(SIZE))
    (here / "x").read_bytes()
    together = threading.Barrier(8)

    def opened(_: int) -> int:
        together.wait()
        return os.open(here / "x", os.O_RDONLY)

    with ThreadPoolExecutor(8) as threads:
        for _ in range(10):
            descriptors = list(threads.map(opened, range(8)))
            assert all(passes_through(forced, descriptor) for descriptor in descriptors)
            for descriptor in descriptors:
                os.close(descriptor)


def test_a_file_that_is_open_in_the_page_cache_passes_through_at_the_next_open_with_none_left(
    plain_hot: LakeMounts,
) -> None:
    path, content = plain_hot.folders[0] / "cached", os.urandom(SIZE)
    path.write_bytes(content)
    first = os.open(path, os.O_RDONLY)
    second = os.open(path, os.O_RDONLY)
    assert eventually(lambda: FILLED in plain_hot.mounts[0].log.read_text())
    third = os.open(path, os.O_RDONLY)
    for descriptor in (first, second, third):
        assert os.pread(descriptor, SIZE, 0) == content
        assert not passes_through(plain_hot, descriptor)
    memory = mmap.mmap(first, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    for descriptor in (first, second, third):
        os.close(descriptor)
    with path.open("rb") as file:  # the mapping still is of the page cache
        assert not passes_through(plain_hot, file.fileno())
    assert memory[:] == content
    memory.close()
    assert eventually(lambda: _opened_passes_through(plain_hot, path))
    assert path.read_bytes() == content


@pytest.mark.one_engine(SEGMENTS)
def test_memory_has_a_hot_file_once() -> None:
    """Memory that was read to fill it is given up: the place in the store, and the pages of the mount.

    On an engine without a DRAM tier: that takes the chunk at its second read, sometimes before it is read to fill the
    hot file, and what is read from there leaves the pages of earlier reads where they are.
    """
    without_tier = ("--dram-tier-bytes", "0")
    with TemporaryDirectory(prefix="lake-") as path, lake(Path(path), any_way=False, engine=without_tier) as mounts:
        memory_has_a_hot_file_once(mounts)


def memory_has_a_hot_file_once(mounts: LakeMounts) -> None:
    path, content = mounts.folders[0] / "once", os.urandom(4 * MIB)  # one chunk
    path.write_bytes(content)
    before = mounts.mounts[0].log.read_text().count(FILLED)
    place, offset = place_of(mounts.served.data, content[:512])
    with place.open("rb") as segment, path.open("rb") as first:
        assert first.read() == content
        segment.seek(offset)
        assert segment.read(len(content)) == content
        assert is_cached(segment.fileno(), offset, len(content)) is not False
    with path.open("rb"):  # a second time; what is read while it is filled may be cached again
        pass
    assert eventually(lambda: mounts.mounts[0].log.read_text().count(FILLED) > before)
    with place.open("rb") as segment:
        assert eventually(lambda: not _cached_pages(segment.fileno(), offset, len(content)))
    with path.open("rb") as file:
        assert not _cached_pages(file.fileno(), 0, len(content))
        assert passes_through(mounts, file.fileno())
        assert file.read() == content


def _cached_pages(descriptor: int, offset: int, length: int) -> int:
    """Return how many pages of a range are cached; 0 too where the kernel does not say."""
    pages = range(offset - offset % PAGE_BYTES, offset + length, PAGE_BYTES)
    return sum(is_cached(descriptor, page, PAGE_BYTES) is True for page in pages)


def _opened_passes_through(mounts: LakeMounts, path: Path) -> bool:
    with path.open("rb") as file:
        return passes_through(mounts, file.fileno())


def test_two_files_of_one_content_are_two(forced: LakeMounts, here: Path, there: Path) -> None:
    content = os.urandom(SIZE)
    for name in ("a", "b"):
        (here / name).write_bytes(content)
    with (here / "a").open("rb") as first, (here / "b").open("rb") as second:
        assert passes_through(forced, first.fileno())
        with (here / "a").open("r+b", buffering=0) as writing:
            os.pwrite(writing.fileno(), b"changed", 100_000)
        assert os.pread(first.fileno(), 7, 100_000) == b"changed"
        assert os.pread(second.fileno(), SIZE, 0) == content
    assert (here / "b").read_bytes() == content
    catch_up(here, there)
    assert (there / "b").read_bytes() == content
    assert (there / "a").read_bytes() == content[:100_000] + b"changed" + content[100_007:]


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND, os.O_RDWR | os.O_TRUNC])
def test_a_writer_beside_readers_is_seen_by_them_and_stored(
    forced: LakeMounts, here: Path, there: Path, flags: int
) -> None:
    expected = bytearray(os.urandom(SIZE))
    (here / "x").write_bytes(expected)
    with (here / "x").open("rb", buffering=0) as reading:
        assert passes_through(forced, reading.fileno())
        memory = mmap.mmap(reading.fileno(), SIZE, mmap.MAP_SHARED, mmap.PROT_READ)
        writing = os.open(here / "x", flags)
        if flags & os.O_TRUNC:
            del expected[:]
        for offset, data in ((70_000, b"within"), (SIZE + 5000, b"behind the end")):
            at = len(expected) if flags & os.O_APPEND else offset
            assert os.pwrite(writing, data, offset) == len(data)
            expected.extend(bytes(max(0, at + len(data) - len(expected))))
            expected[at : at + len(data)] = data
            assert os.pread(reading.fileno(), 2 * SIZE, 0) == expected
        assert memory[:SIZE] == expected[:SIZE]
        os.ftruncate(writing, SIZE // 2)
        del expected[SIZE // 2 :]
        assert os.pread(reading.fileno(), 2 * SIZE, 0) == expected
        os.close(writing)
        memory.close()
        with (here / "x").open("rb") as again:
            assert again.read() == expected
    catch_up(here, there)
    assert (there / "x").read_bytes() == (here / "x").read_bytes() == expected


def test_a_read_only_backing_is_not_written_through(forced: LakeMounts, here: Path) -> None:
    """The kernel opens a backing file with the handle's flags: what a writer does has to come by the mount."""
    (here / "x").write_bytes(bytes(SIZE))
    with (here / "x").open("rb", buffering=0) as reading, (here / "x").open("r+b", buffering=0) as writing:
        assert passes_through(forced, reading.fileno())
        before = asked(forced)
        writing.write(b"x" * MIB)
        assert asked(forced) - before > MIB
    assert (here / "x").read_bytes() == b"x" * MIB + bytes(SIZE - MIB)


@pytest.mark.parametrize("ends", ["before", "after"])
def test_a_mapping_that_writes_beside_readers_is_seen_and_stored(
    forced: LakeMounts, here: Path, there: Path, ends: str
) -> None:
    expected = bytearray(os.urandom(SIZE))
    (here / "x").write_bytes(expected)
    with (here / "x").open("rb", buffering=0) as reading:
        assert passes_through(forced, reading.fileno())
        descriptor = os.open(here / "x", os.O_RDWR)
        memory = mmap.mmap(descriptor, SIZE)
        for offset in (0, GRANULE_BYTES - 1, 1 * MIB, SIZE - 3):
            memory[offset : offset + 3] = expected[offset : offset + 3] = b"new"
        assert os.pread(descriptor, SIZE, 0) == expected
        os.pwrite(descriptor, b"both", 1 * MIB + 1)
        expected[1 * MIB + 1 : 1 * MIB + 5] = b"both"
        assert memory[:] == os.pread(reading.fileno(), SIZE, 0) == expected
        os.fsync(descriptor)
        catch_up(here, there)
        assert (there / "x").read_bytes() == expected
        if ends == "after":
            os.close(descriptor)
        memory[500:504] = expected[500:504] = b"late"
        memory.close()
        if ends == "before":
            os.close(descriptor)
        assert os.pread(reading.fileno(), SIZE, 0) == expected
    assert eventually(lambda: (there / "x").read_bytes() == expected)
    assert (here / "x").read_bytes() == expected


def test_a_mapping_that_outlives_its_handle_sees_later_writers(forced: LakeMounts, here: Path) -> None:
    (here / "x").write_bytes(bytes(SIZE))
    with _mapped_alone(forced, here / "x", os.O_RDONLY) as memory:
        with (here / "x").open("r+b") as writing:
            writing.write(b"later")
        os.truncate(here / "x", SIZE - 1)
        assert bytes(memory()[:6]) == b"later\0"
    assert (here / "x").read_bytes() == b"later" + bytes(SIZE - 6)


def test_a_mapping_that_writes_when_no_handle_is_left_is_stored_when_it_ends(
    forced: LakeMounts, here: Path, there: Path
) -> None:
    expected = bytearray(os.urandom(SIZE))
    (here / "x").write_bytes(expected)
    with ExitStack() as stack:
        with (here / "x").open("rb") as reading:
            assert passes_through(forced, reading.fileno())
            memory = stack.enter_context(_mapped_alone(forced, here / "x", os.O_RDWR))
        memory()[2 * MIB : 2 * MIB + 4] = expected[2 * MIB : 2 * MIB + 4] = b"late"
        assert (here / "x").read_bytes() == expected
        memory()[:5] = expected[:5] = b"later"
    assert eventually(lambda: (there / "x").read_bytes() == expected)
    assert (here / "x").read_bytes() == expected


def test_what_was_overwritten_elsewhere_is_new_beside_a_mapping_of_what_was_there(
    forced: LakeMounts, here: Path, there: Path
) -> None:
    (here / "x").write_bytes(b"old" + bytes(SIZE))
    with _mapped_alone(forced, here / "x", os.O_RDONLY) as memory:
        for content in (b"new" + bytes(SIZE), b"shorter", b"newest" + bytes(SIZE)):
            (there / "x").write_bytes(content)  # and not noticed yet: the kernel opens the inode that it knows
            assert (here / "x").read_bytes() == content
            assert bytes(memory()[:3]) == b"old"
    assert (here / "x").read_bytes() == content


@contextmanager
def _mapped_alone(mounts: LakeMounts, path: Path, flags: int) -> Iterator[Callable[[], memoryview]]:
    """Map all of a file, shared, and close the handle, which `mmap.mmap` would keep.  Yields what shows the bytes."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (*[ctypes.c_void_p] * 2, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    descriptor = os.open(path, flags)
    try:
        assert flags == os.O_RDWR or passes_through(mounts, descriptor)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if flags == os.O_RDWR else 0)
        address = libc.mmap(None, SIZE, protection, mmap.MAP_SHARED, descriptor, 0)
    finally:
        os.close(descriptor)
    assert address is not None
    assert address != ctypes.c_void_p(-1).value
    try:
        yield lambda: memoryview((ctypes.c_char * SIZE).from_address(address)).cast("B")
    finally:
        assert libc.munmap(address, SIZE) == 0


# --- other clients, names ----------------------------------------------------------------------------------


def test_what_was_overwritten_or_removed_elsewhere_is_new_at_the_next_open(
    forced: LakeMounts, here: Path, there: Path
) -> None:
    for number in range(6):
        content = bytes([number]) * SIZE
        (there / "x").write_bytes(content)
        catch_up(there, here)
        with (here / "x").open("rb") as first:
            assert passes_through(forced, first.fileno())
            (there / "x").write_bytes(b"other" * MIB)
            catch_up(there, here)
            assert (here / "x").read_bytes() == b"other" * MIB
            assert os.pread(first.fileno(), SIZE, 0) == content
            (there / "x").unlink()
            catch_up(there, here)
            with pytest.raises(FileNotFoundError):
                (here / "x").open("rb")
            assert os.pread(first.fileno(), SIZE, 0) == content


def test_a_hot_file_that_is_renamed_over_and_unlinked_stays_readable(forced: LakeMounts, here: Path) -> None:
    (here / "x").write_bytes(b"x" * SIZE)
    (here / "y").write_bytes(b"y" * SIZE)
    with (here / "x").open("rb") as first, (here / "y").open("rb") as second:
        assert passes_through(forced, first.fileno())
        (here / "y").rename(here / "x")
        assert (here / "x").read_bytes() == b"y" * SIZE
        (here / "x").unlink()
        assert os.pread(first.fileno(), SIZE, 0) == b"x" * SIZE
        assert os.pread(second.fileno(), SIZE, 0) == b"y" * SIZE
