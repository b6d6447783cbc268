"""Asks if a range of a file is in the kernel's page cache: cachestat(2), which neither waits nor starts a read.

A read that must not wait (`RWF_NOWAIT`) would answer too; but on a miss the kernel begins to fetch the range, page by
page, and in the loop's time.  Where cachestat is missing (before Linux 6.5) or not allowed (the file is another
user's) the answer is None, and the caller has to try the read.
"""

from __future__ import annotations

import ctypes
from typing import Final

_CACHESTAT: Final = 451  # the same on every architecture
_PAGE: Final = 4096

_MEMORY_FILE_SYSTEMS: Final = frozenset({0x01021994, 0x858458F6})
"""Magic numbers of tmpfs and ramfs, as statfs(2) reports them."""

_libc = ctypes.CDLL(None)
_syscall = _libc.syscall
_syscall.argtypes = (ctypes.c_long, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
_syscall.restype = ctypes.c_long
_Asked = ctypes.c_uint64 * 7
"""Offset, length; then the answer: pages in the cache, dirty, in writeback, evicted, recently evicted."""
_COUNTS_AT: Final = 16


def is_cached(descriptor: int, offset: int, length: int) -> bool | None:
    """Return True if every page of [offset, offset + length) is cached; None if that cannot be determined."""
    asked = _Asked(offset, length)
    address = ctypes.addressof(asked)
    if _syscall(_CACHESTAT, descriptor, address, address + _COUNTS_AT, 0) != 0:
        return None
    pages = (offset + length - 1) // _PAGE - offset // _PAGE + 1
    return asked[2] >= pages


def is_written_out(descriptor: int, offset: int, length: int) -> bool:
    """Return True if no page of [offset, offset + length) waits to be written to the disk, or is being written.

    False too if that cannot be determined.
    """
    asked = _Asked(offset, length)
    address = ctypes.addressof(asked)
    return _syscall(_CACHESTAT, descriptor, address, address + _COUNTS_AT, 0) == 0 and asked[3] == asked[4] == 0


def is_in_memory(descriptor: int) -> bool:
    """Return True for a file on a file system without a disk: it refuses `RWF_NOWAIT`, and its reads wait for no
    disk."""
    buffer = (ctypes.c_long * 32)()
    found = _libc.fstatfs(descriptor, ctypes.byref(buffer)) == 0
    return found and buffer[0] & 0xFFFFFFFF in _MEMORY_FILE_SYSTEMS
