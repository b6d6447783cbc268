"""Mounts whose reads native threads answer, beside mounts without: the same bytes, the same errors, the same end."""

from __future__ import annotations

import errno
import mmap
import os
import random
import re
import resource
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from bench.harness.mounts import forget_pages_below
from fuse.native import layer
from lakefs import connect
from lakefs.limits import GRANULE_BYTES, KIB, MIB
from tests.mount.mounts import LakeMounts, lake
from tests.mount.tools import spoil
from tests.served_devices import DEVICES, HEALS, SEGMENTS

pytestmark = pytest.mark.fuse
SIZE = 9 * MIB + 12_345
PAGE = mmap.PAGESIZE
needs_native = pytest.mark.skipif(not layer.IS_BUILT, reason="the native module is not built")


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for a socket in it, on a disk."""
    with TemporaryDirectory(prefix="lake-", dir="/var/tmp") as path:
        yield Path(path)


def native_reads(mounts: LakeMounts) -> int:
    """End the first mount; return how many reads its native threads have answered, as its log says."""
    assert mounts.mounts[0].end() == 0
    found = re.search(r" reads=(\d+)", mounts.mounts[0].log.read_text())
    return int(found[1]) if found else 0


def are_read_natively(mounts: LakeMounts, least: int) -> bool:
    """End the first mount; return True if its native threads have answered more reads: of a lake they answer none."""
    return native_reads(mounts) > (-1 if DEVICES else least)


def read_past_cache(descriptor: int, offset: int, size: int) -> bytes:
    """Read with a handle opened with O_DIRECT; whole pages."""
    with mmap.mmap(-1, size) as memory:
        return memory[: os.preadv(descriptor, [memory], offset)]


@pytest.mark.parametrize("native", ["on", "off"])
def test_random_reads_of_many_threads_are_right(short: Path, native: str) -> None:
    content = random.Random(1).randbytes(SIZE)
    wrong: list[str] = []

    def read(seed: int) -> None:
        chosen = random.Random(seed)
        descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if seed % 2 else 0))
        for _ in range(250):
            size = chosen.choice((PAGE, 3 * PAGE, 16 * PAGE, 80 * PAGE, MIB))
            offset = chosen.randrange(SIZE // PAGE + 2) * PAGE
            if read_past_cache(descriptor, offset, size) != content[offset : offset + size]:
                wrong.append(f"{size} bytes at {offset}")
        os.close(descriptor)

    with lake(short, "-o", f"native={native}", any_way=False) as mounts:
        path = mounts.folders[0] / "file"
        with connect(mounts.served.server) as client:
            client.put("bucket/file", content)
        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert (native_reads(mounts) > 500) is (native == "on" and layer.IS_BUILT and not DEVICES)


@needs_native
def test_a_write_is_seen_by_every_handle_as_soon_as_it_has_returned(short: Path) -> None:
    """Reads under way do not delay it, and none that begins afterwards is answered with what was there before."""
    with lake(short, any_way=False) as mounts, connect(mounts.served.server) as client:
        path = mounts.folders[0] / "file"
        for number in range(25):
            old = random.Random(number).randbytes(2 * MIB)
            client.put("bucket/file", old)
            readers = [os.open(path, os.O_RDONLY | os.O_DIRECT) for _ in range(3)]
            writer = os.open(path, os.O_WRONLY)
            for descriptor in readers * 2:
                assert read_past_cache(descriptor, 0, MIB) == old[:MIB]
            written = threading.Event()
            seen: list[tuple[bool, bytes]] = []

            def read(descriptor: int, written: threading.Event, seen: list[tuple[bool, bytes]]) -> None:
                for _ in range(40):
                    was_written = written.is_set()
                    seen.append((was_written, read_past_cache(descriptor, 0, PAGE)))

            threads = [threading.Thread(target=read, args=(each, written, seen)) for each in readers]
            for thread in threads:
                thread.start()
            if number % 2:
                os.pwrite(writer, b"new " * 1024, 0)
                new = b"new " * 1024
            else:
                os.ftruncate(writer, 5)
                new = old[:5]
            written.set()
            for thread in threads:
                thread.join()
            assert {found for was_written, found in seen if was_written} <= {new}
            # A read beside a truncation may find its zeros behind the new end: ext4 and tmpfs give them, too.
            assert {found for was_written, found in seen} <= {new, old[:PAGE], new.ljust(PAGE, b"\0")}
            os.close(writer)
            for descriptor in readers:
                assert read_past_cache(descriptor, 0, PAGE) == new
                os.close(descriptor)
        assert are_read_natively(mounts, 100)


@needs_native
def test_an_open_handle_keeps_its_content_and_the_next_open_sees_the_new_one(short: Path) -> None:
    old, new = random.Random(2).randbytes(SIZE), random.Random(3).randbytes(SIZE)
    with (
        lake(short, "-o", "attr_timeout=0,entry_timeout=0", any_way=False) as mounts,
        connect(mounts.served.server) as client,
    ):
        path = mounts.folders[0] / "file"
        client.put("bucket/file", old)
        before = os.open(path, os.O_RDONLY | os.O_DIRECT)
        assert _whole(before) == old == _whole(before)
        client.put("bucket/file", new)
        client.gc()
        after = os.open(path, os.O_RDONLY | os.O_DIRECT)
        assert _whole(after) == new
        assert _whole(before) == old
        client.remove("bucket/file")
        client.gc()
        assert _whole(before) == old
        assert _whole(after) == new
        os.close(before)
        client.gc()
        assert _whole(after) == new
        os.close(after)
        assert are_read_natively(mounts, 20)


def _whole(descriptor: int) -> bytes:
    return b"".join(read_past_cache(descriptor, at, MIB) for at in range(0, SIZE + MIB, MIB))[:SIZE]


@needs_native
@pytest.mark.one_engine(HEALS)
@pytest.mark.parametrize("size", [PAGE, GRANULE_BYTES, MIB])
def test_damage_after_a_range_was_read_natively_is_an_error_of_its_range_only(short: Path, size: int) -> None:
    content = random.Random(4).randbytes(SIZE)
    with lake(short, any_way=False) as mounts, connect(mounts.served.server) as client:
        client.put("bucket/file", content)
        descriptor = os.open(mounts.folders[0] / "file", os.O_RDONLY | os.O_DIRECT)
        spoiled = 4 * MIB + 5 * GRANULE_BYTES
        for at in (spoiled, spoiled, 0, MIB):
            assert read_past_cache(descriptor, at, size) == content[at : at + size]
        spoil(mounts.served.data, content[spoiled : spoiled + 64])
        for _ in range(3):
            with pytest.raises(OSError, match="Input/output") as failed:
                read_past_cache(descriptor, spoiled, size)
            assert failed.value.errno == errno.EIO
            assert read_past_cache(descriptor, 0, size) == content[:size]
            assert read_past_cache(descriptor, 6 * MIB, size) == content[6 * MIB : 6 * MIB + size]
        client.put("bucket/file", content)
        again = os.open(mounts.folders[0] / "file", os.O_RDONLY | os.O_DIRECT)
        assert _whole(again) == content
        os.close(descriptor)
        os.close(again)
        assert native_reads(mounts) > 5


@needs_native
@pytest.mark.one_engine(SEGMENTS)
def test_what_has_left_memory_is_read_all_the_same(short: Path) -> None:
    """Native threads wait for no disk: those reads are Python's, and then native again."""
    content = random.Random(7).randbytes(2 * MIB)
    with lake(short, any_way=False) as mounts, connect(mounts.served.server) as client:
        client.put("bucket/file", content)
        descriptor = os.open(mounts.folders[0] / "file", os.O_RDONLY | os.O_DIRECT)
        for size in (PAGE, GRANULE_BYTES, MIB) * 3:
            for _ in range(5):
                assert read_past_cache(descriptor, MIB, size) == content[MIB : MIB + size]
            forget_pages_below(mounts.served.data)
        os.close(descriptor)
        # Four of five; 24 would be without one of the sizes.  The kernel may reclaim pages between two reads.
        assert native_reads(mounts) > 27
        not_cached = re.search(r" not_cached=(\d+)", mounts.mounts[0].log.read_text())
        assert not_cached is not None
        assert int(not_cached[1]) >= 3  # of 9: the kernel keeps pages that somebody has in hand when it is asked


