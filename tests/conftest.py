"""Settings for every test: Hypothesis keeps no clock, and mount tests need a kernel that has FUSE.

Nothing here is timed: a slow machine must not fail a test.
"""

from __future__ import annotations

import ctypes
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from cli.terminal import logs
from fuse.kernel.mount_point import all_mounts, answers, unmount
from lakefs.config.settings import CLIENT_VARIABLES, SETTING_NAMES
from tests.served_devices import DEVICES
from tests.style.source_tree import forget_trees

settings.register_profile("lake", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("lake"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "lake")

_TESTS = Path(__file__).parent
_TREES = _TESTS / "style"
"""Tests that all look at the syntax trees of all files."""
_THOROUGH = ("clients", "lab")
"""Folders of tests with clients of other people, and in a guest: all of them are left out of `make test`."""


def pytest_sessionstart(session: pytest.Session) -> None:
    """Remove the mounts of a run that was killed: pytest cannot remove their folders, and would fail for it."""
    if hasattr(session.config, "workerinput"):  # a worker of pytest-xdist: its controller has done this
        return
    earlier = Path(tempfile.gettempdir()).resolve()
    for entry in all_mounts():
        place = entry.mount_point
        if place.is_relative_to(earlier) and "pytest-of-" in str(place) and answers(place) is False:
            unmount(place, lazy=True)


def pytest_collection(session: pytest.Session) -> None:
    """Collect no garbage while tests are collected: nothing that it makes is garbage."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave the tests themselves out of what is looked at: each collection of garbage would take a second for them."""
    gc.freeze()
    gc.set_threshold(50_000)  # syntax trees and models are large, and alive
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out, too, what the tests of a file leave behind at its end: caches of what they have read, for one.

    At the beginning of the next file: nothing refers to what the last test used, such as stores and shared memory,
    which would be kept for ever if it was left out.  Free memory, which simulated disks leave in pieces, is given back.
    """
    if _File.last not in (None, item.path):
        if _TREES not in item.path.parents:
            forget_trees()
        gc.collect()
        gc.freeze()
        _give_back()
    _File.last = item.path


def _give_back() -> None:
    """Give free memory of the C library's heap back to the kernel, where the library has a call for that."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _File:
    last: Path | None = None
    """The file of the test that ran last."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that need more than `make setup`; skip mount tests where the kernel offers no FUSE device."""
    thorough = tuple(f"{_TESTS / folder}/" for folder in _THOROUGH)
    for item in items:
        if str(item.path).startswith(thorough):
            item.add_marker(pytest.mark.thorough)
        one_engine = item.get_closest_marker("one_engine")
        if one_engine is not None and DEVICES:
            item.add_marker(pytest.mark.skip(reason=f"one engine only: {one_engine.args[0]}"))
    if Path("/dev/fuse").exists():
        return
    no_device = pytest.mark.skip(reason="/dev/fuse is missing: load the fuse module or pass the device in")
    for item in items:
        if item.get_closest_marker("fuse"):
            item.add_marker(no_device)


@pytest.fixture(autouse=True)
def _no_long_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep pytest from comparing payloads line by line when an assertion fails: that takes hours, in CI too."""
    for name in ("CI", "BUILD_NUMBER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _no_lake_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the developer's own settings from the tests."""
    for name in (*CLIENT_VARIABLES, *(f"LAKE_{name.upper()}" for name in SETTING_NAMES)):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def unix(tmp_path: Path) -> str:
    """The address of a Unix socket that is not there yet."""
    return f"unix:{tmp_path}/socket"


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep commands that run in this process from logging: the log would be in the first test's output."""

    def dropped(*_: object) -> dict[str, Any]:
        raise structlog.DropEvent

    monkeypatch.setattr(logs, "log_to_stderr", lambda *_: None)
    structlog.configure(processors=[dropped], cache_logger_on_first_use=False)
    yield
    structlog.reset_defaults()
