"""Mounts whose native threads append to files: what any other call sees, what a killed mount leaves, a full disk.

The model of system calls runs with every append native (`append_forced`), as far as that is let.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fuse.native import layer
from lakefs.errors import KeyNotFound
from lakefs.limits import KIB, MIB
from tests.e2e.served import Served
from tests.mount.hunt import hunt
from tests.mount.model import Ground
from tests.mount.mounts import WAY, LakeMounts, lake

pytestmark = [pytest.mark.slow, pytest.mark.fuse, pytest.mark.thorough]

SEQUENCES = int(os.environ.get("MOUNT_SEQUENCES", "60"))
FORCED = ("-o", "append_forced")
UNKEPT = ("-o", "append_forced,attr_timeout=0,entry_timeout=0")
"""The kernel asks for attributes each time."""
needs_native = pytest.mark.skipif(not layer.IS_BUILT, reason="the native module is not built")
OTHER_USER = 65_534
WAIT_S = 20.0
NAME = "bucket/file"


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for a socket in it, on a disk."""
    with TemporaryDirectory(prefix="lake-", dir="/var/tmp") as path:
        yield Path(path)


def check_native_writes(mounts: LakeMounts, count: int) -> None:
    """End the first mount; check that its native threads have answered more writes than `count`, if it has any."""
    assert mounts.mounts[0].end() == 0
    found = re.search(r" writes=(\d+)", mounts.mounts[0].log.read_text())
    if layer.IS_BUILT and WAY != "off":
        assert found
        assert int(found[1]) > count


