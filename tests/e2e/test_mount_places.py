"""A mount that others still have when it is unmounted: its place is free at once, and the command says who has it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fuse.kernel.mount_point import mount_at, mounts_seen_by
from tests.e2e.mount_rig import MountRig, as_nobody, mount_rig, private_mounts
from tests.e2e.served import LAKE, WAIT_S, Finished, Served

pytestmark = [pytest.mark.fuse, pytest.mark.thorough]
AT_ONCE_S = 10.0
"""Far less than the wait for a process that stores, 90 s; a command on a busy machine takes a second or two."""


@pytest.fixture
def rig() -> Iterator[MountRig]:
    """A mount point of the test's own."""
    with mount_rig() as made:
        yield made


@contextmanager
def container(rig: MountRig) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that has the present mounts in a namespace of its own, for the block or until it is killed."""
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("only root can make a mount namespace")
    process = subprocess.Popen(["unshare", "--mount", "--propagation", "private", "sleep", "1000"])
    try:
        rig.wait_for(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n")
        yield process
    finally:
        process.kill()
        process.wait(WAIT_S)


def namespace(pid: int) -> str:
    """Return the number of a process's mount namespace."""
    return os.readlink(f"/proc/{pid}/ns/mnt").removeprefix("mnt:[").removesuffix("]")


def at_once(rig: MountRig, *args: str | Path) -> Finished:
    """Run a command that must not wait for a process that stores."""
    start = time.monotonic()
    done = rig.lake(*args)
    assert time.monotonic() - start < AT_ONCE_S
    return done


def test_unmount_says_at_once_which_namespace_and_process_have_the_mount(rig: MountRig) -> None:
    rig.mount()
    pid = rig.pid
    with container(rig) as other:
        done = at_once(rig, "unmount", rig.place)
        assert done.code == 0, done
        [line] = done.err.splitlines()
        assert f"mount namespace {namespace(other.pid)}, process {other.pid} (sleep)" in line
        assert f"its process {pid} goes on" in line
        assert not rig.is_mounted
        assert "hello" in os.listdir(f"/proc/{other.pid}/root{rig.place}")
    rig.wait_gone(pid)


def test_a_place_that_another_namespace_has_is_free_for_a_new_mount_and_each_process_ends_with_its_own(
    rig: MountRig,
) -> None:
    rig.mount()
    first = rig.pid
    with container(rig) as other:
        assert at_once(rig, "unmount", rig.place).code == 0
        assert at_once(rig, "mount", rig.place).code == 0
        second = rig.pid
        assert second != first
        assert (rig.place / "hello").read_text() == "hello\n"
        assert Path(f"/proc/{other.pid}/root{rig.place}/hello").read_text() == "hello\n"
        assert "free for another mount" in rig.log
        other.kill()
        rig.wait_gone(first)
        assert (rig.place / "hello").read_text() == "hello\n"
    assert at_once(rig, "unmount", rig.place).code == 0
    rig.wait_gone(second)


@pytest.mark.parametrize("command", [["umount"], ["umount", "-l"], ["lake", "unmount", "--lazy"]])
def test_a_mount_that_was_unmounted_by_any_command_leaves_its_place_free(rig: MountRig, command: list[str]) -> None:
    rig.mount()
    first = rig.pid
    before = rig.command if command[0] == "lake" else []
    with container(rig):
        assert rig.run(*before, *command[bool(before) :], rig.place).code == 0
        assert at_once(rig, "mount", rig.place).code == 0
    rig.wait_gone(first)
    assert rig.is_mounted


def test_a_file_that_is_open_in_a_lazily_unmounted_mount_keeps_no_new_mount_out(rig: MountRig) -> None:
    rig.mount()
    first = rig.pid
    with (rig.place / "hello").open("rb", buffering=0) as file:
        assert rig.lake("unmount", "--lazy", rig.place).code == 0
        assert at_once(rig, "mount", rig.place).code == 0
        assert file.read() == b"hello\n"
    rig.wait_gone(first)
    assert rig.is_mounted


