"""Mounts whose engine starts later, as at boot: they wait for it; the documented line of /etc/fstab outlasts that."""

from __future__ import annotations

import configparser
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.mount.fstab import RETRY_MINUTES
from fuse.kernel.attach import FIRST_ANSWER_WAIT_S
from fuse.kernel.mount_lock import LOCK_WAIT_S
from tests.e2e.mount_rig import MountRig, mount_rig
from tests.e2e.served import LAKE, ROOT, WAIT_S, Served

GENERATOR = Path("/usr/lib/systemd/system-generators/systemd-fstab-generator")
HELPER = [sys.executable, "-c", "from cli.mount_lake import main; main()"]


@pytest.fixture
def late(folder: Path) -> Iterator[Served]:
    """An engine that the test starts."""
    served = Served(folder, started=False)
    yield served
    if served.process is not None:
        served.stop()


@pytest.fixture
def rig(late: Served) -> Iterator[MountRig]:
    """A mount point for its store."""
    with mount_rig(LAKE, late.server) as made:
        yield made


def waiting(rig: MountRig, *command: str) -> subprocess.Popen[str]:
    """Start a mount without an engine, and return when it says that it waits."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=rig.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    assert "waiting for the engine" in line
    assert "no engine answers" in line
    return process


def documented_line() -> str:
    """Return the line of /etc/fstab in the documentation."""
    [line] = [
        line.strip() for line in (ROOT / "docs" / "mount.md").read_text().splitlines() if " lake  _netdev" in line
    ]
    return line.partition("#")[0].strip()


def documented_options() -> str:
    """Return the options of that line."""
    return documented_line().split()[3]


@pytest.mark.fuse
def test_the_helper_mounts_when_an_engine_that_starts_later_serves(rig: MountRig, late: Served) -> None:
    process = waiting(rig, *HELPER, late.server, str(rig.place), "-o", "rw,_netdev,nofail")
    late.start()
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out, err) == (0, "", "")
    assert rig.is_mounted
    late("bucket", "create", "models")
    assert os.listdir(rig.place) == ["models"]


@pytest.mark.fuse
def test_a_mount_of_the_unit_serves_when_an_engine_that_starts_later_does(rig: MountRig, late: Served) -> None:
    process = waiting(rig, *LAKE, "mount", "--foreground", "-o", "retry=2", str(rig.place))
    try:
        late.start()
        assert process.stdout is not None
        assert process.stdout.readline() == f"mounted {rig.place}\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait(WAIT_S)


@pytest.mark.fuse
def test_who_waits_keeps_no_other_mount_out_and_leaves_nothing_when_ended(rig: MountRig, late: Served) -> None:
    process = waiting(rig, *HELPER, f"unix:{rig.folder}/nobody", str(rig.place))
    late.start()
    rig.mount()
    process.terminate()
    process.communicate(timeout=WAIT_S)
    assert process.returncode == -signal.SIGTERM
    assert rig.is_mounted


@pytest.mark.parametrize("command", [[*LAKE, "mount"], [*HELPER, "lake", "-o", "retry=0"]])
def test_a_typed_mount_and_one_that_is_to_try_once_fail_at_once(rig: MountRig, command: list[str]) -> None:
    start = time.monotonic()
    done = rig.run(*command, rig.place)
    assert time.monotonic() - start < WAIT_S / 2
    assert (done.code, done.out) == (69, b"")
    [line] = done.err.splitlines()
    assert "no engine answers" in line


def test_the_documented_line_comes_after_the_engine_and_outlasts_the_wait(tmp_path: Path) -> None:
    if not GENERATOR.exists():
        pytest.skip("systemd-fstab-generator is not installed")
    (tmp_path / "fstab").write_text(documented_line() + "\n")
    units = tmp_path / "units"
    units.mkdir()
    env = os.environ | {"SYSTEMD_FSTAB": str(tmp_path / "fstab")}
    subprocess.run([GENERATOR, units, units, units], env=env, check=True, timeout=WAIT_S)
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.read(units / "lake.mount")
    assert parser["Unit"]["After"] == "lake-engine.service"
    assert parser["Unit"]["Requires"] == "lake-engine.service"
    minutes = int(parser["Mount"]["TimeoutSec"].removesuffix("min"))
    assert minutes * 60 > RETRY_MINUTES * 60 + LOCK_WAIT_S + FIRST_ANSWER_WAIT_S
    assert (units / "remote-fs.target.wants" / "lake.mount").is_symlink()