def test_the_mount_is_as_a_local_disk(short: Path, tmp_path: Path) -> None:
    with lake(short, *FORCED) as mounts:
        ground = Ground(tmp_path, (mounts.folders[0],))
        found = [finding for finding in hunt(range(4000, 4000 + SEQUENCES), ground, "t") if finding is not None]
        assert not found, "\n\n".join(finding.script() for finding in found)
        check_native_writes(mounts, SEQUENCES // 3)


@needs_native
def test_every_call_sees_each_write_that_has_returned(short: Path) -> None:
    """Length, time and bytes, by name and by another handle, on a mount whose attributes the kernel does not keep."""
    chosen = random.Random(1)
    expected = bytearray()
    with lake(short, *UNKEPT) as mounts:
        path = mounts.folders[0] / "file"
        writing = os.open(path, os.O_WRONLY | os.O_CREAT)
        other = os.open(path, os.O_WRONLY)
        for number in range(400):
            data = chosen.randbytes(chosen.choice((1, 4096, 70_000)))
            before = time.time_ns()
            os.pwrite(writing, data, len(expected))
            after = time.time_ns()
            expected += data
            found = os.stat(path) if number % 3 else os.fstat(other)
            assert found.st_size == len(expected)
            assert before <= found.st_mtime_ns == found.st_ctime_ns <= after
            match number % 20:
                case 5:
                    with path.open("rb", buffering=0) as file:
                        assert os.pread(file.fileno(), len(data) + 1, len(expected) - len(data)) == data
                case 8:
                    os.utime(path, ns=(5, 5))
                    assert os.stat(path).st_mtime_ns == 5
                case 11:
                    os.pwrite(other, b"over", len(expected) // 2)
                    expected[len(expected) // 2 : len(expected) // 2 + 4] = b"over"
                case 14:
                    os.ftruncate(other, len(expected) - 1)
                    del expected[-1:]
                case 17:
                    os.fsync(writing)
                case 19:
                    os.rename(path, path := path.with_name(f"file{number}"))
        os.close(other)
        os.close(writing)
        assert path.read_bytes() == expected
        check_native_writes(mounts, 200)


@needs_native
def test_a_write_of_another_user_clears_set_id_bits_also_behind_native_writes(short: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may become another user")
    with lake(short, "-o", "append_forced,allow_other") as mounts:
        path = mounts.folders[0] / "file"
        path.write_bytes(b"")
        os.chown(path, OTHER_USER, OTHER_USER)
        short.chmod(0o755)
        child = os.fork()
        if not child:
            os._exit(_clears_set_id(path))
        assert os.waitpid(child, 0)[1] == 0
        assert stat.S_IMODE(path.stat().st_mode) == 0o755
        check_native_writes(mounts, 10)


def _clears_set_id(path: Path) -> int:
    """Become another user, write on, set the bits, and write on; return 0 if the last write has cleared them."""
    try:
        os.setgroups([])
        os.setgid(OTHER_USER)
        os.setuid(OTHER_USER)
        file = os.open(path, os.O_WRONLY)
        for number in range(20):
            os.pwrite(file, b"x" * 5000, 5000 * number)
        os.fchmod(file, 0o6755)
        was = os.fstat(file).st_mode & 0o7777
        os.pwrite(file, b"y", 100_000)
        now = os.fstat(file).st_mode & 0o7777
        os.close(file)
    except OSError:
        return 2
    return 0 if (was, now) == (0o6755, 0o755) else 1


@needs_native
@pytest.mark.parametrize("seed", range(4))
def test_what_a_killed_mount_leaves_has_every_write_that_returned(short: Path, seed: int) -> None:
    """Killed at any time, also between writes that other calls change; as `lake staged restore` finds it."""
    chosen = random.Random(seed)
    content = chosen.randbytes(32 * MIB)
    with lake(short, *FORCED) as mounts:
        served = mounts.served
        path = mounts.folders[0] / "file"
        writing = os.open(path, os.O_WRONLY | os.O_CREAT)
        at = 0
        killing = subprocess.Popen(
            [sys.executable, "-c", f"import time, os; time.sleep({0.05 + 0.1 * seed}); "
             f"os.kill({mounts.mounts[0].process.pid}, {signal.SIGKILL})"]
        )  # fmt: skip
        with pytest.raises(OSError) as ended:
            for number in itertools.count():
                if at == len(content):  # begin anew
                    os.ftruncate(writing, at := 0)
                size = min(chosen.choice((100, 4096, 65_536, MIB)), len(content) - at)
                at += os.pwrite(writing, content[at : at + size], at)
                if seed % 2 and number % 7 == 3:
                    os.ftruncate(writing, at)
        # EIO: a request whose bytes the mount was being handed when it died.
        assert ended.value.errno in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)
        with suppress(OSError):
            os.close(writing)
        killing.wait()
        assert mounts.mounts[0].process.wait(30) == -signal.SIGKILL
        found = _restored(served, short / "staging0", short / "restored")
        assert len(found) >= at
        assert found == content[: len(found)]
        subprocess.run(["umount", "-l", mounts.mounts[0].folder], check=True)


class Scene:
    """One file that native threads append to, between calls that are Python's, and what it should have."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self.expected = bytearray()

    def append(self) -> None:
        """Write on at the end, in pieces of many lengths."""
        for size in (1, 4096, 30_001, 300_000):
            self._write(os.urandom(size), len(self.expected))

    def append_much(self) -> None:
        """Write on until chunks are stored behind."""
        self.append()
        for _ in range(10):
            self._write(os.urandom(MIB), len(self.expected))

    def write_over(self) -> None:
        """Write to the middle, and on."""
        self._write(b"over", len(self.expected) // 2)
        self.append()

    def change_length(self) -> None:
        """Cut the end off and write on; then lengthen it, which are zeros, and write on."""
        del self.expected[-123_456:]
        os.ftruncate(self.descriptor, len(self.expected))
        self.append()
        self.expected += bytes(100_000)
        os.ftruncate(self.descriptor, len(self.expected))
        self.append()

    def sync(self) -> None:
        """Store it, and write on."""
        os.fsync(self.descriptor)
        self.append()

    def rename(self) -> None:
        """Give it another name, and write on."""
        self.path = self.path.rename(self.path.with_name(self.path.name + "-renamed"))
        self.append()

    def _write(self, data: bytes, offset: int) -> None:
        assert os.pwrite(self.descriptor, data, offset) == len(data)
        self.expected[offset : offset + len(data)] = data


STEPS = (Scene.append_much, Scene.write_over, Scene.change_length, Scene.sync, Scene.rename)


@needs_native
def test_a_mount_that_is_killed_after_any_step_leaves_all_that_was_written(short: Path) -> None:
    with lake(short, *FORCED) as mounts:
        mount = mounts.mounts[0]
        for last in range(len(STEPS)):
            scene = Scene(mounts.folders[0] / f"f{last}")
            for step in STEPS[: last + 1]:
                step(scene)
            mount.process.send_signal(signal.SIGKILL)
            assert mount.process.wait(30) == -signal.SIGKILL
            with suppress(OSError):
                os.close(scene.descriptor)
            name = f"bucket/{scene.path.name}"
            found = _restored(mounts.served, short / "staging0", short / f"restored{last}", name)
            assert found == scene.expected, STEPS[last].__name__
            mount.start_again()


def _restored(served: Served, staging: Path, target: Path, name: str = NAME) -> bytes:
    """Return the file's content after a kill; from the store if it has all of it, and nothing is left to restore."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:  # the engine has the file open until it sees that the mount is gone
        answer = served("staged", "restore", "--staging", staging, "--file", target, name)
        if answer.code == 0:
            return target.read_bytes()
        if answer.code == KeyNotFound.exit_code:
            return served.good("cat", name).out
    raise AssertionError(answer)


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A disk of so many bytes."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a disk")
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def until_full(path: Path, size: int) -> tuple[int, int | None]:
    """Write on until that fails; return the file's length then, and the errno."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        for number in range(64 * MIB // size):
            os.pwrite(descriptor, bytes([number % 255 + 1]) * size, number * size)
    except OSError as error:
        return os.fstat(descriptor).st_size, error.errno
    finally:
        os.close(descriptor)
    return os.stat(path).st_size, None


@pytest.mark.parametrize("limit", [5 * MIB, 20 * MIB + 1234])
@pytest.mark.parametrize("size", [100 * KIB, 300_007])
def test_the_limit_of_staged_bytes_is_exact(short: Path, limit: int, size: int) -> None:
    with lake(short, "-o", f"append_forced,staging_size={limit}") as mounts:
        here = mounts.folders[0]
        assert until_full(here / "file", size) == (limit // size * size, errno.ENOSPC)
        content = (here / "file").read_bytes()
        assert content == b"".join(bytes([number % 255 + 1]) * size for number in range(limit // size))
        check_native_writes(mounts, limit // size // 2)


@pytest.mark.parametrize("limit", [5 * MIB, 20 * MIB + 1234])
def test_files_that_are_appended_to_in_turn_share_the_limit(short: Path, limit: int) -> None:
    """Room that native threads have for one file goes to another before that one is refused anything."""
    size = 100 * KIB
    with lake(short, "-o", f"append_forced,staging_size={limit}") as mounts:
        files = [os.open(mounts.folders[0] / name, os.O_WRONLY | os.O_CREAT) for name in ("one", "two", "three")]
        written = dict.fromkeys(files, 0)

        def append(file: int, count: int) -> bool:
            try:
                written[file] += os.pwrite(file, bytes(count), written[file])
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                return False
            return True

        for number in range(10):
            assert append(files[0], 1000 + number)
        while append(files[1], size) and append(files[2], size):
            pass
        left = limit - sum(written.values())
        assert 0 <= left < size
        assert append(files[0], left) or not left
        assert not any(append(file, 1) for file in files)
        assert sum(written.values()) == limit
        os.fsync(files[1])
        assert append(files[0], written[files[1]])
        for file in files:
            assert os.fstat(file).st_size == written[file]
            os.close(file)


def test_a_staging_disk_that_is_full_fails_the_write_and_keeps_what_was_written(short: Path) -> None:
    staging = short / "staging0"
    with small_disk(staging, 12 * MIB), lake(short, *FORCED) as mounts:
        here = mounts.folders[0]
        length, failed = until_full(here / "file", 300 * KIB)
        assert failed == errno.ENOSPC
        assert length > 10 * MIB
        content = (here / "file").read_bytes()
        assert content == b"".join(bytes([number % 255 + 1]) * (300 * KIB) for number in range(length // (300 * KIB)))
        assert until_full(here / "again", 300 * KIB) == (length, errno.ENOSPC)
        mounts.mounts[0].end()
