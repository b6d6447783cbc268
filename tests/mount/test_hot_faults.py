"""Hot files when something goes wrong: damage, little memory, a killed mount."""

from __future__ import annotations

import mmap
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from lakefs import connect
from lakefs.limits import GRANULE_BYTES, MIB
from tests.mount.hot_mounts import FILLED, FORCED, SIZE, asked, forced_mounts, passes_through
from tests.mount.mounts import LakeMounts, lake
from tests.mount.tools import spoil

pytestmark = [pytest.mark.slow, pytest.mark.fuse]

# --- damage ------------------------------------------------------------------------------------------------


def test_a_damaged_segment_is_an_error_and_no_backing(short_forced: LakeMounts) -> None:
    here, content = short_forced.folders[0], os.urandom(8 * MIB)
    with connect(short_forced.served.server) as client:
        client.put("bucket/x", content)
    spoil(short_forced.served.data, content[5 * MIB : 5 * MIB + 512])
    with (here / "x").open("rb", buffering=0) as file:
        assert not passes_through_from_start(short_forced, file.fileno())
        assert os.pread(file.fileno(), MIB, 0) == content[:MIB]
        with pytest.raises(OSError, match="Input/output error"):
            os.pread(file.fileno(), GRANULE_BYTES, 5 * MIB)
    assert "a hot file could not be filled" in short_forced.mounts[0].log.read_text()
    assert FILLED not in short_forced.mounts[0].log.read_text()


def passes_through_from_start(mounts: LakeMounts, descriptor: int) -> bool:
    """Like `passes_through`, by the first MiB alone."""
    before = asked(mounts)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.pread(descriptor, MIB, 0)
    return asked(mounts) - before < 256 * 1024


@pytest.fixture
def short_forced() -> Iterator[LakeMounts]:
    """A mount of its own, every file hot at once."""
    with forced_mounts() as mounted:
        yield mounted


# --- memory, kills -----------------------------------------------------------------------------------------


def test_hot_files_stay_within_their_memory_and_the_oldest_go() -> None:
    with forced_mounts("--hot-memory", "20M") as mounts:
        here = mounts.folders[0]
        contents = {f"f{number}": os.urandom(6 * MIB) for number in range(5)}
        for name, content in contents.items():
            (here / name).write_bytes(content)
        with (here / "f0").open("rb") as held:
            for name, content in contents.items():
                assert (here / name).read_bytes() == content
            assert passes_through(mounts, held.fileno())
        used = [int(found) for found in re.findall(r"hot_bytes=(\d+)", mounts.mounts[0].log.read_text())]
        assert len(used) >= 5
        assert max(used) <= 20 << 20
        (here / "large").write_bytes(bytes(30 * MIB))
        assert (here / "large").read_bytes() == bytes(30 * MIB)
        assert "no room for a hot file" in mounts.mounts[0].log.read_text()


def test_a_hot_set_in_a_small_control_group_ends_no_process() -> None:
    with forced_mounts() as mounts:
        here, mount = mounts.folders[0], mounts.mounts[0]
        contents = {f"f{number}": os.urandom(24 * MIB) for number in range(8)}
        for name, content in contents.items():
            (here / name).write_bytes(content)
        with _control_group(256 * MIB) as processes:
            processes.write_text(f"{mount.process.pid}\n")
            for _ in range(2):
                for name, content in contents.items():
                    assert (here / name).read_bytes() == content
            assert mount.process.poll() is None
        used = [int(found) for found in re.findall(r"hot_bytes=(\d+)", mount.log.read_text())]
        assert 24 * MIB <= max(used) <= 128 * MIB


@contextmanager
def _control_group(limit_bytes: int) -> Iterator[Path]:
    """Yield the file that takes processes into a new control group with this limit; they leave it at the end."""
    for root, limit in (
        (Path("/sys/fs/cgroup"), "memory.max"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    ):
        folder = root / f"lake-test-{os.getpid()}"
        if root.name == "cgroup" and not (root / "cgroup.controllers").exists():
            continue
        try:
            folder.mkdir()
            (folder / limit).write_text(f"{limit_bytes}\n")
        except OSError:
            with suppress(OSError):
                folder.rmdir()
            continue
        try:
            yield folder / "cgroup.procs"
        finally:
            for process in (folder / "cgroup.procs").read_text().split():
                (root / "cgroup.procs").write_text(f"{process}\n")
            folder.rmdir()
        return
    pytest.skip("no control group with a memory limit can be made here")


def test_no_memory_is_no_hot_files() -> None:
    with TemporaryDirectory(prefix="lake-") as path, lake(Path(path), *FORCED, "-o", "hot_memory=0") as mounts:
        (mounts.folders[0] / "x").write_bytes(bytes(SIZE))
        with (mounts.folders[0] / "x").open("rb") as file:
            assert not passes_through(mounts, file.fileno())
        assert "no hot files" in mounts.mounts[0].log.read_text()


def test_a_killed_mount_leaves_its_mappings_and_its_readers_fail(short_forced: LakeMounts) -> None:
    here = short_forced.folders[0]
    (here / "x").write_bytes(b"x" * SIZE)
    descriptor = os.open(here / "x", os.O_RDONLY)
    memory = mmap.mmap(descriptor, SIZE, mmap.MAP_SHARED, mmap.PROT_READ)
    assert passes_through(short_forced, descriptor)
    with _killed(short_forced, [descriptor]):
        assert memory[:] == b"x" * SIZE  # a mapping needs no mount
        with pytest.raises(OSError, match=r"Transport|aborted"):
            os.open(here / "x", os.O_RDONLY)
        memory.close()


def test_what_was_written_beside_readers_is_in_the_staging_folder_of_a_killed_mount(short_forced: LakeMounts) -> None:
    here = short_forced.folders[0]
    (here / "x").write_bytes(b"x" * SIZE)
    reading = os.open(here / "x", os.O_RDONLY)
    assert passes_through(short_forced, reading)
    writing = os.open(here / "x", os.O_WRONLY)
    os.pwrite(writing, b"unsaved", 1 * MIB)
    with _killed(short_forced, [reading, writing]):
        (staged,) = (here.parent.parent / "staging0").glob("*.bytes")
        assert staged.read_bytes()[MIB : MIB + 7] == b"unsaved"


@contextmanager
def _killed(mounts: LakeMounts, descriptors: list[int]) -> Iterator[None]:
    """Kill the mount; after the block close what was open in it, and unmount what is left of it."""
    mount = mounts.mounts[0]
    os.kill(mount.process.pid, signal.SIGKILL)
    mount.process.wait()
    try:
        yield
    finally:
        for descriptor in descriptors:
            with suppress(OSError):
                os.close(descriptor)
        subprocess.run(["umount", "-l", str(mount.folder)], check=True, timeout=30)
