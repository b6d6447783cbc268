"""Mounts on which every file is hot at its first open, and whether a handle of one passes through."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

from lakefs.limits import MIB
from tests.mount.mounts import LakeMounts, lake

SIZE: Final = 3 * MIB + 12_345
FORCED: Final = ("-o", "hot_forced")
FILLED: Final = "filled a hot file"


@contextmanager
def forced_mounts(*options: str, mounts: int = 1) -> Iterator[LakeMounts]:
    """Mount so.  Skips the test where the kernel or the user has no passthrough, which the mount then says."""
    with (
        TemporaryDirectory(prefix="lake-") as path,
        lake(Path(path), *FORCED, *options, mounts=mounts, any_way=False) as mounted,
    ):
        if found := re.search(r"no hot files.*", mounted.mounts[0].log.read_text()):
            pytest.skip(found.group())
        yield mounted


def asked(mounts: LakeMounts, number: int = 0) -> int:
    """Return how many bytes the mount's process was given to read and write: a read that passes through adds none."""
    text = Path(f"/proc/{mounts.mounts[number].process.pid}/io").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(("rchar", "wchar")))


def passes_through(mounts: LakeMounts, descriptor: int) -> bool:
    """Return True if reading the file through this descriptor asks the mount for nothing."""
    before = asked(mounts)
    size = os.fstat(descriptor).st_size
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    while os.pread(descriptor, 1 * MIB, max(0, size - 1 * MIB)) and (size := size - 1 * MIB) > 0:
        pass
    return asked(mounts) - before < 256 * 1024
