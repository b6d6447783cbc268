"""The beginning, life and end of a mount, with a tiny file system behind it, since no store matters here."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fuse.kernel.mount_lock import MountLock
from fuse.kernel.mount_point import mount_at
from tests.e2e.mount_rig import TINY_LAKE, MountRig, mount_rig, private_mounts
from tests.e2e.served import ROOT, WAIT_S

pytestmark = pytest.mark.fuse
DEAD = (errno.ENOTCONN, errno.ECONNABORTED)


@pytest.fixture
def rig() -> Iterator[MountRig]:
    """A mount point of the test's own."""
    with mount_rig() as made:
        yield made


# --- in the background ------------------------------------------------------------------------------------


def test_a_mount_command_returns_when_the_mount_serves(rig: MountRig) -> None:
    done = rig.mount()
    assert done.text == f"mounted {rig.place}\n"
    assert sorted(os.listdir(rig.place)) == ["broken", "forever", "hello", "slow"]
    assert (rig.place / "hello").read_text() == "hello\n"
    assert "serving" in rig.log


def test_unmount_waits_for_the_end_of_the_process(rig: MountRig) -> None:
    rig.mount()
    pid = rig.pid
    assert rig.lake("unmount", rig.place).code == 0
    assert not rig.is_mounted
    rig.wait_gone(pid)
    assert "ended" in rig.log
    assert os.listdir(rig.place) == []


def test_the_table_of_mounts_says_what_it_is_and_that_it_grants_no_rights(rig: MountRig) -> None:
    rig.mount("-o", "noatime,suid,dev")
    entry = mount_at(rig.place)
    assert entry is not None
    assert (entry.type, entry.source) == ("fuse.lake", "lake")
    [line] = [line for line in Path("/proc/mounts").read_text().splitlines() if str(rig.place) in line]
    options = line.split()[3].split(",")
    assert {"rw", "nosuid", "nodev", "noatime", "default_permissions"} <= set(options)
    assert "allow_other" not in options


def test_a_read_only_mount_is_one_for_the_kernel(rig: MountRig) -> None:
    rig.mount("--read-only")
    with pytest.raises(OSError, match="Read-only file system"):
        (rig.place / "new").touch()


def test_a_mount_point_with_blanks_links_and_dashes_is_found_again(rig: MountRig) -> None:
    rig.place = rig.folder / "a b-c\tü"
    rig.place.mkdir()
    link = rig.folder / "link"
    link.symlink_to(rig.place)
    assert rig.lake("mount", link).code == 0
    assert rig.is_mounted
    assert rig.lake("mount", rig.place).code == 73
    assert rig.lake("unmount", link).code == 0
    assert not rig.is_mounted


