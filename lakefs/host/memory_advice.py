"""Advice to the kernel about memory, without holding the interpreter's lock: reads files into the page cache,
allocates pages of mappings ahead.

`mmap.madvise` keeps the interpreter's lock while the kernel waits for the disk, so every other thread of the client
stops for as long.  A call through ctypes releases the lock.  `populate` maps a file, advises and unmaps it; it never
reads the bytes, so an I/O error, or a truncated file, is an error of the call and not a signal.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Final

_MADV_POPULATE_READ: Final = 22  # Linux 5.14; Python names it from 3.12 on
POPULATE_WRITE: Final = 23
"""MADV_POPULATE_WRITE, Linux 5.14: allocates all pages, or fails if there are not enough."""
COLLAPSE: Final = 25
"""MADV_COLLAPSE, Linux 6.1: moves present pages together into huge ones, whatever the system's setting."""
HUGE_BYTES: Final = 2 << 20
_FAILED: Final = ctypes.c_void_p(-1).value

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def populate(descriptor: int, offset: int, length: int) -> bool:
    """Read [offset, offset + length) of a file into the page cache; return True if all of it is cached.  Blocks, in
    any thread.

    Reads by several threads look random to the kernel, which then fills its cache page by page.  A mapping that asks
    for huge pages is read 2 MiB at a time, the next 2 MiB ahead, and only one page of each has to be requested.
    """
    begin = offset - offset % HUGE_BYTES
    size = offset + length - begin
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, begin)
    if address is None or address == _FAILED:
        return False
    try:
        _libc.madvise(address, size, mmap.MADV_HUGEPAGE)
        for start in range(0, size, HUGE_BYTES):
            first = max(start, offset - begin)
            page = first - first % mmap.PAGESIZE
            if _libc.madvise(address + page, mmap.PAGESIZE, _MADV_POPULATE_READ):
                return False
        return True
    finally:
        _libc.munmap(address, size)


def advise(mapping: mmap.mmap, advice: int, begin: int = 0, length: int | None = None) -> int:
    """Call madvise for a writable mapping, or a part of it; return 0 or the error's number.  Blocks, in any
    thread."""
    memory = ctypes.c_char.from_buffer(mapping)
    size = len(mapping) - begin if length is None else length
    try:
        failed = _libc.madvise(ctypes.addressof(memory) + begin, size, advice)
        return ctypes.get_errno() if failed else 0
    finally:
        del memory  # else the mapping cannot be closed


def want_huge_pages(memory: memoryview) -> None:
    """Advise the kernel to fill the whole pages of writable memory with huge ones; does nothing where it has none.

    For memory that was just allocated and is to be written whole.
    """
    start = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(start)
    del start  # else the memory cannot be released
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + len(memory)) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:
        _libc.madvise(begin, end - begin, mmap.MADV_HUGEPAGE)
