"""Thousands of open handles on one mount, readers and writers, and the error when there can be no more."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from lakefs import connect
from tests.mount.mounts import lake
from tests.mount.test_restarts import kept

pytestmark = [pytest.mark.fuse, pytest.mark.thorough]
READERS = 8000
WRITERS = 2000
LARGE_EVERY = 100
"""One in so many readers has an object that holds a lease."""
LARGE = 70_000


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for a socket in it."""
    with TemporaryDirectory(prefix="lake-") as path:
        yield Path(path)


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Let this process have as many open files as the hard limit allows."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < READERS + WRITERS + 1000:
        pytest.skip(f"no process may hold more than {before[1]} open files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def content(number: int) -> bytes:
    """Return the content of the reader's file."""
    return b"%08d" % number * (LARGE // 8 if number % LARGE_EVERY == 0 else 1)


@pytest.mark.slow
def test_ten_thousand_open_handles_outlive_the_engine(short: Path, many_descriptors: None) -> None:
    with lake(short, mounts=1) as mounts, kept(mounts.served) as keeper:
        here = mounts.folders[0]
        with connect(mounts.served.server) as client:
            client.put_many([(f"bucket/r{number}", content(number)) for number in range(READERS)])
        readers = [os.open(here / f"r{number}", os.O_RDONLY) for number in range(READERS)]
        writers = [os.open(here / f"w{number}", os.O_RDWR | os.O_CREAT) for number in range(WRITERS)]
        for number, descriptor in enumerate(writers):
            os.write(descriptor, b"written %d" % number)
        keeper.end(9)
        keeper.start()
        for number, descriptor in enumerate(readers):
            assert os.pread(descriptor, LARGE, 0) == content(number)
        for number, descriptor in enumerate(writers):
            assert os.pread(descriptor, 100, 0) == b"written %d" % number
            os.close(descriptor)
        for descriptor in readers:
            os.close(descriptor)
        with connect(mounts.served.server) as client:
            found = client.get_many([f"bucket/w{number}" for number in range(WRITERS)])
        assert found == [b"written %d" % number for number in range(WRITERS)]


def test_a_mount_without_descriptors_says_so_and_lives_on(short: Path) -> None:
    with lake(short) as mounts:
        here = mounts.folders[0]
        (here / "before").write_bytes(b"before")
        process = mounts.mounts[0].process.pid
        _, hard = resource.prlimit(process, resource.RLIMIT_NOFILE)
        used = len(os.listdir(f"/proc/{process}/fd"))
        resource.prlimit(process, resource.RLIMIT_NOFILE, (used + 100, hard))
        opened: list[int] = []
        with pytest.raises(OSError, match="Too many open files") as full:
            for number in range(1000):
                opened.append(os.open(here / f"f{number}", os.O_RDWR | os.O_CREAT))
                os.write(opened[-1], b"x")
        assert full.value.errno == errno.EMFILE
        assert (here / "before").read_bytes() == b"before"
        for descriptor in opened:
            os.close(descriptor)
        (here / "after").write_bytes(b"after")
        assert (here / "after").read_bytes() == b"after"
        assert mounts.mounts[0].end() == 0


def test_a_mount_raises_its_limit_of_open_files_to_what_it_may_have(short: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        with lake(short) as mounts:
            soft, hard = resource.prlimit(mounts.mounts[0].process.pid, resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert soft == min(hard, 262_144)
