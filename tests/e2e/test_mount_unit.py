"""The unit of a mount: systemd accepts it, and others see the mount that it makes."""

from __future__ import annotations

import configparser
import subprocess
from pathlib import Path

import pytest

from fuse.kernel.attach import FIRST_ANSWER_WAIT_S, STOP_WAIT_S
from fuse.kernel.mount_lock import LOCK_WAIT_S
from tests.style.source_tree import ROOT

UNIT = ROOT / "systemd" / "lake-mount@.service"

# systemd.exec(5): each of these gives the service a mount namespace of its own, and a mount made in there is seen
# by nobody else.  A prefix stands for a family.
OWN_NAMESPACE = (
    "BindPaths", "BindReadOnlyPaths", "DynamicUser", "ExecPaths", "ExtensionDirectories", "ExtensionImages",
    "InaccessiblePaths", "LogNamespace", "MountAPIVFS", "MountFlags", "MountImages", "NetworkNamespacePath",
    "NoExecPaths", "Private", "ProcSubset", "Protect", "ReadOnlyPaths", "ReadWritePaths", "RootDirectory",
    "RootImage", "TemporaryFileSystem",
)  # fmt: skip


def directives(section: str) -> dict[str, str]:
    """Return one section of the unit."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNIT)
    return dict(parser[section])


def verified(folder: Path, text: str) -> str:
    """Return systemd's complaints about an instance of the unit; empty when nothing is wrong."""
    copy = folder / "lake-mount@mnt-a\\x2db.service"
    copy.write_text(text.replace("/opt/lake/bin/lake", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60
    )
    return done.stdout + done.stderr + ("" if done.returncode == 0 else f"exit code {done.returncode}")


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    assert verified(tmp_path, UNIT.read_text()) == ""


@pytest.mark.parametrize(("wrong", "said"), [("WatchdogSec=often", "often"), ("Typ=notify", "Typ")])
def test_a_wrong_directive_would_be_found(tmp_path: Path, wrong: str, said: str) -> None:
    assert said in verified(tmp_path, UNIT.read_text().replace("[Service]\n", f"[Service]\n{wrong}\n"))


def test_no_directive_hides_the_mount_from_others() -> None:
    assert [name for name in directives("Service") if name.startswith(OWN_NAMESPACE)] == []


def test_the_engine_s_unit_has_directives_that_would() -> None:
    engine = (ROOT / "systemd" / "lake-engine.service").read_text().splitlines()
    assert [line for line in engine if line.startswith(OWN_NAMESPACE)] != []


def test_the_unit_waits_for_the_mount_watches_it_and_lets_it_store_what_was_written() -> None:
    service = directives("Service")
    assert (service["Type"], service["KillSignal"], service["KillMode"]) == ("notify", "SIGTERM", "mixed")
    assert service["ExecStart"] == "/opt/lake/bin/lake mount --foreground -o retry=2 $LAKE_MOUNT_FLAGS -- %f"
    assert int(service["TimeoutStartSec"].removesuffix("min")) * 60 > 2 * 60 + LOCK_WAIT_S + FIRST_ANSWER_WAIT_S
    assert int(service["WatchdogSec"]) > 0
    assert int(service["TimeoutStopSec"]) >= STOP_WAIT_S + 10
    assert service["StateDirectory"] == "lake-mount"
