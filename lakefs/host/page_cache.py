"""Whether the kernel's page cache has a range of a file: cachestat(2), which neither waits nor starts to read.

A read that must not wait (`RWF_NOWAIT`) would tell, too; but when it finds nothing the kernel begins to fetch what was
asked for, page by page, and in the loop's time.  Where the call is not offered (before Linux 6.5) or not allowed (the
file is another user's) nothing is known, and the read has to tell.
"""

from __future__ import annotations

import ctypes
from typing import Final

_CACHESTAT: Final = 451  # the same on every architecture
_PAGE: Final = 4096

_MEMORY_FILE_SYSTEMS: Final = frozenset({0x01021994, 0x858458F6})
"""Magic numbers of tmpfs and ramfs, as statfs(2) gives them."""

_libc = ctypes.CDLL(None)
_syscall = _libc.syscall
_syscall.argtypes = (ctypes.c_long, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
_syscall.restype = ctypes.c_long
_Asked = ctypes.c_uint64 * 7
"""Offset, length; then the answer: pages in the cache, dirty, written back, evicted, evicted of late."""
_COUNTS_AT: Final = 16


def is_cached(descriptor: int, offset: int, length: int) -> bool | None:
    """Whether every page of [offset, offset + length) is there; None when that cannot be known."""
    asked = _Asked(offset, length)
    address = ctypes.addressof(asked)
    if _syscall(_CACHESTAT, descriptor, address, address + _COUNTS_AT, 0) != 0:
        return None
    pages = (offset + length - 1) // _PAGE - offset // _PAGE + 1
    return asked[2] >= pages


def is_in_memory(descriptor: int) -> bool:
    """Whether the file is on a file system without a disk, which refuses `RWF_NOWAIT`: reads of it wait for none."""
    buffer = (ctypes.c_long * 32)()
    found = _libc.fstatfs(descriptor, ctypes.byref(buffer)) == 0
    return found and buffer[0] & 0xFFFFFFFF in _MEMORY_FILE_SYSTEMS
