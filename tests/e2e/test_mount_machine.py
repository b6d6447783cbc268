"""A mount on machines that lack something, for users without rights, and with mount(8) and a service manager."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuse.kernel.mount_point import mount_at
from tests.e2e.mount_rig import NOBODY, TINY_LAKE, MountRig, as_nobody, mount_rig, private_mounts
from tests.e2e.served import ROOT, WAIT_S

pytestmark = [pytest.mark.fuse, pytest.mark.thorough]


@pytest.fixture
def rig() -> Iterator[MountRig]:
    """A mount point of the test's own."""
    with mount_rig() as made:
        yield made


# --- the machine's part -----------------------------------------------------------------------------------


def own_dev(folder: Path, fuse_mode: int | None) -> str:
    """Return a script that puts a /dev of its own in place, with or without the fuse device."""
    dev = folder / "dev"
    lines = [f"mkdir {dev}", f"mount -t tmpfs -o mode=755 none {dev}"]
    lines += [f"cp -a /dev/{name} {dev}" for name in ("null", "urandom")]
    if fuse_mode is not None:
        lines += [f"mknod {dev}/fuse c 10 229", f"chmod {fuse_mode:o} {dev}/fuse"]
    return "\n".join([*lines, f"mount --move {dev} /dev"])


def nobodys(rig: MountRig) -> None:
    """Give the mount point and its state folder to the user without rights."""
    rig.state.mkdir()
    for path in (rig.place, rig.state):
        os.chown(path, NOBODY, NOBODY)


def test_a_machine_without_the_fuse_device_is_told_what_to_do(rig: MountRig) -> None:
    code, line = rig.refused(rig.place, before=private_mounts(own_dev(rig.folder, None)))
    assert (code, "/dev/fuse is missing" in line, "modprobe fuse" in line) == (74, True, True)


def test_a_user_who_may_not_open_the_device_is_told(rig: MountRig) -> None:
    nobodys(rig)
    before = (*private_mounts(own_dev(rig.folder, 0o600)), *as_nobody())
    code, line = rig.refused(rig.place, before=before)
    assert (code, "/dev/fuse may not be opened" in line) == (77, True)


def test_a_user_without_rights_on_the_mount_point_is_told(rig: MountRig) -> None:
    nobodys(rig)
    os.chown(rig.place, 0, 0)
    before = (*private_mounts(own_dev(rig.folder, 0o666)), *as_nobody())
    code, line = rig.refused(rig.place, before=before)
    assert (code, "must belong to the user who mounts" in line) == (77, True)


def test_allow_other_that_the_machine_does_not_allow_is_told(rig: MountRig) -> None:
    nobodys(rig)
    script = f"{own_dev(rig.folder, 0o666)}\nmount --bind /dev/null /etc/fuse.conf"
    code, line = rig.refused("--allow-other", rig.place, before=(*private_mounts(script), *as_nobody()))
    assert (code, "user_allow_other" in line, "/etc/fuse.conf" in line) == (77, True, True)


def test_a_machine_without_fusermount3_is_told_what_to_install(rig: MountRig) -> None:
    tool = shutil.which("fusermount3")
    assert tool is not None
    nobodys(rig)
    script = f"{own_dev(rig.folder, 0o666)}\nmount --bind /dev/null {os.path.realpath(tool)}"
    code, line = rig.refused(rig.place, before=(*private_mounts(script), *as_nobody()))
    assert (code, "fusermount3 is missing" in line) == (74, True)


def test_a_user_without_rights_mounts_unmounts_and_is_told_of_slow_reads(rig: MountRig) -> None:
    nobodys(rig)
    nobody, lake = " ".join(as_nobody()), " ".join(TINY_LAKE)
    script = f"""
        {nobody} {lake} mount {rig.place}
        {nobody} cat {rig.place}/hello
        {nobody} {lake} unmount {rig.place}
        {nobody} ls -A {rig.place}
    """
    done = rig.run(*private_mounts(own_dev(rig.folder, 0o666)), "sh", "-ec", script)
    assert (done.code, done.text, done.err) == (0, f"mounted {rig.place}\nhello\n", "")
    assert rig.log.count("about 5 times slower") == 1