@needs_native
@pytest.mark.slow
@pytest.mark.one_engine(SEGMENTS)
def test_ten_thousand_handles_are_read_natively(short: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(10_000, before[1] - 500)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    content = random.Random(5).randbytes(2 * MIB)
    try:
        with lake(short, any_way=False) as mounts, connect(mounts.served.server) as client:
            client.put("bucket/file", content)
            opened = [os.open(mounts.folders[0] / "file", os.O_RDONLY | os.O_DIRECT) for _ in range(count)]
            for _ in range(2):
                for number, descriptor in enumerate(opened):
                    at = number % 512 * PAGE
                    assert read_past_cache(descriptor, at, PAGE) == content[at : at + PAGE]
            for descriptor in opened:
                os.close(descriptor)
            assert native_reads(mounts) >= count
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def connections(tmp_path: Path) -> Iterator[Path]:
    """The kernel's table of FUSE connections."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount fusectl")
    subprocess.run(["mount", "-t", "fusectl", "none", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("native", ["on", "off"])
def test_an_aborted_connection_ends_the_mount(short: Path, connections: Path, native: str) -> None:
    with lake(short, "-o", f"native={native}", any_way=False) as mounts, _reading(mounts) as failed:
        number = os.minor(os.stat(mounts.folders[0]).st_dev)
        (connections / str(number) / "abort").write_text("1")
        assert mounts.mounts[0].process.wait(30) == 0, mounts.mounts[0].log.read_text()
        assert failed() in (errno.ENOTCONN, errno.ECONNABORTED)


@pytest.mark.parametrize("native", ["on", "off"])
def test_a_killed_mount_is_an_error_for_its_readers_and_the_next_one_works(short: Path, native: str) -> None:
    with lake(short, "-o", f"native={native}", any_way=False) as mounts, _reading(mounts) as failed:
        mounts.mounts[0].process.send_signal(signal.SIGKILL)
        assert mounts.mounts[0].process.wait(30) == -signal.SIGKILL
        assert failed() in (errno.ENOTCONN, errno.ECONNABORTED)


@pytest.mark.parametrize("native", ["on", "off"])
def test_a_mount_that_is_told_to_end_under_readers_ends_in_order(short: Path, native: str) -> None:
    with lake(short, "-o", f"native={native}", any_way=False) as mounts, _reading(mounts) as failed:
        assert mounts.mounts[0].end() == 0
        assert failed() in (errno.ENOTCONN, errno.ECONNABORTED)


class _reading:  # noqa: N801 - a context manager
    """Reads a file at random with three threads; its value waits for their end, and returns the errno of the last."""

    def __init__(self, mounts: LakeMounts) -> None:
        self._mounts = mounts
        self._errors: list[int | None] = []
        self._going = threading.Semaphore(0)

    def __enter__(self) -> _reading:
        with connect(self._mounts.served.server) as client:
            client.put("bucket/read", random.Random(6).randbytes(2 * MIB))
        self._threads = [threading.Thread(target=self._read, args=(seed,)) for seed in range(3)]
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            assert self._going.acquire(timeout=30)
        return self

    def _read(self, seed: int) -> None:
        chosen = random.Random(seed)
        descriptor = os.open(self._mounts.folders[0] / "read", os.O_RDONLY | os.O_DIRECT)
        try:
            for count in range(1_000_000):
                read_past_cache(descriptor, chosen.randrange(512) * PAGE, PAGE)
                if count == 100:
                    self._going.release()
        except OSError as error:
            self._errors.append(error.errno)
        with suppress(OSError):
            os.close(descriptor)

    def __call__(self) -> int | None:
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive(), "a reader waits for ever"
        return self._errors[-1]

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(60)


def test_a_mount_without_the_layer_says_why(short: Path) -> None:
    with lake(short, "-o", "native=off", any_way=False) as mounts:
        (mounts.folders[0] / "file").write_bytes(b"content")
        assert (mounts.folders[0] / "file").read_bytes() == b"content"
        assert mounts.mounts[0].end() == 0
        assert mounts.mounts[0].log.read_text().count("every request is answered in Python") == 1


def test_debug_shows_every_read(short: Path) -> None:
    with lake(short, "-o", "debug", any_way=False) as mounts:
        with connect(mounts.served.server) as client:
            client.put("bucket/file", random.Random(7).randbytes(256 * KIB))
        descriptor = os.open(mounts.folders[0] / "file", os.O_RDONLY | os.O_DIRECT)
        for number in range(40):
            read_past_cache(descriptor, number * PAGE, PAGE)
        os.close(descriptor)
        assert mounts.mounts[0].end() == 0
        assert mounts.mounts[0].log.read_text().count("opcode: READ (15)") >= 40
