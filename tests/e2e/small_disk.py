"""Small file systems of a test's own: a loop device with ext4, a tmpfs.  Without root the tests are skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MIB = 1 << 20


@contextmanager
def ext4(folder: Path, size_bytes: int, *options: str) -> Iterator[Path]:
    """Mount an ext4 file system on a loop device for the block, without room kept for root."""
    if not shutil.which("mkfs.ext4"):
        pytest.skip("mkfs.ext4 is not installed (package e2fsprogs)")
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(size_bytes)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, capture_output=True)
    with _mounted(folder / "disk", ["-o", ",".join(["loop", *options]), str(image)]) as disk:
        yield disk


@contextmanager
def tmpfs(folder: Path, size_bytes: int, inodes: int = 0) -> Iterator[Path]:
    """Mount a tmpfs for the block; `inodes`: most files that it holds, 0 for many."""
    options = f"size={size_bytes}" + (f",nr_inodes={inodes}" if inodes else "")
    with _mounted(folder / "tmpfs", ["-t", "tmpfs", "-o", options, "none"]) as disk:
        yield disk


def remount(disk: Path, option: str) -> None:
    """Remount a file system with an option: `ro`, `rw`."""
    subprocess.run(["mount", "-o", f"remount,{option}", str(disk)], check=True, capture_output=True)


def fill(path: Path) -> None:
    """Fill all the room there is, as another program would."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        for step in (MIB, 4096):
            try:
                while True:
                    os.write(descriptor, bytes(step))
            except OSError:
                continue
    finally:
        os.close(descriptor)


@contextmanager
def _mounted(place: Path, arguments: list[str]) -> Iterator[Path]:
    place.mkdir()
    done = subprocess.run(["mount", *arguments, str(place)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        # Lazily: an engine that a failing test has left running must not keep the test from ending.
        subprocess.run(["umount", "-l", str(place)], check=True)
