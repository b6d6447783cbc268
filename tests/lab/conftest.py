"""Runs tests in the guest: one boot for all files whose markers name the same devices, or for a file, with xdist.

    pytestmark = pytest.mark.lab("nvme", "nvdimm")

Outside, a test's reports are those that pytest made in the guest; inside, tests run as anywhere.  Without QEMU they are
skipped, and fail in CI.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeAlias, cast

import pytest

from lab.machine import MADE, QEMU, Outcome, run

IS_GUEST: Final = "LAKE_LAB_GUEST" in os.environ
IS_CI: Final = bool(os.environ.get("CI"))
_REPORTS: Final = "/run/lab/reports"
_SECONDS: Final = 1150.0
_SHOWN: Final = 6_000
_IS_WORKER: Final = "PYTEST_XDIST_WORKER" in os.environ
"""True in a process of xdist, which has all tests and runs those of some files."""
_Boot: TypeAlias = tuple[tuple[str, ...], Path | None]
_reports: dict[_Boot, dict[str, list[pytest.TestReport]]] = {}
"""Reports from the guest, by boot (its devices, and with xdist its file) and test."""
_outcomes: dict[_Boot, Outcome] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Report what became of the test in the guest."""
    if IS_GUEST or item.get_closest_marker("lab") is None:
        return None
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports_of(item):
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write a report to where the machine outside finds it."""
    if IS_GUEST:
        with Path(_REPORTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(_config.hook.pytest_report_to_serializable(config=_config, report=report)) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the configuration: reports are written with it."""
    global _config
    _config = config


_config: pytest.Config


def _reports_of(item: pytest.Item) -> Iterator[pytest.TestReport]:
    missing = _missing()
    if missing:
        yield _report(item, missing, "failed" if IS_CI else "skipped")
        return
    devices = _devices(item)
    assert devices is not None, "it runs in the guest"
    path = item.path if _IS_WORKER else None
    boot = devices, path
    if boot not in _reports:
        _reports[boot] = _in_guest(item.session, item.config, devices, path)
    found = _reports[boot].get(item.nodeid, [])
    yield from found
    if not any(report.when == "teardown" for report in found):
        outcome = _outcomes[boot]
        yield _report(
            item,
            f"the guest ended with {outcome.code} and did not report this test\n"
            f"{outcome.output[-_SHOWN:]}\n--- console\n{outcome.console[-_SHOWN:]}",
            "failed",
        )


def _missing() -> str:
    if shutil.which(QEMU) is None:
        return f"there is no {QEMU}: run lab/setup"
    return "" if (MADE / "stamp").exists() else "the guest is not made: run lab/setup"


def _devices(item: pytest.Item) -> tuple[str, ...] | None:
    """Return the devices that a test names; None for one that needs no guest."""
    marker = item.get_closest_marker("lab")
    return None if marker is None else marker.args


def _in_guest(
    session: pytest.Session, config: pytest.Config, devices: tuple[str, ...], path: Path | None
) -> dict[str, list[pytest.TestReport]]:
    """Run all chosen tests that name these devices, or those of one file; return their reports."""
    wanted = [item for item in session.items if _devices(item) == devices]
    chosen = [item.nodeid for item in wanted if path is None or item.path == path]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "faulthandler_timeout=0"]
    # An interpreter in the guest starts on the processor's cold caches of an emulator: all in one process.
    command = shlex.join([sys.executable, "-m", "pytest", *options, *chosen])
    with TemporaryDirectory(prefix="lake-lab-") as name:
        folder = Path(name)
        outcome = run(command, devices, seconds=_SECONDS, folder=folder)
        lines = (folder / "reports").read_text().splitlines() if (folder / "reports").exists() else []
    _outcomes[devices, path] = outcome
    found: dict[str, list[pytest.TestReport]] = {}
    for line in lines:
        data: dict[str, Any] = json.loads(line)
        report: Any = config.hook.pytest_report_from_serializable(config=config, data=data)
        if report.outcome == "skipped" and isinstance(report.longrepr, list):
            report.longrepr = tuple(report.longrepr)  # JSON has no tuples
        found.setdefault(report.nodeid, []).append(report)
    return found


def _report(item: pytest.Item, text: str, outcome: str) -> pytest.TestReport:
    path, line, _ = item.location
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome=cast("Any", outcome),
        longrepr=(path, (line or 0) + 1, f"Skipped: {text}") if outcome == "skipped" else text,
        when="call",
    )
