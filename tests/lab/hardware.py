"""Devices of the guest, made ready: modules, namespaces, file systems."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

WAIT_S: Final = 60.0


def shell(command: str) -> str:
    """Run a command of the shell, which must succeed; returns what it printed."""
    done = subprocess.run(["bash", "-ec", command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def load_modules(*names: str) -> None:
    """Load kernel modules."""
    for name in names:
        shell(f"modprobe -q {name}")


def wait_for(check: Callable[[], object], what: str) -> None:
    """Wait until the condition holds."""
    until = time.monotonic() + WAIT_S
    while not check():
        assert time.monotonic() < until, what
        time.sleep(0.1)


def found(pattern: str) -> Path:
    """Wait for a device of this name, and return the first."""
    wait_for(lambda: sorted(Path("/dev").glob(pattern)), f"there is no /dev/{pattern}")
    return min(Path("/dev").glob(pattern))


@contextmanager
def ext4_on(device: Path, place: Path, options: str = "defaults") -> Iterator[Path]:
    """Make an ext4 file system on a device, with blocks of a page, and mount it for the block."""
    shell(f"mkfs.ext4 -q -b 4096 {device}")
    place.mkdir()
    with mounted(device, place, options):
        yield place


@contextmanager
def mounted(device: Path, place: Path, options: str = "defaults") -> Iterator[Path]:
    """Mount a file system for the block."""
    shell(f"mount -t ext4 -o {options} {device} {place}")
    try:
        yield place
    finally:
        os.sync()
        subprocess.run(["umount", "-l", str(place)], check=False)