def test_the_kernel_reads_ahead_as_far_as_told(rig: MountRig) -> None:
    if os.geteuid():
        pytest.skip("only root may set the kernel's read-ahead")
    rig.mount("--read-ahead", "2048")
    entry = mount_at(rig.place)
    assert entry is not None
    assert Path(f"/sys/class/bdi/{entry.device}/read_ahead_kb").read_text() == "2048\n"


# --- mount(8), the service manager ------------------------------------------------------------------------


def installed(rig: MountRig, tool: str, module: str, folder: str) -> str:
    """Return a script that puts a tool into a system folder, seen only in a mount namespace of its own."""
    layer = rig.folder / f"layer-{tool}"
    layer.mkdir()
    script = rig.folder / tool
    script.write_text(f'#!/bin/sh\ncd {ROOT}\nexec {TINY_LAKE[0]} -m {module} "$@"\n')
    script.chmod(0o755)
    return f"""
        mount -t tmpfs none {layer}; mkdir {layer}/up {layer}/work; cp {script} {layer}/up
        mount -t overlay -o lowerdir={folder},upperdir={layer}/up,workdir={layer}/work none {folder}
    """


def test_mount_8_calls_our_helper_and_an_fstab_line_is_mounted_once(rig: MountRig) -> None:
    place, fstab = rig.place, rig.folder / "fstab"
    fstab.write_text(f"lake {place} lake defaults,_netdev,nofail,user,exec,bucket=models 0 0\n")
    script = f"""
        mount -t lake lake {place}; cat {place}/hello; umount {place}
        mount -a -T {fstab}; mount -a -T {fstab}; grep -c {place} /proc/mounts; umount {place}
        mount -t lake -o ro unix:/tiny/engine {place}; grep {place} /proc/mounts; umount {place}
        mount -f -t lake lake {place}; ls -A {place}
        ! mount -t lake nonsense {place}
    """
    arranged = private_mounts(installed(rig, "mount.lake", "tests.e2e.tiny_mount_helper", os.path.realpath("/sbin")))
    done = rig.run(*arranged, "sh", "-exc", script)
    assert done.code == 0, done.err
    hello, count, table = done.lines
    assert (hello, count) == ("hello", "1")
    assert table.startswith(f"unix:/tiny/engine {place} fuse.lake ro,nosuid,nodev,")
    assert "'nonsense' is no source of a lake mount" in done.err


def test_mount_8_without_our_helper_finds_lake_through_mount_fuse(rig: MountRig) -> None:
    if not shutil.which("mount.fuse3"):
        pytest.skip("mount.fuse3 is not installed (package fuse3)")
    place = rig.place
    script = f"""
        mount -t fuse.lake lake {place}; cat {place}/hello; umount {place}
        mount -t fuse.lake -o ro,bucket=models unix:/tiny/engine {place}; grep {place} /proc/mounts; umount {place}
        mount -t fuse 'lake#' {place}; cat {place}/hello; umount {place}
        ! mount -t fuse.lake nonsense {place}
    """
    # mount(8) passes no PATH on: the shell's own one counts.
    arranged = private_mounts(installed(rig, "lake", "tests.e2e.tiny_lake", "/usr/local/bin"))
    done = rig.run(*arranged, "sh", "-exc", script)
    assert done.code == 0, done.err
    hello, table, hello_again = done.lines
    assert (hello, hello_again) == ("hello", "hello")
    assert table.startswith(f"unix:/tiny/engine {place} fuse.lake ro,nosuid,nodev,")
    assert "'nonsense' is no source of a lake mount" in done.err


def test_the_manager_hears_of_start_and_stop(rig: MountRig) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(rig.folder / "notify"))
        manager.settimeout(WAIT_S)
        watched = {"NOTIFY_SOCKET": str(rig.folder / "notify"), "WATCHDOG_USEC": "2000000"}
        process = rig.foreground(env=watched)
        heard: set[bytes] = set()
        while len(heard) < 2:
            heard.add(manager.recv(1000))
        assert heard == {b"WATCHDOG=1", b"READY=1\nSTATUS=mounted " + os.fsencode(rig.place)}
        process.signal(signal.SIGTERM)
        while (said := manager.recv(1000)) == b"WATCHDOG=1":
            continue
        assert said == b"STOPPING=1\nSTATUS=storing what was written"
        assert process.end() == 0
