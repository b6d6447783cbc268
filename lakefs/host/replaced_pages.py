"""Puts other pages in the place of a part of a mapping: the addresses and the bytes stay, the memory is another.

For memory that another process has mapped too and may still write to: what it writes is seen by nobody any more.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Final

from lakefs.errors import LocalFileError
from lakefs.limits import PAGE_BYTES

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
)  # fmt: skip
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_MAYMOVE: Final = 1
_FIXED: Final = 2
_FAILED: Final = ctypes.c_void_p(-1).value


def replace_pages(mapping: memoryview, begin: int, end: int) -> None:
    """Replace the pages of [begin, end) of a writable mapping that begins a page.  LocalFileError.

    Nobody else may write to those pages meanwhile, but the process that is to be cut off.
    """
    first, length = begin // PAGE_BYTES * PAGE_BYTES, 0
    length = -(-end // PAGE_BYTES) * PAGE_BYTES - first
    if length <= 0:
        return
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping)) + first
    rights, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
    fresh = _libc.mmap(None, length, rights, kind, -1, 0)
    if fresh == _FAILED:
        raise _error()
    ctypes.memmove(fresh, address, min(length, len(mapping) - first))
    if _libc.mremap(fresh, length, length, _MAYMOVE | _FIXED, address) == _FAILED:
        failure = _error()
        _libc.munmap(ctypes.c_void_p(fresh), ctypes.c_size_t(length))
        raise failure


def _error() -> LocalFileError:
    return LocalFileError(f"the pages of memory cannot be replaced: {os.strerror(ctypes.get_errno())}")
