"""Hot files when something goes wrong: damage, little memory, a killed mount."""

from __future__ import annotations

import errno
import mmap
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from lakefs import connect
from lakefs.limits import GRANULE_BYTES, MIB
from tests.e2e.served import ROOT, environment
from tests.mount.hot_mounts import FILLED, FORCED, SIZE, asked, forced_mounts, passes_through
from tests.mount.mounts import LakeMounts, lake
from tests.mount.test_hot import eventually
from tests.mount.tools import place_of, spoil, spoil_at
from tests.served_devices import HEALS

pytestmark = [pytest.mark.slow, pytest.mark.fuse, pytest.mark.thorough]

# --- damage ------------------------------------------------------------------------------------------------


@pytest.mark.one_engine(HEALS)
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


@pytest.mark.one_engine(HEALS)
def test_damage_while_a_hot_file_is_filled_is_an_error_and_never_other_bytes() -> None:
    """The end of the file is damaged while the fill is on its way there, at other times each round."""
    size, failed, refused = 32 * MIB, 0, set[int]()
    with (
        TemporaryDirectory(prefix="lake-") as path,
        lake(Path(path), any_way=False) as mounts,
        connect(mounts.served.server) as client,
    ):
        if "no hot files" in mounts.mounts[0].log.read_text():
            pytest.skip("no hot files on this machine")
        for number in range(6):
            content = os.urandom(size)
            client.put(f"bucket/{number}", content)
            part = content[size - MIB : size - MIB + 512]
            place = place_of(mounts.served.data, part)
            for _ in range(2):
                os.close(os.open(mounts.folders[0] / f"{number}", os.O_RDONLY))
            threading.Event().wait(0.004 * number)
            spoil_at(*place, part)
            assert eventually(lambda number=number: _ended_fills(mounts) == number + 1)  # type: ignore[misc]
            with (mounts.folders[0] / f"{number}").open("rb", buffering=0) as file:
                for at in range(0, size, MIB):
                    try:
                        assert os.pread(file.fileno(), MIB, at) == content[at : at + MIB]
                    except OSError:
                        failed += 1
                        refused.add(at)
        log = mounts.mounts[0].log.read_text()
        assert log.count("a hot file could not be filled") == failed
        assert failed > 0
        assert refused == {size - MIB}


def _ended_fills(mounts: LakeMounts) -> int:
    log = mounts.mounts[0].log.read_text()
    return log.count(FILLED) + log.count("a hot file could not be filled")


def test_a_writer_that_finds_no_memory_beside_readers_is_refused_and_what_it_wrote_before_is_stored() -> None:
    with forced_mounts("--hot-memory", "4M") as mounts, connect(mounts.served.server) as client:
        path, expected = mounts.folders[0] / "x", bytearray(os.urandom(SIZE))
        client.put("bucket/x", bytes(expected))
        with path.open("rb", buffering=0) as reading:
            assert passes_through(mounts, reading.fileno())
            writing = os.open(path, os.O_WRONLY)
            with pytest.raises(OSError, match="No space") as full:
                while len(expected) < 64 * MIB:
                    data = os.urandom(MIB)
                    count = os.pwrite(writing, data, len(expected))
                    expected.extend(data[:count])
            assert full.value.errno == errno.ENOSPC
            assert b"".join(iter(lambda: reading.read(MIB), b"")) == expected
            os.pwrite(writing, b"over", 5)
            expected[5:9] = b"over"
            os.close(writing)
            assert client.get("bucket/x") == expected
        assert eventually(lambda: not _is_hot(mounts, path))  # it was written to, so its memory goes
        with path.open("ab", buffering=0) as more:
            for _ in range(8):
                expected += (data := os.urandom(MIB))
                assert more.write(data) == len(data)
        assert client.get("bucket/x") == path.read_bytes() == expected


def _is_hot(mounts: LakeMounts, path: Path) -> bool:
    with path.open("rb") as file:
        return passes_through_from_start(mounts, file.fileno())


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
        assert mounts.mounts[0].end() == 0
        counts = _counts(mounts)
        assert counts["filled"] == len(used)
        assert counts["filled_bytes"] == len(used) * 6 * MIB
        assert counts["opened"] >= len(contents)
        assert counts["evicted"] >= 2
        assert (counts["refused"] > 0, counts["failed"], counts["damaged"]) == (True, 0, 0)


def _counts(mounts: LakeMounts) -> dict[str, int]:
    """Return the counts that the log of a mount ends with."""
    [line] = [line for line in mounts.mounts[0].log.read_text().splitlines() if "hot files of this mount" in line]
    return {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", line)}


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


def test_hot_files_go_when_others_need_the_memory_and_come_back() -> None:
    with forced_mounts() as mounts:
        here, mount = mounts.folders[0], mounts.mounts[0]
        contents = {f"f{number}": os.urandom(20 * MIB) for number in range(3)}
        for name, content in contents.items():
            (here / name).write_bytes(content)
        with _control_group(256 * MIB) as processes:
            processes.write_text(f"{mount.process.pid}\n")
            for name, content in contents.items():
                assert (here / name).read_bytes() == content
            with (here / "f0").open("rb") as held, _memory_taken(processes, 256 * MIB):
                assert eventually(lambda: "memory is scarce" in mount.log.read_text())
                for _ in range(2):
                    for name, content in contents.items():
                        assert (here / name).read_bytes() == content
                assert passes_through(mounts, held.fileno())
                assert "no room for a hot file" in mount.log.read_text()
            filled = mount.log.read_text().count(FILLED)
            assert eventually(lambda: (here / "f2").read_bytes() == contents["f2"] and _is_hot(mounts, here / "f2"))
            assert mount.log.read_text().count(FILLED) > filled
            assert mount.process.poll() is None


@contextmanager
def _memory_taken(processes: Path, limit_bytes: int) -> Iterator[None]:
    """Have another process of the control group take memory until only a fifteenth is left, for the block."""
    script = (
        "import sys; from lakefs.host.memory_limits import available_bytes; taken = []\n"
        "open(sys.argv[1], 'w').write('0')\n"
        "def left(): return min(each.free_bytes for each in available_bytes() if each.of_bytes == int(sys.argv[2]))\n"
        "while left() * 15 > int(sys.argv[2]): taken.append(bytearray(b'x' * (1 << 20)))\n"
        "print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(processes), str(limit_bytes)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), cwd=ROOT
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield


def test_ten_thousand_handles_pass_through() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(10_000, before[1] - 500)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    try:
        with forced_mounts() as mounts:
            contents = [os.urandom(256 * 1024 + number) for number in range(20)]
            for number, content in enumerate(contents):
                (mounts.folders[0] / f"f{number}").write_bytes(content)
            opened = [os.open(mounts.folders[0] / f"f{number % 20}", os.O_RDONLY) for number in range(count)]
            for number, descriptor in enumerate(opened):
                at = number * 7 % 200_000
                assert os.pread(descriptor, 100, at) == contents[number % 20][at : at + 100]
            assert passes_through(mounts, opened[-1])
            for descriptor in opened:
                os.close(descriptor)
            assert mounts.mounts[0].end() == 0
            assert _counts(mounts)["opened"] >= count
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


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
    with (
        TemporaryDirectory(prefix="lake-") as path,
        lake(Path(path), *FORCED, "-o", "hot_memory=0", any_way=False) as mounts,
    ):
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
