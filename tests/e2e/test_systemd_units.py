"""The units of the engine and the gateway: systemd accepts them."""

from __future__ import annotations

import configparser
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cli.serve.gateway_process import DRAIN_TIMEOUT_S
from tests.e2e.served import Served
from tests.style.source_tree import ROOT

UNIT = ROOT / "systemd" / "lake-engine.service"
GATEWAY = ROOT / "systemd" / "lake-gateway.service"


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _directives(section: str, unit: Path = UNIT) -> dict[str, str]:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(unit)
    return dict(parser[section])


@pytest.fixture(params=[UNIT, GATEWAY], ids=lambda path: path.name)
def unit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A unit whose command exists here."""
    original: Path = request.param
    copy = tmp_path / original.name
    copy.write_text(original.read_text().replace("/opt/lake/bin/lake", sys.executable))
    return copy


def test_systemd_finds_nothing_wrong_with_the_unit(unit: Path) -> None:
    verified = _run("systemd-analyze", "verify", "--man=no", str(unit))
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")


def test_a_wrong_directive_would_be_found(unit: Path) -> None:
    unit.write_text(unit.read_text().replace("ProtectHome=yes", "ProtectHomes=yes"))
    assert "ProtectHomes" in _run("systemd-analyze", "verify", "--man=no", str(unit)).stderr


def test_the_unit_s_exposure_is_at_most_three(unit: Path) -> None:
    judged = _run("systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=30", str(unit))
    assert judged.returncode == 0, judged.stdout[-300:]
    assert "Overall exposure level" in judged.stdout


def test_an_unhardened_unit_would_be_found(unit: Path) -> None:
    bare = [line for line in unit.read_text().splitlines() if not line.startswith(("Protect", "Restrict", "System"))]
    unit.write_text("\n".join(bare))
    assert _run("systemd-analyze", "security", "--offline=true", "--threshold=30", str(unit)).returncode != 0


def test_the_unit_waits_watches_and_drains() -> None:
    service = _directives("Service")
    assert service["Type"] == "notify"
    assert int(service["WatchdogSec"]) > 0
    assert (service["KillSignal"], service["User"]) == ("SIGTERM", "lake")
    assert (service["StateDirectory"], service["RuntimeDirectory"]) == ("lake", "lake")
    assert service["ExecStart"].endswith("/lake serve")


def test_the_gateway_s_unit_reloads_and_waits_for_its_drain() -> None:
    service = _directives("Service", GATEWAY)
    assert service["Type"] == "notify"
    assert service["ExecStart"] == "/opt/lake/bin/lake gateway $LAKE_GATEWAY_FLAGS"
    assert "-HUP" in service["ExecReload"]
    assert int(service["TimeoutStopSec"]) >= DRAIN_TIMEOUT_S + 20
    assert (service["KillSignal"], service["KillMode"], service["User"]) == ("SIGTERM", "mixed", "lake")


def test_the_user_can_be_made() -> None:
    planned = _run("systemd-sysusers", "--dry-run", str(ROOT / "systemd/sysusers.d/lake.conf"))
    assert planned.returncode == 0, planned.stderr
    assert "lake" in planned.stdout + planned.stderr


def test_the_folders_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "passwd").write_text("root:x:0:0:::\nlake:x:0:0:::\n")
    (tmp_path / "etc" / "group").write_text("root:x:0:\nlake:x:0:\n")
    made = _run("systemd-tmpfiles", "--create", f"--root={tmp_path}", str(ROOT / "systemd/tmpfiles.d/lake.conf"))
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "var/lib/lake").stat().st_mode & 0o777 == 0o700


def test_the_manager_hears_of_start_life_and_stop(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(folder / "notify"))
        manager.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(folder / "notify"))
        served = Served(folder)
        assert manager.recv(1000).startswith(b"READY=1\nSTATUS=serving ")
        assert manager.recv(1000) == b"WATCHDOG=1"
        assert served.stop() == 0
        assert manager.recv(1000) == b"STOPPING=1\nSTATUS=finishing what is in flight"