def test_a_bind_mount_elsewhere_is_named_and_keeps_no_new_mount_out(rig: MountRig) -> None:
    if os.geteuid():
        pytest.skip("only root can make a bind mount")
    rig.mount()
    elsewhere = rig.folder / "elsewhere"
    elsewhere.mkdir()
    subprocess.run(["mount", "--bind", rig.place, elsewhere], check=True)
    first = rig.pid
    done = at_once(rig, "unmount", rig.place)
    assert (done.code, f"also mounted at {elsewhere}" in done.err) == (0, True)
    assert at_once(rig, "mount", rig.place).code == 0
    assert (elsewhere / "hello").read_text() == "hello\n"
    subprocess.run(["umount", elsewhere], check=True)
    rig.wait_gone(first)


def test_a_signal_ends_a_process_whose_mount_is_only_elsewhere_and_not_the_new_mount(rig: MountRig) -> None:
    rig.mount()
    first = rig.pid
    with container(rig) as other:
        assert at_once(rig, "unmount", rig.place).code == 0
        assert at_once(rig, "mount", rig.place).code == 0
        os.kill(first, signal.SIGTERM)
        rig.wait_gone(first)
        assert (rig.place / "hello").read_text() == "hello\n"
        with pytest.raises(OSError):
            os.listdir(f"/proc/{other.pid}/root{rig.place}")


def test_unmounting_in_a_namespace_that_only_shares_the_mount_does_not_wait_for_its_process(rig: MountRig) -> None:
    rig.mount()
    start = time.monotonic()
    done = rig.lake("unmount", rig.place, before=private_mounts("true"))
    assert time.monotonic() - start < AT_ONCE_S
    assert (done.code, rig.is_mounted) == (0, True)
    assert "mount namespace" in done.err


def test_a_mount_made_in_another_namespace_is_named_at_once_to_who_would_mount_here(rig: MountRig) -> None:
    with container(rig) as other:
        inside = ("nsenter", "-t", str(other.pid), "--mount", "--")
        assert rig.lake("mount", rig.place, before=inside).code == 0
        assert not rig.is_mounted
        start = time.monotonic()
        code, line = rig.refused(rig.place)
        assert time.monotonic() - start < AT_ONCE_S
        assert (code, f"mount namespace {namespace(other.pid)}" in line, "nsenter -t" in line) == (73, True, True)
        assert rig.lake("unmount", rig.place, before=inside).code == 0
    assert at_once(rig, "mount", rig.place).code == 0


def test_a_user_without_rights_hears_of_the_processes_though_not_of_the_namespace(rig: MountRig) -> None:
    rig.mount()
    entry = mount_at(rig.place)
    assert entry is not None
    look = "import sys; from fuse.kernel.holders import *; print(told(find_holders(sys.argv[1])))"
    with container(rig) as other:
        assert any(each.device == entry.device for each in mounts_seen_by(str(other.pid)))
        found = rig.run(*as_nobody(), rig.command[0], "-c", look, entry.device)
    assert found.code == 0, found.err
    here, there = found.text.rstrip("\n").split("; ")
    assert here == f"it is also mounted at {rig.place}"
    assert there == f"mount namespace of process {other.pid} (sleep)"


# --- what was written and is not stored -------------------------------------------------------------------


@pytest.fixture
def stored(served: Served) -> Iterator[MountRig]:
    """A mount point for a store, which has a bucket."""
    served("bucket", "create", "models")
    with mount_rig(LAKE, served.server) as made:
        yield made


WRITER = """
import os, sys
descriptor = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
os.write(descriptor, b"first\\n")
print("written", flush=True)
for line in sys.stdin:
    os.write(descriptor, line.encode())
os.close(descriptor)
"""


