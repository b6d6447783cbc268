"""Faults under a mount: the errno that a program sees, and what is left as it was."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from lakefs import connect
from tests.e2e.small_disk import ext4, tmpfs
from tests.mount.mounts import lake
from tests.mount.tools import spoil
from tests.served_devices import CYCLES, DEVICES, HEALS

pytestmark = pytest.mark.thorough

KIB = 1 << 10
MIB = 1 << 20
CHUNK = 4 * MIB
EXT4_IOC_SHUTDOWN = 0x8004587D


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for a socket in it."""
    with TemporaryDirectory(prefix="lake-") as path:
        yield Path(path)


def test_a_full_staging_folder_fails_the_write_and_nothing_else(short: Path) -> None:
    with lake(short, "--staging-size", "8M") as mounts:
        here = mounts.folders[0]
        (here / "before").write_bytes(b"before")
        with (here / "large").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space") as full:
            for _ in range(16):
                file.write(bytes(MIB))
        assert full.value.errno == errno.ENOSPC
        assert (here / "before").read_bytes() == b"before"
        (here / "after").write_bytes(b"x" * 7 * MIB)
        assert (here / "after").stat().st_size == 7 * MIB


def test_a_full_store_fails_the_close_and_the_mount_goes_on_when_there_is_room(short: Path) -> None:
    with tmpfs(short, 128 * MIB * max(1, DEVICES)) as disk:
        (disk / "store").mkdir(mode=0o700)
        (short / "store").symlink_to(disk / "store")
        with lake(short) as mounts:
            here = mounts.folders[0]
            stored, number = _write_until_a_close_fails(here)
            assert number == errno.ENOSPC
            assert len(stored) > 4
            assert {name: (here / name).read_bytes() for name in stored} == stored
            (here / "f0").unlink()
            (here / "f1").unlink()
            for _ in range(CYCLES):
                mounts.served.good("gc")
            (here / "again").write_bytes(b"again")
            assert (here / "again").read_bytes() == b"again"


@pytest.mark.one_engine(HEALS)
def test_a_damaged_chunk_fails_its_own_range_only(short: Path) -> None:
    content = os.urandom(3 * CHUNK)
    with lake(short) as mounts:
        here = mounts.folders[0]
        with connect(mounts.served.server) as client:
            client.put("bucket/file", content)
        spoil(mounts.served.data, content[CHUNK + 100 * KIB : CHUNK + 101 * KIB])
        with (here / "file").open("rb", buffering=0) as file:
            assert os.pread(file.fileno(), MIB, 0) == content[:MIB]
            assert os.pread(file.fileno(), MIB, 2 * CHUNK) == content[2 * CHUNK : 2 * CHUNK + MIB]
            with pytest.raises(OSError, match="Input/output error"):
                os.pread(file.fileno(), 64 * KIB, CHUNK + 64 * KIB)
            assert os.pread(file.fileno(), MIB, CHUNK + 2 * MIB) == content[CHUNK + 2 * MIB : CHUNK + 3 * MIB]
        with connect(mounts.served.server) as client:
            client.put("bucket/file", content)
        assert (here / "file").read_bytes() == content


def test_an_engine_that_stays_away_is_an_error_and_the_mount_waits_for_it(short: Path) -> None:
    with lake(short, "-o", "engine_wait=0.2,attr_timeout=0,entry_timeout=0") as mounts:
        here = mounts.folders[0]
        with (here / "file").open("wb", buffering=0) as file:
            file.write(b"before")
            file.flush()
            os.fsync(file.fileno())  # a close without fsync may be lost with a killed engine
        assert mounts.served.kill() == -signal.SIGKILL
        with pytest.raises(OSError, match="Input/output error"):
            (here / "other").write_bytes(b"lost")
        with pytest.raises(OSError, match="Input/output error"):
            (here / "file").read_bytes()
        mounts.served.start()
        assert (here / "file").read_bytes() == b"before"
        (here / "other").write_bytes(b"after")
        assert (here / "other").read_bytes() == b"after"


def test_files_that_are_open_by_the_thousand_are_served(short: Path) -> None:
    count = 2000
    with lake(short) as mounts:
        here = mounts.folders[0]
        with connect(mounts.served.server) as client:
            client.put_many([(f"bucket/f{number}", b"%d" % number) for number in range(count)])
        opened = [os.open(here / f"f{number}", os.O_RDONLY) for number in range(count)]
        for number, descriptor in enumerate(opened):
            assert os.pread(descriptor, 10, 0) == b"%d" % number
        for descriptor in opened:
            os.close(descriptor)


