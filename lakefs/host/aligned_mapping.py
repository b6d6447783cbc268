"""Mappings of shared memory that begin at a huge page.

The kernel maps a huge page as one only if file offset and address are both multiples of its size.  Any other mapping
uses pages of 4 KiB, and the processor has to look up the address of each.

For a file on reserved huge pages (hugetlbfs) the kernel maps and unmaps whole ones only, whatever length is
requested.  This module reserves addresses for whole pages; otherwise the mapping would cover other mappings of the
process.
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
    """Map a descriptor from its beginning; return the memory, and the offset in it at which the mapping begins.

    Less than a huge page is mapped at any address.  OSError; ValueError if the file is shorter.  Closing the
    memory unmaps. The memory object is writable whatever `protection` says: hand out read-only views of a
    read-only mapping.
    """
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_size < length:
        raise ValueError(f"a mapping of {length} bytes is longer than its file")
    page = os.fstatvfs(descriptor).f_bsize  # a file on huge pages: their size; the file has whole ones
    length = max(length, min(-(-length // page) * page, status.st_size))
    if length < HUGE_BYTES:
        return mmap.mmap(descriptor, length, flags, protection), 0
    # A private range of addresses. Closing it also unmaps what was mapped over it.
    around = mmap.mmap(-1, length + HUGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(around))
    lead = -address % HUGE_BYTES
    if _mmap(address + lead, length, protection, flags | _MAP_FIXED, descriptor, 0) in (None, _FAILED):
        error = ctypes.get_errno()
        around.close()
        raise OSError(error, os.strerror(error))
    return around, lead