@contextmanager
def writer(rig: MountRig, name: str, *before: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process that has written to a new file, appends each line that it gets, and closes it at their end.

    Not this process: the children that it forks close what they inherit, which stores it.
    """
    process = subprocess.Popen(
        [*before, sys.executable, "-c", WRITER, str(rig.place / "models" / name)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "written\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def foreign_writer(rig: MountRig, name: str) -> Iterator[subprocess.Popen[str]]:
    """Run such a process in a mount namespace of its own."""
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("only root can make a mount namespace")
    with writer(rig, name, "unshare", "--mount", "--propagation", "private") as process:
        yield process


def staging_of(rig: MountRig) -> Path:
    """Return the staging folder of the place."""
    return rig.lock.parent / "staging"


def states(rig: MountRig) -> dict[str, str]:
    """Return the state of each staged file, as the command shows it."""
    done = rig.lake("staged", "ls", "--json", "--staging", staging_of(rig))
    assert done.code == 0, done
    return {each["name"]: each["state"] for each in json.loads(done.text)["staged"]}


def test_what_another_namespace_has_written_is_stored_at_its_close_beside_a_new_mount(
    stored: MountRig, served: Served
) -> None:
    stored.mount()
    first = stored.pid
    with foreign_writer(stored, "theirs") as theirs:
        done = at_once(stored, "unmount", stored.place)
        assert (done.code, f"process {theirs.pid} (python" in done.err) == (0, True)
        assert at_once(stored, "mount", stored.place).code == 0
        with writer(stored, "mine") as mine:
            assert states(stored) == {"models/theirs": "in use", "models/mine": "in use"}
            theirs.communicate("second\n", WAIT_S)
            stored.wait_gone(first)
            assert served.good("cat", "models/theirs").out == b"first\nsecond\n"
            assert (stored.place / "models" / "theirs").read_text() == "first\nsecond\n"
            mine.communicate("", WAIT_S)
    assert served.good("cat", "models/mine").out == b"first\n"
    assert at_once(stored, "unmount", stored.place).code == 0
    assert states(stored) == {}


def test_the_process_of_an_earlier_mount_that_is_killed_leaves_its_files_to_restore_and_the_new_mount_alone(
    stored: MountRig, served: Served
) -> None:
    stored.mount()
    first = stored.pid
    with foreign_writer(stored, "of-killed"):
        assert at_once(stored, "unmount", stored.place).code == 0
        stored.mount()
        with writer(stored, "of-next") as mine:
            os.kill(first, signal.SIGKILL)
            stored.wait_gone(first)
            assert states(stored) == {"models/of-killed": "ready", "models/of-next": "in use"}
            mine.communicate("second\n", WAIT_S)
    assert served.good("cat", "models/of-next").out == b"first\nsecond\n"
    assert at_once(stored, "unmount", stored.place).code == 0
    assert "1 file of an earlier mount could not be stored" in stored.mount().err
    assert stored.lake("staged", "restore", "--all", "--staging", staging_of(stored)).code == 0
    assert served.good("cat", "models/of-killed").out == b"first\n"


def test_a_new_mount_that_is_killed_beside_an_earlier_one_is_followed_by_a_third_that_tells_its_files(
    stored: MountRig, served: Served
) -> None:
    stored.mount()
    first = stored.pid
    with foreign_writer(stored, "of-first") as theirs:
        assert at_once(stored, "unmount", stored.place).code == 0
        stored.mount()
        second = stored.pid
        with writer(stored, "of-second"):
            os.kill(second, signal.SIGKILL)
            stored.wait_gone(second)
        assert "1 file of an earlier mount could not be stored" in stored.mount().err
        assert states(stored) == {"models/of-first": "in use", "models/of-second": "ready"}
        theirs.communicate("", WAIT_S)
        stored.wait_gone(first)
    assert served.good("cat", "models/of-first").out == b"first\n"
    assert stored.lake("unmount", stored.place).code == 0
    # Its folder is the first one again, and the file lies in another.
    assert "1 file of an earlier mount could not be stored" in stored.mount().err
    assert stored.log.count("name=models/of-second") == 2
    assert stored.lake("staged", "restore", "models/of-second", "--staging", staging_of(stored)).code == 0
    assert served.good("cat", "models/of-second").out == b"first\n"


def test_a_staging_folder_that_was_given_is_shared_by_processes_of_one_place_only(stored: MountRig) -> None:
    staging = stored.folder / "given"
    stored.mount("--staging", staging)
    with container(stored):
        assert at_once(stored, "unmount", stored.place).code == 0
        stored.mount("--staging", staging)
        assert (staging / "2" / "lock").read_text() == str(stored.place)
        other = stored.folder / "other"
        other.mkdir()
        refused = stored.lake("mount", "--staging", staging, other)
        assert (refused.code, "another mount's" in refused.err) == (75, True)
