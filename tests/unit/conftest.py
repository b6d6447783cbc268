"""Fixtures that several unit tests share."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.host.local_disk import LocalDisk
from lakefs.ports import Disk
from tests.sim.world.disk import SimDisk


@pytest.fixture(params=["temporary folder", "tmpfs", "simulated"])
def any_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    """A disk of each kind, empty."""
    if request.param == "temporary folder":
        yield LocalDisk(tmp_path)
    elif request.param == "tmpfs":
        if not os.path.isdir("/dev/shm"):
            pytest.skip("no tmpfs here")
        folder = tempfile.mkdtemp(dir="/dev/shm")
        yield LocalDisk(Path(folder))
        shutil.rmtree(folder)
    else:
        yield SimDisk(1)