def test_readers_go_on_while_garbage_is_collected(short: Path) -> None:
    content = os.urandom(2 * CHUNK)
    with lake(short) as mounts, connect(mounts.served.server) as client:
        here = mounts.folders[0]
        client.put("bucket/file", content)
        with (here / "file").open("rb", buffering=0) as file:
            client.put("bucket/file", os.urandom(100))
            client.gc()
            assert os.pread(file.fileno(), len(content), 0) == content


def _write_until_a_close_fails(here: Path) -> tuple[dict[str, bytes], int | None]:
    """Return the files that were closed well, and the errno of the close that failed."""
    stored: dict[str, bytes] = {}
    while True:
        name, content = f"f{len(stored)}", os.urandom(8 * MIB)
        descriptor = os.open(here / name, os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, content)
        try:
            os.close(descriptor)
        except OSError as error:
            return stored, error.errno
        stored[name] = content


def test_a_staging_folder_that_goes_away_fails_writes_and_nothing_else(short: Path) -> None:
    with lake(short) as mounts:
        here = mounts.folders[0]
        (here / "before").write_bytes(b"before")
        with (here / "open").open("wb", buffering=0) as held:
            held.write(b"held")
            shutil.rmtree(short / "staging0")
            failed = _open_until_one_fails(here)
            assert failed == errno.EIO
            assert (here / "before").read_bytes() == b"before"
            assert sorted(os.listdir(here))[:1] == ["before"]
        assert (here / "open").read_bytes() == b"held"
        assert mounts.mounts[0].end() == 0, mounts.mounts[0].log.read_text()


def test_a_staging_disk_that_takes_no_more_fails_writes_and_the_mount_goes_on(short: Path) -> None:
    with ext4(short, 64 * MIB) as disk:
        (disk / "staging").mkdir()
        (short / "staging0").symlink_to(disk / "staging")
        with lake(short) as mounts:
            here = mounts.folders[0]
            (here / "before").write_bytes(b"before")
            writing = os.open(here / "open", os.O_RDWR | os.O_CREAT)
            os.write(writing, b"held")
            _shut_down(disk)
            with pytest.raises(OSError, match="Input/output error"):
                os.pwrite(writing, bytes(MIB), MIB)
            assert _open_until_one_fails(here) == errno.EIO
            assert (here / "before").read_bytes() == b"before"
            with suppress(OSError):
                os.close(writing)
            assert mounts.mounts[0].end() in (0, 74), mounts.mounts[0].log.read_text()


def test_a_staging_disk_that_ends_under_files_without_a_name_loses_no_descriptor_and_the_mount_ends_well(
    short: Path,
) -> None:
    """Their staging files can neither be emptied nor removed then, at the close of one and at the end of the mount."""
    with ext4(short, 128 * MIB) as disk:
        (disk / "staging").mkdir()
        (short / "staging0").symlink_to(disk / "staging")
        with lake(short) as mounts:
            here = mounts.folders[0]
            (here / "before").write_bytes(b"before")
            opened = [os.open(here / f"open{number}", os.O_RDWR | os.O_CREAT) for number in range(6)]
            for number, descriptor in enumerate(opened):
                os.write(descriptor, bytes(40 * MIB if number == 5 else 10))
                (here / f"open{number}").unlink()
            process = Path(f"/proc/{mounts.mounts[0].process.pid}/fd")
            _shut_down(disk)
            before = len(list(process.iterdir()))
            for descriptor in opened[:5]:
                os.close(descriptor)
            until = time.monotonic() + 5
            while len(list(process.iterdir())) > before - 10 and time.monotonic() < until:
                time.sleep(0.05)
            assert len(list(process.iterdir())) <= before - 10, "each has two descriptors"
            assert (here / "before").read_bytes() == b"before"
            os.close(opened[5])
            assert mounts.mounts[0].end() in (0, 74), mounts.mounts[0].log.read_text()
            assert "Traceback" not in mounts.mounts[0].log.read_text()


def _open_until_one_fails(here: Path) -> int | None:
    """Write new files until one fails; return its errno.  A new staging file cannot be made, the others still work."""
    opened: list[int] = []
    try:
        for number in range(100):
            opened.append(os.open(here / f"new{number}", os.O_RDWR | os.O_CREAT))
            os.write(opened[-1], b"new")
    except OSError as error:
        return error.errno
    finally:
        for descriptor in opened:
            with suppress(OSError):
                os.close(descriptor)
    return None


def _shut_down(disk: Path) -> None:
    """Shut the disk down under its file system: EXT4_IOC_SHUTDOWN, without writing its log."""
    descriptor = os.open(disk, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, struct.pack("I", 2))
    except OSError as error:
        pytest.skip(f"this kernel cannot take a disk away: {error.strerror}")
    finally:
        os.close(descriptor)