def test_the_process_holds_nothing_of_who_started_it(rig: MountRig) -> None:
    with (rig.folder / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        command = [*TINY_LAKE, "mount", str(rig.place)]
        subprocess.run(command, cwd=ROOT, env=rig.env, check=True, timeout=WAIT_S, close_fds=False)
    held = {os.readlink(path) for path in Path(f"/proc/{rig.pid}/fd").iterdir()}
    assert str(rig.folder / "open") not in held
    assert os.readlink(f"/proc/{rig.pid}/cwd") == "/"
    assert os.getsid(rig.pid) == rig.pid


# --- ends -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["fusermount3", "-u"], ["umount"], ["umount", "-l"]])
def test_unmounting_ends_the_process_with_zero(rig: MountRig, command: list[str]) -> None:
    process = rig.foreground()
    assert rig.run(*command, rig.place).code == 0
    assert process.end() == 0, process.log
    assert not rig.is_mounted


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_unmounts_and_ends_with_zero(rig: MountRig, number: int) -> None:
    process = rig.foreground()
    assert process.signal(number).end() == 0, process.log
    assert not rig.is_mounted


def test_a_mount_in_use_is_unmounted_lazily_and_says_so(rig: MountRig) -> None:
    process = rig.foreground()
    descriptor = os.open(rig.place / "hello", os.O_RDONLY)
    assert process.signal(signal.SIGTERM).end() == 0, process.log
    assert not rig.is_mounted
    assert "unmounted lazily" in process.log
    for attempt in (lambda: os.read(descriptor, 1), lambda: os.close(descriptor)):
        with pytest.raises(OSError) as caught:
            attempt()
        assert caught.value.errno in DEAD


def test_the_answer_of_a_request_under_way_arrives(rig: MountRig) -> None:
    process = rig.tiny()
    descriptor = os.open(rig.place / "slow", os.O_RDONLY)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(os.pread, descriptor, 6, 0)
        assert process.line() == "reading"
        process.signal(signal.SIGTERM)
        assert reading.result(WAIT_S) == b"hello\n"
        assert process.end() == 0, process.log
    with pytest.raises(OSError):
        os.close(descriptor)  # requests after the signal get no answer


def test_a_request_that_never_ends_does_not_keep_the_process(rig: MountRig) -> None:
    process = rig.tiny("hurry")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit((rig.place / "forever").read_bytes)
        assert process.line() == "reading"
        assert process.signal(signal.SIGTERM).end() == 0, process.log
        error = reading.exception(WAIT_S)
        assert isinstance(error, OSError)
        assert error.errno in DEAD
    assert "given up" in process.log


def test_a_second_signal_does_not_wait(rig: MountRig) -> None:
    process = rig.foreground()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit((rig.place / "forever").read_bytes)
        assert process.line() == "reading"
        process.signal(signal.SIGTERM)
        while rig.is_mounted:
            assert process.process.poll() is None
        assert process.signal(signal.SIGTERM).end() == 75
        assert isinstance(reading.exception(WAIT_S), OSError)


def test_an_error_that_escapes_a_handler_takes_the_mount_away_and_is_loud(rig: MountRig) -> None:
    process = rig.foreground()
    with pytest.raises(OSError):
        (rig.place / "broken").read_bytes()
    assert process.end() == 70
    assert not rig.is_mounted
    assert "an error that no handler may raise" in process.log


def test_a_connection_that_root_aborts_ends_the_process(rig: MountRig) -> None:
    process = rig.foreground()
    entry = mount_at(rig.place)
    assert entry is not None
    minor = entry.device.split(":")[1]
    control = "/sys/fs/fuse/connections"
    arranged = private_mounts(f"mountpoint -q {control} || mount -t fusectl none {control}")
    assert rig.run(*arranged, "sh", "-c", f"echo 1 > {control}/{minor}/abort").code == 0
    assert process.end() == 0, process.log
    assert not rig.is_mounted


def test_a_busy_mount_is_not_unmounted_unless_lazily(rig: MountRig) -> None:
    process = rig.foreground()
    with (rig.place / "hello").open("rb", buffering=0) as file:
        refused = rig.lake("unmount", rig.place)
        assert refused.code == 75, refused
        assert "in use" in refused.err
        assert file.read() == b"hello\n"
        assert rig.lake("unmount", "--lazy", rig.place).code == 0
        assert not rig.is_mounted
        assert file.read() == b""  # an open file stays readable
    assert process.end() == 0


# --- killed -----------------------------------------------------------------------------------------------


def test_readers_of_a_killed_mount_get_an_error_and_the_next_mount_cleans_up(rig: MountRig) -> None:
    process = rig.foreground()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit((rig.place / "forever").read_bytes)
        assert process.line() == "reading"
        process.signal(signal.SIGKILL)
        error = reading.exception(WAIT_S)
        assert isinstance(error, OSError)
        assert error.errno in DEAD
    process.end()
    with pytest.raises(OSError) as caught:
        os.listdir(rig.place)
    assert caught.value.errno in DEAD
    rig.mount()
    assert "took away a dead mount" in rig.log
    assert (rig.place / "hello").read_text() == "hello\n"
    assert rig.lake("unmount", rig.place).code == 0
    assert not rig.is_mounted, "the dead mount was still below"


@pytest.mark.parametrize("in_use", [False, True])
def test_unmount_takes_a_dead_mount_away(rig: MountRig, in_use: bool) -> None:
    process = rig.foreground()
    descriptor = os.open(rig.place, os.O_RDONLY)
    process.signal(signal.SIGKILL).end()
    if not in_use:
        os.close(descriptor)
    done = rig.lake("unmount", rig.place)
    assert (done.code, rig.is_mounted) == (0, False)
    assert ("had been killed" in done.err) is in_use
    if in_use:
        os.close(descriptor)


def test_unmount_of_dead_mounts_only_takes_no_other_away(rig: MountRig) -> None:
    assert rig.lake("unmount", "--dead", rig.place).code == 0
    process = rig.foreground()
    assert rig.lake("unmount", "--dead", rig.place).code == 0
    assert rig.is_mounted
    process.signal(signal.SIGKILL).end()
    assert rig.lake("unmount", "--dead", rig.place).code == 0
    assert not rig.is_mounted


# --- cannot begin -----------------------------------------------------------------------------------------


def test_a_mount_point_that_is_missing_is_told(rig: MountRig) -> None:
    code, line = rig.refused(rig.folder / "missing")
    assert (code, "does not exist" in line, "mkdir -p" in line) == (74, True, True)
    assert list(rig.state.glob("*missing*")) == []


def test_a_mount_point_that_is_a_file_is_told(rig: MountRig) -> None:
    (rig.folder / "file").touch()
    code, line = rig.refused(rig.folder / "file")
    assert (code, "is not a folder" in line) == (73, True)


def test_a_mount_point_that_holds_something_is_refused_unless_told_otherwise(rig: MountRig) -> None:
    (rig.place / "precious").touch()
    code, line = rig.refused(rig.place)
    assert (code, "'precious'" in line, "nonempty" in line) == (73, True, True)
    rig.mount("-o", "nonempty")
    assert "precious" not in os.listdir(rig.place)
    assert rig.lake("unmount", rig.place).code == 0
    assert os.listdir(rig.place) == ["precious"]


def test_a_mount_of_ours_is_not_mounted_over(rig: MountRig) -> None:
    rig.mount()
    code, line = rig.refused(rig.place)
    assert (code, "already" in line, f"lake unmount {rig.place}" in line) == (73, True, True)


def test_a_mount_of_another_is_neither_mounted_over_nor_unmounted(rig: MountRig) -> None:
    if os.geteuid():
        pytest.skip("only root can mount a tmpfs")
    subprocess.run(["mount", "-t", "tmpfs", "other", str(rig.place)], check=True)
    code, line = rig.refused(rig.place)
    assert (code, "tmpfs" in line) == (73, True)
    done = rig.lake("unmount", rig.place)
    assert (done.code, "not of a lake" in done.err) == (2, True)
    assert rig.is_mounted


def test_unmounting_where_nothing_is_mounted_is_told(rig: MountRig) -> None:
    done = rig.lake("unmount", rig.place)
    assert (done.code, "nothing is mounted" in done.err) == (74, True)


def test_of_two_that_mount_at_once_one_is_refused(rig: MountRig) -> None:
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda _: rig.lake("mount", rig.place), range(2)))
    assert sorted(each.code for each in done) == [0, 73], done
    assert rig.lake("unmount", rig.place).code == 0
    assert not rig.is_mounted


