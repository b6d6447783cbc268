"""Mappings of shared memory that begin where a huge page does.

The kernel maps a huge page as one only where file and address are both at a multiple of its size; a mapping that begins
elsewhere is looked up page by page of 4 KiB, for each of which the processor has to find the address anew.

Of a file on reserved huge pages (hugetlbfs) the kernel maps whole ones, whatever length it is asked for, and unmaps
whole ones only: room for them is taken, or they would lie over what the process has behind it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
from typing import Final

from lakefs.limits import MIB

HUGE_BYTES: Final = 2 * MIB
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_FAILED: Final = ctypes.c_void_p(-1).value

_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
)  # fmt: skip
_mmap.restype = ctypes.c_void_p


def map_aligned(
    descriptor: int, length: int, flags: int = mmap.MAP_SHARED, protection: int = mmap.PROT_READ
) -> tuple[mmap.mmap, int]:
    """Map a descriptor from its beginning: the memory, and where in it the mapping begins.

    Less than a huge page is mapped anywhere.  OSError; ValueError: the file is shorter.  Closing the memory unmaps.
    The memory object is writable whatever `protection` says: hand out read-only views of what is not.
    """
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_size < length:
        raise ValueError(f"a mapping of {length} bytes is longer than its file")
    page = os.fstatvfs(descriptor).f_bsize  # of a file on huge pages: their size, of which it has whole ones
    length = max(length, min(-(-length // page) * page, status.st_size))
    if length < HUGE_BYTES:
        return mmap.mmap(descriptor, length, flags, protection), 0
    # A range of addresses that is ours as a whole; closing it unmaps what was put over it, too.
    around = mmap.mmap(-1, length + HUGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(around))
    lead = -address % HUGE_BYTES
    if _mmap(address + lead, length, protection, flags | _MAP_FIXED, descriptor, 0) in (None, _FAILED):
        error = ctypes.get_errno()
        around.close()
        raise OSError(error, os.strerror(error))
    return around, lead
