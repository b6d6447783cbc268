"""Kinds of disks for the contract suite: real folders, folders in memory, simulated and mirrored ones."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.host.local_disk import LocalDisk
from engine.mirror.copy_calls import AtOnce
from engine.mirror.mirror_opening import make_mirror, open_mirror
from lakefs.ports import Disk
from tests.sim.world.disk import SimDisk

_MIRRORED = {
    "mirrored, 1 copy": 1,
    "mirrored, 2 copies": 2,
    "mirrored, 3 copies": 3,
    "mirrored, 1 of 2 copies lost": 2,
    "mirrored, waiting 60 s for a copy": 2,
}
"""Number of copies by kind."""
KINDS = ("local", "tmpfs", "simulated", "simulated without O_DIRECT", *_MIRRORED)


@contextmanager
def disk_of(kind: str, root: Path) -> Iterator[Disk]:
    """Yield a disk of that kind; what is real of it lies below `root`, or in memory."""
    if kind == "local":
        yield LocalDisk(root)
    elif kind == "tmpfs":
        if not os.path.isdir("/dev/shm"):
            pytest.skip("no tmpfs here")
        folder = tempfile.mkdtemp(dir="/dev/shm")
        yield LocalDisk(Path(folder))
        shutil.rmtree(folder)
    elif kind in _MIRRORED:
        with _mirrored_disk(kind, root) as disk:
            yield disk
    else:
        yield SimDisk(1, supports_direct=kind == "simulated")


@contextmanager
def _mirrored_disk(kind: str, root: Path) -> Iterator[Disk]:
    """Yield a mirror of real folders.  A copy that is lost is lost when it is open, and the first change finds it."""
    disks = {f"device-{number}": LocalDisk(root / str(number)) for number in range(_MIRRORED[kind])}
    make_mirror(disks)
    disk = open_mirror(disks, AtOnce(60.0 if "waiting" in kind else None))
    if "lost" in kind:
        (root / "0").rename(root / "gone")
    yield disk
    disk.close()
