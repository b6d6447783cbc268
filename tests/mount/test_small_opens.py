"""Short files that are opened again: without a request to the engine, and with nothing but what a name has now."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

from fuse.native import layer
from lakefs import connect
from lakefs.known.known_names import IS_BUILT
from lakefs.limits import SMALL_PAYLOAD_BYTES
from tests.mount.mounts import LakeMounts, lake
from tests.mount.test_two_mounts import eventually
from tests.mount.tools import spoil
from tests.served_devices import SHORT

pytestmark = pytest.mark.fuse
needs_stamps = pytest.mark.skipif(not IS_BUILT, reason="the native modules are not built")
SIZES: Final = (0, 1, 5000, SMALL_PAYLOAD_BYTES - 1, SMALL_PAYLOAD_BYTES)
HUNG_S: Final = 20.0


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for a socket in it, on a disk."""
    with TemporaryDirectory(prefix="lake-", dir="/var/tmp") as path:
        yield Path(path)


def read(path: Path) -> bytes:
    """Return what the next open finds, read past the kernel's cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return os.pread(descriptor, 2 * SMALL_PAYLOAD_BYTES, 0)
    finally:
        os.close(descriptor)


@contextmanager
def hanging(mounts: LakeMounts) -> Iterator[None]:
    """Stop the engine's process for the block, at most for a while: what asks it hangs, and then the test fails."""
    process = mounts.served.process
    assert process is not None
    began = time.monotonic()
    waker = threading.Timer(HUNG_S, process.send_signal, (signal.SIGCONT,))
    waker.start()
    process.send_signal(signal.SIGSTOP)
    try:
        yield
        assert time.monotonic() - began < HUNG_S, "the engine was asked for something"
    finally:
        waker.cancel()
        process.send_signal(signal.SIGCONT)


@needs_stamps
@pytest.mark.one_engine(SHORT)
def test_a_short_file_that_was_opened_is_opened_again_without_a_request(short: Path) -> None:
    contents = {f"f{size}": os.urandom(size) for size in SIZES}
    with lake(short) as mounts, connect(mounts.served.server) as client:
        here = mounts.folders[0]
        for name, content in contents.items():
            client.put(f"bucket/{name}", content)
        for _ in range(3):  # learns them, then where their content is
            assert {name: read(here / name) for name in contents} == contents
        with hanging(mounts):
            for _ in range(5):
                assert {name: read(here / name) for name in contents} == contents
            with (here / "f5000").open("rb") as first, (here / "f5000").open("rb") as second:
                assert first.read() == second.read() == contents["f5000"]


def test_what_was_changed_elsewhere_is_what_the_next_open_finds(short: Path) -> None:
    """At once: the mount's watch, which tells of changes a moment later, has no part in it."""
    with lake(short) as mounts, connect(mounts.served.server) as client:
        here = mounts.folders[0]
        client.put("bucket/d/other", b"other")
        for number in range(150):
            content = b"%d " % number * (1 + number * 50)
            client.put("bucket/d/x", content)
            for _ in range(3):
                assert read(here / "d/x") == content
        client.move("bucket/d/other", "bucket/d/x")
        assert read(here / "d/x") == b"other"
        client.remove("bucket/d/x")
        with pytest.raises(FileNotFoundError):
            read(here / "d/x")
        client.put("bucket/d/x", b"again")
        eventually((here / "d/x").exists, "the name is not seen again")  # the kernel may remember that there is none
        assert read(here / "d/x") == b"again"


def test_what_was_written_here_is_what_the_next_open_finds(short: Path) -> None:
    with lake(short) as mounts:
        here = mounts.folders[0]
        for number in range(60):
            content = b"%d " % number * (1 + number * 50)
            (here / "x").write_bytes(content)
            for _ in range(3):
                assert read(here / "x") == content
            os.truncate(here / "x", number)
            assert read(here / "x") == content[:number].ljust(number, b"\0")
            (here / "x").rename(here / "y")
            assert read(here / "y") == content[:number].ljust(number, b"\0")
            (here / "y").rename(here / "x")


def test_an_open_handle_keeps_its_content_when_that_is_garbage(short: Path) -> None:
    old = os.urandom(9000)
    with lake(short) as mounts, connect(mounts.served.server) as client:
        client.put("bucket/x", old)
        for _ in range(3):
            assert read(mounts.folders[0] / "x") == old
        descriptor = os.open(mounts.folders[0] / "x", os.O_RDONLY)
        client.put("bucket/x", b"new")
        client.gc()
        client.put("bucket/y", os.urandom(9000))
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(descriptor, 20_000, 0) == old
        os.close(descriptor)
        assert read(mounts.folders[0] / "x") == b"new"


def test_an_engine_that_was_killed_and_started_is_asked_again(short: Path) -> None:
    with lake(short, "-o", "engine_wait=30") as mounts:
        here = mounts.folders[0]
        with connect(mounts.served.server) as client:
            client.put("bucket/x", b"before")
        for _ in range(3):
            assert read(here / "x") == b"before"
        for ends in (mounts.served.kill, mounts.served.stop):
            ends()
            mounts.served.start()
            with connect(mounts.served.server) as client:
                client.put("bucket/x", b"after " + ends.__name__.encode())
            for _ in range(3):
                assert read(here / "x") == b"after " + ends.__name__.encode()


def test_damage_is_an_error_and_never_other_bytes(short: Path) -> None:
    content = os.urandom(SMALL_PAYLOAD_BYTES - 100)
    with lake(short) as mounts, connect(mounts.served.server) as client:
        client.put("bucket/x", content)
        for _ in range(3):
            assert read(mounts.folders[0] / "x") == content
        spoil(mounts.served.data, content[5000:5100])
        for _ in range(5):
            with suppress(OSError):  # the engine may have a right copy in memory
                assert read(mounts.folders[0] / "x") == content
        client.put("bucket/x", content)
        assert read(mounts.folders[0] / "x") == content


@pytest.mark.skipif(not layer.IS_BUILT, reason="the native module is not built")
def test_the_close_of_a_reader_asks_nothing_and_the_close_of_a_writer_stores(short: Path) -> None:
    count = 40
    with lake(short, any_way=False) as mounts:
        here = mounts.folders[0]
        (here / "x").write_bytes(b"content")
        for _ in range(count):
            assert read(here / "x") == b"content"
        reading, writing = os.open(here / "x", os.O_RDONLY), os.open(here / "x", os.O_RDWR)
        os.write(writing, b"written")
        closing = threading.Thread(target=os.close, args=(writing,))
        with hanging(mounts):
            os.close(reading)
            closing.start()
            closing.join(0.5)
            assert closing.is_alive(), "closed before it was stored"
        closing.join(HUNG_S)
        with connect(mounts.served.server) as client:
            assert client.get("bucket/x") == b"written"
        assert mounts.mounts[0].end() == 0
        set_in_answers = re.search(r"opens_set=(\d+)", mounts.mounts[0].log.read_text())
        assert set_in_answers is not None
        assert int(set_in_answers[1]) >= count
