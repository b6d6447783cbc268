"""Commits of a file, seen from outside: the versions that a bucket keeps; and a mapping without a descriptor."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lakefs.client.blocking.engine import BlockingEngine
from lakefs.wire.messages import ListedVersions, ListVersions
from tests.e2e.served import Served
from tests.mount.mounts import BUCKET

HALF: Final = b"half of it, "
REST: Final = b"and the rest"
Sizes = Callable[[Path], list[int]]
"""Gives the length of each version of a file in a folder of the bucket, the oldest first."""


def keep_versions(served: Served) -> None:
    """Have the bucket keep a version of each commit."""
    served.good("bucket", "set", BUCKET, "--versioning", "enabled")


def version_sizes(engine: BlockingEngine, path: Path) -> list[int]:
    """Return the length of each version of a file in a folder of the bucket, the oldest first."""
    listed = engine.call(ListVersions(BUCKET, f"{path.parent.name}/{path.name}")).message
    assert isinstance(listed, ListedVersions)
    return [entry.size_bytes for entry in reversed(listed.entries)]


class Mapped:
    """A shared mapping that writes.  It has no descriptor of its own, as one of the `mmap` module has."""

    def __init__(self, descriptor: int, length: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        address = libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
        assert address not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
        self._libc, self._address, self._length = libc, int(address), length

    def write(self, offset: int, data: bytes) -> None:
        """Write into the mapping."""
        ctypes.memmove(self._address + offset, data, len(data))

    def close(self) -> None:
        """End the mapping."""
        assert self._libc.munmap(self._address, self._length) == 0