def test_a_mount_waits_for_the_one_before_that_is_still_storing(rig: MountRig) -> None:
    rig.mount()
    assert rig.lake("unmount", rig.place).code == 0
    with MountLock(rig.lock) as held:
        held.take(rig.place)
        waiting = rig.begin("mount", rig.place)
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(1)
    assert waiting.wait(WAIT_S) == 0
    assert rig.is_mounted


def test_an_interrupted_mount_command_leaves_no_mount(rig: MountRig) -> None:
    rig.mount()
    assert rig.lake("unmount", rig.place).code == 0
    with MountLock(rig.lock) as held:
        held.take(rig.place)  # the command still waits
        waiting = rig.begin("mount", rig.place)
        rig.wait_for_child(waiting)
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(WAIT_S) == 130
    with MountLock(rig.lock) as free:
        free.wait_free(rig.place)
    assert not rig.is_mounted


def test_a_mount_whose_command_was_killed_ends_when_it_would_serve(rig: MountRig) -> None:
    rig.mount()
    assert rig.lake("unmount", rig.place).code == 0
    assert rig.log.count("serving") == 1
    with MountLock(rig.lock) as held:
        held.take(rig.place)
        waiting = rig.begin("mount", rig.place)
        child = rig.wait_for_child(waiting)
        waiting.kill()
        waiting.wait(WAIT_S)
    # It ends at once, or when it has mounted and finds that nobody waits for its message.
    rig.wait_for(lambda: not Path(f"/proc/{child}").exists())
    with MountLock(rig.lock) as free:
        free.wait_free(rig.place)
    assert not rig.is_mounted


def test_a_setting_s_file_may_be_named_relative_to_where_the_command_is_given(rig: MountRig) -> None:
    (rig.folder / "lake.toml").write_text('log_level = "warning"\n')
    rig.env["LAKE_CONFIG"] = os.path.relpath(rig.folder / "lake.toml", ROOT)
    rig.mount()
    assert "serving" not in rig.log


@pytest.mark.parametrize(
    ("server", "code", "words"),
    [
        ("unix:/tiny/refuse", 69, "nobody serves at unix:/tiny/refuse"),
        ("unix:/tiny/crash", 70, "ended with exit code 70 before it served; its log: "),
        ("unix:/tiny/killed", 70, "ended with signal 9 before it served; its log: "),
    ],
)
def test_what_keeps_the_process_from_serving_is_the_command_s_error(
    rig: MountRig, server: str, code: int, words: str
) -> None:
    done = rig.lake("mount", rig.place, server=server)
    assert (done.code, done.out) == (code, b"")
    assert words in done.err
    assert not rig.is_mounted


def test_an_option_that_nobody_knows_is_refused_with_the_nearest(rig: MountRig) -> None:
    code, line = rig.refused("-o", "ro,allow_othr", rig.place)
    assert (code, "'allow_other'" in line) == (2, True)


def test_printing_every_request_needs_the_foreground(rig: MountRig) -> None:
    code, line = rig.refused("-o", "debug", rig.place)
    assert (code, "--foreground" in line) == (2, True)


def test_staging_below_the_mount_point_is_refused(rig: MountRig) -> None:
    code, line = rig.refused("--staging", rig.place / "staged", rig.place)
    assert (code, "below the mount point" in line) == (2, True)


def test_a_store_that_this_process_would_open_is_refused(rig: MountRig) -> None:
    code, line = rig.refused("--data", rig.folder / "store", rig.place)
    assert (code, "--server" in line) == (2, True)
