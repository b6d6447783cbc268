"""Mounts of users that may not have hot files: they serve all the same, and the log says once why."""

from __future__ import annotations

import grp
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

from fuse.native import layer
from lakefs import connect
from lakefs.limits import MIB
from tests.e2e.served import ROOT, Served, environment, serving
from tests.mount.mounts import lake_mount_command
from tests.served_devices import DEVICES

pytestmark = [pytest.mark.slow, pytest.mark.fuse]
NOBODY: Final = 65534
WAIT_S: Final = 60
READS: Final = 40
ROOT_ONLY: Final = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user here")


def mounted_and_read(served: Served, folder: Path, *around: str, each: str = "") -> tuple[str, str]:
    """Mount, and read a file three times; return output and log.

    `around` is the command line that runs all of it, `each` the one that runs each command.
    """
    point, log = folder / "m", folder / "log"
    mount = " ".join(lake_mount_command(served.server, point, folder / "staging", "-o", "hot_forced"))
    script = f"""
        {each} {mount} > {log} 2>&1 &
        for wait in $(seq 300); do grep -q ^mounted {log} && break; sleep 0.1; done
        for time in 1 2 3; do {each} sha256sum {point}/bucket/x; done
        {each} dd if={point}/bucket/x of=/dev/null iflag=direct bs=4k count={READS} status=none
        kill $!; wait $!
    """
    done = subprocess.run(
        [*around, "bash", "-c", script],
        env=environment() | {"STATE_DIRECTORY": str(folder / "state"), "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, (done.stderr, log.read_text())
    return done.stdout, log.read_text()


@contextmanager
def _open_to_all(folder: Path) -> Iterator[None]:
    """Let other users look into a folder."""
    folder.chmod(0o755)
    yield


def checked(output: str, log: str, content: bytes, reason: str) -> None:
    """Check that each read was right, that native threads answered some, and that one line has the reason."""
    assert [line.split()[0] for line in output.splitlines()] == [hashlib.sha256(content).hexdigest()] * 3
    assert log.count("no hot files") == 1, log
    assert reason in next(line for line in log.splitlines() if "no hot files" in line)
    if layer.IS_BUILT and not DEVICES:  # native threads read segments
        native = re.search(r" reads=(\d+)", log)
        assert native is not None
        assert int(native[1]) >= READS - 1, "the first of them is Python's"


@ROOT_ONLY
def test_root_of_a_user_namespace_of_its_own_may_not() -> None:
    if subprocess.run(["unshare", "-U", "-r", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no user namespace can be made here")
    with TemporaryDirectory(prefix="lake-") as name, serving(Path(name)) as served, connect(served.server) as client:
        content = os.urandom(3 * MIB)
        client.create_bucket("bucket")
        client.put("bucket/x", content)
        (Path(name) / "m").mkdir()
        output, log = mounted_and_read(served, Path(name), "unshare", "-U", "-r", "-m")
        checked(output, log, content, "CAP_SYS_ADMIN in the first user namespace")
        assert "every request is answered in Python" not in log


@ROOT_ONLY
def test_a_user_without_capabilities_may_not() -> None:
    if shutil.which("fusermount3") is None or shutil.which("setpriv") is None:
        pytest.skip("fusermount3 and setpriv are needed")
    if not os.access("/dev/fuse", os.R_OK) or os.stat("/dev/fuse").st_mode & 0o006 != 0o006:
        pytest.skip("/dev/fuse is root's alone here")
    user = f"setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups"
    if subprocess.run([*user.split(), sys.executable, "-c", "import fuse"], cwd=ROOT, check=False).returncode:
        pytest.skip("other users cannot read this checkout")
    with (
        TemporaryDirectory(prefix="lake-") as name,
        _open_to_all(Path(name)),
        serving(Path(name), "--socket-group", grp.getgrgid(NOBODY).gr_name) as served,
        connect(served.server) as client,
    ):
        content = os.urandom(3 * MIB)
        client.create_bucket("bucket")
        client.put("bucket/x", content)
        folder = Path(name) / "nobody"
        (folder / "m").mkdir(parents=True)
        for path in (folder, folder / "m"):
            os.chown(path, NOBODY, NOBODY)
        output, log = mounted_and_read(served, folder, each=user)
        checked(output, log, content, "CAP_SYS_ADMIN")
